"""Paths of largest weight: forward with max-plus steps, and back along what they found.

Which state a path came from is not kept: it is found again on the way back, for the one state in
question, from the same sums. That costs K additions for a step where keeping it costs K * K
comparisons more.
"""

from __future__ import annotations

import math

from arraylogchain._array.chains.log_weight import log_weight
from arraylogchain._array.chains.scaled import Options
from arraylogchain._array.chains.states import State, part_of
from arraylogchain._array.chains.sweep import History, histories, sweeps, with_final
from arraylogchain._array.chains.tiles import Tile, arrange
from arraylogchain._context import Array, Context, Precision, whole_maximum
from arraylogchain._fold import chunks
from arraylogchain._inputs.chain import Chain


class MaxPlusStepper:
    """Advances states in logs by their largest sums; see `ScaledStepper`. All steps are proved.

    Integer shifts are taken off, and forgotten: paths are told apart by differences alone.
    """

    def __init__(self, tile: Tile, precision: Precision, options: Options) -> None:
        self.tile, self.ctx, self.precision = tile, tile.ctx, precision
        self.panel = options.pieces.panel
        self._logs: Array | None = None

    def advance(
        self, before: State | None, i: int, ignored: Array | None, room: Array | None
    ) -> tuple[State, State, None]:
        xp, ctx, axis = self.ctx.xp, self.ctx, self.tile.select_axis
        shape, dtype = self.tile.state_shape, ctx.dtype(ctx.precision)
        out = ctx.empty(shape, dtype) if room is None else room
        lanes = slice(self.tile.count(i))
        now = part_of(out, lanes, axis)
        if before is None:
            self._start(now)
        else:
            self._multiply(part_of(before.values, lanes, axis), i, now)
        x = ctx.load(self.tile.potentials_of(slice(i, i + 1))[:, :, 0, :], ctx.precision)
        # Their own shift first, so that large potentials do not swallow small differences.
        ctx.apply(xp.add, now, x - whole_maximum(ctx, x, -1, ctx.precision), out=now)
        ctx.apply(xp.subtract, now, whole_maximum(ctx, now, -1, ctx.precision), out=now)
        nothing = xp.zeros_like(now[..., :1])
        state = State(now, nothing, nothing, None, in_logs=True)
        return state, state, None

    def _start(self, out: Array) -> None:
        ctx, xp, start = self.ctx, self.ctx.xp, self.tile.start()
        if start is None:
            out[...] = 0.0
            return
        logs = ctx.load(start, ctx.precision)
        logs = logs if self.tile.start_in_logs else xp.log(logs)
        out[...] = logs - whole_maximum(ctx, logs, -1, ctx.precision)

    def _multiply(self, before: Array, i: int, out: Array) -> None:
        """Write max_k before[k] + logs of matrix[k, :] into `out`, some k at a time."""
        ctx, xp = self.ctx, self.ctx.xp
        groups, rows, size = (int(n) for n in out.shape)
        together = max(1, min(size, ctx.block // (groups * rows * size)))
        terms = ctx.empty((groups, rows, together, size), out.dtype)
        for some in chunks(size, max(1, self.panel // (groups * size))):
            logs = self.logs_of(i, some)[:, None, ...]
            for k in chunks(some.stop - some.start, together):
                at = some.start + k.start
                room = terms[:, :, : k.stop - k.start, :]
                of_k = before[:, :, at : at + k.stop - k.start, None]
                ctx.apply(xp.add, of_k, logs[:, :, k, :], out=room)
                # A maximum of one would be a slow copy.
                top = room[:, :, 0, :] if together == 1 else xp.max(room, axis=-2)
                if at:
                    ctx.apply(xp.maximum, out, top, out=out)
                else:
                    out[...] = top

    def logs_of(self, i: int, k: slice) -> Array:
        """Return the logs of some rows of the matrices that lead to step i, but for a shift."""
        ctx, tile, whole = self.ctx, self.tile, slice(0, self.tile.chain.num_states)
        if self._logs is not None:
            return self._logs[:, k, :]
        given, ragged = tile.matrix(i), tile.lengths is not None
        logs = ctx.load(given[:, k, :], ctx.precision)
        if tile.chain.transitions_in_logs:
            logs = logs - whole_maximum(ctx, given, (-2, -1), ctx.precision)
        else:
            logs = ctx.xp.log(logs)
        if k == whole and tile.chain.has_one_matrix and (tile.select_axis or not ragged):
            self._logs = logs
        return logs


def viterbi(ctx: Context, chain: Chain, workspace: int) -> tuple[Array, Array]:
    """Return a path of largest weight, [*batch, T], and the log of its weight, [*batch].

    Of several the one with the smallest last state, and so on back to the first state. Past a
    row's length states are -1. All states are 0 where no path has a positive weight.
    """
    xp = ctx.xp
    shape = (*chain.batch, chain.num_steps)
    states = xp.full(shape, -1, dtype=ctx.index_dtype, device=ctx.device)
    view = arrange(xp, chain, states, trailing=1)
    for tile, history in histories(ctx, chain, workspace, stepper=MaxPlusStepper):
        _trace(tile, history, view[(*tile.box, ...)])
        del history  # before the states of the next tile are kept
    return states, log_weight(ctx, chain, workspace, states)


def best_message(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the logs of the largest weights after the last step, [*batch, K], but for a shift."""
    out = ctx.empty((*chain.batch, chain.num_states), ctx.dtype(ctx.precision))
    view = arrange(ctx.xp, chain, out, trailing=1)
    for tile, sweep in sweeps(ctx, chain, workspace, stepper=MaxPlusStepper):
        tile.place(view[(*tile.box, ...)], sweep.last().values)
    return out


def _trace(tile: Tile, history: History, view: Array) -> None:
    """Write the best paths of a tile into a view [*shape, T]."""
    xp, axis = tile.ctx.xp, tile.select_axis
    columns = Columns(tile)
    best = with_final(tile, history.last).values
    # What is not known yet is the last state of a shorter row.
    index = xp.argmax(best, axis=-1)
    # NaN is not -inf.
    alive = xp.max(best, axis=-1) != -math.inf
    for i, step in history.back():
        moved, lanes = slice(tile.count_moves(i + 1)), slice(tile.count(i))
        if moved.stop:
            before = part_of(index, moved, axis)
            best = part_of(step.state.values, moved, axis) + columns.logs_into(i + 1, before)
            before[...] = xp.argmax(best, axis=-1)
        states = part_of(xp.where(alive, index, xp.zeros_like(index)), lanes, axis)
        tile.part(lanes).place(view[..., i : i + 1], states[..., None])


class Columns:
    """Columns of a tile's matrices: what leads to given states."""

    def __init__(self, tile: Tile) -> None:
        self.tile, self.ctx = tile, tile.ctx

    def weights_into(self, i: int, states: Array) -> Array:
        """Return the weights, as given, into states [groups, rows] of step i, [..., K]."""
        xp, matrix = self.ctx.xp, self.tile.matrix(i)
        (groups, size, _), rows = matrix.shape, int(states.shape[1])
        if groups == 1:
            columns = xp.take(matrix, xp.reshape(states, (-1,)), axis=2)
        else:
            lanes = xp.broadcast_to(states[:, None, :], (groups, size, rows))
            columns = xp.take_along_axis(matrix, lanes, axis=2)
        return xp.matrix_transpose(columns)

    def logs_into(self, i: int, states: Array) -> Array:
        """Return their logs, but for a shift of each column: only differences count."""
        ctx = self.ctx
        columns = ctx.load(self.weights_into(i, states), ctx.precision)
        if self.tile.chain.transitions_in_logs:
            return columns - whole_maximum(ctx, columns, -1, ctx.precision)
        return ctx.xp.log(columns)
