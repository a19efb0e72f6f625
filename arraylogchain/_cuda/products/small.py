"""Many small products, and their gradients, on CUDA devices: a warp for each, in one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from arraylogchain._cuda.launch import MAX_GRID, ceil_div, pack
from arraylogchain._cuda.products.operands import VIEW, Operand, Product

# Largest extents of products that one warp computes.
SIDES = (8, 16, 32)

_WARPS = 4


def warps(dtype: str, side: int) -> int:
    """Return the warps of a block of small.cu."""
    # Two tiles of float64 for each of four warps would be more than the 48 KiB of a plain launch.
    return 2 if dtype == "float64" and side == 32 else _WARPS


def gradient_warps(dtype: str, side: int) -> int:
    """Return the warps of a block of small_gradients.cu: each has three tiles."""
    return _WARPS if side < 32 else 1 if dtype == "float64" else 2


def is_small(product: Product) -> bool:
    """Tell whether all extents of a product are those of small ones."""
    return _extent(product) <= max(SIDES)


def run(product: Product) -> None:
    """Compute a small product."""
    _launch("small", product, warps)


def run_gradients(
    product: Product,
    cotangents: tuple[Any, ...],
    targets: Sequence[Operand | None],
) -> None:
    """Compute the gradients of a small product.

    Every entry of an operand takes part in one product of the batch alone: an axis that one
    operand lacks has become lines of the other. So nothing is added up over the batch.

    Parameters
    ----------
    product : Product
        With its results.
    cotangents : tuple
        As for `TiledPosterior`.
    targets : sequence of Operand
        Where gradients go, of the dtype and shape of either operand; None for one not wanted.
    """
    outputs: list[Any] = []
    for target in targets:
        outputs += (None, pack(VIEW)) if target is None else target.arguments
    _launch("small_gradients", product, gradient_warps, *cotangents, *outputs)


def _extent(product: Product) -> int:
    return max(product.left.lines, product.right.lines, product.terms)


def _launch(kernel: str, product: Product, warps_of: Callable[[str, int], int], *more: Any) -> None:
    """Launch a kernel with a warp for each product, as many as fit into a grid at a time."""
    side = min(side for side in SIDES if side >= _extent(product))
    warps = warps_of(product.ctx.result_name, side)
    at_once = MAX_GRID * warps
    for first in range(0, product.batches, at_once):
        batches = min(product.batches - first, at_once)
        product.launch(
            f"{kernel}<{product.c_type}, {side}, {warps}>",
            ceil_div(batches, warps),
            32 * warps,
            *product.operands,
            np.int32(product.terms),
            np.int64(first),
            np.int64(batches),
            product.out,
            product.view,
            *more,
        )
