"""Whole chains: tile by tile, and long ones cut into segments of time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from arraylogchain._arrays import Array, Context
from arraylogchain._chain.pieces import plan_recursion
from arraylogchain._chain.recursion import Recursion
from arraylogchain._chain.states import State
from arraylogchain._chain.steps import Chain
from arraylogchain._fold import fold
from arraylogchain._product import tiled
from arraylogchain._product.certified import CertifiedKernel


def log_partition(ctx: Context, chain: Chain, segments: int, workspace: int) -> Array:
    """Return the logs of the sums over all paths, [*batch]."""
    out = ctx.empty(chain.batch, ctx.result_dtype)
    if segments > 1:
        ctx, chain = _over_segments(ctx, _cut(ctx, chain, segments, workspace), workspace)
    _write_last(ctx, chain, out, workspace, lambda state: state.log_total(ctx), every_entry=False)
    return out


def last_message(
    ctx: Context, chain: Chain, segments: int, workspace: int, dtype: Any = None
) -> Array:
    """Return the logs of the weights after the last step, [*batch, K], each one right."""
    out = ctx.empty((*chain.batch, chain.size), ctx.result_dtype if dtype is None else dtype)
    if segments > 1:
        ctx, chain = _over_segments(ctx, _cut(ctx, chain, segments, workspace), workspace)
    _write_last(ctx, chain, out, workspace, lambda state: state.logs(ctx), every_entry=True)
    return out


def forward_messages(ctx: Context, chain: Chain, segments: int, workspace: int) -> Array:
    """Return the logs of the weights after every step, [*batch, count, K], each one right."""
    xp = ctx.xp
    out = ctx.empty((*chain.batch, chain.count, chain.size), ctx.result_dtype)
    if segments == 1:
        _write_messages(ctx, chain, out, workspace)
        return out
    cut = _cut(ctx, chain, segments, workspace)
    front = cut.front.count
    _write_messages(ctx, cut.front, out[..., :front, :], workspace)
    # First the messages at the segments' ends, then those within all segments side by side.
    wide, ends = _over_segments(ctx, cut, workspace // 2)
    at_ends = ctx.empty((*ends.batch, ends.count, ends.size), ctx.dtype(ctx.widest))
    _write_messages(wide, ends, at_ends, workspace // 2)
    start = _multiplied(wide, at_ends[..., :-1, None, :], cut, workspace // 2)
    within = Chain(
        batch=(*chain.batch, segments),
        count=cut.length,
        size=chain.size,
        transitions=cut.others,
        potentials=cut.potentials,
        start=start,
        transitions_in_logs=chain.transitions_in_logs,
        start_in_logs=True,
    )
    view = xp.reshape(out[..., front:, :], (*chain.batch, segments, cut.length, chain.size))
    _write_messages(ctx, within, view, workspace // 2)
    return out


@dataclass(frozen=True, slots=True)
class _Cut:
    """A chain whose time is cut into equal segments, after a front of what does not fill one.

    A segment begins with a product; `first` holds the matrices of those products, `others` the
    matrices of the rest. Without segments of their own, shared matrices have an axis of length 1.
    """

    front: Chain
    segments: int
    length: int
    first: Array  # [..., segments or 1, K, K]
    others: Array  # [..., segments or 1, length - 1 or 1, K, K]
    potentials: Array | None  # [..., segments, length, K]
    products: Array  # [..., segments, K, K], the logs of the segments' products


def _cut(ctx: Context, chain: Chain, segments: int, workspace: int) -> _Cut:
    """Cut a chain, and multiply each segment out, one row for each state that it can start from."""
    xp = ctx.xp
    length = (chain.count - 1) // segments
    ahead = chain.count - 1 - segments * length
    matrices, potentials = chain.transitions, chain.potentials
    assert matrices is not None  # there are at least four products

    def cut(x: Array, trailing: int) -> Array:
        """Cut time: [..., segments * length, *trailing] to [..., segments, length, *trailing]."""
        own = tuple(x.shape)
        axis = len(own) - trailing - 1
        return xp.reshape(x, (*own[:axis], segments, length, *own[axis + 1 :]))

    front = replace(
        chain,
        count=ahead + 1,
        transitions=None,
        potentials=None if potentials is None else potentials[..., : ahead + 1, :],
    )
    batch = tuple(matrices.shape[:-3])
    if int(matrices.shape[-3]) == 1:
        front = replace(front, transitions=matrices)
        first, others = matrices, matrices[..., None, :, :, :]
    else:
        # No product is left to the front if all fit the segments, but it keeps the batch axes.
        front = replace(front, transitions=matrices[..., : max(ahead, 1), :, :])
        in_segments = cut(matrices[..., ahead:, :, :], 2)
        first, others = in_segments[..., 0, :, :], in_segments[..., 1:, :, :]
    if potentials is not None:
        batch = np.broadcast_shapes(batch, tuple(potentials.shape[:-2]))
        potentials = cut(potentials[..., ahead + 1 :, :], 1)
    products = last_message(
        ctx,
        Chain(
            batch=(*batch, segments, chain.size),
            count=length,
            size=chain.size,
            transitions=others[..., None, :, :, :],
            potentials=None if potentials is None else potentials[..., None, :, :],
            start=first,
            transitions_in_logs=chain.transitions_in_logs,
            start_in_logs=chain.transitions_in_logs,
        ),
        1,
        workspace // 2,
        ctx.dtype(ctx.widest),
    )
    return _Cut(front, segments, length, first, others, potentials, products)


def _over_segments(ctx: Context, cut: _Cut, workspace: int) -> tuple[Context, Chain]:
    """Return the chain of the segments' products, to be computed in the widest precision."""
    wide = replace(ctx, precision=ctx.widest)
    start = last_message(ctx, cut.front, 1, workspace // 2, ctx.dtype(ctx.widest))
    chain = replace(
        cut.front,
        count=cut.segments + 1,
        transitions=cut.products,
        potentials=None,
        start=start,
        transitions_in_logs=True,
        start_in_logs=True,
    )
    return wide, chain


def _multiplied(ctx: Context, messages: Array, cut: _Cut, workspace: int) -> Array:
    """Multiply messages [..., segments, 1, K] in logs with each segment's first matrix."""
    xp = ctx.xp
    first = ctx.load(cut.first, ctx.widest)
    if not cut.front.transitions_in_logs:
        first = xp.log(first)
    layout = fold(tuple(messages.shape), tuple(first.shape))
    kernel = CertifiedKernel(ctx, layout.sizes, workspace, layout.copies)
    dtypes = [ctx.dtype(ctx.widest)]
    return tiled.run(ctx, layout, messages, first, kernel, dtypes)[0][..., 0, :]


def _write_messages(ctx: Context, chain: Chain, out: Array, workspace: int) -> None:
    """Write the logs of the weights after every step, tile by tile."""
    xp = ctx.xp
    view = chain.arrange(xp, out, trailing=2)
    plan = plan_recursion(*chain.sizes, chain.size, chain.count, workspace, history=True)
    for box, steps in chain.tiles(ctx, plan.groups, plan.rows):
        for block, _, history in Recursion(steps, True, plan).run(record=True):
            for i, state in zip(range(block.start, block.stop), history, strict=True):
                logs = xp.reshape(state.logs(ctx), (*steps.shape, chain.size))
                view[(*box, i, ...)] = xp.astype(logs, out.dtype)


def _write_last(
    ctx: Context,
    chain: Chain,
    out: Array,
    workspace: int,
    result: Callable[[State], Array],
    every_entry: bool,
) -> None:
    """Write a function of the last state, tile by tile."""
    xp = ctx.xp
    trailing = out.ndim - len(chain.batch)
    view = chain.arrange(xp, out, trailing)
    plan = plan_recursion(*chain.sizes, chain.size, chain.count, workspace, history=False)
    for box, steps in chain.tiles(ctx, plan.groups, plan.rows):
        for _, state, _ in Recursion(steps, every_entry, plan).run(record=False):
            if state is not None:
                values = xp.reshape(result(state), (*steps.shape, *out.shape[len(chain.batch) :]))
                view[(*box, ...)] = xp.astype(values, out.dtype)
