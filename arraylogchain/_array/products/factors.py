"""One side of a product of exponentials: what is taken off, and the weights that are left.

A *line* is a row of the left operand (side 0) or a column of the right one (side 1), all of whose
entries are terms of the same sums. Lines are shifted by whole numbers, so that shifts add exactly.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass

from arraylogchain._context import Array, Context, Precision, add_scale, is_transposed, whole_part
from arraylogchain._fold import Box, within

_EVERY = slice(None)
# Linear matrices whose largest entries are within these bounds are used as they are given.
_AS_GIVEN = (2.0**-10, 2.0)


@dataclass(slots=True)
class Factor:
    """Logs [batch, m, n], or linear weights, ready to be a factor of a certified product.

    Lines of logs have a shift each, which the product adds to its results. A matrix that many
    others are multiplied by has a scale as well, which is kept apart: so neither large logs nor
    tiny weights are rounded in. It is prepared once::

        right = Factor(ctx, matrix, 1, in_logs=False, common=True)
        right.keep()                                  # its weights, if they fit
        scale = right.scale                           # (shift, powers), or None for 0
        for logs in states:                           # near 0 in every row
            certified_product(ctx, Factor(ctx, logs, 0, shifts=False), right, out, workspace)
            # out = log(exp(logs) @ matrix) - shift - powers * log(2)

    Parameters
    ----------
    ctx : Context
    values : array [batch, m, n]
        Of any dtype and strides. Not changed.
    side : int
        0 for a left operand, whose terms are along the last axis; 1 for a right one.
    in_logs : bool
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
    taken : array or None
        The whole numbers that come off: nats of every line of logs, [batch, m, 1] or [batch, 1, n],
        or powers of two of linear weights, [batch, 1, 1].
    base : array [batch, 1, 1] or None
        What of these is kept apart.
    kept : array or None
        All weights, after `keep`.
    """

    ctx: Context
    values: Array
    side: int
    in_logs: bool = True
    shifts: bool = True
    common: bool = False
    finite: bool = False
    precision: Precision = None  # type: ignore[assignment]
    taken: Array = None
    base: Array = None
    kept: Array = None
    largest: Array = None

    def __post_init__(self) -> None:
        ctx, xp = self.ctx, self.ctx.xp
        self.precision = self.precision or ctx.precision
        if not self.shifts:
            return
        is_linear = self.common and not self.in_logs
        if is_linear and ctx.are_between(xp.max(self.values, axis=(-2, -1)), *_AS_GIVEN):
            return
        tops = ctx.load(self.maxima, self.precision)
        if self.common:
            # Lines with +inf or NaN come out so at any scale.
            top = xp.where(xp.isfinite(tops), tops, -math.inf)
            top = xp.max(top, axis=(-2, -1), keepdims=True)
            if is_linear:
                tops = top = xp.log2(top)
            self.base = whole_part(xp, top)
        self.taken = whole_part(xp, tops)
        if self.finite:
            self.taken = xp.where(self.maxima < math.inf, self.taken, math.inf)

    @property
    def scale(self) -> tuple[Array, Array] | None:
        """What is kept apart, nats and powers of two, [batch, 1, 1], in the widest precision.

        None where that is nothing.
        """
        if self.base is None:
            return None
        base = self.ctx.load(self.base, self.ctx.widest)
        nothing = self.ctx.xp.zeros_like(base)
        return (base, nothing) if self.in_logs else (nothing, base)

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
        if self.taken is None or not self.in_logs:
            return None
        return self.taken if self.base is None else self.taken - self.base

    def weights(self, k: slice = _EVERY) -> Array:
        """Return the weights of some terms."""
        if self.kept is not None:
            return self._terms(self.kept, k)
        x, ctx, xp = self._terms(self.values, k), self.ctx, self.ctx.xp
        if self.in_logs:
            weights = _exponentials(ctx, x, self.taken, self.precision)
            if self.finite and not bool(xp.all(self.maxima < math.inf)):
                weights[xp.isnan(weights)] = 0.0
            return weights
        x = ctx.load(x, self.precision)
        x = x if self.taken is None else ctx.scaled(x, -self.taken)
        # Where values can be read, nothing negative comes here.
        return x if ctx.is_numpy else xp.where(x < 0, math.nan, x)

    def _terms(self, x: Array, k: slice) -> Array:
        return x[:, k, :] if self.side else x[:, :, k]

    def keep(self) -> Factor:
        """Compute all weights, once, and keep them."""
        self.kept = self.weights()
        return self

    def even(self) -> Array:
        """Return all weights with no scale but the common one."""
        if self.offset is None:
            return self.weights()
        xp = self.ctx.xp
        return self.weights() * xp.exp(xp.clip(self.offset, max=0.0))  # more in lines of zeros

    def rest(self, k: slice = _EVERY) -> Array:
        """Return logs of some terms less what is taken off, where that does not overflow."""
        x, xp = self.ctx.load(self._terms(self.values, k), self.precision), self.ctx.xp
        limit = 2.0**self.precision.top * self.precision.eps / 4
        return x - xp.where(xp.abs(self.taken) <= limit, self.taken, 0.0)

    def logs(self, k: slice = _EVERY) -> Array:
        """Return the logs of some terms, less what is kept apart, in the precision."""
        ctx, xp = self.ctx, self.ctx.xp
        x = ctx.load(self._terms(self.values, k), self.precision)
        if self.in_logs:
            return x if self.base is None else x - self.base
        # The logarithm of a tiny weight would be rounded at its size: its own power is taken off.
        powers = whole_part(xp, xp.log2(x))
        rest = powers if self.base is None else powers - self.base
        return add_scale(xp.log(ctx.scaled(x, -powers)), 0.0, rest)

    def present(self, k: slice) -> Array:
        """Return 1 for terms that are not zero weights, else 0."""
        nothing = -math.inf if self.in_logs else 0.0
        return self.ctx.xp.astype(self._terms(self.values, k) != nothing, self.ctx.xp.float32)

    def part(self, box: Box, precision: Precision | None = None) -> Factor:
        """Return what a box [batch, rows, cols] of a product needs, in another precision or not."""
        box = (box[0], _EVERY, box[2]) if self.side else (box[0], box[1], _EVERY)

        def lines(x: Array) -> Array:
            return None if x is None else x[within(box, x.shape)]

        part, ctx = copy(self), self.ctx
        part.values, part.kept, part.precision = self.values[box], None, precision or self.precision
        part.largest, taken, base = (lines(x) for x in (self.largest, self.taken, self.base))
        part.taken = taken if taken is None else ctx.load(taken, part.precision)
        part.base = base if base is None else ctx.load(base, part.precision)
        return part


def _exponentials(ctx: Context, x: Array, taken: Array | None, precision: Precision) -> Array:
    """Return exp(x - taken) for x [batch, m, n], in blocks that stay in cache."""
    xp = ctx.xp
    if is_transposed(x):
        # Keep the memory order: strided access would cost more than the exponentials.
        turned = None if taken is None else taken.mT
        return _exponentials(ctx, x.mT, turned, precision).mT
    found = ctx.empty(tuple(x.shape), ctx.dtype(precision))
    for box in ctx.blocks(found.shape):
        part, values = found[box], ctx.load(x[box], precision)
        if taken is not None:
            ctx.apply(xp.subtract, values, taken[within(box, taken.shape)], out=part)
            values = part
        ctx.exp(values, part)
    return found
