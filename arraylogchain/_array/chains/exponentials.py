"""Exponentials of potentials, which scaled states are weighted with, a few steps at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from arraylogchain._array.chains.tiles import Tile
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
        self.current: tuple[int, Factors] | None = None
        self.try_narrow = True

    def at(self, time: int) -> tuple[Factors, int]:
        """Return factors that have a step in time, and its place among them."""
        number, place = divmod(time, self.together)
        if self.current is None or self.current[0] != number:
            stop = min(time - place + self.together, self.tile.num_steps)
            self.current = number, self._of(slice(time - place, stop))
        return self.current[1], place

    def _of(self, steps: slice) -> Factors:
        xp, ctx, precision = self.ctx.xp, self.ctx, self.precision
        given = self.tile.potentials_of(steps)
        x = ctx.load(given, precision)
        values = self._room(x)
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

    def _room(self, x: Array) -> Array:
        """Return where factors go, reusing memory: fresh memory costs time."""
        if self.buffer is None or tuple(self.buffer.shape) != tuple(x.shape):
            self.buffer = self.ctx.empty(tuple(x.shape), self.ctx.dtype(self.precision))
        return self.buffer
