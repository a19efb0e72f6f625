"""A chain cut into pieces that fit the workspace, and what recursions over them hand on.

Batch axes along which the matrices differ are *groups*; the other batch axes hold *rows*, which
share their group's matrices. A *piece* is some groups times some rows, over all steps, which are
taken block by block. A state is an array [groups, rows, K], and a step is one batched product with
matrices [groups, K, K]: nothing that is shared is copied.

*Lanes* are the rows or, where a piece has several groups, the groups. Those of different lengths
are sorted, the longest first: the lanes that have a step are the first so many.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from arraylogchain._context import LN2_HIGH, LN2_LOW, Array, Context, add_scale
from arraylogchain._dispatch import BYTES_PER_MATRIX_ENTRY
from arraylogchain._fold import Box, Shape, boxes, lengths, within
from arraylogchain._inputs import PARTS, Chain

# So many threads share pieces at the most: sizes do not depend on how many there are.
THREADS = 8

# Bytes that Python takes for `Messages`, or for the scales of a step, beside their numbers.
_MESSAGES_BYTES = 1 << 10

# What is kept of a block of steps.
NOTHING, UPDATED, ALL = range(3)


@dataclass(slots=True)
class Messages:
    """Weights of the K states of rows, at some steps one after another or, as a state, at one.

    The true logarithm is ``log(values) + shifts + exponents * log(2)`` in rows that are linear, and
    ``values + shifts + exponents * log(2)`` in rows that are in logs, whose values are near 0 but
    for those that arrive: the largest of a row about 0, or off by the rounding of what has been
    moved into the scale. -inf in logs, and 0 in linear weights, is an exact zero; linear rows are
    proved: every weight is right to rounding, and finite.

    Attributes
    ----------
    values : array [n, groups, rows, K], of a state [groups, rows, K]
        Of any strides. float32 or float64, as the backend computes.
    shifts, exponents : array [n, groups, rows], of a state [groups, rows]
        Whole numbers, in the widest precision; they add up exactly.
    is_log : bool numpy.ndarray [groups, rows] or None
        Which rows are in logs, None for none: all steps of a row here have one form.
    log_sums : array [groups, rows] or None
        The true logs of the sums of a state's weights, where the backend has them.
    """

    values: Array
    shifts: Array
    exponents: Array
    is_log: np.ndarray | None
    log_sums: Array = None

    def to_log_space(self, ctx: Context) -> Messages:
        """Return the same with all rows in logs."""
        if self.is_log is not None and self.is_log.all():
            return self
        xp, (logs, exponents) = ctx.xp, scaled_logs(ctx, self.values)
        exponents = self.exponents + exponents
        if self.is_log is not None:
            mask = xp.asarray(self.is_log, device=ctx.device)
            logs = xp.where(mask[..., None], self.values, logs)
            exponents = xp.where(mask, self.exponents, exponents)
        return Messages(logs, self.shifts, exponents, np.ones(tuple(exponents.shape[-2:]), bool))

    def weights(self, ctx: Context) -> Array:
        """Return values as linear weights, of which those that are no normal numbers may be 0."""
        if self.is_log is None:
            return self.values
        weights = ctx.empty(tuple(self.values.shape), self.values.dtype)
        ctx.exp(self.values, weights)
        if self.is_log.all():
            return weights
        mask = ctx.xp.asarray(self.is_log, device=ctx.device)
        return ctx.xp.where(mask[..., None], weights, self.values)

    def logs(self, ctx: Context) -> Array:
        """Return the true logarithms, in the widest precision."""
        x = self.to_log_space(ctx)
        values, shifts, exponents = ctx.load(x.values, ctx.widest), x.shifts, x.exponents
        return add_scale(values, shifts[..., None], exponents[..., None])

    def steps(self, selection: slice) -> Messages:
        """Return those of some steps."""
        shifts, exponents = self.shifts[selection, ...], self.exponents[selection, ...]
        return Messages(self.values[selection, ...], shifts, exponents, self.is_log)


def split_log(ctx: Context, x: Array, is_log: bool) -> tuple[Array, Array]:
    """Return the logs of weights as given in two parts, so that no large number is rounded in.

    The first are multiples of 2**-9, whose sums and differences are exact, and infinite or NaN
    where the logs are; the second are at most about 1.
    """
    xp, x = ctx.xp, ctx.load(x, ctx.widest)
    high = xp.round(x if is_log else xp.log2(x))
    remainder = x - high if is_log else xp.log(ctx.scaled(x, -high)) + high * LN2_LOW
    remainder = xp.where(xp.isfinite(high), remainder, xp.zeros_like(remainder))
    return high if is_log else high * LN2_HIGH, remainder


def exp_of_split(ctx: Context, high: Array, remainder: Array) -> Array:
    """Return exp(high + remainder) in the widest precision, for parts like those of `split_log`."""
    xp, high, remainder = ctx.xp, ctx.load(high, ctx.widest), ctx.load(remainder, ctx.widest)
    # Beyond that all is 0, or infinite.
    limit = 3.0 * ctx.widest.top
    exponents = xp.clip(xp.round((high + remainder) / math.log(2.0)), -limit, limit)
    return ctx.scaled(
        xp.exp((high - exponents * LN2_HIGH) + (remainder - exponents * LN2_LOW)), exponents
    )


def scaled_logs(ctx: Context, x: Array) -> tuple[Array, Array]:
    """Return logs of weights near 0, and the powers of two of the largest of the last axis.

    That power is kept apart, as the log would be rounded at its size; so is each weight's own, for
    which there may be no room beside it.
    """
    xp, (mantissas, exponents) = ctx.xp, split(ctx, x)
    _, top = split(ctx, xp.max(x, axis=-1, keepdims=True))
    relative_exponents = ctx.cast(exponents - top, x.dtype)
    return add_scale(xp.log(mantissas), 0.0, relative_exponents), ctx.load(top[..., 0], ctx.widest)


def split(ctx: Context, x: Array) -> tuple[Array, Array]:
    """Return weights near 1, and the powers of two to multiply them by."""
    if ctx.is_numpy:
        return np.frexp(x)
    exponents = ctx.xp.floor(ctx.xp.log2(x))
    exponents = ctx.xp.where(ctx.xp.isfinite(exponents), exponents, 0.0)
    return ctx.scaled(x, -exponents), exponents


class SegmentMessages(NamedTuple):
    """What a recursion leaves of the steps s, ..., e - 1.

    Attributes
    ----------
    predicted : Messages or None
        Of the n = e - s steps, in the order of time, forward and backward: what comes to a step
        from its neighbour, before the step's own potentials. At the chain's start it is the initial
        weights; backward, at each row's last step, the final ones. Its scales are those of the
        neighbour and the matrix alone, whatever its size.
    updated : Messages or None
        ``predicted * exp(potentials)``. With ALL there is one step more, [n + 1, ...]: that of the
        state which the block began with, in the form that the block has. Forward it comes first
        (steps s - 1, ..., e - 1), backward it comes last (steps s, ..., e). Where nothing came
        before it, it is any numbers.
    carry : Messages
        After the last of the steps, for the next block.

    Steps past a row's length hold any numbers in both, NaN and infinities among them, but scales of
    some state. What came backward may be written over, but for `updated` at the first step, whose
    memory may be `carry`'s.
    """

    predicted: Any
    updated: Any
    carry: Messages


class Backend(Protocol):
    """A recursion over the steps of one piece; the rest is array operations on what it leaves.

    Its methods may be called by several threads at once, with the same states and others, and
    change nothing that they are given: what is prepared once (matrices) may be kept, as long as
    threads that prepare it twice do no harm. The same arguments give the same bits.
    """

    # Rows of a piece from which on more bring nothing: threads share pieces of so many, and compute
    # in float64. None where all rows are better taken together.
    max_useful_rows: int | None
    # Whether matrices of several steps are in memory at a time, not only of one, in panels.
    holds_matrices: bool

    def __init__(self, shard: Shard, workspace: int) -> None:
        """Take a piece, and the bytes for temporaries beyond what is returned."""

    def advance(
        self, carry: Messages | None, steps: slice, backward: bool, keep: int
    ) -> SegmentMessages:
        """Take a block of steps, forward or backward.

        forward:   predicted[t] = updated[t - 1] @ P[t - 1]
        backward:  predicted[t] = P[t] @ updated[t + 1]
        both:      updated[t] = predicted[t] * exp(x[t])

        Parameters
        ----------
        carry : Messages or None
            What the neighbouring block returned; None at the first step, and at the last one
            backward. Past a row's length it is what it was: forward the weights after its last
            step, and backward the final weights until its last step comes.
        steps : slice
            Numbers in time, the same ones in both directions.
        keep : int
            NOTHING but the state, the UPDATED messages, or ALL. The others are None.
        """

    def best(self, carry: Messages | None, steps: slice, keep: int) -> SegmentMessages:
        """Take a block of steps forward, with the largest of terms in the place of their sums.

        All are logs. Of UPDATED messages, if they are kept, the scales may be any numbers.
        """

    def trace(self, updated: Messages, after: Array, steps: slice) -> Array:
        """Return the states of best paths, integers [n, groups, rows].

        Parameters
        ----------
        updated : Messages
            What `best` kept of the steps.
        after : integer array [groups, rows]
            The states at the step after these. Of rows that have no such step, those at their last.
            Of states that are as good, the smallest is taken.
        """

    def draw(self, updated: Messages, after: Array, steps: slice, uniforms: Array) -> Array:
        """Return states of samples, integers [n, groups, rows, samples].

        State k of step t is drawn in proportion to ``updated[t][k] * P[t][k, state of t + 1]``.

        Parameters
        ----------
        updated : Messages
            As `advance` keeps it, forward.
        after : integer array [groups, rows, samples]
            As for `trace`: rows' last states are drawn by the caller.
        uniforms : array [n, groups, rows, samples]
            Numbers in [0, 1); those of rows' last steps and later ones are not for use.
        """


@dataclass(slots=True, eq=False)  # frozen ones take three times as long to make
class Shard:
    """Some groups and rows of a chain; the arrays are views, of which blocks of steps are copied.

    Attributes
    ----------
    box : tuple of slice
        The piece's place among the arranged batch axes.
    shape : tuple of int
        Their lengths, those of groups first.
    num_steps : int
        Steps of the longest row.
    lengths : numpy.ndarray [groups, rows] or None
        Steps of each row, the longest first; None where all have `num_steps`.
    order, inverse : integer array or None
        Which lane each one is in the chain, and back; None where they are not sorted.
    """

    ctx: Context
    chain: Chain
    box: Box
    shape: Shape
    groups: int
    rows: int
    num_steps: int
    views: dict[str, Array]
    lengths: np.ndarray | None = None
    order: Array | None = None
    inverse: Array | None = None

    @property
    def axis(self) -> int:
        """The axis of lanes in a state."""
        return 0 if self.groups > 1 else 1

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.groups, self.rows, self.chain.num_states

    def num_active(self, time: int) -> int:
        """Return how many lanes have a step, by its number in time."""
        if self.lengths is None:
            return (self.groups, self.rows)[self.axis] if time < self.num_steps else 0
        return int(np.count_nonzero(self.lengths > time))

    def row_index(self, start: int | None, stop: int | None) -> tuple[Any, ...]:
        """Return the index of some lanes of an array [groups, rows, ...]."""
        return (slice(None),) * self.axis + (slice(start, stop), ...)

    def potentials(self, steps: slice) -> Array:
        """Return the potentials of some steps as given, [groups, rows, n, K].

        What lies past a row's length means nothing.
        """
        view = self.views["potentials"][..., steps, :]
        return self.expanded(view, (steps.stop - steps.start, self.chain.num_states))

    def matrices(self, steps: slice) -> Array:
        """Return matrices as given, [groups, n, K, K]: number t leads from step t to t + 1.

        They are [groups, 1, K, K] where one matrix stands for every step.
        """
        view, size = self.views["transitions"], self.chain.num_states
        if not self.chain.has_one_matrix:
            view = view[..., steps, :, :]
        xp, count = self.ctx.xp, int(view.shape[-3])
        x = xp.reshape(view, (self.groups, count, size, size)) if self.shape else view[None, ...]
        return x if self.order is None or self.axis else self.ctx.pick(x, self.order, 0)

    def boundary_weights(self, backward: bool) -> tuple[Array, bool]:
        """Return what a recursion starts with, [groups, rows, K], and whether it is in logs.

        As given: the initial weights, or backward the final ones. Logs of ones if there are none.
        """
        part, ctx, K = "final" if backward else "initial", self.ctx, self.chain.num_states
        if part in self.views:
            return self.expanded(self.views[part], (K,)), part in self.chain.logs
        dtype = ctx.dtype(ctx.precision)
        return ctx.xp.zeros(self.state_shape, dtype=dtype, device=ctx.device), True

    def expanded(self, x: Array, trailing: Shape) -> Array:
        """Return an array [*shape, *trailing] as [groups, rows, *trailing], in order of lanes."""
        xp = self.ctx.xp
        if not self.shape:
            return x[None, None, ...]
        if tuple(x.shape) != (*self.shape, *trailing):
            x = xp.broadcast_to(x, (*self.shape, *trailing))
        x = xp.reshape(x, (self.groups, self.rows, *trailing))
        return x if self.order is None else self.ctx.pick(x, self.order, self.axis)

    def valid_steps(self, steps: slice) -> Array | None:
        """Return which rows have which steps, bool [n, groups, rows]; None if all have all."""
        if self.lengths is None or steps.stop <= int(self.lengths.min()):
            return None
        is_valid = np.arange(steps.start, steps.stop)[:, None, None] < self.lengths
        return (
            is_valid if self.ctx.is_numpy else self.ctx.xp.asarray(is_valid, device=self.ctx.device)
        )

    def view(self, x: Array, place: tuple[Any, ...] = ()) -> Array:
        """Return the piece's part of an array [*batch, ...], at a place beyond these axes."""
        x = arrange(self.ctx.xp, self.chain, x, x.ndim - len(self.shape))
        return x[(*self.box, *place, ...)]

    def read(self, x: Array, place: tuple[Any, ...] = ()) -> Array:
        """Return such a part as [groups, rows, ...], in order of lanes."""
        x = self.view(x, place)
        return self.expanded(x, tuple(x.shape[len(self.shape) :]))

    def write(self, out: Array, values: Array, place: tuple[Any, ...] = ()) -> None:
        """Write values [groups, rows, ...], in order of lanes, to such a part."""
        xp, view = self.ctx.xp, self.view(out, place)
        if self.inverse is not None:
            values = xp.take(values, self.inverse, axis=self.axis)
        values = xp.reshape(values, view.shape) if self.shape else values[0, 0, ...]
        view[...] = self.ctx.cast(values, view.dtype)


