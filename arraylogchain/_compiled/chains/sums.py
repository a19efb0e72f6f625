"""Where derivatives are collected: in the shapes of a chain's arrays, summed over what they share.

Tiles are dealt out to lanes, each of which adds up its own, in order, and lanes are added in order
as well: which threads they run on changes no bit. How many there are depends on shapes and the
workspace alone.
"""

from __future__ import annotations

import math
from copy import copy
from typing import Any

import numpy as np

from arraylogchain._compiled.chains.layout import Layout
from arraylogchain._compiled.loops.compiling import Floats, Integers
from arraylogchain._compiled.loops.recursion import (
    BATCH,
    TO_FINAL,
    TO_INITIAL,
    TO_POTENTIALS,
    TO_TRANSITIONS,
)
from arraylogchain._fold import Shape

# Axes behind those of the batch, and the map to them.
_KINDS = {
    "potentials": (2, TO_POTENTIALS),
    "transitions": (3, TO_TRANSITIONS),
    "initial": (1, TO_INITIAL),
    "final": (1, TO_FINAL),
}
_LANES = 8


class Sum:
    """A sum of contributions to an array of some shape, of all rows or of one lane's.

    Attributes
    ----------
    total : array [n, steps, ...]
        Transposed matrices, if contributions go to it directly: if it is float64. Else they are
        collected a block at a time.
    """

    def __init__(self, name: str, shape: Shape, dtype: Any, layout: Layout) -> None:
        core, self.kind = _KINDS[name]
        self.name, self.shape, self.dtype, self.layout = name, shape, dtype, layout
        self.own = shape[: len(shape) - core]
        self.map = layout.maps[BATCH if self.own == layout.batch else self.kind]
        # Every row has its own part.
        self.is_apart = math.prod(self.own) == layout.num_rows
        self.total: Any = None
        self.buffer: Any = None

    def begin(self, in_double: bool) -> None:
        """Make the total."""
        dtype = np.dtype(np.float64 if in_double else self.dtype)
        if not (self.is_apart and self.name == "potentials"):
            dtype = np.promote_types(dtype, np.float32)
        trailing = self.shape[len(self.own) :]
        trailing = (1, *trailing) if len(trailing) == 1 else trailing
        self.total = np.zeros((math.prod(self.own), *trailing), dtype)

    def again(self) -> Sum:
        """Return the sum of another lane; one with a part for each row is shared."""
        other = copy(self)
        if not self.is_apart:
            other.total = np.zeros_like(self.total)
        return other

    @property
    def step_bytes(self) -> int:
        """What a step of a row takes in a buffer."""
        if self.total.dtype == np.float64:
            return 0
        return 8 * math.prod(self.shape[-2:] if self.name == "transitions" else self.shape[-1:])

    def open(self, rows: range, groups: range, steps: range, maps: Integers) -> tuple[Floats, int]:
        """Return what to add contributions of a block to, and the first step of that."""
        maps[self.kind] = self.map
        if self.total.dtype == np.float64:
            return self.total, 0
        count = 1 if self.total.shape[1] == 1 else len(steps)
        if self.name == "transitions":
            maps[self.kind, -1] = -groups.start
            n = len(groups)
        else:
            maps[self.kind], n = self.layout.local(rows.start), len(rows)
        self.buffer = np.zeros((n, count, *self.total.shape[2:]))
        return self.buffer, steps.start

    def close(self, rows: range, groups: range, steps: range) -> None:
        """Add what has been collected of a block."""
        if self.buffer is None:
            return
        at = slice(None) if self.total.shape[1] == 1 else slice(steps.start, steps.stop)
        if self.name == "transitions":
            part = self.total[groups.start : groups.stop, at]
            part += np.swapaxes(self.buffer, -1, -2)
        elif self.own == self.layout.batch and self.layout.in_order:
            self.total[rows.start : rows.stop, at] += self.buffer
        elif self.own:
            index = np.ravel_multi_index(self.layout.index(self.own, rows), self.own)
            where: Any = (index, at)
            np.add.at(self.total, where, self.buffer)
        else:
            self.total[0, at] += self.buffer.sum(0)
        self.buffer = None

    def finish(self, others: list[Sum]) -> Any:
        """Return the sum over lanes, in the shape and the dtype of the result."""
        total = self.total
        for other in others:
            if other.total is not total:
                total += other.total
        if self.name != "potentials" and (others or self.dtype != np.float64):
            # Derivatives by weights can be beyond all numbers.
            limit = float(np.finfo(self.dtype).max)
            np.clip(total, -limit, limit, out=total)
        if self.name == "transitions" and total.dtype == np.float64:
            _transpose(total.reshape(-1, *total.shape[-2:]))
        return total.astype(self.dtype, copy=False).reshape(self.shape)


def _transpose(matrices: Floats) -> None:
    """Transpose matrices [n, K, K] in place."""
    K = matrices.shape[-1]
    together = max(1, (1 << 15) // max(1, K))
    for start in range(0, len(matrices), together):
        part = matrices[start : start + together]
        for k in range(K - 1):
            upper = part[:, k, k + 1 :].copy()
            part[:, k, k + 1 :] = part[:, k + 1 :, k]
            part[:, k + 1 :, k] = upper


def begin(sums: list[Sum], tiles: int, budget: int) -> int:
    """Make the totals of sums, in float64 where that fits a budget; return how many lanes do."""
    shared = sum(8 * math.prod(each.shape) for each in sums if not each.is_apart)
    lanes = max(1, min(_LANES, tiles, budget // max(1, shared)))
    for each in sums:
        each.begin(lanes * shared <= budget and not each.is_apart)
    return lanes
