"""The max-plus product and its gradients on CUDA devices."""

from __future__ import annotations

import math

import numpy as np

from arraylogchain._context import Array
from arraylogchain._cuda.device import Device
from arraylogchain._cuda.dtypes import C_TYPES, compute_type
from arraylogchain._cuda.elementwise import THREADS, blocks_for, zeros
from arraylogchain._cuda.launch import Launch
from arraylogchain._cuda.products.operands import (
    make_product,
    operand_a,
    operand_b,
    product_view,
    strided_product_view,
)
from arraylogchain._cuda.products.panels import TiledProduct
from arraylogchain._cuda.products.tiles import tile_shapes
from arraylogchain._fold import Fold, Shape

# Values and indices take two registers for each entry of a tile.
TILES = {
    "float32": tile_shapes((128, 64, 8, 8, 4), (64, 64, 16, 4, 4), (16, 128, 16, 4, 4)),
    "float64": tile_shapes((64, 64, 8, 4, 4), (64, 64, 8, 4, 4), (32, 64, 8, 4, 4)),
}

INSTANTIATIONS = {
    "products/maxplus.cu": [
        f"maxplus<{c}, {tile}>"
        for dtype, c in C_TYPES.items()
        for tile in dict.fromkeys(TILES[compute_type(dtype)])
    ],
    "products/maxplus_gradients.cu": [f"maxplus_gradients<{c}>" for c in C_TYPES.values()],
}
HOT = frozenset({"maxplus"})


def maxplus_matmul(
    device: Device, layout: Fold, a: Array, b: Array, result_dtype: str, workspace: int
) -> tuple[Array, Array]:
    """Return max_k a[i, k] + b[k, j] and the smallest such k, arrays of layout.out_shape.

    Parameters
    ----------
    device : Device
    layout : Fold
        Of the operands' shapes; none of its sizes is 0.
    a, b : array
        Of dtype `result_dtype`, with any strides.
    result_dtype : str
        One of `C_TYPES`; the indices are of dtype int64.
    workspace : int
        Bytes that temporaries may take.
    """
    values = device.empty(layout.out_shape, result_dtype)
    indices = device.empty(layout.out_shape, "int64")
    product = make_product(device, layout, a, b, values, result_dtype).transposed_if_thin()
    tiled = TiledProduct(
        device, product, workspace, TILES[compute_type(result_dtype)], shifted=False
    )
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
    device: Device,
    layout: Fold,
    a_shape: Shape,
    b_shape: Shape,
    values: Array | None,
    indices: Array,
    g: Array,
    result_dtype: str,
) -> tuple[Array, Array]:
    """Return the gradients of sum(g * values), of the operands' shapes, in the compute type.

    Parameters
    ----------
    device : Device
    layout : Fold
        Of the operands' shapes; none of its sizes is 0.
    a_shape, b_shape : tuple of int
    values, indices : array
        As `maxplus_matmul` returned them: contiguous. There is no gradient through values that are
        not finite, or where the index is negative; without values, only the latter.
    g : array
        Cotangents, of dtype `result_dtype` as values are, with any strides.
    result_dtype : str
        One of `C_TYPES`.
    """
    dtype = compute_type(result_dtype)
    of_a, of_b = (zeros(device, shape, dtype) for shape in (a_shape, b_shape))
    batches, rows, columns, _ = layout.sizes
    arguments = (
        values,
        indices,
        product_view(layout),
        g,
        strided_product_view(device, layout, g, of_a, of_b),
        *map(np.int64, (batches, rows, columns)),
        *operand_a(device, layout, of_a).arguments,
        *operand_b(device, layout, of_b).arguments,
    )
    kernel = f"maxplus_gradients<{C_TYPES[result_dtype]}>"
    blocks = blocks_for(math.prod(layout.full_shape))
    device.run(Launch("products/maxplus_gradients.cu", kernel, blocks, THREADS, arguments))
    return of_a, of_b
