"""Tiles of products that fit a workspace, and the driver that runs over them.

An operation has a function of a panel of columns, which is used with many tiles of rows, and a
function of one tile. The driver reads tiles out of operands whose axes are folded, and writes the
results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from arraylogchain._core.axes import Box, Fold, Shape, boxes, lengths
from arraylogchain._core.context import Array, Context

# Elements of the largest operand of a tile that stays in a CPU's L2 or L3 cache.
_CACHED = 1 << 18
# Bytes of rows of one tile: with fewer, BLAS's threads wait between multiplies.
_LARGE_ROWS = 1 << 22


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of one tile of a batched product: batch entries, rows, columns, terms."""

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
    side: int = 512,
    copies: bool = False,
) -> Tiling:
    """Choose tiles whose temporaries fit a budget.

    Parameters
    ----------
    sizes : tuple of int
        Batch entries, rows, columns and terms of the whole product.
    budget : int
        Bytes for the temporaries of one tile.
    factor_bytes, entry_bytes : int
        Bytes for each element of the two operands of a tile, and of its product.
    side : int
        Preferred rows and columns of a tile; with 512 a matrix multiply runs at full speed.
    copies : bool
        Whether `factor_bytes` includes copies of operands over all terms, which are made if axes
        cannot be merged in place. A single row or column is never copied.

    Returns
    -------
    Tiling
        ``factor_bytes * (rows + cols) * inner * batch + entry_bytes * rows * cols * batch``
        stays within the budget.
    """
    batch, rows, cols, inner = (max(1, n) for n in sizes)
    # A nearly square tile takes half of the budget, its terms the other half.
    lines = min(side, math.isqrt(budget // (2 * (entry_bytes + factor_bytes))))
    if copies:
        lines = max(1, min(lines, budget // (4 * factor_bytes * inner)))
    tile_rows, tile_cols = min(rows, lines), min(cols, lines)
    terms = max(1, budget // (2 * factor_bytes * (tile_rows + tile_cols)))
    if terms < inner:
        return Tiling(1, tile_rows, tile_cols, terms)

    def fitting_lines(lines: int) -> int:
        """Return the number of columns that fit with `lines` rows, or rows with columns."""
        remaining = budget - factor_bytes * inner * lines
        return max(1, remaining // (factor_bytes * inner + entry_bytes * lines))

    # Panels are wide, and of equal widths, as rows are prepared again for each of them.
    tile_cols = -(-cols // -(-cols // fitting_lines(tile_rows)))
    longest = max(inner, tile_cols)
    large = min(2 * side, _LARGE_ROWS // (factor_bytes * longest))
    tile_rows = min(rows, fitting_lines(tile_cols), max(side, _CACHED // longest, large))
    if (tile_rows, tile_cols) != (rows, cols):
        return Tiling(1, tile_rows, tile_cols, inner)
    one = (rows + cols) * inner
    fitting = budget // (factor_bytes * one + entry_bytes * rows * cols)
    return Tiling(max(1, min(batch, fitting, _CACHED // max(one, rows * cols))), rows, cols, inner)


def with_small_blocks(ctx: Context, workspace: int) -> tuple[Context, int]:
    """Return a context with small elementwise blocks, and the workspace besides them."""
    block = max(1, min(ctx.block, workspace // (32 * ctx.precision.itemsize)))
    # An elementwise operation has two temporaries of a block.
    return replace(ctx, block=block), workspace - 2 * block * ctx.precision.itemsize


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a tile: boxes along the axes of batch, rows and columns.

    `flat` has slices of the same three, each merged into one axis.
    """

    batch: Box
    rows: Box
    cols: Box
    flat: tuple[slice, slice, slice]

    def read(self, xp: Any, view: Array, side: int, inner: Box = (slice(None),)) -> Array:
        """Return the tile of a view of an operand (0, 1) or the product (2), as [batch, m, n]."""
        batch, rows, cols = self.shape
        box = (self.rows + inner, inner + self.cols, self.rows + self.cols)[side]
        shape = ((rows, -1), (-1, cols), (rows, cols))[side]
        return xp.reshape(view[(*self.batch, *box)], (batch, *shape))

    @property
    def shape(self) -> Shape:
        """The lengths of the tile: entries of the batch, rows, columns."""
        return lengths(self.flat)


def panels(layout: Fold, tiling: Tiling) -> Iterator[Iterator[Place]]:
    """Yield the positions of the tiles of each panel of columns."""
    for batch, batch_box in _numbered(layout.batch, tiling.batch):
        for cols, col_box in _numbered(layout.cols, tiling.cols):
            yield (
                Place(batch, rows, cols, (batch_box, row_box, col_box))
                for rows, row_box in _numbered(layout.rows, tiling.rows)
            )


def _numbered(shape: Shape, limit: int) -> Iterator[tuple[Box, slice]]:
    """Yield boxes of several axes, and the slice of each along these axes merged into one."""
    start = 0
    for box in boxes(shape, limit):
        stop = start + math.prod(lengths(box))
        yield box, slice(start, stop)
        start = stop


@dataclass(frozen=True, slots=True)
class Tiles:
    """Functions that compute the tiles of a product.

    Attributes
    ----------
    tiling : Tiling
    panel : callable
        ``panel(b)`` prepares columns [batch, K, cols] that are used with several tiles of rows.
    tile : callable
        ``tile(a, panel, *outs)`` writes the results for a [batch, rows, K].
    dtypes : list
        Of the results that `tile` writes.
    cuts_terms : bool
        Whether `tile` gets slices of terms, whose results are summed.
    """

    tiling: Tiling
    panel: Callable[[Array], Any]
    tile: Callable[..., None]
    dtypes: Sequence[Any]
    cuts_terms: bool = False


def run(
    ctx: Context, layout: Fold, a: Array, b: Array, work: Tiles, dtypes: Sequence[Any]
) -> list[Array]:
    """Return the results of a folded product, none of whose sizes is zero.

    There is one contiguous array of shape ``layout.out_shape`` for each of the dtypes.
    """
    xp = ctx.xp
    a, b = layout.view(xp, a, 0), layout.view(xp, b, 1)
    outs = [ctx.empty(layout.shapes[2], dtype) for dtype in dtypes]
    run_on_views(ctx, layout, a, b, [layout.view(xp, out, 2) for out in outs], work)
    return [xp.reshape(out, layout.out_shape) for out in outs]


def run_on_views(
    ctx: Context, groups: Any, a: Array, b: Array, outs: Sequence[Array], work: Tiles
) -> None:
    """Write the results of a product of views whose axes are folded.

    Tiles are written in place if they have the dtypes of results and need no copy.
    """
    xp = ctx.xp
    direct = not groups.copies and [x.dtype for x in outs] == list(work.dtypes)
    parts = list(boxes(groups.inner, work.tiling.inner if work.cuts_terms else groups.sizes[3]))
    for places in panels(groups, work.tiling):
        panel = None
        for at in places:
            results = [
                at.read(xp, out, 2) if direct else ctx.empty(at.shape, dtype)
                for out, dtype in zip(outs, work.dtypes, strict=True)
            ]
            for inner in parts:
                if panel is None or len(parts) > 1:
                    panel = work.panel(at.read(xp, b, 1, inner))
                sums = results if inner is parts[0] else list(map(xp.empty_like, results))
                work.tile(at.read(xp, a, 0, inner), panel, *sums)
                if sums is not results:
                    ctx.apply(xp.add, results[0], sums[0], out=results[0])
            if not direct:
                for out, x in zip(outs, results, strict=True):
                    target = out[(*at.batch, *at.rows, *at.cols)]
                    target[...] = xp.astype(xp.reshape(x, target.shape), target.dtype, copy=False)
