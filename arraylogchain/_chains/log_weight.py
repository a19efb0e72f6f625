"""Weights of given paths: sums of gathered entries, in the widest precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from arraylogchain._core.axes import Box, boxes, within
from arraylogchain._core.context import Array, Context, shape_of
from arraylogchain._inputs.chain import Chain, ends_of, states_of

# Bytes for each step of a path: two states, indices, entries and their logarithms, masks.
_POINT = 256


def log_weight(ctx: Context, chain: Chain, workspace: int, states: Array) -> Array:
    """Return the log weights of paths in the result's dtype; see `log_weight_parts`."""
    high, remainder = log_weight_parts(ctx, chain, workspace, states)
    high += remainder  # in place: a sum of arrays without axes would be no array
    return ctx.to_result(high)


def log_weight_parts(
    ctx: Context, chain: Chain, workspace: int, states: Array
) -> tuple[Array, Array]:
    """Return the sums of whole nats, which are exact, and of the remainders.

    Parameters
    ----------
    ctx : Context
    chain : Chain
        Nothing of it is expanded.
    workspace : int
        Bytes for temporaries.
    states : integer array [..., T]
        As `check_states` returns them, with all batch axes.

    Returns
    -------
    high, remainder : array [...]
        In the widest precision. Large terms that cancel leave no rounding error.
    """
    xp, shape = ctx.xp, shape_of(states)[:-1]
    lengths = None if chain.lengths is None else ctx.integers(chain.lengths)
    dtype = ctx.dtype(ctx.widest)
    high, remainder = (xp.zeros(shape, dtype=dtype, device=ctx.device) for _ in range(2))
    for box in boxes((*shape, chain.num_steps), max(1, min(2 * ctx.block, workspace // _POINT))):
        values = xp.concat(list(_weights_in(ctx, chain, states, lengths, box)), axis=-1)
        rounded = xp.round(values)
        high[box[:-1]] += xp.sum(rounded, axis=-1)
        remainder[box[:-1]] += xp.sum(values - rounded, axis=-1)
    return high, xp.where(xp.isfinite(high), remainder, 0.0)


def _weights_in(
    ctx: Context, chain: Chain, states: Array, lengths: Array | None, box: Box
) -> Iterator[Array]:
    """Yield the log weights [..., n] of paths at the steps of a box.

    They are potentials, transitions to the next step, and initial and final weights.
    """
    xp, lead, start = ctx.xp, box[:-1], box[-1].start
    stop = min(box[-1].stop + 1, chain.num_steps)
    path = states_of(ctx, states, lengths, (*lead, slice(start, stop)))
    times = ctx.arange(start, stop)
    end: Any = chain.num_steps if lengths is None else ends_of(lengths, box)

    def logs(part: str, at: tuple[Any, ...], first: int = 0) -> Array:
        values = ctx.load(_entries(ctx, chain.parts[part], lead, at), ctx.widest)
        values = values if part in chain.logs else xp.log(values)
        if lengths is None:
            return values
        return xp.where(end > times[first : first + values.shape[-1]], values, 0.0)

    count, pairs = box[-1].stop - start, stop - start - 1
    yield logs("potentials", (times[:count], path[..., :count]))
    if pairs:
        steps = 0 if chain.has_one_matrix else times[:pairs]
        yield logs("transitions", (steps, path[..., :pairs], path[..., 1:]), 1)
    if start == 0 and "initial" in chain.parts:
        yield logs("initial", (path[..., :1],))
    if "final" in chain.parts:
        yield xp.where(times[:count] == end - 1, logs("final", (path[..., :count],)), 0.0)


def _entries(ctx: Context, x: Array, lead: Box, trailing: tuple[Any, ...]) -> Array:
    """Return x[..., *trailing] where leading axes of x broadcast against a box of paths.

    Every axis has an index array of its own, so that no axis of x is ever expanded.
    """
    lead_shape = shape_of(x)[: x.ndim - len(trailing)]
    if not lead_shape:
        return x[trailing]
    index: list[Any] = []
    for axis, part in enumerate(within(lead[len(lead) - len(lead_shape) :], lead_shape)):
        along = ctx.arange(part.start, part.stop)
        index.append(ctx.xp.reshape(along, (-1,) + (1,) * (len(lead_shape) - axis)))
    return x[(*index, *trailing)]
