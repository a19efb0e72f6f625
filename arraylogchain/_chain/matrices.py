"""One step's matrices, multiplied with scaled states in panels of columns."""

from __future__ import annotations

import math
from dataclasses import dataclass

from arraylogchain._arrays import Array, Context, Precision, whole_maximum
from arraylogchain._chain.states import power_to, scale_by_powers
from arraylogchain._fold import chunks

# Linear matrices are used as they are while their largest entry lies within these bounds.
LARGEST = 2.0**4
_LARGEST_AT_LEAST = 2.0**-10


@dataclass(slots=True)
class Matrix:
    """Weights ``factor * 2**exponent * exp(offset)``, [groups, K, cols].

    Attributes
    ----------
    given : array
        The weights or their logarithms, as given.
    power, shift : array [groups, 1, 1] or None
        ``factor = given * 2**power``, or ``factor = exp(given - shift)``: whole numbers such that
        no factor is above LARGEST. None for zero.
    least, most : float
        Bounds on the factors.
    positive : bool
        Whether every factor is a normal number above zero.
    lossy : bool
        Whether a factor of a positive weight is below the smallest normal number.
    invalid : bool
        Whether a weight may be negative; NaN then takes its place.
    width : int
        Columns of a panel; copies of a matrix are made by panels.
    """

    ctx: Context
    given: Array
    in_logs: bool
    precision: Precision
    width: int
    power: Array | None = None
    shift: Array | None = None
    least: float = 0.0
    most: float = LARGEST
    positive: bool = True
    lossy: bool = False
    invalid: bool = False

    def multiply(self, values: Array, out: Array | None = None) -> Array:
        """Return values @ factor for values [groups, rows, K], in `out` if given."""
        xp, ctx = self.ctx.xp, self.ctx
        groups, rows, _ = values.shape
        cols = int(self.given.shape[-1])
        if out is None:
            out = ctx.empty((groups, rows, cols), ctx.dtype(self.precision))
        for j in chunks(cols, self.width):
            ctx.apply(xp.matmul, values, self.factor(j), out=out[:, :, j])
        return out

    def multiply_transposed(self, values: Array, out: Array) -> Array:
        """Write values @ factor.T for values [groups, rows, cols] into `out`, and return it."""
        xp, ctx = self.ctx.xp, self.ctx
        for j in chunks(int(self.given.shape[-1]), self.width):
            turned = xp.matrix_transpose(self.factor(j))
            if j.start == 0:
                ctx.apply(xp.matmul, values[:, :, j], turned, out=out)
            else:
                ctx.apply(xp.add, out, xp.matmul(values[:, :, j], turned), out=out)
        return out

    def reached(self, alive: Array | None) -> Array | None:
        """Return which entries of a product are nonzero, given which of its row are; None: all."""
        xp, dtype = self.ctx.xp, self.ctx.xp.float32
        if self.positive:
            if alive is None:
                return None
            reached = xp.any(alive, axis=-1, keepdims=True)
            return xp.broadcast_to(reached, (*alive.shape[:-1], self.given.shape[-1]))
        parts = []
        for j in chunks(int(self.given.shape[-1]), self.width):
            support = self._support(j)
            if alive is None:
                parts.append(xp.any(support, axis=-2, keepdims=True))
            else:
                hits = xp.matmul(xp.astype(alive, dtype), xp.astype(support, dtype))
                parts.append(hits > 0)
        return xp.concat(parts, axis=-1)

    def smallest_positive(self) -> float:
        """Return the smallest factor of a nonzero weight."""
        xp = self.ctx.xp
        smallest = math.inf
        for j in chunks(int(self.given.shape[-1]), self.width):
            factor = self.factor(j)
            least = xp.min(xp.where(self._support(j), factor, xp.full_like(factor, math.inf)))
            smallest = min(smallest, float(least))
        return smallest

    def factor(self, j: slice) -> Array:
        """Return the factors of some columns, [groups, K, cols]."""
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


def prepare(
    ctx: Context, given: Array, in_logs: bool, precision: Precision, elements: int
) -> Matrix:
    """Make the matrices [groups, K, cols] of a step ready; panels hold at most `elements`."""
    xp = ctx.xp
    groups, inner, cols = given.shape
    width = max(1, min(int(cols), elements // (int(groups) * int(inner))))
    matrix = Matrix(ctx, given, in_logs, precision, width)
    low, high = float(xp.min(given)), float(xp.max(given))
    if in_logs:
        matrix.shift = whole_maximum(ctx, given, (-2, -1), precision)
        least = math.log(precision.tiny) + 2.0
        # Of several groups, each has its own shift, at most `high` + 1/2.
        matrix.positive = low - high >= least
        if matrix.positive:
            matrix.least = math.exp(low - high - 0.5)
    else:
        matrix.invalid = not low >= 0
        if not _LARGEST_AT_LEAST <= high <= LARGEST:
            top = ctx.load(xp.max(given, axis=(-2, -1), keepdims=True), precision)
            matrix.power = power_to(ctx, top, 0.0)
            matrix.positive = False
        else:
            matrix.positive = low >= precision.tiny
            matrix.least, matrix.most = low, high
    if not matrix.positive:
        matrix.lossy = matrix.smallest_positive() < precision.tiny
    return matrix


def spread(ctx: Context, given: Array, in_logs: bool) -> Array:
    """Return how far the weights into one state can differ, [groups, 1, 1].

    The largest ratio P[k, j] / P[l, j] over all k, l, j. For any nonnegative weights w, the entries
    of P @ w then lie within this ratio of each other.
    """
    xp = ctx.xp
    top = ctx.load(xp.max(given, axis=-2, keepdims=True), ctx.widest)
    low = ctx.load(xp.min(given, axis=-2, keepdims=True), ctx.widest)
    nothing = top == (-math.inf if in_logs else 0.0)
    ratio = xp.exp(top - low) if in_logs else top / low
    # A column of zeros adds nothing to any entry.
    return xp.max(xp.where(nothing, xp.ones_like(ratio), ratio), axis=-1, keepdims=True)
