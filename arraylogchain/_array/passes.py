"""What chains do to all entries of their states, between the matrix multiplies of two steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from arraylogchain._array.chains.accumulate import ChainSums
from arraylogchain._array.chains.states import State, part_of
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


class Weigher:
    """Multiplies states by exponentials of their steps' potentials, in one precision.

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
        self._buffer: Array | None = None
        self._block: tuple[int, Factors] | None = None
        self._try_narrow = True

    def weigh(self, product: State, time: int, out: Array) -> tuple[State, float, bool]:
        """Return products times the factors of a step in time.

        Parameters
        ----------
        product : State
            Of the first rows, or groups, of the tile.
        time : int
        out : array
            For the values, in memory of its own.

        Returns
        -------
        state : State
        largest : float
            What no factor is above.
        has_zeros : bool
            Whether there may be factors that are 0, or are taken for 0.
        """
        ctx, axis = self.ctx, self.tile.select_axis
        lanes, (factors, at) = slice(int(out.shape[axis])), self._at(time)

        def of_step(x: Array) -> Array:
            return part_of(x, lanes, axis)[:, :, at, :]

        ctx.apply(ctx.xp.multiply, product.values, of_step(factors.values), out=out)
        support, offset = product.support, product.offset
        if factors.finite is not None:
            finite = of_step(factors.finite)
            support = finite if support is None else support & finite
        if factors.offset is not None:
            offset = offset + of_step(factors.offset)
        low, high = product.low * factors.least, product.high * factors.largest
        state = State(out, product.exponent, offset, support, False, low, high)
        return state, factors.largest, factors.finite is not None

    def _at(self, time: int) -> tuple[Factors, int]:
        """Return factors that have a step in time, and its place among them."""
        number, place = divmod(time, self.together)
        if self._block is None or self._block[0] != number:
            stop = min(time - place + self.together, self.tile.num_steps)
            self._block = number, self._of(slice(time - place, stop))
        return self._block[1], place

    def _of(self, steps: slice) -> Factors:
        xp, ctx, precision = self.ctx.xp, self.ctx, self.precision
        given = self.tile.potentials_of(steps)
        x = ctx.load(given, precision)
        if self._buffer is None or tuple(self._buffer.shape) != tuple(x.shape):
            self._buffer = ctx.empty(tuple(x.shape), ctx.dtype(precision))
        values = self._buffer
        if self._try_narrow:
            ctx.apply(xp.exp, x, out=values)
            # Looked at after the exponential, which leaves contiguous arrays. NaN compares False.
            low, high = float(xp.min(values)), float(xp.max(values))
            bound = math.exp(_NARROW[precision.name])
            if 1.0 / bound <= low and high <= bound:
                return Factors(None, values, None, low, max(1.0, high))
            self._try_narrow = False
        shift = whole_maximum(ctx, x, -1, precision)
        ctx.apply(xp.subtract, x, shift, out=values)
        ctx.apply(xp.exp, values, out=values)
        finite = None
        if not float(xp.min(values)) >= precision.tiny:
            # Subnormal numbers have lost digits.
            values[...] = xp.where(values < precision.tiny, xp.zeros_like(values), values)
            finite = given > -math.inf
        return Factors(finite, values, ctx.load(shift, ctx.widest), 0.0, math.exp(0.5))


class PosteriorWeigher:
    """Multiplies states of both directions, for the posterior at their step.

    Parameters
    ----------
    tile : Tile
    sums : ChainSums
        Where the gradient with respect to potentials goes, if that is wanted.
    precision : Precision
    """

    def __init__(self, tile: Tile, sums: ChainSums, precision: Precision) -> None:
        self.tile, self.ctx, self.sums, self.precision = tile, tile.ctx, sums, precision

    def weigh(
        self, time: int, a: Array, b: Array, g: Array, bounds: tuple[float, float], out: Array
    ) -> bool:
        """Add g a b / sum(a b) to the gradient of a step's potentials; g a / sum(a b) goes to out.

        Parameters
        ----------
        time : int
        a, b : array [groups, rows, K]
        g : array [groups, rows, 1]
        bounds : tuple of float
            What all rows' sums have to lie within; if they do not, nothing is added.
        out : array [groups, rows, K]

        Returns
        -------
        bool
            Whether they do.
        """
        xp, ctx = self.ctx.xp, self.ctx
        total = xp.vecdot(a, b)[..., None]
        if not (float(xp.min(total)) >= bounds[0] and float(xp.max(total)) <= bounds[1]):
            return False
        scale = g / total
        if self.sums.potentials is not None:
            ctx.apply(xp.multiply, a, b, out=out)
            self.sums.add_potentials(self.part(a), time, out, scale)
        ctx.apply(xp.multiply, a, scale, out=out)
        return True

    def part(self, values: Array) -> Tile:
        """Return the tile of the rows, or groups, that values [groups, rows, K] are of."""
        return self.tile.part(slice(int(values.shape[self.tile.select_axis])))
