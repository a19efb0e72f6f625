"""Forward recursion over time: a proof for every step, and slower forms for what is not proved.

States are kept in *scaled* form, nonnegative numbers times a power of two: a step is a matrix
multiply and a product with exp(potentials), without logarithms, and it errs by rounding alone
unless something underflows. What underflow can cost is known (see `forms.scaled`), so each step
proves itself. Rows, or groups, with a step that does not are taken up again from before it: in
float64, then in log form with the certified product, which needs no proof.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from arraylogchain._chain.forms.logs import LogForm
from arraylogchain._chain.forms.scaled import ScaledForm
from arraylogchain._chain.forms.states import State, merge
from arraylogchain._chain.pieces import RecursionPlan
from arraylogchain._chain.steps import Steps
from arraylogchain._context import DOUBLE, SINGLE, Array


@dataclass(slots=True)
class Part:
    """Rows or groups of a tile that are computed in one form; None stands for all of them."""

    level: int
    units: Array | None
    steps: Steps
    state: State | None


class Recursion:
    """The recursion for one tile of chains.

    Parameters
    ----------
    steps : Steps
    every_entry : bool
        Whether every entry of every state must be right, or only the sums over whole paths. The
        latter is less: a weight that underflowed cannot count later if the next matrix lets every
        state go on about equally well.
    plan : RecursionPlan
    """

    def __init__(self, steps: Steps, every_entry: bool, plan: RecursionPlan) -> None:
        ctx = steps.ctx
        self.ctx, self.steps, self.block = ctx, steps, plan.block
        precisions = [SINGLE, DOUBLE] if ctx.widest is DOUBLE else [SINGLE]
        precisions = precisions[precisions.index(ctx.precision) :]
        self.forms: list[ScaledForm | LogForm] = [
            ScaledForm(ctx, precision, every_entry, plan) for precision in precisions
        ]
        wide = replace(ctx, precision=ctx.widest)
        self.forms.append(LogForm(wide, plan.panel, plan.workspace // 4))

    def run(self, record: bool) -> Iterator[tuple[slice, State | None, list[State]]]:
        """Go through all steps.

        Yields
        ------
        steps : slice
            A block of steps.
        state : State
            After the block, rows in order; None unless it is the last one.
        history : list of State
            The states of the block if `record`, rows in order. Forward, rows or groups whose chains
            have ended may be left out: they are the last ones.
        """
        count = self.steps.count
        parts = [Part(0, None, self.steps, None)]
        for start in range(0, count, self.block):
            block = slice(start, min(start + self.block, count))
            advanced: list[tuple[Part, list[State]]] = []
            for part in parts:
                advanced += self._advance(part, block, record)
            history = []
            if record:
                parts_of = [part for part, _ in advanced]
                states = zip(*(h for _, h in advanced), strict=True)
                history = [self._in_order(parts_of, at_step) for at_step in states]
            parts = self._joined([part for part, _ in advanced])
            last = block.stop == count
            yield block, self._in_order(parts, [p.state for p in parts]) if last else None, history

    def _advance(self, part: Part, block: slice, record: bool) -> list[tuple[Part, list[State]]]:
        """Take a part through a block; split off what its form does not prove."""
        form = self.forms[part.level]
        state, failed, history = form.run(part.steps, part.state, block, record)
        if failed is None and part.units is None:
            return [(replace(part, state=state), history)]
        axis, earlier = part.steps.select_axis, part.state
        for i, after in enumerate(history):
            # Chains that have ended keep their last state, those that have not begun their first.
            earlier = after if earlier is None else after.followed_by(self.ctx, earlier, axis)
            history[i] = earlier
        if failed is None:
            return [(replace(part, state=state), history)]
        xp = self.ctx.xp
        # Groups stay whole where there are several: each has matrices of its own.
        bad = xp.any(failed, axis=1 - axis)[..., 0]
        proved, unproved = xp.nonzero(~bad)[0], xp.nonzero(bad)[0]
        result = []
        if int(proved.shape[0]):
            kept = [s.pick(self.ctx, proved, axis) for s in history]
            state = state.pick(self.ctx, proved, axis)
            result.append((self._picked(part, proved, part.level, state), kept))
        before = None if part.state is None else part.state.pick(self.ctx, unproved, axis)
        again = self._picked(part, unproved, part.level + 1, before)
        return result + self._advance(again, block, record)

    def _picked(self, part: Part, units: Array, level: int, state: State | None) -> Part:
        own = units if part.units is None else self.ctx.xp.take(part.units, units)
        return Part(level, own, self.steps.pick(own), state)

    def _joined(self, parts: Sequence[Part]) -> list[Part]:
        """Join the parts of each level, so that there are never more than levels."""
        joined = []
        for level in sorted({part.level for part in parts}):
            same = [part for part in parts if part.level == level]
            if len(same) == 1:
                joined += same
                continue
            # Those with the longest chains stay the first.
            units, state = self._sorted(same, [part.state for part in same])
            joined.append(Part(level, units, self.steps.pick(units), state))
        return joined

    def _in_order(self, parts: Sequence[Part], states: Sequence[State | None]) -> State:
        """Return one state of all rows, in the tile's order, in log form if their forms differ."""
        given = [state for state in states if state is not None]
        if len(given) == 1 and parts[0].units is None:
            return given[0]
        if len(given) > 1:
            given = [state.in_log_form(self.ctx) for state in given]
        return self._sorted(parts, given)[1]

    def _sorted(self, parts: Sequence[Part], states: Sequence[State | None]) -> tuple[Array, State]:
        """Return the rows or groups of all parts in order, and their states in one."""
        xp, axis = self.ctx.xp, self.steps.select_axis
        units = xp.concat([part.units for part in parts])
        order = xp.argsort(units)
        merged = merge(self.ctx, [state for state in states if state is not None], axis)
        return xp.take(units, order), merged.pick(self.ctx, order, axis)
