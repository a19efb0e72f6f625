"""States of a recursion over time, and exact bookkeeping of their scale.

A state stands for nonnegative weights ``w(values) * 2**exponent * exp(offset)``, with one exponent
and one offset for each row. Both are integers, so they add up exactly, while they stay below 2**53
(2**24 on devices without float64). In *scaled* form w(values) is the values themselves, in *log*
form their exponential.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from arraylogchain._context import Array, Context, Precision

# log(2) in two parts. The first has 21 bits: times an exponent below 2**32 it is exact in float64.
_LN2_HIGH = 1453634 / 2**21
_LN2_LOW = 4.7493250390316726e-07


@dataclass(slots=True)
class State:
    """Weights of K states in each row.

    Attributes
    ----------
    values : array [groups, rows, K]
    exponent, offset : array [groups, rows, 1]
        In the widest precision of the device.
    support : bool array [groups, rows, K] or None
        Which weights are not exactly zero; None where all are positive.
    in_logs : bool
    low, high : float
        Bounds on the values, if scaled.
    """

    values: Array
    exponent: Array
    offset: Array
    support: Array | None
    in_logs: bool
    low: float = 0.0
    high: float = math.inf

    def select(self, ctx: Context, index: Array, axis: int) -> State:
        """Return the state of some rows (axis 1) or groups (axis 0)."""
        return self._with_arrays(lambda x: ctx.xp.take(x, index, axis=axis))

    def part(self, lanes: slice, axis: int) -> State:
        """Return views of the state of some rows (axis 1) or groups (axis 0)."""
        if not lanes.start and lanes.stop == self.values.shape[axis]:
            return self
        return self._with_arrays(lambda x: part_of(x, lanes, axis))

    def copy(self, ctx: Context) -> State:
        """Return the same state in memory of its own."""
        return self._with_arrays(lambda x: ctx.xp.asarray(x, copy=True))

    def _with_arrays(self, function: Callable[[Array], Array]) -> State:
        return State(
            function(self.values),
            function(self.exponent),
            function(self.offset),
            None if self.support is None else function(self.support),
            self.in_logs,
            self.low,
            self.high,
        )

    def in_log_form(self, ctx: Context) -> State:
        """Return the same state in log form, in the widest precision."""
        if self.in_logs:
            return replace(self, values=ctx.load(self.values, ctx.widest), support=None)
        logs, power = self._split(ctx)
        # What the row's largest entry has goes to the exponent, so that its logarithm is small.
        top = ctx.xp.max(power, axis=-1, keepdims=True)
        logs = logs + (power - top) * math.log(2.0)
        return State(logs, self.exponent + top, self.offset, None, in_logs=True)

    def logs(self, ctx: Context) -> Array:
        """Return the logarithms of the weights, in the widest precision, [groups, rows, K]."""
        if self.in_logs:
            return add_scale(ctx.load(self.values, ctx.widest), self.exponent, self.offset)
        logs, power = self._split(ctx)
        return add_scale(logs, self.exponent + power, self.offset)

    def relative(self, ctx: Context) -> Array:
        """Return the weights up to a factor of each row, 1 at most, in the widest precision."""
        xp, values = ctx.xp, ctx.load(self.values, ctx.widest)
        if self.in_logs:
            return relative(xp, values)
        top = xp.max(values, axis=-1, keepdims=True)
        return values / xp.where(top > 0, top, xp.ones_like(top))

    def _split(self, ctx: Context) -> tuple[Array, Array]:
        """Return log(m) and p for values m * 2**p with m about 1, in the widest precision."""
        values = ctx.load(self.values, ctx.widest)
        if values is not self.values:
            # Logarithms in a wider format are right to rounding as they are.
            return ctx.xp.log(values), ctx.xp.zeros_like(self.exponent)
        power = -power_to(ctx, values, 0)
        return ctx.xp.log(scale_by_powers(ctx, values, -power, ctx.widest)), power

    def total(self, ctx: Context) -> State:
        """Return the rows' sums, [groups, rows, 1], in log form; their logarithms are small."""
        if self.in_logs:
            return replace(self, values=log_sum(ctx, ctx.load(self.values, ctx.widest)))
        total = ctx.xp.sum(self.values, axis=-1, keepdims=True, dtype=ctx.dtype(ctx.widest))
        return replace(self, values=total, support=None).in_log_form(ctx)


