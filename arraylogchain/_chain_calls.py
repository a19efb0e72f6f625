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
from arraylogchain._inputs.chain import Chain
from arraylogchain._inputs.lengths import fill_past_ends

# Takes a cotangent [*batch] and which of 'potentials', 'transitions', 'initial' and 'final'
# are wanted; returns their gradients by name, in the shapes and dtypes of the chain's arrays.
Pullback = Callable[[Array, frozenset[str]], dict[str, Array]]


def compute(operation: str, ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return 'log_partition', 'forward_messages', ...: an operation that gives one array."""
    if _is_empty(chain) or (operation == "expected_transitions" and chain.num_steps == 1):
        return _of_nothing(operation, ctx, chain)
    function = _dispatch.for_chain(operation, ctx, chain, workspace)
    return function(ctx, chain, workspace)


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


def posterior(ctx: Context, chain: Chain, workspace: int) -> tuple[Array, Array, Array | None]:
    """Return log Z [*batch], marginals [*batch, T, K] and counts in the shape of transitions."""
    counts = None
    if chain.transitions is not None and chain.num_steps == 1:
        counts = _of_nothing("expected_transitions", ctx, chain)
        chain = replace(chain, transitions=None)
    if _is_empty(chain):
        if chain.transitions is not None:
            counts = _of_nothing("expected_transitions", ctx, chain)
        log_z, marginals = (_of_nothing(x, ctx, chain) for x in ("log_partition", "marginals"))
        return log_z, marginals, counts
    function = _dispatch.for_chain("posterior", ctx, chain, workspace)
    log_z, marginals, found = function(ctx, chain, workspace)
    return log_z, marginals, found if counts is None else counts


def filtered(ctx: Context, chain: Chain, workspace: int) -> tuple[Array, Array]:
    """Return probabilities [*batch, T, K] given the steps so far, and log normalisers [*batch, T].

    Past the ends of rows both are 0.
    """
    if not _is_empty(chain):
        function = _dispatch.for_chain("filtered", ctx, chain, workspace)
        probabilities, normalizers = function(ctx, chain, workspace)
        return probabilities, normalizers
    shape = (*chain.batch, chain.num_steps)
    xp, dtype = ctx.xp, ctx.result_dtype
    normalizers = xp.full(shape, -math.inf, dtype=dtype, device=ctx.device)
    normalizers = fill_past_ends(ctx, normalizers, chain.lengths, 0)
    return _of_nothing("marginals", ctx, chain), normalizers


def log_weight(ctx: Context, chain: Chain, workspace: int, states: Array) -> Array:
    """Return the log weights of paths [..., T]; those past a row's length are ignored."""
    shape = np.broadcast_shapes(shape_of(states)[:-1], chain.batch)
    if chain.num_states == 0 or 0 in shape:
        return ctx.xp.full(shape, -math.inf, dtype=ctx.result_dtype, device=ctx.device)
    function = _dispatch.for_chain("log_weight", ctx, chain, workspace)
    return function(ctx, chain, workspace, states)


def sample(ctx: Context, chain: Chain, workspace: int, out: Array, uniforms: Array) -> None:
    """Write paths into `out`, [num_samples, *batch, T], from numbers in [0, 1)."""
    if 0 in out.shape:
        return
    if chain.num_states == 0:
        out[...] = _of_nothing("viterbi", ctx, chain)
        return
    function = _dispatch.for_chain("sample", ctx, chain, workspace)
    function(ctx, chain, workspace, out, uniforms)


def _is_empty(chain: Chain) -> bool:
    """Tell whether there are no chains, or no paths because there are no states."""
    return chain.num_states == 0 or 0 in chain.batch


def _of_nothing(operation: str, ctx: Context, chain: Chain) -> Array:
    """Return the result for chains without states, or for no chain."""
    xp, dtype = ctx.xp, ctx.result_dtype
    if operation == "expected_transitions":
        return xp.zeros(shape_of(chain.transitions), dtype=dtype, device=ctx.device)
    value: Any = -math.inf if operation == "log_partition" else 0.0
    shape = chain.batch
    if operation == "viterbi":
        value, dtype, shape = 0, ctx.index_dtype, (*shape, chain.num_steps)
    elif operation not in ("log_partition", "entropy"):
        shape = (*shape, chain.num_steps, chain.num_states)
    out = xp.full(shape, value, dtype=dtype, device=ctx.device)
    return fill_past_ends(ctx, out, chain.lengths, -1) if operation == "viterbi" else out
