"""Products panel by panel: the launches that all tiled products share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from arraylogchain._context import Array
from arraylogchain._cuda.dtypes import C_TYPES
from arraylogchain._cuda.launch import ceil_div, pack, pack_axes
from arraylogchain._cuda.products.operands import PART, VIEW, Product
from arraylogchain._cuda.products.panels import FACTORS_SIDE, THREADS, Panels, pitch_of
from arraylogchain._cuda.products.tiles import SHORT, TileShape, choose_tile, tiles_of

_MAXIMA_WARPS = 16
EXACT_SIDE = 64
# Terms that are worth a block's while, where they are shared out because lines are few: about what
# another launch costs.
_TERMS_EACH = {"maxima": 512, "sums": 256}


class TiledProduct:
    """A product panel by panel: the launches, and workspace that all panels share.

    Parameters
    ----------
    product : Product
    workspace : int
        Bytes that temporaries may take.
    tiles : sequence of TileShape
        Those to choose from; see `choose_tile`.
    shifted : bool
        Whether factors are exponentials of shifted entries, for sums, or the entries as they are.
    entry_bytes : int
        Bytes for each entry of a panel of which the caller makes arrays; `partial` is then always
        there, and its first part counts among them.

    Attributes
    ----------
    tile : TileShape
    shifts : tuple of array
        Of the panel's rows, and of its columns; None unless `shifted`.
    factors : tuple of array
        Of the left and the right operand, [batches, terms, pitch].
    parts : int
        That the terms of sums are shared out in, each a block's, where tiles are few.
    partial : array or None
        Sums over some of the terms, [parts, batches, rows, pitch], where a panel's are not
        prepared all at once or are shared out.
    flags : tuple
        A byte for each tile of a panel, and the sides of a tile; of sums.
    """

    def __init__(
        self,
        product: Product,
        workspace: int,
        tiles: Sequence[TileShape],
        *,
        shifted: bool = True,
        entry_bytes: int = 0,
    ) -> None:
        self.product, self.shifted, self.device = product, shifted, product.ctx.kernels
        self.panels = panels = Panels(product, workspace, entry_bytes)
        lines = (panels.rows, panels.columns)
        dtype = product.ctx.precision.name
        self.tile = choose_tile(self.device, tiles, dtype, panels.batches, *lines)
        self.factors = tuple(self.new_array(panels.terms, pitch_of(n)) for n in lines)
        self.shifts: tuple[Array, ...] = (None, None)
        self.parts, self.partial = 1, None
        if shifted:
            self.shifts = tuple(self.new_array(n) for n in lines)
            blocks = panels.batches * self.tile.blocks(*lines)
            sides = np.int32(self.tile.rows), np.int32(self.tile.columns)
            self.flags = self.device.empty((blocks,), "uint8"), *sides
            each = panels.batches * panels.rows * pitch_of(panels.columns)
            room = panels.room // (each * product.ctx.precision.itemsize)
            self.parts = max(1, min(self._parts_of("sums", panels.terms, blocks), room))
        if panels.terms < product.terms or self.parts > 1 or entry_bytes:
            self.partial = self.new_array(self.parts, panels.rows, pitch_of(panels.columns))

    def _parts_of(self, what: str, terms: int, blocks: int) -> int:
        """Return in how many parts terms keep all multiprocessors busy: two blocks for each."""
        wanted: int = 2 * self.device.multiprocessors // blocks
        return max(1, min(wanted, terms // _TERMS_EACH[what]))

    def new_array(self, *shape: int) -> Array:
        """Return memory for so many numbers for each batch entry of a panel."""
        count = self.panels.batches * math.prod(shape)
        return self.device.empty((count,), self.product.ctx.precision.name)

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yield the panels, with the shifts of their rows and columns computed."""
        for panel in self.panels:
            if self.shifted:
                self._compute_maxima(panel)
            yield panel

    def chunks(self, panel: np.ndarray) -> Iterator[tuple[int, int]]:
        """Yield first terms and numbers of terms, with the factors of these computed."""
        for first, terms in self.panels.chunks():
            self.compute_factors(panel, first, terms)
            yield first, terms

    def _compute_maxima(self, panel: np.ndarray) -> None:
        product, parts = self.product, _parts(panel)
        few = 2 * self.device.multiprocessors
        lines, blocks = [], []
        for operand, part in zip(product.sides, parts, strict=True):
            is_few = int(part["batches"] * part["lines"]) < few
            lines.append((1 if is_few else _MAXIMA_WARPS) if operand.terms_adjoin else 32)
            blocks.append(int(part["batches"]) * ceil_div(int(part["lines"]), lines[-1]))
        count = min(self._parts_of("maxima", product.terms, min(blocks)), self.panels.terms)
        for part, of_part in zip(parts, blocks, strict=True):
            part["blocks"] = count * of_part
        # The factors come later.
        found = self.factors if count > 1 else self.shifts
        of_sides = zip(product.sides, parts, found, map(np.int32, lines), strict=True)
        arguments = [x for side, *others in of_sides for x in (*side.arguments, *others)]
        self._run_maxima(
            product.c_type, parts, arguments, product.terms, ceil_div(product.terms, count)
        )
        if count > 1:
            self._join_maxima(parts, count)

    def _join_maxima(self, parts: Sequence[np.ndarray], count: int) -> None:
        """Take the maxima of the maxima of parts of the terms, which lie where the factors will."""
        arguments: list[Any] = []
        for part, found, shifts in zip(parts, self.factors, self.shifts, strict=True):
            lines = int(part["batches"] * part["lines"])
            view = pack(VIEW, lines=pack_axes((lines,), (1,)), step=lines, count=lines)
            part["first_batch"] = part["first_line"] = 0
            part["batches"], part["lines"], part["blocks"] = 1, lines, ceil_div(lines, 32)
            arguments += [found, view, part, shifts, np.int32(32)]
        c_type = C_TYPES[self.product.ctx.precision.name]
        self._run_maxima(c_type, parts, arguments, count, count)

    def _run_maxima(
        self, c_type: str, parts: Sequence[np.ndarray], arguments: list[Any], *terms: int
    ) -> None:
        blocks = sum(int(part["blocks"]) for part in parts)
        numbers = map(np.int64, terms)
        self.product.launch(f"maxima<{c_type}>", blocks, _MAXIMA_WARPS * 32, *arguments, *numbers)

    def compute_factors(self, panel: np.ndarray, first: int, terms: int) -> None:
        """Compute the factors of some terms of a panel whose shifts are known."""
        product = self.product
        parts, arguments = _parts(panel), []
        for operand, shifts, part, factors in zip(
            product.sides, self.shifts, parts, self.factors, strict=True
        ):
            tiles = ceil_div(int(part["pitch"]), FACTORS_SIDE) * ceil_div(terms, FACTORS_SIDE)
            part["blocks"] = int(part["batches"]) * tiles
            arguments += [*operand.arguments, shifts, part, factors]
        blocks = sum(int(part["blocks"]) for part in parts)
        kernel = f"factors<{product.c_type}, {str(self.shifted).lower()}>"
        product.launch(kernel, blocks, THREADS, *arguments, np.int64(first), np.int64(terms))

    def factors_of(self, panel: np.ndarray) -> list[tuple[Array, np.int64]]:
        """Return the factors of either operand as kernels take them."""
        lines = (int(panel["rows"]), int(panel["columns"]))
        return [(x, np.int64(pitch_of(n))) for x, n in zip(self.factors, lines, strict=True)]

    def run_tiles(
        self,
        kernel: str,
        panel: np.ndarray,
        terms: int,
        *arguments: Any,
        parts: int = 1,
        keeps_totals: bool = True,
    ) -> None:
        """Launch a kernel that has a block for each tile and part, on the factors at hand.

        It may keep totals in shared memory.
        """
        product, tile = self.product, self.tile
        left, right = self.factors_of(panel)
        product.launch(
            f"{kernel}<{product.c_type}, {tile}>",
            parts * tiles_of(panel, tile.rows, tile.columns),
            tile.threads,
            *left,
            *right,
            np.int32(terms),
            *arguments,
            shared_memory=tile.totals(product.ctx.precision.name, terms) if keeps_totals else 0,
        )

    def run_sums(self, panel: np.ndarray, first: int, terms: int) -> None:
        """Multiply the factors at hand: into `partial`, or if there is none, to the end."""
        self.run_tiles(
            "logmatmulexp",
            panel,
            terms,
            # Rounded up: a block adds up SHORT terms at a time.
            np.int32(ceil_div(ceil_div(terms, self.parts), SHORT) * SHORT),
            panel,
            *self.shifts,
            self.partial,
            np.int32(first > 0),
            self.product.out,
            self.product.view,
            np.int32(self.product.adjoin),
            self.flags[0],
            parts=self.parts,
        )

    def run_entries(self, kernel: str, panel: np.ndarray, *arguments: Any) -> None:
        """Launch a kernel that takes `partial`, a thread for each entry."""
        batches, rows, columns = (int(panel[name]) for name in ("batches", "rows", "columns"))
        self.product.launch(
            f"{kernel}<{self.product.c_type}>",
            ceil_div(batches * rows * pitch_of(columns), THREADS),
            THREADS,
            self.partial,
            np.int32(self.parts),
            np.int64(self.product.terms),
            panel,
            *self.shifts,
            *arguments,
            *self.flags,
        )

    def run_exact(self, kernel: str, panel: np.ndarray, *arguments: Any) -> None:
        """Launch a kernel that computes what is not proved."""
        product = self.product
        given = (*product.operands, np.int64(product.terms), panel, *self.shifts, *arguments)
        blocks = tiles_of(panel, EXACT_SIDE, EXACT_SIDE)
        product.launch(f"{kernel}<{product.c_type}>", blocks, THREADS, *given)


def _parts(panel: np.ndarray) -> list[np.ndarray]:
    """Return the parts of the operands that a panel is the product of."""
    return [
        pack(
            PART,
            first_batch=panel["first_batch"],
            batches=panel["batches"],
            first_line=panel[first],
            lines=panel[lines],
            pitch=pitch_of(int(panel[lines])),
        )
        for first, lines in (("first_row", "rows"), ("first_column", "columns"))
    ]
