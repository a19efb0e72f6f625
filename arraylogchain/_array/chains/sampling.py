"""Exact samples of paths: forward filtering, backward sampling.

The last state is drawn from the forward weights of the last step. Given a state j that follows, the
one before it is k with a probability in proportion to ``alpha[k] * P[k, j]``, whatever comes later.
Where that underflows it is taken from logarithms, so that states that are negligible at their step,
but lead to j alone, are drawn as often as they should be.
"""

from __future__ import annotations

import math

from arraylogchain._array.chains.states import State, part_of, relative
from arraylogchain._array.chains.sweep import History, histories, with_final
from arraylogchain._array.chains.tiles import Tile, arrange
from arraylogchain._array.chains.values import log_totals
from arraylogchain._array.chains.viterbi import Columns
from arraylogchain._context import Array, Context
from arraylogchain._fold import chunks
from arraylogchain._inputs.chain import Chain


def sample(ctx: Context, chain: Chain, workspace: int, out: Array, uniforms: Array) -> None:
    """Write paths into `out`, [num_samples, *batch, T]; 0 where there is none, -1 past the end.

    `uniforms` are numbers in [0, 1) of the same shape, which may share the memory of `out`: that of
    a step is read before its state is written. At a row's last step, -1 - k stands for state k.
    """
    xp = ctx.xp
    order = (*range(1, out.ndim), 0)
    views = [arrange(xp, chain, xp.permute_dims(x, order), trailing=2) for x in (out, uniforms)]
    for tile, history in histories(ctx, chain, workspace // 2):
        sampler = _TileSampler(tile, history, workspace)
        sampler.draw(*(view[(*tile.box, ...)] for view in views))
        del sampler, history  # before the states of the next tile are kept
    if chain.lengths is not None:
        lengths, together = ctx.integers(chain.lengths), max(1, workspace // 64 // chain.num_rows)
        for n in chunks(int(out.shape[0]), together):
            for i in range(chain.num_steps):
                path = out[n, ..., i]
                path[...] = xp.where(lengths > i, path, xp.full_like(path, -1))


class _TileSampler:
    """Draws the paths of one tile of chains, within a workspace."""

    def __init__(self, tile: Tile, history: History, workspace: int) -> None:
        self.tile, self.ctx, self.columns = tile, tile.ctx, Columns(tile)
        self.history = history
        entries = 8 * 6 * tile.state_shape[0] * tile.state_shape[1] * tile.state_shape[2]
        self.together = max(1, workspace // 4 // entries)

    def draw(self, out: Array, uniforms: Array) -> None:
        """Draw paths backwards in time into a view [*shape, T, num_samples]."""
        whole, axis, xp = self.tile, self.tile.select_axis, self.ctx.xp
        some = list(chunks(int(out.shape[-1]), self.together))
        no_path = log_totals(whole, self.history.last) == -math.inf
        last: list[Array] = []
        for i, step in self.history.back():
            # Rows that have this step, and among them those for which it is the last.
            here, ended = slice(whole.count(i)), whole.ending(i)
            state, tile, drawn = step.of_all(whole), whole.part(here), []
            for n, samples in enumerate(some):
                u = tile.expanded(uniforms[..., i, samples], (samples.stop - samples.start,))
                u = self.ctx.load(u, self.ctx.widest)
                found = []
                if ended.start:
                    before = slice(ended.start)
                    weights = self._weights(i, state.part(before, axis), last[n])
                    found.append(self._draw(weights, part_of(u, before, axis)))
                if ended.start < ended.stop:
                    final = with_final(whole.part(ended), state.part(ended, axis))
                    weights = final.relative(self.ctx)[:, :, None, :]
                    u = part_of(u, ended, axis)
                    states = self._draw(weights, u)
                    found.append(xp.where(u < 0, xp.astype(-1 - u, states.dtype), states))
                drawn.append(found[0] if len(found) == 1 else xp.concat(found, axis=axis))
                paths = xp.where(part_of(no_path, here, axis), xp.zeros_like(drawn[n]), drawn[n])
                tile.place(out[..., i, samples], paths)
            last = drawn

    def _weights(self, i: int, state: State, after: Array) -> Array:
        """Return weights [groups, rows, samples, K] of states i, given those after, up to factors.

        None of them lost more than rounding to underflow, beside their sum.
        """
        ctx, xp, wide = self.ctx, self.ctx.xp, self.ctx.widest
        groups, rows, samples = after.shape
        edges = self.columns.weights_into(i + 1, xp.reshape(after, (groups, rows * samples)))
        edges = ctx.load(xp.reshape(edges, (groups, rows, samples, edges.shape[-1])), wide)
        in_logs = self.tile.chain.transitions_in_logs
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
