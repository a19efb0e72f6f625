"""The max-plus product and its gradients on CUDA devices."""

from __future__ import annotations

import math

import numpy as np

from arraylogchain._context import Array, Context
from arraylogchain._cuda.products.operands import make_product, product_view
from arraylogchain._cuda.products.panels import THREADS, blocks_for
from arraylogchain._cuda.products.tiled import TiledProduct
from arraylogchain._cuda.products.tiles import tile_shapes
from arraylogchain._fold import Fold, Shape

# A maximum takes twice as long as a multiplication and addition, and three registers for each entry
# of a tile: shared memory is no limit of small parts, and there is no larger tile.
TILES = {
    "float32": tile_shapes((64, 64, 16, 4, 4), (64, 64, 16, 4, 4), (16, 128, 16, 4, 4)),
    "float64": tile_shapes((64, 64, 8, 4, 4), (64, 64, 8, 4, 4), (32, 64, 8, 4, 4)),
}


def maxplus_matmul(
    ctx: Context, layout: Fold, a: Array, b: Array, budget: int
) -> tuple[Array, Array]:
    """Return max_k a[i, k] + b[k, j] and the smallest such k."""
    values = ctx.kernels.empty(layout.out_shape, ctx.result_name)
    indices = ctx.kernels.empty(layout.out_shape, "int64")
    product = make_product(ctx, layout, ctx.to_result(a), ctx.to_result(b), values)
    product = product.transposed_if_thin()
    tiled = TiledProduct(product, budget, TILES[ctx.precision.name], shifted=False)
    for panel in tiled:
        for first, terms in tiled.chunks(panel):
            tiled.run_tiles(
                "maxplus",
                panel,
                terms,
                np.int64(first),
                panel,
                tiled.partial,
                np.int32(first > 0),
                values,
                indices,
                product.view,
                keeps_totals=False,
            )
    return values, indices


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

    There is none through values that are not finite, nor where the index is negative.
    """
    dtype = ctx.dtype(ctx.precision)
    of_a, of_b = (ctx.xp.zeros(shape, dtype=dtype, device=ctx.device) for shape in shapes)
    indices, g = _contiguous(ctx, layout, indices), ctx.to_result(g)
    if values is not None:
        values = _contiguous(ctx, layout, ctx.to_result(values))
    product = make_product(ctx, layout, of_a, of_b, indices)
    product.launch(
        f"maxplus_gradients<{product.c_type}>",
        blocks_for(math.prod(layout.full_shape)),
        THREADS,
        values,
        indices,
        product.view,
        g,
        product_view(ctx.kernels, layout, g),
        *map(np.int64, (product.batches, product.left.lines, product.right.lines)),
        *product.operands,
    )
    return of_a, of_b


def _contiguous(ctx: Context, layout: Fold, x: Array) -> Array:
    """Return an array of the product's shape whose entries lie one after another."""
    return ctx.xp.reshape(ctx.xp.reshape(x, (-1,)), layout.out_shape)
