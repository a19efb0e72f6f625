"""Sums over the posterior of a log product in panels, on CUDA devices: one function a launch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arraylogchain._cuda.device import Device
from arraylogchain._cuda.dtypes import C_TYPES, compute_type
from arraylogchain._cuda.launch import Launch
from arraylogchain._cuda.products import log_product
from arraylogchain._cuda.products.operands import Array, Operand, Product
from arraylogchain._cuda.products.panels import Prepared, pitch_of
from arraylogchain._cuda.products.tiles import Tile, blocks_of, choose_tile, tiles_of

# Sides are multiples of 64, so that tiles of the exact kernels do not reach over those with flags.
TILES = {dtype: tiles[:2] for dtype, tiles in log_product.TILES.items()}

_EXACT_THREADS = 256
_EXACT_SIDE = 64
_EXACT_SUMS_SIDE = 32

INSTANTIATIONS: dict[str, list[str]] = {
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


@dataclass(frozen=True, slots=True)
class Weights:
    """Arrays [batches, rows, pitch] of the panel at hand, and the flags of its tiles."""

    weights: Array
    open: Array
    tops: Array
    flags: Array
    tile: Tile


def run_weights(
    device: Device,
    whole: Product,
    prepared: Prepared,
    panel: np.ndarray,
    chunk: tuple[int, int],
    work: Weights,
    g: Array,
    h_view: np.ndarray,
    spoils: bool,
) -> None:
    first, terms = chunk
    device.run(
        Launch(
            source="products/posterior_weights.cu",
            kernel=f"posterior_weights<{C_TYPES[whole.dtype]}, {work.tile}>",
            grid=tiles_of(panel, work.tile.rows, work.tile.columns),
            block=work.tile.threads,
            shared_memory=work.tile.totals(compute_type(whole.dtype), terms),
            arguments=(
                *prepared.factor_arguments,
                np.int32(terms),
                np.int64(whole.terms),
                panel,
                *prepared.shifts,
                np.int32(first > 0),
                np.int32(first + terms == whole.terms),
                whole.out,
                whole.view,
                g,
                h_view,
                np.int32(spoils),
                work.weights,
                work.open,
                np.int64(pitch_of(int(panel["columns"]))),
                work.flags,
            ),
        )
    )


def run_exact(
    device: Device, whole: Product, prepared: Prepared, panel: np.ndarray, work: Weights
) -> None:
    device.run(
        Launch(
            source="products/exact_posterior.cu",
            kernel=f"exact_posterior<{C_TYPES[whole.dtype]}>",
            grid=tiles_of(panel, _EXACT_SIDE, _EXACT_SIDE),
            block=_EXACT_THREADS,
            shared_memory=0,
            arguments=(
                *whole.operands,
                np.int64(whole.terms),
                panel,
                *prepared.shifts,
                work.open,
                work.tops,
                np.int64(pitch_of(int(panel["columns"]))),
                work.flags,
                np.int32(work.tile.rows),
                np.int32(work.tile.columns),
            ),
        )
    )


def run_sums(
    device: Device,
    prepared: Prepared,
    panel: np.ndarray,
    chunk: tuple[int, int],
    work: Weights,
    target: Operand,
    of_left: bool,
) -> None:
    own, other = prepared.sides if of_left else prepared.sides[::-1]
    first, terms = chunk
    dtype = compute_type(device.dtype_name(target.array))
    batches, rows, columns = (int(panel[name]) for name in ("batches", "rows", "columns"))
    down, across = (rows, terms) if of_left else (terms, columns)
    tile = choose_tile(device, TILES[dtype], dtype, batches, down, across)
    # What other columns, or rows, have added before stays.
    adds = int(panel["first_column" if of_left else "first_row"]) > 0
    device.run(
        Launch(
            source="products/posterior_sums.cu",
            kernel=f"posterior_sums<{C_TYPES[dtype]}, {tile}, {str(of_left).lower()}>",
            grid=batches * blocks_of(down, tile.rows) * blocks_of(across, tile.columns),
            block=tile.threads,
            shared_memory=tile.totals(dtype, columns if of_left else rows),
            arguments=(
                work.weights,
                np.int64(pitch_of(columns)),
                own.array,
                np.int64(own.pitch),
                other.array,
                np.int64(other.pitch),
                panel,
                np.int64(first),
                np.int32(terms),
                target.array,
                target.view,
                np.int32(adds),
            ),
        )
    )


def run_exact_sums(
    device: Device,
    whole: Product,
    prepared: Prepared,
    panel: np.ndarray,
    work: Weights,
    target: Operand,
    of_left: bool,
) -> None:
    sides = list(zip((whole.left, whole.right), prepared.shifts, strict=True))
    (own, own_shifts), (other, other_shifts) = sides if of_left else sides[::-1]
    lines = int(panel["rows" if of_left else "columns"])
    blocks = blocks_of(lines, _EXACT_SUMS_SIDE) * blocks_of(whole.terms, _EXACT_SUMS_SIDE)
    device.run(
        Launch(
            source="products/exact_posterior_sums.cu",
            kernel=f"exact_posterior_sums<{C_TYPES[whole.dtype]}, {str(of_left).lower()}>",
            grid=int(panel["batches"]) * blocks,
            block=_EXACT_THREADS,
            shared_memory=0,
            arguments=(
                own.array,
                own.view,
                own_shifts,
                other.array,
                other.view,
                other_shifts,
                np.int64(whole.terms),
                panel,
                work.open,
                work.tops,
                np.int64(pitch_of(int(panel["columns"]))),
                work.flags,
                np.int32(work.tile.rows),
                np.int32(work.tile.columns),
                target.array,
                target.view,
            ),
        )
    )
