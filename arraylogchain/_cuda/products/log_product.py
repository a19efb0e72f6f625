"""Products on CUDA devices: which kernels run, on which part, in which order.

Large products are computed panel by panel, as workspace allows: maxima.cu and factors.cu prepare
exponentials of both operands, logmatmulexp.cu multiplies and proves, exact.cu computes what is not
proved. Products with few rows or columns, and small ones, are computed in one launch each.
"""

from __future__ import annotations

import numpy as np

from arraylogchain._cuda.device import Device
from arraylogchain._cuda.dtypes import C_TYPES, compute_type
from arraylogchain._cuda.launch import Launch
from arraylogchain._cuda.products import small
from arraylogchain._cuda.products.operands import Array, Product, product
from arraylogchain._cuda.products.panels import Panels, Prepared, factors_kernel
from arraylogchain._cuda.products.tiles import Tile, blocks_of, choose_tile, tiles_of
from arraylogchain._fold import Fold

# Devices, by compute capability, whose tensor cores multiply large products, and the dtypes that
# these are computed in. What is here must be proved accurate, which docs/numerics.md does for both
# dtypes from 8.0 on, and measured to be faster; nobody has measured it yet.
TENSOR_CORES: dict[int, frozenset[str]] = {}
FIRST_WITH_TENSOR_CORES = 80

# Large tiles need the fewest reads for a sum; smaller ones keep all multiprocessors at work. The
# last is for products with few rows.
TILES = {
    "float32": (Tile(128, 128, 8, 8, 8), Tile(64, 64, 16, 4, 4), Tile(16, 128, 16, 4, 4)),
    "float64": (Tile(128, 64, 8, 8, 4), Tile(64, 64, 8, 4, 4), Tile(32, 64, 8, 4, 4)),
}
# The same for tensor cores; products with few rows would leave them without work.
TENSOR_TILES = {
    "float32": (
        Tile(128, 128, 16, 8, 8, tensor_cores=True),
        Tile(64, 64, 16, 4, 8, tensor_cores=True),
        TILES["float32"][2],
    ),
    "float64": (
        Tile(128, 64, 8, 8, 8, tensor_cores=True),
        Tile(64, 64, 8, 4, 8, tensor_cores=True),
        TILES["float64"][2],
    ),
}
# Up to this many, the right operand is read once and every term costs an exponential.
THIN_ROWS = (1, 2, 4)

_THIN_THREADS = 512
_EXACT_THREADS = 256
_EXACT_SIDE = 64
_MAX_GRID = 2**31 - 1

# Kernels whose loops must not spill registers.
HOT = frozenset({"logmatmulexp", "maxima", "factors", "thin"})


def _instantiations() -> dict[str, list[str]]:
    names: dict[str, list[str]] = {
        source: []
        for source in (
            "products/maxima.cu",
            "products/factors.cu",
            "products/logmatmulexp.cu",
            "products/exact.cu",
            "products/thin.cu",
        )
    }
    for dtype, c in C_TYPES.items():
        names["products/maxima.cu"].append(f"maxima<{c}>")
        names["products/factors.cu"].append(factors_kernel(dtype, shifted=True))
        names["products/exact.cu"].append(f"exact<{c}>")
        names["products/thin.cu"] += [f"thin<{c}, {rows}>" for rows in THIN_ROWS]
        tiles = dict.fromkeys(TILES[compute_type(dtype)] + TENSOR_TILES[compute_type(dtype)])
        names["products/logmatmulexp.cu"] += [f"logmatmulexp<{c}, {tile}>" for tile in tiles]
    return names


INSTANTIATIONS = _instantiations()


