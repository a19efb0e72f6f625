"""Sweeps over the steps of a tile: every step proved, or taken again in a wider form.

A tile begins with scaled states in the precision of the computation. Where a step is not proved for
some row, all rows go on in float64 from the state before that step; rows, or groups, that float64
does not prove either go on from there in log form, which needs no proof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from arraylogchain._array.chains.logs import LogStepper
from arraylogchain._array.chains.plans import cut_chain
from arraylogchain._array.chains.scaled import Options, ScaledStepper
from arraylogchain._array.chains.states import State, joined, part_of
from arraylogchain._array.chains.tiles import Tile, tiles
from arraylogchain._context import Array, Context, Precision
from arraylogchain._fold import chunks
from arraylogchain._inputs.chain import Chain


@dataclass(slots=True)
class Step:
    """The states of the rows of a tile that have a step, and what they were before its potentials.

    Attributes
    ----------
    precision : Precision
        Of scaled states.
    state, product : State
        Of all those rows; the values of what is in log form mean nothing, but are finite.
    index : array [n] or None
        Which rows, or groups, are in log form.
    gone : bool array [groups, rows, 1] or None
        The same as a mask of the whole tile.
    logs, log_product : State or None
        Of those alone.
    """

    precision: Precision
    state: State
    product: State
    index: Array | None = None
    gone: Array | None = None
    logs: State | None = None
    log_product: State | None = None

    def in_log_form(self, tile: Tile, products: bool = False) -> State:
        """Return the states, or the products before potentials, in log form."""
        ctx = tile.ctx
        state, logs = (self.product, self.log_product) if products else (self.state, self.logs)
        state = state.in_log_form(ctx)
        if self.index is None or logs is None:
            return state
        state = state.copy(ctx)
        index = self.index[: int(logs.values.shape[tile.select_axis])]
        for name in ("values", "exponent", "offset"):
            tile.put_lanes(getattr(state, name), index, getattr(logs, name))
        return state

    def of_all(self, tile: Tile, products: bool = False) -> State:
        """Return the same, in log form only if that of one row is."""
        if self.logs is not None:
            return self.in_log_form(tile, products)
        return self.product if products else self.state


class TooWideError(Exception):
    """A step needs float64, and there is no memory for that."""


class Sweep:
    """Takes the states of a tile from step to step.

    Parameters
    ----------
    tile : Tile
    options : Options
    stepper : callable
        Makes what advances all rows in a precision.
    """

    def __init__(
        self, tile: Tile, options: Options, stepper: Callable[..., Any] = ScaledStepper
    ) -> None:
        self.tile, self.ctx, self.options, self.stepper = tile, tile.ctx, options, stepper
        self.resume(0, None)

    def last(self) -> State:
        """Go on to the end; return the state of each row of the tile after its last step."""
        while self.number < self.tile.num_steps:
            self.advance()
        # Shorter rows come after longer ones.
        return joined(self.ctx, self._ended[::-1], self.tile.select_axis)

    def resume(self, number: int, step: Step | None) -> None:
        """Go on after so many steps, the last of which is given; None at the start."""
        self.number, self.step = number, step
        self._ended: list[State] = []
        precision = self.ctx.precision if step is None else step.precision
        self.scaled = self.stepper(self.tile, precision, self.options)
        self.in_logs: LogStepper | None = None
        if step is not None and step.index is not None:
            self.in_logs = LogStepper(self.tile.select(step.index), self.options)

    def advance(self, room: Array | None = None) -> Step:
        """Take all rows that have another step to it.

        The values of the states are written over by the step after the next one, unless there is a
        room for them [groups, rows, K]; those of products by the next one.
        """
        i, before, widest = self.number, self.step, self.ctx.widest
        step, bad = self._scaled(i, before, room)
        if bad is not None and self.scaled.precision is not widest:
            if not self.options.widens:
                raise TooWideError
            self.scaled = self.stepper(self.tile, widest, self.options)
            step, bad = self._scaled(i, before, room)
        log_state = None if before is None else before.logs
        if bad is not None:
            log_state = self._give_up(step, bad, before)
        if self.in_logs is not None:
            step.logs, step.log_product = self.in_logs.advance(log_state, i)
        self.number, self.step = i + 1, step
        ending = self.tile.ending(i)
        if ending.start < ending.stop:
            ended = step.of_all(self.tile).part(ending, self.tile.select_axis)
            self._ended.append(ended.copy(self.ctx))
        return step

    def _scaled(self, i: int, before: Step | None, room: Array | None) -> tuple[Step, Array | None]:
        """Advance scaled states; return which rows are not proved, if any."""
        state = index = gone = None
        if before is not None:
            state, index, gone = before.state, before.index, before.gone
            lanes, axis = slice(self.tile.count(i)), self.tile.select_axis
            if gone is not None and bool(self.ctx.xp.all(part_of(gone, lanes, axis))):
                state, product = (x.part(lanes, axis) for x in (state, before.product))
                return replace(before, state=state, product=product), None
        state, product, bad = self.scaled.advance(state, i, gone, room)
        return Step(self.scaled.precision, state, product, index, gone), bad

    def _give_up(self, step: Step, bad: Array, before: Step | None) -> State | None:
        """Let rows go on in log form; return their states before the step."""
        xp, tile, axis = self.ctx.xp, self.tile, self.tile.select_axis
        # Groups stay whole where there are several: each has matrices of its own.
        bad = xp.any(bad, axis=1, keepdims=True) | xp.zeros_like(bad) if axis == 0 else bad
        here = slice(int(bad.shape[axis]))
        if step.gone is None:
            shape = (*tile.state_shape[:2], 1)
            gone = xp.zeros(shape, dtype=xp.bool, device=self.ctx.device)
        else:
            gone = xp.asarray(step.gone, copy=True)
        part_of(gone, here, axis)[...] |= bad
        step.gone = gone
        (step.index,) = xp.nonzero(xp.any(part_of(gone, here, axis), axis=1 - axis)[..., 0])
        logs = tile.select(step.index)
        self.in_logs = LogStepper(logs, self.options)
        if before is None:
            return None
        moved = step.index[: logs.count_moves(self.number)]
        return before.in_log_form(tile).select(self.ctx, moved, axis)


def sweeps(
    ctx: Context,
    chain: Chain,
    workspace: int,
    backward: bool = False,
    stepper: Callable[..., Any] = ScaledStepper,
    **proof: bool,
) -> Iterator[tuple[Tile, Sweep]]:
    """Yield the tiles of a chain, and sweeps over them that have not begun."""
    pieces = cut_chain(chain, workspace)
    for tile in tiles(ctx, chain, pieces.groups, pieces.rows):
        read = tile.reversed() if backward else tile
        yield read, Sweep(read, Options(pieces, **proof), stepper)


def with_final(tile: Tile, last: State) -> State:
    """Return the last states of rows of a tile times the final weights."""
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
    """

    def __init__(self, sweep: Sweep) -> None:
        self.sweep, ctx, pieces = sweep, sweep.ctx, sweep.options.pieces
        self.blocks = list(chunks(sweep.tile.num_steps, pieces.block))
        shape = (min(pieces.block, sweep.tile.num_steps), *sweep.tile.state_shape)
        # Memory in one piece costs less time.
        self._slab = ctx.empty(shape, ctx.dtype(ctx.precision))
        self.before: list[Step | None] = []
        for steps in self.blocks:
            self.before.append(sweep.step)
            if steps is self.blocks[-1]:
                self._run(steps)
                continue
            for i in range(steps.start, steps.stop):
                is_last = i == steps.stop - 1
                sweep.advance(ctx.empty(shape[1:], self._slab.dtype) if is_last else None)
        self.last = sweep.last()

    def _run(self, steps: slice) -> None:
        count = steps.stop - steps.start
        self.kept = [self.sweep.advance(self._slab[i, ...]) for i in range(count)]
        self.held = steps

    def back(self) -> Iterator[tuple[int, Step]]:
        """Yield the number of each step, and the step."""
        for steps, before in zip(reversed(self.blocks), reversed(self.before), strict=True):
            if self.held is not steps:
                self.kept = []
                self.sweep.resume(steps.start, before)
                self._run(steps)
            for i in reversed(range(steps.start, steps.stop)):
                yield i, self.kept[i - steps.start]


def histories(
    ctx: Context,
    chain: Chain,
    workspace: int,
    keep: bool = False,
    stepper: Callable[..., Any] = ScaledStepper,
    **proof: bool,
) -> Iterator[tuple[Tile, History]]:
    """Yield the tiles of a chain, and histories of sweeps over them, which fit one at a time.

    With `keep` they are not a part of the workspace. A tile that turns out to need states in
    float64 is cut into smaller ones.
    """
    own = ctx.precision.itemsize
    # Rooms that were made for states in float32 are there besides.
    wider = own if ctx.precision is ctx.widest else own + ctx.widest.itemsize
    pieces, wide = (cut_chain(chain, workspace, 0 if keep else size) for size in (own, wider))
    options = Options(pieces, widens=pieces == wide, **proof)
    for tile in tiles(ctx, chain, pieces.groups, pieces.rows):
        try:
            yield tile, History(Sweep(tile, options, stepper))
        except TooWideError:
            most = wide.rows if tile.select_axis else wide.groups
            for lanes in chunks(tile.state_shape[tile.select_axis], most):
                part = tile.part(lanes)
                yield part, History(Sweep(part, Options(wide, **proof), stepper))
