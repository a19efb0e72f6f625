"""Messages that are normalised at every step."""

from __future__ import annotations

from dataclasses import replace

from arraylogchain._array.chains.plans import cut_chain
from arraylogchain._array.chains.scaled import Options
from arraylogchain._array.chains.states import State, add_scale, log_sum
from arraylogchain._array.chains.sweep import Sweep, proving_levels
from arraylogchain._array.chains.tiles import Tile, arrange, tiles
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
    pieces = cut_chain(chain, workspace)
    options = Options(together=pieces.together, panel=pieces.panel, workspace=workspace // 4)
    levels = proving_levels(ctx, options)
    for tile in tiles(ctx, chain, pieces.groups, pieces.rows):
        _filter(tile, Sweep(tile, levels), views)
    return probabilities, normalizers[..., 0]


def _filter(tile: Tile, sweep: Sweep, views: list[Array]) -> None:
    """Write what a sweep finds into views of both results."""
    xp, ctx = tile.ctx.xp, tile.ctx
    # The total of each row after the step before, as values, exponent and offset of a log state.
    shape, dtype = (*(int(n) for n in tile.shape), 1), ctx.dtype(ctx.widest)
    before = [xp.zeros(shape, dtype=dtype, device=ctx.device) for _ in range(3)]
    for i in range(tile.num_steps):
        after = [ctx.empty(shape, dtype) for _ in range(3)]
        for part in sweep.advance():
            assert part.state is not None
            own = tile if part.index is None else tile.select(part.index)
            real = slice(own.count(i))
            if not real.stop:
                continue
            state, own = part.state.part(real, own.select_axis), own.part(real)
            total = _total(ctx, state)
            values, exponent, offset = (own.expanded(x, (1,)) for x in before)
            last = State(values, exponent, offset, None, in_logs=True)
            found = (_shares(ctx, state, total), _ratio(ctx, total, last))
            for view, values in zip(views, found, strict=True):
                own.place(view[(*tile.box, i, ...)], values)
            # What this part did not prove, the next one writes again.
            scale = (total.values, total.exponent, total.offset)
            for room, values in zip(after, scale, strict=True):
                own.place(room, values)
        before = after


def _total(ctx: Context, state: State) -> State:
    """Return the sums of weights, [groups, rows, 1], in log form; their values are small."""
    if state.in_logs:
        return replace(state, values=log_sum(ctx, ctx.load(state.values, ctx.widest)))
    total = ctx.xp.sum(state.values, axis=-1, keepdims=True)
    return replace(state, values=total, support=None).in_log_form(ctx)


def _shares(ctx: Context, state: State, total: State) -> Array:
    """Return weights divided by their sum; 0 where that is 0 or infinite."""
    xp, values = ctx.xp, state.values
    if state.in_logs:
        shares = xp.exp(ctx.load(values, ctx.widest) - total.values)
    else:
        shares = values / xp.sum(values, axis=-1, keepdims=True)
    return xp.where(xp.isinf(total.values), xp.zeros_like(shares), shares)


def _ratio(ctx: Context, total: State, before: State) -> Array:
    """Return the log of total / before; what is large cancels first."""
    xp = ctx.xp
    exponent, offset = total.exponent - before.exponent, total.offset - before.offset
    logs = add_scale(total.values - before.values, exponent, offset)
    # After -inf or +inf it is the same at all later steps.
    return xp.where(xp.isfinite(total.values), logs, total.values)
