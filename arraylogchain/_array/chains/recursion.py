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
from collections.abc import Callable
from typing import Any

import numpy as np

from arraylogchain._array.chains import pieces
from arraylogchain._array.chains.pieces import Block, Messages, Piece
from arraylogchain._array.products.certified import certified_product
from arraylogchain._array.products.factors import Factor
from arraylogchain._context import Array, whole_maximum
from arraylogchain._fold import chunks

LEAST, MOST, WIDEST = 2.0**-60, 2.0**10, 2.0**16
_MOST_STATES = 1 << 14

# Places along the first axes of states.
Lanes = tuple[Any, ...]
# ``product(before, time, lanes, out)`` multiplies states by the matrices from a step to the next;
# ``weigh(arrived, i, out)`` by the exponentials of potentials. They say False if it is not safe.
Product = Callable[[Array, int, Lanes, Array], bool | None]
Weigh = Callable[[Array, int, Array], bool | None]


class ArrayRecursion:
    """The recursion over a piece in array operations; see `pieces.Backend`."""

    most_rows: int | None = None
    holds_matrices = False

    def __init__(self, piece: Piece, workspace: int) -> None:
        self.piece, self.ctx, self.workspace = piece, piece.ctx, workspace
        self.has_logs = "transitions" in piece.chain.logs
        # Whether all steps have the same matrices, and the same lanes those of groups.
        self._is_same = piece.chain.has_one_matrix and (piece.axis == 1 or piece.lengths is None)
        self._kept: dict[bool, tuple[Factor, Array | None]] = {}
        self._logs: tuple[Factor, Array] | None = None

    def advance(self, state: Messages | None, steps: slice, backward: bool, keep: int) -> Block:
        """Take a block of steps, forward or backward."""
        begin = self._start(backward) if state is None else state
        x, walk = self._potentials(steps), _Walk(self, steps, backward, keep)
        return walk.linear(begin, x) or walk.in_logs(begin, x, walk.log_product)

    def matrix(self, time: int, backward: bool) -> tuple[Factor, Array | None]:
        """Return the matrices that lead from a step to the next, ready for products.

        They are those of the lanes that have that transition, backward transposed. Their weights
        up to `Factor.scale` come with them; None if these would not fit.
        """
        piece, ctx = self.piece, self.ctx
        if self._is_same and backward in self._kept:
            return self._kept[backward]
        x = self.given(time)
        x = x if piece.axis else x[: piece.count(time + 1), :, :]
        x = x.mT if backward else x
        factor = Factor(ctx, x, 1, in_logs=self.has_logs, common=True)
        weights = None
        as_given = ctx.is_numpy and factor.taken is None and x.dtype == ctx.dtype(ctx.precision)
        if as_given or math.prod(x.shape) * 3 * ctx.precision.itemsize <= self.workspace // 2:
            weights = factor.keep().even()
        if self._is_same:
            self._kept[backward] = factor, weights
        return factor, weights

    def log_matrix(self, time: int, groups: int) -> tuple[Factor, Array | None]:
        """Return the matrices that lead from a step to the next, with their logs.

        None for the logs where they are those of this step alone, or do not fit.
        """
        if self._logs is not None:
            return self._logs
        x = self.given(time)[:groups, ...]
        factor = Factor(self.ctx, x, 1, in_logs=self.has_logs, common=True)
        # An entry takes 128 bytes at the most, with what computes its log.
        if not self._is_same or math.prod(x.shape) > self.workspace // 128:
            return factor, None
        self._logs = factor, factor.logs()
        return self._logs

    def best(self, state: Messages | None, steps: slice, keep: int) -> Block:
        """Take a block of steps forward, with the largest of terms in the place of their sums."""
        begin = self._start(False) if state is None else state
        walk = _Walk(self, steps, False, keep)
        return walk.in_logs(begin, self._potentials(steps), walk.largest)

    def trace(self, left: Messages, after: Array, steps: slice) -> Array:
        """Return the states of best paths, integers [n, groups, rows]."""
        xp, after = self.ctx.xp, after[..., None]
        return self._back(left.values, after, steps, lambda x, at: xp.argmax(x, axis=-1))[..., 0]

    def draw(self, left: Messages, after: Array, steps: slice, uniforms: Array) -> Array:
        """Return states of samples, integers [n, groups, rows, samples]."""
        ctx, xp = self.ctx, self.ctx.xp
        logs = left.in_log_form(ctx).values

        def pick(x: Array, at: Lanes) -> Array:
            below = xp.cumulative_sum(relative(xp, x), axis=-1)
            return draw_states(xp, below, ctx.load(uniforms[at], ctx.widest))

        return self._back(logs, after, steps, pick)

    def _back(
        self, left: Array, after: Array, steps: slice, pick: Callable[[Array, Lanes], Array]
    ) -> Array:
        """Return states [n, groups, rows, paths], each chosen by the logs of what leads through.

        `pick` is told at which step and lanes these are.
        """
        ctx, xp, piece, found = self.ctx, self.ctx.xp, self.piece, []
        for i in reversed(range(steps.stop - steps.start)):
            moves = piece.count(steps.start + i + 1)
            if moves:
                lanes = piece.lanes(None, moves)
                at, states = (i, *lanes), after[lanes]
                logs = ctx.load(left[at], ctx.widest)[:, :, None, :]
                after = xp.asarray(after, copy=True)
                after[lanes] = pick(logs + self._into(steps.start + i, states), at)
            found.append(after)
        return xp.stack(found[::-1])

    def _into(self, time: int, states: Array) -> Array:
        """Return the logs of weights into states [groups, rows, paths] of the next step, [..., K].

        They are known but for a shift: only differences count.
        """
        ctx, xp, (groups, rows, paths) = self.ctx, self.ctx.xp, states.shape
        matrix, flat = self.given(time)[:groups, ...], xp.reshape(states, (groups, rows * paths))
        if groups == 1:
            columns = xp.take(matrix, flat[0, ...], axis=2)
        else:
            index = xp.broadcast_to(flat[:, None, :], (groups, matrix.shape[1], rows * paths))
            columns = xp.take_along_axis(matrix, index, axis=2)
        x = ctx.load(columns.mT, ctx.widest)
        x = x - whole_maximum(xp, x) if self.has_logs else xp.log(x)
        return xp.reshape(x, (groups, rows, paths, x.shape[-1]))

    def given(self, time: int) -> Array:
        """Return the matrices from a step to the next, as given, [groups, K, K]."""
        return self.piece.matrices(slice(time, time + 1))[:, 0, :, :]

    def _potentials(self, steps: slice) -> Array:
        """Return potentials [n, groups, rows, K] in the precision, 0 past rows' ends."""
        ctx, xp, real = self.ctx, self.ctx.xp, self.piece.real(steps)
        x = xp.permute_dims(self.piece.potentials(steps), (2, 0, 1, 3))
        if real is not None:
            x = xp.where(real[..., None], x, 0.0)
        return ctx.load(x, ctx.precision)

    def _start(self, backward: bool, logs_only: bool = False) -> Messages:
        """Return what a recursion starts with; in logs only, no value is waited for."""
        ctx, xp, (groups, rows, _) = self.ctx, self.ctx.xp, self.piece.state_shape
        x, in_logs = self.piece.end(backward)
        nothing = xp.zeros((groups, rows), dtype=ctx.dtype(ctx.widest), device=ctx.device)

        def state(values: Array, shifts: Array, powers: Array, in_logs: bool) -> Messages:
            form = np.ones((groups, rows), bool) if in_logs else None
            return Messages(ctx.load(values, ctx.precision), shifts, powers, form)

        x = ctx.load(x, ctx.widest)
        if in_logs:
            shift = whole_maximum(xp, x)
            return state(x - shift, shift[..., 0], nothing, True)
        x = xp.where(x < 0, math.nan, x)
        if not logs_only and ctx.are_between(x, LEAST, MOST):
            return state(x, nothing, nothing, False)
        logs, powers = pieces.near_logs(ctx, x)
        return state(logs, nothing, powers, True)


