"""Chains computed as planned: all rows together, or long rows one after another.

Rows that are computed together have their time in common. A few long chains of different lengths
are better cut to their lengths and computed alone, each in segments of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from arraylogchain._chain import on_device
from arraylogchain._chain.posterior import results
from arraylogchain._chain.steps import Chain
from arraylogchain._context import Array, Context
from arraylogchain._fold import Box, Shape, boxes, within
from arraylogchain.plan import Plan, Segments, best_segments

# Computes something of a chain, in a number of segments and within a workspace.
Compute = Callable[[Context, Chain, Segments, int], Array]
# The same by CUDA kernels, within a workspace.
ByKernel = Callable[[Context, Chain, int], Array]


def solve(
    ctx: Context,
    chain: Chain,
    plan: Plan,
    compute: Compute,
    trailing: Shape = (),
    lead: Shape = (),
    dtype: Any = None,
    past_end: float = 0,
    by_kernel: ByKernel | None = None,
) -> Array:
    """Return what is computed of a chain, [*lead, *batch, *trailing].

    Parameters
    ----------
    trailing : tuple of int
        Axes of the result after those of the batch, of which the first is time.
    lead : tuple of int
        Axes before those of the batch.
    dtype : dtype
        Of the result, by default the result's own.
    past_end : float
        What the result is past the ends of rows.
    by_kernel : callable, optional
        Computes the same where the plan is to use CUDA kernels.
    """
    if plan.route == "kernel" and by_kernel is not None:
        return by_kernel(ctx, chain, plan.workspace)
    if plan.route != "rows":
        return compute(ctx, chain, plan.segments, plan.workspace)
    shape = (*lead, *chain.batch, *trailing)
    out = ctx.xp.full(shape, past_end, dtype=dtype or ctx.result_dtype, device=ctx.device)
    whole = (slice(None),) * len(lead)
    for box, row, segments in _rows(chain, plan):
        time = (slice(0, row.count),) if trailing else ()
        out[(*whole, *box, *time, ...)] = compute(ctx, row, segments, plan.workspace)
    return out


def without_states(
    ctx: Context,
    chain: Chain,
    value: float,
    trailing: Shape = (),
    lead: Shape = (),
    dtype: Any = None,
    past_end: float = 0,
) -> Array:
    """Return a result like that of `solve`, all of one value up to the ends of rows."""
    xp = ctx.xp
    shape = (*lead, *chain.batch, *trailing)
    out = xp.full(shape, value, dtype=dtype or ctx.result_dtype, device=ctx.device)
    if chain.lengths is None or not trailing:
        return out
    times = xp.arange(chain.count, dtype=ctx.index_dtype, device=ctx.device)
    real = ctx.integers(chain.lengths)[..., None] > times
    return xp.where(xp.reshape(real, (*real.shape, *(1,) * (len(trailing) - 1))), out, past_end)


def expected_transitions(ctx: Context, chain: Chain, plan: Plan) -> Array:
    """Return expected counts in the shape of the transitions."""
    if plan.route == "kernel":
        return on_device.expected_transitions(ctx, chain, plan.workspace)
    if plan.route != "rows":
        return results.expected_transitions(ctx, chain, plan.segments, plan.workspace)
    sums = _Sums(ctx, chain, frozenset({"transitions"}))
    for box, row, segments in _rows(chain, plan):
        if row.count > 1:
            counts = results.expected_transitions(ctx, row, segments, plan.workspace)
            sums.add(box, {"transitions": counts})
    return ctx.to_result(sums.found["transitions"])


def log_partition_and_pullback(
    ctx: Context, chain: Chain, plan: Plan, keep: bool
) -> tuple[Array, results.Pullback]:
    """Return the logs of the sums over all paths and their pullback; see `results`."""
    if plan.route == "kernel":
        return on_device.log_partition_and_pullback(ctx, chain, plan.workspace, keep)
    if plan.route != "rows":
        return results.log_partition(ctx, chain, plan.segments, plan.workspace, keep)
    out = ctx.empty(chain.batch, ctx.result_dtype)
    pullbacks = []
    for box, row, segments in _rows(chain, plan):
        out[box], back = results.log_partition(ctx, row, segments, plan.workspace, keep)
        pullbacks.append((box, back))

    def pullback(cotangent: Array, wanted: frozenset[str]) -> dict[str, Array]:
        sums = _Sums(ctx, chain, wanted)
        for box, back in pullbacks:
            sums.add(box, back(cotangent[box], wanted))
        given = results.arrays_of(chain)
        return {
            name: ctx.xp.astype(x, given[name].dtype, copy=False) for name, x in sums.found.items()
        }

    return out, pullback


def _rows(chain: Chain, plan: Plan) -> Iterator[tuple[Box, Chain, Segments]]:
    """Yield every row of a chain, cut to its length: its place, itself and its segments."""
    assert chain.lengths is not None
    found = np.broadcast_to(chain.lengths, chain.batch)
    one_matrix = chain.transitions is not None and int(chain.transitions.shape[-3]) == 1
    for box in boxes(chain.batch, 1):
        count = int(found[box].item())
        segments = best_segments(count, chain.size, (1, 1), one_matrix, plan.workspace)
        yield box, chain.part(box).head(count), segments


class _Sums:
    """Gradients of rows, added up in the shapes of the chain's arrays."""

    _TRAILING: dict[str, int] = {"potentials": 2, "transitions": 3, "start": 1}  # noqa: RUF012

    def __init__(self, ctx: Context, chain: Chain, wanted: frozenset[str]) -> None:
        self.ctx, self.axes = ctx, len(chain.batch)
        given = results.arrays_of(chain)
        dtype = ctx.dtype(ctx.precision)
        self.found = {
            name: ctx.xp.zeros(tuple(given[name].shape), dtype=dtype, device=ctx.device)
            for name in wanted
        }

    def add(self, box: Box, values: dict[str, Array]) -> None:
        for name, x in values.items():
            total = self.found[name]
            own = total.ndim - self._TRAILING[name]
            where = within(box[self.axes - own :], tuple(total.shape))
            if name != "start":
                where = (*where, slice(0, int(x.shape[own])))
            target = total[(*where, ...)]
            target += self.ctx.xp.astype(x, target.dtype, copy=False)
