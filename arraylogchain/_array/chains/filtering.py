"""Messages that are normalised at every step."""

from __future__ import annotations

from arraylogchain._array.chains.states import State, add_scale
from arraylogchain._array.chains.sweep import sweeps
from arraylogchain._array.chains.tiles import arrange
from arraylogchain._context import Array, Context
from arraylogchain._inputs.chain import Chain


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
            state = sweep.advance().of_all(tile).part(real, tile.select_axis)
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
