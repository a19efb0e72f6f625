"""The products of a long chain's segments, and what follows from chaining them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from arraylogchain._chain.steps import Chain
from arraylogchain._chain.whole import split_last_message, write_all
from arraylogchain._context import Array, Context

if TYPE_CHECKING:
    from arraylogchain._chain.long.segments import Cut, Messages


@dataclass(frozen=True, slots=True)
class Products:
    """Logs of the segments' products [..., segments, K, K], but for whole numbers, `offsets`."""

    logs: Array
    offsets: Array  # [..., segments]


def multiplied(ctx: Context, cut: Cut, workspace: int) -> Products | None:
    """Multiply each segment out, one row for each state that it can start from.

    None if +inf or NaN turn up.
    """
    xp, size = ctx.xp, cut.front.size
    matrices, potentials = cut.matrices, cut.potentials
    batch = tuple(matrices.shape[:-4])
    if int(matrices.shape[-3]) == 1:
        first, others = matrices[..., 0, :, :], matrices
    else:
        first, others = matrices[..., 0, :, :], matrices[..., 1:, :, :]
    if potentials is not None:
        batch = np.broadcast_shapes(batch, tuple(potentials.shape[:-3]))
    operators = Chain(
        batch=(*batch, cut.segments, size),
        count=cut.length,
        size=size,
        transitions=others[..., None, :, :, :],
        potentials=None if potentials is None else potentials[..., None, :, :],
        start=first,
        transitions_in_logs=cut.front.transitions_in_logs,
        start_in_logs=cut.front.transitions_in_logs,
    )
    rows, whole = split_last_message(ctx, operators, workspace)
    # Rows without a path have no magnitude.
    live = xp.any(rows > -math.inf, axis=-1)
    offsets = xp.max(xp.where(live, whole, xp.full_like(whole, -math.inf)), axis=-1)
    offsets = xp.where(xp.isfinite(offsets), offsets, xp.zeros_like(offsets))
    below = xp.where(live, whole - offsets[..., None], xp.zeros_like(whole))
    logs = rows + below[..., None]
    if not bool(xp.all(logs < math.inf)) or not bool(xp.all(cut.start < math.inf)):
        return None
    return Products(logs, offsets)


def over_segments(ctx: Context, cut: Cut) -> tuple[Context, Chain]:
    """Return the chain of the segments' products, to be computed in the widest precision."""
    assert cut.products is not None
    chain = _of_products(cut, cut.products)
    # All offsets can be added at the start: they are factors that all paths have.
    total = ctx.xp.sum(cut.products.offsets, axis=-1)
    wide = replace(ctx, precision=ctx.widest)
    return wide, replace(chain, start_offset=chain.start_offset + total)


def _of_products(cut: Cut, products: Products) -> Chain:
    """Return the chain of the segments' products, without their offsets."""
    return replace(
        cut.front,
        count=cut.segments + 1,
        transitions=products.logs,
        potentials=None,
        start=cut.start,
        transitions_in_logs=True,
        start_in_logs=True,
        start_offset=cut.start_offset,
    )


def messages_of(
    ctx: Context, cut: Cut, products: Products, workspace: int, backward: bool
) -> Messages:
    """Return the messages at the ends of the front and of each segment."""
    chain = _of_products(cut, products)
    wide = replace(ctx, precision=ctx.widest, result_name=ctx.widest.name)
    shape = (*chain.batch, chain.count)
    logs = ctx.empty((*shape, chain.size), ctx.dtype(ctx.widest))
    whole = ctx.empty((*shape, 1), ctx.dtype(ctx.widest))
    write_all(wide, chain, [logs, whole], workspace, lambda state: state.split_logs(ctx), backward)
    total = ctx.xp.cumulative_sum(products.offsets, axis=-1, include_initial=True)
    return logs, whole[..., 0] + (total[..., -1:] - total if backward else total)
