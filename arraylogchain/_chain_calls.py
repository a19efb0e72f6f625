"""Operations on chains, each by the implementation that the plan picks.

What `LogChain`, `vjp` and torch call; callers are within `Context.computing`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from arraylogchain import _dispatch
from arraylogchain._context import Array, Context, shape_of
from arraylogchain._fold import Shape
from arraylogchain._inputs.chain import Chain
from arraylogchain._inputs.lengths import fill_past_ends
from arraylogchain._inputs.paths import check_states
from arraylogchain._random import fill, room_for_samples

# Takes a cotangent [*batch] and which of 'potentials', 'transitions', 'initial' and 'final'
# are wanted; returns their gradients by name, in the shapes and dtypes of the chain's arrays.
Pullback = Callable[[Array, frozenset[str]], dict[str, Array]]


def compute(operation: str, ctx: Context, chain: Chain, workspace: int, *args: Any) -> Any:
    """Return 'log_partition', 'viterbi', ...: what an operation makes of a chain alone.

    Of pieces of chains there are also 'last_message', with whether it is of the first step,
    backward: logs [*batch, K], the largest of them near 0, and numbers [*batch] to add to them; and
    'best_message', the largest weights after the last step, but for a shift.
    """
    if _is_empty(chain):
        return _of_nothing(operation, ctx, chain)
    function = _dispatch.for_chain(operation, ctx, chain, workspace)
    return function(ctx, chain, workspace, *args)


def value_and_pullback(
    ctx: Context, chain: Chain, workspace: int, keep: bool
) -> tuple[Array, Pullback]:
    """Return the logs of the sums over all paths, [*batch], and their pullback.

    With `keep`, every state is kept for the pullback though that takes more than `workspace`, and
    not only one in about sqrt(T).
    """
    if not _is_empty(chain):
        function = _dispatch.for_chain("value_and_pullback", ctx, chain, workspace)
        value, pullback = function(ctx, chain, workspace, keep)
        return value, pullback

    def zeros(cotangent: Array, wanted: frozenset[str]) -> dict[str, Array]:
        return {name: ctx.xp.zeros_like(getattr(chain, name)) for name in wanted}

    return _of_nothing("log_partition", ctx, chain), zeros


def log_weight(ctx: Context, chain: Chain, workspace: int, states: Array) -> Array:
    """Return the log weights of paths [..., T]; what lies past a row's length is ignored."""
    states = check_states(ctx, states, chain)
    shape = np.broadcast_shapes(shape_of(states)[:-1], chain.batch)
    if chain.num_states == 0 or 0 in shape:
        return ctx.xp.full(shape, -math.inf, dtype=ctx.result_dtype, device=ctx.device)
    function = _dispatch.for_chain("log_weight", ctx, replace(chain, batch=shape), workspace)
    return function(ctx, chain, workspace, states)


def sample(ctx: Context, chain: Chain, workspace: int, num_samples: int, rng: Any) -> Array:
    """Return paths [num_samples, *batch, T], drawn with a generator."""
    out, uniforms = room_for_samples(ctx, (num_samples, *chain.batch, chain.num_steps))
    fill(ctx, rng, uniforms)
    draw(ctx, chain, workspace, out, uniforms)
    return out


def draw(ctx: Context, chain: Chain, workspace: int, out: Array, uniforms: Array) -> None:
    """Write paths into `out`, [num_samples, *batch, T], from numbers in [0, 1).

    At a row's last step, -1 - k stands for state k.
    """
    if chain.num_states == 0:
        out[...], _ = _of_nothing("viterbi", ctx, chain)
    elif 0 not in out.shape:
        function = _dispatch.for_chain("sample", ctx, chain, workspace)
        function(ctx, chain, workspace, out, uniforms)


def _is_empty(chain: Chain) -> bool:
    """Tell whether there are no chains, or no paths because there are no states."""
    return chain.num_states == 0 or 0 in chain.batch


def _of_nothing(operation: str, ctx: Context, chain: Chain) -> Any:
    """Return the result for chains without states, or for no chain."""
    per_step = (*chain.batch, chain.num_steps)

    def full(shape: Shape, value: Any, dtype: Any = ctx.result_dtype) -> Array:
        return ctx.xp.full(shape, value, dtype=dtype, device=ctx.device)

    def ragged(x: Array, value: int) -> Array:
        return fill_past_ends(ctx, x, chain.lengths, value)

    if operation == "posterior":
        names = ("log_partition", "marginals", "expected_transitions")
        return tuple(_of_nothing(name, ctx, chain) for name in names)
    if operation == "expected_transitions":
        return None if chain.transitions is None else full(shape_of(chain.transitions), 0.0)
    if operation == "entropy":
        return full(chain.batch, 0.0)
    log_z = full(chain.batch, -math.inf)
    if operation == "log_partition":
        return log_z
    if operation == "viterbi":
        return ragged(full(per_step, 0, ctx.index_dtype), -1), log_z
    zeros = full((*per_step, chain.num_states), 0.0)
    if operation == "filtered":
        return zeros, ragged(full(per_step, -math.inf), 0)
    return zeros
