"""Sums over the posterior of one tile: in factors where that is proved, then what is left."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from arraylogchain._array.products.certified import EXACT_COST
from arraylogchain._array.products.exact_posterior import ExactPosterior
from arraylogchain._array.products.operand import Operand
from arraylogchain._array.products.posterior import (
    Moments,
    ScaledPosterior,
    Sums,
    posterior_operand,
)
from arraylogchain._array.products.tiling import tile_product
from arraylogchain._context import Array, Context
from arraylogchain._fold import Box, boxes

_WHOLE = slice(None)


@dataclass(frozen=True, slots=True)
class PosteriorTile:
    """One tile of a log product, its operands and what may be spent on it."""

    ctx: Context
    a: Operand  # [batch, rows, K]
    b: Operand  # [batch, K, cols]
    out: Array  # [batch, rows, cols]
    chunk: int  # terms of each sum that are worked on at a time
    block: int
    workspace: int
    propagates_nan: bool = True  # whether a NaN makes sums NaN; else it has no posterior, as +inf

    def accumulate(self, h: Array, moments: Moments | None, sums: list[Sums]) -> None:
        """Add the sums of h p, or of h p (u + v - q), over columns and over rows."""
        scale = 1.0 if moments is None else moments.magnitude(self.ctx)
        for box, posterior in self._posteriors(h, scale):
            some = None if moments is None else moments.part(box)
            by_side = {s.of_a: s.part(box) for s in sums}
            posterior.accumulate(h[box], some, by_side.get(True), by_side.get(False))
            for s in sums:
                s.fresh = False
        nan = self._nan() if self.propagates_nan else None
        if nan is not None:
            for s in sums:
                s.propagate_nan(nan)

    def terms(self, u: Array | None, v: Array | None) -> Array:
        """Return q_ij = sum_k p_ikj (u_ik + v_kj)."""
        xp = self.ctx.xp
        result: Array | None = None
        for box, posterior in self._posteriors(None, 1.0):
            of_u = None if u is None else u[box[0], box[1], :]
            of_v = None if v is None else v[box[0], :, box[2]]
            found = posterior.terms(of_u, of_v)
            if result is None:
                result = found
            else:
                result[box] += xp.astype(found, result.dtype, copy=False)
        nan = self._nan()
        return result if nan is None else xp.where(nan, xp.full_like(result, math.nan), result)

    def _posteriors(
        self, h: Array | None, scale: float
    ) -> Iterator[tuple[Box, ScaledPosterior | ExactPosterior]]:
        """Yield boxes of the tile and posteriors of entries there; of each entry there is one."""
        ctx = self.ctx
        everywhere = ScaledPosterior(ctx, self.a, self.b, ctx.precision, self.chunk, self.block)
        left = everywhere.prove(self.out, h, None, scale)
        yield (_WHOLE, _WHOLE, _WHOLE), everywhere
        if left is None:
            return
        # Make room for the factors of parts.
        everywhere.weights = self.a.factor = self.b.factor = None
        for box, among, chunk in self._unproved_parts(left):
            at, rows, cols = box
            a, b = self.a.part((at, rows, _WHOLE)), self.b.part((at, _WHOLE, cols))
            rest: Array | None = among
            if self._is_worth_widening(among):
                wide = ctx.widest
                of_a = posterior_operand(ctx, a.values, -1, wide)
                of_b = posterior_operand(ctx, b.values, -2, wide)
                widened = ScaledPosterior(ctx, of_a, of_b, wide, chunk, self.block)
                part = None if h is None else h[box]
                rest = widened.prove(self.out[box], part, among, scale)
                yield box, widened
                widened.weights = None
            if rest is not None:
                block = max(1, min(2 * ctx.block, self.workspace // 128))
                yield box, ExactPosterior(ctx, a, b, rest, ctx.widest, block, chunk)

    def _nan(self) -> Array | None:
        """Tell where a NaN took part; where +inf met -inf, none did."""
        if self.a.clean and self.b.clean:
            return None
        xp = self.ctx.xp
        nan = xp.zeros(self.out.shape, dtype=xp.bool, device=self.ctx.device)
        for operand in (self.a, self.b):
            if not operand.clean:
                nan = nan | xp.isnan(operand.maxima)
        return nan

    def _unproved_parts(self, left: Array) -> Iterator[tuple[Box, Array, int]]:
        """Yield boxes with entries left, which entries, and how many terms to take at a time."""
        batch, rows, cols = (int(n) for n in left.shape)
        # Factors and sums in float64, each two times; gathered rows; copies of parts.
        sizes = (batch, rows, cols, int(self.a.values.shape[-1]))
        tiling = tile_product(sizes, self.workspace // 4, 40, 64, side=128)
        for at, of_rows in boxes((batch, rows), tiling.batch * tiling.rows):
            for (of_cols,) in boxes((cols,), tiling.cols):
                among = left[at, of_rows, of_cols]
                if bool(self.ctx.xp.any(among)):
                    yield (at, of_rows, of_cols), among, tiling.inner

    def _is_worth_widening(self, among: Array) -> bool:
        if self.ctx.widest is self.ctx.precision:
            return False
        many = math.prod(among.shape) // EXACT_COST
        return bool(self.ctx.xp.count_nonzero(among) > many)