def arrange(xp: Any, chain: Chain, x: Array, trailing: int) -> Array:
    """View an array as [*group axes, *row axes, *trailing axes], with ones for missing axes."""
    if not chain.batch:
        return x
    shape, groups = tuple(x.shape), chain.group_axes
    if missing := len(chain.batch) + trailing - len(shape):
        x = xp.reshape(x, (1,) * missing + shape)
    if groups == tuple(range(len(groups))):
        return x
    return xp.permute_dims(x, (*groups, *chain.row_axes, *range(len(chain.batch), x.ndim)))


@lru_cache(maxsize=256)
def plan_shards(
    sizes: tuple[int, int, int, int, bool, bool],
    backend: type[Backend],
    item: int,
    workspace: int,
    history: bool,
    arrays: int,
    numbers: int,
) -> tuple[int, int, int, bool, int, int]:
    """Choose pieces and blocks, from sizes alone.

    Parameters
    ----------
    sizes : tuple
        Groups, rows, steps, states, whether one matrix stands for every step, and whether those
        of all groups, or of a block of steps, are in memory at a time.
    item : int
        Bytes of a number.
    history : bool
        Whether the messages of all steps are wanted, after the last of them is known.
    arrays : int
        How many arrays like messages a block of steps takes.
    numbers : int
        How many numbers a block takes which are worth array operations, and stay in caches.

    Returns
    -------
    groups, rows : int
        Of a piece, at most.
    steps : int
        Of a block, at most.
    store_messages : bool
        Whether the messages of all steps of a piece fit beside it; else those between blocks do.
    workspace : int
        Bytes for what a piece takes besides.
    parallel : int
        How many pieces fit at a time.
    """
    groups, rows, count, size, has_one_matrix, holds_matrices = sizes
    max_rows = min(groups * rows, backend.max_useful_rows or groups * rows)
    # Bytes of a step of a row: in a block, where arrays in float32 may be widened, with what it has
    # no K of (scales of both directions, sums, factors, masks); and in what is kept. And of a
    # group's matrix: one, or those of four steps, may take a quarter of the workspace.
    step, kept_bytes = item * arrays * size + 104, item * size + 16
    matrix, parts = (
        BYTES_PER_MATRIX_ENTRY * size * size * holds_matrices,
        4 if has_one_matrix else 16,
    )
    # Pieces that fit side by side are taken at once, others one after another.
    threads = min(THREADS, -(-groups * rows // max_rows)) if backend.max_useful_rows else 1
    if (
        max(max_rows * max(8 * step, 2 * count * kept_bytes * history), parts * matrix)
        > workspace // threads
    ):
        threads = 1
    workspace //= threads
    groups = max(1, min(groups, workspace // parts // max(1, matrix)))
    workspace -= max(0, groups * matrix - workspace // 4)  # a larger one leaves less
    max_rows = max(1, min(max_rows, groups * rows, workspace // 8 // step))

    def bytes_per_step(num_rows: int) -> int:
        # Loops have the matrices of a block's steps together, others those of a few.
        has_many = backend.max_useful_rows and not has_one_matrix
        matrix_bytes = matrix * max(1, min(groups, num_rows // rows)) if has_many else 0
        return num_rows * step + matrix_bytes + _MESSAGES_BYTES

    def between(num_rows: int, steps: int) -> int:
        return -(-count // max(1, steps)) * (num_rows * kept_bytes + _MESSAGES_BYTES)

    half, enough = workspace // 2, min(max_rows, max(32, numbers // 16 // size))
    store_messages = history and half // (count * kept_bytes) >= enough

    def held(num_rows: int) -> int:
        # Blocks keep what they begin with twice, beside what they leave.
        checkpoint_bytes = between(num_rows, half // 2 // bytes_per_step(num_rows))
        return (
            num_rows * count * kept_bytes + 2 * checkpoint_bytes
            if store_messages
            else checkpoint_bytes
        )

    def at_most(num_rows: int) -> int:
        # Steps that fit beside what is kept, and what a piece takes besides.
        return (workspace - workspace // 4 - held(num_rows) * history) // bytes_per_step(num_rows)

    # Blocks of fewer than four steps would spend their time on what they begin with; and pullbacks
    # keep that of all pieces at once, of each row about one state in sqrt(T).
    fewest = min(count, max(4, math.isqrt(count) // 2))
    while history and max_rows > 1 and at_most(max_rows) < fewest:
        max_rows //= 2
    rows_per_shard, groups_per_shard = min(rows, max_rows), max(1, min(groups, max_rows // rows))
    num_rows = groups_per_shard * rows_per_shard
    steps = max(4, 4 * numbers // (arrays * num_rows * size))
    if history:
        # There are as many messages between blocks as fit.
        free_bytes = max(1, half - num_rows * count * kept_bytes * store_messages)
        steps = max(steps, 2 * between(num_rows, 1) // free_bytes, math.isqrt(count))
    # Where not even the messages between blocks fit, both together take least.
    most_steps = max(
        at_most(num_rows), math.isqrt(history * between(num_rows, 1) // bytes_per_step(num_rows))
    )
    return (
        groups_per_shard,
        rows_per_shard,
        max(1, min(count, steps, most_steps)),
        store_messages,
        workspace // 4,
        threads,
    )


def shards(ctx: Context, chain: Chain, groups: int, rows: int) -> Iterator[Shard]:
    """Cut a chain into pieces of at most so many groups and rows."""
    views = chain.parts
    if chain.batch:
        views = {n: arrange(ctx.xp, chain, x, len(PARTS[n].axes)) for n, x in views.items()}
    if chain.lengths is None and groups >= chain.sizes[0] and rows >= chain.sizes[1]:
        box = (slice(None),) * len(chain.batch)
        yield Shard(ctx, chain, box, chain.arranged, *chain.sizes, chain.num_steps, views)
        return
    all_lengths = None
    if chain.lengths is not None:
        all_lengths = arrange(np, chain, chain.lengths, 0)
        # Rows are sorted within their group.
        groups = groups if chain.sizes[1] == 1 else 1
    inner = len(chain.group_axes)
    for group_box in boxes(chain.arranged[:inner], groups):
        for row_box in boxes(chain.arranged[inner:], rows):
            box = (*group_box, *row_box)
            parts = {name: x[(*within(box, x.shape), ...)] for name, x in views.items()}
            sizes = math.prod(lengths(group_box)), math.prod(lengths(row_box))
            row_lengths, order, inverse, count = None, None, None, chain.num_steps
            if all_lengths is not None:
                row_lengths = np.broadcast_to(
                    all_lengths[within(box, all_lengths.shape)], lengths(box)
                ).reshape(sizes)
                sorted_lengths = row_lengths.reshape(-1)
                first = np.argsort(-sorted_lengths, kind="stable")
                count = int(sorted_lengths[first[0]])
                if count == sorted_lengths[first[-1]]:
                    row_lengths = None
                else:
                    row_lengths = sorted_lengths[first].reshape(sizes)
                    order, inverse = ctx.integers(first), ctx.integers(np.argsort(first))
            yield Shard(
                ctx, chain, box, lengths(box), *sizes, count, parts, row_lengths, order, inverse
            )
