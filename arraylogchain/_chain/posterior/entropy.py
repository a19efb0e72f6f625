"""The entropy of the posterior over paths.

By the chain rule of entropy it is that of the last state, and for each step before it the mean of

    h_j = log(S_j) - sum_k u_k F_kj log(u_k F_kj) / S_j,    S_j = sum_k u_k F_kj,

the entropy of its state k if the next state is j: u are the forward weights, F the matrix between
the two. None of it is negative, so nothing cancels between steps, and what all paths have in common
does not show in h at all. The sums over k are three matrix products, with u, u log(u) and F log(F).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

from arraylogchain._chain.forms.matrices import Matrix
from arraylogchain._chain.forms.states import State
from arraylogchain._chain.posterior.results import posterior_sums
from arraylogchain._chain.posterior.sums import add_rows
from arraylogchain._chain.steps import Chain, Steps
from arraylogchain._chain.whole import write_last
from arraylogchain._context import Array, Context
from arraylogchain._fold import Box, within
from arraylogchain.plan import Segments


def entropy(ctx: Context, chain: Chain, segments: Segments, workspace: int) -> Array:
    """Return the entropies [*batch] in nats; 0 where there is no path."""
    xp, dtype = ctx.xp, ctx.dtype(ctx.widest)
    wide = replace(ctx, precision=ctx.widest, result_name=ctx.widest.name)

    def empty() -> ConditionalEntropy:
        zeros = xp.zeros(chain.batch, dtype=dtype, device=ctx.device)
        return ConditionalEntropy(wide, chain, zeros)

    sums, logs = posterior_sums(wide, chain, segments, workspace, empty)
    if logs is not None:
        top = xp.max(logs, axis=-1, keepdims=True)
        weights = xp.exp(logs - xp.where(xp.isfinite(top), top, xp.zeros_like(top)))
        sums.total += _of_weights(wide, weights)
        return ctx.to_result(sums.total)
    of_last = wide.empty(chain.batch, dtype)

    def result(state: State) -> tuple[Array]:
        return (_of_weights(wide, state.relative(wide)),)

    write_last(wide, chain, [of_last], workspace, result, every_entry=False)
    sums.total += of_last
    return ctx.to_result(sums.total)


def _of_weights(ctx: Context, weights: Array) -> Array:
    """Return the entropies [...] of distributions in proportion to weights [..., K]."""
    xp = ctx.xp
    total = xp.sum(weights, axis=-1, keepdims=True)
    p = weights / xp.where(total == 0, xp.ones_like(total), total)
    return -xp.sum(p * _log(ctx, p), axis=-1)


def _log(ctx: Context, x: Array) -> Array:
    """Return the logarithms of nonnegative x, and 0 for that of 0."""
    xp = ctx.xp
    return xp.log(xp.where(x == 0, xp.ones_like(x), x))


@dataclass(slots=True)
class ConditionalEntropy:
    """Sums over steps of the entropy of a state, given the next one; see `PosteriorSums`.

    Attributes
    ----------
    chain : Chain
        The whole chain, or a part of it whose sums these are views of.
    total : array [*batch]
    """

    ctx: Context
    chain: Chain
    total: Array
    start: None = None

    @property
    def wants_pairs(self) -> bool:
        return True

    def of_part(self, part: Chain) -> Self:
        own = len(part.batch) == len(self.chain.batch)
        return replace(self, chain=part, total=self.total if own else self.total[..., None])

    def add_potentials(self, steps: Steps, box: Box, i: int, a: Array, b: Array) -> None:
        pass  # all is said by pairs of states

    def add_start(self, steps: Steps, box: Box, a: Array, b: Array) -> None:
        pass

    def add_pairs(
        self, steps: Steps, box: Box, i: int, matrix: Matrix, a: Array, b: Array, in_range: bool
    ) -> None:
        ctx, xp = self.ctx, self.ctx.xp
        # Relative to the row's largest weight logs are small where it matters.
        top = _log(ctx, xp.max(a, axis=-1, keepdims=True))
        weighted = a * (_log(ctx, a) - top)
        found = xp.zeros_like(top)
        for k, j in matrix.blocks:
            factor, here = matrix.factor(k, j), a[:, :, k]
            sums = xp.matmul(here, factor)
            h = sums * (_log(ctx, sums) - top) - xp.matmul(weighted[:, :, k], factor)
            h = xp.clip(h - xp.matmul(here, factor * _log(ctx, factor)), min=0.0)
            ahead = b[:, :, j]
            terms = xp.where(ahead == 0, xp.zeros_like(h), h * ahead)
            found = found + xp.sum(terms, axis=-1, keepdims=True)
        self._add(steps, box, found)

    def add_pairs_by_row(
        self,
        steps: Steps,
        box: Box,
        i: int,
        j: slice,
        weights: Iterable[Array],
        edges: Array,
    ) -> None:
        ctx, xp = self.ctx, self.ctx.xp
        found = []
        for each in weights:
            p = each
            if not self.chain.transitions_in_logs:
                p = xp.where(each == 0, each, each * edges)
            of_next = _log(ctx, xp.sum(p, axis=-2, keepdims=True))
            found.append(xp.sum(p * (of_next - _log(ctx, p)), axis=(-2, -1)))
        self._add(steps, box, xp.stack(found, axis=1)[..., None])

    def _add(self, steps: Steps, box: Box, values: Array) -> None:
        view = self.chain.arrange(self.ctx.xp, self.total[..., None], trailing=1)
        add_rows(steps, view[(*within(box, view.shape), slice(None))], values)
