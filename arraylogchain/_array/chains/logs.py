"""Steps of a recursion in log space, with the certified product: right on any range, and slower."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from arraylogchain._array.chains.plans import Pieces
from arraylogchain._array.chains.scaled import Options
from arraylogchain._array.chains.states import State, joined, part_of, power_to, scale_by_powers
from arraylogchain._array.chains.tiles import Tile
from arraylogchain._array.products import logmatmulexp
from arraylogchain._context import Array, Context, shape_of, whole_maximum, whole_part
from arraylogchain._fold import chunks, fold


class LogMatrix:
    """Logs of weights, ``logs - power * log(2) + shift``, for matrices [groups, K, K].

    Integers of [groups, 1, 1] are kept apart: exactly, which logs that are rounded would not be.
    """

    def __init__(self, ctx: Context, given: Array, in_logs: bool) -> None:
        self.ctx, self.given, self.in_logs = ctx, given, in_logs
        top = ctx.load(ctx.xp.max(given, axis=(-2, -1), keepdims=True), ctx.widest)
        nothing = ctx.xp.zeros_like(top)
        self.shift = whole_part(ctx, top, ctx.widest) if in_logs else nothing
        self.power = nothing if in_logs else power_to(ctx, top, 0)

    def columns(self, j: slice) -> Array:
        """Return the logs of some columns, [groups, K, len(j)]."""
        xp, ctx = self.ctx.xp, self.ctx
        x = ctx.load(self.given[:, :, j], ctx.widest)
        if self.in_logs:
            return x - self.shift
        # Zero has the logarithm -inf; a negative weight has none, and gives NaN.
        own = power_to(ctx, x, 0)
        logs = xp.log(scale_by_powers(ctx, x, own, ctx.widest)) + (self.power - own) * math.log(2.0)
        return xp.where(x == 0, xp.full_like(x, -math.inf), logs)


class LogStepper:
    """Advances the states of a tile in log form, which needs no proof."""

    def __init__(self, tile: Tile, options: Options) -> None:
        self.tile, self.ctx, self.options = tile, tile.ctx, options

    def advance(self, before: State | None, i: int) -> tuple[State, State]:
        """Return the state after step i, and before its potentials."""
        ctx, tile, axis = self.ctx, self.tile, self.tile.select_axis
        count, parts = tile.count_moves(i), []
        if before is not None:
            parts.append(before.part(slice(count), axis).copy(ctx))
            if count:
                self._multiply(parts[0], i)
        if count < tile.count(i):
            parts.append(self._start(slice(count, tile.count(i))))
        state = joined(ctx, parts, axis)
        product = state.copy(ctx)
        if not tile.count(i):
            return state, product
        time = tile.time(i)
        x = ctx.load(tile.potentials_of(slice(time, time + 1))[:, :, 0, :], ctx.widest)
        # Their own shift first, so that large potentials do not swallow small differences.
        shift = whole_maximum(ctx, x, -1, ctx.widest)
        state.values[...] += x - shift
        state.offset[...] += shift
        self._rescale(state)
        return state, product

    def _start(self, lanes: slice) -> State:
        xp, ctx, start, axis = self.ctx.xp, self.ctx, self.tile.start(), self.tile.select_axis
        size = self.tile.chain.num_states
        values, exponent, offset = (
            part_of(xp.zeros(shape, dtype=ctx.dtype(ctx.widest), device=ctx.device), lanes, axis)
            for shape in (self.tile.state_shape, *2 * [(*self.tile.state_shape[:2], 1)])
        )
        start = None if start is None else part_of(start, lanes, axis)
        if start is not None and self.tile.start_in_logs:
            values[...] = ctx.load(start, ctx.widest)
        elif start is not None:
            # As if the rows of each group were a matrix.
            matrix = LogMatrix(ctx, start, in_logs=False)
            values[...] = matrix.columns(slice(size))
            exponent -= matrix.power
        state = State(values, exponent, offset, None, in_logs=True)
        self._rescale(state)
        return state

    def _multiply(self, state: State, i: int) -> None:
        """Multiply states by the matrices that lead to step i, in place."""
        ctx, xp, pieces = self.ctx, self.ctx.xp, self.options.pieces
        matrix = LogMatrix(ctx, self.tile.matrix(i), self.tile.chain.transitions_in_logs)
        before = xp.asarray(state.values, copy=True)
        groups, _, size = before.shape
        wide = replace(ctx, precision=ctx.widest, result_name=ctx.widest.name)
        for j in pieces.columns(groups, size):
            logs = matrix.columns(j)
            layout = fold(shape_of(before), shape_of(logs))
            state.values[:, :, j] = logmatmulexp(wide, layout, before, logs, pieces.workspace)
        state.exponent[...] -= matrix.power
        state.offset[...] += matrix.shift
        self._rescale(state)

    def _rescale(self, state: State) -> None:
        """Move the integer part of each row's maximum into its offset, in place."""
        shift = whole_maximum(self.ctx, state.values, -1, self.ctx.widest)
        state.values[...] -= shift
        state.offset[...] += shift


def joint_logs(
    ctx: Context, before: Array, matrix: LogMatrix | None, pieces: Pieces
) -> Iterator[tuple[slice, slice, Array]]:
    """Yield some rows r, columns j, and the logs before[r, k] + matrix[k, j] of all pairs.

    They are [groups, len(r), K, len(j)], or [groups, len(r), K, 1] without a matrix.
    """
    groups, rows, size = (int(n) for n in before.shape)
    block = max(1, pieces.workspace // (8 * 8) // (groups * size))
    for j in chunks(size, block):
        edges = None if matrix is None else matrix.columns(j)
        for r in chunks(rows, max(1, block // (j.stop - j.start))):
            joint = before[:, r, :, None]
            yield r, j, joint if edges is None else joint + edges[:, None, :, :]
