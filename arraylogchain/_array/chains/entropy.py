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
from arraylogchain._array.chains.sums import Sums
from arraylogchain._context import Array, Context, whole_maximum
from arraylogchain._fold import chunks
from arraylogchain._inputs import Chain

# Below all logs of numbers that are not 0.
_LOWEST = -(2.0**10)
# Where no sum is below this, all are proved, and their logs are small.
_CLEAR = 2.0**-20


def entropy(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the entropies [*batch] in nats; 0 where there is no path."""
    out = ctx.empty(chain.batch, ctx.result_dtype)
    arrays = 20  # with indices, and terms, of entries that are not proved

    def work(run: Run) -> None:
        run.piece.write(out, Entropy(run.keep()).result())
        run.left.clear()

    each(ctx, runs("entropy", ctx, chain, workspace, history=True, arrays=arrays), work)
    return out


class Entropy(Posterior):
    """The posterior of a piece, of which entropies are added up."""

    def __init__(self, run: Run) -> None:
        super().__init__(run, Sums(run.piece.ctx, run.piece.chain, 0, ()), None)
        ctx, size = self.ctx, self.piece.chain.num_states
        # Sums of K terms lose less than 5 K tiny, and logs of their factors are less than 2**10.
        self.line = -_LOWEST * 5 * size * self.precision.tiny / self.precision.eps
        # Shares of states whose entropy does not show.
        self.nothing = 1e-3 * self.precision.eps / math.log(size + 1.0)
        last = last_logs(self.piece, run.last) if "final" in self.piece.views else run.last
        self.entropy = ctx.load(surprise(ctx.xp, *_near(ctx, last)), ctx.widest)
        # Of the first of the steps that have been taken, where there are some.
        self.shares_after: Array = None

    def result(self) -> Array:
        """Return the entropies, [groups, rows]."""
        xp = self.ctx.xp
        self.run_back()
        found = xp.where(self.near == -math.inf, 0.0, self.entropy)
        return xp.where(self.near == math.inf, math.nan, found)

    def take_shares(self, steps: slice, shares: Array, forward: Messages) -> None:
        """Add what transitions from some steps contribute, given the shares of these."""
        ctx, xp, shape = self.ctx, self.ctx.xp, (self.piece.groups, -1, self.piece.rows)
        after = shares[1:, ...]
        if self.shares_after is not None:
            after = xp.concat([after, self.shares_after], axis=0)
        self.shares_after = shares[:1, ...]
        u, of_u = _near(ctx, forward)
        for some, j, matrix in self.panels(steps.start, int(after.shape[0])):
            before = self.by_matrix(u[some, ...]), self.by_matrix(of_u[some, ...])
            of_after = self.by_matrix(after[some, :, :, j])
            found = self._conditional(before, of_after, ctx.load(matrix, self.precision))
            found = xp.sum(xp.reshape(found, (*shape, found.shape[-1])), axis=(1, 3))
            self.entropy = self.entropy + ctx.load(found, ctx.widest)

    def _conditional(self, before: tuple[Array, Array], shares: Array, matrix: Array) -> Array:
        """Return shares [n, rows, J] times entropies of what comes before them.

        Weights before come with their logs.
        """
        ctx, xp, (u, of_u) = self.ctx, self.ctx.xp, before
        logs = matrix if "transitions" in self.piece.chain.logs else xp.log(matrix)
        of_factor = logs - xp.max(logs, axis=(-2, -1), keepdims=True)
        factor = xp.exp(of_factor)
        v = ctx.multiply(u, factor)
        less = ctx.multiply(_weighted(xp, u, of_u), factor)
        less += ctx.multiply(u, _weighted(xp, factor, of_factor))
        less /= v
        found = xp.log(v)
        found -= less
        found *= shares
        if float(xp.min(v)) >= _CLEAR:
            return found
        plain = (v >= self.line) & (xp.log(v) * shares >= -1.0)
        found = xp.where(plain, found, 0.0)
        at, row, column = xp.nonzero(~(plain | (shares < self.nothing)))
        rows, columns = int(u.shape[1]), int(factor.shape[2])
        of_rows = xp.reshape(of_u, (-1, u.shape[-1]))
        of_columns = xp.reshape(of_factor.mT, (-1, u.shape[-1]))
        more = xp.reshape(found, (-1,))
        entry = (at * rows + row) * columns + column
        weights = xp.take(xp.reshape(shares, (-1,)), entry)
        for e in chunks(int(at.shape[0]), max(1, self.panel // int(u.shape[-1]))):
            terms = xp.take(of_rows, at[e] * rows + row[e], axis=0)
            terms = terms + xp.take(of_columns, at[e] * columns + column[e], axis=0)
            terms = terms - xp.max(terms, axis=-1, keepdims=True)
            ctx.add_at(more, entry[e], weights[e] * surprise(xp, xp.exp(terms), terms))
        return xp.reshape(more, tuple(found.shape))


def _near(ctx: Context, x: Messages) -> tuple[Array, Array]:
    """Return weights relative to about the largest of each step, and their logs."""
    if x.in_logs is not None:
        logs = x.in_log_form(ctx).values
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
