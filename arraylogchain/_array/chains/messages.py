"""Messages of chains, step by step."""

from __future__ import annotations

import math

from arraylogchain._array.chains.sweep import last_step, sweeps
from arraylogchain._array.chains.tiles import arrange
from arraylogchain._context import Array, Context, whole_maximum
from arraylogchain._inputs.chain import Chain


def forward_messages(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the logs of the weights after every step, [*batch, T, K], each one right."""
    return _messages(ctx, chain, workspace, backward=False)


def backward_messages(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the logs of the weights that follow each step, [*batch, T, K], each one right."""
    return _messages(ctx, chain, workspace, backward=True)


def _messages(ctx: Context, chain: Chain, workspace: int, backward: bool) -> Array:
    out = ctx.empty((*chain.batch, chain.num_steps, chain.num_states), ctx.result_dtype)
    if chain.lengths is not None:
        out[...] = -math.inf
    view = arrange(ctx.xp, chain, out, trailing=2)
    proof = {"keeps_products": backward, "every_product": backward}
    for tile, sweep in sweeps(ctx, chain, workspace, backward, **proof):
        for i in range(tile.num_steps):
            step, here = sweep.advance(), slice(tile.count(i))
            if here.stop:
                state = step.of_all(tile, products=backward).part(here, tile.select_axis)
                tile.part(here).place(view[(*tile.box, tile.time(i), ...)], state.logs(ctx))
    return out


def last_message(
    ctx: Context, chain: Chain, workspace: int, backward: bool = False
) -> tuple[Array, Array]:
    """Return the weights after the last step, or backward from the first step on.

    They are logs [*batch, K] and integers [*batch] to add to them.
    """
    dtype = ctx.dtype(ctx.widest)
    logs, whole = (ctx.empty((*chain.batch, n), dtype) for n in (chain.num_states, 1))
    views = [arrange(ctx.xp, chain, x, trailing=1) for x in (logs, whole)]
    for tile, sweep in sweeps(ctx, chain, workspace, backward):
        last = last_step(sweep).in_log_form(tile)
        # The logs are small in each row's largest entries, so that storing them costs no accuracy.
        shift = whole_maximum(ctx, last.logs(ctx), -1, ctx.widest)
        last.offset = last.offset - shift
        for view, values in zip(views, (last.logs(ctx), shift), strict=True):
            tile.place(view[(*tile.box, ...)], values)
    return logs, whole[..., 0]
