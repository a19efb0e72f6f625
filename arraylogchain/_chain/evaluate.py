"""Whole chains: tile by tile, and long ones cut into segments of time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from arraylogchain._arrays import Array, Context, whole_maximum
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
    if segments > 1 and (cut := _cut(ctx, chain, segments, workspace)) is not None:
        ctx, chain = _over_segments(ctx, cut)

    def result(state: State) -> tuple[Array]:
        return (state.log_total(ctx)[..., 0],)

    _write_last(ctx, chain, [out], workspace, result, every_entry=False)
    return out


def last_message(ctx: Context, chain: Chain, segments: int, workspace: int) -> Array:
    """Return the logs of the weights after the last step, [*batch, K], each one right."""
    out = ctx.empty((*chain.batch, chain.size), ctx.result_dtype)
    if segments > 1 and (cut := _cut(ctx, chain, segments, workspace)) is not None:
        ctx, chain = _over_segments(ctx, cut)
    _write_last(ctx, chain, [out], workspace, lambda state: (state.logs(ctx),), every_entry=True)
    return out


def forward_messages(ctx: Context, chain: Chain, segments: int, workspace: int) -> Array:
    """Return the logs of the weights after every step, [*batch, count, K], each one right."""
    xp = ctx.xp
    out = ctx.empty((*chain.batch, chain.count, chain.size), ctx.result_dtype)

    def result(state: State) -> tuple[Array]:
        return (state.logs(ctx),)

    cut = _cut(ctx, chain, segments, workspace) if segments > 1 else None
    if cut is None:
        _write_all(ctx, chain, [out], workspace, result)
        return out
    front = cut.front.count
    _write_all(ctx, cut.front, [out[..., :front, :]], workspace, result)
    # First the messages at the segments' starts, then those within all segments side by side.
    start, offset = _segment_starts(ctx, cut, workspace // 2)
    within = Chain(
        batch=(*chain.batch, segments),
        count=cut.length,
        size=chain.size,
        transitions=cut.others,
        potentials=cut.potentials,
        start=start,
        transitions_in_logs=chain.transitions_in_logs,
        start_in_logs=True,
        start_offset=offset,
    )
    shape = (*chain.batch, segments, cut.length, chain.size)
    view = xp.reshape(out[..., front:, :], shape)
    _write_all(ctx, within, [view], workspace // 2, result)
    return out


def backward_messages(ctx: Context, chain: Chain, segments: int, workspace: int) -> Array:
    """Return the logs of the weights that follow each step, [*batch, count, K], each one right."""
    out = ctx.empty((*chain.batch, chain.count, chain.size), ctx.result_dtype)
    _write_all(ctx, chain, [out], workspace, lambda state: (state.logs(ctx),), backward=True)
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
    products: Array  # [..., segments, K, K], logs of the segments' products but for `offsets`
    offsets: Array  # [..., segments], whole numbers
    start: Array  # [*batch, K], logs of the weights after the front but for `start_offset`
    start_offset: Array  # [*batch], whole numbers


def _cut(ctx: Context, chain: Chain, segments: int, workspace: int) -> _Cut | None:
    """Cut a chain, and multiply each segment out, one row for each state that it can start from.

    None if +inf or NaN turn up: which sums they reach depends on the states before.
    """
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
    operators = Chain(
        batch=(*batch, segments, chain.size),
        count=length,
        size=chain.size,
        transitions=others[..., None, :, :, :],
        potentials=None if potentials is None else potentials[..., None, :, :],
        start=first,
        transitions_in_logs=chain.transitions_in_logs,
        start_in_logs=chain.transitions_in_logs,
    )
    rows, whole = _split_last_message(ctx, operators, workspace // 2)
    # Rows without a path have no magnitude.
    live = xp.any(rows > -math.inf, axis=-1)
    offsets = xp.max(xp.where(live, whole, xp.full_like(whole, -math.inf)), axis=-1)
    offsets = xp.where(xp.isfinite(offsets), offsets, xp.zeros_like(offsets))
    below = xp.where(live, whole - offsets[..., None], xp.zeros_like(whole))
    products = rows + below[..., None]
    start, start_offset = _split_last_message(ctx, front, workspace // 2)
    if not bool(xp.all(products < math.inf)) or not bool(xp.all(start < math.inf)):
        return None
    return _Cut(
        front,
        segments,
        length,
        first,
        others,
        potentials,
        products,
        offsets,
        start,
        start_offset,
    )


def _over_segments(ctx: Context, cut: _Cut) -> tuple[Context, Chain]:
    """Return the chain of the segments' products, to be computed in the widest precision."""
    chain = _of_products(cut)
    # All offsets can be added at the start: they are factors that all paths have.
    total = ctx.xp.sum(cut.offsets, axis=-1)
    wide = replace(ctx, precision=ctx.widest)
    return wide, replace(chain, start_offset=chain.start_offset + total)


