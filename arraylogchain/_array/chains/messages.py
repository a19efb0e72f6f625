"""Messages of chains, step by step: as they are, and normalised at every step."""

from __future__ import annotations

import math

from arraylogchain._array.chains.states import State, add_scale
from arraylogchain._array.chains.sweep import sweeps
from arraylogchain._array.chains.tiles import Tile, arrange
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
    found = sweeps(ctx, chain, workspace, backward, every_product=backward)
    for tile, sweep in found:
        for i in range(tile.num_steps):
            step, here = sweep.advance(), slice(tile.count(i))
            if here.stop:
                state = step.of_all(tile, products=backward)
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
    for tile, sweep in sweeps(ctx, chain, workspace, backward):
        place_message(tile, sweep.last(), logs, whole)
    return logs, whole[..., 0]


def place_message(tile: Tile, last: State, logs: Array, whole: Array) -> None:
    """Write weights where they belong in logs [*batch, K] and integers [*batch, 1]."""
    ctx, last = tile.ctx, last.in_log_form(tile.ctx)
    # The logs are small in each row's largest entries, so that storing them costs no accuracy.
    shift = whole_maximum(ctx, last.logs(ctx), -1, ctx.widest)
    last.offset = last.offset - shift
    for out, values in ((logs, last.logs(ctx)), (whole, shift)):
        view = arrange(ctx.xp, tile.chain, out, trailing=1)
        tile.place(view[(*tile.box, ...)], values)


def filtered(ctx: Context, chain: Chain, workspace: int) -> tuple[Array, Array]:
    """Return state probabilities given the steps so far, and the logs of what normalises them.

    Returns
    -------
    probabilities : array [*batch, T, K]
    log_normalizers : array [*batch, T]
    """
    shape = (*chain.batch, chain.num_steps)
    probabilities = ctx.empty((*shape, chain.num_states), ctx.result_dtype)
    normalizers = ctx.empty((*shape, 1), ctx.result_dtype)
    if chain.lengths is not None:
        probabilities[...], normalizers[...] = 0.0, 0.0
    views = [arrange(ctx.xp, chain, x, trailing=2) for x in (probabilities, normalizers)]
    for tile, sweep in sweeps(ctx, chain, workspace):
        before = None
        for i in range(tile.num_steps):
            real = slice(tile.count(i))
            state = sweep.advance().of_all(tile)
            total = state.total(ctx)
            if before is not None:
                before = before.part(real, tile.select_axis)
            found = _shares(ctx, state, total), _ratio(ctx, total, before)
            for view, values in zip(views, found, strict=True):
                tile.part(real).place(view[(*tile.box, i, ...)], values)
            before = total
    return probabilities, normalizers[..., 0]


def _shares(ctx: Context, state: State, total: State) -> Array:
    """Return weights divided by their sum; 0 where that is 0 or infinite."""
    xp, values = ctx.xp, state.values
    if state.in_logs:
        shares = xp.exp(ctx.load(values, ctx.widest) - total.values)
    else:
        shares = values / xp.sum(values, axis=-1, keepdims=True)
    return xp.where(xp.isinf(total.values), xp.zeros_like(shares), shares)


def _ratio(ctx: Context, total: State, before: State | None) -> Array:
    """Return the log of total / before; what is large cancels first."""
    if before is None:
        return total.logs(ctx)
    exponent, offset = total.exponent - before.exponent, total.offset - before.offset
    logs = add_scale(total.values - before.values, exponent, offset)
    # After -inf or +inf it is the same at all later steps.
    return ctx.xp.where(ctx.xp.isfinite(total.values), logs, total.values)
