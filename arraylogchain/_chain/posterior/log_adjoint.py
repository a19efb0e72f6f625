"""Posterior weights and gradients of rows whose weights range too far for scaled form.

Both recursions run in log form, forwards and backwards, and each weight is the exponential of what
their logarithms add up to. It costs an exponential for each pair of states at each step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from arraylogchain._chain.forms.logs import LogForm
from arraylogchain._chain.forms.states import State, add_scale
from arraylogchain._chain.posterior.sums import PosteriorSums
from arraylogchain._chain.steps import Steps
from arraylogchain._context import Array, Context, whole_maximum
from arraylogchain._fold import Box, chunks


@dataclass(frozen=True, slots=True)
class LogAdjoint:
    """Both passes over some rows of a tile.

    Attributes
    ----------
    ctx : Context
    form : LogForm
    steps : Steps
    box : tuple of slice
        The tile's place in the batch.
    sums : PosteriorSums
        Where gradients are added.
    block : int
        Elements of pairs of states in memory at a time.
    """

    ctx: Context
    form: LogForm
    steps: Steps
    box: Box
    sums: PosteriorSums
    block: int

    def run(self, cotangent: Array) -> None:
        """Add the gradients for a cotangent [groups, rows, 1] of log Z."""
        ctx, xp, count = self.ctx, self.ctx.xp, self.steps.count
        whole = slice(0, count)
        _, _, forward = self.form.run(self.steps, None, whole, record=True)
        backwards = replace(self.steps, backward=True)
        _, _, backward = self.form.run(backwards, None, whole, record=True)
        backward.reverse()
        a, b = forward[-1], backward[-1]
        total = replace(
            a,
            values=replace(a, values=a.values + b.values).sum_of_logs(ctx),
            exponent=a.exponent + b.exponent,
            offset=a.offset + b.offset,
        )
        # A sum that is infinite has no derivative but 0.
        skipped = xp.isinf(total.values)
        g = xp.where(skipped, xp.zeros_like(total.values), ctx.load(cotangent, ctx.widest))
        total.values = xp.where(skipped, xp.zeros_like(g), total.values)
        infinite = skipped
        for i, (a, b) in enumerate(zip(forward, backward, strict=True)):
            advancing = self.steps.advancing(i)
            skipped = infinite if advancing is None else infinite | ~advancing
            logs = xp.where(skipped, xp.full_like(a.values, -math.inf), a.values + b.values)
            posterior = xp.exp(logs + _scale(a, b, total))
            self.sums.add_potentials(self.steps, self.box, i, posterior, g)
            ahead = self.form.weighted(b, backwards, count - i) if i >= self.steps.chain.lead else b
            if i == 0:
                self._start(ahead, posterior, total, g)
                continue
            # The whole part of the matrix' logs goes to the scale, where it is exact.
            given, in_logs = self.steps.matrix(i - 1), self.steps.chain.transitions_in_logs
            shift = xp.zeros_like(given[:, :1, :1])
            if in_logs:
                shift = whole_maximum(ctx, given, (-2, -1), ctx.widest)
                ahead = replace(ahead, offset=ahead.offset + shift)
            logs = forward[i - 1].values + _scale(forward[i - 1], ahead, total)
            self._pairs(i - 1, given, shift, logs, ahead.values, g, skipped)

    def _start(self, ahead: State, posterior: Array, total: State, g: Array) -> None:
        """Add derivatives by the start."""
        xp = self.ctx.xp
        if not self.steps.chain.start_in_logs:
            nothing = replace(
                ahead, exponent=xp.zeros_like(ahead.exponent), offset=xp.zeros_like(ahead.offset)
            )
            posterior = self._exp(ahead.values + _scale(ahead, nothing, total))
        self.sums.add_start(self.steps, self.box, posterior, g)

    def _pairs(
        self,
        i: int,
        given: Array,
        shift: Array,
        before: Array,
        ahead: Array,
        g: Array,
        skipped: Array,
    ) -> None:
        """Add derivatives by the matrices of step i: exp(before_k + ahead_j) for each row."""
        ctx, xp = self.ctx, self.ctx.xp
        if not self.sums.wants_pairs:
            return
        rows, size = int(before.shape[1]), int(before.shape[2])
        in_logs = self.steps.chain.transitions_in_logs
        width = max(1, self.block // (int(before.shape[0]) * size))
        for j in chunks(size, width):
            edges = ctx.load(given[:, :, j], ctx.widest)
            if in_logs:
                edges = edges - shift

            def weights(row: int, j: slice = j, edges: Array = edges) -> Array:
                logs = before[:, row, :, None] + ahead[:, row, None, j]
                if in_logs:
                    logs = logs + edges
                logs = xp.where(skipped[:, row, :, None], xp.full_like(logs, -math.inf), logs)
                return g[:, row, :, None] * self._exp(logs)

            by_row = (weights(row) for row in range(rows))
            self.sums.add_pairs_by_row(self.steps, self.box, i, j, by_row, edges)

    def _exp(self, logs: Array) -> Array:
        """Return exponentials that stay finite: beyond, only weights of impossible paths lie."""
        limit = (self.ctx.widest.top - 16) * math.log(2.0)
        return self.ctx.xp.exp(self.ctx.xp.clip(logs, max=limit))


def _scale(a: State, b: State, total: State) -> Array:
    """Return the log of the scale of a * b / Z, [groups, rows, 1]; whole numbers cancel first."""
    return add_scale(
        -total.values,
        a.exponent + b.exponent - total.exponent,
        a.offset + b.offset - total.offset,
    )
