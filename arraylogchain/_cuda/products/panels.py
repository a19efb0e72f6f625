"""Panels of a product: parts whose factors fit into the workspace, and the launches for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from arraylogchain._context import Array
from arraylogchain._cuda.device import Device
from arraylogchain._cuda.dtypes import C_TYPES, compute_type, itemsize
from arraylogchain._cuda.launch import Launch, ceil_div, pack
from arraylogchain._cuda.products.operands import PANEL, PART, Product
from arraylogchain._cuda.products.tiles import TileShape, choose_tile, tiles_of

# Parts of an operand are cut to multiples of this: of every tile's sides.
_LINES = 128
# Sides of panels from which terms are cut rather than lines: the largest whose sums take no more
# than a fourth of the workspace. 2048 x 2048 sums are tiles for the largest devices.
_SIDES = (2048, 1024, 512, 256, 128, 64, 32)

_MAXIMA_WARPS = 16
_FACTORS_SIDE = 32
EXACT_SIDE = 64
THREADS = 256  # of the kernels that have no tile

INSTANTIATIONS = {
    "products/maxima.cu": [f"maxima<{c}>" for c in C_TYPES.values()],
    "products/factors.cu": [
        f"factors<{c}, {shifted}>" for shifted in ("true", "false") for c in C_TYPES.values()
    ],
}
# Kernels whose loops must not spill registers.
HOT = frozenset({"maxima", "factors"})


def pitch_of(lines: int) -> int:
    """Return the distance between terms of factors: lines padded to whole vectors."""
    return ceil_div(lines, 4) * 4


class Panels:
    """A product cut into panels.

    Batch entries are taken together as far as they fit, else one is cut into rows and columns. If
    so few of those fit that each factor would serve few sums, the terms are cut as well, and the
    panel's sums are kept from one launch to the next.

    Parameters
    ----------
    product : Product
    workspace : int
        Bytes for shifts, factors, kept sums and flags.
    entry_bytes : int
        Bytes that each entry of a panel takes as well.

    Attributes
    ----------
    batches, rows, columns : int
        The most that a panel has.
    terms : int
        The most that are prepared at a time.
    """

    def __init__(self, product: Product, workspace: int, entry_bytes: int) -> None:
        self.product = product
        self.rows, self.columns, self.terms = product.left.lines, product.right.lines, product.terms
        item = itemsize(compute_type(product.dtype))
        # The rest is for flags: a byte for a thousand entries, or for an entry of the batch.
        budget = workspace - workspace // 16
        self.batches = max(1, min(product.batches, budget // self._bytes(item, entry_bytes)))
        kept = max(entry_bytes, item)
        side = next((s for s in _SIDES if s * s * kept <= workspace // 4), _SIDES[-1])
        unit = min(side, _LINES)
        while self._bytes(item, entry_bytes) > budget and max(self.rows, self.columns) > side:
            half = max(side, ceil_div(max(self.rows, self.columns), 2 * unit) * unit)
            if self.rows >= self.columns:
                self.rows = half
            else:
                self.columns = half
        if self._bytes(item, entry_bytes) > budget:
            lines = pitch_of(self.rows) + pitch_of(self.columns)
            room = budget - kept * self.rows * pitch_of(self.columns)
            self.terms = max(_FACTORS_SIDE, min(self.terms, room // (item * lines) - 4))

    def _bytes(self, item: int, entry_bytes: int) -> int:
        """Return what one batch entry of a panel takes; a shift counts as four terms."""
        columns = pitch_of(self.columns)
        factors = item * (pitch_of(self.rows) + columns) * (self.terms + 4)
        return factors + entry_bytes * self.rows * columns

    def __iter__(self) -> Iterator[np.ndarray]:
        batches, rows = self.product.batches, self.product.left.lines
        columns = self.product.right.lines
        for batch in range(0, batches, self.batches):
            for column in range(0, columns, self.columns):
                for row in range(0, rows, self.rows):
                    yield pack(
                        PANEL,
                        first_batch=batch,
                        first_row=row,
                        first_column=column,
                        batches=min(self.batches, batches - batch),
                        rows=min(self.rows, rows - row),
                        columns=min(self.columns, columns - column),
                    )

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yield the first term, and the number, of those that are prepared together."""
        for first in range(0, self.product.terms, self.terms):
            yield first, min(self.terms, self.product.terms - first)


@dataclass(slots=True)
class FactorBuffer:
    """Factors of a part of an operand: [batches, terms, pitch]."""

    array: Array
    pitch: int = 0

    @property
    def arguments(self) -> tuple[Array, np.int64]:
        """The factors as kernels take them."""
        return self.array, np.int64(self.pitch)


