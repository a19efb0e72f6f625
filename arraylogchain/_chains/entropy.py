"""Entropy of the posterior over paths.

It is the entropy of the last state plus, for each transition, the entropy of the state before given
the state after, averaged over the marginals of the latter. With u the forward weights of the step
before, F the matrix divided by its largest entry, and v = u @ F, p(k | j) = u_k F_kj / v_j and

    H(before | j) = log v_j - [(u log u) @ F + u @ (F log F)]_j / v_j.

As u and F are at most about 1, all terms of each product have one sign, so that v certifies all
three as in a certified product, and log v cancels at the size of log v. Where the marginal of j
times that exceeds 1, or v is not certified, p(k | j) is computed from its terms, normalized by
their own sum.
"""

from __future__ import annotations

import math
from typing import Any

from arraylogchain._backends.interface import Messages
from arraylogchain._chains.accumulate import Accumulator
from arraylogchain._chains.marginals import BackwardPass
from arraylogchain._chains.passes import Pass, last_logs, passes, run_passes
from arraylogchain._core.axes import chunks
from arraylogchain._core.context import Array, Context
from arraylogchain._core.precision import threshold
from arraylogchain._core.scaled import whole_maximum
from arraylogchain._inputs.chain import Chain

# Below the logarithm of every positive number.
_LOWEST_LOG = -(2.0**10)
# Sums above this are certified, and their logarithms are small.
_CLEAR = 2.0**-20


