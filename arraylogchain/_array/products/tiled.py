"""Run a product tile by tile: fold the axes, walk over the tiles, put the results in place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from arraylogchain._array.products.tiling import Tiling
from arraylogchain._context import Array, Context
from arraylogchain._fold import Fold, boxes, lengths


class TileKernel(Protocol):
    """A product of one tile of rows with one panel of columns."""

    tiling: Tiling
    dtypes: list[Any]

    def panel(self, b: Array) -> Any:
        """Prepare columns b [batch, K, cols] that will meet several tiles of rows."""

    def __call__(self, a: Array, panel: Any, *outs: Array) -> None:
        """Write the results [batch, rows, cols] for a [batch, rows, K] into `outs`."""


def run(
    ctx: Context, layout: Fold, a: Array, b: Array, kernel: TileKernel, dtypes: Sequence[Any]
) -> list[Array]:
    """Apply a kernel to all tiles of a folded product.

    Parameters
    ----------
    ctx : Context
    layout : Fold
        Made from the shapes of `a` and `b`; no size is zero.
    a, b : array
        As the caller gave them.
    kernel : TileKernel
    dtypes : sequence of dtype
        One for each result of the kernel.

    Returns
    -------
    list of array
        Of shape ``layout.out_shape``, contiguous.
    """
    xp = ctx.xp
    tiling = kernel.tiling
    a_view, b_view = layout.view_a(xp, a), layout.view_b(xp, b)
    inner = layout.sizes[3]
    outs = [ctx.empty(layout.full_shape, dtype) for dtype in dtypes]
    views = [layout.view_out(xp, out) for out in outs]
    # Kernels write straight into the result where its tiles are what they compute.
    direct = not layout.copies and dtypes == kernel.dtypes
    for of_batch in boxes(layout.batch, tiling.batch):
        for of_cols in boxes(layout.cols, tiling.cols):
            b_tile = b_view[(*of_batch, slice(None), *of_cols)]
            width = math.prod(lengths(of_cols))
            panel = kernel.panel(xp.reshape(b_tile, (-1, inner, width)))
            for of_rows in boxes(layout.rows, tiling.rows):
                a_tile = a_view[(*of_batch, *of_rows, slice(None))]
                height = math.prod(lengths(of_rows))
                a_tile = xp.reshape(a_tile, (-1, height, inner))
                box = (*of_batch, *of_rows, *of_cols)
                tiles = [view[box] for view in views]
                shape = (a_tile.shape[0], height, width)
                if direct:
                    kernel(a_tile, panel, *(xp.reshape(tile, shape) for tile in tiles))
                    continue
                results = [ctx.empty(shape, dtype) for dtype in kernel.dtypes]
                kernel(a_tile, panel, *results)
                for tile, x in zip(tiles, results, strict=True):
                    tile[...] = _as(xp, xp.reshape(x, tile.shape), tile.dtype)
    return [xp.reshape(out, layout.out_shape) for out in outs]


def _as(xp: Any, x: Array, dtype: Any) -> Array:
    return x if x.dtype == dtype else xp.astype(x, dtype)
