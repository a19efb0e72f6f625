"""The recursion in array operations: linear weights while they are plainly safe, logs elsewhere.

A block of steps goes linear while every weight is at least 2**-60, else it is done again from its
beginning in logs, where each step is a certified product.

*Proof of linear steps.* Weights of states lie in [LEAST, MOST], factors exp(x) are at most WIDEST,
and entries of a matrix at most 2. What underflows of a sum of K terms, in entries of the matrix and
in products, is less than 5 K tiny MOST; the sum is at least LEAST / WIDEST, as it is LEAST once it
is multiplied by its factor. In float32, 5 K tiny MOST < eps LEAST / WIDEST for K up to 2**14.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from arraylogchain._array.chains.pieces import BOTH, NOTHING, Block, Messages, Piece, scaled
from arraylogchain._array.products.certified import certified_product
from arraylogchain._array.products.factors import Factor
from arraylogchain._context import Array, whole_maximum, whole_part
from arraylogchain._fold import chunks

LEAST, MOST, WIDEST = 2.0**-60, 2.0**10, 2.0**16
_MOST_STATES = 1 << 14


class ArrayRecursion:
    """The recursion over a piece in array operations; see `pieces.Backend`."""

    rows_together, shares_pieces = 1 << 62, False

    def __init__(self, piece: Piece, workspace: int) -> None:
        self.piece, self.ctx, self.workspace = piece, piece.ctx, workspace
        self._kept: dict[bool, tuple[Factor, Array | None]] = {}

    def advance(self, state: Messages | None, steps: slice, backward: bool, keep: int) -> Block:
        """Take a block of steps, forward or backward."""
        begin = self._start(backward) if state is None else state
        walk = _Walk(self, steps, backward, keep)
        x = self._potentials(steps)
        found = walk.linear(begin, x)
        return walk.in_logs(begin, x) if found is None else found

    def matrix(self, time: int, backward: bool) -> tuple[Factor, Array | None]:
        """Return the matrices that lead from a step to the next, ready for products.

        They are those of the lanes that have that transition, backward transposed. Their weights
        up to `Factor.shift` and `Factor.powers` come with them; None if these would not fit.
        """
        piece, xp, ctx = self.piece, self.ctx.xp, self.ctx
        is_same = piece.chain.has_one_matrix and (piece.axis == 1 or piece.lengths is None)
        if is_same and backward in self._kept:
            return self._kept[backward]
        x = piece.matrices(slice(time, time + 1))[:, 0, :, :]
        x = x if piece.axis else x[: piece.count(time + 1), :, :]
        x = xp.matrix_transpose(x) if backward else x
        factor = Factor(ctx, x, 1, in_logs=piece.chain.transitions_in_logs, common=True)
        weights = None
        as_given = factor.taken is None and x.dtype == ctx.dtype(ctx.precision)
        if as_given or math.prod(x.shape) * 3 * ctx.precision.itemsize <= self.workspace // 2:
            weights = factor.keep().weights()
            if factor.taken is not None:
                # Columns of one scale.
                weights = weights * xp.exp(ctx.load(factor.offset, ctx.precision))
        if is_same:
            self._kept[backward] = factor, weights
        return factor, weights

    def best(self, state: Array | None, steps: slice, keep: bool) -> tuple[Array | None, Array]:
        """Take a block of steps forward, with the largest of terms in the place of their sums."""
        ctx, xp, piece = self.ctx, self.ctx.xp, self.piece
        if state is None:
            state = self._start(False).in_log_form(ctx).values
        x = self._potentials(steps)
        # Their own shift first, so that large potentials do not swallow small differences.
        x = x - whole_maximum(ctx, x, -1, ctx.precision)
        left = ctx.empty(tuple(x.shape), x.dtype) if keep else None
        for i in range(steps.stop - steps.start):
            after = xp.asarray(state, copy=True) if left is None else left[i, ...]
            after[...] = state
            time = steps.start + i
            lanes = piece.lanes(None, piece.count(time))
            if time:
                after[lanes] = self._largest(state[lanes], time - 1)
            after = ctx.xp.add(after, x[i, ...])
            state = after - whole_maximum(ctx, after, -1, ctx.precision)
            if left is not None:
                left[i, ...] = state
        return left, state

    def _largest(self, before: Array, time: int) -> Array:
        """Return max_k before[k] + log P[k, :], but for a shift, some k at a time."""
        ctx, xp, (groups, rows, size) = self.ctx, self.ctx.xp, before.shape
        matrix, out = self._given(time)[: before.shape[0], ...], None
        top = whole_maximum(ctx, matrix, (-2, -1), ctx.precision) if self._in_logs else None
        together = min(ctx.block, self.workspace // (2 * ctx.precision.itemsize))
        for k in chunks(size, max(1, together // (groups * rows * size))):
            logs = ctx.load(matrix[:, k, :], ctx.precision)
            logs = xp.log(logs) if top is None else logs - top
            found = xp.max(before[:, :, k, None] + logs[:, None, :, :], axis=-2)
            out = found if out is None else xp.maximum(out, found)
        return out

    def trace(self, left: Array, after: Array, steps: slice) -> Array:
        """Return the states of best paths, integers [n, groups, rows]."""
        ctx, xp, piece, found = self.ctx, self.ctx.xp, self.piece, []
        for i in reversed(range(steps.stop - steps.start)):
            moves = piece.count(steps.start + i + 1)
            if moves:
                lanes = piece.lanes(None, moves)
                columns = ctx.load(self._into(steps.start + i, after[lanes]), ctx.precision)
                # Only differences count.
                logs = (
                    columns - whole_maximum(ctx, columns, -1, ctx.precision)
                    if self._in_logs
                    else xp.log(columns)
                )
                after = xp.asarray(after, copy=True)
                after[lanes] = xp.argmax(left[i, ...][lanes] + logs, axis=-1)
            found.append(after)
        return xp.stack(found[::-1])

    def draw(self, left: Messages, after: Array, steps: slice, uniforms: Array) -> Array:
        """Return states of samples, integers [n, groups, rows, samples]."""
        ctx, xp, piece, found = self.ctx, self.ctx.xp, self.piece, []
        logs = left.in_log_form(ctx).values[steps.start - steps.stop :, ...]
        for i in reversed(range(steps.stop - steps.start)):
            moves = piece.count(steps.start + i + 1)
            if moves:
                lanes = piece.lanes(None, moves)
                of = ctx.load(logs[i, ...][lanes], ctx.widest)[:, :, None, :]
                (groups, rows, samples), size = after[lanes].shape, of.shape[-1]
                states = xp.reshape(after[lanes], (groups, rows * samples))
                edges = ctx.load(self._into(steps.start + i, states), ctx.widest)
                edges = xp.reshape(edges, (groups, rows, samples, size))
                weights = relative(xp, of + (edges if self._in_logs else xp.log(edges)))
                after = xp.asarray(after, copy=True)
                u = ctx.load(uniforms[i, ...][lanes], ctx.widest)
                after[lanes] = choose(xp, weights, u)
            found.append(after)
        return xp.stack(found[::-1])

    @property
    def _in_logs(self) -> bool:
        return self.piece.chain.transitions_in_logs

    def _given(self, time: int) -> Array:
        """Return the matrices from a step to the next, as given, [groups, K, K]."""
        return self.piece.matrices(slice(time, time + 1))[:, 0, :, :]

    def _into(self, time: int, states: Array) -> Array:
        """Return the weights, as given, into states [groups, rows] of the next step, [..., K]."""
        xp, (groups, rows) = self.ctx.xp, states.shape
        matrix = self._given(time)[:groups, ...]
        if groups == 1:
            columns = xp.take(matrix, xp.reshape(states, (-1,)), axis=2)
        else:
            index = xp.broadcast_to(states[:, None, :], (groups, matrix.shape[1], rows))
            columns = xp.take_along_axis(matrix, index, axis=2)
        return xp.matrix_transpose(columns)

    def _potentials(self, steps: slice) -> Array:
        """Return potentials [n, groups, rows, K] in the precision, 0 past rows' ends."""
        ctx, xp, real = self.ctx, self.ctx.xp, self.piece.real(steps)
        x = xp.permute_dims(self.piece.potentials(steps), (2, 0, 1, 3))
        if real is not None:
            x = xp.where(real[..., None], x, xp.asarray(0.0, dtype=x.dtype, device=ctx.device))
        return ctx.load(x, ctx.precision)

    def _start(self, backward: bool) -> Messages:
        """Return what a recursion starts with."""
        ctx, xp, (groups, rows, size) = self.ctx, self.ctx.xp, self.piece.state_shape
        x, in_logs = self.piece.end(backward)
        nothing = xp.zeros((groups, rows), dtype=ctx.dtype(ctx.widest), device=ctx.device)
        form = np.full((groups, rows), in_logs)
        if x is None:
            ones = (groups, rows, size)
            x = xp.ones(ones, dtype=ctx.dtype(ctx.precision), device=ctx.device)
            return Messages(x, nothing, nothing, np.zeros((groups, rows), bool))
        x = ctx.load(x, ctx.widest)
        if in_logs:
            shift = whole_maximum(ctx, x, -1, ctx.widest)
            return Messages(ctx.load(x - shift, ctx.precision), shift[..., 0], nothing, form)
        x = xp.where(x < 0, xp.full_like(x, math.nan), x)
        powers = whole_part(ctx, xp.log2(x), ctx.widest)
        top = whole_part(ctx, xp.log2(xp.max(x, axis=-1)), ctx.widest)
        near = scaled(ctx, x, -top[..., None])
        if _is_within(xp, near, LEAST, MOST):
            return Messages(ctx.load(near, ctx.precision), nothing, top, form)
        # The log of a tiny weight would be rounded at its size.
        logs = xp.log(scaled(ctx, x, -powers)) + (powers - top[..., None]) * math.log(2.0)
        return Messages(ctx.load(logs, ctx.precision), nothing, top, np.ones_like(form))


