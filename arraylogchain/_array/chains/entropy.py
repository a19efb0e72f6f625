"""The entropy of the posterior over paths.

It is that of the last state and, at each transition, that of the state before given the one after
it, averaged over the shares of the latter: with u the forward weights before, at most 1, and F the
matrix over its largest entry, p(k | j) = u_k F_kj / v_j, v = u @ F, and

    H(before | j) = log v_j - [(u log u) @ F + u @ (F log F)]_j / v_j.

Every term has one sign within its product, so that v proves all three as it does in a certified
product, and log v cancels at the size of log v. Where the share of j times that exceeds 1, or v is
not proved, p(k | j) is taken from its own terms, over their own sum.
"""

from __future__ import annotations

import math
from typing import Any

from arraylogchain._array.chains.messages import Run, each, last_logs, runs
from arraylogchain._array.chains.pieces import Messages
from arraylogchain._array.chains.posterior import Posterior
from arraylogchain._array.chains.sums import Sums
from arraylogchain._context import Array, Context
from arraylogchain._fold import chunks
from arraylogchain._inputs import Chain


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
        self.dtype = run.last.values.dtype
        precision = self.ctx.widest if self.dtype == self.ctx.xp.float64 else self.ctx.precision
        size = run.piece.chain.num_states
        # Sums of K terms lose less than 5 K tiny, and logs of their factors are less than 2**10.
        self.line, self.eps = 2.0**10 * 5 * size * precision.tiny / precision.eps, precision.eps
        self.entropy = self.ctx.xp.zeros_like(self.total)

    def result(self) -> Array:
        """Return the entropies, [groups, rows]."""
        xp, logs = self.ctx.xp, last_logs(self.piece, self.run.last).values
        self.entropy = self.entropy + surprise(xp, logs)
        self.run_back()
        found = xp.where(self.total == -math.inf, xp.zeros_like(self.total), self.entropy)
        return xp.where(self.total == math.inf, xp.full_like(found, math.nan), found)

    def take_shares(self, steps: slice, shares: Array, forward: Messages) -> None:
        """Add what transitions that lead to some steps contribute, given the shares of these."""
        ctx, xp, has_one = self.ctx, self.ctx.xp, self.piece.chain.has_one_matrix
        first = max(steps.start, 1)
        if first >= steps.stop:
            return
        before = forward.in_log_form(ctx).values[:-1, ...]
        if steps.start:
            start = self._left_before(steps.start).in_log_form(ctx).values
            before = xp.concat([start[None, ...], before], axis=0)
        top = xp.max(before, axis=-1, keepdims=True)
        before = before - xp.where(xp.isfinite(top), top, xp.zeros_like(top))
        shares = xp.astype(shares[first - steps.start :, ...], self.dtype, copy=False)
        groups, size = self.piece.groups, self.piece.chain.num_states
        together = steps.stop if has_one else max(1, self.panel // (groups * size * size))
        for some in chunks(steps.stop - first, together):
            times = slice(first - 1 + some.start, first - 1 + some.stop)
            x = self.piece.matrices(times)
            x = xp.reshape(xp.permute_dims(x, (1, 0, 2, 3)), (-1, size, size))
            of_logs, of_shares = (self._together(y[some, ...]) for y in (before, shares))
            found = xp.zeros_like(of_shares[..., 0])
            width = max(1, self.panel // (int(x.shape[0]) * size))
            top = self._logs(xp.max(x, axis=(-2, -1), keepdims=True))
            for j in chunks(size, width):
                logs = self._logs(x[:, :, j]) - xp.where(xp.isfinite(top), top, xp.zeros_like(top))
                found = found + self._conditional(of_logs, logs, of_shares[:, :, j])
            shape = (groups, -1, self.piece.rows) if has_one else (-1, groups, self.piece.rows)
            found = xp.sum(xp.reshape(found, shape), axis=1 if has_one else 0)
            self.entropy = self.entropy + ctx.load(found, ctx.widest)

    def _left_before(self, step: int) -> Messages:
        """Return the state that comes to a step."""
        n = next(n for n, block in enumerate(self.run.blocks) if step < block.stop)
        first = self.run.blocks[n].start
        if step == first:
            return self.run.starts[n]  # type: ignore[no-any-return]
        left = self.run.messages(n).steps(slice(step - 1 - self.run.blocks[n].stop, None))
        scales = left.shifts[0, ...], left.powers[0, ...]
        return Messages(left.values[0, ...], *scales, left.in_logs)

    def _together(self, x: Array) -> Array:
        """Return [n, groups, rows, K] as [groups, n * rows, K], or as [n * groups, rows, K]."""
        xp, (count, groups, rows, size) = self.ctx.xp, x.shape
        if not self.piece.chain.has_one_matrix:
            return xp.reshape(x, (count * groups, rows, size))
        return xp.reshape(xp.permute_dims(x, (1, 0, 2, 3)), (groups, count * rows, size))

    def _conditional(self, before: Array, matrix: Array, shares: Array) -> Array:
        """Return the sums of shares [n, rows, J] times entropies of what comes before them."""
        ctx, xp = self.ctx, self.ctx.xp
        u, factor = xp.exp(before), xp.exp(matrix)
        v = ctx.multiply(u, factor)
        found = ctx.multiply(_weighted(xp, u, before), factor)
        found = found + ctx.multiply(u, _weighted(xp, factor, matrix))
        logs = xp.log(v)
        plain = (v >= self.line) & (v < math.inf) & (xp.abs(logs) * shares <= 1.0)
        found = xp.where(plain & (shares > 0), shares * (logs - found / v), xp.zeros_like(shares))
        total = xp.sum(found, axis=-1)
        # What hardly anything comes to has an entropy that does not show.
        odd = ~plain & ~(shares * math.log(int(before.shape[-1]) + 1.0) < 1e-3 * self.eps)
        if not bool(xp.any(odd)):
            return total
        at, row, column = xp.nonzero(odd)
        rows, columns = int(before.shape[1]), int(matrix.shape[2])
        of_rows = xp.reshape(before, (-1, before.shape[-1]))
        of_columns = xp.reshape(xp.matrix_transpose(matrix), (-1, before.shape[-1]))
        more = xp.zeros_like(xp.reshape(total, (-1,)))
        weights = xp.take(xp.reshape(shares, (-1,)), (at * rows + row) * columns + column)
        for e in chunks(int(at.shape[0]), max(1, self.panel // int(before.shape[-1]))):
            place = at[e] * rows + row[e]
            terms = xp.take(of_rows, place, axis=0)
            terms = terms + xp.take(of_columns, at[e] * columns + column[e], axis=0)
            ctx.add_at(more, place, weights[e] * surprise(xp, terms))
        return total + xp.reshape(more, tuple(total.shape))

    def _logs(self, x: Array) -> Array:
        x = self.ctx.xp.astype(x, self.dtype, copy=False)
        return x if self.piece.chain.transitions_in_logs else self.ctx.xp.log(x)


def _weighted(xp: Any, weights: Array, logs: Array) -> Array:
    """Return weights times logs, 0 for weights of 0."""
    return xp.where(weights == 0, weights, weights * logs)


def surprise(xp: Any, logs: Array) -> Array:
    """Return the entropies of what the last axis has the logs of, but for their sum."""
    top = xp.max(logs, axis=-1, keepdims=True)
    logs = logs - xp.where(xp.isfinite(top), top, xp.zeros_like(top))
    logs = logs - xp.log(xp.sum(xp.exp(logs), axis=-1, keepdims=True))
    return -xp.sum(_weighted(xp, xp.exp(logs), logs), axis=-1)
