"""Posterior probabilities of given paths, without the cancellation of their weights and log Z.

With alpha_t the forward messages, each state of a path has a probability given the state after it,

    q_t = p(s_t | s_{t+1}) = w_t(s_t) / sum_k w_t(k),    w_t(k) = alpha_t[k] P_t[k, s_{t+1}],

where the final weights stand for the column of P at a row's last step. The log of the path's
probability is the sum of

    log q_t = -log1p(sum_{k != s_t} w_t(k) / w_t(s_t)),

all of one sign, from which large weights and the scales of messages have cancelled at each step.
The gradient with respect to log potentials is 1 - p(s_t) at the path's states and -p(k) at others.
The former is computed as the sum of the latter. Pairs are treated likewise: the path's own pair of
states is left out of the product of messages, and the probability of all others is

    1 - p(s_t, s_{t+1}) = sum_{k != s_{t+1}} p_{t+1}(k) + p_{t+1}(s_{t+1}) (1 - q_t).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from arraylogchain._backends.interface import Keep, Messages, SegmentMessages
from arraylogchain._backends.shards import Shard
from arraylogchain._chains.accumulate import Accumulator
from arraylogchain._chains.marginals import BackwardPass, Pullback, passes_to_store
from arraylogchain._chains.passes import Pass, last_logs, log_sum, passes, run_passes
from arraylogchain._chains.segment_marginals import PairScale, SegmentMarginals
from arraylogchain._core.axes import chunks
from arraylogchain._core.context import Array, Context, shape_of
from arraylogchain._inputs.chain import Chain, states_of

# Arrays of the size of a segment's messages: in two precisions, with logs, masks and indices.
_NUM_ARRAYS = 20


def log_probability(ctx: Context, chain: Chain, workspace: int, states: Array) -> Array:
    """Return the log probabilities [...] of paths [..., T], as `check_states` returns them."""
    chain, states = _of_paths(ctx, chain, states)
    out = ctx.empty(chain.batch, ctx.result_dtype)

    def work(one_pass: Pass) -> None:
        total = PathSteps(one_pass.shard, states, one_pass.workspace)
        for steps, segment in one_pass.run(Keep.UPDATED):
            total.add(steps, segment.updated)
        one_pass.shard.write(out, total.result(one_pass.carry))

    all_passes = passes("log_probability", ctx, chain, workspace, num_arrays=_NUM_ARRAYS)
    run_passes(ctx, all_passes, work)
    return out


def value_and_pullback(
    ctx: Context, chain: Chain, workspace: int, stores_all: bool, states: Array
) -> tuple[Array, Pullback]:
    """Return log probabilities of paths, and their pullback; see `marginals.value_and_pullback`."""
    chain, states = _of_paths(ctx, chain, ctx.xp.asarray(states, copy=True))
    out = ctx.empty(chain.batch, ctx.result_dtype)
    all_passes = passes_to_store("log_probability", ctx, chain, workspace, stores_all, _NUM_ARRAYS)

    def run(one_pass: Pass) -> None:
        one_pass.run_and_store()
        total = PathSteps(one_pass.shard, states, one_pass.workspace)
        for n, steps in enumerate(one_pass.segments):
            total.add(steps, one_pass.stored_messages(n))
        one_pass.shard.write(out, total.result(one_pass.carry))
        one_pass.backend = one_pass.with_new_backend().backend

    run_passes(ctx, all_passes, run)
    has_no_gradient = ctx.xp.isinf(out)

    def pullback(cotangent: Array, requested: frozenset[str]) -> dict[str, Array]:
        accumulator = Accumulator(ctx, chain, workspace, requested)
        g = ctx.xp.where(has_no_gradient, 0.0, -cotangent)

        def add(one_pass: Pass, partial_sums: Accumulator) -> None:
            PathGradientPass(one_pass.with_new_backend(), partial_sums, g, states).add()

        run_passes(ctx, all_passes, add, accumulator)
        return accumulator.results()

    return out, pullback


def _of_paths(ctx: Context, chain: Chain, states: Array) -> tuple[Chain, Array]:
    """Return a chain with one row for each path, and the paths in the library that computes."""
    if not ctx.is_numpy:
        states = states_of(ctx, states, None, (slice(None),) * states.ndim)
    return replace(chain, batch=shape_of(states)[:-1]), states


class PathSteps:
    """Probabilities of the states of paths given the states after them, one path for each row.

    Parameters
    ----------
    shard : Shard
    states : integer array [*batch, T]
    workspace : int
        Bytes for temporaries.
    """

    def __init__(self, shard: Shard, states: Array, workspace: int) -> None:
        self.shard, self.ctx, self.states, self.workspace = shard, shard.ctx, states, workspace
        lengths = np.asarray(shard.num_steps if shard.lengths is None else shard.lengths)
        self.last = self.ctx.integers(lengths - 1)
        self.total: Any = 0.0

    def path(self, steps: slice) -> Array:
        """Return states [n, groups, rows]; 0 past the end of a row."""
        steps = slice(steps.start, min(steps.stop, self.shard.num_steps))
        xp, is_valid = self.ctx.xp, self.shard.valid_steps(steps)
        path = xp.permute_dims(self.shard.read(self.states, (steps,)), (2, 0, 1))
        path = xp.astype(path, self.ctx.index_dtype, copy=False)
        return path if is_valid is None else xp.where(is_valid, path, 0)

    def last_states(self) -> Array:
        """Return the state [groups, rows] at the last step of each row."""
        states = self.shard.read(self.states)
        last = self.last + self.ctx.xp.zeros(states.shape[:2], dtype=self.last.dtype)
        return self.ctx.xp.take_along_axis(states, last[..., None], axis=-1)[..., 0]

    def add(self, steps: slice, updated: Messages) -> None:
        """Add the logs of a segment to the total, given its forward messages."""
        size = max(1, self.workspace // (8 * _NUM_ARRAYS * math.prod(self.shard.state_shape)))
        for part in chunks(steps.stop - steps.start, size):
            absolute = slice(steps.start + part.start, steps.start + part.stop)
            losses = self.losses(absolute, updated.steps(part))
            self.total = self.total - self.ctx.xp.sum(losses, axis=0)

    def result(self, last: Messages) -> Array:
        """Return log probabilities [groups, rows], given the last forward message."""
        log_z = log_sum(self.ctx.xp, last_logs(self.shard, last).values)
        return self.ctx.xp.where(log_z < math.inf, self.total, math.nan)

    def losses(self, steps: slice, updated: Messages) -> Array:
        """Return -log q_t of steps, [n, groups, rows], from their forward messages.

        They are 0 past the end of a row, and infinite where a path is impossible.
        """
        ctx, xp, path = self.ctx, self.ctx.xp, self.path(steps)
        values = ctx.load(updated.values, ctx.widest)
        messages = Messages(values, updated.shifts, updated.exponents, updated.is_log)
        parts = messages.to_log_space(ctx).values, self._ahead(steps)
        own = [xp.take_along_axis(x, path[..., None], axis=-1) for x in parts]
        # Large numbers cancel first.
        ratios = (parts[0] - own[0]) + (parts[1] - own[1])
        ratios = xp.where(is_state(ctx, path, self.shard.chain.num_states), -math.inf, ratios)
        top = xp.clip(xp.max(ratios, axis=-1), 0.0, None)
        others = ctx.row_sums(xp.exp(ratios - top[..., None]))
        losses = xp.where(top > 0, top + xp.log(others + xp.exp(-top)), xp.log1p(others))
        is_impossible = (own[0] == -math.inf) | (own[1] == -math.inf)
        losses = xp.where(is_impossible[..., 0], math.inf, losses)
        is_valid = self.shard.valid_steps(steps)
        return losses if is_valid is None else xp.where(is_valid, losses, 0.0)

    def _ahead(self, steps: slice) -> Array:
        """Return logs of what leads on from each state to the path, [n, groups, rows, K].

        They are transitions to its next state or, at a row's last step, final weights.
        """
        xp, shard = self.ctx.xp, self.shard
        groups, _, size = shard.state_shape
        final, is_log = shard.boundary_weights(backward=True)
        ahead = self._logs(final, is_log)[None, ...]
        count = min(steps.stop, shard.num_steps - 1) - steps.start
        if not count:
            return ahead
        matrices = shard.matrices(slice(steps.start, steps.start + count))
        times = xp.reshape(self._arange(count), (-1, 1, 1, 1))
        index = (
            xp.reshape(self._arange(groups), (-1, 1, 1)),
            0 * times if shard.chain.has_one_matrix else times,
            self._arange(size),
            self.path(slice(steps.start + 1, steps.start + count + 1))[..., None],
        )
        columns = self._logs(matrices[index], "transitions" in shard.chain.logs)
        if count < steps.stop - steps.start:
            columns = xp.concat([columns, ahead], axis=0)
        is_last = xp.reshape(self._arange(steps.stop - steps.start), (-1, 1, 1)) + steps.start
        return xp.where((is_last == self.last)[..., None], ahead, columns)

    def _logs(self, weights: Array, is_log: bool) -> Array:
        weights = self.ctx.load(weights, self.ctx.widest)
        return weights if is_log else self.ctx.xp.log(weights)

    def _arange(self, count: int) -> Array:
        return self.ctx.xp.arange(count, dtype=self.ctx.index_dtype, device=self.ctx.device)


class PathMarginals(SegmentMarginals):
    """Marginals of a segment, and the gradient of log probabilities with respect to transitions.

    The product of messages has two rows for each path, which leave out its own pair of states: one
    without its state before, one with this state only and without its state after.
    """

    needs_small_pairs = True
    path: Array  # states [n + 1, groups, rows]

    def _add_linear_pairs(self, left: Array, right: Array) -> None:
        super()._add_linear_pairs(*self._without_own(left, right, 0.0))

    def _add_log_pairs(self, left: Array, right: Array, scale: PairScale, sign: float) -> None:
        twice = PairScale(*(self.ctx.xp.concat([x, x], axis=2) for x in scale))
        super()._add_log_pairs(*self._without_own(left, right, -math.inf), twice, sign)

    def _without_own(self, left: Array, right: Array, zero: float) -> tuple[Array, Array]:
        xp = self.ctx.xp
        before, after = (
            is_state(self.ctx, self.path[part, ...], self.shard.chain.num_states)
            for part in (self.sources, self.targets)
        )
        left = xp.concat([xp.where(before, zero, left), xp.where(before, left, zero)], axis=2)
        return left, xp.concat([right, xp.where(after, zero, right)], axis=2)

    def add_own_pairs(self, gradients: Array) -> None:
        """Add gradients [n, groups, rows] with respect to the log transitions that paths take."""
        ctx, xp, by_matrix = self.ctx, self.ctx.xp, self.shard.by_matrix
        paths = self.path[self.sources, ..., None], self.path[self.targets, ..., None]
        gradients = gradients[..., None]
        for transitions, columns, matrix in self._matrix_panels():
            before, after, g = (by_matrix(x[transitions, ...]) for x in (*paths, gradients))
            count, size, width = matrix.shape
            after = after - columns.start
            is_inside = (after >= 0) & (after < width)
            at = xp.arange(count, dtype=after.dtype, device=ctx.device)[:, None, None]
            at = (at * size + before) * width + xp.clip(after, 0, width - 1)
            at, g = (xp.reshape(x, (-1,)) for x in (at, xp.where(is_inside, g, 0.0)))
            if not self.sums.accumulator.by_logs:
                weights = ctx.load(xp.take(xp.reshape(matrix, (-1,)), at), ctx.widest)
                g = xp.where(g == 0, 0.0, g / weights)
            pairs = xp.zeros((count * size * width,), dtype=g.dtype, device=ctx.device)
            ctx.add_at(pairs, at, g)
            self._add_pairs(xp.reshape(pairs, matrix.shape), transitions, columns)


class PathGradientPass(BackwardPass):
    """The backward pass that adds gradients of log probabilities, times *negative* cotangents."""

    def __init__(
        self, forward_pass: Pass, accumulator: Accumulator, cotangent: Array, states: Array
    ) -> None:
        super().__init__(forward_pass, accumulator, cotangent)
        self.path_steps = PathSteps(self.shard, states, forward_pass.workspace)
        # Marginals of the path's state and of all others, at the first step of the segment after.
        self.after: Any = None

    def _add_segment(self, steps: slice, forward: Messages, back: SegmentMessages) -> None:
        ctx, xp, path_steps = self.ctx, self.ctx.xp, self.path_steps
        segment = PathMarginals(self.sums, steps, forward, back.predicted, back.updated)
        segment.path = path_steps.path(slice(steps.start, steps.stop + 1))
        marginals = segment.in_linear_space()
        if marginals is None:
            marginals = segment.in_log_space()
        is_own = is_state(ctx, path_steps.path(steps), self.shard.chain.num_states)
        parts = xp.where(is_own, marginals, 0.0), xp.where(is_own, 0.0, marginals)
        own, others = map(ctx.row_sums, parts)
        gradients = xp.where(is_own, -others[..., None], marginals)
        self.add_marginals(steps, gradients, forward)
        if count := segment.sources.stop:
            following = [x[1:, ...] for x in (own, others)]
            if count == steps.stop - steps.start:
                following = [
                    xp.concat(pair, axis=0) for pair in zip(following, self.after, strict=True)
                ]
            own_after, others_after = following
            losses = path_steps.losses(
                slice(steps.start, steps.start + count), forward.steps(slice(0, count))
            )
            rest = others_after - own_after * ctx.load(xp.expm1(-losses), self.precision)
            is_zero = (own_after == 0) & (others_after == 0)
            segment.add_own_pairs(xp.where(is_zero, 0.0, -rest))
        self.after = own[:1, ...], others[:1, ...]

    def _boundary_gradient(self, message: Messages, weights: Array, is_log: bool) -> Array:
        ctx, xp = self.ctx, self.ctx.xp
        gradient = super()._boundary_gradient(message, weights, is_log)
        path = self.path_steps.last_states()
        if message is not self.forward_pass.carry:
            path = self.path_steps.path(slice(0, 1))[0, ...]
        is_own = is_state(ctx, path, self.shard.chain.num_states)
        weights = ctx.cast(xp.ones_like(weights) if is_log else weights, gradient.dtype)
        others = ctx.row_sums(xp.where(is_own | (weights == 0), 0.0, gradient * weights))
        own = xp.where(others == 0, 0.0, -others)[..., None] / weights
        return xp.where(is_own, own, gradient)


def is_state(ctx: Context, path: Array, size: int) -> Array:
    """Return masks [..., K] of the states of paths [...]."""
    return path[..., None] == ctx.xp.arange(size, dtype=ctx.index_dtype, device=ctx.device)
