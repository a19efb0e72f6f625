"""The backward pass through chains: posteriors, and values with their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from arraylogchain._compiled.chains import packs
from arraylogchain._compiled.chains.sources import frozen
from arraylogchain._compiled.chains.sums import Sum, begin
from arraylogchain._compiled.chains.sweep import NO_MESSAGES, NO_STATES, Sweep
from arraylogchain._compiled.loops.compiling import Floats, Integers
from arraylogchain._compiled.loops.posterior import posterior as add_posterior
from arraylogchain._compiled.loops.recursion import COTANGENT
from arraylogchain._context import Array, Context
from arraylogchain._fold import Shape
from arraylogchain._inputs.chain import Chain
from arraylogchain._threads import share

Pullback = Callable[[Array, frozenset[str]], dict[str, Array]]
# Totals of a tile, and windows of steps, the last one first, with the history of each.
Forward = tuple[Floats, Iterable[tuple[range, Any]]]
# Rows of a tile, and what is kept of their pass forward.
Parts = list[tuple[range, Forward]]


class Posterior:
    """A chain whose forward states are met on the backward pass."""

    def __init__(self, chain: Chain, workspace: int) -> None:
        self.sweep = Sweep(chain, workspace, "weights", "transposed", in_packs=True)
        self.step_bytes = 16 * self.sweep.K + 1
        self.row_bytes = min(self.sweep.T * self.step_bytes, self.sweep.budget)

    def forward(self, rows: range, keep: bool = False) -> Forward:
        """Run the forward pass of a tile; `keep` says to keep all states, whatever they take."""
        # Exponents take as much as the states themselves, and are there for wide ones only.
        found = self._forward(rows, keep, wide=False) or self._forward(rows, keep, wide=True)
        assert found is not None
        return found

    def _forward(self, rows: range, keep: bool, wide: bool) -> Forward | None:
        """Run it, with memory for wide states or without; None if that was not enough."""
        sweep, lacks = self.sweep, False
        step_bytes = self.step_bytes if wide else 8 * sweep.K + 1
        length = sweep.T if keep else sweep.window(rows, step_bytes)
        shape = (len(rows), length, sweep.K)
        kept, exponents = np.empty(shape), np.empty(shape) if wide else NO_STATES
        are_wide, totals = np.empty(shape[:2], np.uint8), np.empty(len(rows))

        def history(window: range) -> tuple[Any, ...]:
            return kept, exponents, are_wide, window.start

        def run(window: range, states: Floats) -> None:
            nonlocal lacks
            if not lacks:
                kept_in = history(window)
                lacks = sweep.forward(rows, window, states, history=kept_in, totals=totals)

        windows = sweep.windows(length, sweep.state(rows), run)
        return None if lacks else (totals, ((window, history(window)) for window in windows))

    def add(
        self,
        forward: Forward,
        rows: range,
        cotangents: Floats,
        by_weight: bool,
        sums: dict[str, Sum],
    ) -> None:
        """Add the derivatives of a tile's totals, times cotangents, to sums by name."""
        sweep, (totals, windows) = self.sweep, forward
        states = sweep.state(rows)
        step_bytes = sum(each.step_bytes for each in sums.values())
        for window, history in windows:
            for steps in reversed(sweep.blocks(rows, window, step_bytes)):
                block = sweep.read(rows, steps, backward=True)
                spans = self._spans(sums, steps)
                to = self._open(sums, rows, spans, block[0][3], cotangents)
                add_posterior(block, states, history, totals, cotangents, by_weight, to)
                self._close(sums, rows, spans)

    def _spans(self, sums: dict[str, Sum], steps: range) -> dict[str, range]:
        """Return which steps, or transitions, of some steps are in each sum."""
        spans = dict.fromkeys(sums, steps)
        if "transitions" in sums:
            spans["transitions"] = self.sweep.moves(steps, backward=True)
        return spans

    def _open(
        self,
        sums: dict[str, Sum],
        rows: range,
        spans: dict[str, range],
        maps: Integers,
        cotangents: Floats,
    ) -> tuple[Any, ...]:
        """Return what loops add derivatives of a block to; enter maps."""
        groups = self.sweep.groups(rows)
        if cotangents is _ONE:
            maps[COTANGENT] = 0
        opened = {name: each.open(rows, groups, spans[name], maps) for name, each in sums.items()}
        return (
            *opened.get("potentials", NO_MESSAGES),
            *opened.get("transitions", (_NO_MATRICES, 0)),
            opened.get("initial", NO_MESSAGES)[0],
            opened.get("final", NO_MESSAGES)[0],
        )

    def _close(self, sums: dict[str, Sum], rows: range, spans: dict[str, range]) -> None:
        groups = self.sweep.groups(rows)
        for name, each in sums.items():
            each.close(rows, groups, spans[name])

    def add_tile(
        self,
        rows: range,
        kept: Parts,
        results: Array | None,
        cotangents: Floats,
        by_weight: bool,
        sums: dict[str, Sum],
    ) -> None:
        """Add the derivatives of a tile, parts of which may have been kept.

        Totals of the others are written to the results, if there are any.
        """
        sweep, steps = self.sweep, range(self.sweep.T)
        for part, forward in kept:
            self.add(forward, part, cotangents, by_weight, sums)
        left = [] if kept else [rows]
        if sweep.in_packs:
            block = sweep.read(rows, steps)
            spans = self._spans(sums, steps)
            to = self._open(sums, rows, spans, block[0][3], cotangents)
            done = [part for part, _ in kept]
            totals, left = packs.take_packs(block, done, (cotangents, by_weight, to))
            self._close(sums, rows, spans)
            if results is not None:
                results[sweep.layout.positions(rows)] = totals
        for part in left:
            forward = self.forward(part)
            if results is not None:
                results[sweep.layout.positions(part)] = forward[0]
            self.add(forward, part, cotangents, by_weight, sums)

    def sums(
        self,
        kept: dict[int, Parts],
        results: Array | None,
        wanted: dict[str, tuple[Shape, Any]],
        cotangents: Floats,
        by_weight: bool,
        workspace: int,
    ) -> dict[str, Array]:
        """Return sums by name, of shapes and dtypes that are given, over all rows.

        By their first rows, `kept` has parts of tiles; see `add_tile`.
        """
        sweep, layout = self.sweep, self.sweep.layout

        tile, workers = sweep.tile(self.row_bytes)
        tiles = -(-layout.num_rows // tile)
        first = {name: Sum(name, *kind, layout) for name, kind in wanted.items()}
        count = begin(list(first.values()), tiles, workspace // 8)
        others = [{name: first[name].again() for name in first} for _ in range(count - 1)]
        lanes = [first, *others]
        in_lane = -(-tiles // count)

        def work(start: int, stop: int) -> None:
            for lane in range(start, stop):
                for i in range(lane * in_lane, min((lane + 1) * in_lane, tiles)):
                    rows = range(i * tile, min((i + 1) * tile, layout.num_rows))
                    parts = kept.get(rows.start, [])
                    self.add_tile(rows, parts, results, cotangents, by_weight, lanes[lane])

        share(work, count, 1, workers)
        return {name: each.finish([lane[name] for lane in others]) for name, each in first.items()}


_ONE = frozen(np.ones(1))
_NO_MATRICES = np.empty((0, 0, 0, 0))


def marginals(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the posterior probabilities of all states at all steps, [*batch, T, K]."""
    return _posterior(ctx, chain, workspace, "potentials")[1]["potentials"]


def expected_transitions(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return expected counts in the shape of the transitions."""
    return _posterior(ctx, chain, workspace, "transitions")[1]["transitions"]


def posterior(ctx: Context, chain: Chain, workspace: int) -> tuple[Array, Array, Array | None]:
    """Return log Z [*batch], marginals [*batch, T, K], and expected counts or None."""
    names = ("potentials",) if chain.transitions is None else ("potentials", "transitions")
    totals, sums = _posterior(ctx, chain, workspace, *names)
    return totals, sums["potentials"], sums.get("transitions")


def _posterior(
    ctx: Context, chain: Chain, workspace: int, *names: str
) -> tuple[Array, dict[str, Array]]:
    """Return log Z [*batch], and by name what is asked for of marginals and expected counts."""
    shapes = {"potentials": (*chain.batch, chain.num_steps, chain.num_states)}
    if chain.transitions is not None:
        shapes["transitions"] = chain.transitions.shape
    totals = np.empty(chain.batch, ctx.result_dtype)
    whole, flat = Posterior(chain, workspace), totals.reshape(-1)
    wanted = {name: (shapes[name], ctx.result_dtype) for name in names}
    return totals, whole.sums({}, flat, wanted, _ONE, False, workspace)


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
    out = np.empty(chain.batch, ctx.result_dtype)
    names = ("potentials", "transitions", "initial", "final")
    given = {name: getattr(chain, name) for name in names}
    whole = Posterior(chain, workspace)
    sweep, flat = whole.sweep, out.reshape(-1)
    keep |= flat.size * sweep.T * whole.step_bytes <= workspace // 2
    kept: dict[int, Parts] = {}

    def work(rows: range) -> None:
        if keep:
            totals, left = sweep.take_packs(rows)
            parts = kept[rows.start] = []
            for part in left:
                found, windows = whole.forward(part, keep=True)
                parts.append((part, (found, list(windows))))
                totals[part.start - rows.start : part.stop - rows.start] = found
        else:
            totals = sweep.log_totals(rows)
        flat[sweep.layout.positions(rows)] = totals

    sweep.share(work, whole.row_bytes)

    def pullback(cotangent: Array, wanted: frozenset[str]) -> dict[str, Array]:
        shapes = {name: (given[name].shape, given[name].dtype) for name in given if name in wanted}
        cotangents = frozen(np.ascontiguousarray(cotangent, np.float64).reshape(-1))
        by_weight = not chain.transitions_in_logs
        return whole.sums(kept, None, shapes, cotangents, by_weight, workspace)

    return out, pullback
