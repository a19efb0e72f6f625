"""Gradients of log products on CUDA devices.

They are sums over its posterior, as in `_array.products`: posterior_weights.cu divides the
cotangents by the product's sums, which logmatmulexp.cu leaves, and posterior_sums.cu multiplies the
quotients with the factors of either operand. What is not proved is left open; that is added up
last, by exact_posterior.cu and exact_posterior_sums.cu. For small products small_gradients.cu does
it all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from arraylogchain._context import Array, Context
from arraylogchain._cuda.dtypes import C_TYPES
from arraylogchain._cuda.launch import ceil_div
from arraylogchain._cuda.products import small
from arraylogchain._cuda.products.operands import (
    Operand,
    Product,
    make_product,
    operands,
    product_view,
)
from arraylogchain._cuda.products.panels import THREADS, blocks_for, pitch_of
from arraylogchain._cuda.products.tiled import TiledProduct
from arraylogchain._cuda.products.tiles import PRODUCT_TILES, choose_tile
from arraylogchain._fold import Fold

# Sides are multiples of 64, so that tiles of the exact kernels do not reach over those with flags.
TILES = {dtype: tiles[:2] for dtype, tiles in PRODUCT_TILES.items()}

_EXACT_SUMS_SIDE = 32


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
) -> tuple[Array | None, Array | None]:
    """Return the gradients of sum(g * logmatmulexp(a, b)), each of its operand's shape and dtype.

    Where products are not small, gradients of half precisions are summed in arrays of float32.
    Without `propagates_nan`, an operand's NaN does not show in the gradients, as +inf does not.
    """
    device, g = ctx.kernels, ctx.to_result(g)
    product = make_product(ctx, layout, *map(ctx.to_result, (a, b, out)))
    is_small = small.is_small(product)
    dtype = ctx.result_name if is_small else ctx.precision.name
    sums = [
        device.empty(tuple(x.shape), dtype) if want else x
        for x, want in zip((a, b), wanted, strict=True)
    ]
    views = operands(device, layout, *sums)
    targets = [view if want else None for view, want in zip(views, wanted, strict=True)]
    cotangents = (g, product_view(device, layout, g), np.int32(propagates_nan))
    if is_small:
        small.run_gradients(product, cotangents, targets)
    else:
        TiledPosterior(product, cotangents, budget).run(targets)
    of_a, of_b = (
        ctx.xp.astype(_rounded(product, x), like.dtype, copy=False) if want else None
        for x, like, want in zip(sums, (a, b), wanted, strict=True)
    )
    return of_a, of_b


def _rounded(product: Product, sums: Array) -> Array:
    """Return sums in the dtype of the result."""
    ctx, count = product.ctx, math.prod(sums.shape)
    if ctx.kernels.dtype_name(sums) == ctx.result_name:
        return sums
    out = ctx.kernels.empty(tuple(sums.shape), ctx.result_name)
    kernel = f"rounded<{product.c_type}>"
    product.launch(kernel, blocks_for(count), THREADS, sums, out, np.int64(count))
    return out


class TiledPosterior:
    """Gradients of a product panel by panel: the launches, and workspace that all panels share.

    Parameters
    ----------
    product : Product
        With its results.
    cotangents : tuple
        An array, where its entries lie, and whether an operand's NaN shows in the gradients.
    workspace : int
        Bytes that temporaries may take.
    """

    def __init__(self, product: Product, cotangents: tuple[Any, ...], workspace: int) -> None:
        self.product, self.cotangents = product, cotangents
        precision = product.ctx.precision
        self.tiles = TILES[precision.name]
        self.tiled = TiledProduct(
            product, workspace, self.tiles, entry_bytes=3 * precision.itemsize
        )
        panels = self.tiled.panels
        # Arrays [batches, rows, pitch] of the panel at hand: weights that are proved, cotangents
        # whose weights are left open, and what these are shifted by.
        self.weights = self.tiled.partial
        self.open, self.tops = (
            self.tiled.new_array(panels.rows, pitch_of(panels.columns)) for _ in range(2)
        )

    def run(self, targets: Sequence[Operand | None]) -> None:
        """Write the gradients of the left and the right operand; None for one not wanted."""
        wanted = [
            (target, of_left)
            for target, of_left in zip(targets, (True, False), strict=True)
            if target is not None
        ]
        chunks = list(self.tiled.panels.chunks())
        for panel in self.tiled:
            for first, terms in self.tiled.chunks(panel):
                self.tiled.run_sums(panel, first, terms)
            out = self.product.out, self.product.view
            self.tiled.run_entries("posterior_weights", panel, *out, *self.cotangents, self.open)
            self.tiled.run_exact("exact_posterior", panel, *self._open_weights(panel))
            for first, terms in chunks:
                if len(chunks) > 1:
                    self.tiled.compute_factors(panel, first, terms)
                for target, of_left in wanted:
                    self._run_sums(panel, first, terms, target, of_left)
            for target, of_left in wanted:
                self._run_exact_sums(panel, target, of_left)

    def _open_weights(self, panel: np.ndarray) -> tuple[Any, ...]:
        """Return what is left open as kernels take it."""
        return self.open, self.tops, np.int64(pitch_of(int(panel["columns"]))), *self.tiled.flags

    def _run_sums(
        self, panel: np.ndarray, first: int, terms: int, target: Operand, of_left: bool
    ) -> None:
        own, other = self.tiled.factors_of(panel)[:: 1 if of_left else -1]
        dtype = self.product.ctx.precision.name
        batches, rows, columns = (int(panel[name]) for name in ("batches", "rows", "columns"))
        down, across = (rows, terms) if of_left else (terms, columns)
        tile = choose_tile(self.product.ctx.kernels, self.tiles, dtype, batches, down, across)
        self.product.launch(
            f"posterior_sums<{C_TYPES[dtype]}, {tile}, {str(of_left).lower()}>",
            batches * ceil_div(down, tile.rows) * ceil_div(across, tile.columns),
            tile.threads,
            self.weights,
            np.int64(pitch_of(columns)),
            *own,
            *other,
            panel,
            np.int64(first),
            np.int32(terms),
            *target.arguments,
            # What other columns, or rows, have added before stays.
            np.int32(int(panel["first_column" if of_left else "first_row"]) > 0),
            shared_memory=tile.totals(dtype, columns if of_left else rows),
        )

    def _run_exact_sums(self, panel: np.ndarray, target: Operand, of_left: bool) -> None:
        product = self.product
        sides = list(zip(product.sides, self.tiled.shifts, strict=True))
        (own, own_shifts), (other, other_shifts) = sides if of_left else sides[::-1]
        lines = int(panel["rows" if of_left else "columns"])
        blocks = ceil_div(lines, _EXACT_SUMS_SIDE) * ceil_div(product.terms, _EXACT_SUMS_SIDE)
        product.launch(
            f"exact_posterior_sums<{product.c_type}, {str(of_left).lower()}>",
            blocks * int(panel["batches"]),
            THREADS,
            *own.arguments,
            own_shifts,
            *other.arguments,
            other_shifts,
            np.int64(product.terms),
            panel,
            *self._open_weights(panel),
            *target.arguments,
        )
