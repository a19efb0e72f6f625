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

from arraylogchain._array.chains.messages import Run, each, last_logs, runs
from arraylogchain._array.chains.pieces import Messages
from arraylogchain._array.chains.posterior import Posterior
from arraylogchain._array.chains.shares import row_sum
from arraylogchain._array.chains.sums import Sums
from arraylogchain._context import DOUBLE, SINGLE, Array, Context
from arraylogchain._fold import chunks
from arraylogchain._inputs import Chain

# Below all logs of numbers that are not 0.
_LOWEST = -(2.0**10)


def entropy(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the entropies [*batch] in nats; 0 where there is no path."""
    out = ctx.empty(chain.batch, ctx.result_dtype)

    def work(run: Run) -> None:
        run.piece.write(out, Entropy(run.keep()).result())

    each(ctx, runs("entropy", ctx, chain, workspace, history=True), work)
    return out


class Entropy(Posterior):
    """The posterior of a piece, of which entropies are added up."""

    def __init__(self, run: Run) -> None:
        super().__init__(run, Sums(run.piece.ctx, run.piece.chain, 0, ()), None)
        precision = DOUBLE if run.last.values.dtype == self.ctx.xp.float64 else SINGLE
        self.precision, size = precision, run.piece.chain.num_states
        # Sums of K terms lose less than 5 K tiny, and logs of their factors are less than 2**10.
        self.line = -_LOWEST * 5 * size * precision.tiny / precision.eps
        # Shares of states whose entropy does not show.
        self.nothing = 1e-3 * precision.eps / math.log(size + 1.0)
        self.entropy = surprise(self.ctx.xp, last_logs(run.piece, run.last).values)
        # Of the first of the steps that have been taken, where there are some.
        self.shares_after: Array = None

    def result(self) -> Array:
        """Return the entropies, [groups, rows]."""
        xp = self.ctx.xp
        self.run_back()
        found = xp.where(self.total == -math.inf, 0.0, self.entropy)
        return xp.where(self.total == math.inf, math.nan, found)

    def take_shares(self, steps: slice, shares: Array, forward: Messages) -> None:
        """Add what transitions from some steps contribute, given the shares of these."""
        ctx, xp, shape = self.ctx, self.ctx.xp, (self.piece.groups, -1, self.piece.rows)
        after = shares[1:, ...]
        if self.shares_after is not None:
            after = xp.concat([after, self.shares_after], axis=0)
        self.shares_after = shares[:1, ...]
        if forward.in_logs.any():
            logs = forward.in_log_form(ctx).values
            before = xp.exp(logs), logs
        else:
            weights = forward.values / row_sum(ctx, forward.values)[..., None]
            before = weights, xp.log(weights)
        for some, j, matrix in self.panels(steps.start, int(after.shape[0])):
            u, of_u, of_shares = (self.together(y[some, ...]) for y in (*before, after))
            factor = self._relative(ctx.load(matrix, self.precision))
            found = self._conditional((u, of_u), factor, of_shares[..., j])
            found = xp.sum(xp.reshape(found, shape), axis=1)
            self.entropy = self.entropy + ctx.load(found, ctx.widest)

    def _relative(self, matrix: Array) -> tuple[Array, Array]:
        """Return the weights of matrices relative to their largest entries, and their logs."""
        xp = self.ctx.xp
        logs = matrix if "transitions" in self.piece.chain.logs else xp.log(matrix)
        top = xp.max(logs, axis=(-2, -1), keepdims=True)
        logs = logs - xp.where(xp.isfinite(top), top, 0.0)
        return xp.exp(logs), logs

    def _conditional(
        self, before: tuple[Array, Array], matrix: tuple[Array, Array], shares: Array
    ) -> Array:
        """Return the sums of shares [n, rows, J] times entropies of what comes before them.

        Weights before, and of the matrix, come with their logs.
        """
        ctx, xp, (u, of_u), (factor, of_factor) = self.ctx, self.ctx.xp, before, matrix
        v = ctx.multiply(u, factor)
        found = ctx.multiply(_weighted(xp, u, of_u), factor)
        found = found + ctx.multiply(u, _weighted(xp, factor, of_factor))
        logs = xp.log(v) * shares
        plain = (v >= self.line) & (logs >= -1.0)
        total = xp.sum(xp.where(plain, logs - shares * (found / v), 0.0), axis=-1)
        is_done = plain | (shares < self.nothing)
        if bool(xp.all(is_done)):
            return total
        at, row, column = xp.nonzero(~is_done)
        rows, columns = int(u.shape[1]), int(factor.shape[2])
        of_rows = xp.reshape(of_u, (-1, u.shape[-1]))
        of_columns = xp.reshape(xp.matrix_transpose(of_factor), (-1, u.shape[-1]))
        more = xp.zeros_like(xp.reshape(total, (-1,)))
        weights = xp.take(xp.reshape(shares, (-1,)), (at * rows + row) * columns + column)
        for e in chunks(int(at.shape[0]), max(1, self.panel // int(u.shape[-1]))):
            place = at[e] * rows + row[e]
            terms = xp.take(of_rows, place, axis=0)
            terms = terms + xp.take(of_columns, at[e] * columns + column[e], axis=0)
            ctx.add_at(more, place, weights[e] * surprise(xp, terms))
        return total + xp.reshape(more, tuple(total.shape))


def _weighted(xp: Any, weights: Array, logs: Array) -> Array:
    """Return weights times their logs, 0 for weights of 0."""
    return weights * xp.maximum(logs, _LOWEST)


def surprise(xp: Any, logs: Array) -> Array:
    """Return the entropies of what the last axis has the logs of, but for their sum."""
    top = xp.max(logs, axis=-1, keepdims=True)
    logs = logs - xp.where(xp.isfinite(top), top, 0.0)
    weights = xp.exp(logs)
    total = xp.sum(weights, axis=-1)
    return xp.log(total) - xp.sum(_weighted(xp, weights, logs), axis=-1) / total
