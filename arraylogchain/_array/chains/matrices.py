"""One step's matrices, scaled such that their products with states stay in range."""

from __future__ import annotations

import math

from arraylogchain._array.chains.states import power_to, scale_by_powers
from arraylogchain._array.chains.tiles import Tile
from arraylogchain._context import Array, Context, Precision, whole_maximum
from arraylogchain._fold import chunks

# Linear matrices are used as they are while their largest entry lies within these bounds.
LARGEST = 2.0**4
_LARGEST_AT_LEAST = 2.0**-10


class Matrix:
    """Weights ``factor * 2**-power * exp(shift)``, [groups, K, K].

    Attributes
    ----------
    given : array
        The weights or their logarithms, as given.
    power, shift : array [groups, 1, 1] or None
        ``factor = given * 2**power``, or ``factor = exp(given - shift)``: integers such that no
        factor is above LARGEST. None for zero.
    least, most : float
        Bounds on the factors.
    positive : bool
        Whether every factor is a normal number above zero.
    panels : list of slice
        Columns of which the factors may be copied together.
    """

    def __init__(
        self, ctx: Context, given: Array, in_logs: bool, precision: Precision, elements: int
    ) -> None:
        self.ctx, self.given, self.in_logs, self.precision = ctx, given, in_logs, precision
        xp, (groups, inner, width) = ctx.xp, given.shape
        low, high = float(xp.min(given)), float(xp.max(given))
        as_given = not in_logs and low >= 0 and _LARGEST_AT_LEAST <= high <= LARGEST
        if not as_given or given.dtype != ctx.dtype(precision):
            width = max(1, min(width, elements // (groups * inner)))
        self.panels = list(chunks(inner, width))
        self.power = self.shift = None
        self.positive, self.least = False, 0.0
        self.most = LARGEST if high < math.inf else math.inf  # inf for NaN
        # A negative weight, which NaN takes the place of.
        self.invalid = not (in_logs or low >= 0)
        if in_logs:
            self.shift = whole_maximum(ctx, given, (-2, -1), precision)
            # Of several groups, each has its own shift, at most `high` + 1/2.
            self.positive = low - high >= math.log(precision.tiny) + 2.0
            self.least = math.exp(low - high - 0.5) if self.positive else 0.0
        elif as_given:
            self.positive, self.least, self.most = low >= precision.tiny, low, high
        else:
            top = ctx.load(xp.max(given, axis=(-2, -1), keepdims=True), precision)
            self.power = power_to(ctx, top, 0.0)
        self._factor: Array | None = None
        self._lossy: bool | None = None
        self._spread: Array | None = None

    def multiply(self, values: Array, out: Array) -> Array:
        """Write values @ factor, for values [groups, rows, K], into `out`, and return it."""
        for j in self.panels:
            self.ctx.apply(self.ctx.xp.matmul, values, self.factor(j), out=out[:, :, j])
        return out

    def reached(self, support: Array | None) -> Array | None:
        """Return which entries of a product are nonzero, given which of its row are; None: all."""
        xp, ctx = self.ctx.xp, self.ctx
        if self.positive and support is None:
            return None
        parts = []
        for j in self.panels:
            open_edges = self._support(j)
            if support is None:
                parts.append(xp.any(open_edges, axis=-2, keepdims=True))
            else:
                hits = xp.matmul(xp.astype(support, xp.float32), xp.astype(open_edges, xp.float32))
                parts.append(hits > 0)
        return parts[0] if len(parts) == 1 else ctx.xp.concat(parts, axis=-1)

    @property
    def lossy(self) -> bool:
        """Whether the factor of a positive weight is below the smallest normal number."""
        if self._lossy is None:
            xp, tiny = self.ctx.xp, self.precision.tiny
            panels = [] if self.positive else self.panels
            self._lossy = any(
                bool(xp.any(self._support(j) & (self.factor(j) < tiny))) for j in panels
            )
        return self._lossy

    def factor(self, j: slice) -> Array:
        """Return the factors of some columns, [groups, K, len(j)]; if they fit, all are kept."""
        if self._factor is not None:
            return self._factor[:, :, j]
        factor = self._computed(j)
        if j == self.panels[0] and len(self.panels) == 1:
            self._factor = factor
        return factor

    def _computed(self, j: slice) -> Array:
        xp = self.ctx.xp
        factor = self.ctx.load(self.given[:, :, j], self.precision)
        if self.in_logs:
            return xp.exp(factor - self.shift)
        if self.invalid:
            factor = xp.where(factor < 0, xp.full_like(factor, math.nan), factor)
        if self.power is not None:
            factor = scale_by_powers(self.ctx, factor, self.power, self.precision)
        return factor

    def _support(self, j: slice) -> Array:
        given = self.given[:, :, j]
        return given > -math.inf if self.in_logs else given != 0

    def spread(self) -> Array:
        """Return how far the weights into one state can differ, [groups, 1, 1].

        The largest ratio P[k, j] / P[l, j] over all k, l, j. For any nonnegative weights w, the
        entries of P @ w then lie within this ratio of each other.
        """
        if self._spread is None:
            xp, ctx = self.ctx.xp, self.ctx
            top = ctx.load(xp.max(self.given, axis=-2, keepdims=True), ctx.widest)
            low = ctx.load(xp.min(self.given, axis=-2, keepdims=True), ctx.widest)
            nothing = top == (-math.inf if self.in_logs else 0.0)
            ratio = xp.exp(top - low) if self.in_logs else top / low
            # A column of zeros adds nothing to any entry.
            ratio = xp.where(nothing, xp.ones_like(ratio), ratio)
            self._spread = xp.max(ratio, axis=-1, keepdims=True)
        return self._spread


class Matrices:
    """The matrices of a tile's steps; those of all steps are made ready once."""

    def __init__(self, tile: Tile, precision: Precision, panel: int) -> None:
        self.tile, self.precision, self.panel = tile, precision, panel
        self._current: tuple[tuple[int, int], Matrix] | None = None

    def at(self, i: int) -> Matrix:
        """Return the matrices that lead to step i of a sweep."""
        tile = self.tile
        which = tile.matrix_number(i), 0 if tile.select_axis else tile.count_moves(i)
        if self._current is None or self._current[0] != which:
            in_logs, given = tile.chain.transitions_in_logs, tile.matrix(i)
            self._current = which, Matrix(tile.ctx, given, in_logs, self.precision, self.panel)
        return self._current[1]
