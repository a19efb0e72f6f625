"""Products on CUDA devices: which kernels run, on which part, in which order.

Large products are computed panel by panel, as workspace allows: maxima.cu and factors.cu prepare
exponentials of both operands, logmatmulexp.cu multiplies and proves, exact.cu computes what is not
proved. Where it multiplies parts of the terms only, settle.cu adds these up and proves. Products
with few rows or columns, and small ones, are computed in one launch each.
"""

from __future__ import annotations

import numpy as np

from arraylogchain._context import Array, Context
from arraylogchain._cuda.launch import MAX_GRID, ceil_div
from arraylogchain._cuda.products import small
from arraylogchain._cuda.products.operands import Product, make_product
from arraylogchain._cuda.products.tiled import TiledProduct
from arraylogchain._cuda.products.tiles import PRODUCT_TILES, tile_shapes
from arraylogchain._fold import Fold

# As `PRODUCT_TILES`, for tensor cores, where these are faster: docs/numerics.md proves both dtypes
# accurate, from compute capability 8.0 on. Products with few rows would leave them without work.
TENSOR_TILES = {
    "float32": (
        *tile_shapes((128, 128, 16, 8, 8), (64, 64, 16, 4, 8), tensor_cores=True),
        PRODUCT_TILES["float32"][2],
    ),
    "float64": (
        *tile_shapes((128, 64, 8, 8, 8), (64, 64, 8, 4, 8), tensor_cores=True),
        PRODUCT_TILES["float64"][2],
    ),
}
# Up to this many, the right operand is read once and every term costs an exponential.
THIN_ROWS = (1, 2, 4)

_THIN_THREADS = 512


def logmatmulexp(ctx: Context, layout: Fold, a: Array, b: Array, budget: int) -> Array:
    """Return log(exp(a) @ exp(b))."""
    return multiply(ctx, layout, a, b, budget)


def multiply(
    ctx: Context,
    layout: Fold,
    a: Array,
    b: Array,
    budget: int,
    *,
    tensor_cores: bool = False,
) -> Array:
    """Return log(exp(a) @ exp(b)); `tensor_cores` multiply what is large enough for tiles."""
    tiles = (TENSOR_TILES if tensor_cores else PRODUCT_TILES)[ctx.precision.name]
    out = ctx.kernels.empty(layout.out_shape, ctx.result_name)
    product = make_product(ctx, layout, ctx.to_result(a), ctx.to_result(b), out)
    if small.is_small(product):
        small.run(product)
        return out
    product = product.transposed_if_thin()
    if min(product.left.lines, product.right.lines) <= max(THIN_ROWS):
        _run_thin(product)
    else:
        _run_tiled(TiledProduct(product, budget, tiles))
    return out


def _run_thin(product: Product) -> None:
    rows = min(n for n in THIN_ROWS if n >= product.left.lines)
    across = 32
    if product.right.terms_adjoin:
        blocks = ceil_div(product.right.lines, 16) * product.batches
        across = 1 if blocks < product.ctx.kernels.multiprocessors else _THIN_THREADS // 32
    blocks = product.batches * ceil_div(product.right.lines, across)
    for first in range(0, blocks, MAX_GRID):
        product.launch(
            f"thin<{product.c_type}, {rows}>",
            min(blocks - first, MAX_GRID),
            _THIN_THREADS,
            *product.operands,
            np.int64(product.terms),
            product.out,
            product.view,
            np.int32(across),
            np.int64(first),
        )


def _run_tiled(tiled: TiledProduct) -> None:
    out = tiled.product.out, tiled.product.view
    for panel in tiled:
        for first, terms in tiled.chunks(panel):
            tiled.run_sums(panel, first, terms)
        if tiled.partial is not None:
            tiled.run_entries("settle", panel, *out)
        tiled.run_exact("exact", panel, *out, *tiled.flags)
