"""How large the pieces are in which a product is computed, so that `workspace` is kept.

Everything here is arithmetic on sizes; no array is touched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from arraylogchain import _threads
from arraylogchain._context import Context

DEFAULT_WORKSPACE = 64 * 2**20
# NumPy's own buffers for mixed dtypes take up to a few hundred kilobytes.
SMALLEST_WORKSPACE = 2**20

# Elements of a tile's largest side that still profit from a CPU's L2 and L3 caches.
_CACHED = 1 << 18
# Bytes of rows that are worth one tile instead of two: BLAS's threads wait between multiplies.
_LARGE_ROWS = 1 << 22
# Rows and columns from which a matrix multiply runs at full speed.
FULL_SPEED = 512


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of one piece of a batched product: entries of the batch, rows, columns, terms."""

    batch: int
    rows: int
    cols: int
    inner: int


@lru_cache(maxsize=256)
def tile_product(
    sizes: tuple[int, int, int, int],
    budget: int,
    factor_bytes: int,
    entry_bytes: int,
    side: int = FULL_SPEED,
    copied_bytes: int = 0,
) -> Tiling:
    """Choose tiles whose temporaries fit a budget.

    Parameters
    ----------
    sizes : tuple of int
        Batch entries, rows, columns and terms of the whole product, each at least 1.
    budget : int
        Bytes for the temporaries of one tile.
    factor_bytes, entry_bytes : int
        Bytes that a tile takes for each element of its two factors, and of its product.
    side : int
        Rows and columns that a tile should have; up to `FULL_SPEED`, if need be by cutting the
        terms.
    copied_bytes : int
        Bytes that a tile's operands take for each element, over all terms, where they are copied
        because axes cannot be merged in place; a single row or column never needs a copy.

    Returns
    -------
    Tiling
        ``factor_bytes * (rows + cols) * inner * batch + entry_bytes * rows * cols * batch``
        stays within the budget.
    """
    if copied_bytes:
        tiling = tile_product(sizes, budget // 2, factor_bytes, entry_bytes, side)
        inner = sizes[3] * copied_bytes
        if tiling.batch * (tiling.rows + tiling.cols) * inner <= budget // 2:
            return tiling
        most = max(1, budget // (4 * inner))
        return Tiling(1, min(tiling.rows, most), min(tiling.cols, most), tiling.inner)
    batch, rows, cols, inner = sizes
    few_rows, few_cols = min(rows, side), min(cols, side)

    def others(lines: int) -> int:
        """Return how many columns fit beside so many rows, all terms of both, or rows beside."""
        left = budget - factor_bytes * inner * lines
        return left // (factor_bytes * inner + entry_bytes * lines)

    if others(few_rows) < min(few_cols, FULL_SPEED):
        # The terms themselves are cut, so that tiles stay large enough to multiply fast; products
        # of some terms are added up.
        factors = max(2, budget // (2 * factor_bytes))
        entries = max(1, budget // (2 * (entry_bytes + factor_bytes)))
        tile_rows = min(few_rows, math.isqrt(entries), factors // 2)
        tile_cols = min(few_cols, entries // tile_rows, factors // 2)
        return Tiling(1, tile_rows, tile_cols, min(inner, factors // (tile_rows + tile_cols)))
    # Wide panels of equal widths: the rows are prepared anew for each of them.
    tile_cols = -(-cols // -(-cols // others(few_rows)))
    longest = max(inner, tile_cols)
    large = min(2 * side, _LARGE_ROWS // (factor_bytes * longest))
    tile_rows = min(rows, others(tile_cols), max(side, _CACHED // longest, large))
    tile_batch = 1
    if (tile_rows, tile_cols) == (rows, cols):
        one = (rows + cols) * inner
        fitting = budget // (factor_bytes * one + entry_bytes * rows * cols)
        tile_batch = max(1, min(batch, fitting, _CACHED // max(one, rows * cols)))
    return Tiling(tile_batch, tile_rows, tile_cols, inner)


def elementwise_block(ctx: Context, workspace: int) -> tuple[int, int]:
    """Return the elements of one elementwise step, and the bytes that all threads' steps take.

    A step holds two temporaries of a block.
    """
    workers = _threads.workers_here() if ctx.is_numpy else 1
    bytes_each = 2 * ctx.precision.itemsize * workers
    block = max(1, min(ctx.block, workspace // (16 * bytes_each)))
    return block, block * bytes_each


def check_workspace(workspace: int | None) -> int:
    """Return the workspace in bytes; raise where it is no usable number."""
    if workspace is None:
        return DEFAULT_WORKSPACE
    if isinstance(workspace, bool) or not hasattr(workspace, "__index__"):
        raise TypeError(
            f"workspace must be an integer number of bytes or None, got {type(workspace).__name__}"
        )
    size = workspace.__index__()
    if size < SMALLEST_WORKSPACE:
        raise ValueError(
            f"workspace={size} bytes is too small; the least that suffices is {SMALLEST_WORKSPACE}"
        )
    return size
