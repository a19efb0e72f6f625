"""Paths of largest weight: forward with max-plus steps, and back along what they found.

The way back needs the states of all steps. Where they do not fit the workspace, time is cut into
windows: the state at the start of each is kept, and the rest is computed again, window by window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from arraylogchain._chain.steps import Chain, Steps
from arraylogchain._chain.viterbi.segments import SegmentedWindow, best_segments, fewer_segments
from arraylogchain._chain.viterbi.steps import BestSteps, PlainWindow
from arraylogchain._context import Array, Context
from arraylogchain._fold import Box, chunks
from arraylogchain.plan import Segments

# Elements of a state beyond which more rows do not make a step cheaper for each.
_USEFUL = 1 << 17


@dataclass(frozen=True, slots=True)
class PathPlan:
    """How the chains are cut: `groups` and `rows` of a tile, steps of a window."""

    groups: int
    rows: int
    window: int


def plan_paths(
    sizes: tuple[int, int], size: int, count: int, itemsize: int, workspace: int
) -> PathPlan:
    """Choose tiles whose states fit about half the workspace, all of them or those of a window.

    Parameters
    ----------
    sizes : tuple of int
        Numbers of groups with matrices of their own, and of rows in each.
    size, count : int
        K and T.
    """
    groups, rows = sizes
    state = size * itemsize
    budget = workspace * 2 // 5 // state  # in states of one row
    useful = max(1, _USEFUL // size)
    fit = budget // count
    lanes = min(useful, max(1, workspace // 2 // step_bytes(size, itemsize)))
    if fit >= min(groups * rows, 64, useful):
        lanes = min(lanes, fit)
    else:
        lanes = max(1, min(lanes, budget // (2 * math.isqrt(count) + 4)))
    tile_rows = min(rows, lanes)
    tile_groups = max(1, min(groups, lanes // rows)) if tile_rows == rows else 1
    capacity = budget // (tile_rows * tile_groups)
    if capacity >= count:
        return PathPlan(tile_groups, tile_rows, count)
    # Windows of w steps need w + 1 states besides one for the start of each.
    starts = math.ceil(count / max(1, capacity // 2))
    window = max(math.isqrt(count) + 1, capacity - 2 - starts)
    return PathPlan(tile_groups, tile_rows, min(window, count))


def step_bytes(size: int, itemsize: int) -> int:
    """Return what one step of a row takes: a dozen states, and indices."""
    return 12 * (size * itemsize + 16)


def best_path(ctx: Context, chain: Chain, segments: Segments, workspace: int) -> Array:
    """Return a path of largest weight, [*batch, count].

    Of several the one with the smallest last state, and so on back to the first state. Past a
    chain's end states are -1. All states are 0 where no path has a positive weight. Segments of
    time are chosen here, tile by tile.
    """
    xp = ctx.xp
    shape = (*chain.batch, chain.count)
    states = xp.full(shape, -1, dtype=ctx.index_dtype, device=ctx.device)
    view = chain.arrange(xp, states, trailing=1)
    sizes = chain.sizes
    plan = plan_paths(sizes, chain.size, chain.count, ctx.precision.itemsize, workspace)
    for box, steps in chain.tiles(ctx, plan.groups, plan.rows):
        _TilePaths(ctx, steps, plan, workspace, view, box).write()
    return states


class _TilePaths:
    """The paths of one tile of chains, written to where they belong."""

    def __init__(
        self, ctx: Context, steps: Steps, plan: PathPlan, workspace: int, view: Array, box: Box
    ) -> None:
        self.ctx, self.steps, self.view, self.box = ctx, steps, view, box
        self.workspace = workspace
        self.best = BestSteps(ctx, steps, workspace // 4)
        self.windows = list(chunks(steps.count - 1, plan.window))
        self.alive: Array | None = None
        self.most_segments = steps.count if steps.chain.lengths is None else 1

    def write(self) -> None:
        """Find the last state of each path, and go back from there."""
        ctx, best = self.ctx, self.best
        starts = ctx.empty((len(self.windows) + 1, *best.shape), ctx.dtype(ctx.precision))
        best.start(starts[0, ...])
        solved: PlainWindow | SegmentedWindow | None = None
        for n, window in enumerate(self.windows):
            solved = None  # its states go before others come
            solved = self._solved(starts[n, ...], window)
            starts[n + 1, ...] = solved.last()
        index, self.alive = best.best(starts[len(self.windows), ...])
        self._place(self.steps.count - 1, index[..., None])
        for n in range(len(self.windows) - 1, -1, -1):
            if solved is None:
                solved = self._solved(starts[n, ...], self.windows[n])
            index = solved.back(index, self._place)
            solved = None

    def _solved(self, start: Array, window: slice) -> PlainWindow | SegmentedWindow:
        """Return the states of a window: by segments, as long as that succeeds."""
        best = self.best
        segments = best_segments(window.stop - window.start, best.groups * best.rows, best.size)
        step = step_bytes(best.size, self.ctx.precision.itemsize) * best.groups * best.rows
        segments = min(segments, self.most_segments, max(1, self.workspace // 6 // step))
        while segments > 1:
            segmented = SegmentedWindow(best, window, start, segments, self.workspace)
            if segmented.solve():
                return segmented
            del segmented
            segments = self.most_segments = fewer_segments(segments)
        return PlainWindow(best, window, start)

    def _place(self, first: int, values: Array) -> None:
        """Put the states number `first`, ... of all paths, [groups, rows, n], in place."""
        xp, steps = self.ctx.xp, self.steps
        assert self.alive is not None
        values = xp.where(self.alive[..., None], values, xp.zeros_like(values))
        stop = first + int(values.shape[-1])
        if steps.lengths is not None and steps.real(stop - 1) is not None:
            dtype = steps.lengths.dtype
            times = xp.arange(first, stop, dtype=dtype, device=self.ctx.device)
            values = xp.where(steps.lengths > times, values, xp.full_like(values, -1))
        steps.place(self.view[(*self.box, slice(first, stop))], values)
