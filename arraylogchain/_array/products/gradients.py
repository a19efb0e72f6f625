"""Gradients of the log product: sums over posterior weights, tile by tile.

Everything is summed over broadcast axes by the fold: with operands [*batch, *rows, K] and
[*batch, K, *cols], the gradient of the first sums over columns and that of the second over rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from arraylogchain._array.products.exact_posterior import ExactPosterior
from arraylogchain._array.products.operand import NARROW, Operand, is_small, part_of
from arraylogchain._array.products.posterior import (
    ScaledPosterior,
    Sums,
    posterior_operand,
)
from arraylogchain._array.products.tiled import Place, panels
from arraylogchain._array.products.tiling import elementwise_block, tile_product
from arraylogchain._context import Array, Context, shape_of
from arraylogchain._fold import Box, Fold, boxes

# Rows and columns of a tile where they fit: what is added up over tiles is written once per tile.
_SIDE = 1024

# Multiplied by exponentials of narrow operands, in float32, sums of weights stay finite.
_LARGEST_WEIGHT = 1e15

Pair = tuple[Array | None, Array | None]


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
    if is_small(ctx, layout) and layout.is_identity and a.ndim == b.ndim > 1:
        both = _small_gradients(ctx, a, b, g)
        if both is not None:
            return both[0] if wanted[0] else None, both[1] if wanted[1] else None
    totals = _totals(ctx, layout, wanted)
    for tile, h, at in _tiles(ctx, layout, a, b, out, g, budget):
        sums = [
            # The first panel and the first rows are written, others added.
            Sums(ctx, part_of(x, at.flat, side), side, at.flat[2 - side].start == 0)
            for side, x in totals.items()
        ]
        tile.accumulate(h, sums)
        if propagates_nan:
            tile.propagate_nan(sums)
    found: list[Array | None] = [None, None]
    for side, x in totals.items():
        like = (a, b)[side]
        x = ctx.xp.reshape(layout.restored(ctx.xp, x, side), shape_of(like))
        found[side] = ctx.xp.astype(x, like.dtype, copy=False)
    return found[0], found[1]


def _totals(ctx: Context, layout: Fold, wanted: tuple[bool, bool]) -> dict[int, Array]:
    """Return arrays for the gradients that are wanted, in the shapes that tiles have."""
    batch, rows, cols, inner = layout.sizes
    shapes = {0: (batch, rows, inner), 1: (batch, inner, cols)}
    dtype = ctx.dtype(ctx.precision)
    return {
        side: ctx.xp.zeros(shape, dtype=dtype, device=ctx.device)
        for side, shape in shapes.items()
        if wanted[side]
    }


def _tiles(
    ctx: Context, layout: Fold, a: Array, b: Array, out: Array, g: Array, budget: int
) -> Iterator[tuple[_Tile, Array, Place]]:
    """Yield tiles, their cotangents and where they lie; those of a panel of columns together."""
    if 0 in layout.sizes:
        return
    xp, item = ctx.xp, ctx.precision.itemsize
    a, b = layout.view_a(xp, a), layout.view_b(xp, b)
    out, g = (layout.view_out(xp, xp.reshape(x, layout.full_shape)) for x in (out, g))
    block, reserved = elementwise_block(ctx, budget)
    # Two factors, one product of their size; quotients, masks, and copies of entries.
    room = budget - budget // 4 - reserved
    entry, copied = (2 + 2 * layout.copies) * item + 2, item * layout.copies
    tiling = tile_product(layout.sizes, room, 2 * item, entry, side=_SIDE, copied_bytes=copied)
    for places in panels(layout, tiling):
        panel = None
        for at in places:
            if panel is None:
                panel = posterior_operand(ctx, at.read(xp, b, "b"), 1, ctx.precision)
            rows = posterior_operand(ctx, at.read(xp, a, "a"), 0, ctx.precision)
            results = at.read(xp, out, "out")
            tile = _Tile(ctx, rows, panel, results, tiling.inner, block, budget)
            yield tile, at.read(xp, g, "out"), at


def _small_gradients(ctx: Context, a: Array, b: Array, g: Array) -> Pair | None:
    """Return both gradients of a small product as it is given; None where that may not do."""
    xp = ctx.xp
    if not ctx.are_within(NARROW[ctx.precision.name], a, b):
        return None
    left, right = (xp.exp(ctx.load(x, ctx.precision)) for x in (a, b))
    g = ctx.load(g, ctx.precision)
    weights = g / (left @ right)
    # False where it is infinite or NaN as well.
    if not ctx.are_within(_LARGEST_WEIGHT, weights):
        return None
    # Those of small cotangents beside large sums may have underflowed.
    sound = xp.count_nonzero(xp.abs(weights) >= ctx.precision.tiny)
    if sound < xp.count_nonzero(g):
        return None
    da, db = left * (weights @ right.mT), right * (left.mT @ weights)
    return xp.astype(da, a.dtype, copy=False), xp.astype(db, b.dtype, copy=False)


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

    def accumulate(self, h: Array, sums: list[Sums]) -> None:
        """Add the sums of h p over columns and over rows."""
        for box, posterior in self._posteriors(h):
            posterior.accumulate(h[box], [s.part(box) for s in sums])
            for s in sums:
                s.fresh = False

    def propagate_nan(self, sums: list[Sums]) -> None:
        """Make NaN of the sums that a NaN took part in; where +inf met -inf, none did."""
        for operand in (self.a, self.b):
            if not operand.clean:
                for s in sums:
                    s.propagate_nan(self.ctx.xp.isnan(operand.maxima))

    def _posteriors(self, h: Array) -> Iterator[tuple[Box, ScaledPosterior | ExactPosterior]]:
        """Yield boxes of the tile and posteriors of entries there; of each entry there is one."""
        ctx, every = self.ctx, slice(None)
        posterior = ScaledPosterior(ctx, self.a, self.b, ctx.precision, self.chunk, self.block)
        left = posterior.prove(self.out, h, None)
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
                a, b = self.a.part(box, 0), self.b.part(box, 1)
                if ctx.widest is not ctx.precision:
                    of_a, of_b = (
                        posterior_operand(ctx, x.values, side, ctx.widest)
                        for side, x in enumerate((a, b))
                    )
                    wide = ScaledPosterior(ctx, of_a, of_b, ctx.widest, tiling.inner, self.block)
                    rest = wide.prove(self.out[box], h[box], rest)
                    yield box, wide
                    wide.weights = None
                if rest is not None:
                    yield box, ExactPosterior(ctx, a, b, rest, block, tiling.inner)
