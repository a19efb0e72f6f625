"""The entropy of the posterior over paths.

It is that of the last state and, at each transition, that of the state before given the one after
it, averaged over the shares of the latter: with u the forward weights before, and F the matrix over
its largest entry, p(k | j) = u_k F_kj / v_j, v = u @ F, and

    H(before | j) = log v_j - [(u log u) @ F + u @ (F log F)]_j / v_j.

As u and F are at most about 1, every term has one sign within its product, so that v proves all
three as it does in a certified product, and log v cancels at the size of log v. Where the share of
j times that exceeds 1, or v is not proved, p(k | j) is taken from its own terms, over their own
sum.
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
from arraylogchain._core.scaled import whole_maximum
from arraylogchain._inputs.chain import Chain

# Below all logs of numbers that are not 0.
_LOWEST = -(2.0**10)
# Where no sum is below this, all are proved, and their logs are small.
_CLEAR = 2.0**-20


def entropy(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the entropies [*batch] in nats; 0 where there is no path."""
    out = ctx.empty(chain.batch, ctx.result_dtype)
    arrays = 20  # with indices, and terms, of entries that are not proved

    def work(run: Pass) -> None:
        run.shard.write(out, Entropy(run.run_and_store()).result())
        run.updated.clear()

    run_passes(ctx, passes("entropy", ctx, chain, workspace, history=True, arrays=arrays), work)
    return out


class Entropy(BackwardPass):
    """The posterior of a piece, of which entropies are added up."""

    def __init__(self, run: Pass) -> None:
        super().__init__(run, Accumulator(run.shard.ctx, run.shard.chain, 0, ()), None)
        ctx, size = self.ctx, self.shard.chain.num_states
        # Sums of K terms lose less than 5 K tiny, and logs of their factors are less than 2**10.
        self.threshold = -_LOWEST * 5 * size * self.precision.tiny / self.precision.eps
        # Shares of states whose entropy does not show.
        self.negligible = 1e-3 * self.precision.eps / math.log(size + 1.0)
        last = last_logs(self.shard, run.last) if "final" in self.shard.views else run.last
        self.entropy = ctx.load(surprise(ctx.xp, *_relative_weights(ctx, last)), ctx.widest)
        # Of the first of the steps that have been taken, where there are some.
        self.marginals_after: Array = None

    def result(self) -> Array:
        """Return the entropies, [groups, rows]."""
        xp = self.ctx.xp
        self.run_backward()
        result = xp.where(self.unscaled_log_z == -math.inf, 0.0, self.entropy)
        return xp.where(self.unscaled_log_z == math.inf, math.nan, result)

    def add_marginals(self, steps: slice, marginals: Array, forward: Messages) -> None:
        """Add what transitions from some steps contribute, given the shares of these."""
        ctx, xp, shape = self.ctx, self.ctx.xp, (self.shard.groups, -1, self.shard.rows)
        after = marginals[1:, ...]
        if self.marginals_after is not None:
            after = xp.concat([after, self.marginals_after], axis=0)
        self.marginals_after = marginals[:1, ...]
        u, log_u = _relative_weights(ctx, forward)
        for transitions, j, matrix in self.panels(steps.start, int(after.shape[0])):
            before = self.by_matrix(u[transitions, ...]), self.by_matrix(log_u[transitions, ...])
            marginals_of_columns = self.by_matrix(after[transitions, :, :, j])
            result = self._conditional(
                before, marginals_of_columns, ctx.load(matrix, self.precision)
            )
            result = xp.sum(xp.reshape(result, (*shape, result.shape[-1])), axis=(1, 3))
            self.entropy = self.entropy + ctx.load(result, ctx.widest)

    def _conditional(self, before: tuple[Array, Array], marginals: Array, matrix: Array) -> Array:
        """Return shares [n, rows, J] times entropies of what comes before them.

        Weights before come with their logs.
        """
        ctx, xp, (u, log_u) = self.ctx, self.ctx.xp, before
        logs = matrix if "transitions" in self.shard.chain.logs else xp.log(matrix)
        log_factor = logs - xp.max(logs, axis=(-2, -1), keepdims=True)
        factor = xp.exp(log_factor)
        v = ctx.multiply(u, factor)
        less = ctx.multiply(_weighted(xp, u, log_u), factor)
        less += ctx.multiply(u, _weighted(xp, factor, log_factor))
        less /= v
        result = xp.log(v)
        result -= less
        result *= marginals
        if float(xp.min(v)) >= _CLEAR:
            return result
        plain = (v >= self.threshold) & (xp.log(v) * marginals >= -1.0)
        result = xp.where(plain, result, 0.0)
        at, row, column = xp.nonzero(~(plain | (marginals < self.negligible)))
        rows, columns = int(u.shape[1]), int(factor.shape[2])
        log_u_rows = xp.reshape(log_u, (-1, u.shape[-1]))
        log_factor_columns = xp.reshape(log_factor.mT, (-1, u.shape[-1]))
        flat_result = xp.reshape(result, (-1,))
        entry = (at * rows + row) * columns + column
        weights = xp.take(xp.reshape(marginals, (-1,)), entry)
        for e in chunks(int(at.shape[0]), max(1, self.panel // int(u.shape[-1]))):
            terms = xp.take(log_u_rows, at[e] * rows + row[e], axis=0)
            terms = terms + xp.take(log_factor_columns, at[e] * columns + column[e], axis=0)
            terms = terms - xp.max(terms, axis=-1, keepdims=True)
            ctx.add_at(flat_result, entry[e], weights[e] * surprise(xp, xp.exp(terms), terms))
        return xp.reshape(flat_result, tuple(result.shape))


def _relative_weights(ctx: Context, x: Messages) -> tuple[Array, Array]:
    """Return weights relative to about the largest of each step, and their logs."""
    if x.is_log is not None:
        logs = x.to_log_space(ctx).values
        logs = logs - whole_maximum(ctx.xp, logs)
        return ctx.xp.exp(logs), logs
    weights = x.values / ctx.row_sums(x.values)[..., None]
    return weights, ctx.xp.log(weights)


def _weighted(xp: Any, weights: Array, logs: Array) -> Array:
    """Return weights times their logs, 0 for weights of 0."""
    return weights * xp.maximum(logs, _LOWEST)


def surprise(xp: Any, weights: Array, logs: Array) -> Array:
    """Return the entropies of the last axis, given weights, near 1 in all, and their logs."""
    total = xp.sum(weights, axis=-1)
    return xp.log(total) - xp.sum(_weighted(xp, weights, logs), axis=-1) / total
