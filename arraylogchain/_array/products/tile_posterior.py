"""Sums over the posterior of one tile: in factors where that is proved, then what is left."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from arraylogchain._array.products.exact_posterior import Exact
from arraylogchain._array.products.posterior import Moments, Operand, Scaled, operand
from arraylogchain._array.products.sums import Sums
from arraylogchain._array.products.tiling import tile_product
from arraylogchain._context import Array, Context
from arraylogchain._fold import Box, boxes, within

# One entry on the exact road costs about as much as this many on a matrix multiply.
_EXACT_COST = 64


@dataclass(frozen=True, slots=True)
class Tile:
    """One tile of a log product, its operands and what may be spent on it."""

    ctx: Context
    a: Operand  # [batch, rows, K]
    b: Operand  # [batch, K, cols]
    out: Array  # [batch, rows, cols]
    chunk: int  # terms of each sum that are worked on at a time
    block: int
    workspace: int
    spoils: bool = True  # whether a NaN makes sums NaN; else it has no posterior, as infinities

    def push(self, h: Array, moments: Moments | None, sums: list[Sums]) -> None:
        """Add the sums of h p, or of h p (u + v - q), over columns and over rows."""
        ctx = self.ctx
        scale = 1.0 if moments is None else _scale(ctx, moments)
        part = Scaled(ctx, self.a, self.b, ctx.precision, self.chunk, self.block)
        weights, left = part.weights(self.out, h, None, scale)
        part.push(weights, moments, *_by_side(sums))
        del weights
        for s in sums:
            s.fresh = False
        nan = self._nan() if self.spoils else None
        if nan is not None:
            for s in sums:
                s.spoil(nan)
        if left is None:
            return
        for box, a, b, chunk, among in self._repairs(left):
            some = None if moments is None else _moments_part(moments, box)
            to_a, to_b = _by_side([s.part(box) for s in sums])
            out_part, h_part = self.out[box], h[box]
            rest: Array | None = among
            if self._is_worth_widening(among):
                wide = self._widened(a.values, b.values, chunk)
                weights, rest = wide.weights(out_part, h_part, among, scale)
                wide.push(weights, some, to_a, to_b)
            if rest is not None:
                block = max(1, min(2 * ctx.block, self.workspace // 128))
                exact = Exact(ctx, a, b, rest, ctx.widest, block, chunk)
                exact.push(h_part, some, to_a, to_b)

    def terms(self, u: Array | None, v: Array | None) -> Array:
        """Return q_ij = sum_k p_ikj (u_ik + v_kj)."""
        xp, ctx = self.ctx.xp, self.ctx
        part = Scaled(ctx, self.a, self.b, ctx.precision, self.chunk, self.block)
        inverse, left = part.weights(self.out, None, None)
        result = part.terms(inverse, u, v)
        del inverse
        if left is not None:
            for box, a, b, chunk, among in self._repairs(left):
                of_u = None if u is None else u[box[0], box[1], :]
                of_v = None if v is None else v[box[0], :, box[2]]
                rest: Array | None = among
                if self._is_worth_widening(among):
                    wide = self._widened(a.values, b.values, chunk)
                    inverse, rest = wide.weights(self.out[box], None, among)
                    result[box] += xp.astype(wide.terms(inverse, of_u, of_v), result.dtype)
                if rest is not None:
                    block = max(1, min(2 * ctx.block, self.workspace // 128))
                    exact = Exact(ctx, a, b, rest, ctx.widest, block, chunk)
                    result[box] += xp.astype(exact.terms(of_u, of_v), result.dtype)
        nan = self._nan()
        return result if nan is None else xp.where(nan, xp.full_like(result, math.nan), result)

    def _nan(self) -> Array | None:
        """Tell where a NaN took part; where +inf met -inf, none did."""
        a, b = self.a.nan, self.b.nan
        if a is None and b is None:
            return None
        xp, ctx = self.ctx.xp, self.ctx
        nowhere = xp.zeros(self.out.shape, dtype=xp.bool, device=ctx.device)
        for nan in (a, b):
            if nan is not None:
                nowhere = nowhere | nan
        return nowhere

    def _repairs(self, left: Array) -> Iterator[tuple[Box, Operand, Operand, int, Array]]:
        """Yield parts of the tile with entries left: where, operands, terms at a time, entries."""
        # The factors make room for those of the parts.
        self.a.factor = self.b.factor = None
        batch, rows, cols = left.shape
        inner = int(self.a.values.shape[-1])
        # Factors and sums in float64, each two times; gathered rows; copies of parts.
        sizes = (int(batch), int(rows), int(cols), inner)
        tiling = tile_product(sizes, self.workspace // 4, 40, 64, side=128)
        for at, of_rows in boxes((batch, rows), tiling.batch * tiling.rows):
            for (of_cols,) in boxes((cols,), tiling.cols):
                box = (at, of_rows, of_cols)
                among = left[box]
                if not bool(self.ctx.xp.any(among)):
                    continue
                whole = slice(None)
                a = _operand_part(self.a, (at, of_rows, whole))
                b = _operand_part(self.b, (at, whole, of_cols))
                yield box, a, b, tiling.inner, among

    def _is_worth_widening(self, among: Array) -> bool:
        if self.ctx.widest is self.ctx.precision:
            return False
        many = math.prod(among.shape) // _EXACT_COST
        return bool(self.ctx.xp.count_nonzero(among) > many)

    def _widened(self, a: Array, b: Array, chunk: int) -> Scaled:
        wide = self.ctx.widest
        of_a, of_b = operand(self.ctx, a, -1, wide), operand(self.ctx, b, -2, wide)
        return Scaled(self.ctx, of_a, of_b, wide, chunk, self.block)


def _by_side(sums: list[Sums]) -> tuple[Sums | None, Sums | None]:
    by_side = {s.of_a: s for s in sums}
    return by_side.get(True), by_side.get(False)


def _operand_part(x: Operand, box: Box) -> Operand:
    """Return the values of a part and their shift, which is what the exact road takes."""
    return Operand(x.values[box], x.shift[within(box, x.shift.shape)])


def _moments_part(moments: Moments, box: Box) -> Moments:
    at, rows, cols = box
    return Moments(moments.u[at, rows, :], moments.v[at, :, cols], moments.q[box])


def _scale(ctx: Context, moments: Moments) -> float:
    """Return the largest magnitude among u, v and q; NaN counts for nothing."""
    xp = ctx.xp
    extremes = (f(x) for x in (moments.u, moments.v, moments.q) for f in (xp.max, xp.min))
    return max(abs(float(x)) for x in extremes)
