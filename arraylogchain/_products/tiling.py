"""The one driver of all products: tiles that fit a workspace, and where they lie.

An operation gives what is to be done with a panel of columns, which meets many tiles of rows, and
with one tile. The driver reads them out of operands whose axes are folded, and writes the results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from arraylogchain._core.axes import Box, Fold, Shape, boxes, lengths
from arraylogchain._core.context import Array, Context

# Elements of a tile's largest side that still profit from a CPU's L2 and L3 caches.
_CACHED = 1 << 18
# Bytes of rows that are worth one tile instead of two: BLAS's threads wait between multiplies.
_LARGE_ROWS = 1 << 22


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
        Bytes that a tile takes for each element of its two factors, and of its product.
    side : int
        Rows and columns that a tile should have; with 512 a matrix multiply runs at full speed.
    copies : bool
        Whether `factor_bytes` has those of copies of operands over all terms, which are needed
        where axes cannot be merged in place; a single row or column never needs one.

    Returns
    -------
    Tiling
        ``factor_bytes * (rows + cols) * inner * batch + entry_bytes * rows * cols * batch``
        stays within the budget.
    """
    batch, rows, cols, inner = (max(1, n) for n in sizes)
    # A nearly square tile takes half, and as many terms as fit the other half.
    lines = min(side, math.isqrt(budget // (2 * (entry_bytes + factor_bytes))))
    if copies:
        lines = max(1, min(lines, budget // (4 * factor_bytes * inner)))
    tile_rows, tile_cols = min(rows, lines), min(cols, lines)
    terms = max(1, budget // (2 * factor_bytes * (tile_rows + tile_cols)))
    if terms < inner:
        return Tiling(1, tile_rows, tile_cols, terms)

    def fitting_lines(lines: int) -> int:
        """Return how many columns fit beside so many rows, all terms of both, or rows beside."""
        remaining = budget - factor_bytes * inner * lines
        return max(1, remaining // (factor_bytes * inner + entry_bytes * lines))

    # Wide panels of equal widths: the rows are prepared anew for each of them.
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
    """Return a context whose elementwise steps leave nearly all of the workspace, and the rest."""
    block = max(1, min(ctx.block, workspace // (32 * ctx.precision.itemsize)))
    # A step holds two temporaries of a block.
    return replace(ctx, block=block), workspace - 2 * block * ctx.precision.itemsize


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tile lies: its box along the axes of each group, and along each group as one axis."""

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

    def write(self, xp: Any, view: Array, x: Array) -> None:
        """Put x [batch, rows, cols] into a view of the product."""
        target = view[(*self.batch, *self.rows, *self.cols)]
        target[...] = xp.astype(xp.reshape(x, target.shape), target.dtype, copy=False)


def panels(layout: Fold, tiling: Tiling) -> Iterator[Iterator[Place]]:
    """Yield, for every panel of columns, the places of its tiles."""
    for batch, batch_box in _numbered(layout.batch, tiling.batch):
        for cols, col_box in _numbered(layout.cols, tiling.cols):
            yield (
                Place(batch, rows, cols, (batch_box, row_box, col_box))
                for rows, row_box in _numbered(layout.rows, tiling.rows)
            )


def _numbered(shape: Shape, limit: int) -> Iterator[tuple[Box, slice]]:
    """Yield boxes of a group of axes, and the same entries along the group as one axis."""
    start = 0
    for box in boxes(shape, limit):
        stop = start + math.prod(lengths(box))
        yield box, slice(start, stop)
        start = stop


@dataclass(frozen=True, slots=True)
class Tiles:
    """What is done with the tiles of a product.

    Attributes
    ----------
    tiling : Tiling
    panel : callable
        Prepares columns b [batch, K, cols] that will meet several tiles of rows.
    tile : callable
        ``tile(a, panel, *outs)`` writes the results for a [batch, rows, K].
    dtypes : list
        Of the results that `tile` writes.
    cuts_terms : bool
        Whether `tile` gets some terms at a time, and its one result is added up.
    """

    tiling: Tiling
    panel: Callable[[Array], Any]
    tile: Callable[..., None]
    dtypes: Sequence[Any]
    cuts_terms: bool = False


def run(
    ctx: Context, layout: Fold, a: Array, b: Array, work: Tiles, dtypes: Sequence[Any]
) -> list[Array]:
    """Do the work of a folded product, none of whose sizes is zero.

    Returns one contiguous array of shape ``layout.out_shape`` and each of the dtypes.
    """
    xp = ctx.xp
    a, b = layout.view(xp, a, 0), layout.view(xp, b, 1)
    outs = [ctx.empty(layout.full_shape, dtype) for dtype in dtypes]
    run_on_views(ctx, layout, a, b, [layout.view(xp, out, 2) for out in outs], work)
    return [xp.reshape(out, layout.out_shape) for out in outs]


def run_on_views(
    ctx: Context, groups: Any, a: Array, b: Array, outs: Sequence[Array], work: Tiles
) -> None:
    """Do the work on views whose axes are in groups.

    Results are written in place where their tiles are what is computed, else by way of a copy.
    Those of pieces of the terms, if these are cut here, are added up.
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
                    at.write(xp, out, x)
