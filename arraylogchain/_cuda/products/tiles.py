"""Tiles of products: what a block computes, and which tile is for which product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from arraylogchain._cuda.device import Device
from arraylogchain._cuda.dtypes import itemsize
from arraylogchain._cuda.launch import ceil_div
from arraylogchain._cuda.products.operands import THIN

SHORT = 64  # SHORT of tile_product.cuh


@dataclass(frozen=True, slots=True)
class TileShape:
    """Template arguments of tile_product.cuh: a block's tile, and a thread's part of it.

    With `tensor_cores` those of tensor_product.cuh.
    """

    rows: int
    columns: int
    terms: int
    thread_rows: int
    thread_columns: int
    tensor_cores: bool = False

    @property
    def threads(self) -> int:
        return self.rows // self.thread_rows * (self.columns // self.thread_columns)

    def blocks(self, rows: int, columns: int) -> int:
        """Return how many tiles cover so many rows and columns."""
        return ceil_div(rows, self.rows) * ceil_div(columns, self.columns)

    def totals(self, dtype: str, terms: int) -> int:
        """Return the bytes of dynamic shared memory that TileProduct::run takes for its totals."""
        if self.tensor_cores or terms <= SHORT:
            return 0
        return self.rows * self.columns * itemsize(dtype)

    def fits(self, device: Device, dtype: str) -> bool:
        """Tell whether a block of any kernel with this tile finds its shared memory on a device."""
        buffers = 2 * self.terms * (self.rows + self.columns + 8) * itemsize(dtype)
        per_line = 48  # offsets and shifts, of all kernels the most
        used = buffers + per_line * (self.rows + self.columns) + self.totals(dtype, SHORT + 1)
        return used <= device.shared_memory

    def __str__(self) -> str:
        sizes = (self.rows, self.columns, self.terms, self.thread_rows, self.thread_columns)
        return ", ".join(map(str, sizes)) + ", true" * self.tensor_cores


def tile_shapes(
    *sizes: tuple[int, int, int, int, int], tensor_cores: bool = False
) -> tuple[TileShape, ...]:
    return tuple(TileShape(*of_one, tensor_cores) for of_one in sizes)


# Large tiles need the fewest reads for a sum; smaller ones keep all multiprocessors at work. The
# last is for products with few rows.
PRODUCT_TILES = {
    "float32": tile_shapes((128, 128, 8, 8, 8), (64, 64, 16, 8, 4), (16, 128, 16, 4, 4)),
    "float64": tile_shapes((128, 64, 8, 8, 4), (64, 64, 8, 4, 4), (32, 64, 8, 4, 4)),
}


def tiles_of(panel: np.ndarray, rows: int, columns: int) -> int:
    """Return how many tiles of these sides cover a panel."""
    across = ceil_div(int(panel["columns"]), columns)
    return int(panel["batches"]) * ceil_div(int(panel["rows"]), rows) * across


def choose_tile(
    device: Device, tiles: Sequence[TileShape], dtype: str, batches: int, rows: int, columns: int
) -> TileShape:
    """Return the tile for `batches` products of this many rows and columns.

    Parameters
    ----------
    device : Device
    tiles : sequence of TileShape
        A large one, which is taken where it leaves no multiprocessor without work and little of
        itself beyond the edges; a smaller one; and where there is a third, one for few rows.
    dtype : str
        That is computed in.
    batches, rows, columns : int
    """
    large, medium, *thin = tiles
    if thin and rows <= THIN:
        return thin[0]
    blocks, smaller = (batches * tile.blocks(rows, columns) for tile in (large, medium))
    covered = blocks * large.rows * large.columns
    fits = 4 * covered <= 5 * smaller * medium.rows * medium.columns
    fits = fits and large.fits(device, dtype)
    return large if fits and blocks >= device.multiprocessors else medium
