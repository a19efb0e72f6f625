"""Paths of largest weight: forward with max-plus steps, and back along what they found.

Which state a path came from is not kept: it is found again on the way back, for the one state in
question, from the same sums. That costs K additions for a step where keeping it costs K * K
comparisons more.
"""

from __future__ import annotations

import math

from arraylogchain._array.chains.maxplus import MaxPlusStepper
from arraylogchain._array.chains.plans import cut_chain
from arraylogchain._array.chains.scaled import Options
from arraylogchain._array.chains.states import part_of
from arraylogchain._array.chains.sweep import History, Sweep, with_final
from arraylogchain._array.chains.tiles import Tile, arrange, tiles
from arraylogchain._context import Array, Context, whole_maximum
from arraylogchain._inputs.chain import Chain


def viterbi(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return a path of largest weight, [*batch, T].

    Of several the one with the smallest last state, and so on back to the first state. Past a
    row's length states are -1. All states are 0 where no path has a positive weight.
    """
    xp = ctx.xp
    shape = (*chain.batch, chain.num_steps)
    states = xp.full(shape, -1, dtype=ctx.index_dtype, device=ctx.device)
    view = arrange(xp, chain, states, trailing=1)
    pieces = cut_chain(chain, workspace, history=True)
    for tile in tiles(ctx, chain, pieces.groups, pieces.rows):
        history = History(Sweep(tile, Options(pieces), MaxPlusStepper), pieces)
        _trace(tile, history, view[(*tile.box, ...)])
        del history  # before the states of the next tile are kept
    return states


def _trace(tile: Tile, history: History, view: Array) -> None:
    """Write the best paths of a tile into a view [*shape, T]."""
    xp, axis = tile.ctx.xp, tile.select_axis
    columns = Columns(tile)
    index = alive = None
    for i, step in history.back():
        best = step.state.values
        if index is None:
            # Rows that ended earlier still have their last state.
            best = with_final(tile, step.state).values
            index = xp.argmax(best, axis=-1)
            # NaN is not -inf.
            alive = xp.max(best, axis=-1) != -math.inf
        else:
            moved = slice(tile.count_moves(i + 1))
            before = part_of(index, moved, axis)
            best = part_of(best, moved, axis) + columns.logs_into(i + 1, before)
            before[...] = xp.argmax(best, axis=-1)
        lanes = slice(tile.count(i))
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