def part_of(x: Array, lanes: slice, axis: int) -> Array:
    """Return a view of some rows (axis 1) or groups (axis 0) of an array."""
    if not lanes.start and lanes.stop == x.shape[axis]:
        return x
    return x[lanes, ...] if axis == 0 else x[:, lanes, ...]


def relative(xp: Any, logs: Array) -> Array:
    """Return exponentials relative to the largest of the last axis."""
    top = xp.max(logs, axis=-1, keepdims=True)
    return xp.exp(logs - xp.where(xp.isfinite(top), top, xp.zeros_like(top)))


def log_sum(ctx: Context, logs: Array) -> Array:
    """Return the logs of the sums of exponentials along the last axis, which is kept."""
    xp = ctx.xp
    top = xp.max(logs, axis=-1, keepdims=True)
    shift = xp.where(xp.isfinite(top), top, xp.zeros_like(top))
    total = xp.sum(xp.exp(logs - shift), axis=-1, keepdims=True)
    return xp.where(xp.isfinite(top), shift + xp.log(total), top)


def add_scale(logs: Array, exponent: Array, offset: Array) -> Array:
    """Return logs + exponent * log(2) + offset; the large parts are summed first, exactly."""
    return (offset + exponent * _LN2_HIGH) + (logs + exponent * _LN2_LOW)


def joined(ctx: Context, states: list[State], axis: int, values: Array | None = None) -> State:
    """Return the state of the rows (axis 1) or groups (axis 0) of several, one after another.

    `values`, if given, has theirs already.
    """
    xp = ctx.xp
    if len(states) == 1:
        return states[0]
    if any(state.in_logs or state.values.dtype != states[0].values.dtype for state in states):
        states = [state.in_log_form(ctx) for state in states]
    if values is None:
        values = xp.concat([state.values for state in states], axis=axis)
    exponent, offset = (
        xp.concat([getattr(state, name) for state in states], axis=axis)
        for name in ("exponent", "offset")
    )
    support = None
    if any(state.support is not None for state in states):
        every = xp.asarray(True, device=ctx.device)
        masks = [every if state.support is None else state.support for state in states]
        shapes = [tuple(state.values.shape) for state in states]
        support = xp.concat(list(map(xp.broadcast_to, masks, shapes)), axis=axis)
    low, high = min(state.low for state in states), max(state.high for state in states)
    return State(values, exponent, offset, support, states[0].in_logs, low, high)


def scale_by_powers(ctx: Context, x: Array, power: Array, precision: Precision) -> Array:
    """Return x * 2**power, exact unless it leaves the range; powers are integers."""
    xp = ctx.xp
    table = ctx.powers_of_two(precision)

    def times(x: Array, power: Array) -> Array:
        index = xp.astype(power, ctx.index_dtype) + (precision.top - 1)
        return x * xp.reshape(xp.take(table, xp.reshape(index, (-1,)), axis=0), power.shape)

    limit = precision.top - 1
    if float(xp.max(xp.abs(power))) <= limit:
        return times(x, power)
    # In two steps, because 2**power alone is out of range.
    first = xp.clip(power, -limit, limit)
    return times(times(x, first), xp.clip(power - first, -limit, limit))


def power_to(ctx: Context, x: Array, target: float) -> Array:
    """Return the integer power of two that takes positive finite x to about 2**target, else 0."""
    xp = ctx.xp
    power = target - xp.floor(xp.log2(x))
    return xp.where(xp.isfinite(power), power, xp.zeros_like(power))