class _Walk:
    """The steps of one block."""

    def __init__(self, recursion: ArrayRecursion, steps: slice, backward: bool, keep: int) -> None:
        self.recursion, self.piece, self.ctx = recursion, recursion.piece, recursion.ctx
        self.steps, self.backward, self.keep = steps, backward, keep
        self.shifts: Array = None
        self.powers: Array = None

    def linear(self, begin: Messages, x: Array) -> Block | None:
        """Take the steps on linear weights; None where these are not safe."""
        ctx, xp = self.ctx, self.ctx.xp
        if int(x.shape[-1]) > _MOST_STATES:
            return None
        values = begin.values
        if begin.in_logs.any():
            values = xp.exp(begin.values)
        if not _is_within(xp, values, LEAST, MOST):
            return None
        weights, tops = xp.exp(x), None
        if not _is_within(xp, weights, 1.0 / WIDEST, WIDEST):
            tops = whole_maximum(ctx, x, -1, ctx.precision)
            weights = xp.exp(x - tops)
            if not float(xp.min(weights)) >= LEAST:
                return None
            tops = ctx.load(tops[..., 0], ctx.widest)
        self._begin(values, begin, in_logs=False)
        for i in self._order():
            before, arrived, after, moves = self._at(i)
            if moves:
                factor, matrix = self._matrix(i)
                if matrix is None:
                    return None
                lanes = self.piece.lanes(None, moves)
                ctx.multiply(before[lanes], matrix, arrived[lanes])
                self._take(factor, lanes)
            self._arrive()
            ctx.apply(xp.multiply, arrived, weights[i, ...], out=after)
            if not _is_within(xp, after, LEAST, MOST):
                power = -xp.floor(xp.log2(xp.max(after, axis=-1)))
                after[...] = scaled(ctx, after, power[..., None])
                # What is not a number is not within anything.
                if not _is_within(xp, after, LEAST, MOST):
                    return None
                self.powers = self.powers - ctx.load(power, ctx.widest)
            if tops is not None:
                self.shifts = self.shifts + tops[i, ...]
            self._leave(after)
        return self._found(in_logs=False)

    def in_logs(self, begin: Messages, x: Array) -> Block:
        """Take the steps in logs."""
        ctx, xp, workspace = self.ctx, self.ctx.xp, self.recursion.workspace
        tops = whole_maximum(ctx, x, -1, ctx.precision)
        x = x - tops
        begin = begin.in_log_form(ctx)
        self._begin(begin.values, begin, in_logs=True)
        for i in self._order():
            before, arrived, after, moves = self._at(i)
            if moves:
                (factor, weights), lanes = self._matrix(i), self.piece.lanes(None, moves)
                left, chunk = Factor(ctx, before[lanes], 0, shifts=False), None
                if weights is None:
                    size = math.prod(factor.values.shape) // int(factor.values.shape[-2])
                    chunk = max(1, workspace // 6 // (ctx.precision.itemsize * size))
                certified_product(ctx, left, factor, arrived[lanes], workspace // 2, chunk)
                self._take(factor, lanes)
            self._arrive()
            ctx.apply(xp.add, arrived, x[i, ...], out=after)
            top = whole_maximum(ctx, after, -1, ctx.precision)
            ctx.apply(xp.subtract, after, top, out=after)
            self.shifts = self.shifts + ctx.load((top + tops[i, ...])[..., 0], ctx.widest)
            self._leave(after)
        return self._found(in_logs=True)

    def _begin(self, values: Array, begin: Messages, in_logs: bool) -> None:
        """Make room, and write what the steps begin with."""
        ctx, count = self.ctx, self.steps.stop - self.steps.start
        shape, dtype = self.piece.state_shape, ctx.dtype(ctx.precision)
        # What is not kept is written over.
        self._arrived = ctx.empty((count if self.keep == BOTH else 1, *shape), dtype)
        self._left = ctx.empty(((2, count, count + 1)[self.keep], *shape), dtype)
        self._before, self.shifts, self.powers = values, begin.shifts, begin.powers
        self._scales: list[list[Array]] = [[], [], [], []]
        if self.keep == BOTH:
            self._left[count if self.backward else 0, ...] = values
            self._scales[2:] = [self.shifts], [self.powers]

    def _order(self) -> range:
        count = self.steps.stop - self.steps.start
        return range(count - 1, -1, -1) if self.backward else range(count)

    def _at(self, i: int) -> tuple[Array, Array, Array, int]:
        """Return the state before a step, room for what arrives and for what leaves; and moves.

        So many lanes have a transition to the step. To the others what was before arrives: the
        start, or what they ended with.
        """
        piece, time, before = self.piece, self.steps.start + i, self._before
        place = i + (self.keep == BOTH and not self.backward)
        after = self._left[place % int(self._left.shape[0]), ...]
        arrived = self._arrived[i % int(self._arrived.shape[0]), ...]
        moves = piece.count(time + 1) if self.backward else piece.count(time) * (time > 0)
        rest = piece.lanes(moves, None)
        if moves < before.shape[piece.axis]:
            arrived[rest] = before[rest]
        return before, arrived, after, moves

    def _matrix(self, i: int) -> tuple[Factor, Array | None]:
        time = self.steps.start + i
        return self.recursion.matrix(time if self.backward else time - 1, self.backward)

    def _take(self, factor: Factor, lanes: tuple[Any, ...]) -> None:
        """Add what a matrix keeps apart to the scale of the lanes that it multiplied."""
        if factor.taken is not None:
            xp = self.ctx.xp
            name = "shifts" if factor.in_logs else "powers"
            apart = (factor.shift if factor.in_logs else factor.powers)[..., 0]
            scale = xp.asarray(getattr(self, name), copy=True)
            scale[lanes] = scale[lanes] + apart
            setattr(self, name, scale)

    def _arrive(self) -> None:
        self._scales[0].append(self.shifts)
        self._scales[1].append(self.powers)

    def _leave(self, after: Array) -> None:
        self._before = after
        self._scales[2].append(self.shifts)
        self._scales[3].append(self.powers)

    def _found(self, in_logs: bool) -> Block:
        xp, form = self.ctx.xp, np.full(self.piece.state_shape[:2], in_logs)
        values = self._before
        if self.keep == NOTHING:
            values = xp.asarray(values, copy=True)
        state = Messages(values, self.shifts, self.powers, form)
        if self.keep == NOTHING:
            return Block(None, None, state)
        turn = slice(None, None, -1) if self.backward else slice(None)
        arrived, arrived_powers, left, left_powers = (xp.stack(x[turn]) for x in self._scales)
        messages = None
        if self.keep == BOTH:
            messages = Messages(self._arrived, arrived, arrived_powers, form)
        return Block(messages, Messages(self._left, left, left_powers, form), state)


def _is_within(xp: Any, x: Array, least: float, most: float) -> bool:
    """Tell whether all entries lie between; False where one is NaN."""
    return float(xp.min(x)) >= least and float(xp.max(x)) <= most


def relative(xp: Any, logs: Array) -> Array:
    """Return exponentials relative to the largest of the last axis."""
    top = xp.max(logs, axis=-1, keepdims=True)
    return xp.exp(logs - xp.where(xp.isfinite(top), top, xp.zeros_like(top)))


def choose(xp: Any, weights: Array, uniforms: Array) -> Array:
    """Draw one of the last axis for each of the others."""
    below = xp.cumulative_sum(weights, axis=-1)
    total = below[..., -1:]
    level = uniforms[..., None] * total
    # The first state whose sum is above the level adds something to it, so that its weight is
    # not 0; should the level be rounded up to the total, it is the last that adds something.
    return xp.argmax(xp.astype((below > level) | (below == total), xp.uint8), axis=-1)
