"""The max-plus product and its gradients, which go to the reported term of each entry."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from arraylogchain._core.axes import Fold, boxes, chunks
from arraylogchain._core.context import Array, Context, shape_of
from arraylogchain._products.tiling import Tiles, panels, run, tile_product, with_small_blocks


def maxplus_matmul(
    ctx: Context, layout: Fold, a: Array, b: Array, budget: int
) -> tuple[Array, Array]:
    """Return max_k a[i, k] + b[k, j] and the smallest such k."""
    if ctx.kernels is not None:
        from arraylogchain._products import cuda

        result = cuda.maxplus_matmul(ctx, layout, a, b, budget)
        if result is not None:
            return result
    dtypes = [ctx.result_dtype, ctx.index_dtype]
    xp, item = ctx.xp, ctx.precision.itemsize
    if 0 in layout.sizes:
        values = xp.full(layout.out_shape, -math.inf, dtype=dtypes[0], device=ctx.device)
        return values, xp.full(layout.out_shape, -1, dtype=dtypes[1], device=ctx.device)
    # Bytes of an entry: value and index, the same for a further chunk, and a mask.
    factor, entry = item * (1 + layout.copies), 2 * (item + 8) + 1
    tiling = tile_product(layout.sizes, budget // 2, factor, entry, 512, layout.copies)
    # A block holds sums, and gathered operands.
    block = max(1, min(2 * ctx.block, budget // (12 * item)))
    chunk = min(layout.sizes[3], tiling.inner, block)

    def tile(a: Array, b: Array, values: Array, indices: Array) -> None:
        for k in chunks(layout.sizes[3], chunk):
            # With the terms last, maxima over them are fastest.
            transposed = ctx.empty((b.shape[0], b.shape[2], k.stop - k.start), values.dtype)
            transposed[...] = ctx.load(b[:, k, :].mT, ctx.precision)
            for box in boxes(tuple(values.shape), max(1, block // chunk)):
                batch, rows, cols = box
                a_values = ctx.load(a[batch, rows, k], ctx.precision)
                terms = a_values[:, :, None, :] + transposed[batch, cols, :][:, None, :, :]
                where = xp.argmax(terms, axis=-1, keepdims=True)  # the smallest, on ties
                top = xp.take_along_axis(terms, where, axis=-1)[..., 0]
                where = where[..., 0]
                if k.start:
                    where = where + k.start
                    # Keep NaN and, on ties, the earlier index.
                    keep = xp.isnan(values[box]) | (values[box] >= top)
                    top = xp.where(keep, values[box], top)
                    where = xp.where(keep, indices[box], where)
                values[box], indices[box] = top, where

    work = Tiles(tiling, lambda b: b, tile, [ctx.dtype(ctx.precision), ctx.index_dtype])
    values, indices = run(ctx, layout, a, b, work, dtypes)
    return values, indices


def finite_terms(ctx: Context, values: Array, indices: Array, budget: int) -> Array:
    """Return the indices of terms that have gradients: -1 where a value is infinite or NaN."""
    ctx, _ = with_small_blocks(ctx, budget)
    terms = ctx.empty(shape_of(indices), indices.dtype)
    for box in boxes(shape_of(indices), ctx.block):
        terms[box] = ctx.xp.where(ctx.xp.isfinite(values[box]), indices[box], -1)
    return terms


def maxplus_gradients(
    ctx: Context, layout: Fold, operands: Sequence[Array], terms: Array, g: Array, budget: int
) -> list[Array]:
    """Return the gradients of sum(g * values), in the operands' shapes and dtypes.

    Parameters
    ----------
    ctx : Context
    layout : Fold
    operands : sequence of array
        Only their shapes and dtypes are read.
    terms : array
        Indices of the product, as `finite_terms` returns them.
    g : array
        Of the product's shape.
    budget : int
        Bytes that temporaries may take.
    """
    xp, dtype, (batch, rows, cols, inner) = ctx.xp, ctx.dtype(ctx.precision), layout.sizes
    lengths = batch * rows * inner, batch * inner * cols
    gradient_sums = [xp.zeros(n, dtype=dtype, device=ctx.device) for n in lengths]
    views = [layout.view(xp, x, 2) for x in (terms, g)]
    # 128 bytes of an entry: indices, cotangents, and temporaries of reading and adding.
    factor, scratch = 1 + ctx.precision.itemsize * layout.copies, min(budget // 2, 64 * ctx.block)
    tiling = tile_product(layout.sizes, scratch, factor, 128, 512, layout.copies)
    tiles = itertools.chain.from_iterable(panels(layout, tiling))
    for at in tiles if 0 not in layout.sizes else ():
        index, g_view = (at.read(xp, x, 2) for x in views)
        weights = xp.where(index >= 0, ctx.load(g_view, ctx.precision), 0.0)
        k = xp.where(index >= 0, index, 0)
        n, i, j = (
            xp.reshape(ctx.arange(s.start, s.stop), shape)
            for s, shape in zip(at.flat, ((-1, 1, 1), (-1, 1), (-1,)), strict=True)
        )
        places = (n * rows + i) * inner + k, (n * inner + k) * cols + j
        for total, place in zip(gradient_sums, places, strict=True):
            ctx.add_at(total, xp.reshape(place, (-1,)), xp.reshape(weights, (-1,)))
    gradients = (layout.restored(xp, total, side) for side, total in enumerate(gradient_sums))
    pairs = zip(gradients, operands, strict=True)
    return [ctx.cast(xp.reshape(x, shape_of(y)), y.dtype) for x, y in pairs]
