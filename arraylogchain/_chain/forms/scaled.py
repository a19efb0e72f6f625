"""Steps of a recursion on scaled states, each of which proves itself.

Let u be a row of the state before a step, P its matrix and E = exp(potentials - shift) its factors.
What underflow may cost entry j of the new state v = (u @ P) * E, before E is multiplied:

    products u_k P_kj below tiny           at most tiny each, K tiny in all
    factors P_kj below tiny, if lossy      at most tiny max(u) each, K tiny max(u) in all
    a factor E_j below tiny                at most tiny (u @ P)_j; it is set to zero

*Every entry right.* An entry ``v_j >= K tiny (1 + max(u) if lossy) max(E) / eps`` lost less than
one eps. One below that line is right only if it is exactly zero, which the support of P tells.

*Every path sum right.* A sum over paths is v @ beta, with nonnegative weights beta = P' @ w of the
states to come, and if P' has no zero, entries of beta lie within the ratio `spread` of each other
(`Matrix.spread`). What the row lost, at most `loss` in each entry, then changes the sum by at most
K loss spread / sum(v) of itself. That is below eps / 4 for nearly all rows, however far apart their
entries, and so rows with entries below the line are proved just as well.

Steps that run backwards in time weigh the state with E before they multiply: v = (u * E) @ P. Then
each entry of v takes what underflowed in all of u * E, at most K tiny (1 + max(u)), times max(P).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from arraylogchain._chain.forms.factors import Exponentials, Factors
from arraylogchain._chain.forms.matrices import Matrix, prepare, spread
from arraylogchain._chain.forms.states import State, merge, power_to, scale_by_powers
from arraylogchain._chain.pieces import RecursionPlan
from arraylogchain._chain.steps import Steps, first_of
from arraylogchain._context import Array, Context, Precision, whole_maximum

# No row's largest entry is left above 2**_CEILING: up to the largest number there is room for what
# a step can multiply it by, 2**13 entries, a matrix of LARGEST and exp(_NARROW).
_CEILING = {"float32": 80, "float64": 710}
# Rescaled rows have room for a few steps before they meet the ceiling.
_ROOM = 16
# Rows are rescaled before their smallest entry falls below this, if that helps.
_FLOOR = {"float32": 2.0**-60, "float64": 2.0**-700}


@dataclass(slots=True)
class Losses:
    """What underflow can have cost an entry in one step; see the module's text."""

    per_entry: float
    per_sum: Array | None = None  # tiny * (u @ P), [groups, rows, 1]


