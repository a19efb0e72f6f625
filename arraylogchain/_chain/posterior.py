"""Forward passes that are kept, and the way back: values with gradients, posterior weights.

Each row of a tile is computed in the fastest form that proves it, forwards and backwards: scaled in
the precision of the computation, scaled in float64, or in logs. What a pass keeps is either every
state or one state in about sqrt(count), from which the others are computed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from arraylogchain._arrays import DOUBLE, SINGLE, Array, Context
from arraylogchain._chain.adjoint import ScaledAdjoint, adjoint_ceiling, first_adjoint
from arraylogchain._chain.gradient_sums import GradientSums, in_tile
from arraylogchain._chain.log_adjoint import LogAdjoint
from arraylogchain._chain.log_form import LogForm
from arraylogchain._chain.pieces import RecursionPlan, plan_posterior
from arraylogchain._chain.scaled_form import ScaledForm
from arraylogchain._chain.states import State
from arraylogchain._chain.steps import Chain, Steps
from arraylogchain._fold import Box, chunks


@dataclass(slots=True)
class _Pass:
    """A forward pass in one scaled form, over a tile or the rows of it that other forms left.

    `before` holds the states before each block, `history` those of the whole chain if it is kept.
    """

    form: ScaledForm
    steps: Steps
    last: State
    failed: Array | None
    before: list[State | None]
    history: list[State] | None


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
            form = ScaledForm(ctx, precision, False, plan, ceiling)
            form.store = store if not self.passes and rest is steps else None
            found = self._forward(form, rest)
            form.store = None
            rest = self._unproved(found)
            if rest is None or _units(rest) < _units(found.steps):
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

    def log_partition(self) -> Array:
        """Return the logs of the sums over all paths, [groups, rows, 1], as wide as can be."""
        xp = self.ctx.xp
        shape = (self.tile.groups, self.tile.rows, 1)
        dtype = self.ctx.dtype(self.ctx.widest)
        out = xp.zeros(shape, dtype=dtype, device=self.ctx.device)
        found = [(each.steps, each.last) for each in self.passes]
        if self.rest is not None:
            whole = slice(0, self.rest.chain.count)
            found.append((self.rest, self.log_form.run(self.rest, None, whole, False)[0]))
        for steps, last in found:
            value = last.log_total(self.ctx)
            here = in_tile(steps, xp.ones_like(value)) > 0
            out = xp.where(here, in_tile(steps, value), out)
        return out

    def add_gradients(self, cotangent: Array, sums: GradientSums, stored: Array | None) -> None:
        """Add the gradients for a cotangent [groups, rows, 1] of log Z.

        `stored` are the exponentials of the potentials, if they have been kept. They may lie in the
        memory of ``sums.potentials``: each step's are read before gradients take their place.
        """
        for found in self.passes:
            g = _picked(found.steps, cotangent)
            first, late = first_adjoint(self.ctx, found.form.precision, found.last, g, found.failed)
            adjoint = ScaledAdjoint(found.form, found.steps, self.box, sums, first, late)
            adjoint.failed = found.failed
            adjoint.stored = stored if found.steps.picked is None else None
            blocks = list(self._blocks())
            for block, before in zip(reversed(blocks), reversed(found.before), strict=True):
                history = found.history
                if history is None:
                    _, _, history = found.form.run(found.steps, before, block, record=True)
                adjoint.run(block, before, history)
        if self.rest is not None:
            self._add_in_logs(self.rest, cotangent, sums)

    def _forward(self, form: ScaledForm, steps: Steps) -> _Pass:
        keeps = self.plan.block >= steps.chain.count
        state: State | None = None
        failed: Array | None = None
        before = []
        history: list[State] | None = None
        for block in self._blocks():
            before.append(state)
            state, bad, states = form.run(steps, state, block, record=keeps)
            history = states if keeps else None
            if bad is not None:
                failed = bad if failed is None else failed | bad
        assert state is not None
        return _Pass(form, steps, state, failed, before, history)

    def _blocks(self) -> Iterator[slice]:
        return chunks(self.tile.chain.count, self.plan.block)

    def _unproved(self, found: _Pass) -> Steps | None:
        """Return the steps of the rows that a pass did not prove, if any; groups stay whole."""
        if found.failed is None:
            return None
        xp, axis = self.ctx.xp, found.steps.select_axis
        bad = xp.any(found.failed, axis=1 - axis)[..., 0]
        found.failed = xp.any(found.failed, axis=1, keepdims=True) if axis == 0 else found.failed
        return found.steps.pick(xp.nonzero(bad)[0])

    def _add_in_logs(self, rest: Steps, cotangent: Array, sums: GradientSums) -> None:
        """Add the gradients of what only the log form can do, a few rows or groups at a time."""
        chain, axis = rest.chain, rest.select_axis
        assert rest.picked is not None
        count = int(rest.picked.shape[0])
        each = 2 * 8 * chain.count * chain.size * (1 if axis else rest.rows)
        for part in chunks(count, max(1, self.plan.workspace // 4 // each)):
            steps = replace(rest, picked=rest.picked[part])
            block = max(1, self.plan.workspace // 4 // (8 * 4))
            adjoint = LogAdjoint(self.ctx, self.log_form, steps, self.box, sums, block)
            adjoint.run(_picked(steps, cotangent))


def _units(steps: Steps) -> int:
    """Return how many rows, or groups where there are several, steps are for."""
    return steps.rows_picked if steps.select_axis else steps.groups_picked


def _picked(steps: Steps, x: Array) -> Array:
    if steps.picked is None:
        return x
    return steps.ctx.xp.take(x, steps.picked, axis=steps.select_axis)


Pullback = Callable[[Array, frozenset[str]], dict[str, Array]]


def log_partition(ctx: Context, chain: Chain, workspace: int, keep: bool) -> tuple[Array, Pullback]:
    """Return the logs of the sums over all paths, [*batch], and their pullback.

    Parameters
    ----------
    keep : bool
        Whether every state is kept for the pullback, and not only one in about sqrt(count).

    Returns
    -------
    value : array [*batch]
    pullback : callable
        Takes a cotangent [*batch] and the names of wanted gradients, of 'potentials',
        'transitions' and 'start'. Returns them by name, in the chain's shapes and dtypes.
    """
    if chain.size == 0 or 0 in chain.batch:
        return _nothing(ctx, chain)
    out = ctx.empty(chain.batch, ctx.result_dtype)
    view = chain.arrange(ctx.xp, out, trailing=0)
    states = math.prod(chain.batch) * chain.count * chain.size * ctx.precision.itemsize
    keep = keep or states <= workspace
    plan = plan_posterior(*chain.sizes, chain.size, chain.count, workspace, keep)
    store = _store(ctx, chain, plan)
    tiles = []
    for box, steps in chain.tiles(ctx, plan.groups, plan.rows):
        whole = None
        if store is not None:
            whole = ctx.xp.reshape(store, (*chain.sizes, chain.count, chain.size))
        tile = TilePosterior(steps, box, plan, whole)
        store = None if tile.store is None else store
        tiles.append(tile)
        value = ctx.xp.reshape(tile.log_partition(), steps.shape)
        view[(*box, ...)] = ctx.xp.astype(value, view.dtype)
    kept = [store]

    def pullback(cotangent: Array, wanted: frozenset[str]) -> dict[str, Array]:
        # The gradient by the potentials takes the memory of their exponentials. What is not kept
        # any more is computed again.
        memory = kept.pop() if kept and "potentials" in wanted else None
        given = _arrays(chain)
        sums = GradientSums(ctx, chain)
        for name in wanted:
            if name == "potentials" and memory is not None:
                sums.potentials = memory
            else:
                setattr(sums, name, _zeros(ctx, chain, tuple(given[name].shape), workspace))
        stored = None
        if memory is not None:
            stored = ctx.xp.reshape(memory, (*chain.sizes, chain.count, chain.size))
        _add_gradients(tiles, cotangent, sums, stored)
        return {
            name: ctx.xp.astype(getattr(sums, name), given[name].dtype, copy=False)
            for name in wanted
        }

    return out, pullback


def _arrays(chain: Chain) -> dict[str, Array]:
    return {
        "potentials": chain.potentials,
        "transitions": chain.transitions,
        "start": chain.start,
    }


def _nothing(ctx: Context, chain: Chain) -> tuple[Array, Pullback]:
    """Return the value and the pullback of chains without states, or of no chain."""
    xp = ctx.xp
    out = xp.full(chain.batch, -math.inf, dtype=ctx.result_dtype, device=ctx.device)

    def pullback(cotangent: Array, wanted: frozenset[str]) -> dict[str, Array]:
        return {name: xp.zeros_like(x) for name, x in _arrays(chain).items() if name in wanted}

    return out, pullback


def _add_gradients(
    tiles: list[TilePosterior], cotangent: Array, sums: GradientSums, stored: Array | None
) -> None:
    view = sums.chain.arrange(sums.ctx.xp, cotangent, trailing=0)
    for tile in tiles:
        g = sums.ctx.xp.reshape(view[(*tile.box, ...)], (tile.tile.groups, tile.tile.rows, 1))
        tile.add_gradients(g, sums, stored)


def _store(ctx: Context, chain: Chain, plan: RecursionPlan) -> Array | None:
    """Return memory for the exponentials of all potentials where their gradient can take it later.

    Possible for potentials of the whole batch, in the precision of the computation, that are one
    tile of kept states.
    """
    x = chain.potentials
    axes = (*chain.group_axes, *chain.row_axes)
    if (
        x is None
        or (plan.groups, plan.rows) != chain.sizes
        or plan.block < chain.count
        or tuple(x.shape[:-2]) != chain.batch
        or x.dtype != ctx.dtype(ctx.precision)
        or axes != tuple(range(len(chain.batch)))
    ):
        return None
    return ctx.empty(tuple(x.shape), x.dtype)


def _zeros(ctx: Context, chain: Chain, shape: tuple[int, ...], workspace: int) -> Array:
    """Return an accumulator: wider where many steps are added up, if that is cheap."""
    wide = len(shape) > 2 and shape[-3] == 1 and 8 * math.prod(shape) <= workspace // 8
    dtype = ctx.dtype(ctx.widest if wide else ctx.precision)
    return ctx.xp.zeros(shape, dtype=dtype, device=ctx.device)


def marginals(ctx: Context, chain: Chain, segments: int, workspace: int) -> Array:
    """Return the posterior probabilities of all states at all steps, [*batch, count, K]."""
    shape = (*chain.batch, chain.count, chain.size)
    sums = GradientSums(ctx, chain)
    sums.potentials = ctx.xp.zeros(shape, dtype=ctx.dtype(ctx.precision), device=ctx.device)
    _add_posterior(ctx, chain, workspace, sums)
    return ctx.xp.astype(sums.potentials, ctx.result_dtype, copy=False)


def expected_transitions(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return expected counts in the shape of the transitions."""
    assert chain.transitions is not None
    sums = GradientSums(ctx, chain, as_counts=True)
    sums.transitions = _zeros(ctx, chain, tuple(chain.transitions.shape), workspace)
    _add_posterior(ctx, chain, workspace, sums)
    return ctx.xp.astype(sums.transitions, ctx.result_dtype, copy=False)


def _add_posterior(ctx: Context, chain: Chain, workspace: int, sums: GradientSums) -> None:
    """Add the gradients for cotangents of one, tile by tile, keeping nothing."""
    plan = plan_posterior(*chain.sizes, chain.size, chain.count, workspace, keep=False)
    for box, steps in chain.tiles(ctx, plan.groups, plan.rows):
        tile = TilePosterior(steps, box, plan)
        shape = (steps.groups, steps.rows, 1)
        ones = ctx.xp.ones(shape, dtype=ctx.dtype(ctx.precision), device=ctx.device)
        tile.add_gradients(ones, sums, None)
