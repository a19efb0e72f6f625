"""The values of chains, by the road that was planned: step by step, or in segments of time."""

from __future__ import annotations

import math

from arraylogchain._chain.forms.states import State
from arraylogchain._chain.long.segments import Cut, cut_time
from arraylogchain._chain.steps import Chain
from arraylogchain._chain.whole import write_all, write_last
from arraylogchain._context import Array, Context
from arraylogchain.plan import Segments


def log_partition(ctx: Context, chain: Chain, segments: Segments, workspace: int) -> Array:
    """Return the logs of the sums over all paths, [*batch]."""
    return total(ctx, chain, cut_time(ctx, chain, segments, workspace, forward=True), workspace)


def total(ctx: Context, chain: Chain, cut: Cut | None, workspace: int) -> Array:
    """Return the logs of the sums over all paths of a chain that may be cut."""
    if cut is not None:
        return ctx.to_result(cut.last(ctx).log_total(ctx)[..., 0])
    out = ctx.empty(chain.batch, ctx.result_dtype)

    def result(state: State) -> tuple[Array]:
        return (state.log_total(ctx)[..., 0],)

    write_last(ctx, chain, [out], workspace, result, every_entry=False)
    return out


def last_message(ctx: Context, chain: Chain, segments: Segments, workspace: int) -> Array:
    """Return the logs of the weights after the last step, [*batch, K], each one right."""
    cut = cut_time(ctx, chain, segments, workspace, forward=True)
    if cut is not None:
        return ctx.to_result(cut.last(ctx).logs(ctx))
    out = ctx.empty((*chain.batch, chain.size), ctx.result_dtype)
    write_last(ctx, chain, [out], workspace, lambda state: (state.logs(ctx),), every_entry=True)
    return out


def forward_messages(ctx: Context, chain: Chain, segments: Segments, workspace: int) -> Array:
    """Return the logs of the weights after every step, [*batch, count, K], each one right."""
    return _messages(ctx, chain, segments, workspace, backward=False)


def backward_messages(ctx: Context, chain: Chain, segments: Segments, workspace: int) -> Array:
    """Return the logs of the weights that follow each step, [*batch, count, K], each one right."""
    return _messages(ctx, chain, segments, workspace, backward=True)


def _messages(
    ctx: Context, chain: Chain, segments: Segments, workspace: int, backward: bool
) -> Array:
    out = ctx.empty((*chain.batch, chain.count, chain.size), ctx.result_dtype)
    if chain.lengths is not None:
        out[...] = -math.inf

    def result(state: State) -> tuple[Array]:
        return (state.logs(ctx),)

    cut = cut_time(ctx, chain, segments, workspace, forward=not backward, backward=backward)
    if cut is None:
        write_all(ctx, chain, [out], workspace, result, backward)
        return out
    front, within = cut.left(cut.within()) if backward else (cut.front, cut.entered())
    first = front.count
    write_all(ctx, front, [out[..., :first, :]], workspace // 2, result, backward)
    shape = (*within.batch, cut.length, chain.size)
    view = ctx.xp.reshape(out[..., first:, :], shape)
    write_all(ctx, within, [view], workspace // 2, result, backward)
    return out
