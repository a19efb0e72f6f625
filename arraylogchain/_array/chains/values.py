"""The sum over all paths of chains, step by step or in segments of time."""

from __future__ import annotations

from collections.abc import Sequence

from arraylogchain._array.chains import time_parallel
from arraylogchain._array.chains.plans import cut_chain
from arraylogchain._array.chains.scaled import Options
from arraylogchain._array.chains.states import State, add_scale, log_sum
from arraylogchain._array.chains.sweep import Part, Sweep, proving_levels
from arraylogchain._array.chains.tiles import Tile, arrange, tiles
from arraylogchain._context import Array, Context
from arraylogchain._inputs.chain import Chain
from arraylogchain.plan import count_segments, sizes_of


def log_partition(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the logs of the sums over all paths, [*batch]."""
    segments = count_segments("log_partition", sizes_of(chain), workspace)
    if segments > 1 and chain.final is None:
        found = time_parallel.log_partition(ctx, chain, segments, workspace)
        if found is not None:
            return found
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
        write_totals(tile, parts, view[(*tile.box, ...)])
    return out


def write_totals(tile: Tile, parts: Sequence[Part], view: Array) -> None:
    """Write the logs of the sums over all paths, given the last states, into a view of a tile."""
    for part in parts:
        assert part.state is not None
        own = tile if part.index is None else tile.select(part.index)
        total = log_total(own, part.state)
        # What one part did not prove, the next one writes again.
        own.place(view[..., None], total)


def log_total(tile: Tile, last: State) -> Array:
    """Return the logs of the sums over all paths, [groups, rows, 1], of a tile's last states."""
    ctx, final = tile.ctx, tile.reversed().start()
    if final is None:
        return last.log_total(ctx)
    last = last.in_log_form(ctx)
    final = ctx.load(final, ctx.widest)
    logs = final if tile.chain.final_in_logs else ctx.xp.log(final)
    return add_scale(log_sum(ctx, last.values + logs), last.exponent, last.offset)
