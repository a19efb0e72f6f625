"""Whole chains: tile by tile, and long ones cut into segments of time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from arraylogchain._arrays import Array, Context
from arraylogchain._chain.pieces import plan_recursion
from arraylogchain._chain.recursion import Recursion
from arraylogchain._chain.states import State
from arraylogchain._chain.steps import Chain


def log_partition(ctx: Context, chain: Chain, segments: int, workspace: int) -> Array:
    """Return the logs of the sums over all paths, [*batch]."""
    if segments > 1:
        chain = in_segments(ctx, chain, segments, workspace)
    out = ctx.empty(chain.batch, ctx.result_dtype)
    _finish(ctx, chain, out, workspace, lambda state: state.log_total(ctx), every_entry=False)
    return out


def final_messages(
    ctx: Context, chain: Chain, segments: int, workspace: int, dtype: object
) -> Array:
    """Return the logs of the weights after the last step, [*batch, K], each one right."""
    if segments > 1:
        chain = in_segments(ctx, chain, segments, workspace)
    out = ctx.empty((*chain.batch, chain.size), dtype)
    _finish(ctx, chain, out, workspace, lambda state: state.logs(ctx), every_entry=True)
    return out


def forward_messages(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the logs of the weights after every step, [*batch, count, K]."""
    xp = ctx.xp
    out = ctx.empty((*chain.batch, chain.count, chain.size), ctx.result_dtype)
    view = chain.arrange(xp, out, trailing=2)
    plan = plan_recursion(*chain.sizes, chain.size, chain.count, workspace, history=True)
    for box, steps in chain.tiles(ctx, plan.groups, plan.rows):
        for block, _, history in Recursion(steps, True, plan).run(record=True):
            for i, state in zip(range(block.start, block.stop), history, strict=True):
                logs = xp.reshape(state.logs(ctx), (*steps.shape, chain.size))
                view[(*box, i, ...)] = xp.astype(logs, out.dtype)
    return out


def in_segments(ctx: Context, chain: Chain, segments: int, workspace: int) -> Chain:
    """Return a shorter chain with the same sums, whose matrices are products of many.

    Products over equal segments of time are computed side by side, one row for each state that a
    segment can start from; what does not fill a segment is done first.
    """
    xp = ctx.xp
    length = (chain.count - 1) // segments
    front = chain.count - 1 - segments * length
    start = final_messages(ctx, _front(chain, front + 1), 1, workspace, ctx.dtype(ctx.widest))

    def cut(x: Array, trailing: int) -> Array:
        """Cut time: [..., segments * length, *trailing] to [..., segments, length, *trailing]."""
        own = tuple(x.shape)
        axis = len(own) - trailing - 1
        return xp.reshape(x, (*own[:axis], segments, length, *own[axis + 1 :]))

    matrices = chain.transitions
    assert matrices is not None  # there are at least four products
    batch = tuple(matrices.shape[:-3])
    if int(matrices.shape[-3]) == 1:
        matrices = matrices[..., None, :, :, :]
        first, others = matrices[..., 0, :, :], matrices[..., None, :, :, :]
    else:
        matrices = cut(matrices[..., front:, :, :], 2)
        first, others = matrices[..., 0, :, :], matrices[..., None, 1:, :, :]
    potentials = chain.potentials
    if potentials is not None:
        batch = np.broadcast_shapes(batch, tuple(potentials.shape[:-2]))
        potentials = cut(potentials[..., front + 1 :, :], 1)[..., None, :, :]
    products = final_messages(
        ctx,
        Chain(
            batch=(*batch, segments, chain.size),
            count=length,
            size=chain.size,
            transitions=others,
            potentials=potentials,
            start=first,
            transitions_in_logs=chain.transitions_in_logs,
            start_in_logs=chain.transitions_in_logs,
        ),
        1,
        workspace // 2,
        ctx.dtype(ctx.widest),
    )
    return replace(
        chain,
        count=segments + 1,
        transitions=products,
        potentials=None,
        start=start,
        transitions_in_logs=True,
        start_in_logs=True,
    )


def _front(chain: Chain, count: int) -> Chain:
    """Return the chain of the first states."""
    matrices, potentials = chain.transitions, chain.potentials
    if matrices is not None and int(matrices.shape[-3]) > 1:
        matrices = matrices[..., : count - 1, :, :] if count > 1 else matrices[..., :1, :, :]
    return replace(
        chain,
        count=count,
        transitions=matrices,
        potentials=None if potentials is None else potentials[..., :count, :],
    )


def _finish(
    ctx: Context,
    chain: Chain,
    out: Array,
    workspace: int,
    result: Callable[[State], Array],
    every_entry: bool,
) -> None:
    """Write a function of the last state into `out`, tile by tile."""
    xp = ctx.xp
    trailing = out.ndim - len(chain.batch)
    view = chain.arrange(xp, out, trailing)
    plan = plan_recursion(*chain.sizes, chain.size, chain.count, workspace, history=False)
    for box, steps in chain.tiles(ctx, plan.groups, plan.rows):
        for _, state, _ in Recursion(steps, every_entry, plan).run(record=False):
            if state is not None:
                values = xp.reshape(
                    result(state), (*steps.shape, *out.shape[out.ndim - trailing :])
                )
                view[(*box, ...)] = xp.astype(values, out.dtype)