def _of_products(cut: _Cut) -> Chain:
    """Return the chain of the segments' products, without their offsets."""
    return replace(
        cut.front,
        count=cut.segments + 1,
        transitions=cut.products,
        potentials=None,
        start=cut.start,
        transitions_in_logs=True,
        start_in_logs=True,
        start_offset=cut.start_offset,
    )


def _segment_starts(ctx: Context, cut: _Cut, workspace: int) -> tuple[Array, Array]:
    """Return the logs of the weights after each segment's first product, but for whole numbers.

    Returns
    -------
    logs : array [*batch, segments, K]
    offsets : array [*batch, segments]
    """
    xp = ctx.xp
    wide = replace(ctx, precision=ctx.widest, result_name=ctx.widest.name)
    chain = _of_products(cut)
    shape = (*chain.batch, chain.count)
    messages = ctx.empty((*shape, chain.size), ctx.dtype(ctx.widest))
    whole = ctx.empty((*shape, 1), ctx.dtype(ctx.widest))
    _write_all(wide, chain, [messages, whole], workspace, lambda state: state.split_logs(ctx))
    # Each segment's start has the offsets of the segments before it.
    before = xp.cumulative_sum(cut.offsets, axis=-1) - cut.offsets
    offsets = whole[..., :-1, 0] + before
    messages, first = messages[..., :-1, None, :], ctx.load(cut.first, ctx.widest)
    if not cut.front.transitions_in_logs:
        first = xp.log(first)
    shift = whole_maximum(ctx, first, (-2, -1), ctx.widest)
    first, offsets = first - shift, offsets + shift[..., 0, 0]
    layout = fold(tuple(messages.shape), tuple(first.shape))
    kernel = CertifiedKernel(wide, layout.sizes, workspace, layout.copies)
    (logs,) = tiled.run(wide, layout, messages, first, kernel, kernel.dtypes)
    return logs[..., 0, :], offsets


def _split_last_message(ctx: Context, chain: Chain, workspace: int) -> tuple[Array, Array]:
    """Return the last message as logs [*batch, K] and whole numbers [*batch] to add to them."""
    dtype = ctx.dtype(ctx.widest)
    logs = ctx.empty((*chain.batch, chain.size), dtype)
    whole = ctx.empty((*chain.batch, 1), dtype)
    _write_last(
        ctx, chain, [logs, whole], workspace, lambda state: state.split_logs(ctx), every_entry=True
    )
    return logs, whole[..., 0]


Results = Callable[[State], tuple[Array, ...]]


def _write_all(
    ctx: Context,
    chain: Chain,
    outs: list[Array],
    workspace: int,
    results: Results,
    backward: bool = False,
) -> None:
    """Write functions [groups, rows, n] of every state into arrays [*batch, count, n]."""
    views = [chain.arrange(ctx.xp, out, trailing=2) for out in outs]
    plan = plan_recursion(*chain.sizes, chain.size, chain.count, workspace, history=True)
    for box, steps in chain.tiles(ctx, plan.groups, plan.rows):
        steps = replace(steps, backward=backward)
        for block, _, history in Recursion(steps, True, plan).run(record=True):
            for i, state in zip(range(block.start, block.stop), history, strict=True):
                i = chain.count - 1 - i if backward else i
                for view, values in zip(views, results(state), strict=True):
                    _put(ctx, view, (*box, i, ...), (*steps.shape, view.shape[-1]), values)


def _write_last(
    ctx: Context,
    chain: Chain,
    outs: list[Array],
    workspace: int,
    results: Results,
    every_entry: bool,
) -> None:
    """Write functions of the last state into arrays [*batch] or [*batch, n]."""
    trailing = [out.ndim - len(chain.batch) for out in outs]
    views = [chain.arrange(ctx.xp, out, n) for out, n in zip(outs, trailing, strict=True)]
    plan = plan_recursion(*chain.sizes, chain.size, chain.count, workspace, history=False)
    for box, steps in chain.tiles(ctx, plan.groups, plan.rows):
        for _, state, _ in Recursion(steps, every_entry, plan).run(record=False):
            if state is None:
                continue
            for view, n, values in zip(views, trailing, results(state), strict=True):
                shape = (*steps.shape, *view.shape[view.ndim - n :])
                _put(ctx, view, (*box, ...), shape, values)


def _put(ctx: Context, view: Array, at: Any, shape: tuple[int, ...], values: Array) -> None:
    view[at] = ctx.xp.astype(ctx.xp.reshape(values, shape), view.dtype)
