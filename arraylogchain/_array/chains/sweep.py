"""Sweeps over the steps of a tile: every step proved, or taken again by a slower stepper.

All rows begin with the fastest stepper: scaled states in the precision of the computation. Rows, or
groups, with a step that it does not prove go on from the state before that step: in float64, and
where that does not prove it either, in log form, which needs no proof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from arraylogchain._array.chains.logs import LogStepper
from arraylogchain._array.chains.scaled import Options, ScaledStepper
from arraylogchain._array.chains.states import State, concat
from arraylogchain._array.chains.tiles import Tile
from arraylogchain._context import DOUBLE, SINGLE, Array, Context
from arraylogchain._fold import chunks


class Stepper(Protocol):
    """Advances the states of a tile by one step at a time."""

    tile: Tile

    def admit(self, state: State) -> State:
        """Return a state of another stepper in this one's form."""

    def advance(
        self, before: State | None, i: int, ignored: Array | None, out: Array | None
    ) -> tuple[State, State, Array | None]:
        """Return the state after step i, the one before its potentials, and unproved rows."""


Level = Callable[[Tile], Stepper]


def proving_levels(ctx: Context, options: Options) -> list[Level]:
    """Return what makes steppers for sums over paths."""
    precisions = [SINGLE, DOUBLE] if ctx.widest is DOUBLE else [SINGLE]
    precisions = precisions[precisions.index(ctx.precision) :]
    return [
        *(partial(ScaledStepper, precision=each, options=options) for each in precisions),
        partial(LogStepper, options=options),
    ]


@dataclass(slots=True)
class Part:
    """Rows or groups of a tile that one stepper advances.

    Attributes
    ----------
    index : array [n] or None
        Which rows, or groups, of the sweep's tile these are; None for all.
    gone : bool array [groups, rows, 1] or None
        Of all rows, those that another part advances by now; their values mean nothing.
    is_idle : bool
        Whether all of them are.
    """

    stepper: Stepper | None
    index: Array | None
    state: State | None = None
    product: State | None = None
    gone: Array | None = None
    is_idle: bool = False


class Sweep:
    """Takes the states of a tile from step to step.

    Parameters
    ----------
    tile : Tile
    levels : sequence of callable
        Make the steppers of a tile, the fastest first; the last one proves every step.
    """

    def __init__(self, tile: Tile, levels: Sequence[Level]) -> None:
        self.tile, self.ctx, self.levels = tile, tile.ctx, levels
        self.step = 0
        # By level; the first has all rows.
        self.parts: dict[int, Part] = {}
        self.resume(0, None)

    def advance(self, out: Array | None = None) -> list[Part]:
        """Take all rows one step further; return them by parts, those of all rows first.

        The values of all rows go to `out`, if it is given.
        """
        i, self.step = self.step, self.step + 1
        unproved: Array | None = None
        before: State | None = None
        for level in range(len(self.levels)):
            if unproved is not None:
                self._admit(level, unproved, before)
            part = self.parts.get(level)
            unproved = None
            if part is None or part.is_idle:
                continue
            assert part.stepper is not None
            if not part.stepper.tile.count(i):
                continue
            before = part.state
            room = out if level == 0 else None
            part.state, part.product, bad = part.stepper.advance(before, i, part.gone, room)
            if bad is not None:
                unproved, before = self._dismiss(part, level, bad, before)
        return [self.parts[level] for level in sorted(self.parts)]

    def _dismiss(
        self, part: Part, level: int, bad: Array, before: State | None
    ) -> tuple[Array, State | None]:
        """Take rows out of a part; return their numbers, and their state before this step."""
        xp, axis = self.ctx.xp, self.tile.select_axis
        # Groups stay whole where there are several: each has matrices of its own.
        lanes = xp.any(bad, axis=1 - axis)[..., 0]
        (chosen,) = xp.nonzero(lanes)
        if before is not None:
            before = before.select(self.ctx, chosen, axis)
        if part.index is None:
            bad = xp.any(bad, axis=1, keepdims=True) if axis == 0 else bad
            part.gone = bad if part.gone is None else part.gone | bad
            part.is_idle = bool(xp.all(part.gone))
            return chosen, before
        (kept,) = xp.nonzero(~lanes)
        chosen_rows = xp.take(part.index, chosen)
        if int(kept.shape[0]) == 0:
            del self.parts[level]
        else:
            self._reselect(part, level, xp.take(part.index, kept))
            assert part.state is not None
            assert part.product is not None
            part.state = part.state.select(self.ctx, kept, axis)
            part.product = part.product.select(self.ctx, kept, axis)
        return chosen_rows, before

    def _admit(self, level: int, index: Array, before: State | None) -> None:
        """Add rows to a level, with their state before the step that is being taken."""
        part = self.parts.get(level)
        if part is None:
            part = self.parts[level] = Part(self.levels[level](self.tile.select(index)), index)
            assert part.stepper is not None
            part.state = None if before is None else part.stepper.admit(before)
            return
        assert part.stepper is not None
        assert part.state is not None
        assert before is not None  # a part that is there has taken a step
        assert part.index is not None
        state = concat(self.ctx, [part.state, part.stepper.admit(before)], self.tile.select_axis)
        index = self.ctx.xp.concat([part.index, index])
        order = self.ctx.xp.argsort(index)
        self._reselect(part, level, self.ctx.xp.take(index, order))
        part.state = state.select(self.ctx, order, self.tile.select_axis)

    def _reselect(self, part: Part, level: int, index: Array) -> None:
        part.index, part.stepper = index, self.levels[level](self.tile.select(index))

    def snapshot(self) -> list[tuple[int, Part]]:
        """Return what `resume` goes on from."""
        return [(level, self.kept(part)) for level, part in self.parts.items()]

    def kept(self, part: Part) -> Part:
        """Return a part with values of its own: steppers write over their memory."""
        assert part.state is not None
        values = self.ctx.xp.asarray(part.state.values, copy=True)
        own = replace(part.state, values=values)
        return replace(part, stepper=None, product=None, state=own)

    def resume(self, step: int, parts: Sequence[tuple[int, Part]] | None) -> None:
        """Go on after `step` steps, with the parts that there were then; None for the start."""
        self.step = step
        found = [(0, Part(None, None))] if parts is None else parts
        self.parts = {}
        for level, part in found:
            tile = self.tile if part.index is None else self.tile.select(part.index)
            self.parts[level] = replace(part, stepper=self.levels[level](tile))


