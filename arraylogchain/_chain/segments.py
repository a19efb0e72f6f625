"""Long chains with time cut into segments, which are computed side by side.

The product of each segment comes first. Chained, the products give what enters and what leaves
every segment; with that, all segments together are one batch of short chains.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from arraylogchain._arrays import Array, Context
from arraylogchain._chain.steps import Chain
from arraylogchain._chain.whole import write_all, write_last


@dataclass(frozen=True, slots=True)
class Cut:
    """A chain whose time is cut into equal segments, after a front of what does not fill one.

    A segment begins with a product. Without segments of their own, shared matrices have an axis of
    length 1.
    """

    front: Chain
    segments: int
    length: int
    matrices: Array  # [..., segments or 1, length or 1, K, K]
    potentials: Array | None  # [..., segments, length, K]
    products: Array  # [..., segments, K, K], logs of the segments' products but for `offsets`
    offsets: Array  # [..., segments], whole numbers
    start: Array  # [*batch, K], logs of the weights after the front but for `start_offset`
    start_offset: Array  # [*batch], whole numbers


def cut_time(ctx: Context, chain: Chain, segments: int, workspace: int) -> Cut | None:
    """Cut a chain, and multiply each segment out, one row for each state that it can start from.

    None if there is one segment only, or if +inf or NaN turn up: which sums they reach depends on
    the states before.
    """
    if segments == 1:
        return None
    xp = ctx.xp
    length = (chain.count - 1) // segments
    ahead = chain.count - 1 - segments * length
    matrices, potentials = chain.transitions, chain.potentials
    assert matrices is not None  # there are at least four products

    front = chain.head(ahead + 1)
    batch = tuple(matrices.shape[:-3])
    inside = matrices_in_segments(ctx, matrices, segments, length)
    if int(matrices.shape[-3]) == 1:
        first, others = matrices, inside
    else:
        first, others = inside[..., 0, :, :], inside[..., 1:, :, :]
    if potentials is not None:
        batch = np.broadcast_shapes(batch, tuple(potentials.shape[:-2]))
        potentials = in_segments(ctx, potentials[..., ahead + 1 :, :], segments, length, 1)
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
    rows, whole = split_last_message(ctx, operators, workspace // 2)
    # Rows without a path have no magnitude.
    live = xp.any(rows > -math.inf, axis=-1)
    offsets = xp.max(xp.where(live, whole, xp.full_like(whole, -math.inf)), axis=-1)
    offsets = xp.where(xp.isfinite(offsets), offsets, xp.zeros_like(offsets))
    below = xp.where(live, whole - offsets[..., None], xp.zeros_like(whole))
    products = rows + below[..., None]
    start, start_offset = split_last_message(ctx, front, workspace // 2)
    if not bool(xp.all(products < math.inf)) or not bool(xp.all(start < math.inf)):
        return None
    return Cut(
        front,
        segments,
        length,
        inside,
        potentials,
        products,
        offsets,
        start,
        start_offset,
    )


def in_segments(ctx: Context, x: Array, segments: int, length: int, trailing: int) -> Array:
    """Cut time: [..., segments * length, *trailing] to [..., segments, length, *trailing]."""
    own = tuple(x.shape)
    axis = len(own) - trailing - 1
    return ctx.xp.reshape(x, (*own[:axis], segments, length, *own[axis + 1 :]))


def matrices_in_segments(ctx: Context, x: Array, segments: int, length: int) -> Array:
    """Return matrices [..., steps or 1, K, K] as [..., segments or 1, length or 1, K, K]."""
    if int(x.shape[-3]) == 1:
        return x[..., None, :, :, :]
    return in_segments(ctx, x[..., -segments * length :, :, :], segments, length, 2)


def over_segments(ctx: Context, cut: Cut) -> tuple[Context, Chain]:
    """Return the chain of the segments' products, to be computed in the widest precision."""
    chain = _of_products(cut)
    # All offsets can be added at the start: they are factors that all paths have.
    total = ctx.xp.sum(cut.offsets, axis=-1)
    wide = replace(ctx, precision=ctx.widest)
    return wide, replace(chain, start_offset=chain.start_offset + total)


def _of_products(cut: Cut) -> Chain:
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


def enter_segments(ctx: Context, cut: Cut, workspace: int) -> Chain:
    """Return the segments as chains [*batch, segments] that begin with the state before them.

    That first state has no potentials: it is the last one of the segment before.
    """
    logs, whole = _between(ctx, cut, workspace, backward=False)
    before = ctx.xp.cumulative_sum(cut.offsets, axis=-1) - cut.offsets
    return Chain(
        batch=(*cut.front.batch, cut.segments),
        count=cut.length + 1,
        size=cut.front.size,
        transitions=cut.matrices,
        potentials=cut.potentials,
        start=logs[..., :-1, :],
        transitions_in_logs=cut.front.transitions_in_logs,
        start_in_logs=True,
        start_offset=whole[..., :-1] + before,
        lead=1,
    )


def leave_segments(ctx: Context, cut: Cut, segments: Chain, workspace: int) -> tuple[Chain, Chain]:
    """Return the front and the segments as chains with the weights of what follows them."""
    logs, whole = _between(ctx, cut, workspace, backward=True)
    total = ctx.xp.cumulative_sum(cut.offsets, axis=-1)
    after = total[..., -1:] - total
    front = replace(cut.front, end=logs[..., 0, :], end_offset=whole[..., 0] + total[..., -1])
    return front, replace(segments, end=logs[..., 1:, :], end_offset=whole[..., 1:] + after)


def _between(ctx: Context, cut: Cut, workspace: int, backward: bool) -> tuple[Array, Array]:
    """Return the messages at the ends of the front and of each segment, but for `offsets`.

    Returns
    -------
    logs : array [*batch, segments + 1, K]
    whole : array [*batch, segments + 1]
        Whole numbers to be added to them.
    """
    chain = _of_products(cut)
    wide = replace(ctx, precision=ctx.widest, result_name=ctx.widest.name)
    shape = (*chain.batch, chain.count)
    logs = ctx.empty((*shape, chain.size), ctx.dtype(ctx.widest))
    whole = ctx.empty((*shape, 1), ctx.dtype(ctx.widest))
    write_all(wide, chain, [logs, whole], workspace, lambda state: state.split_logs(ctx), backward)
    return logs, whole[..., 0]


def split_last_message(ctx: Context, chain: Chain, workspace: int) -> tuple[Array, Array]:
    """Return the last message as logs [*batch, K] and whole numbers [*batch] to add to them."""
    dtype = ctx.dtype(ctx.widest)
    logs = ctx.empty((*chain.batch, chain.size), dtype)
    whole = ctx.empty((*chain.batch, 1), dtype)
    write_last(
        ctx, chain, [logs, whole], workspace, lambda state: state.split_logs(ctx), every_entry=True
    )
    return logs, whole[..., 0]
