"""Messages of chains, step by step."""

from __future__ import annotations

import math
from functools import partial

from arraylogchain._array.chains.maxplus import MaxPlusStepper
from arraylogchain._array.chains.plans import Pieces, cut_chain
from arraylogchain._array.chains.scaled import Options
from arraylogchain._array.chains.sweep import Level, Sweep, logs_of_all, proving_levels
from arraylogchain._array.chains.tiles import arrange, tiles
from arraylogchain._context import Array, Context, whole_maximum
from arraylogchain._inputs.chain import Chain


def forward_messages(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the logs of the weights after every step, [*batch, T, K], each one right."""
    return _messages(ctx, chain, workspace, backward=False)


def backward_messages(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the logs of the weights that follow each step, [*batch, T, K], each one right."""
    return _messages(ctx, chain, workspace, backward=True)


def _messages(ctx: Context, chain: Chain, workspace: int, backward: bool) -> Array:
    xp = ctx.xp
    out = ctx.empty((*chain.batch, chain.num_steps, chain.num_states), ctx.result_dtype)
    if chain.lengths is not None:
        out[...] = -math.inf
    view = arrange(xp, chain, out, trailing=2)
    pieces = cut_chain(chain, workspace)
    options = Options(
        keeps_products=backward,
        together=pieces.together,
        panel=pieces.panel,
        workspace=workspace // 4,
    )
    levels = proving_levels(ctx, options)
    for tile in tiles(ctx, chain, pieces.groups, pieces.rows):
        read = tile.reversed() if backward else tile
        sweep = Sweep(read, levels)
        for i in range(tile.num_steps):
            target = view[(*tile.box, read.time(i), ...)]
            for part in sweep.advance():
                state = part.product if backward else part.state
                assert state is not None
                own = read if part.index is None else read.select(part.index)
                lanes = slice(own.count(i))
                if lanes.stop:
                    logs = state.part(lanes, own.select_axis).logs(ctx)
                    own.part(lanes).place(target, logs)
    return out


def last_message(
    ctx: Context, chain: Chain, workspace: int, backward: bool = False
) -> tuple[Array, Array]:
    """Return the weights after the last step, or backward from the first step on.

    They are logs [*batch, K] and integers [*batch] to add to them.
    """
    pieces = cut_chain(chain, workspace)
    options = Options(together=pieces.together, panel=pieces.panel, workspace=workspace // 4)
    return _last(ctx, chain, pieces, proving_levels(ctx, options), backward)


def best_message(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the logs of the largest weights after the last step, [*batch, K], but for a shift."""
    pieces = cut_chain(chain, workspace)
    return _last(ctx, chain, pieces, [partial(MaxPlusStepper, panel=pieces.panel)], False)[0]


def _last(
    ctx: Context, chain: Chain, pieces: Pieces, levels: list[Level], backward: bool
) -> tuple[Array, Array]:
    """Return the states after the last step as `last_message` does."""
    xp, dtype = ctx.xp, ctx.dtype(ctx.widest)
    logs, whole = (ctx.empty((*chain.batch, n), dtype) for n in (chain.num_states, 1))
    views = [arrange(xp, chain, x, trailing=1) for x in (logs, whole)]
    for tile in tiles(ctx, chain, pieces.groups, pieces.rows):
        read = tile.reversed() if backward else tile
        sweep = Sweep(read, levels)
        for _ in range(tile.num_steps):
            parts = sweep.advance()
        own = logs_of_all(read, parts)
        # The logs are small in each row's largest entries, so that storing them costs no accuracy.
        shift = whole_maximum(ctx, own.logs(ctx), -1, ctx.widest)
        own.offset = own.offset - shift
        for view, values in zip(views, (own.logs(ctx), shift), strict=True):
            tile.place(view[(*tile.box, ...)], values)
    return logs, whole[..., 0]
