"""Steps of a recursion in log space, with the certified product: right on any range, and slower."""

from __future__ import annotations

from dataclasses import replace

from arraylogchain._array.chains.matrices import Matrix
from arraylogchain._array.chains.scaled import Options
from arraylogchain._array.chains.states import State, held, power_to
from arraylogchain._array.chains.tiles import Tile
from arraylogchain._array.products import logmatmulexp
from arraylogchain._context import Array, Context, shape_of, whole_maximum
from arraylogchain._fold import chunks, fold


class LogStepper:
    """Advances the states of a tile in log form; see `ScaledStepper`. All steps are proved."""

    def __init__(self, tile: Tile, options: Options) -> None:
        self.tile, self.ctx, self.options = tile, tile.ctx, options
        self.wide = in_widest(tile.ctx)

    def admit(self, state: State) -> State:
        return state.in_log_form(self.ctx)

    def advance(
        self, before: State | None, i: int, ignored: Array | None, out: Array | None
    ) -> tuple[State, State, None]:
        ctx, tile, axis = self.ctx, self.tile, self.tile.select_axis
        if before is None:
            product = self._start()
        else:
            moved = slice(tile.count_moves(i))
            product = self._multiplied(before.part(moved, axis), i) if moved.stop else before
            product = held(ctx, product, before, axis)
        x = ctx.load(tile.potentials_of(slice(i, i + 1))[:, :, 0, :], ctx.widest)
        state = self._rescaled(product.part(slice(tile.count(i)), axis), x)
        return held(ctx, state, product, axis), product, None

    def _start(self) -> State:
        xp, ctx, start = self.ctx.xp, self.ctx, self.tile.start()
        groups, rows, size = self.tile.state_shape
        dtype = ctx.dtype(ctx.widest)
        zeros = xp.zeros((groups, rows, 1), dtype=dtype, device=ctx.device)
        if start is None:
            values = xp.zeros((groups, rows, size), dtype=dtype, device=ctx.device)
        elif self.tile.start_in_logs:
            values = ctx.load(start, ctx.widest)
        else:
            # As if the rows were those of matrices.
            values, _ = Matrix(ctx, start, False, ctx.widest, []).logs(slice(0, size), ctx.widest)
        return self._rescaled(State(values, zeros, zeros, None, in_logs=True), None)

    def _multiplied(self, state: State, i: int) -> State:
        ctx = self.ctx
        given, in_logs = self.tile.matrix(i), self.tile.chain.transitions_in_logs
        groups, rows, inner = (int(n) for n in state.values.shape)
        matrix = Matrix(ctx, given, in_logs, ctx.widest, [])
        values = ctx.empty((groups, rows, inner), ctx.dtype(ctx.widest))
        exponent, offset = state.exponent, state.offset
        if not in_logs:
            # The power of two of the largest weight is kept apart, where it is exact.
            top = ctx.load(ctx.xp.max(given, axis=(-2, -1), keepdims=True), ctx.widest)
            power = power_to(ctx, top, 0)
            matrix = replace(matrix, power=power)
            exponent = exponent - power
        shift = None
        for j in chunks(inner, max(1, self.options.panel // (groups * inner))):
            logs, shift = matrix.logs(j, ctx.widest)
            values[:, :, j] = log_product(self.wide, state.values, logs, self.options.workspace)
        if shift is not None:
            offset = offset + shift
        return self._rescaled(State(values, exponent, offset, None, in_logs=True), None)

    def _rescaled(self, state: State, potentials: Array | None) -> State:
        """Add potentials, and move the integer part of each row's maximum into its offset."""
        ctx, values, offset = self.ctx, state.values, state.offset
        if potentials is not None:
            shift = whole_maximum(ctx, potentials, -1, ctx.widest)
            values, offset = values + (potentials - shift), offset + shift
        shift = whole_maximum(ctx, values, -1, ctx.widest)
        return State(values - shift, state.exponent, offset + shift, None, in_logs=True)


def in_widest(ctx: Context) -> Context:
    """Return a context that computes in the widest precision, and whose results are in it."""
    return replace(ctx, precision=ctx.widest, result_name=ctx.widest.name)


def log_product(ctx: Context, a: Array, b: Array, workspace: int) -> Array:
    """Return the log of exp(a) @ exp(b), certified."""
    return logmatmulexp(ctx, fold(shape_of(a), shape_of(b)), a, b, workspace)
