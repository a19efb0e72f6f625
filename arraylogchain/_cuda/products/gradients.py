"""Gradients of log products on CUDA devices.

They are sums over its posterior, as in `_array.products`: posterior_weights.cu divides the
cotangents by the product's sums, and posterior_sums.cu multiplies the quotients with the factors of
either operand. What the first cannot prove it leaves open; that is added up last, by
exact_posterior.cu and exact_posterior_sums.cu. For small products small_gradients.cu does it all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from arraylogchain._context import Array
from arraylogchain._cuda.device import Device
from arraylogchain._cuda.dtypes import C_TYPES, compute_type, itemsize
from arraylogchain._cuda.elementwise import rounded
from arraylogchain._cuda.launch import Launch, ceil_div
from arraylogchain._cuda.products import small
from arraylogchain._cuda.products.operands import (
    Product,
    StridedOperand,
    make_product,
    operand_a,
    operand_b,
    strided_product_view,
)
from arraylogchain._cuda.products.panels import THREADS, TiledProduct, pitch_of
from arraylogchain._cuda.products.tiles import PRODUCT_TILES, choose_tile
from arraylogchain._fold import Fold

# Sides are multiples of 64, so that tiles of the exact kernels do not reach over those with flags.
TILES = {dtype: tiles[:2] for dtype, tiles in PRODUCT_TILES.items()}

_EXACT_SUMS_SIDE = 32

INSTANTIATIONS = {
    "products/posterior_weights.cu": [
        f"posterior_weights<{c}, {tile}>"
        for dtype, c in C_TYPES.items()
        for tile in TILES[compute_type(dtype)]
    ],
    "products/posterior_sums.cu": [
        f"posterior_sums<{C_TYPES[dtype]}, {tile}, {of_left}>"
        for dtype, tiles in TILES.items()
        for tile in tiles
        for of_left in ("true", "false")
    ],
    "products/exact_posterior.cu": [f"exact_posterior<{c}>" for c in C_TYPES.values()],
    "products/exact_posterior_sums.cu": [
        f"exact_posterior_sums<{c}, {of_left}>"
        for c in C_TYPES.values()
        for of_left in ("true", "false")
    ],
}
HOT = frozenset({"posterior_weights", "posterior_sums"})


def logmatmulexp_gradients(
    device: Device,
    layout: Fold,
    a: Array,
    b: Array,
    out: Array,
    g: Array,
    result_dtype: str,
    workspace: int,
    wanted: tuple[bool, bool] = (True, True),
    propagates_nan: bool = True,
) -> tuple[Array | None, Array | None]:
    """Return the gradients of sum(g * logmatmulexp(a, b)), each of its operand's shape and dtype.

    Parameters
    ----------
    device : Device
    layout : Fold
        Of the operands' shapes; none of its sizes is 0.
    a, b : array
    out, g : array
        The product, and the cotangents, of its shape. All arrays are of dtype `result_dtype`, with
        any strides.
    result_dtype : str
        One of `C_TYPES`. Where products are not small, gradients of half precisions are summed in
        arrays of float32.
    workspace : int
        Bytes that temporaries may take beside those.
    wanted : tuple of bool
        Which gradients to compute.
    propagates_nan : bool
        Whether a NaN in an operand shows in the gradients; else it has none, as +inf.
    """
    product = make_product(device, layout, a, b, out, result_dtype)
    product.view[...] = strided_product_view(device, layout, out, a, b)
    g_view = strided_product_view(device, layout, g, a, b)
    is_small = small.is_small(product)
    dtype = result_dtype if is_small else compute_type(result_dtype)
    of_a, of_b = (
        device.empty(tuple(x.shape), dtype) if want else None
        for x, want in zip((a, b), wanted, strict=True)
    )
    targets = (
        None if of_a is None else operand_a(device, layout, of_a),
        None if of_b is None else operand_b(device, layout, of_b),
    )
    if is_small:
        small.run_gradients(device, product, g, g_view, targets, propagates_nan)
        return of_a, of_b
    TiledPosterior(device, product, g, g_view, workspace, propagates_nan).run(targets)
    return rounded(device, of_a, result_dtype), rounded(device, of_b, result_dtype)


class TiledPosterior:
    """Gradients of a product panel by panel: the launches, and workspace that all panels share.

    Parameters
    ----------
    device : Device
    product : Product
        With its results.
    g : array
        Cotangents.
    g_view : numpy.ndarray
        Where they lie.
    workspace : int
        Bytes that temporaries may take.
    propagates_nan : bool
        Whether a NaN in an operand shows in the gradients.
    """

    def __init__(
        self,
        device: Device,
        product: Product,
        g: Array,
        g_view: np.ndarray,
        workspace: int,
        propagates_nan: bool,
    ) -> None:
        dtype = compute_type(product.dtype)
        entry_bytes = 3 * itemsize(dtype)
        self.tiled = TiledProduct(device, product, workspace, TILES[dtype], entry_bytes=entry_bytes)
        self.device, self.product, self.dtype = device, product, dtype
        self.cotangents = (g, g_view, np.int32(propagates_nan))
        panels = self.tiled.panels
        entries = panels.batches * panels.rows * pitch_of(panels.columns)
        # Arrays [batches, rows, pitch] of the panel at hand: weights that are proved, cotangents
        # whose weights are left open, and what these are shifted by.
        self.weights, self.open, self.tops = (device.empty((entries,), dtype) for _ in range(3))
        self.flags = self.tiled.new_flags()

    def run(self, targets: Sequence[StridedOperand | None]) -> None:
        """Write the gradients of the left and the right operand; None for one not wanted."""
        wanted = [
            (target, of_left)
            for target, of_left in zip(targets, (True, False), strict=True)
            if target is not None
        ]
        chunks = list(self.tiled.panels.chunks())
        for panel in self.tiled:
            for first, terms in self.tiled.chunks(panel):
                self._run_weights(panel, first, terms)
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
        pitch, tile = pitch_of(int(panel["columns"])), self.tiled.tile
        sides = np.int32(tile.rows), np.int32(tile.columns)
        return self.open, self.tops, np.int64(pitch), self.flags, *sides

    def _run_weights(self, panel: np.ndarray, first: int, terms: int) -> None:
        product = self.product
        self.tiled.run_tiles(
            "posterior_weights",
            panel,
            terms,
            np.int64(product.terms),
            panel,
            *self.tiled.shifts,
            np.int32(first > 0),
            np.int32(first + terms == product.terms),
            product.out,
            product.view,
            *self.cotangents,
            self.weights,
            self.open,
            np.int64(pitch_of(int(panel["columns"]))),
            self.flags,
        )

    def _run_sums(
        self, panel: np.ndarray, first: int, terms: int, target: StridedOperand, of_left: bool
    ) -> None:
        own, other = self.tiled.sides if of_left else self.tiled.sides[::-1]
        dtype = self.dtype
        batches, rows, columns = (int(panel[name]) for name in ("batches", "rows", "columns"))
        down, across = (rows, terms) if of_left else (terms, columns)
        tile = choose_tile(self.device, TILES[dtype], dtype, batches, down, across)
        arguments = (
            self.weights,
            np.int64(pitch_of(columns)),
            *own.arguments,
            *other.arguments,
            panel,
            np.int64(first),
            np.int32(terms),
            *target.arguments,
            # What other columns, or rows, have added before stays.
            np.int32(int(panel["first_column" if of_left else "first_row"]) > 0),
        )
        self.device.run(
            Launch(
                "products/posterior_sums.cu",
                f"posterior_sums<{C_TYPES[dtype]}, {tile}, {str(of_left).lower()}>",
                batches * ceil_div(down, tile.rows) * ceil_div(across, tile.columns),
                tile.threads,
                arguments,
                tile.totals(dtype, columns if of_left else rows),
            )
        )

    def _run_exact_sums(self, panel: np.ndarray, target: StridedOperand, of_left: bool) -> None:
        product = self.product
        sides = list(zip(product.sides, self.tiled.shifts, strict=True))
        (own, own_shifts), (other, other_shifts) = sides if of_left else sides[::-1]
        lines = int(panel["rows" if of_left else "columns"])
        blocks = ceil_div(lines, _EXACT_SUMS_SIDE) * ceil_div(product.terms, _EXACT_SUMS_SIDE)
        kernel = f"exact_posterior_sums<{C_TYPES[product.dtype]}, {str(of_left).lower()}>"
        arguments = (
            *own.arguments,
            own_shifts,
            *other.arguments,
            other_shifts,
            np.int64(product.terms),
            panel,
            *self._open_weights(panel),
            *target.arguments,
        )
        blocks *= int(panel["batches"])
        source = "products/exact_posterior_sums.cu"
        self.device.run(Launch(source, kernel, blocks, THREADS, arguments))
