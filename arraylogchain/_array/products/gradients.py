"""Derivatives of the log product: sums over posterior weights, tile by tile.

Everything is summed over broadcast axes by the fold: with operands [*batch, *rows, K] and
[*batch, K, *cols], the gradient of the first sums over columns and that of the second over rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from arraylogchain._array.products.exact_posterior import ExactPosterior
from arraylogchain._array.products.operand import Operand
from arraylogchain._array.products.posterior import (
    UNWEIGHTED,
    Pair,
    ScaledPosterior,
    Sums,
    Weights,
    part_of,
    posterior_operand,
)
from arraylogchain._array.products.tiled import Place, panels
from arraylogchain._array.products.tiling import Tiling, elementwise_block, tile_product
from arraylogchain._context import Array, Context, shape_of
from arraylogchain._fold import Box, Fold, boxes

# Rows and columns of a tile where they fit: what is added up over tiles is written once per tile.
_SIDE = 1024


def logmatmulexp_gradients(
    ctx: Context,
    layout: Fold,
    a: Array,
    b: Array,
    out: Array,
    g: Array,
    budget: int,
    wanted: tuple[bool, bool] = (True, True),
    propagates_nan: bool = True,
) -> Pair:
    """Return the gradients of sum(g * logmatmulexp(a, b)), each of its operand's shape and dtype.

    They are added up in the precision of the computation: for half precisions in arrays of their
    own. A NaN in an operand shows in them; with `propagates_nan` False it has no gradient instead,
    as +inf.
    """
    walk = _Walk(ctx, layout, a, b, out, budget, copies=2)
    totals = walk.totals(wanted)
    g = walk.of_product(g)
    for tile, at in walk.tiles():
        sums = walk.sums(totals, at)
        tile.accumulate(at.read(ctx.xp, g, "out"), sums)
        if propagates_nan:
            tile.propagate_nan(sums)
    return walk.finish(totals)


def logmatmulexp_tangent(
    ctx: Context,
    layout: Fold,
    a: Array,
    b: Array,
    out: Array,
    da: Array | None,
    db: Array | None,
    budget: int,
) -> Array:
    """Return q_ij = sum_k p_ikj (da_ik + db_kj), the change of `out` with those of a and b."""
    xp = ctx.xp
    walk = _Walk(ctx, layout, a, b, out, budget, copies=3)
    result = ctx.empty(layout.full_shape, out.dtype)
    view = layout.view_out(xp, result)
    for tile, at in walk.tiles():
        at.write(ctx, view, tile.tangent(*walk.weights(da, db, at)))
    return xp.reshape(result, layout.out_shape)


def logmatmulexp_second(
    ctx: Context,
    layout: Fold,
    a: Array,
    b: Array,
    out: Array,
    g: Array,
    u: Array | None,
    v: Array | None,
    budget: int,
) -> tuple[Array | None, Array | None, Array]:
    """Return the gradients of `logmatmulexp_gradients` itself.

    With (da, db) the gradients of sum(g * out), these are the gradients of sum(u * da) +
    sum(v * db) with respect to a, b and g; u or v may be None, for zeros. With q the tangent of u
    and v, the first two are the sums of ``g_ij p_ikj (u_ik + v_kj - q_ij)``, and the last is q.
    """
    xp = ctx.xp
    zero = xp.zeros((1,) * len(layout.a_shape), dtype=ctx.dtype(ctx.precision), device=ctx.device)
    u = xp.broadcast_to(zero, layout.a_shape) if u is None else u
    v = xp.broadcast_to(zero, layout.b_shape) if v is None else v
    walk = _Walk(ctx, layout, a, b, out, budget, copies=5)
    totals = walk.totals((True, True))
    result = ctx.empty(layout.full_shape, g.dtype)
    view = layout.view_out(xp, result)
    g = walk.of_product(g)
    for tile, at in walk.tiles():
        of_u, of_v = walk.weights(u, v, at)
        q = tile.tangent(of_u, of_v)
        at.write(ctx, view, q)
        # Where the product is not finite, nothing is summed; a NaN is seen to by itself.
        q = xp.where(xp.isfinite(tile.out), q, xp.zeros_like(q))
        h, sums = ctx.load(at.read(xp, g, "out"), ctx.precision), walk.sums(totals, at)
        tile.accumulate(-h * q, sums)
        tile.accumulate(h, sums, Weights(own=(of_u, of_v)))
        tile.accumulate(h, sums, Weights(other=(of_u, of_v)))
        tile.propagate_nan(sums)
    return *walk.finish(totals), xp.reshape(result, layout.out_shape)


@dataclass(frozen=True, slots=True)
class _Tile:
    """One tile of a log product, its operands and what may be spent on it."""

    ctx: Context
    a: Operand  # [batch, rows, K]
    b: Operand  # [batch, K, cols]
    out: Array  # [batch, rows, cols]
    chunk: int  # terms of each sum that are worked on at a time
    block: int
    workspace: int

    def accumulate(self, h: Array, sums: list[Sums], weights: Weights = UNWEIGHTED) -> None:
        """Add the sums of h p times the weights, over columns and over rows."""
        given = [x for pair in weights for x in pair if x is not None]
        scale = max(1.0, *(abs(x) for array in given for x in self.ctx.extremes(array)), 1.0)
        for box, posterior in self._posteriors(h, scale):
            posterior.accumulate(h[box], weights.part(box), [s.part(box) for s in sums])
            for s in sums:
                s.fresh = False

    def tangent(self, u: Array | None, v: Array | None) -> Array:
        """Return q_ij = sum_k p_ikj (u_ik + v_kj)."""
        xp = self.ctx.xp
        result = xp.zeros_like(self.out)
        for box, posterior in self._posteriors(None, 1.0):
            found = posterior.tangent(part_of(u, box, 0), part_of(v, box, 1))
            result[box] += xp.astype(found, result.dtype, copy=False)
        nan = self._nan()
        return result if nan is None else xp.where(nan, xp.full_like(result, math.nan), result)

    def propagate_nan(self, sums: list[Sums]) -> None:
        """Make NaN of the sums that a NaN took part in."""
        nan = self._nan()
        if nan is not None:
            for s in sums:
                s.propagate_nan(nan)

    def _posteriors(
        self, h: Array | None, scale: float
    ) -> Iterator[tuple[Box, ScaledPosterior | ExactPosterior]]:
        """Yield boxes of the tile and posteriors of entries there; of each entry there is one."""
        ctx, every = self.ctx, slice(None)
        posterior = ScaledPosterior(ctx, self.a, self.b, ctx.precision, self.chunk, self.block)
        left = posterior.prove(self.out, h, None, scale)
        yield (every, every, every), posterior
        if left is None:
            return
        # Make room for the factors of parts.
        posterior.weights = self.a.factor = self.b.factor = None
        batch, rows, cols = (int(n) for n in left.shape)
        # Factors and sums in float64, each two times; gathered rows; copies of parts.
        sizes = (batch, rows, cols, int(self.a.values.shape[-1]))
        tiling = tile_product(sizes, self.workspace // 4, 40, 64, side=128)
        block = max(1, min(2 * ctx.block, self.workspace // 128))
        for at, of_rows in boxes((batch, rows), tiling.batch * tiling.rows):
            for (of_cols,) in boxes((cols,), tiling.cols):
                box = (at, of_rows, of_cols)
                rest: Array | None = left[box]
                if not bool(ctx.xp.any(rest)):
                    continue
                a, b = self.a.part((at, of_rows, every)), self.b.part((at, every, of_cols))
                if ctx.widest is not ctx.precision:
                    operands = (
                        posterior_operand(ctx, x.values, axis, ctx.widest)
                        for x, axis in ((a, -1), (b, -2))
                    )
                    wide = ScaledPosterior(ctx, *operands, ctx.widest, tiling.inner, self.block)
                    part = None if h is None else h[box]
                    rest = wide.prove(self.out[box], part, rest, scale)
                    yield box, wide
                    wide.weights = None
                if rest is not None:
                    yield box, ExactPosterior(ctx, a, b, rest, block, tiling.inner)

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


class _Walk:
    """The tiles of a folded log product, and arrays that hold sums over them."""

    def __init__(
        self, ctx: Context, layout: Fold, a: Array, b: Array, out: Array, budget: int, copies: int
    ) -> None:
        xp = ctx.xp
        self.ctx, self.layout, self.a, self.b, self.budget = ctx, layout, a, b, budget
        self.a_view, self.b_view = layout.view_a(xp, a), layout.view_b(xp, b)
        self.out_view = self.of_product(out)
        item = ctx.precision.itemsize
        self.block, reserved = elementwise_block(ctx, budget)
        # Factors and products of their size; quotients, sums, masks, and copies of entries.
        room = budget - budget // 4 - reserved
        entry = (copies + 2 * layout.copies) * item + 2
        self.tiling = Tiling(1, 1, 1, 1)
        if 0 not in layout.sizes:
            held = item * layout.copies * (1 if copies == 2 else 2)
            # Of the products of the factors' size, gradients hold one at a time.
            factor = item * (2 if copies == 2 else 1 + copies)
            self.tiling = tile_product(
                layout.sizes, room, factor, entry, side=_SIDE, copied_bytes=held
            )

    def of_product(self, x: Array) -> Array:
        """Return an array of the product's shape as [*batch, *rows, *cols]."""
        xp = self.ctx.xp
        return self.layout.view_out(xp, xp.reshape(x, self.layout.full_shape))

    def tiles(self) -> Iterator[tuple[_Tile, Place]]:
        """Yield tiles, those of a panel of columns together."""
        if 0 in self.layout.sizes:
            return
        ctx, xp, precision = self.ctx, self.ctx.xp, self.ctx.precision
        limits = (self.tiling.inner, self.block, self.budget)
        for places in panels(self.layout, self.tiling):
            panel = None
            for at in places:
                if panel is None:
                    panel = posterior_operand(ctx, at.read(xp, self.b_view, "b"), -2, precision)
                rows = posterior_operand(ctx, at.read(xp, self.a_view, "a"), -1, precision)
                yield _Tile(ctx, rows, panel, at.read(xp, self.out_view, "out"), *limits), at

    def weights(self, u: Array | None, v: Array | None, at: Place) -> Pair:
        """Return what a tile reads of arrays of the operands' shapes."""
        xp, layout = self.ctx.xp, self.layout
        return (
            None if u is None else at.read(xp, layout.view_a(xp, u), "a"),
            None if v is None else at.read(xp, layout.view_b(xp, v), "b"),
        )

    def totals(self, wanted: tuple[bool, bool]) -> dict[int, Array]:
        """Return arrays for gradients, by operand, in the shapes that tiles have."""
        batch, rows, cols, inner = self.layout.sizes
        shapes = ((batch, rows, inner), (batch, inner, cols))
        dtype, device = self.ctx.dtype(self.ctx.precision), self.ctx.device
        return {
            side: self.ctx.xp.zeros(shapes[side], dtype=dtype, device=device)
            for side in (0, 1)
            if wanted[side]
        }

    def sums(self, totals: dict[int, Array], at: Place) -> list[Sums]:
        """Return where a tile's sums go; the first panel and the first rows write them."""
        return [
            Sums(self.ctx, part_of(x, at.flat, side), side, at.flat[2 - side].start == 0)
            for side, x in totals.items()
        ]

    def finish(self, totals: dict[int, Array]) -> Pair:
        """Return the gradients, None for those that are not wanted."""
        xp, found = self.ctx.xp, [None, None]
        for side, x in totals.items():
            like = (self.a, self.b)[side]
            x = xp.reshape(self.layout.restored(xp, x, side), shape_of(like))
            found[side] = xp.astype(x, like.dtype, copy=False)
        return found[0], found[1]
