"""Exponentials of potentials, which scaled states are weighted with, a few steps at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from arraylogchain._array.chains.tiles import Kept, Tile
from arraylogchain._context import Array, Precision, whole_maximum

# Potentials within these bounds of 0 need no shift.
_NARROW = {"float32": 20.0, "float64": 200.0}


@dataclass(slots=True)
class Factors:
    """exp(potentials) of some steps, as ``values * exp(offset)``."""

    finite: Array | None  # where potentials are not -inf, [groups, rows, steps, K]; None: all are
    values: Array
    offset: Array | None  # [groups, rows, steps, 1], integers; None for zero
    least: float  # bounds on the values
    largest: float


class Exponentials:
    """Makes factors for the steps of a tile, in one precision.

    Parameters
    ----------
    tile : Tile
    precision : Precision
    together : int
        Steps whose potentials are exponentiated together.
    """

    def __init__(self, tile: Tile, precision: Precision, together: int) -> None:
        self.tile, self.precision, self.together = tile, precision, together
        self.ctx = tile.ctx
        self.buffer: Array | None = None
        self.blocks: dict[int, Factors] = {}
        self.try_narrow = True

    def at(self, time: int) -> tuple[Factors, int]:
        """Return factors that have a step in time, and its place among them."""
        number, place = divmod(time, self.together)
        kept = self._kept()
        blocks = self.blocks if kept is None else kept.blocks
        if number not in blocks:
            self.blocks.clear()
            stop = min(time - place + self.together, self.tile.num_steps)
            blocks[number] = self._of(slice(time - place, stop))
        return blocks[number], place

    def _kept(self) -> Kept | None:
        """Return where factors are kept, if those of this precision are."""
        kept, dtype = self.tile.kept, self.ctx.dtype(self.precision)
        return None if kept is None or kept.room is None or kept.room.dtype != dtype else kept

    def _of(self, steps: slice) -> Factors:
        xp, ctx, precision = self.ctx.xp, self.ctx, self.precision
        given = self.tile.potentials_of(steps)
        x = ctx.load(given, precision)
        values = self._room(x, steps)
        if self.try_narrow:
            ctx.apply(xp.exp, x, out=values)
            # Looked at after the exponential, which leaves contiguous arrays. NaN compares False.
            low, high = float(xp.min(values)), float(xp.max(values))
            bound = math.exp(_NARROW[precision.name])
            if 1.0 / bound <= low and high <= bound:
                return Factors(None, values, None, low, max(1.0, high))
            self.try_narrow = False
        shift = whole_maximum(ctx, x, -1, precision)
        ctx.apply(xp.subtract, x, shift, out=values)
        ctx.apply(xp.exp, values, out=values)
        finite = None
        if not float(xp.min(values)) >= precision.tiny:
            # Subnormal numbers have lost digits.
            values[...] = xp.where(values < precision.tiny, xp.zeros_like(values), values)
            finite = given > -math.inf
        return Factors(finite, values, ctx.load(shift, ctx.widest), 0.0, math.exp(0.5))

    def _room(self, x: Array, steps: slice) -> Array:
        """Return where factors go, reusing memory: fresh memory costs time."""
        kept = self._kept()
        if kept is not None and kept.room is not None:
            return kept.room[:, :, steps, :]
        if self.buffer is None or tuple(self.buffer.shape) != tuple(x.shape):
            self.buffer = self.ctx.empty(tuple(x.shape), self.ctx.dtype(self.precision))
        return self.buffer
