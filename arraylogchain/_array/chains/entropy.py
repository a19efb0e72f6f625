"""The entropy of the posterior over paths, by a recursion forward.

H_t(j), the entropy of what leads to state j of step t, follows from that of the step before,

    H_t(j) = sum_k p(k | j) (H_{t-1}(k) - log p(k | j)),    p(k | j) = u_k F_kj / S_j,

u being the forward weights, F the matrix between the two steps and S = u @ F. With w = H - log(u)
this is two more matrix products, ``((u w) @ F - u @ (F log F)) / S + log(S)``. Nothing cancels from
step to step, and what all paths have in common does not show at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from arraylogchain._array.chains.logs import in_widest
from arraylogchain._array.chains.matrices import Matrices, Matrix
from arraylogchain._array.chains.plans import Pieces, cut_chain
from arraylogchain._array.chains.scaled import Options
from arraylogchain._array.chains.states import log_sum, part_of
from arraylogchain._array.chains.sweep import (
    Part,
    Sweep,
    logs_of_all,
    proving_levels,
    states_of_all,
    with_final,
)
from arraylogchain._array.chains.tiles import Tile, arrange, tiles
from arraylogchain._context import Array, Context
from arraylogchain._fold import chunks
from arraylogchain._inputs.chain import Chain


def entropy(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the entropies [*batch] in nats; 0 where there is no path."""
    out = ctx.empty(chain.batch, ctx.result_dtype)
    view = arrange(ctx.xp, chain, out, trailing=0)
    pieces = cut_chain(chain, workspace)
    for tile in tiles(in_widest(ctx), chain, pieces.groups, pieces.rows):
        found = _TileEntropy(tile, pieces, workspace).run()
        tile.place(view[(*tile.box, ...)][..., None], found)
    return out


class _TileEntropy:
    """The recursion for one tile of chains."""

    def __init__(self, tile: Tile, pieces: Pieces, workspace: int) -> None:
        self.tile, self.ctx = tile, tile.ctx
        self.block = max(1, workspace // (8 * 32))
        options = Options(together=pieces.together, panel=pieces.panel, workspace=workspace // 4)
        self.sweep = Sweep(tile, proving_levels(tile.ctx, options))
        self.matrices = Matrices(tile, tile.ctx.precision, pieces.panel)
        self._weighted: tuple[Matrix, Array] | None = None

    def run(self) -> Array:
        """Return the entropies, [groups, rows, 1]."""
        ctx, xp, tile, axis = self.ctx, self.ctx.xp, self.tile, self.tile.select_axis
        before = self._kept(self.sweep.advance())
        entropies = xp.zeros_like(before[0].state.values)  # type: ignore[union-attr]
        for i in range(1, tile.num_steps):
            now = self.sweep.advance()
            moved = slice(tile.count_moves(i))
            after = self._scaled(i, before, part_of(entropies, moved, axis))
            if now[0].gone is not None:
                gone = part_of(xp.any(now[0].gone, axis=1 - axis)[..., 0], moved, 0)
                (index,) = xp.nonzero(gone)
                where = (index, ...) if axis == 0 else (0, index, ...)
                own = self._in_logs(i, before, entropies, index)
                ctx.put(after, where, own if axis == 0 else own[0, ...], add=False)
            part_of(entropies, moved, axis)[...] = after
            before = self._kept(now)
        return self._of_last(before, entropies)

    def _kept(self, parts: Sequence[Part]) -> list[Part]:
        """Return parts as they are now: the sweep goes on with its own."""
        return [replace(part) for part in parts]

    def _scaled(self, i: int, before: Sequence[Part], entropies: Array) -> Array:
        """Return the next entropies of all rows, right for those whose states are scaled."""
        xp, state, matrix = self.ctx.xp, before[0].state, self.matrices.at(i)
        assert state is not None
        u = state.part(slice(self.tile.count_moves(i)), self.tile.select_axis).values
        top = _log(xp, xp.max(u, axis=-1, keepdims=True))
        # Relative to the row's largest weight logs are small where it matters.
        left = u * (entropies - (_log(xp, u) - top))
        found = []
        for j in matrix.panels:
            factor = matrix.factor(j)
            sums = xp.matmul(u, factor)
            if len(matrix.panels) > 1 or self._weighted is None or self._weighted[0] is not matrix:
                self._weighted = matrix, factor * _log(xp, factor)
            terms = xp.matmul(left, factor) - xp.matmul(u, self._weighted[1])
            divisor = xp.where(sums == 0, xp.ones_like(sums), sums)
            found.append(xp.clip(terms / divisor + (_log(xp, sums) - top), min=0.0))
        return found[0] if len(found) == 1 else xp.concat(found, axis=-1)

    def _in_logs(self, i: int, before: Sequence[Part], entropies: Array, index: Array) -> Array:
        """Return the next entropies of some rows."""
        ctx, xp, axis = self.ctx, self.ctx.xp, self.tile.select_axis
        tile = self.tile.select(index)
        logs = logs_of_all(self.tile, before).select(ctx, index, axis).values
        own = xp.take(entropies, index, axis=axis)
        matrix = Matrix(ctx, tile.matrix(i), tile.chain.transitions_in_logs, ctx.widest, [])
        groups, rows, size = (int(n) for n in logs.shape)
        out = ctx.empty((groups, rows, size), logs.dtype)
        width = max(1, min(size, self.block // (groups * size)))
        for j in chunks(size, width):
            edges, _ = matrix.logs(j, ctx.widest)
            for r in chunks(rows, max(1, self.block // (groups * size * width))):
                joint = logs[:, r, :, None] + edges[:, None, :, :]
                p = _normalised(ctx, xp.matrix_transpose(joint))
                terms = xp.where(p == 0, p, p * (own[:, r, None, :] - _log(xp, p)))
                out[:, r, j] = xp.sum(terms, axis=-1)
        return out

    def _of_last(self, parts: Sequence[Part], entropies: Array) -> Array:
        xp, ctx = self.ctx.xp, self.ctx
        state = with_final(self.tile, states_of_all(self.tile, parts))
        p = state.relative(ctx)
        total = xp.sum(p, axis=-1, keepdims=True)
        p = p / xp.where(total == 0, xp.ones_like(total), total)
        infinite = xp.max(state.values, axis=-1, keepdims=True) == xp.inf
        terms = xp.where(p == 0, p, p * (entropies - _log(xp, p)))
        found = xp.sum(terms, axis=-1, keepdims=True)
        return xp.where(infinite, xp.full_like(found, xp.nan), found)


def _normalised(ctx: Context, logs: Array) -> Array:
    """Return probabilities in proportion to exponentials along the last axis; 0 for none."""
    xp, total = ctx.xp, log_sum(ctx, logs)
    return xp.exp(logs - xp.where(total == -xp.inf, xp.zeros_like(total), total))


def _log(xp: Any, x: Array) -> Array:
    """Return the logarithms of nonnegative x, and 0 for that of 0."""
    return xp.log(xp.where(x == 0, xp.ones_like(x), x))
