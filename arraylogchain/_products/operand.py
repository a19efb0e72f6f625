"""Operands of a certified product: logarithms or linear weights, their shifts and scales.

A *line* is a row of the left operand (side 0) or a column of the right one (side 1). Lines are
shifted by integers, so that shifts add exactly.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

from arraylogchain._core.axes import Box, boxes, within
from arraylogchain._core.context import Array, Context, is_transposed
from arraylogchain._core.precision import Precision
from arraylogchain._core.scaled import add_scale, whole_part

_EVERY = slice(None)
# Linear matrices whose largest entries are within these bounds are not scaled.
_UNSCALED_RANGE = (2.0**-10, 2.0)


class PullbackInputs(NamedTuple):
    """The operands of a product, the product, and the cotangent of it."""

    a: Array
    b: Array
    out: Array
    g: Array


@dataclass(slots=True)
class Operand:
    """An operand of a certified product: logarithms or linear weights, [batch, m, n].

    Each line of logarithms has a shift, which the product adds to its results. A matrix that is
    multiplied repeatedly also has a scale that is kept apart, so that neither large logarithms nor
    tiny weights are rounded. It is prepared once::

        right = Operand(ctx, matrix, 1, is_log=False, common=True)
        right.cache_weights()                                  # its weights, if they fit
        scale = right.scale                           # (shift, exponents), or None for 0
        for logs in states:                           # near 0 in every row
            certified_product(ctx, Operand(ctx, logs, 0, shifts=False), right, out, workspace)
            # out = log(exp(logs) @ matrix) - shift - exponents * log(2)

    Parameters
    ----------
    ctx : Context
    values : array [batch, m, n]
        Of any dtype and strides; not changed.
    side : int
        0 for a left operand, whose contracted axis is the last; 1 for a right one.
    is_log : bool
        Whether values are logarithms. Linear weights only have a common scale, a power of two; if
        they are near 1 they are used as they are.
    shifts : bool
        Whether lines are shifted; False for logarithms that are known to be near 0.
    common : bool
        Whether each matrix [m, n] has a scale that is not added to results.
    finite : bool
        Whether all weights of a line with +inf or NaN are 0, as in gradients.

    Attributes
    ----------
    shift : array or None
        Integers: nats of every line of logarithms, [batch, m, 1] or [batch, 1, n], or powers of two
        of linear weights, [batch, 1, 1].
    common_scale : array [batch, 1, 1] or None
        The part of the shift that is not added to results.
    cached_weights : array or None
        All weights, after `cache_weights`.
    """

    ctx: Context
    values: Array
    side: int
    is_log: bool = True
    shifts: bool = True
    common: bool = False
    finite: bool = False
    precision: Precision = None  # type: ignore[assignment]
    shift: Array = None
    common_scale: Array = None
    cached_weights: Array = None
    largest: Array = None

    def __post_init__(self) -> None:
        ctx, xp = self.ctx, self.ctx.xp
        self.precision = self.precision or ctx.precision
        if not self.shifts:
            return
        is_linear = self.common and not self.is_log
        if is_linear and ctx.are_between(xp.max(self.values, axis=(-2, -1)), *_UNSCALED_RANGE):
            return
        maxima = ctx.load(self.maxima, self.precision)
        if self.common:
            # Lines with +inf or NaN do not depend on the scale.
            top = xp.where(xp.isfinite(maxima), maxima, -math.inf)
            top = xp.max(top, axis=(-2, -1), keepdims=True)
            if is_linear:
                # Whether a matrix is scaled does not depend on the others: a step lacks some.
                low, high = _UNSCALED_RANGE
                top = xp.where((top >= low) & (top <= high), 0.0, xp.log2(top))
                maxima = top
            self.common_scale = whole_part(xp, top)
        self.shift = whole_part(xp, maxima)
        if self.finite:
            self.shift = xp.where(self.maxima < math.inf, self.shift, math.inf)

    @property
    def scale(self) -> tuple[Array, Array] | None:
        """Shift and exponent [batch, 1, 1] that are kept apart, or None, in widest precision."""
        if self.common_scale is None:
            return None
        base = self.ctx.load(self.common_scale, self.ctx.widest)
        zero = self.ctx.xp.zeros_like(base)
        return (base, zero) if self.is_log else (zero, base)

    @property
    def maxima(self) -> Array:
        """Largest entry of every line, [batch, m, 1] or [batch, 1, n]."""
        if self.largest is None:
            axis = -2 if self.side else -1
            self.largest = self.ctx.xp.max(self.values, axis=axis, keepdims=True)
        return self.largest

    @property
    def offset(self) -> Array | None:
        """Number to add to the logarithm of the sums of every line, or None."""
        if self.shift is None or not self.is_log:
            return None
        return self.shift if self.common_scale is None else self.shift - self.common_scale

    def weights(self, k: slice = _EVERY) -> Array:
        """Return the weights of a slice of terms."""
        if self.cached_weights is not None:
            return self._terms(self.cached_weights, k)
        x, ctx, xp = self._terms(self.values, k), self.ctx, self.ctx.xp
        if self.is_log:
            weights = _exponentials(ctx, x, self.shift, self.precision)
            if self.finite and not bool(xp.all(self.maxima < math.inf)):
                weights[xp.isnan(weights)] = 0.0
            return weights
        x = ctx.load(x, self.precision)
        x = x if self.shift is None else ctx.scaled(x, -self.shift)
        # On the host, negative weights have raised before.
        return x if ctx.is_numpy else xp.where(x < 0, math.nan, x)

    def _terms(self, x: Array, k: slice) -> Array:
        return x[:, k, :] if self.side else x[:, :, k]

    def cache_weights(self) -> Operand:
        """Compute all weights and cache them."""
        self.cached_weights = self.weights()
        return self

    def with_common_scale(self) -> Array:
        """Return all weights relative to the common scale alone."""
        if self.offset is None:
            return self.weights()
        xp = self.ctx.xp
        # Offsets of zero lines may be large.
        return self.weights() * xp.exp(xp.clip(self.offset, max=0.0))

    def shifted_logs(self, k: slice = _EVERY) -> Array:
        """Return logarithms of a slice of terms minus their shifts, if these do not overflow."""
        x, xp = self.ctx.load(self._terms(self.values, k), self.precision), self.ctx.xp
        limit = 2.0**self.precision.top * self.precision.eps / 4
        return x - xp.where(xp.abs(self.shift) <= limit, self.shift, 0.0)

    def logs(self, k: slice = _EVERY) -> Array:
        """Return logarithms of a slice of terms minus the common scale, in the precision."""
        ctx, xp = self.ctx, self.ctx.xp
        x = ctx.load(self._terms(self.values, k), self.precision)
        if self.is_log:
            return x if self.common_scale is None else x - self.common_scale
        # The exponent is split off, as it would be rounded in the logarithm of a tiny weight.
        exponents = whole_part(xp, xp.log2(x))
        remainder = exponents if self.common_scale is None else exponents - self.common_scale
        return add_scale(xp.log(ctx.scaled(x, -exponents)), 0.0, remainder)

    def present(self, k: slice) -> Array:
        """Return 1 for terms of positive weight, else 0."""
        zero = -math.inf if self.is_log else 0.0
        return self.ctx.xp.astype(self._terms(self.values, k) != zero, self.ctx.xp.float32)

    def part(self, box: Box, precision: Precision | None = None) -> Operand:
        """Return the part for a box [batch, rows, cols] of a product, in a precision if given."""
        box = (box[0], _EVERY, box[2]) if self.side else (box[0], box[1], _EVERY)

        def lines(x: Array) -> Array:
            return None if x is None else self.ctx.load(x[within(box, x.shape)], part.precision)

        part = copy(self)
        part.values, part.cached_weights = self.values[box], None
        part.precision = precision or self.precision
        part.largest, part.shift = lines(self.largest), lines(self.shift)
        part.common_scale = lines(self.common_scale)
        return part


def _exponentials(ctx: Context, x: Array, shift: Array | None, precision: Precision) -> Array:
    """Return exp(x - shift) for x [batch, m, n], in blocks that stay in cache."""
    xp = ctx.xp
    if is_transposed(x):
        # The memory order is kept: strided access would cost more than the exponentials.
        turned = None if shift is None else shift.mT
        return _exponentials(ctx, x.mT, turned, precision).mT
    result = ctx.empty(tuple(x.shape), ctx.dtype(precision))
    for box in boxes(result.shape, ctx.block):
        part, values = result[box], ctx.load(x[box], precision)
        if shift is not None:
            ctx.apply(xp.subtract, values, shift[within(box, shift.shape)], out=part)
            values = part
        ctx.exp(values, part)
    return result
