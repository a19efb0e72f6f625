"""Forward passes over one tile of chains, kept for the way back.

Each row of a tile is computed in the fastest form that proves it, forwards and backwards: scaled in
the precision of the computation, scaled in float64, or in logs. What a pass keeps is either every
state or one state in about sqrt(count), from which the others are computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from arraylogchain._chain.forms.logs import LogForm
from arraylogchain._chain.forms.scaled import ScaledForm
from arraylogchain._chain.forms.states import State
from arraylogchain._chain.pieces import RecursionPlan
from arraylogchain._chain.posterior.adjoint import ScaledAdjoint, adjoint_ceiling, first_adjoint
from arraylogchain._chain.posterior.log_adjoint import LogAdjoint
from arraylogchain._chain.posterior.sums import PosteriorSums
from arraylogchain._chain.steps import Steps
from arraylogchain._context import DOUBLE, SINGLE, Array
from arraylogchain._fold import Box, chunks


@dataclass(slots=True)
class _Pass:
    """A forward pass in one scaled form, over a tile or the rows of it that other forms left.

    `before` holds the states before each block, `history` those of the whole chain if it is kept.
    `entering`, known after the way back, holds the derivatives by the first state.
    """

    form: ScaledForm
    steps: Steps
    last: State
    failed: Array | None
    before: list[State | None]
    history: list[State] | None
    entering: Array | None = None


class TilePosterior:
    """The forward passes over one tile of chains, kept for the way back.

    Parameters
    ----------
    steps : Steps
    box : tuple of slice
        The tile's place in the batch.
    plan : RecursionPlan
        Its block is the number of steps whose states are in memory at a time.
    store : array [groups, rows, count, K], optional
        Where the exponentials of the potentials are kept for the way back.
    """

    def __init__(
        self, steps: Steps, box: Box, plan: RecursionPlan, store: Array | None = None
    ) -> None:
        ctx = steps.ctx
        self.ctx, self.tile, self.box, self.plan = ctx, steps, box, plan
        self.store = store
        self.passes: list[_Pass] = []
        rest: Steps | None = steps
        precisions = [SINGLE, DOUBLE] if ctx.widest is DOUBLE else [SINGLE]
        for precision in precisions[precisions.index(ctx.precision) :]:
            assert rest is not None
            ceiling = adjoint_ceiling(precision, steps.chain.size)
            # A sum over paths is the one over all states only where nothing follows.
            every_entry = steps.end is not None
            form = ScaledForm(ctx, precision, every_entry, plan, ceiling)
            form.exponentials.store = store if not self.passes and rest is steps else None
            found = self._forward(form, rest)
            form.exponentials.store = None
            rest = self._unproved(found)
            if rest is None or rest.units < found.steps.units:
                self.passes.append(found)
            else:
                # Nothing is proved, and nothing of this pass is of use.
                self.store = None
            if rest is None:
                break
        self.rest = rest
        if rest is not None:
            wide = replace(ctx, precision=ctx.widest)
            self.log_form = LogForm(wide, plan.panel, plan.workspace // 4)

    def write_log_partition(self, view: Array) -> None:
        """Write the logs of the sums over all paths into a view of the tile's shape."""
        found = [(each.steps, each.last) for each in self.passes]
        if self.rest is not None:
            whole = slice(0, self.rest.count)
            found.append((self.rest, self.log_form.run(self.rest, None, whole, False)[0]))
        # What one pass did not prove, the next one writes again.
        for steps, last in found:
            steps.place(view[..., None], last.log_total(self.ctx))

    def write_last(self, view: Array) -> bool:
        """Write logs of the last state, but for a factor, into a view of the tile's shape and K.

        Returns whether a single pass proved all rows; nothing is written if not.
        """
        if self.rest is not None or len(self.passes) != 1:
            return False
        self._write_logs(view, self.passes[0].last.values)
        return True

    def write_entering(self, view: Array) -> None:
        """Write logs of derivatives by the first state likewise, after `add_gradients`."""
        self._write_logs(view, self.passes[0].entering)

    def _write_logs(self, view: Array, x: Array) -> None:
        xp = self.ctx.xp
        logs = xp.log(xp.astype(x, view.dtype, copy=False))
        self.passes[0].steps.place(view, logs)

    def take_store(self) -> Array | None:
        """Hand over the kept exponentials, which from then on are computed again."""
        store, self.store = self.store, None
        return store

    def add_gradients(
        self, cotangent: Array, sums: PosteriorSums, stored: Array | None = None
    ) -> None:
        """Add the gradients for a cotangent [groups, rows, 1] of log Z.

        What `take_store` gave may lie in the memory of ``sums.potentials``: the exponentials of
        each step are read before gradients take their place.
        """
        for found in self.passes:
            g = _picked(found.steps, cotangent)
            if found.failed is not None:
                g = self.ctx.xp.where(found.failed, self.ctx.xp.zeros_like(g), g)
            first, late = first_adjoint(found.form, found.steps, found.last, g)
            kept = stored if found.steps.picked is None else None
            adjoint = ScaledAdjoint(
                found.form, found.steps, self.box, sums, first, late, kept, found.failed
            )
            blocks = list(self._blocks())
            for block, before in zip(reversed(blocks), reversed(found.before), strict=True):
                history = found.history
                if history is None:
                    _, _, history = found.form.run(found.steps, before, block, record=True)
                adjoint.run(block, before, history)
            found.entering = adjoint.adjoint
        if self.rest is not None:
            self._add_in_logs(self.rest, cotangent, sums)

    def _forward(self, form: ScaledForm, steps: Steps) -> _Pass:
        keeps = self.plan.block >= steps.count
        state: State | None = None
        failed: Array | None = None
        before = []
        history: list[State] | None = None
        if keeps:
            shape = (steps.count, steps.groups_picked, steps.rows_picked, steps.chain.size)
            form.slab = self.ctx.empty(shape, self.ctx.dtype(form.precision))
        for block in self._blocks():
            before.append(state)
            state, bad, states = form.run(steps, state, block, record=keeps)
            history = states if keeps else None
            if bad is not None:
                failed = bad if failed is None else failed | bad
        assert state is not None
        if steps.end is not None:
            bad = form.ends_badly(steps, state)
            failed = bad if failed is None else failed | bad
            failed = failed if bool(self.ctx.xp.any(failed)) else None
        form.slab = None
        return _Pass(form, steps, state, failed, before, history)

    def _blocks(self) -> Iterator[slice]:
        return chunks(self.tile.count, self.plan.block)

    def _unproved(self, found: _Pass) -> Steps | None:
        """Return the steps of the rows that a pass did not prove, if any; groups stay whole."""
        if found.failed is None:
            return None
        xp, axis = self.ctx.xp, found.steps.select_axis
        bad = xp.any(found.failed, axis=1 - axis)[..., 0]
        found.failed = xp.any(found.failed, axis=1, keepdims=True) if axis == 0 else found.failed
        return found.steps.pick(xp.nonzero(bad)[0])

    def _add_in_logs(self, rest: Steps, cotangent: Array, sums: PosteriorSums) -> None:
        """Add the gradients of what only the log form can do, a few rows or groups at a time."""
        chain, axis = rest.chain, rest.select_axis
        assert rest.picked is not None
        count = int(rest.picked.shape[0])
        each = 2 * 8 * rest.count * chain.size * (1 if axis else rest.rows)
        for part in chunks(count, max(1, self.plan.workspace // 4 // each)):
            steps = rest.pick(self.ctx.integers(np.arange(part.start, part.stop)))
            block = max(1, self.plan.workspace // 4 // (8 * 4))
            adjoint = LogAdjoint(self.ctx, self.log_form, steps, self.box, sums, block)
            adjoint.run(_picked(steps, cotangent))


def _picked(steps: Steps, x: Array) -> Array:
    if steps.picked is None:
        return x
    return steps.ctx.xp.take(x, steps.picked, axis=steps.select_axis)
