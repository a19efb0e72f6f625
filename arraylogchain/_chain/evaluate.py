"""The values of chains, by the road that was planned: step by step, or in segments of time."""

from __future__ import annotations

import math

from arraylogchain._arrays import Array, Context
from arraylogchain._chain.segments import (
    cut_time,
    enter_segments,
    leave_segments,
    over_segments,
)
from arraylogchain._chain.states import State
from arraylogchain._chain.steps import Chain
from arraylogchain._chain.whole import write_all, write_last


def log_partition(ctx: Context, chain: Chain, segments: int, workspace: int) -> Array:
    """Return the logs of the sums over all paths, [*batch]."""
    cut = cut_time(ctx, chain, segments, workspace)
    inner, whole = (ctx, chain) if cut is None else over_segments(ctx, cut)
    return total(inner, whole, ctx, chain.batch, workspace)


def total(
    inner: Context, chain: Chain, ctx: Context, batch: tuple[int, ...], workspace: int
) -> Array:
    """Return the logs of the sums over all paths, computed in one context for another."""
    out = ctx.empty(batch, ctx.result_dtype)

    def result(state: State) -> tuple[Array]:
        return (state.log_total(inner)[..., 0],)

    write_last(inner, chain, [out], workspace, result, every_entry=False)
    return out


def last_message(ctx: Context, chain: Chain, segments: int, workspace: int) -> Array:
    """Return the logs of the weights after the last step, [*batch, K], each one right."""
    out = ctx.empty((*chain.batch, chain.size), ctx.result_dtype)
    cut = cut_time(ctx, chain, segments, workspace)
    if cut is not None:
        ctx, chain = over_segments(ctx, cut)
    write_last(ctx, chain, [out], workspace, lambda state: (state.logs(ctx),), every_entry=True)
    return out


def forward_messages(ctx: Context, chain: Chain, segments: int, workspace: int) -> Array:
    """Return the logs of the weights after every step, [*batch, count, K], each one right."""
    return _messages(ctx, chain, segments, workspace, backward=False)


def backward_messages(ctx: Context, chain: Chain, segments: int, workspace: int) -> Array:
    """Return the logs of the weights that follow each step, [*batch, count, K], each one right."""
    return _messages(ctx, chain, segments, workspace, backward=True)


def _messages(ctx: Context, chain: Chain, segments: int, workspace: int, backward: bool) -> Array:
    out = ctx.empty((*chain.batch, chain.count, chain.size), ctx.result_dtype)
    if chain.lengths is not None:
        out[...] = -math.inf

    def result(state: State) -> tuple[Array]:
        return (state.logs(ctx),)

    cut = cut_time(ctx, chain, segments, workspace)
    if cut is None:
        write_all(ctx, chain, [out], workspace, result, backward)
        return out
    front, within = cut.front, enter_segments(ctx, cut, workspace // 2)
    if backward:
        front, within = leave_segments(ctx, cut, within, workspace // 2)
    first = front.count
    write_all(ctx, front, [out[..., :first, :]], workspace // 2, result, backward)
    shape = (*within.batch, cut.length, chain.size)
    view = ctx.xp.reshape(out[..., first:, :], shape)
    write_all(ctx, within, [view], workspace // 2, result, backward)
    return out