def logmatmulexp(
    device: Device,
    layout: Fold,
    a: Array,
    b: Array,
    result_dtype: str,
    workspace: int,
    tensor_cores: bool | None = None,
) -> Array:
    """Return log(exp(a) @ exp(b)), an array of layout.out_shape.

    Parameters
    ----------
    device : Device
    layout : Fold
        Of the operands' shapes; none of its sizes is 0.
    a, b : array
        Of dtype `result_dtype`, with any strides.
    result_dtype : str
        One of `C_TYPES`.
    workspace : int
        Bytes that temporaries may take.
    tensor_cores : bool, optional
        Whether they multiply products that are large enough for tiles. Default: as `TENSOR_CORES`
        says.

    Raises
    ------
    ValueError
        If `tensor_cores` is true and the device has none that would do.
    """
    tiles = _tiles_for(device, compute_type(result_dtype), tensor_cores)
    out = device.empty(layout.out_shape, result_dtype)
    whole = product(device, layout, a, b, out, result_dtype)
    if small.is_small(whole):
        small.run(device, whole)
        return out
    whole = whole.turned_if_thin()
    if min(whole.left.lines, whole.right.lines) <= max(THIN_ROWS):
        _run_thin(device, whole)
    else:
        _run_tiled(device, whole, workspace, tiles)
    return out


def _tiles_for(device: Device, dtype: str, tensor_cores: bool | None) -> tuple[Tile, ...]:
    if tensor_cores is None:
        tensor_cores = dtype in TENSOR_CORES.get(device.architecture, ())
    if tensor_cores and device.architecture < FIRST_WITH_TENSOR_CORES:
        raise ValueError(
            f"tensor_cores is True, and the device's compute capability is "
            f"{device.architecture / 10}; it takes 8.0 or newer"
        )
    return TENSOR_TILES[dtype] if tensor_cores else TILES[dtype]


def _run_thin(device: Device, whole: Product) -> None:
    rows = min(n for n in THIN_ROWS if n >= whole.left.lines)
    across = 32
    if whole.right.terms_adjoin:
        few = blocks_of(whole.right.lines, 16) * whole.batches < device.multiprocessors
        across = 1 if few else _THIN_THREADS // 32
    blocks = whole.batches * blocks_of(whole.right.lines, across)
    for first in range(0, blocks, _MAX_GRID):
        device.run(
            Launch(
                source="products/thin.cu",
                kernel=f"thin<{C_TYPES[whole.dtype]}, {rows}>",
                grid=min(blocks - first, _MAX_GRID),
                block=_THIN_THREADS,
                shared_memory=0,
                arguments=(
                    *whole.operands,
                    np.int64(whole.terms),
                    whole.out,
                    whole.view,
                    np.int32(across),
                    np.int64(first),
                ),
            )
        )


def _run_tiled(device: Device, whole: Product, workspace: int, tiles: tuple[Tile, ...]) -> None:
    panels = Panels(whole, workspace)
    prepared = Prepared(device, whole, panels)
    dtype = compute_type(whole.dtype)
    tile = choose_tile(device, tiles, dtype, panels.batches, panels.rows, panels.columns)
    flags = device.empty((panels.batches * panels.tiles(tile.rows, tile.columns),), "uint8")
    for panel in panels:
        prepared.start(panel)
        row_shifts, column_shifts = prepared.shifts
        for first, terms in panels.chunks():
            prepared.factors(panel, first, terms)
            device.run(
                Launch(
                    source="products/logmatmulexp.cu",
                    kernel=f"logmatmulexp<{C_TYPES[whole.dtype]}, {tile}>",
                    grid=tiles_of(panel, tile.rows, tile.columns),
                    block=tile.threads,
                    shared_memory=tile.totals(dtype, terms),
                    arguments=(
                        *prepared.factor_arguments,
                        np.int32(terms),
                        np.int64(whole.terms),
                        panel,
                        row_shifts,
                        column_shifts,
                        prepared.partial,
                        np.int32(first > 0),
                        np.int32(first + terms == whole.terms),
                        whole.out,
                        whole.view,
                        np.int32(whole.adjoin),
                        flags,
                    ),
                )
            )
        device.run(
            Launch(
                source="products/exact.cu",
                kernel=f"exact<{C_TYPES[whole.dtype]}>",
                grid=tiles_of(panel, _EXACT_SIDE, _EXACT_SIDE),
                block=_EXACT_THREADS,
                shared_memory=0,
                arguments=(
                    *whole.operands,
                    np.int64(whole.terms),
                    panel,
                    row_shifts,
                    column_shifts,
                    whole.out,
                    whole.view,
                    flags,
                    np.int32(tile.rows),
                    np.int32(tile.columns),
                ),
            )
        )
