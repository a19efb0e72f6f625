"""Panels of a product: parts whose factors fit into the workspace."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from arraylogchain._cuda.launch import ceil_div, pack
from arraylogchain._cuda.products.operands import PANEL, Product

# Parts of an operand are cut to multiples of this: of every tile's sides.
_LINES = 128
# Sides of panels from which terms are cut rather than lines: the largest whose sums take no more
# than a fourth of the workspace. 2048 x 2048 sums are tiles for the largest devices.
_SIDES = (2048, 1024, 512, 256, 128, 64, 32)

FACTORS_SIDE = 32
THREADS = 256  # of the kernels that have no tile
# A loop over single entries keeps any device busy with this many blocks; longer ones take turns.
_MAX_BLOCKS = 1 << 16


def pitch_of(lines: int) -> int:
    """Return the distance between terms of factors: lines padded to whole vectors."""
    return ceil_div(lines, 4) * 4


def blocks_for(count: int) -> int:
    """Return how many blocks a loop over `count` entries takes."""
    return max(1, min(ceil_div(count, THREADS), _MAX_BLOCKS))


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
    room : int
        Bytes that are left.
    """

    def __init__(self, product: Product, workspace: int, entry_bytes: int) -> None:
        self.product = product
        self.rows, self.columns, self.terms = product.left.lines, product.right.lines, product.terms
        item = product.ctx.precision.itemsize
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
            self.terms = max(FACTORS_SIDE, min(self.terms, room // (item * lines) - 4))
        self.room = budget - self.batches * self._bytes(item, entry_bytes)

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
