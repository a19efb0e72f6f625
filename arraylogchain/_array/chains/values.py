"""The sum over all paths of chains, step by step or in segments of time."""

from __future__ import annotations

from arraylogchain._array.chains.states import State
from arraylogchain._array.chains.sweep import sweeps, with_final
from arraylogchain._array.chains.tiles import Tile, arrange
from arraylogchain._array.chains.time_parallel import Segments
from arraylogchain._context import Array, Context
from arraylogchain._inputs.chain import Chain


def log_partition(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the logs of the sums over all paths, [*batch]."""
    if chain.segments > 1:
        return Segments(ctx, chain, workspace).log_partition()
    out = ctx.empty(chain.batch, ctx.result_dtype)
    view = arrange(ctx.xp, chain, out, trailing=0)
    # A sum over paths is the one over all states only where nothing follows.
    for tile, sweep in sweeps(ctx, chain, workspace, every_entry=chain.final is not None):
        tile.place(view[(*tile.box, ...)][..., None], log_totals(tile, sweep.last()))
    return out


def log_totals(tile: Tile, last: State) -> Array:
    """Return the logs of the sums over all paths, [groups, rows, 1], given the last states."""
    return with_final(tile, last).total(tile.ctx).logs(tile.ctx)