def entropy(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the entropies [*batch] in nats; 0 where there is no path."""
    out = ctx.empty(chain.batch, ctx.result_dtype)

    def work(forward_pass: Pass) -> None:
        result = forward_pass.run_and_store().fused("entropies", forward_pass)
        if result is None:
            result = EntropyPass(forward_pass).result()
        forward_pass.shard.write(out, result)

    # With indices and terms of entries that are not certified, there are 20 arrays.
    run_passes(passes("entropy", ctx, chain, workspace, needs_history=True, num_arrays=20), work)
    return out


class EntropyPass(BackwardPass):
    """The backward pass over a shard that sums conditional entropies."""

    def __init__(self, forward_pass: Pass) -> None:
        shard = forward_pass.shard
        super().__init__(forward_pass, Accumulator(shard.ctx, shard.chain, 0, ()), None)
        ctx, size, last = self.ctx, shard.chain.num_states, forward_pass.carry
        # Sums of K terms lose less than 5 K tiny, and logs of their factors are less than 2**10.
        self.threshold = -_LOWEST_LOG * threshold(self.precision, size)
        # Marginals too small to affect the entropy.
        self.negligible = 1e-3 * self.precision.eps / math.log(size + 1.0)
        if "final" in shard.views:
            last = last_logs(shard, last)
        self.entropy = ctx.load(weighted_entropy(ctx.xp, *_relative_weights(ctx, last)), ctx.widest)
        # Marginals of the first step of the segment after, [1, groups, rows, K].
        self.marginals_after: Array = None

    def result(self) -> Array:
        """Return the entropies, [groups, rows]."""
        xp, log_z = self.ctx.xp, self.sums.unscaled_log_z
        self.run()
        if self.sums.is_zero is None:  # log Z is finite
            return self.entropy
        result = xp.where(log_z == -math.inf, 0.0, self.entropy)
        return xp.where(log_z == math.inf, math.nan, result)

    def add_marginals(self, steps: slice, marginals: Array, forward: Messages) -> None:
        """Add the conditional entropies of a segment, averaged over marginals."""
        ctx, xp, shape = self.ctx, self.ctx.xp, (self.shard.groups, -1, self.shard.rows)
        after = marginals[1:, ...]
        if self.marginals_after is not None:
            after = xp.concat([after, self.marginals_after], axis=0)
        self.marginals_after = marginals[:1, ...]
        u, log_u = _relative_weights(ctx, forward)
        by_matrix, count = self.shard.by_matrix, int(after.shape[0])
        panels = self.shard.matrix_panels(steps.start, count, self.sums.panel_size)
        for transitions, columns, matrix in panels:
            before, log_before = (by_matrix(x[transitions, ...]) for x in (u, log_u))
            weights = by_matrix(after[transitions, :, :, columns])
            matrix = ctx.load(matrix, self.precision)
            result = self._weighted_conditionals(before, log_before, weights, matrix)
            result = xp.sum(xp.reshape(result, (*shape, result.shape[-1])), axis=(1, 3))
            self.entropy = self.entropy + ctx.load(result, ctx.widest)

    def _weighted_conditionals(
        self, u: Array, log_u: Array, marginals: Array, matrix: Array
    ) -> Array:
        """Return marginals [n, rows, J] times the entropies of the state before."""
        ctx, xp = self.ctx, self.ctx.xp
        log_F = matrix if "transitions" in self.shard.chain.logs else xp.log(matrix)
        log_F = log_F - xp.max(log_F, axis=(-2, -1), keepdims=True)
        F = xp.exp(log_F)
        v = ctx.multiply(u, F)
        mean_log = ctx.multiply(_times_log(xp, u, log_u), F)
        mean_log += ctx.multiply(u, _times_log(xp, F, log_F))
        mean_log /= v
        result = xp.log(v)
        result -= mean_log
        result *= marginals
        if float(xp.min(v)) >= _CLEAR:
            return result
        is_certified = (v >= self.threshold) & (xp.log(v) * marginals >= -1.0)
        result = xp.where(is_certified, result, 0.0)
        recomputed = xp.nonzero(~(is_certified | (marginals < self.negligible)))
        self._add_recomputed(result, recomputed, log_u, log_F, marginals)
        return result

    def _add_recomputed(
        self, result: Array, index: tuple[Array, ...], log_u: Array, log_F: Array, marginals: Array
    ) -> None:
        """Add entries (matrix, row, column) of the result, each from its own terms."""
        ctx, xp, (at, row, column) = self.ctx, self.ctx.xp, index
        rows, (columns, K) = int(log_u.shape[1]), log_F.mT.shape[1:]
        log_u_rows, log_F_columns = xp.reshape(log_u, (-1, K)), xp.reshape(log_F.mT, (-1, K))
        flat_result = xp.reshape(result, (-1,))
        entry = (at * rows + row) * columns + column
        weights = xp.take(xp.reshape(marginals, (-1,)), entry)
        for e in chunks(int(at.shape[0]), max(1, self.sums.panel_size // K)):
            terms = xp.take(log_u_rows, at[e] * rows + row[e], axis=0)
            terms = terms + xp.take(log_F_columns, at[e] * columns + column[e], axis=0)
            terms = terms - xp.max(terms, axis=-1, keepdims=True)
            values = weights[e] * weighted_entropy(xp, xp.exp(terms), terms)
            ctx.add_at(flat_result, entry[e], values)
        result[...] = xp.reshape(flat_result, tuple(result.shape))


def _relative_weights(ctx: Context, x: Messages) -> tuple[Array, Array]:
    """Return weights relative to about the largest of each step, and their logarithms."""
    if x.is_log is not None:
        logs = x.to_log_space(ctx).values
        logs = logs - whole_maximum(ctx.xp, logs)
        return ctx.xp.exp(logs), logs
    weights = x.values / ctx.row_sums(x.values)[..., None]
    return weights, ctx.xp.log(weights)


def _times_log(xp: Any, weights: Array, logs: Array) -> Array:
    """Return weights times their logarithms, 0 for weights of 0."""
    return weights * xp.maximum(logs, _LOWEST_LOG)


def weighted_entropy(xp: Any, weights: Array, logs: Array) -> Array:
    """Return the entropies of the last axis, given weights whose sum is near 1, and their logs."""
    total = xp.sum(weights, axis=-1)
    return xp.log(total) - xp.sum(_times_log(xp, weights, logs), axis=-1) / total
