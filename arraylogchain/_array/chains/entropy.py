"""The entropy of the posterior over paths, by a recursion forward.

H_t(j), the entropy of what leads to state j of step t, follows from that of the step before,

    H_t(j) = sum_k p(k | j) (H_{t-1}(k) - log p(k | j)),    p(k | j) = u_k F_kj / S_j,

u being the forward weights, F the matrix between the two steps and S = u @ F, which the sweep has.
With w = H - log(u) this is two more matrix products, ``((u w) @ F - u @ (F log F)) / S + log(S)``.
Nothing cancels from step to step, and what all paths have in common does not show at all. The
integer part of the row's largest entropy is kept apart, so that sums of many steps stay exact.
"""

from __future__ import annotations

from typing import Any

from arraylogchain._array.chains.logs import LogMatrix, joint_logs
from arraylogchain._array.chains.matrices import Matrix
from arraylogchain._array.chains.states import part_of, relative
from arraylogchain._array.chains.sweep import Step, Sweep, sweeps, with_final
from arraylogchain._array.chains.tiles import Tile, arrange
from arraylogchain._context import Array, Context, whole_maximum
from arraylogchain._inputs.chain import Chain


def entropy(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the entropies [*batch] in nats; 0 where there is no path."""
    out = ctx.empty(chain.batch, ctx.result_dtype)
    view = arrange(ctx.xp, chain, out, trailing=0)
    for tile, sweep in sweeps(ctx, chain, workspace):
        found = _TileEntropy(tile, sweep).run()
        tile.place(view[(*tile.box, ...)][..., None], found)
    return out


class _TileEntropy:
    """The recursion for one tile of chains."""

    def __init__(self, tile: Tile, sweep: Sweep) -> None:
        self.tile, self.ctx, self.sweep = tile, tile.ctx, sweep
        self._weighted: tuple[Matrix, Array] | None = None

    def run(self) -> Array:
        """Return the entropies, [groups, rows, 1]."""
        ctx, xp, tile, axis = self.ctx, self.ctx.xp, self.tile, self.tile.select_axis
        before = self.sweep.advance()
        entropies = xp.zeros_like(before.state.values)
        whole, ended = xp.zeros_like(before.state.exponent), []
        for i in range(1, tile.num_steps + 1):
            if (ending := tile.ending(i - 1)).start < ending.stop:
                of_ending = (part_of(x, ending, axis) for x in (entropies, whole))
                ended.append(sum(ctx.load(x, ctx.widest) for x in of_ending))
            if i == tile.num_steps:
                break
            now, moved = self.sweep.advance(), slice(tile.count(i))
            entropies, whole = (part_of(x, moved, axis) for x in (entropies, whole))
            entropies = ctx.load(entropies, now.precision)
            shift = whole_maximum(ctx, entropies, -1, now.precision)
            after = self._scaled(i, before, now, entropies, shift)
            if now.gone is not None and bool(xp.any(part_of(now.gone, moved, axis))):
                gone = xp.any(part_of(now.gone, moved, axis), axis=1 - axis)[..., 0]
                (index,) = xp.nonzero(gone)
                own = self._in_logs(i, before, index, xp.take(entropies, index, axis=axis))
                own = own - ctx.load(xp.take(shift, index, axis=axis), ctx.widest)
                tile.put_lanes(after, index, ctx.load(own, now.precision))
            entropies, whole, before = after, whole + ctx.load(shift, ctx.widest), now
        return self._of_last(xp.concat(ended[::-1], axis=axis))

    def _scaled(self, i: int, before: Step, now: Step, entropies: Array, shift: Array) -> Array:
        """Return the next entropies less `shift`, right for rows whose states are scaled."""
        xp, ctx, precision = self.ctx.xp, self.ctx, now.precision
        moved, axis = slice(self.tile.count_moves(i)), self.tile.select_axis
        u, sums = (part_of(x.values, moved, axis) for x in (before.state, now.product))
        u, matrix = ctx.load(u, precision), self.sweep.scaled.matrices.at(i)
        # Relative to the row's largest weight logs are small where it matters.
        top = _log(xp, xp.max(u, axis=-1, keepdims=True))
        left = u * (entropies - (_log(xp, u) - (top - shift)))
        out = ctx.empty(tuple(u.shape), u.dtype)
        for j in matrix.panels:
            factor = matrix.factor(j)
            if len(matrix.panels) > 1 or self._weighted is None or self._weighted[0] is not matrix:
                self._weighted = matrix, factor * _log(xp, factor)
            terms = xp.matmul(left, factor) - xp.matmul(u, self._weighted[1])
            # A state that is not reached has no weight; its entropy just has to be finite.
            divisor = xp.clip(sums[:, :, j], min=precision.tiny)
            out[:, :, j] = terms / divisor + (xp.log(divisor) - top)
        return out

    def _in_logs(self, i: int, before: Step, index: Array, entropies: Array) -> Array:
        """Return the next entropies of some rows, or groups."""
        ctx, xp, tile = self.ctx, self.ctx.xp, self.tile.select(index)
        state = before.in_log_form(self.tile)
        logs = xp.take(state.values, index, axis=tile.select_axis)
        own = ctx.load(entropies, ctx.widest)
        matrix = LogMatrix(ctx, tile.matrix(i), tile.chain.transitions_in_logs)
        out = xp.empty_like(logs)
        for r, j, joint in joint_logs(ctx, logs, matrix, self.sweep.options.pieces):
            p = relative(xp, xp.matrix_transpose(joint))
            out[:, r, j] = _mean_surprise(xp, p, own[:, r, None, :])[..., 0]
        return out

    def _of_last(self, entropies: Array) -> Array:
        xp, state = self.ctx.xp, with_final(self.tile, self.sweep.last())
        found = _mean_surprise(xp, state.relative(self.ctx), entropies)
        infinite = xp.max(state.values, axis=-1, keepdims=True) == xp.inf
        return xp.where(infinite, xp.full_like(found, xp.nan), xp.clip(found, min=0.0))


def _mean_surprise(xp: Any, weights: Array, entropies: Array) -> Array:
    """Return the means of entropies - log(p), for p in proportion to weights; 0 for none."""
    total = xp.sum(weights, axis=-1, keepdims=True)
    p = weights / xp.where(total == 0, xp.ones_like(total), total)
    return xp.sum(xp.where(p == 0, p, p * (entropies - _log(xp, p))), axis=-1, keepdims=True)


def _log(xp: Any, x: Array) -> Array:
    """Return the logarithms of nonnegative x, and 0 for that of 0."""
    return xp.log(xp.where(x == 0, xp.ones_like(x), x))
