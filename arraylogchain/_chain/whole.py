"""Recursions over whole chains, tile by tile, and functions of their states put in place."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from arraylogchain._chain.forms.states import State
from arraylogchain._chain.pieces import plan_recursion
from arraylogchain._chain.recursion import Recursion
from arraylogchain._chain.steps import Chain
from arraylogchain._context import Array, Context

Results = Callable[[State], tuple[Array, ...]]


def write_all(
    ctx: Context,
    chain: Chain,
    outs: list[Array],
    workspace: int,
    results: Results,
    backward: bool = False,
) -> None:
    """Write functions [groups, rows, n] of every state into arrays [*batch, count - lead, n].

    Past a chain's end they are -inf, or not written where no chain of a row or group goes on.
    """
    views = [chain.arrange(ctx.xp, out, trailing=2) for out in outs]
    plan = plan_recursion(*chain.sizes, chain.size, chain.count, workspace, history=True)
    for box, steps in chain.tiles(ctx, plan.groups, plan.rows):
        steps = replace(steps, backward=backward)
        for block, _, history in Recursion(steps, True, plan).run(record=True):
            for i, state in zip(range(block.start, block.stop), history, strict=True):
                time = steps.count - 1 - i if backward else i
                if time < chain.lead:
                    continue
                units = steps.units_at(time)
                own, state = steps.first(units), state.units(slice(0, units), steps.select_axis)
                real = own.real(time)
                for view, values in zip(views, results(state), strict=True):
                    if real is not None:
                        values = ctx.xp.where(real, values, ctx.xp.full_like(values, -math.inf))
                    own.place(view[(*box, time - chain.lead, ...)], values)


def write_last(
    ctx: Context,
    chain: Chain,
    outs: list[Array],
    workspace: int,
    results: Results,
    every_entry: bool,
    backward: bool = False,
) -> None:
    """Write functions of the last state into arrays [*batch] or [*batch, n]."""
    trailing = [out.ndim - len(chain.batch) for out in outs]
    views = [chain.arrange(ctx.xp, out, n) for out, n in zip(outs, trailing, strict=True)]
    plan = plan_recursion(*chain.sizes, chain.size, chain.count, workspace, history=False)
    for box, steps in chain.tiles(ctx, plan.groups, plan.rows):
        steps = replace(steps, backward=backward)
        for _, state, _ in Recursion(steps, every_entry, plan).run(record=False):
            if state is None:
                continue
            for view, values in zip(views, results(state), strict=True):
                steps.place(view[(*box, ...)], values)


def split_last_message(
    ctx: Context, chain: Chain, workspace: int, backward: bool = False
) -> tuple[Array, Array]:
    """Return the last message as logs [*batch, K] and whole numbers [*batch] to add to them."""
    dtype = ctx.dtype(ctx.widest)
    logs = ctx.empty((*chain.batch, chain.size), dtype)
    whole = ctx.empty((*chain.batch, 1), dtype)

    def results(state: State) -> tuple[Array, Array]:
        return state.split_logs(ctx)

    write_last(ctx, chain, [logs, whole], workspace, results, True, backward)
    return logs, whole[..., 0]
