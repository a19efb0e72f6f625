"""The way back through chains: posteriors, and values with their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from arraylogchain._compiled.chains.sources import frozen
from arraylogchain._compiled.chains.sums import Sum, lanes_of
from arraylogchain._compiled.chains.sweep import History, State, Sweep
from arraylogchain._compiled.loops.compiling import Floats
from arraylogchain._compiled.loops.posterior import posterior as add_posterior
from arraylogchain._compiled.loops.recursion import COTANGENT
from arraylogchain._context import Array, Context
from arraylogchain._fold import Shape
from arraylogchain._inputs.chain import Chain
from arraylogchain._threads import share

Pullback = Callable[[Array, frozenset[str]], dict[str, Array]]


@dataclass(slots=True)
class Forward:
    """The forward pass of a tile: totals, and the states of a window of steps.

    Attributes
    ----------
    nan : array
        Whether the total of each row is NaN.
    starts : list of State
        The state before each window, if there are several.
    history : History
        Of the last window.
    """

    rows: range
    totals: Floats
    nan: Floats
    windows: list[range]
    starts: list[State]
    history: History


class Posterior:
    """A chain whose forward states are met on the way back."""

    def __init__(self, chain: Chain, workspace: int, backward: str | None = "transposed") -> None:
        self.sweep = Sweep(chain, workspace, "weights", backward)
        self.step_bytes = 16 * self.sweep.K + 1
        self.row_bytes = min(self.sweep.T * self.step_bytes, self.sweep.budget)

    def forward(self, rows: range, keep: bool = False) -> Forward:
        """Run the forward pass of a tile; `keep` says to keep all states, whatever they take."""
        sweep = self.sweep
        windows = [range(sweep.T)] if keep else sweep.windows(rows, self.step_bytes)
        totals, state, starts = np.empty(len(rows)), sweep.state(rows), []
        for window in windows[:-1]:
            starts.append((state[0].copy(), state[1].copy(), state[2].copy()))
            sweep.forward(rows, window, state, totals=totals)
        history = self._window(rows, windows[-1], state, totals)
        return Forward(rows, totals, np.isnan(totals).astype(np.float64), windows, starts, history)

    def windows(self, forward: Forward) -> Iterator[tuple[range, History]]:
        """Yield windows and their states, the last one first."""
        yield forward.windows[-1], forward.history
        for window, start in zip(forward.windows[-2::-1], forward.starts[::-1], strict=True):
            again = (start[0].copy(), start[1].copy(), start[2].copy())
            yield window, self._window(forward.rows, window, again, np.empty(len(forward.totals)))

    def _window(self, rows: range, window: range, state: State, totals: Floats) -> History:
        history = History.empty(rows, window, self.sweep.K)
        start = [x.copy() for x in state]
        if self.sweep.forward(rows, window, state, history=history, totals=totals):
            history.make_wide()
            for x, before in zip(state, start, strict=True):
                x[...] = before
            self.sweep.forward(rows, window, state, history=history, totals=totals)
        return history

    def add(self, forward: Forward, cotangents: Floats, by_weight: bool, sums: Any) -> None:
        """Add the derivatives of a tile's totals, times cotangents, to sums by name."""
        sweep, rows = self.sweep, forward.rows
        state = sweep.state(rows)
        step_bytes = sum(each.step_bytes for each in sums.values())
        for window, history in self.windows(forward):
            for block in reversed(list(sweep.blocks(rows, window, step_bytes))):
                self._add_block(forward, block, state, history, cotangents, by_weight, sums)

    def _add_block(
        self,
        forward: Forward,
        block: range,
        state: State,
        history: History,
        cotangents: Floats,
        by_weight: bool,
        sums: Any,
    ) -> None:
        sweep, rows = self.sweep, forward.rows
        arrays = sweep.read(rows, block, backward=True)
        groups, moves, maps = sweep.groups(rows), sweep.moves(block, backward=True), arrays[0][3]
        if cotangents is _ONE:
            maps[COTANGENT] = 0
        opened = {
            name: each.open(rows, groups, moves if name == "transitions" else block, maps)
            for name, each in sums.items()
        }
        to_x, x_begin = opened.get("potentials", (_NOTHING, 0))
        to_P, P_begin = opened.get("transitions", (_NO_MATRICES, 0))
        to_initial, to_final = (opened.get(name, (_NOTHING, 0))[0] for name in ("initial", "final"))
        of_rows = (forward.totals, forward.nan, cotangents)
        to = (to_x, x_begin, to_P, P_begin, to_initial, to_final)
        span = (block.start, block.stop)
        add_posterior(*arrays, *span, state, history.arrays, of_rows, by_weight, to)
        for name, each in sums.items():
            each.close(rows, groups, moves if name == "transitions" else block)

    def sums(
        self,
        forward: Callable[[range], Forward],
        wanted: dict[str, tuple[Shape, Any]],
        cotangents: Floats,
        by_weight: bool,
        workspace: int,
    ) -> dict[str, Array]:
        """Return sums by name, of shapes and dtypes that are given, over all rows."""
        sweep, layout = self.sweep, self.sweep.layout

        def made() -> dict[str, Sum]:
            return {name: Sum(name, *kind, layout) for name, kind in wanted.items()}

        tile, workers = sweep.tile(self.row_bytes)
        tiles = -(-layout.num_rows // tile)
        first = made()
        count, in_double = lanes_of(list(first.values()), tiles, workspace // 8)
        lanes = [first, *(made() for _ in range(count - 1))]
        for lane in lanes:
            for (name, each), double in zip(lane.items(), in_double, strict=True):
                if lane is not first and each.is_apart:
                    each.total = first[name].total
                else:
                    each.begin(double)
        in_lane = -(-tiles // count)

        def work(start: int, stop: int) -> None:
            for lane in range(start, stop):
                for i in range(lane * in_lane, min((lane + 1) * in_lane, tiles)):
                    rows = range(i * tile, min((i + 1) * tile, layout.num_rows))
                    self.add(forward(rows), cotangents, by_weight, lanes[lane])

        share(work, count, 1, workers)
        others = {name: [lane[name] for lane in lanes[1:]] for name in wanted}
        return {name: each.finish(others[name]) for name, each in first.items()}


_ONE = frozen(np.ones(1))
_NOTHING = np.empty((0, 0, 0))
_NO_MATRICES = np.empty((0, 0, 0, 0))


def marginals(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the posterior probabilities of all states at all steps, [*batch, T, K]."""
    shape = (*chain.batch, chain.num_steps, chain.num_states)
    return _posterior_sum(ctx, chain, workspace, "potentials", shape)


def expected_transitions(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return expected counts in the shape of the transitions."""
    assert chain.transitions is not None
    return _posterior_sum(ctx, chain, workspace, "transitions", chain.transitions.shape)


def _posterior_sum(ctx: Context, chain: Chain, workspace: int, name: str, shape: Shape) -> Array:
    if 0 in shape or 0 in chain.batch:
        return np.zeros(shape, ctx.result_dtype)
    whole = Posterior(chain, workspace)
    wanted = {name: (shape, ctx.result_dtype)}
    return whole.sums(whole.forward, wanted, _ONE, False, workspace)[name]


def posterior(ctx: Context, chain: Chain, workspace: int) -> tuple[Array, Array, Array | None]:
    """Return log Z [*batch], marginals [*batch, T, K], and expected counts or None."""
    totals = np.empty(chain.batch, ctx.result_dtype)
    shape = (*chain.batch, chain.num_steps, chain.num_states)
    wanted: dict[str, tuple[Shape, Any]] = {"potentials": (shape, ctx.result_dtype)}
    if chain.transitions is not None:
        wanted["transitions"] = (chain.transitions.shape, ctx.result_dtype)
    whole, flat = Posterior(chain, workspace), totals.reshape(-1)

    def forward(rows: range) -> Forward:
        found = whole.forward(rows)
        flat[whole.sweep.layout.positions(rows)] = found.totals
        return found

    sums = whole.sums(forward, wanted, _ONE, False, workspace)
    return totals, sums["potentials"], sums.get("transitions")


def value_and_pullback(
    ctx: Context, chain: Chain, workspace: int, keep: bool
) -> tuple[Array, Pullback]:
    """Return the logs of the sums over all paths, [*batch], and their pullback.

    Parameters
    ----------
    ctx : Context
    chain : Chain
    workspace : int
    keep : bool
        Whether every state is kept for the pullback though that takes more than the workspace.

    Returns
    -------
    value : array [*batch]
    pullback : callable
        Takes a cotangent [*batch] and names among 'potentials', 'transitions', 'initial' and
        'final'. Returns gradients by name, in the shapes and dtypes of the chain's arrays.
    """
    out = np.full(chain.batch, -math.inf, ctx.result_dtype)
    given = {
        name: getattr(chain, name) for name in ("potentials", "transitions", "initial", "final")
    }
    if chain.num_states == 0 or out.size == 0:

        def nothing(cotangent: Array, wanted: frozenset[str]) -> dict[str, Array]:
            return {name: np.zeros_like(given[name]) for name in wanted}

        return out, nothing
    whole = Posterior(chain, workspace)
    sweep, flat = whole.sweep, out.reshape(-1)
    keep |= flat.size * sweep.T * whole.step_bytes <= workspace // 2
    kept: dict[int, Forward] = {}

    def work(rows: range) -> None:
        if keep:
            kept[rows.start] = whole.forward(rows, keep=True)
            totals = kept[rows.start].totals
        else:
            totals = np.empty(len(rows))
            sweep.forward(rows, range(sweep.T), sweep.state(rows), totals=totals)
        flat[sweep.layout.positions(rows)] = totals

    sweep.share(work, whole.row_bytes)

    def forward(rows: range) -> Forward:
        return kept[rows.start] if keep else whole.forward(rows)

    def pullback(cotangent: Array, wanted: frozenset[str]) -> dict[str, Array]:
        shapes = {name: (given[name].shape, given[name].dtype) for name in given if name in wanted}
        cotangents = frozen(np.ascontiguousarray(cotangent, np.float64).reshape(-1))
        by_weight = not chain.transitions_in_logs
        return whole.sums(forward, shapes, cotangents, by_weight, workspace)

    return out, pullback
