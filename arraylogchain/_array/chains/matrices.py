"""One step's matrices, scaled such that their products with states stay in range."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from arraylogchain._array.chains.states import power_to, scale_by_powers
from arraylogchain._array.chains.tiles import Tile
from arraylogchain._context import Array, Context, Precision, whole_maximum
from arraylogchain._fold import chunks

# Linear matrices are used as they are while their largest entry lies within these bounds.
LARGEST = 2.0**4
_LARGEST_AT_LEAST = 2.0**-10


@dataclass(slots=True)
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
    invalid : bool
        Whether a weight may be negative; NaN then takes its place.
    panels : list of slice
        Columns of which the factors may be copied together.
    """

    ctx: Context
    given: Array
    in_logs: bool
    precision: Precision
    panels: list[slice]
    power: Array | None = None
    shift: Array | None = None
    least: float = 0.0
    most: float = LARGEST
    positive: bool = True
    invalid: bool = False
    _factor: Array | None = None
    _lossy: bool | None = None
    _spread: list[Array] = field(default_factory=list)

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

    def logs(self, j: slice, precision: Precision) -> tuple[Array, Array]:
        """Return logs [groups, K, len(j)] of some columns, and integers [groups, 1, 1] to add.

        Of linear weights these are the logs of `weights * 2**power`.
        """
        xp, ctx = self.ctx.xp, self.ctx
        x = ctx.load(self.given[:, :, j], precision)
        if self.in_logs:
            shift = whole_maximum(ctx, self.given, (-2, -1), precision)
            return x - shift, shift
        # Zero has the logarithm -inf; a negative weight has none, and gives NaN.
        own = power_to(ctx, x, 0)
        logs = xp.log(scale_by_powers(ctx, x, own, precision))
        total = -own if self.power is None else self.power - own
        logs = logs + total * math.log(2.0)
        logs = xp.where(x == 0, xp.full_like(x, -math.inf), logs)
        return logs, xp.zeros_like(x[:, :1, :1])

    def _support(self, j: slice) -> Array:
        given = self.given[:, :, j]
        return given > -math.inf if self.in_logs else given != 0

    def spread(self) -> Array:
        """Return how far the weights into one state can differ, [groups, 1, 1].

        The largest ratio P[k, j] / P[l, j] over all k, l, j. For any nonnegative weights w, the
        entries of P @ w then lie within this ratio of each other.
        """
        if not self._spread:
            xp, ctx = self.ctx.xp, self.ctx
            top = ctx.load(xp.max(self.given, axis=-2, keepdims=True), ctx.widest)
            low = ctx.load(xp.min(self.given, axis=-2, keepdims=True), ctx.widest)
            nothing = top == (-math.inf if self.in_logs else 0.0)
            ratio = xp.exp(top - low) if self.in_logs else top / low
            # A column of zeros adds nothing to any entry.
            ratio = xp.where(nothing, xp.ones_like(ratio), ratio)
            self._spread.append(xp.max(ratio, axis=-1, keepdims=True))
        return self._spread[0]


def prepare(
    ctx: Context, given: Array, in_logs: bool, precision: Precision, elements: int
) -> Matrix:
    """Make the matrices [groups, K, K] of a step ready; panels hold at most `elements`."""
    xp = ctx.xp
    groups, inner, cols = (int(n) for n in given.shape)
    low, high = float(xp.min(given)), float(xp.max(given))
    as_given = not in_logs and low >= 0 and _LARGEST_AT_LEAST <= high <= LARGEST
    if as_given and given.dtype == ctx.dtype(precision):
        # Nothing is copied.
        width = cols
    else:
        width = max(1, min(cols, elements // (groups * inner)))
    matrix = Matrix(ctx, given, in_logs, precision, list(chunks(cols, width)))
    # False for NaN.
    matrix.most = LARGEST if high < math.inf else math.inf
    if in_logs:
        matrix.shift = whole_maximum(ctx, given, (-2, -1), precision)
        # Of several groups, each has its own shift, at most `high` + 1/2.
        matrix.positive = low - high >= math.log(precision.tiny) + 2.0
        matrix.least = math.exp(low - high - 0.5) if matrix.positive else 0.0
    elif as_given:
        matrix.positive, matrix.least, matrix.most = low >= precision.tiny, low, high
    else:
        matrix.invalid = not low >= 0
        top = ctx.load(xp.max(given, axis=(-2, -1), keepdims=True), precision)
        matrix.power = power_to(ctx, top, 0.0)
        matrix.positive = False
    return matrix


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
            self._current = which, prepare(tile.ctx, given, in_logs, self.precision, self.panel)
        return self._current[1]
