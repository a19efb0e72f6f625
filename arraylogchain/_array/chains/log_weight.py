"""Weights of given paths: gathered entries, added up in the widest precision."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from arraylogchain._context import Array, Context
from arraylogchain._fold import Box, boxes, chunks, within
from arraylogchain._fold import lengths as lengths_of
from arraylogchain._inputs.chain import Chain

# Bytes for each step of a path: two states, indices as the library arranges them, entries as given
# and widened, their logarithms, masks.
_POINT = 256


def log_weight(ctx: Context, chain: Chain, workspace: int, states: Array) -> Array:
    """Return the log weights of paths.

    Parameters
    ----------
    ctx : Context
    chain : Chain
        Nothing of it is expanded.
    workspace : int
        Bytes for temporaries.
    states : integer array [..., T]
        Leading axes broadcast against the batch. What lies past a chain's end is ignored.

    Returns
    -------
    array [...]
        In the result's dtype; leading axes are those of states and of the batch, broadcast.
    """
    xp = ctx.xp
    shape = np.broadcast_shapes(tuple(states.shape[:-1]), chain.batch)
    states = xp.broadcast_to(states, (*shape, chain.num_steps))
    lengths = None if chain.lengths is None else ctx.integers(chain.lengths)
    out = ctx.empty(shape, ctx.result_dtype)
    limit = max(1, min(2 * ctx.block, workspace // _POINT))
    for lead in boxes(shape, max(1, limit // chain.num_steps)):
        # Whole parts, which add up exactly, and the rest: what is large and cancels leaves no
        # rounding.
        whole = xp.zeros(lengths_of(lead), dtype=ctx.dtype(ctx.widest), device=ctx.device)
        rest = whole
        for steps in chunks(chain.num_steps, max(1, limit // max(1, math.prod(whole.shape)))):
            for values in _weights_in(ctx, chain, states, lengths, (*lead, steps)):
                rounded = xp.round(values)
                rounded = xp.where(xp.isfinite(rounded), rounded, xp.zeros_like(rounded))
                whole = whole + xp.sum(rounded, axis=-1)
                rest = rest + xp.sum(values - rounded, axis=-1)
        out[(*lead, ...)] = ctx.to_result(whole + rest)
    return out


def _weights_in(
    ctx: Context, chain: Chain, states: Array, lengths: Array | None, box: Box
) -> Iterator[Array]:
    """Yield the logs [..., n] of what the steps of a box give to paths, and what leads on."""
    xp, lead, start = ctx.xp, box[:-1], box[-1].start
    stop = min(box[-1].stop + 1, chain.num_steps)
    path = xp.astype(states[(*lead, slice(start, stop))], ctx.index_dtype, copy=False)
    times = xp.arange(start, stop, dtype=ctx.index_dtype, device=ctx.device)
    real, end = None, chain.num_steps
    if lengths is not None:
        # Lengths may have fewer axes than paths, and axes of length 1.
        own = lengths[within(lead[len(lead) - lengths.ndim :], tuple(lengths.shape))]
        end = own[..., None]
        real = end > times
        path = xp.where(real, path, xp.zeros_like(path))

    def logs(x: Array, in_logs: bool, at: tuple[Array, ...], first: int) -> Array:
        values = ctx.load(_entries(ctx, x, lead, at), ctx.widest)
        values = values if in_logs else xp.log(values)
        if real is None:
            return values
        kept = real[..., first : first + at[-1].shape[-1]]
        return xp.where(kept, values, xp.zeros_like(values))

    count, pairs = box[-1].stop - start, stop - start - 1
    yield logs(chain.potentials, True, (times[:count], path[..., :count]), 0)
    if pairs and chain.transitions is not None:
        steps = times[:pairs]
        if int(chain.transitions.shape[-3]) == 1:
            steps = xp.zeros_like(steps)
        moves = (steps, path[..., :pairs], path[..., 1:])
        yield logs(chain.transitions, chain.transitions_in_logs, moves, 1)
    if start == 0 and chain.initial is not None:
        yield logs(chain.initial, chain.initial_in_logs, (path[..., :1],), 0)
    if chain.final is not None:
        values = logs(chain.final, chain.final_in_logs, (path[..., :count],), 0)
        yield xp.where(times[:count] == end - 1, values, xp.zeros_like(values))


def _entries(ctx: Context, x: Array, lead: Box, trailing: tuple[Array, ...]) -> Array:
    """Return x[..., *trailing] where leading axes of x broadcast against a box of paths.

    Every axis has an index array of its own, so that no axis of x is ever expanded.
    """
    xp = ctx.xp
    own = tuple(int(n) for n in x.shape[: x.ndim - len(trailing)])
    index: list[Any] = []
    for axis, (part, n) in enumerate(zip(lead[len(lead) - len(own) :], own, strict=True)):
        start, stop = (part.start, part.stop) if n > 1 else (0, 1)
        along = xp.arange(start, stop, dtype=ctx.index_dtype, device=ctx.device)
        index.append(xp.reshape(along, (-1,) + (1,) * (len(own) - axis)))
    return x[(*index, *trailing)]
