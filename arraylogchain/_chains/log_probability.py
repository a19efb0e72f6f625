"""Posterior probabilities of given paths, without the cancellation of their weights and log Z.

With beta_x_t = exp(x_t) beta_t the updated backward messages, each state of a path has a
probability given the state before it,

    q_t = p(s_t | s_{t-1}) = w_t(s_t) / sum_k w_t(k),    w_t(k) = P_{t-1}[s_{t-1}, k] beta_x_t[k],

where the initial weights stand for the row of P at the first step. The log of the path's
probability is the sum of

    log q_t = -log1p(sum_{k != s_t} w_t(k) / w_t(s_t)),

all of one sign, from which large weights and the scales of messages have cancelled at each step.
The gradient with respect to log potentials is 1 - p(s_t) at the path's states and -p(k) at others.
The former is computed as the sum of the latter. Pairs are treated likewise: the path's own pair of
states is left out of the product of messages, and the probability of all others is

    1 - p(s_t, s_{t+1}) = sum_{k != s_t} p_t(k) + p_t(s_t) (1 - q_{t+1}).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from arraylogchain._backends.interface import Keep, Messages, SegmentMessages
from arraylogchain._backends.shards import Shard
from arraylogchain._chains.accumulate import Accumulator
from arraylogchain._chains.marginals import BackwardPass, Pullback
from arraylogchain._chains.passes import Pass, passes, run_passes
from arraylogchain._chains.segment_marginals import PairScale, SegmentMarginals
from arraylogchain._core.context import Array, Context, shape_of
from arraylogchain._core.scaled import split_log
from arraylogchain._inputs.chain import Chain, states_of

# Arrays of the size of a segment's messages: in two precisions, with logs, masks and indices.
_NUM_ARRAYS = 20


def log_probability(ctx: Context, chain: Chain, workspace: int, states: Array) -> Array:
    """Return the log probabilities [...] of paths [..., T], as `check_states` returns them."""
    chain, states = _with_row_for_each_path(ctx, chain, states)
    out = ctx.empty(chain.batch, ctx.result_dtype)

    def work(one_pass: Pass) -> None:
        shard, total = one_pass.shard, 0.0
        paths = Paths(shard, states)
        for steps, segment in one_pass.run(Keep.UPDATED):
            total = total + ctx.xp.sum(paths.surprisals(steps.start, segment.updated), axis=0)
        sums = one_pass.carry.to_log_space(ctx).values + paths.initial[0]
        is_finite = ctx.xp.max(sums, axis=-1) < math.inf
        shard.write(out, ctx.xp.where(is_finite, 0.0 - total, math.nan))

    runs = passes("log_probability", ctx, chain, workspace, backward=True, num_arrays=_NUM_ARRAYS)
    run_passes(runs, work)
    return out


def value_and_pullback(
    ctx: Context, chain: Chain, workspace: int, states: Array
) -> tuple[Array, Pullback]:
    """Return log probabilities of paths, and their pullback, which computes all messages again."""
    chain, states = _with_row_for_each_path(ctx, chain, ctx.xp.asarray(states, copy=True))
    out = log_probability(ctx, chain, workspace, states)
    is_infinite = ctx.xp.isinf(out)

    def pullback(cotangent: Array, requested: frozenset[str]) -> dict[str, Array]:
        accumulator = Accumulator(ctx, chain, workspace, requested)
        ctx.record_stream(is_infinite, states)
        g = ctx.xp.where(is_infinite, 0.0, -cotangent)

        def add(one_pass: Pass, partial_sums: Accumulator) -> None:
            PathGradientPass(one_pass.run_and_store(), partial_sums, g, states).add()

        all_passes = passes("log_probability", ctx, chain, workspace, True, num_arrays=_NUM_ARRAYS)
        run_passes(all_passes, add, accumulator)
        return accumulator.results()

    return out, pullback


def _with_row_for_each_path(ctx: Context, chain: Chain, states: Array) -> tuple[Chain, Array]:
    """Return a chain with one row for each path, and the paths in the library that computes."""
    if not ctx.is_numpy:
        states = states_of(ctx, states, None, (slice(None),) * states.ndim)
    return replace(chain, batch=shape_of(states)[:-1]), states


class Paths:
    """Paths of the rows of a shard, one for each row.

    Parameters
    ----------
    shard : Shard
    states : integer array [*batch, T]

    Attributes
    ----------
    initial : array, array [groups, rows, K]
        Logs of initial weights, as of `split_log`.
    """

    def __init__(self, shard: Shard, states: Array) -> None:
        self.shard, self.ctx, self.states = shard, shard.ctx, states
        self.initial = split_log(self.ctx, *shard.boundary_weights(backward=False))

    def at(self, start: int, stop: int) -> Array:
        """Return the states [n, groups, rows] of some steps; 0 past the end of a row."""
        xp, steps = self.ctx.xp, slice(start, min(stop, self.shard.num_steps))
        path = xp.permute_dims(self.shard.read(self.states, (steps,)), (2, 0, 1))
        path, is_valid = self.ctx.cast(path, self.ctx.index_dtype), self.shard.valid_steps(steps)
        return path if is_valid is None else xp.where(is_valid, path, 0)

    def last(self) -> Array:
        """Return the state [groups, rows] at the last step of each row."""
        lengths = self.shard.num_steps if self.shard.lengths is None else self.shard.lengths
        index = self.ctx.integers(np.broadcast_to(lengths, self.shard.state_shape[:2]) - 1)
        states = self.shard.read(self.states)
        return self.ctx.xp.take_along_axis(states, index[..., None], axis=-1)[..., 0]

    def mask(self, path: Array) -> Array:
        """Return masks [..., K] of the states of paths [...]."""
        return path[..., None] == self.ctx.arange(self.shard.chain.num_states)

    def surprisals(self, start: int, updated: Messages) -> Array:
        """Return -log q_t [n, groups, rows], from backward messages of the steps from `start` on.

        They are 0 past the end of a row, and infinite where the path is impossible.
        """
        ctx, xp, stop = self.ctx, self.ctx.xp, start + int(updated.shifts.shape[0])
        values, path = ctx.load(updated.values, ctx.widest), self.at(start, stop)
        messages = replace(updated, values=values).to_log_space(ctx)
        parts = messages.values, *self._from_path(start, stop)
        on_path = [xp.take_along_axis(x, path[..., None], axis=-1) for x in parts]
        # Large numbers cancel first.
        message, weight, remainder = (x - y for x, y in zip(parts, on_path, strict=True))
        ratios = (message + weight) + remainder
        ratios = xp.where(self.mask(path), -math.inf, ratios)
        top = xp.clip(xp.max(ratios, axis=-1), 0.0, None)
        odds = ctx.row_sums(xp.exp(ratios - top[..., None]))
        surprisals = xp.where(top > 0, top + xp.log(odds + xp.exp(-top)), xp.log1p(odds))
        is_impossible = (on_path[0] == -math.inf) | (on_path[1] == -math.inf)
        surprisals = xp.where(is_impossible[..., 0], math.inf, surprisals)
        is_valid = self.shard.valid_steps(slice(start, stop))
        return surprisals if is_valid is None else xp.where(is_valid, surprisals, 0.0)

    def _from_path(self, start: int, stop: int) -> Sequence[Array]:
        """Return logs [n, groups, rows, K] of transitions from the path, or of initial weights.

        They are in two parts, as of `split_log`.
        """
        xp, shard, chain = self.ctx.xp, self.shard, self.shard.chain
        initial, first = [x[None, ...] for x in self.initial], max(start, 1)
        if stop <= first:
            return initial
        times = xp.reshape(self.ctx.arange(stop - first), (-1, 1, 1, 1))
        times = 0 * times if chain.has_one_matrix else times
        groups = xp.reshape(self.ctx.arange(shard.groups), (-1, 1, 1))
        states = self.ctx.arange(chain.num_states)
        matrices, path = shard.matrices(slice(first - 1, stop - 1)), self.at(first - 1, stop - 1)
        weights = matrices[groups, times, path[..., None], states]
        rows = split_log(self.ctx, weights, "transitions" in chain.logs)
        return rows if start else list(map(xp.concat, zip(initial, rows, strict=True)))


class PathMarginals(SegmentMarginals):
    """Marginals of a segment, and the gradient of log probabilities with respect to transitions.

    The product of messages has two rows for each path, which leave out its pair of states: one
    without its state before, one with this state only and without its state after.
    """

    needs_small_pairs = True
    path: Array  # states [n + 1, groups, rows]
    mask: Array  # of these, [n + 1, groups, rows, K]

    def _add_linear_pairs(self, left: Array, right: Array) -> None:
        super()._add_linear_pairs(*self._without_path(left, right, 0.0))

    def _add_log_pairs(self, left: Array, right: Array, scale: PairScale, sign: float) -> None:
        twice = PairScale(*(self.ctx.xp.concat([x, x], axis=2) for x in scale))
        super()._add_log_pairs(*self._without_path(left, right, -math.inf), twice, sign)

    def _without_path(self, left: Array, right: Array, zero: float) -> tuple[Array, Array]:
        xp, mask = self.ctx.xp, self.mask[self.sources, ...]
        left = xp.concat([xp.where(mask, zero, left), xp.where(mask, left, zero)], axis=2)
        without = xp.where(self.mask[self.targets, ...], zero, right)
        return left, xp.concat([right, without], axis=2)

    def add_pairs_of_paths(self, gradients: Array) -> None:
        """Add gradients [n, groups, rows] with respect to the log transitions that paths take."""
        ctx, xp = self.ctx, self.ctx.xp
        parts = self.path[self.sources, ...], self.path[self.targets, ...], gradients
        for transitions, columns, matrix in self._matrix_panels():
            arrays = (self.shard.by_matrix(x[transitions, ..., None]) for x in parts)
            (before, after, g), (count, size, width) = arrays, matrix.shape
            after = after - columns.start
            g = xp.where((after >= 0) & (after < width), g, 0.0)
            at = ctx.arange(count)[:, None, None]
            at = (at * size + before) * width + xp.clip(after, 0, width - 1)
            at, g = xp.reshape(at, (-1,)), xp.reshape(g, (-1,))
            if not self.sums.accumulator.by_logs:
                weights = ctx.load(xp.take(xp.reshape(matrix, (-1,)), at), self.precision)
                limit = 2.0**self.precision.top / g.shape[0]  # large ones of both signs cancel
                g = xp.clip(xp.where(g == 0, 0.0, g / weights), -limit, limit)
            pairs = xp.zeros((count * size * width,), dtype=g.dtype, device=ctx.device)
            ctx.add_at(pairs, at, g)
            self._add_pairs(xp.reshape(pairs, matrix.shape), transitions, columns)


class PathGradientPass(BackwardPass):
    """The backward pass that adds gradients of log probabilities, times *negative* cotangents."""

    def __init__(
        self, forward_pass: Pass, accumulator: Accumulator, cotangent: Array, states: Array
    ) -> None:
        super().__init__(forward_pass, accumulator, cotangent)
        self.paths = Paths(self.shard, states)

    def _add_segment(self, steps: slice, forward: Messages, back: SegmentMessages) -> None:
        ctx, xp, paths = self.ctx, self.ctx.xp, self.paths
        segment = PathMarginals(self.sums, steps, forward, back.predicted, back.updated)
        segment.path = paths.at(steps.start, steps.stop + 1)
        segment.mask = paths.mask(segment.path)
        count = segment.sources.stop
        if count:
            # Marginals overwrite these messages.
            surprisals = paths.surprisals(steps.start + 1, back.updated.steps(segment.targets))
        marginals, mask = segment.marginals(), segment.mask[: steps.stop - steps.start, ...]
        on_path = ctx.row_sums(xp.where(mask, marginals, 0.0))
        off_path = ctx.row_sums(xp.where(mask, 0.0, marginals))
        gradients = xp.where(mask, -off_path[..., None], marginals)
        self.add_marginals(steps, gradients, forward)
        if count:
            # Minus the probability to be on the path and leave it with the next step.
            leaving = on_path[:count, ...] * ctx.load(xp.expm1(-surprisals), self.precision)
            gradients = segment.where(segment.no_pair, 0.0, leaving - off_path[:count, ...])
            segment.add_pairs_of_paths(gradients)

    def boundary_gradients(
        self, message: Messages, weights: Array, is_log: bool
    ) -> tuple[Array, Array]:
        ctx, xp, is_final = self.ctx, self.ctx.xp, message is self.forward_pass.carry
        # Probabilities are summed, as gradients by weights may be out of range.
        gradient, by_logs = super().boundary_gradients(message, weights, is_log)
        state = self.paths.last() if is_final else self.paths.at(0, 1)[0, ...]
        mask = self.paths.mask(state)
        weights = ctx.cast(xp.ones_like(weights) if is_log else weights, gradient.dtype)
        off_path = ctx.row_sums(xp.where(mask, 0.0, by_logs))[..., None]
        on_path = xp.where(off_path == 0, 0.0, -off_path / weights)
        return xp.where(mask, on_path, gradient), by_logs