class TiledProduct:
    """A product panel by panel: the launches, and workspace that all panels share.

    Parameters
    ----------
    device : Device
    product : Product
    workspace : int
        Bytes that temporaries may take.
    tiles : sequence of TileShape
        Those to choose from; see `choose_tile`.
    shifted : bool
        Whether factors are exponentials of shifted entries, or the entries as they are.
    entry_bytes : int
        Bytes for each entry of a panel of which the caller makes arrays. If there are any, these
        have the panel's sums where the terms are cut, and there is no `partial`.

    Attributes
    ----------
    dtype : str
        What is computed in.
    tile : TileShape
    shifts : tuple of array
        Of the panel's rows, and of its columns; None unless `shifted`.
    sides : tuple of FactorBuffer
        The left and the right one.
    partial : array or None
        Sums over some of the terms, where a panel's are not prepared all at once.
    """

    def __init__(
        self,
        device: Device,
        product: Product,
        workspace: int,
        tiles: Sequence[TileShape],
        *,
        shifted: bool = True,
        entry_bytes: int = 0,
    ) -> None:
        self.device, self.product, self.shifted = device, product, shifted
        self.dtype = dtype = compute_type(product.dtype)
        self.panels = panels = Panels(product, workspace, entry_bytes)
        most = (panels.batches, panels.rows, panels.columns)
        self.tile = choose_tile(device, tiles, dtype, *most)
        lines = (panels.rows, panels.columns)
        self.shifts: tuple[Array, ...] = (None, None)
        if shifted:
            self.shifts = tuple(device.empty((panels.batches * n,), dtype) for n in lines)
        self.sides = tuple(
            FactorBuffer(device.empty((panels.batches * panels.terms * pitch_of(n),), dtype))
            for n in lines
        )
        self._cuts_terms = panels.terms < product.terms
        self.partial = None
        if self._cuts_terms and not entry_bytes:
            self.partial = device.empty((panels.batches * panels.rows * panels.columns,), dtype)
        self._at: list[tuple[int, ...] | None] = [None, None]
        self._stale = [True, True]

    def new_flags(self) -> Array:
        """Return memory for a flag for each tile of a panel."""
        panels, tile = self.panels, self.tile
        of_entry = ceil_div(panels.rows, tile.rows) * ceil_div(panels.columns, tile.columns)
        return self.device.empty((panels.batches * of_entry,), "uint8")

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yield the panels, with the shifts of their rows and columns computed."""
        for panel in self.panels:
            parts = self._parts(panel)
            for side, part in enumerate(parts):
                # What the last panel shared stays.
                at = tuple(int(part[name]) for name in ("first_batch", "first_line", "lines"))
                self._stale[side] = at != self._at[side]
                self._at[side] = at
            if self.shifted:
                self._run_maxima(parts)
            yield panel

    def chunks(self, panel: np.ndarray) -> Iterator[tuple[int, int]]:
        """Yield first terms and numbers of terms, with the factors of these computed."""
        for first, terms in self.panels.chunks():
            self.compute_factors(panel, first, terms)
            yield first, terms

    def _run_maxima(self, parts: list[np.ndarray]) -> None:
        arguments: list[Any] = []
        for side, (operand, part) in enumerate(zip(self.product.sides, parts, strict=True)):
            lines = 32
            if operand.terms_adjoin:
                few = int(part["batches"] * part["lines"]) < 2 * self.device.multiprocessors
                lines = 1 if few else _MAXIMA_WARPS
            blocks = int(part["batches"]) * ceil_div(int(part["lines"]), lines)
            part["blocks"] = blocks if self._stale[side] else 0
            arguments += [*operand.arguments, part, self.shifts[side], np.int32(lines)]
        arguments.append(np.int64(self.product.terms))
        self._run("maxima", "", _blocks(parts), _MAXIMA_WARPS * 32, arguments)

    def compute_factors(self, panel: np.ndarray, first: int, terms: int) -> None:
        """Compute the factors of some terms of a panel whose shifts are known."""
        parts = self._parts(panel)
        arguments: list[Any] = []
        for side, (operand, part) in enumerate(zip(self.product.sides, parts, strict=True)):
            tiles = ceil_div(int(part["pitch"]), _FACTORS_SIDE) * ceil_div(terms, _FACTORS_SIDE)
            stale = self._stale[side] or self._cuts_terms
            part["blocks"] = int(part["batches"]) * tiles if stale else 0
            self.sides[side].pitch = int(part["pitch"])
            array = self.sides[side].array
            arguments += [*operand.arguments, self.shifts[side], part, array]
        arguments += [np.int64(first), np.int64(terms)]
        shifted = f", {str(self.shifted).lower()}"
        self._run("factors", shifted, _blocks(parts), THREADS, arguments)

    def run_tiles(
        self, kernel: str, panel: np.ndarray, terms: int, *arguments: Any, keeps_totals: bool = True
    ) -> None:
        """Launch a kernel that has a block for each tile, on the factors at hand.

        It may keep totals in shared memory.
        """
        left, right = self.sides
        shared = self.tile.totals(self.dtype, terms) if keeps_totals else 0
        self._run(
            kernel,
            f", {self.tile}",
            tiles_of(panel, self.tile.rows, self.tile.columns),
            self.tile.threads,
            (*left.arguments, *right.arguments, np.int32(terms), *arguments),
            shared,
        )

    def run_exact(self, kernel: str, panel: np.ndarray, *arguments: Any) -> None:
        """Launch a kernel that computes what is not proved."""
        product = self.product
        given = (*product.operands, np.int64(product.terms), panel, *self.shifts, *arguments)
        self._run(kernel, "", tiles_of(panel, EXACT_SIDE, EXACT_SIDE), THREADS, given)

    def _run(
        self,
        kernel: str,
        template: str,
        blocks: int,
        threads: int,
        arguments: Sequence[Any],
        shared: int = 0,
    ) -> None:
        name = f"{kernel}<{C_TYPES[self.product.dtype]}{template}>"
        launch = Launch(f"products/{kernel}.cu", name, blocks, threads, tuple(arguments), shared)
        self.device.run(launch)

    @staticmethod
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


def _blocks(parts: list[np.ndarray]) -> int:
    return sum(int(part["blocks"]) for part in parts)
