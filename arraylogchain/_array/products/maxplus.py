"""The max-plus product, and its derivatives: each entry hangs on the one term that was reported."""

from __future__ import annotations

import math
from collections.abc import Iterator

from arraylogchain._array.products import tiled
from arraylogchain._array.products.tiling import tile_product
from arraylogchain._context import Array, Context
from arraylogchain._fold import Box, Fold, Shape, blocks, boxes, chunks


def maxplus_matmul(
    ctx: Context, layout: Fold, a: Array, b: Array, budget: int
) -> tuple[Array, Array]:
    """Return max_k a[i, k] + b[k, j] and the smallest such k."""
    dtypes = [ctx.result_dtype, ctx.index_dtype]
    if 0 in layout.sizes:
        values, indices = (
            ctx.xp.full(layout.out_shape, nothing, dtype=dtype, device=ctx.device)
            for nothing, dtype in zip((-math.inf, -1), dtypes, strict=True)
        )
    else:
        kernel = MaxPlusKernel(ctx, layout.sizes, budget, layout.copies)
        values, indices = tiled.run(ctx, layout, a, b, kernel, dtypes)
    return values, indices


class MaxPlusKernel:
    """max_k a[i, k] + b[k, j] and its k, for tiles a [batch, rows, K], b [batch, K, cols]."""

    shares_tiles = False

    def __init__(
        self, ctx: Context, sizes: tuple[int, int, int, int], workspace: int, copies: bool
    ) -> None:
        self.ctx = ctx
        item = ctx.precision.itemsize
        # Values and indices of a tile, those of a further chunk, and a mask.
        self.tiling = tile_product(
            sizes, workspace // 2, item, 2 * (item + 8) + 1, copied_bytes=item * copies
        )
        self.dtypes = [ctx.dtype(ctx.precision), ctx.index_dtype]
        # A block holds sums, and gathered operands.
        self.block = max(1, min(2 * ctx.block, workspace // (12 * item)))

    def panel(self, b: Array) -> Array:
        return b

    def __call__(self, a: Array, panel: Array, values: Array, indices: Array) -> None:
        ctx, xp = self.ctx, self.ctx.xp
        shape = tuple(values.shape)
        inner = int(a.shape[-1])
        chunk = min(inner, self.tiling.inner, self.block)
        for k in chunks(inner, chunk):
            # With the terms last, maxima over them are fastest.
            transposed = ctx.transposed(panel[:, k, :], ctx.precision)
            for box in blocks(shape, max(1, self.block // chunk)):
                batch, rows, cols = box
                of_a = ctx.load(a[batch, rows, k], ctx.precision)
                terms = of_a[:, :, None, :] + transposed[batch, cols, :][:, None, :, :]
                where = xp.argmax(terms, axis=-1, keepdims=True)  # the smallest, on ties
                top = xp.take_along_axis(terms, where, axis=-1)[..., 0]
                where = where[..., 0]
                if k.start:
                    where = where + k.start
                    # A NaN stays; on ties the earlier index does.
                    keep = xp.isnan(values[box]) | (values[box] >= top)
                    top = xp.where(keep, values[box], top)
                    where = xp.where(keep, indices[box], where)
                values[box], indices[box] = top, where


def maxplus_gradients(
    ctx: Context,
    layout: Fold,
    shapes: tuple[Shape, Shape],
    indices: Array,
    g: Array,
    values: Array | None,
    budget: int,
) -> tuple[Array, Array]:
    """Return the gradients of sum(g * values), in the precision of the computation.

    Parameters
    ----------
    ctx : Context
    layout : Fold
    shapes : tuple of tuple of int
        Of the operands.
    indices : array
        As the product reported them; there is no gradient through a negative one.
    g : array
        Of the product's shape.
    values : array, optional
        The product; where it is infinite or NaN, there is no gradient.
    budget : int
        Bytes that temporaries may take.
    """
    xp = ctx.xp
    dtype = ctx.dtype(ctx.precision)
    totals = [xp.zeros(shape, dtype=dtype, device=ctx.device) for shape in shapes]
    g = xp.reshape(g, layout.full_shape)
    if values is not None:
        values = xp.reshape(values, layout.full_shape)
    for box, known, places in _boxes(ctx, layout, indices, budget):
        if values is not None:
            known = known & xp.isfinite(values[box])
        weights = ctx.load(g[box], ctx.precision)
        weights = xp.reshape(xp.where(known, weights, xp.zeros_like(weights)), (-1,))
        for total, place in zip(totals, places, strict=True):
            ctx.add_at(xp.reshape(total, (-1,)), place, weights)
    return totals[0], totals[1]


def maxplus_tangent(
    ctx: Context, layout: Fold, da: Array, db: Array, indices: Array, budget: int
) -> Array:
    """Return da[i, k] + db[k, j] at the reported k: how the values change with the operands.

    It is 0 where the index is negative.
    """
    xp = ctx.xp
    result = xp.zeros(layout.full_shape, dtype=ctx.result_dtype, device=ctx.device)
    for box, known, places in _boxes(ctx, layout, indices, budget):
        total = xp.zeros(known.shape, dtype=ctx.dtype(ctx.precision), device=ctx.device)
        for x, place in zip((da, db), places, strict=True):
            taken = xp.take(xp.reshape(x, (-1,)), place)
            total += xp.reshape(ctx.load(taken, ctx.precision), known.shape)
        # Not multiplied by 0: a tangent may be infinite.
        total = xp.where(known, total, xp.zeros_like(total))
        result[box] = xp.astype(total, result.dtype, copy=False)
    return xp.reshape(result, layout.out_shape)


def _boxes(
    ctx: Context, layout: Fold, indices: Array, budget: int
) -> Iterator[tuple[Box, Array, list[Array]]]:
    """Yield boxes of the product, whether an index is reported there, and the places of its terms.

    A place is that of a[..., i, k], or b[..., k, j], in the operand as one axis; of a[..., i, 0] or
    b[..., 0, j] where no index is reported.
    """
    if 0 in layout.sizes:
        return
    xp = ctx.xp
    shape = layout.full_shape
    indices = xp.reshape(indices, shape)
    own = len(shape) - 2
    # Three arrays of indices and two of numbers, and what adding at indices holds.
    for box in boxes(shape, max(1, min(ctx.block // 2, budget // 128))):
        known = indices[box] >= 0
        at = xp.where(known, indices[box], xp.zeros_like(indices[box]))
        places = []
        for operand, skipped, step in ((layout.a_shape, own + 1, 1), (layout.b_shape, own, None)):
            place = at * (step or operand[-1])
            for axis, part in enumerate(box):
                if axis == skipped or operand[axis] == 1:
                    continue
                number = xp.arange(part.start, part.stop, dtype=at.dtype, device=ctx.device)
                along = [1] * len(shape)
                along[axis] = -1
                place = place + xp.reshape(number * math.prod(operand[axis + 1 :]), tuple(along))
            places.append(xp.reshape(place, (-1,)))
        yield box, known, places