class ScaledForm:
    """Advance scaled states in float32 or float64.

    Parameters
    ----------
    ctx : Context
    precision : Precision
    every_entry : bool
        What has to be proved; see the module's text.
    plan : RecursionPlan
    ceiling : int, optional
        No row's largest entry is left above 2**ceiling.
    """

    def __init__(
        self,
        ctx: Context,
        precision: Precision,
        every_entry: bool,
        plan: RecursionPlan,
        ceiling: int | None = None,
    ) -> None:
        self.ctx, self.precision, self.every_entry = ctx, precision, every_entry
        self.panel, self.together = plan.panel, plan.together * plan.groups * plan.rows
        self.exponentials = Exponentials(ctx, precision)
        # Where products of all steps go, [count, groups, rows, K], if they will all be kept.
        self.slab: Array | None = None
        self.floor = _FLOOR[precision.name]
        highest = _CEILING[precision.name]
        self.ceiling = highest if ceiling is None else min(highest, ceiling)

    def run(
        self, steps: Steps, state: State | None, block: slice, record: bool
    ) -> tuple[State, Array | None, list[State]]:
        """Take a state, or the start, through a block of steps.

        Returns
        -------
        state : State
            After the block.
        failed : bool array [groups, rows, 1] or None
            Rows whose steps are not all proved; their values mean nothing.
        history : list of State
            The states after each step, if `record`: of the rows, or groups, whose chain has not
            ended before, or backward, has begun by then.
        """
        ctx = self.ctx
        # Running a block again has to make the same choices again.
        self.exponentials.try_narrow = True
        matrix: Matrix | None = None
        of_chunk: Factors | None = None  # of steps whose potentials are exponentiated together
        failed: Array | None = None
        history: list[State] = []
        chunk = slice(0, 0)
        everyone, axis = steps, steps.select_axis
        idle: list[State] = []  # of chains that have ended, or not begun, the longest last
        if block.stop - block.start == steps.count:
            of_chunk = self.exponentials.fill_store(steps)
            chunk = slice(0, 0) if of_chunk is None else block
        for i in range(block.start, block.stop):
            units = everyone.units_advancing(i)
            if state is not None and units < int(state.values.shape[axis]):
                state = replace(state, values=ctx.load(state.values, self.precision))
                idle.append(state.units(slice(units, None), axis))
                state = state.units(slice(0, units), axis)
            if units != steps.units:
                steps = everyone.first(units)
                matrix = matrix if axis else None
            if units == 0:
                assert state is not None  # no chain ends before its first state
                state = self._with_beginners(everyone, state, idle, i)
                if record:
                    history.append(state)
                continue
            if i >= max(chunk.stop, steps.first_weighed):
                chunk, among = self._chunk(everyone, i, block.stop)
                of_chunk = self.exponentials.of_block(among, chunk)
            factors = None if of_chunk is None else of_chunk.first(units, axis)
            at = i - chunk.start
            before = state
            if before is None:
                state, lossy = self._start(steps)
                losses = Losses(steps.chain.size * self.precision.tiny * (1.0 + lossy))
            else:
                if matrix is None or not steps.is_one_matrix():
                    matrix = self._prepare(steps, i - 1)
                if steps.backward and factors is not None:
                    before = self._weighted_ahead(before, factors, at)
                out = None if self.slab is None else self.slab[i, ...][first_of(units, axis)]
                state, losses = self._multiplied(before, matrix, out)
            if factors is not None and not steps.backward:
                state = self._weighted(state, factors, at, losses)
            advancing = steps.advancing(i)
            if advancing is not None:
                assert before is not None  # no chain ends before its first state
                self._hold(state, before, advancing)
            if not self._is_plainly_proved(state, losses):
                if before is not None:
                    assert matrix is not None
                    state.alive = matrix.reached(before.alive)
                if factors is not None and not steps.backward:
                    state.alive = factors.reached(state.alive, at)
                if advancing is not None:
                    assert before is not None
                    state.alive = _alive_where(ctx, advancing, state, before)
                bad = self._settle(steps, state, losses, i, advancing)
                if bad is not None:
                    if failed is None:
                        shape = (everyone.groups_picked, everyone.rows_picked, 1)
                        failed = ctx.xp.zeros(shape, dtype=ctx.xp.bool, device=ctx.device)
                    failed[first_of(units, axis)] |= bad
            state = self._with_beginners(everyone, state, idle, i)
            if record:
                state.matrix = matrix
                history.append(state)
        assert state is not None
        return merge(ctx, [state, *reversed(idle)], axis), failed, history

    def _with_beginners(self, everyone: Steps, state: State, idle: list[State], i: int) -> State:
        """Return the state after step i with those of chains that begin there, backward.

        These are taken out of `idle`.
        """
        axis, units = everyone.select_axis, int(state.values.shape[everyone.select_axis])
        if not (everyone.backward and idle):
            return state
        begin = everyone.units_at(everyone.count - 1 - i) - units
        if begin == 0:
            return state
        # Backward, chains are set aside before a block's first step only.
        (others,) = idle
        idle[:] = [others.units(slice(begin, None), axis)]
        return merge(self.ctx, [state, others.units(slice(0, begin), axis)], axis)

    def _chunk(self, everyone: Steps, first: int, stop: int) -> tuple[slice, Steps]:
        """Return the next steps whose potentials are exponentiated together, and of which rows."""

        def count(steps: Steps) -> int:
            return max(1, self.together // (steps.groups_picked * steps.rows_picked))

        here = everyone.first(everyone.units_advancing(first))
        last = min(first + count(here), stop) - 1
        # Backward, more and more rows take part.
        among = everyone.first(max(here.units, everyone.units_advancing(last)))
        return slice(first, min(first + count(among), stop)), among

    def ends_of(self, steps: Steps) -> Array | None:
        """Return the weights of what follows the last state, up to a factor of each row."""
        if steps.end is None:
            return None
        ctx, xp = self.ctx, self.ctx.xp
        logs = replace(steps, backward=True).start_of()
        wide = ctx.load(logs, ctx.widest)
        return self.exponentials.flushed(
            xp.exp(ctx.load(wide - whole_maximum(ctx, wide, -1, ctx.widest), self.precision))
        )

    def ends_badly(self, steps: Steps, last: State) -> Array:
        """Tell in which rows the sum over all paths is not proved, given what follows them.

        Of the last state times `ends_of`, products below tiny may be lost, and weights below it.
        """
        xp, tiny = self.ctx.xp, self.precision.tiny
        total = xp.sum(last.values * self.ends_of(steps), axis=-1, keepdims=True)
        lost = tiny * (xp.sum(last.values, axis=-1, keepdims=True) + steps.chain.size)
        ends = replace(steps, backward=True).start_of()
        assert ends is not None
        possible = ends > -math.inf
        if last.alive is not None:
            possible = possible & last.alive
        # A sum is zero for sure where no path leads through.
        nothing = (total == 0) & ~xp.any(possible, axis=-1, keepdims=True)
        return ~((total >= lost / self.precision.eps) | nothing)

    def _prepare(self, steps: Steps, i: int) -> Matrix:
        in_logs = steps.chain.transitions_in_logs
        return prepare(self.ctx, steps.matrix(i), in_logs, self.precision, self.panel)

    def _hold(self, state: State, before: State, advancing: Array) -> None:
        """Undo a step, in place, for rows that do not take part in it."""
        xp, ctx = self.ctx.xp, self.ctx
        held = ctx.load(before.values, self.precision)
        state.values[...] = xp.where(advancing, state.values, held)
        state.exponent = xp.where(advancing, state.exponent, before.exponent)
        state.offset = xp.where(advancing, state.offset, before.offset)
        state.low, state.high = min(state.low, before.low), max(state.high, before.high)

    def _is_plainly_proved(self, state: State, losses: Losses) -> bool:
        """Tell whether bounds on a state prove every entry; often those from before suffice."""
        xp = self.ctx.xp
        line = max(self.floor, losses.per_entry / self.precision.eps)
        if not (state.low >= line and state.high <= 2.0**self.ceiling):
            state.low, state.high = float(xp.min(state.values)), float(xp.max(state.values))
        return state.low >= line and state.high <= 2.0**self.ceiling

    def _start(self, steps: Steps) -> tuple[State, bool]:
        """Return the state before its potentials, and whether a weight may be lost already."""
        xp, ctx, precision = self.ctx.xp, self.ctx, self.precision
        offset, start = steps.offset_of(), steps.start_of()
        zeros = xp.zeros_like(offset)
        if start is None:
            shape = (steps.groups_picked, steps.rows_picked, steps.chain.size)
            ones = xp.ones(shape, dtype=ctx.dtype(precision), device=ctx.device)
            return State(ones, zeros, offset, None, in_logs=False), False
        in_logs = steps.start_in_logs
        support = start > -math.inf if in_logs else start != 0
        if in_logs:
            # A start in a wider format than the computation loses nothing to its magnitude.
            wide = ctx.load(start, ctx.widest)
            shift = whole_maximum(ctx, wide, -1, ctx.widest)
            values = xp.exp(ctx.load(wide - shift, precision))
            state = State(values, zeros, offset + shift, support, in_logs=False)
        else:
            x = ctx.load(start, precision)
            power = power_to(ctx, xp.max(x, axis=-1, keepdims=True), 0)
            values = scale_by_powers(ctx, x, power, precision)
            values = xp.where(values < 0, xp.full_like(values, math.nan), values)
            state = State(values, -ctx.load(power, ctx.widest), offset, support, in_logs=False)
        return state, bool(xp.any((state.values < precision.tiny) & support))

    def _multiplied(self, state: State, matrix: Matrix, out: Array | None) -> tuple[State, Losses]:
        values = matrix.multiply(self.ctx.load(state.values, self.precision), out)
        exponent, offset = state.exponent, state.offset
        if matrix.power is not None:
            exponent = exponent - self.ctx.load(matrix.power, self.ctx.widest)
        if matrix.shift is not None:
            offset = offset + self.ctx.load(matrix.shift, self.ctx.widest)
        # Half and twice leave room for rounding.
        inner = int(state.values.shape[-1])
        low = 0.5 * inner * state.low * matrix.least
        high = 2.0 * inner * state.high * matrix.most
        largest = float(self.ctx.xp.max(state.values)) if matrix.lossy else 0.0
        losses = Losses(inner * self.precision.tiny * (1.0 + largest) + state.lost * matrix.most)
        return State(values, exponent, offset, None, False, low, high), losses

    def _weighted(self, state: State, factors: Factors, at: int, losses: Losses) -> State:
        """Multiply a state that was just made by one step's factors, in place."""
        losses.per_entry *= factors.largest
        if not factors.positive:
            top = self.ctx.xp.max(state.values, axis=-1, keepdims=True)
            losses.per_sum = top * self.precision.tiny
        return factors.weigh(self.ctx, state, at, out=state.values)

    def _weighted_ahead(self, state: State, factors: Factors, at: int) -> State:
        """Return a state times one step's factors, which go ahead of the product."""
        ctx = self.ctx
        out = ctx.empty(tuple(state.values.shape), ctx.dtype(self.precision))
        weighted = factors.weigh(ctx, state, at, out)
        weighted.alive = factors.reached(state.alive, at)
        # Products that underflow, and factors that do; each sum of the product takes all of them.
        top = 0.0 if factors.positive else float(ctx.xp.max(state.values))
        weighted.lost = int(out.shape[-1]) * self.precision.tiny * (1.0 + top)
        return weighted

    def _settle(
        self, steps: Steps, state: State, losses: Losses, i: int, advancing: Array | None
    ) -> Array | None:
        """Rescale the rows, in place, and return those that are not proved, if any."""
        xp, ctx, precision = self.ctx.xp, self.ctx, self.precision
        top = xp.max(state.values, axis=-1, keepdims=True)
        # Wide rows get all the range there is below the ceiling, others room on both sides.
        is_wide = state.low < losses.per_entry / precision.eps
        power = power_to(ctx, top, self.ceiling - _ROOM if is_wide else 0)
        if advancing is not None:
            power = xp.where(advancing, power, xp.zeros_like(power))
        values = scale_by_powers(ctx, state.values, power, precision)
        state.power, state.exponent = power, state.exponent - ctx.load(power, ctx.widest)
        scaled_low = state.low * 2.0 ** min(0.0, float(xp.min(power)))
        proved = not is_wide and scaled_low >= precision.tiny
        state.low, state.high = 0.0, math.inf
        if proved and bool(xp.all(xp.isfinite(top))):
            state.values, state.alive = values, None
            return None
        # The losses are scaled along; scaling down can lose another tiny.
        loss = xp.full_like(top, losses.per_entry)
        if losses.per_sum is not None:
            loss = loss + losses.per_sum
        loss = scale_by_powers(ctx, loss, power, precision) + precision.tiny
        line = scale_by_powers(
            ctx, xp.full_like(top, losses.per_entry / precision.eps), power, precision
        )
        short = ~(values >= xp.maximum(line, xp.full_like(line, precision.tiny)))
        if state.alive is not None:
            if bool(xp.all(state.alive)):
                state.alive = None
            else:
                short = short & state.alive
        bad = xp.any(short, axis=-1, keepdims=True)
        if not self.every_entry and bool(xp.any(bad)):
            bad = bad & ~self._path_sums_are_right(steps, values, loss, i)
        bad = bad | ~xp.isfinite(top)
        if advancing is not None:
            bad = bad & advancing
        state.values = values
        if not bool(xp.any(bad)):
            return None
        state.values = xp.where(bad, xp.ones_like(values), values)
        return bad

    def _path_sums_are_right(self, steps: Steps, values: Array, loss: Array, i: int) -> Array:
        """Tell which rows lost too little, over all their entries, to show in a path sum."""
        xp, ctx, size = self.ctx.xp, self.ctx, steps.chain.size
        lost = ctx.load(loss, ctx.widest) * size
        if i + 1 < steps.count:
            lost = lost * spread(ctx, steps.matrix(i), steps.chain.transitions_in_logs)
        total = xp.sum(values, axis=-1, keepdims=True)
        return lost <= (self.precision.eps / 4) * ctx.load(total, ctx.widest)


def _alive_where(ctx: Context, advancing: Array, state: State, before: State) -> Array | None:
    """Return which weights are not zero, of rows that advance and of those that do not."""
    if state.alive is None and before.alive is None:
        return None
    everyone = ctx.xp.ones(tuple(state.values.shape), dtype=ctx.xp.bool, device=ctx.device)
    after, earlier = (everyone if x is None else x for x in (state.alive, before.alive))
    return ctx.xp.where(advancing, after, earlier)
