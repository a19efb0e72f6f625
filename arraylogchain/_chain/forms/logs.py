"""Steps of a recursion in log space: right on any range, and slower."""

from __future__ import annotations

import math

from arraylogchain._chain.forms.states import State, power_to, scale_by_powers
from arraylogchain._chain.steps import Steps
from arraylogchain._context import Array, Context, whole_maximum
from arraylogchain._fold import chunks
from arraylogchain._array.products.certified import CertifiedKernel


class LogForm:
    """Advance states in log form, with the certified product."""

    def __init__(self, ctx: Context, panel: int, workspace: int) -> None:
        self.ctx, self.panel, self.workspace = ctx, panel, workspace

    def run(
        self, steps: Steps, state: State | None, block: slice, record: bool
    ) -> tuple[State, Array | None, list[State]]:
        """Take a state, or the start, through a block of steps; see `ScaledForm.run`."""
        if state is not None and not state.in_logs:
            state = state.in_log_form(self.ctx)
        history = []
        for i in range(block.start, block.stop):
            before = state
            if state is not None and steps.backward:
                state = self.weighted(state, steps, i)
            state = self._start(steps) if state is None else self._multiplied(state, steps, i - 1)
            if not steps.backward:
                state = self.weighted(state, steps, i)
            advancing = steps.advancing(i)
            if before is not None and advancing is not None:
                state = _where(self.ctx, advancing, state, before)
            if record:
                history.append(state)
        assert state is not None
        return state, None, history

    def weighted(self, state: State, steps: Steps, i: int) -> State:
        """Return a state times the factors of step i."""
        potentials = None if i < steps.first_weighed else steps.potentials_of(slice(i, i + 1))
        if potentials is None:
            return state
        x = self.ctx.load(potentials[:, :, 0, :], self.ctx.precision)
        return self._settled(state, state.values, x)

    def _start(self, steps: Steps) -> State:
        xp, ctx = self.ctx.xp, self.ctx
        offset, start = steps.offset_of(), steps.start_of()
        exponent = xp.zeros_like(offset)
        if start is None:
            shape = (steps.groups_picked, steps.rows_picked, steps.chain.size)
            values = xp.zeros(shape, dtype=ctx.dtype(ctx.precision), device=ctx.device)
        elif steps.start_in_logs:
            values = to_logs(ctx, start, in_logs=True)
        else:
            power = power_to(ctx, ctx.load(xp.max(start, axis=-1, keepdims=True), ctx.precision), 0)
            values = to_logs(ctx, start, in_logs=False, power=power)
            exponent = -ctx.load(power, ctx.widest)
        return self._settled(State(values, exponent, offset, None, True), values, None)

    def _multiplied(self, state: State, steps: Steps, i: int) -> State:
        ctx = self.ctx
        given, in_logs = steps.matrix(i), steps.chain.transitions_in_logs
        groups, rows, inner = state.values.shape
        cols = int(given.shape[-1])
        # One shift per matrix, kept in the state's scale, so that logarithms stay small and exact.
        exponent, offset, power, shift = state.exponent, state.offset, None, 0.0
        if in_logs:
            shift = whole_maximum(ctx, given, (-2, -1), ctx.precision)
            offset = offset + ctx.load(shift, ctx.widest)
        else:
            top = ctx.load(ctx.xp.max(given, axis=(-2, -1), keepdims=True), ctx.precision)
            power = power_to(ctx, top, 0)
            exponent = exponent - ctx.load(power, ctx.widest)
        values = ctx.empty((groups, rows, cols), ctx.dtype(ctx.precision))
        for j in chunks(cols, max(1, self.panel // (groups * inner))):
            part = to_logs(ctx, given[:, :, j], in_logs, power) - shift
            sizes = (groups, rows, int(part.shape[-1]), inner)
            kernel = CertifiedKernel(ctx, sizes, self.workspace, copies=False)
            kernel(state.values, kernel.panel(part), values[:, :, j])
        return self._settled(State(values, exponent, offset, None, True), values, None)

    def _settled(self, state: State, values: Array, potentials: Array | None) -> State:
        """Add potentials, and move the whole part of each row's maximum into its offset."""
        ctx = self.ctx
        offset = state.offset
        if potentials is not None:
            shift = whole_maximum(ctx, potentials, -1, ctx.precision)
            values = values + (potentials - shift)
            offset = offset + ctx.load(shift, ctx.widest)
        shift = whole_maximum(ctx, values, -1, ctx.precision)
        offset = offset + ctx.load(shift, ctx.widest)
        return State(values - shift, state.exponent, offset, None, True)


def _where(ctx: Context, advancing: Array, state: State, before: State) -> State:
    """Return a state in rows that advance, and the one before in the others."""
    xp = ctx.xp
    return State(
        xp.where(advancing, state.values, before.values),
        xp.where(advancing, state.exponent, before.exponent),
        xp.where(advancing, state.offset, before.offset),
        None,
        in_logs=True,
    )


def to_logs(ctx: Context, x: Array, in_logs: bool, power: Array | None = None) -> Array:
    """Return the logs of x, or of weights x * 2**power, which may be out of range."""
    x = ctx.load(x, ctx.precision)
    if in_logs:
        return x
    # Zero has the logarithm -inf; a negative weight has none, and gives NaN.
    xp = ctx.xp
    own = power_to(ctx, x, 0)
    logs = xp.log(scale_by_powers(ctx, x, own, ctx.precision))
    total = -own if power is None else power - own
    return xp.where(x == 0, xp.full_like(x, -math.inf), logs + total * math.log(2.0))
