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
    flat = [xp.reshape(total, (-1,)) for total in totals]
    g = xp.reshape(g, layout.full_shape)
    if values is not None:
        values = xp.reshape(values, layout.full_shape)
    for box, at, of_a, of_b in _pieces(ctx, layout, indices, budget):
        weights = ctx.load(g[box], ctx.precision)
        if values is not None:
            weights = xp.where(xp.isfinite(values[box]), weights, xp.zeros_like(weights))
        weights = xp.where(at < 0, xp.zeros_like(weights), weights)
        at = xp.where(at < 0, xp.zeros_like(at), at)
        weights = xp.reshape(weights, (-1,))
        for total, first, step in ((flat[0], of_a, 1), (flat[1], of_b, layout.b_shape[-1])):
            ctx.add_at(total, xp.reshape(first + at * step, (-1,)), weights)
    return totals[0], totals[1]


def maxplus_tangent(
    ctx: Context, layout: Fold, da: Array, db: Array, indices: Array, budget: int
) -> Array:
    """Return da[i, k] + db[k, j] at the reported k: how the values change with the operands.

    It is 0 where the index is negative.
    """
    xp = ctx.xp
    result = xp.zeros(layout.full_shape, dtype=ctx.result_dtype, device=ctx.device)
    flat = [xp.reshape(da, (-1,)), xp.reshape(db, (-1,))]
    for box, at, of_a, of_b in _pieces(ctx, layout, indices, budget):
        steps = (1, layout.b_shape[-1])
        known = at >= 0
        at = xp.where(known, at, xp.zeros_like(at))
        total = xp.zeros(at.shape, dtype=ctx.dtype(ctx.precision), device=ctx.device)
        for x, first, step in zip(flat, (of_a, of_b), steps, strict=True):
            taken = xp.take(x, xp.reshape(first + at * step, (-1,)))
            total += xp.reshape(ctx.load(taken, ctx.precision), at.shape)
        # Not multiplied by 0: a tangent may be infinite.
        total = xp.where(known, total, xp.zeros_like(total))
        result[box] = xp.astype(total, result.dtype, copy=False)
    return xp.reshape(result, layout.out_shape)


def _pieces(
    ctx: Context, layout: Fold, indices: Array, budget: int
) -> Iterator[tuple[Box, Array, Array, Array]]:
    """Yield boxes of the product: its indices there, and where terms of sums begin.

    The last two are the places, in the operands as one axis, of a[..., i, 0] and b[..., 0, j].
    """
    if 0 in layout.sizes:
        return
    xp = ctx.xp
    shape = layout.full_shape
    indices = xp.reshape(indices, shape)
    # Three arrays of indices and two of numbers, and what adding at indices holds.
    for box in boxes(shape, max(1, min(ctx.block // 2, budget // 128))):
        starts = []
        for operand, own in ((layout.a_shape, len(shape) - 2), (layout.b_shape, len(shape) - 1)):
            start = xp.zeros((1,) * len(shape), dtype=indices.dtype, device=ctx.device)
            for axis in (*range(len(shape) - 2), own):
                if operand[axis] > 1:
                    along = [1] * len(shape)
                    along[axis] = -1
                    number = xp.arange(
                        box[axis].start, box[axis].stop, dtype=indices.dtype, device=ctx.device
                    )
                    start = start + xp.reshape(
                        number * math.prod(operand[axis + 1 :]), tuple(along)
                    )
            starts.append(start)
        yield box, indices[box], starts[0], starts[1]
