"""Many small products, and their gradients, on CUDA devices: a warp for each, in one launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from arraylogchain._cuda.device import Device
from arraylogchain._cuda.dtypes import C_TYPES, itemsize
from arraylogchain._cuda.launch import Launch
from arraylogchain._cuda.products.operands import VIEW, Array, Operand, Product
from arraylogchain._cuda.products.tiles import blocks_of

# Largest extents of products that one warp computes.
SIDES = (8, 16, 32)

_WARPS = 4
_MAX_GRID = 2**31 - 1


def _warps(dtype: str, side: int) -> int:
    """Return the warps of a block of small.cu."""
    # Two tiles of float64 for each of four warps would be more than the 48 KiB of a plain launch.
    return 2 if dtype == "float64" and side == 32 else _WARPS


def _gradient_warps(dtype: str, side: int) -> int:
    """Return the warps of a block of small_gradients.cu: each has three tiles."""
    return _WARPS if side < 32 else 1 if itemsize(dtype) == 8 else 2


INSTANTIATIONS = {
    "products/small.cu": [
        f"small<{c}, {side}, {_warps(dtype, side)}>"
        for dtype, c in C_TYPES.items()
        for side in SIDES
    ],
    "products/small_gradients.cu": [
        f"small_gradients<{c}, {side}, {_gradient_warps(dtype, side)}>"
        for dtype, c in C_TYPES.items()
        for side in SIDES
    ],
}
HOT = frozenset({"small", "small_gradients"})


def is_small(whole: Product) -> bool:
    """Tell whether all extents of a product are those of small ones."""
    return _extent(whole) <= max(SIDES)


def run(device: Device, whole: Product) -> None:
    """Compute a small product."""
    side = _side(whole)
    warps = _warps(whole.dtype, side)
    kernel = f"small<{C_TYPES[whole.dtype]}, {side}, {warps}>"
    _launch(device, "products/small.cu", kernel, whole, warps)


def run_gradients(
    device: Device,
    whole: Product,
    g: Array,
    g_view: np.ndarray,
    targets: tuple[Operand | None, Operand | None],
    spoils: bool,
) -> None:
    """Compute the gradients of a small product.

    Every entry of an operand takes part in one product of the batch alone: an axis that one
    operand lacks has become lines of the other. So nothing is added up over the batch.

    Parameters
    ----------
    device : Device
    whole : Product
        With its results.
    g : array
        Cotangents.
    g_view : array
        Where they lie.
    targets : tuple of Operand
        Where gradients go, of the dtype and shape of either operand; None for one not wanted.
    spoils : bool
        As in `gradients.logmatmulexp_gradients`.
    """
    side = _side(whole)
    warps = _gradient_warps(whole.dtype, side)
    outputs: list[Any] = []
    for target in targets:
        nowhere = None, np.zeros((), VIEW)
        outputs += nowhere if target is None else (target.array, target.view)
    kernel = f"small_gradients<{C_TYPES[whole.dtype]}, {side}, {warps}>"
    more = (g, g_view, np.int32(spoils), *outputs)
    _launch(device, "products/small_gradients.cu", kernel, whole, warps, *more)


def _extent(whole: Product) -> int:
    return max(whole.left.lines, whole.right.lines, whole.terms)


def _side(whole: Product) -> int:
    return min(side for side in SIDES if side >= _extent(whole))


def _launch(
    device: Device, source: str, kernel: str, whole: Product, warps: int, *more: Any
) -> None:
    """Launch a kernel with a warp for each product, as many as fit into a grid at a time."""
    most = _MAX_GRID * warps
    for first in range(0, whole.batches, most):
        batches = min(whole.batches - first, most)
        device.run(
            Launch(
                source=source,
                kernel=kernel,
                grid=blocks_of(batches, warps),
                block=32 * warps,
                shared_memory=0,
                arguments=(
                    *whole.operands,
                    np.int32(whole.terms),
                    np.int64(first),
                    np.int64(batches),
                    whole.out,
                    whole.view,
                    *more,
                ),
            )
        )
