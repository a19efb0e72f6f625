"""Exact samples of paths: forward filtering, backward sampling.

The last state is drawn from the forward weights of the last step. Given a state j that follows, the
one before it is k with a probability in proportion to ``alpha[k] * P[k, j]``, whatever comes later.
Where that underflows it is taken from logarithms, so that states that are negligible at their step,
but lead to j alone, are drawn as often as they should be.
"""

from __future__ import annotations

from collections.abc import Sequence

from arraylogchain._array.chains.plans import Pieces, cut_chain
from arraylogchain._array.chains.scaled import Options
from arraylogchain._array.chains.states import State, part_of, relative
from arraylogchain._array.chains.sweep import History, Sweep, with_final
from arraylogchain._array.chains.tiles import Tile, arrange, tiles
from arraylogchain._array.chains.viterbi import Columns
from arraylogchain._context import Array, Context
from arraylogchain._fold import chunks
from arraylogchain._inputs.chain import Chain

# Stands for the states of chains without a path until all are drawn.
_NO_PATH = -2


def sample(ctx: Context, chain: Chain, workspace: int, out: Array, uniforms: Array) -> None:
    """Write paths into `out`, [num_samples, *batch, T]; 0 where there is none, -1 past the end.

    `uniforms` are numbers in [0, 1) of the same shape, which may share the memory of `out`: that of
    a step is read before its state is written.
    """
    xp = ctx.xp
    order = (*range(1, out.ndim), 0)
    views = [arrange(xp, chain, xp.permute_dims(x, order), trailing=2) for x in (out, uniforms)]
    pieces = cut_chain(chain, workspace // 2, history=True)
    for tile in tiles(ctx, chain, pieces.groups, pieces.rows):
        sampler = _TileSampler(tile, pieces, workspace)
        sampler.draw(*(view[(*tile.box, ...)] for view in views))
        del sampler  # before the states of the next tile are kept


class _TileSampler:
    """Draws the paths of one tile of chains, within a workspace."""

    def __init__(self, tile: Tile, pieces: Pieces, workspace: int) -> None:
        self.tile, self.ctx, self.columns = tile, tile.ctx, Columns(tile)
        self.history = History(Sweep(tile, Options(pieces)), pieces)
        entries = 8 * 6 * tile.state_shape[0] * tile.state_shape[1] * tile.state_shape[2]
        self.together = max(1, workspace // 4 // entries)

    def draw(self, out: Array, uniforms: Array) -> None:
        """Draw paths backwards in time into a view [*shape, T, num_samples]."""
        whole, axis, xp = self.tile, self.tile.select_axis, self.ctx.xp
        drawn: list[Array] = []
        some = list(chunks(int(out.shape[-1]), self.together))
        self._end(out, some)
        for i, step in self.history.back():
            last, drawn = drawn, []
            # Those that have this step, and among them those for which it is the last.
            here = slice(whole.count(i))
            ended = slice(whole.count_moves(i + 1) if last else 0, here.stop)
            state, tile = step.of_all(whole).part(here, axis), whole.part(here)
            for n, samples in enumerate(some):
                shape = (samples.stop - samples.start,)
                u = tile.expanded(uniforms[..., i, samples], shape)
                u = self.ctx.load(u, self.ctx.widest)
                now = [self._draw_before(i, state, last[n], u)] if last else []
                if ended.start < ended.stop:
                    now.append(self._last(ended, state, u))
                drawn.append(now[0] if len(now) == 1 else xp.concat(now, axis=axis))
                found = xp.where(drawn[-1] < 0, xp.zeros_like(drawn[-1]), drawn[-1])
                tile.place(out[..., i, samples], found)

    def _end(self, out: Array, some: Sequence[slice]) -> None:
        """Write -1 past the end of each row."""
        tile, ctx = self.tile, self.ctx
        for i in range(int(out.shape[-2])):
            count = tile.count(i) if i < tile.num_steps else 0
            if count == tile.state_shape[tile.select_axis]:
                continue
            ended = tile.part(slice(count, None))
            for samples in some:
                shape = (*ended.state_shape[:2], samples.stop - samples.start)
                ended.place(
                    out[..., i, samples], ctx.xp.full(shape, -1, dtype=out.dtype, device=ctx.device)
                )

    def _last(self, ended: slice, state: State, uniforms: Array) -> Array:
        """Draw the last states of some rows, or groups, [groups, rows, samples]."""
        xp, ctx, axis = self.ctx.xp, self.ctx, self.tile.select_axis
        uniforms = part_of(uniforms, ended, axis)
        last = with_final(self.tile.part(ended), state.part(ended, axis))
        weights = last.relative(ctx)[:, :, None, :]
        groups, rows, samples = uniforms.shape
        drawn = self._draw(
            xp.broadcast_to(weights, (groups, rows, samples, weights.shape[-1])), uniforms
        )
        nothing = xp.all(weights == 0, axis=-1)
        return xp.where(nothing, xp.full_like(drawn, _NO_PATH), drawn)

    def _draw_before(self, i: int, state: State, drawn: Array, uniforms: Array) -> Array:
        """Draw states number i, given those that follow."""
        xp, axis = self.ctx.xp, self.tile.select_axis
        moved = slice(int(drawn.shape[axis]))
        state, uniforms = state.part(moved, axis), part_of(uniforms, moved, axis)
        groups, rows, samples = (int(n) for n in drawn.shape)
        after = xp.reshape(xp.clip(drawn, min=0), (groups, rows * samples))
        edges = self.columns.weights_into(i + 1, after)
        edges = xp.reshape(edges, (groups, rows, samples, edges.shape[-1]))
        before = self._draw(self._weights(state, edges), uniforms)
        return xp.where(drawn < 0, drawn, before)

    def _weights(self, state: State, edges: Array) -> Array:
        """Return the weights of states, [groups, rows, samples, K], up to factors.

        None of them lost more than rounding to underflow, beside their sum.
        """
        ctx, xp, wide = self.ctx, self.ctx.xp, self.ctx.widest
        in_logs, edges = self.tile.chain.transitions_in_logs, ctx.load(edges, wide)
        linear = relative(ctx.xp, edges) if in_logs else edges
        weights = state.relative(ctx)[:, :, None, :] * linear
        # Products and factors below tiny are what can be lost: at most 2 K tiny of a sum.
        threshold = 2.0 * int(edges.shape[-1]) * wide.tiny / wide.eps
        if bool(xp.all(xp.sum(weights, axis=-1) >= threshold)):
            return weights
        logs = edges if in_logs else xp.log(edges)
        return relative(xp, state.in_log_form(ctx).values[:, :, None, :] + logs)

    def _draw(self, weights: Array, uniforms: Array) -> Array:
        """Draw one of the last axis for each of the others."""
        xp = self.ctx.xp
        below = xp.cumulative_sum(weights, axis=-1)
        total = below[..., -1:]
        level = uniforms[..., None] * total
        # The first state whose sum is above the level adds something to it, so that its weight is
        # not 0; should the level be rounded up to the total, it is the last that adds something.
        return xp.argmax(xp.astype((below > level) | (below == total), xp.uint8), axis=-1)
