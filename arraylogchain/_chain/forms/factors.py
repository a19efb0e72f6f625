"""Exponentials of potentials, which scaled states are weighed with."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from arraylogchain._chain.forms.states import State
from arraylogchain._chain.steps import Steps, first_of
from arraylogchain._context import Array, Context, Precision, whole_maximum
from arraylogchain._fold import boxes

# Potentials within these bounds of 0 need no shift.
_NARROW = {"float32": 20.0, "float64": 200.0}


@dataclass(slots=True)
class Factors:
    """exp(potentials) of a block of steps, as ``values * exp(offset)``."""

    given: Array  # the potentials, [groups, rows, steps, K]
    values: Array
    offset: Array | None  # [groups, rows, steps, 1], whole numbers; None for zero
    least: float  # bounds on the values
    largest: float
    positive: bool  # whether no value is zero

    def first(self, n: int, axis: int) -> Factors:
        """Return the factors of the first n rows (axis 1) or groups (axis 0)."""
        if n == int(self.values.shape[axis]):
            return self
        where = first_of(n, axis)
        offset = None if self.offset is None else self.offset[where]
        return replace(self, given=self.given[where], values=self.values[where], offset=offset)

    def weigh(self, ctx: Context, state: State, at: int, out: Array) -> State:
        """Return a state times the factors of one step, its values written into `out`."""
        ctx.apply(ctx.xp.multiply, state.values, self.values[:, :, at, :], out=out)
        shift = None if self.offset is None else self.offset[:, :, at, :]
        return State(
            out,
            state.exponent,
            state.offset if shift is None else state.offset + shift,
            state.alive,
            in_logs=False,
            low=state.low * self.least,
            high=state.high * self.largest,
            lost=state.lost,
            shift=shift,
        )

    def reached(self, alive: Array | None, at: int) -> Array | None:
        """Return which entries stay nonzero, given which are; None: all."""
        if self.positive:
            return alive
        finite = self.given[:, :, at, :] > -math.inf
        return finite if alive is None else alive & finite


class Exponentials:
    """Makes factors of potentials, in one precision, for a few steps at a time.

    Attributes
    ----------
    store : array [groups, rows, count, K] or None
        Where to keep the factors of all steps.
    """

    def __init__(self, ctx: Context, precision: Precision) -> None:
        self.ctx, self.precision = ctx, precision
        self.try_narrow = True
        self.buffer: Array | None = None
        self.store: Array | None = None

    def fill_store(self, steps: Steps) -> Factors | None:
        """Fill the store at once, a few rows at a time; None if shifts are needed."""
        ctx, store = self.ctx, self.store
        if store is None:
            return None
        given = steps.potentials_of(slice(0, steps.count))
        if given is None:
            return None
        low, high = math.inf, 0.0
        for box in boxes(tuple(given.shape), 4 * ctx.block):
            bounds = self._narrow_exp(ctx.load(given[box], self.precision), store[box])
            if bounds is None:
                return None
            low, high = min(low, bounds[0]), max(high, bounds[1])
        return Factors(given, store, None, low, max(1.0, high), positive=True)

    def of_block(self, steps: Steps, block: slice) -> Factors | None:
        """Return the factors of a block of steps, None if there are no potentials."""
        xp, ctx, precision = self.ctx.xp, self.ctx, self.precision
        given = steps.potentials_of(block)
        if given is None:
            return None
        x = ctx.load(given, precision)
        values = self._buffer_for(x, block)
        if self.try_narrow:
            bounds = self._narrow_exp(x, values)
            if bounds is not None:
                low, high = bounds
                return Factors(given, values, None, low, max(1.0, high), positive=True)
            self.try_narrow = False
        shift = whole_maximum(ctx, x, -1, precision)
        ctx.apply(xp.subtract, x, shift, out=values)
        ctx.apply(xp.exp, values, out=values)
        positive = float(xp.min(values)) >= precision.tiny
        if not positive:
            values[...] = self.flushed(values)
        return Factors(given, values, ctx.load(shift, ctx.widest), 0.0, math.exp(0.5), positive)

    def _narrow_exp(self, x: Array, out: Array) -> tuple[float, float] | None:
        """Write exp(x) into `out`; return its bounds if x is narrow enough to need no shift."""
        xp, bound = self.ctx.xp, math.exp(_NARROW[self.precision.name])
        self.ctx.apply(xp.exp, x, out=out)
        # Looked at after the exponential, which leaves contiguous arrays. NaN compares False.
        low, high = float(xp.min(out)), float(xp.max(out))
        return (low, high) if 1.0 / bound <= low and high <= bound else None

    def flushed(self, values: Array) -> Array:
        """Return values with what is below the smallest normal number set to zero."""
        xp = self.ctx.xp
        return xp.where(values < self.precision.tiny, xp.zeros_like(values), values)

    def _buffer_for(self, x: Array, block: slice) -> Array:
        """Return where the factors of a block go, reusing memory: fresh memory costs time."""
        if self.store is not None:
            return self.store[:, :, block, :]
        if self.buffer is None or tuple(self.buffer.shape) != tuple(x.shape):
            self.buffer = self.ctx.empty(tuple(x.shape), self.ctx.dtype(self.precision))
        return self.buffer

    def again(self, steps: Steps, i: int, state: State) -> Array | None:
        """Return exp(potentials) of step i, [groups, rows, K], with the shift that `state` met."""
        ctx = self.ctx
        given = None if i < steps.first_weighed else steps.potentials_of(slice(i, i + 1))
        if given is None:
            return None
        x = ctx.load(given, self.precision)[:, :, 0, :]
        if state.shift is not None:
            return self.flushed(ctx.xp.exp(x - ctx.load(state.shift, self.precision)))
        return ctx.xp.exp(x)
