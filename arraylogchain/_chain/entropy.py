"""The entropy of the posterior over paths: log Z minus the expected log weight of a path.

The expectation is a sum over steps of posterior weights times logs, collected as gradients are.
Both it and log Z leave out the whole part of the largest potential of each step, and of log
transitions: these cancel, and would take the entropy's digits with them where they are large.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

from arraylogchain._arrays import Array, Context, whole_maximum
from arraylogchain._chain import evaluate
from arraylogchain._chain.gradient_sums import add_rows
from arraylogchain._chain.log_form import to_logs
from arraylogchain._chain.matrices import Matrix
from arraylogchain._chain.posterior import add_posterior, prepare
from arraylogchain._chain.segments import over_segments
from arraylogchain._chain.steps import Chain, Steps
from arraylogchain._fold import Box, chunks, within


def entropy(ctx: Context, chain: Chain, segments: int, workspace: int) -> Array:
    """Return the entropies [*batch] in nats; 0 where there is no path."""
    xp = ctx.xp
    # An entropy may be much smaller than what it is the difference of.
    wide = replace(ctx, precision=ctx.widest, result_name=ctx.widest.name)
    sums = ExpectedLogWeight.zeros(wide, chain)
    whole = prepare(wide, chain, segments, workspace, keep=False)
    add_posterior(whole, sums)
    rest, inner = replace(chain, start_offset=-sums.whole), wide
    if whole.cut is not None:
        inner, over = over_segments(wide, whole.cut)
        rest = replace(over, start_offset=over.start_offset - sums.whole)
    log_z = evaluate.total(inner, rest, wide, chain.batch, workspace)
    found = log_z - sums.rest
    found = xp.where(found < 0, xp.zeros_like(found), found)
    found = xp.where(log_z == -math.inf, xp.zeros_like(found), found)
    found = xp.where(log_z == math.inf, xp.full_like(found, math.nan), found)
    return xp.astype(found, ctx.result_dtype, copy=False)


@dataclass(slots=True)
class ExpectedLogWeight:
    """Sums over steps of posterior weights times logs of weights, row by row.

    See `PosteriorSums`.

    Attributes
    ----------
    chain : Chain
        The whole chain, or a part of it whose sums these are views of.
    rest, whole : array [*batch]
        What adds up to the expectation; the second in whole numbers.
    present : array [groups, rows, 1]
        Which chains have a posterior at the step at hand, 1 or 0.
    """

    ctx: Context
    chain: Chain
    rest: Array
    whole: Array
    start: None = None
    present: Array = None

    @classmethod
    def zeros(cls, ctx: Context, chain: Chain) -> ExpectedLogWeight:
        dtype = ctx.dtype(ctx.widest)
        rest, whole = (ctx.xp.zeros(chain.batch, dtype=dtype, device=ctx.device) for _ in range(2))
        return cls(ctx, chain, rest, whole)

    @property
    def wants_pairs(self) -> bool:
        return True

    def of_part(self, part: Chain) -> Self:
        if len(part.batch) == len(self.chain.batch):
            return replace(self, chain=part)
        return replace(self, chain=part, rest=self.rest[..., None], whole=self.whole[..., None])

    def add_potentials(self, steps: Steps, box: Box, i: int, a: Array, b: Array) -> None:
        xp, posterior = self.ctx.xp, a * b
        self.present = xp.round(xp.sum(posterior, axis=-1, keepdims=True))
        if i < self.chain.lead:
            return
        given = steps.potentials_of(slice(i, i + 1))
        if given is not None:
            self._add(steps, box, posterior, self.ctx.load(given[:, :, 0, :], self.ctx.widest))
        start = steps.start_of()
        if i == 0 and start is not None:
            logs = to_logs(self.ctx, start, self.chain.start_in_logs)
            self._add(steps, box, posterior, logs)

    def add_start(self, steps: Steps, box: Box, a: Array, b: Array) -> None:
        pass  # weights of first states are those that `add_potentials` is given

    def add_pairs(
        self,
        steps: Steps,
        box: Box,
        i: int,
        matrix: Matrix,
        a: Array,
        b: Array,
        in_range: bool,
    ) -> None:
        xp, ctx = self.ctx.xp, self.ctx
        found = xp.zeros_like(self.present)
        for j in chunks(self.chain.size, matrix.width):
            factor = matrix.factor(j)
            logs = to_logs(ctx, matrix.given[:, :, j], matrix.in_logs)
            if matrix.shift is not None:
                logs = logs - matrix.shift
            terms = xp.where(factor == 0, xp.zeros_like(factor), factor * logs)
            found = found + xp.sum(xp.matmul(a, terms) * b[:, :, j], axis=-1, keepdims=True)
        self._put(steps, box, found, self.rest)
        if matrix.shift is not None:
            self._put(steps, box, self.present * matrix.shift, self.whole)

    def add_pairs_by_row(
        self,
        steps: Steps,
        box: Box,
        i: int,
        j: slice,
        weights: Iterable[Array],
        edges: Array,
        shift: Array,
    ) -> None:
        xp = self.ctx.xp
        found = xp.zeros_like(self.present)
        in_logs = self.chain.transitions_in_logs
        logs = edges if in_logs else to_logs(self.ctx, edges, in_logs=False)
        for row, each in enumerate(weights):
            posterior = each if in_logs else xp.where(each == 0, each, each * edges)
            terms = xp.where(posterior == 0, posterior, posterior * logs)
            found[:, row, 0] = xp.sum(terms, axis=(-2, -1))
        self._put(steps, box, found, self.rest)
        if in_logs and j.start == 0:
            self._put(steps, box, self.present * shift, self.whole)

    def _add(self, steps: Steps, box: Box, posterior: Array, logs: Array) -> None:
        """Add sums of posterior weights [groups, rows, K] times logs."""
        xp = self.ctx.xp
        whole = whole_maximum(self.ctx, logs, -1, self.ctx.widest)
        terms = xp.where(posterior == 0, xp.zeros_like(posterior), posterior * (logs - whole))
        self._put(steps, box, xp.sum(terms, axis=-1, keepdims=True), self.rest)
        self._put(steps, box, self.present * whole, self.whole)

    def _put(self, steps: Steps, box: Box, values: Array, target: Array) -> None:
        view = self.chain.arrange(self.ctx.xp, target[..., None], trailing=1)
        add_rows(steps, view[(*within(box, view.shape), slice(None))], values)
