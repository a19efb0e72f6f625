"""Exact samples of paths: forward filtering, backward sampling.

The last state is drawn from the forward weights of the last step. Given a state j that follows, the
one before it is k with a probability in proportion to ``alpha[k] * P[k, j]``, whatever comes later.
Where that underflows it is taken from logarithms, so that states that are negligible at their step,
but lead to j alone, are drawn as often as they should be.

One long chain is cut into segments of time. The states at their ends are a chain of their own,
whose matrices are the segments' products; between two ends that were drawn, segments are
independent of each other, and are sampled side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from arraylogchain._chain.forms.logs import to_logs
from arraylogchain._chain.forms.states import State
from arraylogchain._chain.long.products import over_segments
from arraylogchain._chain.long.segments import Cut, cut_time
from arraylogchain._chain.pieces import RecursionPlan, plan_recursion
from arraylogchain._chain.recursion import Recursion
from arraylogchain._chain.steps import Chain, Steps, first_of, of_units
from arraylogchain._chain.whole import split_last_message
from arraylogchain._context import Array, Context
from arraylogchain._fold import boxes, chunks
from arraylogchain.plan import Segments

# Returns numbers of [0, 1) in the widest precision.
Uniforms = Callable[[tuple[int, ...]], Array]

# Stands for the states of chains without a path until all are drawn.
_NO_PATH = -2

# Lanes with which an array operation on states is worth its overhead.
_LANES = 64


def sample(
    ctx: Context,
    chain: Chain,
    uniforms: Uniforms,
    num_samples: int,
    segments: Segments,
    workspace: int,
) -> Array:
    """Return paths [num_samples, *batch, count]; 0 where there is none, -1 past a chain's end."""
    xp = ctx.xp
    out = ctx.empty((num_samples, *chain.batch, chain.count), ctx.index_dtype)
    cut = cut_time(ctx, chain, segments, workspace)
    if cut is None:
        _Sampler(ctx, uniforms, workspace).write(chain, out)
    else:
        _sample_segments(ctx, cut, uniforms, out, workspace)
    lengths = None
    if chain.lengths is not None:
        lengths = ctx.integers(np.broadcast_to(chain.lengths, chain.batch)[..., None])
    times = xp.arange(chain.count, dtype=ctx.index_dtype, device=ctx.device)
    for box in boxes(tuple(out.shape), ctx.block // 4):
        part = out[box]
        part = xp.where(part == _NO_PATH, xp.zeros_like(part), part)
        if lengths is not None:
            real = times[box[-1]] < lengths[(*box[1:-1], ...)]
            part = xp.where(real, part, xp.full_like(part, -1))
        out[box] = part
    return out


def _sample_segments(
    ctx: Context, cut: Cut, uniforms: Uniforms, out: Array, workspace: int
) -> None:
    """Draw the states at the ends of segments, and then what lies between them."""
    wide, over = over_segments(ctx, cut)
    count, batch, front = int(out.shape[0]), cut.front.batch, cut.front
    ends = out[..., front.count - 1 :: cut.length]
    _Sampler(wide, uniforms, workspace // 2).write(over, ends)

    sampler = _Sampler(ctx, uniforms, workspace // 2)
    sampler.write(front, out[..., : front.count], ends[..., 0])
    # Starts, in a few copies, and the paths through the segments.
    each = 8 * math.prod(batch) * cut.segments * (4 * front.size + cut.length + 1)
    for some in chunks(count, max(1, workspace // 8 // each)):
        view = out[some, ..., front.count :]
        _sample_within(ctx, cut, sampler, ends[some, ...], view)


def _sample_within(ctx: Context, cut: Cut, sampler: _Sampler, ends: Array, out: Array) -> None:
    """Draw what lies between the states at the ends of segments."""
    xp, front, count = ctx.xp, cut.front, int(ends.shape[0])
    states = xp.arange(front.size, dtype=ends.dtype, device=ctx.device)
    is_first = ends[..., :-1, None] == states
    within = replace(
        cut.within(),
        batch=(count, *front.batch, cut.segments),
        start=xp.astype(is_first, ctx.dtype(ctx.widest)),
        start_in_logs=False,
    )
    inner = ctx.empty((1, *within.batch, within.count), ctx.index_dtype)
    sampler.write(within, inner, ends[None, ..., 1:])
    out[...] = xp.reshape(inner[0, ..., 1:], tuple(out.shape))


class _Sampler:
    """Draws paths of chains, within a workspace."""

    def __init__(self, ctx: Context, uniforms: Uniforms, workspace: int) -> None:
        self.ctx, self.uniforms, self.workspace = ctx, uniforms, workspace

    def write(self, chain: Chain, out: Array, last: Array | None = None) -> None:
        """Write paths into `out`, [num_samples, *batch, count].

        Parameters
        ----------
        last : array [num_samples, *batch], optional
            Their last states. By default they are drawn.
        """
        if 0 in out.shape:
            return
        # A state of the history: its logs, and the objects that hold it.
        state = 8 * chain.size + 300
        rows = chain.sizes[1]
        fitting = max(8, self.workspace // 4 // (state * min(rows, _LANES)))
        if fitting >= chain.count:
            self._write_window(chain, out, last)
            return
        windows = _windows(self.ctx, chain, fitting, self.workspace // 4)
        for first, window in reversed(windows):
            part = out[..., first : first + window.count]
            self._write_window(window, part, last)
            # The state that a window begins with is the last one of the window before.
            last = part[..., 0]

    def _write_window(self, chain: Chain, out: Array, last: Array | None) -> None:
        xp, ctx = self.ctx.xp, self.ctx
        groups, rows, plan = self._tiles(chain)
        count = int(out.shape[0])
        view = chain.arrange(xp, xp.permute_dims(out, (*range(1, out.ndim), 0)), trailing=2)
        if last is not None:
            axes = (*range(1, last.ndim), 0)
            last = chain.arrange(xp, xp.permute_dims(last, axes), trailing=1)
        for box, steps in chain.tiles(ctx, groups, rows):
            history, state = self._filtered(steps, plan)
            lanes = steps.groups_picked * steps.rows_picked * chain.size
            together = max(1, self.workspace // 4 // (8 * 5 * lanes))
            for some in chunks(count, together):
                if last is None:
                    ends = self._draw_last(state, some.stop - some.start)
                else:
                    ends = steps.expanded(last[(*box, some)], (some.stop - some.start,))
                self._draw_paths(steps, history, view[(*box, ..., some)], ends)

    def _tiles(self, chain: Chain) -> tuple[int, int, RecursionPlan]:
        """Return how many groups and rows keep all their states at a time."""
        plan = plan_recursion(*chain.sizes, chain.size, chain.count, self.workspace // 4, True)
        lanes = max(1, self.workspace // 4 // (chain.count * (8 * chain.size + 300)))
        rows = min(plan.rows, lanes)
        groups = min(plan.groups, lanes // rows) if rows == chain.sizes[1] else 1
        return groups, rows, plan

    def _filtered(self, steps: Steps, plan: RecursionPlan) -> tuple[list[State], State]:
        """Return the states of the forward pass, and the last one of each chain."""
        found, last = [], None
        for _, last, history in Recursion(steps, True, plan).run(record=True):  # noqa: B007
            found += history
        assert last is not None
        return found, last

    def _draw_paths(self, steps: Steps, history: list[State], view: Array, last: Array) -> None:
        """Draw paths backwards in time into a view [*shape of the tile, count, num_samples].

        Chains that end earlier come in on the way: those with a state of a number are the first.
        """
        xp, axis = self.ctx.xp, steps.select_axis
        drawn = last[first_of(0, axis)]
        here = steps.first(0)
        for i in reversed(range(steps.count)):
            known = int(drawn.shape[axis])
            if known:
                before = self._draw_before(here, i, history[i], drawn)
                advancing = here.advancing(i + 1)
                # A chain that ends earlier has its last state until then.
                drawn = before if advancing is None else xp.where(advancing, before, drawn)
            units = steps.units_at(i)
            if units > known:
                entering = last[of_units(slice(known, units), axis)]
                drawn = xp.concat([drawn, entering], axis=axis) if known else entering
                here = steps.first(units)
            here.place(view[..., i, :], drawn)

    def _draw_last(self, state: State, samples: int) -> Array:
        """Draw the last states of chains, [groups, rows, samples]."""
        xp = self.ctx.xp
        weights = state.relative(self.ctx)[:, :, None, :]
        groups, rows, _, size = weights.shape
        drawn = self._draw(xp.broadcast_to(weights, (groups, rows, samples, size)))
        nothing = xp.all(weights == 0, axis=-1)
        return xp.where(nothing, xp.full_like(drawn, _NO_PATH), drawn)

    def _draw_before(self, steps: Steps, i: int, state: State, drawn: Array) -> Array:
        """Draw states number i, given those that follow."""
        xp, units = self.ctx.xp, slice(0, int(drawn.shape[steps.select_axis]))
        state = state.units(units, steps.select_axis)
        after = xp.clip(drawn, min=0)
        before = self._draw(_weights_before(self.ctx, steps, i, state, after))
        return xp.where(drawn < 0, drawn, before)

    def _draw(self, weights: Array) -> Array:
        """Draw one of the last axis for each of the others."""
        xp = self.ctx.xp
        below = xp.cumulative_sum(weights, axis=-1)
        total = below[..., -1:]
        level = self.uniforms(tuple(total.shape)) * total
        # The first state whose sum is above the level adds something to it, so that its weight is
        # not 0; should the level be rounded up to the total, it is the last that adds something.
        return xp.argmax(xp.astype((below > level) | (below == total), xp.uint8), axis=-1)


def _weights_before(ctx: Context, steps: Steps, i: int, state: State, drawn: Array) -> Array:
    """Return the weights of states number i, given those that follow, up to factors.

    Parameters
    ----------
    drawn : array [groups, rows, n]
        States number i + 1.

    Returns
    -------
    array [groups, rows, n, K]
        None of them lost more than rounding to underflow, beside their sum.
    """
    xp, matrix, wide = ctx.xp, steps.matrix(i), ctx.widest
    groups, rows, n = (int(m) for m in drawn.shape)
    size, in_logs = steps.chain.size, steps.chain.transitions_in_logs
    if groups == 1:
        edges = xp.take(matrix, xp.reshape(drawn, (-1,)), axis=2)
    else:
        lanes = xp.reshape(drawn, (groups, 1, rows * n))
        lanes = xp.broadcast_to(lanes, (groups, size, rows * n))
        edges = xp.take_along_axis(matrix, lanes, axis=2)
    edges = ctx.load(xp.matrix_transpose(edges), wide)
    edges = xp.reshape(edges, (groups, rows, n, size))
    weights = state.relative(ctx)[:, :, None, :] * (_exp(ctx, edges) if in_logs else edges)
    # Products and factors below tiny are what can be lost: at most 2 K tiny of a sum.
    line = 2.0 * size * wide.tiny / wide.eps
    if bool(xp.all(xp.sum(weights, axis=-1) >= line)):
        return weights
    logs = to_logs(replace(ctx, precision=wide), edges, in_logs)
    return _exp(ctx, state.in_log_form(ctx).values[:, :, None, :] + logs)


def _exp(ctx: Context, logs: Array) -> Array:
    """Return exponentials relative to the largest of the last axis."""
    xp = ctx.xp
    top = xp.max(logs, axis=-1, keepdims=True)
    return xp.exp(logs - xp.where(xp.isfinite(top), top, xp.zeros_like(top)))


def _windows(ctx: Context, chain: Chain, length: int, workspace: int) -> list[tuple[int, Chain]]:
    """Cut time into windows that overlap in one state, each with the number of its first one."""
    found, first, rest = [], 0, chain
    while rest.count > length:
        window = rest.head(length)
        found.append((first, window))
        logs, whole = split_last_message(ctx, window, workspace)
        rest = rest.tail(length - 1, logs, whole)
        first += length - 1
    found.append((first, rest))
    return found
