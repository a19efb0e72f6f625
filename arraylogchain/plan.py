"""What an operation on a chain will cost, from shapes alone, and the route that is taken for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from arraylogchain._fold import Shape
from arraylogchain._inputs.chain import Chain
from arraylogchain._text import amount, duration


class Cost(NamedTuple):
    """Seconds on a CPU of two cores: of a call; of a step; for an entry; for a multiply-add."""

    call: float
    step: float
    entry: float
    multiply_add: float


# Fitted by `benchmarks.crossover` (`benchmarks/crossover.json`); they only pick an implementation.
# A step is one of all rows in array operations, and one of one row in loops.
COSTS = {
    "forward": {
        "array": Cost(8.1e-5, 1.5e-5, 2.3e-9, 1.2e-11),
        "compiled": Cost(3.0e-5, 2.9e-8, 2.7e-9, 6.6e-11),
    },
    "messages": {
        "array": Cost(9.6e-4, 3.3e-5, 6.5e-9, 6.1e-12),
        "compiled": Cost(4.7e-5, 0.0, 6.8e-9, 7.0e-11),
    },
    "states": {
        "array": Cost(0.0, 4.2e-5, 7.1e-9, 1.9e-11),
        "compiled": Cost(7.8e-5, 1.6e-8, 8.2e-9, 1.1e-10),
    },
    "pairs": {
        "array": Cost(1.2e-4, 7.1e-5, 5.5e-9, 5.0e-11),
        "compiled": Cost(1.0e-4, 0.0, 9.2e-9, 2.9e-10),
    },
    # Chosen by hand: the fit is no worse, but crosses where the two are far from equal.
    "sample": {
        "array": Cost(1e-3, 8e-5, 1.5e-8, 1.2e-11),
        "compiled": Cost(1e-4, 6e-8, 5e-9, 1.1e-10),
    },
    "entropy": {
        "array": Cost(6.4e-4, 6.7e-5, 1.0e-8, 3.8e-11),
        "compiled": Cost(6.2e-5, 0.0, 2.9e-8, 2.0e-10),
    },
}
# What loops find out about a matrix before steps are taken costs as much as so many rows.
_ROWS_OF_A_MATRIX = 16
# What else there is has no matrix multiply in it: loops serve better.
KINDS = {
    "log_partition": "forward",
    "forward_messages": "messages",
    "backward_messages": "messages",
    "last_message": "forward",
    "filtered": "messages",
    "entropy": "entropy",
    "sample": "sample",
    "marginals": "states",
    "expected_transitions": "pairs",
    "posterior": "pairs",
    "value_and_pullback": "pairs",
}

# Segments of time: their least length, enough for most chains to forget what they began with; most
# rows side by side; what they cost besides, in steps; and by operation, how many times the work of
# going step by step they take, guesses and their verification included.
_SEGMENT_STEPS, _SEGMENT_ROWS, _SEGMENT_OVERHEAD = 96, 4096, 200
# How many times faster than loops they have to be, as guesses may fail.
_SEGMENT_MARGIN = 2.0
_SEGMENT_PASSES = {
    "log_partition": 1.4,
    "marginals": 1.5,
    "expected_transitions": 1.5,
    "posterior": 1.5,
    "value_and_pullback": 2.5,
}

# Operations whose compiled loops take rows in packs, as lanes of vector instructions; from how many
# rows that share their matrices on, up to how many states, and which share of the workspace the
# memory of a pack may take.
_IN_PACKS = frozenset(_SEGMENT_PASSES)
_PACK_ROWS, _PACK_STATES, _PACK_SHARE = 8, 16, 64

_ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


class Sizes(NamedTuple):
    """What the choice of a route depends on.

    `num_real` counts the real steps of all rows, `matrices` the transition matrices of all groups.
    """

    groups: int
    rows: int
    num_steps: int
    num_states: int
    num_real: int
    is_ragged: bool
    matrices: int = 1


def sizes_of(chain: Chain) -> Sizes:
    """Return what the choice of a route depends on."""
    groups, rows = chain.sizes
    lengths = chain.lengths
    if lengths is None:
        num_real = groups * rows * chain.num_steps
    else:
        num_real = int(lengths.sum()) * (chain.num_rows // max(1, lengths.size))
    steps, states = chain.num_steps, chain.num_states
    matrices = groups if chain.has_one_matrix else groups * (steps - 1)
    return Sizes(groups, rows, steps, states, num_real, lengths is not None, matrices)


class Choice(NamedTuple):
    """A route, why it is taken, and the number of segments of time, 1 for none."""

    route: str
    reason: str
    segments: int = 1


class StepSeconds(NamedTuple):
    """What a step of a chain takes on a CUDA device: by a kernel, and by array operations."""

    kernel: float
    arrays: float
    is_measured: bool = False
    segments: int = 1  # that a kernel computes side by side

    def __str__(self) -> str:
        source = "measured on this device" if self.is_measured else "estimated"
        times = f"{duration(self.kernel)} by a kernel, {duration(self.arrays)} by array operations"
        return f"a step takes {times} ({source})"


@lru_cache(maxsize=1024)
def choose(
    operation: str,
    sizes: Sizes,
    backends: tuple[str, ...],
    workspace: int,
    on_device: StepSeconds | None = None,
) -> Choice:
    """Choose the route for an operation among the implementations that there are.

    Without `on_device`, there being a kernel is enough for it to be taken.
    """
    segments = count_segments(operation, sizes, workspace)
    route = "segments" if segments > 1 else "vector"
    if "cuda" in backends:
        if on_device is None:
            return Choice("kernel", "the arrays are on a CUDA device")
        steps = _SEGMENT_PASSES.get(operation, 1.0) * (sizes.num_steps // segments)
        if segments > 1 and steps * on_device.arrays < sizes.num_steps * on_device.kernel:
            return Choice("segments", f"side by side; {on_device}", segments)
        faster = route if on_device.arrays < on_device.kernel else "kernel"
        return Choice(
            faster, str(on_device), on_device.segments if faster == "kernel" else segments
        )
    if "compiled" not in backends:
        return Choice(
            route, "there is no compiled loop or kernel for this chain of these arrays", segments
        )
    if least_workspace(sizes.num_steps, sizes.num_states) > workspace:
        return Choice(route, "what loops hold would not fit the workspace", segments)
    if operation not in KINDS:
        return Choice("compiled", "there is no matrix multiply in it")
    if operation in _IN_PACKS and packs_serve(
        sizes.rows, sizes.num_steps, sizes.num_states, workspace
    ):
        return Choice("compiled", "rows of few states go together as lanes of vectors")
    margin = _SEGMENT_MARGIN if segments > 1 else 1.0
    arrays = margin * seconds(operation, "array", sizes, segments)
    if seconds(operation, "compiled", sizes) <= arrays:
        return Choice("compiled", "few states or few rows")
    return Choice(route, "matrix multiplies pay for many states and rows", segments)


def least_workspace(num_steps: int, num_states: int) -> int:
    """Return the bytes that compiled loops need at least to keep to a workspace.

    A matrix as it is given, converted, transposed and exponentiated; and for one row, the states of
    about sqrt(T) steps, beside as many from which to compute the others again.
    """
    window = 2 * (math.isqrt(num_steps) + 2)
    return 2 * window * (16 * num_states + 1) + 64 * num_states**2 + (1 << 16)


def packs_serve(rows: int, num_steps: int, num_states: int, workspace: int) -> bool:
    """Tell whether compiled loops take so many rows that share their matrices in packs."""
    # Of each of 8 rows, exponentials and states; and counts of transitions.
    room = 8 * num_steps * num_states * (2 * 8 + num_states)
    few = num_states <= _PACK_STATES and room <= workspace // _PACK_SHARE
    return few and rows >= _PACK_ROWS and num_steps > 1


def seconds(operation: str, backend: str, sizes: Sizes, segments: int = 1) -> float:
    """Predict the time of an operation."""
    cost = COSTS[KINDS[operation]][backend]
    return math.fsum(
        a * b for a, b in zip(cost, terms(operation, backend, sizes, segments), strict=True)
    )


def terms(
    operation: str, backend: str, sizes: Sizes, segments: int = 1
) -> tuple[float, float, float, float]:
    """Return how often there is what `Cost` has the seconds of."""
    steps: float = sizes.num_steps
    passes = 1.0
    if backend == "compiled":
        # A single row has one thread.
        passes = 2.0 if sizes.groups * sizes.rows == 1 else 1.0
        steps = passes * sizes.num_real
    elif segments > 1:
        passes = _SEGMENT_PASSES[operation]
        steps = passes * sizes.num_steps / segments + _SEGMENT_OVERHEAD
    entries = passes * sizes.num_real * sizes.num_states
    products = entries * sizes.num_states
    if backend == "compiled":
        products += _ROWS_OF_A_MATRIX * sizes.matrices * sizes.num_states**2
    return 1.0, steps, entries, products


def count_segments(operation: str, sizes: Sizes, workspace: int) -> int:
    """Return how many segments of time pay for array operations, 1 for none."""
    chains, count = sizes.groups * sizes.rows, sizes.num_steps - 1
    if operation not in _SEGMENT_PASSES or sizes.is_ragged or chains > 64:
        return 1
    fit = min(_SEGMENT_ROWS, workspace // 32 // (8 * max(sizes.num_states, 1))) // max(chains, 1)
    segments = count // max(_SEGMENT_STEPS, math.ceil(count / max(fit, 1)))
    if segments < 4 or (
        seconds(operation, "array", sizes, segments) >= seconds(operation, "array", sizes)
    ):
        return 1
    return segments


@dataclass(frozen=True, slots=True)
class Plan:
    """How a method of `LogChain` computes, and what that takes.

    Attributes
    ----------
    operation : str
        The name of the method.
    batch : tuple of int
    steps, states : int
        T and K.
    dtype : str
    route : str
        'vector': one state after another, all rows at once, in array operations. 'segments': time
        is cut, and the segments are computed side by side, from guesses that are verified.
        'compiled': loops over each row, compiled for the CPU. 'kernel': one state after another, on
        chip, by a CUDA kernel; with `segments`, those of the products of pieces of time.
    reason : str
        Why that route.
    segments : int
        Number of segments of time, 1 for none.
    flops : int
        Multiplications and additions, and exponentials, of a pass over all steps.
    bytes_read, bytes_written : int
        Inputs and output.
    workspace : int
        Bytes that bound the temporaries.
    pairwise_bytes : int
        What multiplying expanded matrices in neighbouring pairs would hold at once; see
        `pairwise_bytes`.
    """

    operation: str
    batch: Shape
    steps: int
    states: int
    dtype: str
    route: str
    reason: str
    segments: int
    flops: int
    bytes_read: int
    bytes_written: int
    workspace: int
    pairwise_bytes: int

    def __str__(self) -> str:
        rows = math.prod(self.batch)
        states = f"{self.steps} states of [{rows}, {self.states}]"
        route = {
            "vector": f"vector: {states}, one after another",
            "segments": f"segments: {self.segments} pieces of time side by side, from verified "
            "guesses (else one after another)",
            "compiled": "compiled: loops over each row",
            "kernel": f"kernel: {states}, on chip",
        }[self.route]
        if self.route == "kernel" and self.segments > 1:
            route = f"kernel: the products of {self.segments} pieces of time, side by side"
        lines = [
            ("chain", f"{rows} rows, {self.steps} steps, {self.states} states, {self.dtype}"),
            ("route", f"{route}; {self.reason}"),
            ("operations", f"{self.flops:.3g} FLOP"),
            ("read", amount(self.bytes_read)),
            ("written", amount(self.bytes_written)),
            ("workspace", f"at most {amount(self.workspace)}"),
            (
                "instead of",
                f"{amount(self.pairwise_bytes)} for expanded matrices multiplied in pairs",
            ),
        ]
        return "\n".join(f"{name:<12}{text}" for name, text in lines)


def plan_chain(operation: str, chain: Chain, dtype: str, choice: Choice, workspace: int) -> Plan:
    """Return the plan for an operation on a chain, of whose arrays only shapes are read."""
    sizes, size, item = sizes_of(chain), chain.num_states, _ITEMSIZE[dtype]
    given = (chain.transitions, chain.potentials, chain.initial, chain.final)
    products = (sizes.num_real - chain.num_rows) * (2 * size * size + size)
    passes: float = 1
    if choice.segments > 1:
        passes = size if choice.route == "kernel" else _SEGMENT_PASSES[operation]
    return Plan(
        operation=operation,
        batch=chain.batch,
        steps=chain.num_steps,
        states=size,
        dtype=dtype,
        route=choice.route,
        reason=choice.reason,
        segments=choice.segments,
        flops=round(passes * products) + sizes.num_real * size,
        bytes_read=sum(math.prod(x.shape) for x in given if x is not None) * item,
        bytes_written=_written(operation, chain) * item,
        workspace=workspace,
        pairwise_bytes=pairwise_bytes(chain.num_rows, chain.num_steps, size, item),
    )


def _written(operation: str, chain: Chain) -> int:
    """Return how many numbers an operation returns for one sample or path of each row."""
    counts = 0 if chain.transitions is None else math.prod(chain.transitions.shape)
    if operation == "expected_transitions":
        return counts
    each = {
        "log_partition": 1,
        "entropy": 1,
        "log_weight": 1,
        "sample": chain.num_steps,
        "viterbi": chain.num_steps,
    }
    written = chain.num_rows * each.get(operation, chain.num_steps * chain.num_states)
    more = {"posterior": chain.num_rows + counts, "filtered": chain.num_rows * chain.num_steps}
    return written + more.get(operation, 0)


def pairwise_bytes(rows: int, num_steps: int, size: int, itemsize: int) -> int:
    """Return the bytes that multiplying expanded matrices in neighbouring pairs holds at its worst.

    That moment is the end of the first round. With m = T - 1 matrices and h = ceil(m / 2) pairs
    there exist then, in matrices of shape [rows, K, K]: the m that the round began with; if m is
    odd, a copy of all with one more; and five times h, namely both factors, the shifts (row maxima
    plus column maxima make a full matrix), the logarithm of the product, and the sum.
    """
    m = num_steps - 1
    if m < 1:
        return 0
    # Of a single matrix there remain: itself, with the last weights added, shifted, exponentiated.
    matrices = 4 if m == 1 else m + (m + 1 if m % 2 else 0) + 5 * math.ceil(m / 2)
    return matrices * rows * size * size * itemsize