def logs_of_all(tile: Tile, parts: Sequence[Part], products: bool = False) -> State:
    """Return the states of all rows of a tile, or the products before potentials, in log form."""
    ctx, xp, axis = tile.ctx, tile.ctx.xp, tile.select_axis
    states, index = [], []
    for part in parts:
        state = part.product if products else part.state
        assert state is not None
        if part.is_idle:
            continue
        if part.gone is not None:
            (kept,) = xp.nonzero(~xp.any(part.gone, axis=1 - axis)[..., 0])
            states.append(state.select(ctx, kept, axis))
            index.append(kept)
        elif part.index is None:
            return state.in_log_form(ctx)
        else:
            states.append(state)
            index.append(part.index)
    order = xp.argsort(xp.concat(index))
    logs = [state.in_log_form(ctx) for state in states]
    return concat(ctx, logs, axis).select(ctx, order, axis)


def states_of_all(tile: Tile, parts: Sequence[Part]) -> State:
    """Return the states of all rows of a tile, in log form if there are several parts."""
    state = parts[0].state if len(parts) == 1 else logs_of_all(tile, parts)
    assert state is not None
    return state


def with_final(tile: Tile, last: State) -> State:
    """Return the last states of all rows of a tile times the final weights."""
    ctx, final = tile.ctx, tile.reversed().start()
    if final is None:
        return last
    final = ctx.load(final, ctx.widest)
    logs = final if tile.chain.final_in_logs else ctx.xp.log(final)
    last = last.in_log_form(ctx)
    return replace(last, values=last.values + logs)


class History:
    """The states of a sweep, from the last step to the first.

    Of every block of steps the state before it is kept, and that of each step of the last block;
    the others are computed again, block by block.

    Parameters
    ----------
    sweep : Sweep
        It has not begun yet.
    block : int
        Steps whose states are in memory at a time.
    """

    def __init__(self, sweep: Sweep, block: int) -> None:
        self.sweep, self.block = sweep, block
        self.blocks = list(chunks(sweep.tile.num_steps, block))
        self.snapshots: list[list[tuple[int, Part]]] = []
        self.kept: list[list[Part]] = []
        self._slab: Array | None = None
        for steps in self.blocks:
            if sweep.step:
                self.snapshots.append(sweep.snapshot())
            if steps.stop == sweep.tile.num_steps:
                self.kept = self._run(steps)
            else:
                for _ in range(steps.start, steps.stop):
                    sweep.advance()
        self.last = self.kept[-1]

    def _run(self, steps: slice) -> list[list[Part]]:
        sweep, ctx = self.sweep, self.sweep.ctx
        if self._slab is None:
            shape = (min(self.block, sweep.tile.num_steps), *sweep.tile.state_shape)
            self._slab = ctx.empty(shape, ctx.dtype(ctx.precision))
        found = []
        for i in range(steps.stop - steps.start):
            first, *others = sweep.advance(out=self._slab[i, ...])
            first = replace(first, stepper=None, product=None)
            found.append([first, *(sweep.kept(part) for part in others)])
        return found

    def back(self) -> Iterator[tuple[int, list[Part]]]:
        """Yield the number of each step, and its parts."""
        for number in reversed(range(len(self.blocks))):
            steps = self.blocks[number]
            if number < len(self.blocks) - 1:
                self.kept = []
                self.sweep.resume(steps.start, self.snapshots[number - 1] if number else None)
                self.kept = self._run(steps)
            for i in reversed(range(steps.start, steps.stop)):
                yield i, self.kept[i - steps.start]
        if len(self.blocks) > 1:
            # Whoever comes next begins with the last block again.
            self.kept = []
            self.sweep.resume(self.blocks[-1].start, self.snapshots[-1])
            self.kept = self._run(self.blocks[-1])
