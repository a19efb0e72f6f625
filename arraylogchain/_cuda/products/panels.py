"""Panels of a product: parts whose factors fit into the workspace, and how these are prepared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from arraylogchain._cuda.device import Device
from arraylogchain._cuda.dtypes import C_TYPES, compute_type, itemsize
from arraylogchain._cuda.launch import Launch
from arraylogchain._cuda.products.operands import PANEL, PART, Array, Operand, Product
from arraylogchain._cuda.products.tiles import blocks_of

# Parts of an operand are cut to multiples of this: of every tile's sides.
_LINES = 128
# Sides of panels from which terms are cut rather than lines: the largest whose sums take no more
# than a fourth of the workspace. 2048 x 2048 sums are tiles for the largest devices.
_SIDES = (2048, 1024, 512, 256, 128, 64, 32)

_MAXIMA_WARPS = 16
_FACTORS_SIDE = 32
_FACTORS_THREADS = 256


def pitch_of(lines: int) -> int:
    """Return the distance between terms of factors: lines padded to whole vectors."""
    return blocks_of(lines, 4) * 4


def factors_kernel(dtype: str, *, shifted: bool) -> str:
    """Return the instantiation that makes factors, or that copies entries as they are."""
    return f"factors<{C_TYPES[dtype]}, {str(shifted).lower()}>"


class Panels:
    """A product cut into panels.

    Batch entries are taken together as far as they fit, else one is cut into rows and columns. If
    so few of those fit that each factor would serve few sums, the terms are cut as well, and the
    panel's sums are kept from one launch to the next.

    Parameters
    ----------
    whole : Product
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

    def __init__(self, whole: Product, workspace: int, entry_bytes: int = 0) -> None:
        self.whole = whole
        self.rows, self.columns, self.terms = whole.left.lines, whole.right.lines, whole.terms
        item = itemsize(compute_type(whole.dtype))
        # The rest is for flags: a byte for a thousand entries, or for an entry of the batch.
        budget = workspace - workspace // 16
        self.batches = max(1, min(whole.batches, budget // self._bytes(item, entry_bytes)))
        kept = max(entry_bytes, item)
        side = next((s for s in _SIDES if s * s * kept <= workspace // 4), _SIDES[-1])
        unit = min(side, _LINES)
        while self._bytes(item, entry_bytes) > budget and max(self.rows, self.columns) > side:
            half = max(side, blocks_of(max(self.rows, self.columns), 2 * unit) * unit)
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
        whole = self.whole
        for batch in range(0, whole.batches, self.batches):
            for column in range(0, whole.right.lines, self.columns):
                for row in range(0, whole.left.lines, self.rows):
                    panel = np.zeros((), PANEL)
                    panel["first_batch"], panel["first_row"] = batch, row
                    panel["first_column"] = column
                    panel["batches"] = min(self.batches, whole.batches - batch)
                    panel["rows"] = min(self.rows, whole.left.lines - row)
                    panel["columns"] = min(self.columns, whole.right.lines - column)
                    yield panel

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yield the first term, and the number, of those that are prepared together."""
        for first in range(0, self.whole.terms, self.terms):
            yield first, min(self.terms, self.whole.terms - first)

    def tiles(self, rows: int, columns: int) -> int:
        """Return how many tiles of these sides cover one batch entry of a panel."""
        return blocks_of(self.rows, rows) * blocks_of(self.columns, columns)


@dataclass(slots=True)
class Factors:
    """Factors of a part of an operand: [batches, terms, pitch]."""

    array: Array
    pitch: int


class Prepared:
    """Shifts and factors of the panel at hand, in workspace that all panels share.

    Parameters
    ----------
    device : Device
    whole : Product
    panels : Panels
    shifted : bool
        Whether factors are exponentials of shifted entries, or the entries as they are.
    keeps_sums : bool
        Whether there is to be room for the panel's sums where the terms are cut.

    Attributes
    ----------
    shifts : tuple of array
        Of the panel's rows, and of its columns; None unless `shifted`.
    sides : tuple of Factors
        The left and the right one.
    partial : array or None
        Sums over some of the terms, where a panel's are not prepared all at once.
    """

    def __init__(
        self,
        device: Device,
        whole: Product,
        panels: Panels,
        *,
        shifted: bool = True,
        keeps_sums: bool = True,
    ) -> None:
        self.device, self.whole, self.shifted = device, whole, shifted
        dtype = compute_type(whole.dtype)
        lines = (panels.rows, panels.columns)
        self.shifts: tuple[Array, ...] = (None, None)
        if shifted:
            self.shifts = tuple(device.empty((panels.batches * n,), dtype) for n in lines)
        self.sides = tuple(
            Factors(device.empty((panels.batches * panels.terms * pitch_of(n),), dtype), 0)
            for n in lines
        )
        self._cut = panels.terms < whole.terms
        self.partial = None
        if self._cut and keeps_sums:
            self.partial = device.empty((panels.batches * panels.rows * panels.columns,), dtype)
        self._at: list[tuple[int, ...] | None] = [None, None]
        self._stale = [True, True]

    @property
    def factor_arguments(self) -> tuple[Any, ...]:
        """The factors of both sides as kernels take them."""
        left, right = self.sides
        return left.array, np.int64(left.pitch), right.array, np.int64(right.pitch)

    def start(self, panel: np.ndarray) -> None:
        """Compute the shifts of a panel's rows and columns; what the last panel shared stays."""
        parts = self._parts(panel)
        for side, part in enumerate(parts):
            at = tuple(int(part[name]) for name in ("first_batch", "first_line", "lines"))
            self._stale[side] = at != self._at[side]
            self._at[side] = at
        if self.shifted:
            self._run_maxima(parts)

    def _run_maxima(self, parts: list[np.ndarray]) -> None:
        arguments: list[Any] = []
        for side, (operand, part) in enumerate(zip(self._operands, parts, strict=True)):
            lines = 32
            if operand.terms_adjoin:
                few = int(part["batches"] * part["lines"]) < 2 * self.device.multiprocessors
                lines = 1 if few else _MAXIMA_WARPS
            blocks = int(part["batches"]) * blocks_of(int(part["lines"]), lines)
            part["blocks"] = blocks if self._stale[side] else 0
            arguments += [operand.array, operand.view, part, self.shifts[side], np.int32(lines)]
        self.device.run(
            Launch(
                source="products/maxima.cu",
                kernel=f"maxima<{C_TYPES[self.whole.dtype]}>",
                grid=sum(int(part["blocks"]) for part in parts),
                block=_MAXIMA_WARPS * 32,
                shared_memory=0,
                arguments=(*arguments, np.int64(self.whole.terms)),
            )
        )

    def factors(self, panel: np.ndarray, first: int, terms: int) -> None:
        """Compute the factors of some terms of a panel whose shifts are known."""
        parts = self._parts(panel)
        arguments: list[Any] = []
        for side, (operand, part) in enumerate(zip(self._operands, parts, strict=True)):
            tiles = blocks_of(int(part["pitch"]), _FACTORS_SIDE) * blocks_of(terms, _FACTORS_SIDE)
            stale = self._stale[side] or self._cut
            part["blocks"] = int(part["batches"]) * tiles if stale else 0
            self.sides[side].pitch = int(part["pitch"])
            arguments += [operand.array, operand.view, self.shifts[side], part]
            arguments.append(self.sides[side].array)
        self.device.run(
            Launch(
                source="products/factors.cu",
                kernel=factors_kernel(self.whole.dtype, shifted=self.shifted),
                grid=sum(int(part["blocks"]) for part in parts),
                block=_FACTORS_THREADS,
                shared_memory=0,
                arguments=(*arguments, np.int64(first), np.int64(terms)),
            )
        )

    @property
    def _operands(self) -> tuple[Operand, Operand]:
        return self.whole.left, self.whole.right

    @staticmethod
    def _parts(panel: np.ndarray) -> list[np.ndarray]:
        parts = []
        for first, lines in (("first_row", "rows"), ("first_column", "columns")):
            part = np.zeros((), PART)
            part["first_batch"], part["batches"] = panel["first_batch"], panel["batches"]
            part["first_line"], part["lines"] = panel[first], panel[lines]
            part["pitch"] = pitch_of(int(panel[lines]))
            parts.append(part)
        return parts
