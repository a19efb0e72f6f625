"""What a chain's value will cost, from shapes alone, and the road that is taken for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from arraylogchain._fold import Shape
from arraylogchain._text import amount

# Seconds: of one step's handful of array operations on little data; for one entry of a state in
# elementwise operations; for one multiply-add. Rough figures of a CPU core; they only pick a route.
_STEP = 2e-5
_ENTRY = 5e-9
_MULTIPLY_ADD = 4e-11
_SMALL_MATRIX = 5e-7

# Steps of guessed segments: enough for most chains to forget what they began with. Rows that make
# the best use of an operation. Passes over a chain that guessing takes, verification included.
_GUESSED_LENGTH, _GUESSED_ROWS, _GUESSED_PASSES = 64, 4096, 2.5

# Seconds of a step on a CUDA device: within a kernel, and as array operations of a few microseconds
# each. Estimates, not measured; they only tell when long chains are better cut.
_KERNEL_STEP, _DEVICE_STEP = 3e-6, 2e-4

# Rows of different lengths that may be computed one by one.
_MOST_ALONE = 64


class Segments(NamedTuple):
    """Numbers of segments that time is cut into, 1 for none.

    `guessed` if what enters each one is guessed; `multiplied` if guesses fail, and their products
    are taken.
    """

    guessed: int
    multiplied: int


_ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True)
class Plan:
    """How `LogChain.log_partition` computes, and what that takes.

    Attributes
    ----------
    batch : tuple of int
    steps, states : int
        T and K.
    dtype : str
    route : str
        'vector': one state after another, all rows at once. 'segments': time is cut, and the
        segments are computed side by side; what enters them is guessed and verified, or follows
        from their products. 'rows': rows of different lengths one by one, each in segments of its
        own. 'kernel': one state after another, on chip, by a CUDA kernel.
    segments : Segments
        Numbers of segments, 1 for 'vector'; for 'rows' those of the longest one; for 'kernel' those
        of what there is no kernel for.
    flops : int
        Multiplications and additions, and exponentials.
    bytes_read, bytes_written : int
        Inputs and output.
    workspace : int
        Bytes that bound the temporaries.
    pairwise_bytes : int
        What multiplying expanded matrices in neighbouring pairs would hold at once; see
        `pairwise_bytes`.
    """

    batch: Shape
    steps: int
    states: int
    dtype: str
    route: str
    segments: Segments
    flops: int
    bytes_read: int
    bytes_written: int
    workspace: int
    pairwise_bytes: int

    def __str__(self) -> str:
        rows = math.prod(self.batch)
        route = {
            "vector": f"vector: {self.steps} states of [{rows}, {self.states}], one after another",
            "segments": f"segments: {self._pieces()}",
            "rows": f"rows: one by one, in up to {self._pieces()}",
            "kernel": f"kernel: {self.steps} states of [{rows}, {self.states}], on chip",
        }[self.route]
        lines = [
            ("chain", f"{rows} rows, {self.steps} steps, {self.states} states, {self.dtype}"),
            ("route", route),
            ("operations", f"{self.flops:.3g} FLOP"),
            ("read", amount(self.bytes_read)),
            ("written", amount(self.bytes_written)),
            ("workspace", f"at most {amount(self.workspace)}"),
            (
                "instead of",
                f"{amount(self.pairwise_bytes)} for expanded matrices multiplied in pairs, "
                "the forum's way",
            ),
        ]
        return "\n".join(f"{name:<12}{text}" for name, text in lines)

    def _pieces(self) -> str:
        guessed, multiplied = self.segments
        of_products = f"{multiplied} as {self.states} x {self.states} products"
        if guessed == 1:
            return f"pieces of time side by side, {of_products}"
        otherwise = "one after another" if multiplied == 1 else of_products
        return f"{guessed} pieces of time side by side, from verified guesses (else {otherwise})"


def plan_chain(
    *,
    batch: Shape,
    count: int,
    size: int,
    sizes: tuple[int, int],
    one_matrix: bool,
    lengths: np.ndarray | None,
    read: int,
    dtype: str,
    workspace: int,
    has_kernel: bool = False,
) -> Plan:
    """Choose the route for a chain of `count` states of `size` entries.

    Parameters
    ----------
    sizes : tuple of int
        Numbers of groups with matrices of their own, and of rows in each.
    one_matrix : bool
        Whether all steps have the same matrix.
    read : int
        Elements of the inputs.
    has_kernel : bool
        Whether there is a CUDA kernel for such a chain, on the device that its arrays are on.
    """
    rows = math.prod(batch)
    route, segments = "vector", Segments(1, 1)
    if lengths is None:
        segments = best_segments(count, size, sizes, one_matrix, workspace)
        route = "vector" if max(segments) == 1 else "segments"
    elif _are_better_alone(np.broadcast_to(lengths, batch), size, one_matrix, workspace):
        segments = best_segments(int(lengths.max()), size, (1, 1), one_matrix, workspace)
        route = "rows"
    if has_kernel and not _are_better_cut(count, segments):
        route = "kernel"
    # A product's rows are all the states that its segment can start from.
    lanes = float(rows)
    if route == "kernel":
        pass
    elif segments.guessed > 1:
        lanes *= _GUESSED_PASSES
    elif segments.multiplied > 1:
        lanes *= size
    steps = rows * count if lengths is None else int(np.broadcast_to(lengths, batch).sum())
    item = _ITEMSIZE[dtype]
    return Plan(
        batch=batch,
        steps=count,
        states=size,
        dtype=dtype,
        route=route,
        segments=segments,
        flops=round(lanes / max(rows, 1) * (steps - rows) * (2 * size * size + size))
        + steps * size,
        bytes_read=read * item,
        bytes_written=rows * item,
        workspace=workspace,
        pairwise_bytes=pairwise_bytes(rows, count, size, item),
    )


def _are_better_cut(count: int, segments: Segments) -> bool:
    """Tell whether array operations on guessed segments beat a kernel that takes step by step."""
    steps = _GUESSED_PASSES * (count // segments.guessed)
    return segments.guessed > 1 and steps * _DEVICE_STEP < count * _KERNEL_STEP


def _are_better_alone(lengths: np.ndarray, size: int, one_matrix: bool, workspace: int) -> bool:
    """Tell whether rows of different lengths cost least one by one, in segments of their own."""
    if not 0 < lengths.size <= _MOST_ALONE:
        return False
    together = int(lengths.max()) * _STEP + int(lengths.sum()) * state_seconds(size)
    alone = sum(_least_cost(int(n), size, (1, 1), one_matrix, workspace)[1] for n in lengths.flat)
    return alone < together


def best_segments(
    count: int, size: int, sizes: tuple[int, int], one_matrix: bool, workspace: int
) -> Segments:
    """Return the numbers of segments that cost least."""
    return _least_cost(count, size, sizes, one_matrix, workspace)[0]


def _least_cost(
    count: int, size: int, sizes: tuple[int, int], one_matrix: bool, workspace: int
) -> tuple[Segments, float]:
    """Return the numbers of segments that cost least, and about how many seconds that is."""
    groups, rows = sizes
    chains = max(groups * rows, 1)
    state = state_seconds(size)

    def seconds(segments: int, lanes: int) -> float:
        """Return the time that segments take side by side, each with several rows."""
        length = (count - 1) // segments
        # Matrices that differ from step to step are multiplied one by one.
        small = 0 if one_matrix else groups * segments * _SMALL_MATRIX
        return length * (_STEP + small + chains * segments * lanes * state)

    plain = (count - 1) * (_STEP + chains * state)
    multiplied, least = 1, plain
    # The segments' products are float64 and have to fit besides all else.
    most = min((count - 1) // 4, workspace // 8 // max(1, chains * size * size * 8))
    segments = 4
    while segments <= most:
        cost = seconds(segments, size) + segments * (_STEP + chains * state)
        if cost < least:
            multiplied, least = segments, cost
        segments *= 2
    # As many as fit, but none too short.
    fit = min(_GUESSED_ROWS, workspace // 32 // (8 * max(size, 1))) // chains
    guessed = (count - 1) // max(_GUESSED_LENGTH, math.ceil((count - 1) / max(fit, 1)))
    cost = _GUESSED_PASSES * seconds(guessed, 1) if guessed >= 4 else math.inf
    if cost < least:
        return Segments(guessed, multiplied), cost
    return Segments(1, multiplied), least


def state_seconds(size: int) -> float:
    """Return about how long one step of one chain takes, its overhead apart."""
    return size * (_ENTRY + size * _MULTIPLY_ADD)


def pairwise_bytes(rows: int, count: int, size: int, itemsize: int) -> int:
    """Return the bytes that multiplying expanded matrices in neighbouring pairs holds at its worst.

    That moment is the end of the first round. With m = count - 1 matrices and h = ceil(m / 2) pairs
    there exist then, in matrices of shape [rows, K, K]: the m that the round began with; if m is
    odd, a copy of all with one more; and five times h, namely both factors, the shifts (row maxima
    plus column maxima make a full matrix), the logarithm of the product, and the sum.
    """
    m = count - 1
    if m < 1:
        return 0
    # Of a single matrix there remain: itself, with the last weights added, shifted, exponentiated.
    matrices = 4 if m == 1 else m + (m + 1 if m % 2 else 0) + 5 * math.ceil(m / 2)
    return matrices * rows * size * size * itemsize
