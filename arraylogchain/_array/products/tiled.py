"""Tiles of a folded product: where they lie in its operands and its result."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from arraylogchain._array.products.tiling import Tiling
from arraylogchain._context import Array, Context
from arraylogchain._fold import Box, Fold, Shape, boxes, lengths


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tile lies: its box along the axes of each group, and along each group as one axis."""

    batch: Box
    rows: Box
    cols: Box
    flat: tuple[slice, slice, slice]

    def read(self, xp: Any, view: Array, kind: str) -> Array:
        """Return the tile of a view of operand "a", "b" or of the product, as [batch, m, n]."""
        batch, rows, cols = (s.stop - s.start for s in self.flat)
        if kind == "a":
            tile = view[(*self.batch, *self.rows, slice(None))]
            return xp.reshape(tile, (batch, rows, tile.shape[-1]))
        if kind == "b":
            tile = view[(*self.batch, slice(None), *self.cols)]
            return xp.reshape(tile, (batch, tile.shape[len(self.batch)], cols))
        return xp.reshape(view[(*self.batch, *self.rows, *self.cols)], (batch, rows, cols))

    def write(self, ctx: Context, view: Array, x: Array) -> None:
        """Put x [batch, rows, cols] into a view [*batch, *rows, *cols] of a product."""
        target = view[(*self.batch, *self.rows, *self.cols)]
        x = ctx.xp.reshape(x, target.shape)
        target[...] = x if x.dtype == target.dtype else ctx.xp.astype(x, target.dtype)


def panels(layout: Fold, tiling: Tiling) -> Iterator[Iterator[Place]]:
    """Yield, for every panel of columns, the places of its tiles."""
    for batch, of_batch in _numbered(layout.batch, tiling.batch):
        for cols, of_cols in _numbered(layout.cols, tiling.cols):
            yield (
                Place(batch, rows, cols, (of_batch, of_rows, of_cols))
                for rows, of_rows in _numbered(layout.rows, tiling.rows)
            )


def _numbered(shape: Shape, limit: int) -> Iterator[tuple[Box, slice]]:
    """Yield boxes of a group of axes, and the same entries along the group as one axis."""
    start = 0
    for box in boxes(shape, limit):
        stop = start + math.prod(lengths(box))
        yield box, slice(start, stop)
        start = stop


class TileKernel(Protocol):
    """A product of one tile of rows with one panel of columns."""

    tiling: Tiling
    dtypes: list[Any]
    shares_tiles: bool  # whether threads may share the tiles of a panel

    def panel(self, b: Array) -> Any:
        """Prepare columns b [batch, K, cols] that will meet several tiles of rows."""

    def __call__(self, a: Array, panel: Any, *outs: Array) -> None:
        """Write the results [batch, rows, cols] for a [batch, rows, K] into `outs`."""


def run(
    ctx: Context, layout: Fold, a: Array, b: Array, kernel: TileKernel, dtypes: Sequence[Any]
) -> list[Array]:
    """Apply a kernel to all tiles of a folded product, none of whose sizes is zero.

    Returns one contiguous array of shape ``layout.out_shape`` and each of the dtypes.
    """
    xp = ctx.xp
    a_view, b_view = layout.view_a(xp, a), layout.view_b(xp, b)
    outs = [ctx.empty(layout.full_shape, dtype) for dtype in dtypes]
    views = [layout.view_out(xp, out) for out in outs]
    # Kernels write straight into the result where its tiles are what they compute.
    direct = not layout.copies and list(dtypes) == kernel.dtypes

    batch, rows, cols, inner = layout.sizes
    if direct and kernel.tiling == Tiling(*layout.sizes):
        # One tile: small calls spend most of their time in between.
        panel = kernel.panel(xp.reshape(b_view, (batch, inner, cols)))
        tiles = (xp.reshape(view, (batch, rows, cols)) for view in views)
        kernel(xp.reshape(a_view, (batch, rows, inner)), panel, *tiles)
        return [xp.reshape(out, layout.out_shape) for out in outs]

    def compute(panel: Any, place: Place) -> None:
        tile = place.read(xp, a_view, "a")
        if direct:
            kernel(tile, panel, *(place.read(xp, view, "out") for view in views))
            return
        shape = tuple(s.stop - s.start for s in place.flat)
        results = [ctx.empty(shape, dtype) for dtype in kernel.dtypes]
        kernel(tile, panel, *results)
        for view, x in zip(views, results, strict=True):
            place.write(ctx, view, x)

    for places in panels(layout, kernel.tiling):
        first = next(places)
        panel = kernel.panel(first.read(xp, b_view, "b"))
        compute(panel, first)
        if kernel.shares_tiles:
            ctx.share(partial(compute, panel), list(places))
        else:
            for place in places:
                compute(panel, place)
    return [xp.reshape(out, layout.out_shape) for out in outs]