class _Walk:
    """The steps of one block.

    `shifts` and `powers` are the scale of the weights at hand.
    """

    def __init__(self, recursion: ArrayRecursion, steps: slice, backward: bool, keep: int) -> None:
        self.recursion, self.piece, self.ctx = recursion, recursion.piece, recursion.ctx
        self.steps, self.backward, self.keep = steps, backward, keep
        self.shifts: Array = None
        self.powers: Array = None

    def linear(self, begin: Messages, x: Array) -> Block | None:
        """Take the steps on linear weights; None where these are not safe."""
        ctx, xp = self.ctx, self.ctx.xp
        values = begin.values if begin.in_logs is None else xp.exp(begin.values)
        if int(x.shape[-1]) > _MOST_STATES or not ctx.are_between(values, LEAST, MOST):
            return None
        # In the order of steps, which are read one by one.
        weights, tops = ctx.empty(tuple(x.shape), x.dtype), None
        ctx.apply(xp.exp, x, out=weights)
        if not ctx.are_between(weights, 1.0 / WIDEST, WIDEST):
            tops = whole_maximum(xp, x)
            ctx.apply(xp.exp, x - tops, out=weights)
            if not ctx.are_between(weights, LEAST, WIDEST):
                return None
            tops = ctx.load(tops[..., 0], ctx.widest)

        def multiply(before: Array, time: int, lanes: Lanes, out: Array) -> bool:
            factor, matrix = self.recursion.matrix(time, self.backward)
            if matrix is None:
                return False
            ctx.multiply(before, matrix, out)
            self._take(factor.scale, lanes)
            return True

        def weigh(arrived: Array, i: int, out: Array) -> bool:
            ctx.apply(xp.multiply, arrived, weights[i, ...], out=out)
            if not ctx.are_between(out, LEAST, MOST):
                power = -xp.floor(xp.log2(xp.max(out, axis=-1)))
                out[...] = ctx.scaled(out, power[..., None])
                # What is not a number is not within anything.
                if not ctx.are_between(out, LEAST, MOST):
                    return False
                self.powers = self.powers - ctx.load(power, ctx.widest)
            if tops is not None:
                self.shifts = self.shifts + tops[i, ...]
            return True

        return self._go(values, begin, False, multiply, weigh)

    def in_logs(self, begin: Messages, x: Array, product: Product) -> Block:
        """Take the steps in logs, with sums or maxima as products."""
        ctx, xp, begin = self.ctx, self.ctx.xp, begin.in_log_form(self.ctx)
        # Their own shift first, so that large potentials do not swallow small differences.
        tops = whole_maximum(xp, x)
        x = x - tops

        def weigh(arrived: Array, i: int, out: Array) -> None:
            ctx.apply(xp.add, arrived, x[i, ...], out=out)
            top = whole_maximum(xp, out)
            ctx.apply(xp.subtract, out, top, out=out)
            for whole in (tops[i, ...], top):  # widened first, to be added exactly
                self.shifts = self.shifts + ctx.load(whole[..., 0], ctx.widest)

        block = self._go(begin.values, begin, True, product, weigh)
        assert block is not None
        return block

    def log_product(self, before: Array, time: int, lanes: Lanes, out: Array) -> None:
        """Write the certified product of states and the matrices from a step to the next."""
        ctx, workspace = self.ctx, self.recursion.workspace
        (factor, weights), chunk = self.recursion.matrix(time, self.backward), None
        if weights is None:
            size = math.prod(factor.values.shape) // int(factor.values.shape[-2])
            chunk = max(1, workspace // 6 // (ctx.precision.itemsize * size))
        left = Factor(ctx, before, 0, shifts=False)
        certified_product(ctx, left, factor, out, workspace // 2, chunk)
        self._take(factor.scale, lanes)

    def largest(self, before: Array, time: int, lanes: Lanes, out: Array) -> None:
        """Write max_k before[k] + log P[k, :], some k at a time."""
        ctx, xp, recursion = self.ctx, self.ctx.xp, self.recursion
        (matrix, logs), out[...] = recursion.log_matrix(time, before.shape[0]), -math.inf
        room = min(ctx.block, recursion.workspace // (4 * ctx.precision.itemsize))
        for k in chunks(int(before.shape[-1]), max(1, room // math.prod(before.shape))):
            of_k = matrix.logs(k) if logs is None else logs[:, k, :]
            terms = before[:, :, k, None] + of_k[:, None, :, :]
            out[...] = xp.maximum(out, xp.max(terms, axis=-2))
        self._take(matrix.scale, lanes)

    def _take(self, scale: tuple[Array, Array] | None, lanes: Lanes) -> None:
        """Add what a matrix keeps apart to the scale of the lanes that it multiplied."""
        if scale is not None:
            xp, (shift, power) = self.ctx.xp, scale
            shifts, powers = (xp.asarray(x, copy=True) for x in (self.shifts, self.powers))
            shifts[lanes] = shifts[lanes] + shift[..., 0]
            powers[lanes] = powers[lanes] + power[..., 0]
            self.shifts, self.powers = shifts, powers

    def _go(
        self, values: Array, begin: Messages, in_logs: bool, product: Product, weigh: Weigh
    ) -> Block | None:
        """Take the steps; None where a product, or what it is weighed by, says False."""
        ctx, xp, piece, backward = self.ctx, self.ctx.xp, self.piece, self.backward
        start, stop = self.steps.start, self.steps.stop
        count, has_both, shape = stop - start, self.keep == pieces.BOTH, piece.state_shape
        dtype = ctx.dtype(ctx.precision)
        # What is not kept is written over.
        arrived = ctx.empty((count if has_both else 1, *shape), dtype)
        left = ctx.empty(((2, count, count + 1)[self.keep], *shape), dtype)
        of_arrived: list[Any] = []
        of_left: list[Any] = []
        before, self.shifts, self.powers = values, begin.shifts, begin.powers
        if has_both:
            left[count if backward else 0, ...] = before
            of_left.append((self.shifts, self.powers))
        for i in reversed(range(count)) if backward else range(count):
            time = start + i
            after = left[(i + (has_both and not backward)) % int(left.shape[0]), ...]
            into = arrived[i if has_both else 0, ...]
            # So many lanes have a transition to the step. To the others what was before arrives:
            # the start, or what they ended with.
            moves = piece.count(time + 1) if backward else piece.count(time) * (time > 0)
            if moves < before.shape[piece.axis]:
                rest = piece.lanes(moves, None)
                into[rest] = before[rest]
            if moves:
                lanes, last = piece.lanes(None, moves), time if backward else time - 1
                if product(before[lanes], last, lanes, into[lanes]) is False:
                    return None
            of_arrived.append((self.shifts, self.powers))
            if weigh(into, i, after) is False:
                return None
            of_left.append((self.shifts, self.powers))
            before = after
        form = np.ones(shape[:2], bool) if in_logs else None

        def messages(values: Array, scales: list[Any]) -> Messages:
            in_order = scales[::-1] if backward else scales
            shifts, powers = (xp.stack(x) for x in zip(*in_order, strict=True))
            return Messages(values, shifts, powers, form)

        if self.keep == pieces.NOTHING:
            before = xp.asarray(before, copy=True)
        return Block(
            messages(arrived, of_arrived) if has_both else None,
            messages(left, of_left) if self.keep != pieces.NOTHING else None,
            Messages(before, self.shifts, self.powers, form),
        )


def relative(xp: Any, logs: Array) -> Array:
    """Return exponentials relative to the largest of the last axis."""
    top = xp.max(logs, axis=-1, keepdims=True)
    return xp.exp(logs - xp.where(xp.isfinite(top), top, 0.0))


def draw_states(xp: Any, below: Array, uniforms: Array) -> Array:
    """Draw one of the last axis for each of the others, given sums of weights up to each."""
    total = below[..., -1:]
    level = uniforms[..., None] * total
    # The first state whose sum is above the level adds something to it, so that its weight is
    # not 0; should the level be rounded up to the total, it is the last that adds something.
    return xp.argmax(xp.astype((below > level) | (below == total), xp.uint8), axis=-1)
