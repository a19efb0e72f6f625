"""One side of a product of exponentials: what is taken off, and the weights that are left.

A *line* is a row of the left operand (side 0) or a column of the right one (side 1), all of whose
entries are terms of the same sums. Lines are shifted by whole numbers, so that shifts add exactly.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass

from arraylogchain._core.axes import Box, within
from arraylogchain._core.context import Array, Context, is_transposed
from arraylogchain._core.precision import Precision
from arraylogchain._core.scaled import add_scale, whole_part

_EVERY = slice(None)
# Linear matrices whose largest entries are within these bounds are used as they are given.
_AS_GIVEN = (2.0**-10, 2.0)


@dataclass(slots=True)
class Factor:
    """Logs [batch, m, n], or linear weights, ready to be a factor of a certified product.

    Lines of logs have a shift each, which the product adds to its results. A matrix that many
    others are multiplied by has a scale as well, which is kept apart: so neither large logs nor
    tiny weights are rounded in. It is prepared once::

        right = Factor(ctx, matrix, 1, is_log=False, common=True)
        right.cache_weights()                                  # its weights, if they fit
        scale = right.scale                           # (shift, exponents), or None for 0
        for logs in states:                           # near 0 in every row
            certified_product(ctx, Factor(ctx, logs, 0, shifts=False), right, out, workspace)
            # out = log(exp(logs) @ matrix) - shift - exponents * log(2)

    Parameters
    ----------
    ctx : Context
    values : array [batch, m, n]
        Of any dtype and strides. Not changed.
    side : int
        0 for a left operand, whose terms are along the last axis; 1 for a right one.
    is_log : bool
        Whether values are logs. Linear weights have a common scale alone, a power of two; where
        they are near 1 they are used as they are.
    shifts : bool
        Whether lines have to be shifted: False for logs that are known to be near 0.
    common : bool
        Whether each [m, n] has a scale, which is not added to results.
    finite : bool
        Whether lines with +inf or NaN have weights 0, as in gradients, where they take no part.

    Attributes
    ----------
    shift : array or None
        The whole numbers that come off: nats of every line of logs, [batch, m, 1] or [batch, 1, n],
        or powers of two of linear weights, [batch, 1, 1].
    common_scale : array [batch, 1, 1] or None
        What of these is kept apart.
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
        if is_linear and ctx.are_between(xp.max(self.values, axis=(-2, -1)), *_AS_GIVEN):
            return
        maxima = ctx.load(self.maxima, self.precision)
        if self.common:
            # Lines with +inf or NaN come out so at any scale.
            top = xp.where(xp.isfinite(maxima), maxima, -math.inf)
            top = xp.max(top, axis=(-2, -1), keepdims=True)
            if is_linear:
                maxima = top = xp.log2(top)
            self.common_scale = whole_part(xp, top)
        self.shift = whole_part(xp, maxima)
        if self.finite:
            self.shift = xp.where(self.maxima < math.inf, self.shift, math.inf)

    @property
    def scale(self) -> tuple[Array, Array] | None:
        """What is kept apart, nats and powers of two, [batch, 1, 1], in the widest precision.

        None where that is nothing.
        """
        if self.common_scale is None:
            return None
        base = self.ctx.load(self.common_scale, self.ctx.widest)
        zero = self.ctx.xp.zeros_like(base)
        return (base, zero) if self.is_log else (zero, base)

    @property
    def maxima(self) -> Array:
        """The largest entry of every line, as given, [batch, m, 1] or [batch, 1, n]."""
        if self.largest is None:
            axis = -2 if self.side else -1
            self.largest = self.ctx.xp.max(self.values, axis=axis, keepdims=True)
        return self.largest

    @property
    def offset(self) -> Array | None:
        """What to add to the logs of sums for every line, if there is something."""
        if self.shift is None or not self.is_log:
            return None
        return self.shift if self.common_scale is None else self.shift - self.common_scale

    def weights(self, k: slice = _EVERY) -> Array:
        """Return the weights of some terms."""
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
        # Where values can be read, nothing negative comes here.
        return x if ctx.is_numpy else xp.where(x < 0, math.nan, x)

    def _terms(self, x: Array, k: slice) -> Array:
        return x[:, k, :] if self.side else x[:, :, k]

    def cache_weights(self) -> Factor:
        """Compute all weights, once, and keep them."""
        self.cached_weights = self.weights()
        return self

    def with_common_scale(self) -> Array:
        """Return all weights with no scale but the common one."""
        if self.offset is None:
            return self.weights()
        xp = self.ctx.xp
        return self.weights() * xp.exp(xp.clip(self.offset, max=0.0))  # more in lines of zeros

    def shifted_logs(self, k: slice = _EVERY) -> Array:
        """Return logs of some terms less what is taken off, where that does not overflow."""
        x, xp = self.ctx.load(self._terms(self.values, k), self.precision), self.ctx.xp
        limit = 2.0**self.precision.top * self.precision.eps / 4
        return x - xp.where(xp.abs(self.shift) <= limit, self.shift, 0.0)

    def logs(self, k: slice = _EVERY) -> Array:
        """Return the logs of some terms, less what is kept apart, in the precision."""
        ctx, xp = self.ctx, self.ctx.xp
        x = ctx.load(self._terms(self.values, k), self.precision)
        if self.is_log:
            return x if self.common_scale is None else x - self.common_scale
        # The logarithm of a tiny weight would be rounded at its size: its own power is taken off.
        exponents = whole_part(xp, xp.log2(x))
        remainder = exponents if self.common_scale is None else exponents - self.common_scale
        return add_scale(xp.log(ctx.scaled(x, -exponents)), 0.0, remainder)

    def present(self, k: slice) -> Array:
        """Return 1 for terms that are not zero weights, else 0."""
        zero = -math.inf if self.is_log else 0.0
        return self.ctx.xp.astype(self._terms(self.values, k) != zero, self.ctx.xp.float32)

    def part(self, box: Box, precision: Precision | None = None) -> Factor:
        """Return what a box [batch, rows, cols] of a product needs, in another precision or not."""
        box = (box[0], _EVERY, box[2]) if self.side else (box[0], box[1], _EVERY)

        def lines(x: Array) -> Array:
            return None if x is None else x[within(box, x.shape)]

        part, ctx = copy(self), self.ctx
        part.values, part.cached_weights, part.precision = (
            self.values[box],
            None,
            precision or self.precision,
        )
        part.largest, shift, base = (
            lines(x) for x in (self.largest, self.shift, self.common_scale)
        )
        part.shift = shift if shift is None else ctx.load(shift, part.precision)
        part.common_scale = base if base is None else ctx.load(base, part.precision)
        return part


def _exponentials(ctx: Context, x: Array, shift: Array | None, precision: Precision) -> Array:
    """Return exp(x - taken) for x [batch, m, n], in blocks that stay in cache."""
    xp = ctx.xp
    if is_transposed(x):
        # Keep the memory order: strided access would cost more than the exponentials.
        turned = None if shift is None else shift.mT
        return _exponentials(ctx, x.mT, turned, precision).mT
    result = ctx.empty(tuple(x.shape), ctx.dtype(precision))
    for box in ctx.blocks(result.shape):
        part, values = result[box], ctx.load(x[box], precision)
        if shift is not None:
            ctx.apply(xp.subtract, values, shift[within(box, shift.shape)], out=part)
            values = part
        ctx.exp(values, part)
    return result
