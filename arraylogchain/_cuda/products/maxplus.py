"""The max-plus product and its gradients on CUDA devices."""

from __future__ import annotations

import math

import numpy as np

from arraylogchain._cuda.device import Device
from arraylogchain._cuda.dtypes import C_TYPES, compute_type
from arraylogchain._cuda.elementwise import THREADS, blocks_for, zeros
from arraylogchain._cuda.launch import Launch
from arraylogchain._cuda.products.operands import (
    Array,
    operand_a,
    operand_b,
    product,
    product_view,
    strided_product_view,
)
from arraylogchain._cuda.products.panels import Panels, Prepared, factors_kernel
from arraylogchain._cuda.products.tiles import Tile, choose_tile, tiles_of
from arraylogchain._fold import Fold, Shape

# Values and indices take two registers for each entry of a tile.
TILES = {
    "float32": (Tile(128, 64, 8, 8, 4), Tile(64, 64, 16, 4, 4), Tile(16, 128, 16, 4, 4)),
    "float64": (Tile(64, 64, 8, 4, 4), Tile(64, 64, 8, 4, 4), Tile(32, 64, 8, 4, 4)),
}

INSTANTIATIONS = {
    "products/maxplus.cu": [
        f"maxplus<{c}, {tile}>"
        for dtype, c in C_TYPES.items()
        for tile in dict.fromkeys(TILES[compute_type(dtype)])
    ],
    "products/factors.cu": [factors_kernel(dtype, shifted=False) for dtype in C_TYPES],
    "products/maxplus_gradients.cu": [f"maxplus_gradients<{c}>" for c in C_TYPES.values()],
}
HOT = frozenset({"maxplus", "factors"})


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
    whole = product(device, layout, a, b, values, result_dtype)
    whole = whole.turned_if_thin()
    panels = Panels(whole, workspace)
    prepared = Prepared(device, whole, panels, shifted=False)
    tiles = TILES[compute_type(result_dtype)]
    tile = choose_tile(
        device, tiles, compute_type(result_dtype), panels.batches, panels.rows, panels.columns
    )
    for panel in panels:
        prepared.start(panel)
        for first, terms in panels.chunks():
            prepared.factors(panel, first, terms)
            device.run(
                Launch(
                    source="products/maxplus.cu",
                    kernel=f"maxplus<{C_TYPES[result_dtype]}, {tile}>",
                    grid=tiles_of(panel, tile.rows, tile.columns),
                    block=tile.threads,
                    shared_memory=0,
                    arguments=(
                        *prepared.factor_arguments,
                        np.int32(terms),
                        np.int64(first),
                        panel,
                        prepared.partial,
                        np.int32(first > 0),
                        values,
                        indices,
                        whole.view,
                    ),
                )
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
    device.run(
        Launch(
            source="products/maxplus_gradients.cu",
            kernel=f"maxplus_gradients<{C_TYPES[result_dtype]}>",
            grid=blocks_for(math.prod(layout.full_shape)),
            block=THREADS,
            shared_memory=0,
            arguments=(
                values,
                indices,
                product_view(layout),
                g,
                strided_product_view(device, layout, g, of_a, of_b),
                np.int64(batches),
                np.int64(rows),
                np.int64(columns),
                of_a,
                operand_a(device, layout, of_a).view,
                of_b,
                operand_b(device, layout, of_b).view,
            ),
        )
    )
    return of_a, of_b
