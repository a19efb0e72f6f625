"""The sum over all paths of chains, step by step or in segments of time."""

from __future__ import annotations

from collections.abc import Sequence

from arraylogchain._array.chains import time_parallel
from arraylogchain._array.chains.plans import cut_chain
from arraylogchain._array.chains.scaled import Options
from arraylogchain._array.chains.sweep import (
    Part,
    Sweep,
    proving_levels,
    states_of_all,
    with_final,
)
from arraylogchain._array.chains.tiles import Tile, arrange, tiles
from arraylogchain._context import Array, Context
from arraylogchain._inputs.chain import Chain


def log_partition(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the logs of the sums over all paths, [*batch]."""
    found = time_parallel.cut_in_segments("log_partition", ctx, chain, workspace)
    if found is not None:
        return found[0]
    out = ctx.empty(chain.batch, ctx.result_dtype)
    view = arrange(ctx.xp, chain, out, trailing=0)
    pieces = cut_chain(chain, workspace)
    options = Options(
        # A sum over paths is the one over all states only where nothing follows.
        every_entry=chain.final is not None,
        together=pieces.together,
        panel=pieces.panel,
        workspace=workspace // 4,
    )
    levels = proving_levels(ctx, options)
    for tile in tiles(ctx, chain, pieces.groups, pieces.rows):
        sweep = Sweep(tile, levels)
        for _ in range(tile.num_steps):
            parts = sweep.advance()
        tile.place(view[(*tile.box, ...)][..., None], log_totals(tile, parts))
    return out


def log_totals(tile: Tile, parts: Sequence[Part]) -> Array:
    """Return the logs of the sums over all paths, [groups, rows, 1], given the last states."""
    return with_final(tile, states_of_all(tile, parts)).log_total(tile.ctx)
