"""Chains by kernels: the recursion over time, and sums over pairs of neighbouring states."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

from arraylogchain._context import Array, Context
from arraylogchain._cuda.chains import segments
from arraylogchain._cuda.chains.backward_pass import (
    forward_pass,
    gradients,
    posterior_of,
    state_marginals,
    transition_counts,
)
from arraylogchain._cuda.chains.entropy import entropies
from arraylogchain._cuda.chains.filtering import normalised
from arraylogchain._cuda.chains.geometry import choose
from arraylogchain._cuda.chains.paths import best_paths, draw_paths, weights_of_paths
from arraylogchain._cuda.chains.recursion import ChainRun
from arraylogchain._cuda.launch import are_packable
from arraylogchain._inputs.chain import PARTS, Chain

Pullback = Callable[[Array, Collection[str]], dict[str, Array]]


def has_kernels(operation: str, ctx: Context, chain: Chain) -> bool:
    """Tell whether there are kernels for an operation on a chain where its arrays are."""
    if (
        ctx.kernels is None
        or chain.num_states == 0
        or 0 in chain.batch
        or not are_packable(chain.batch)
    ):
        return False
    limits = (ctx.kernels.multiprocessors, ctx.kernels.shared_memory)
    item = (ctx.widest if operation == "entropy" else ctx.precision).itemsize
    return choose(chain.num_states, *chain.sizes, item, *limits) is not None


def log_partition(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the logs of the sums over all paths, [*batch]."""
    item = ctx.precision.itemsize
    count, _ = segments.count_and_seconds(ctx.kernels, chain, item, workspace)
    count = max(count, chain.segments)
    if count > 1:
        return segments.log_partition(ctx, _in_result_dtype(ctx, chain), count, workspace)
    return _run(ctx, chain, workspace).log_partition()


def forward_messages(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the logs of the weights after every step, [*batch, T, K]."""
    return _run(ctx, chain, workspace).messages(backward=False)


def backward_messages(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the logs of the weights that follow each step, [*batch, T, K]."""
    return _run(ctx, chain, workspace).messages(backward=True)


def filtered(ctx: Context, chain: Chain, workspace: int) -> tuple[Array, Array]:
    """Return state probabilities given the steps so far, and the logs of what normalises them."""
    return normalised(_run(ctx, chain, workspace))


def marginals(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the posterior probabilities of all states at all steps, [*batch, T, K]."""
    return state_marginals(_run(ctx, chain, workspace))


def expected_transitions(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return expected counts in the shape of the transitions."""
    return ctx.to_result(transition_counts(_run(ctx, chain, workspace)))


def posterior(ctx: Context, chain: Chain, workspace: int) -> tuple[Array, Array, Array | None]:
    """Return log Z [*batch], marginals [*batch, T, K], and expected counts or None."""
    total, marginals, counts = posterior_of(_run(ctx, chain, workspace))
    return total, marginals, None if counts is None else ctx.to_result(counts)


def viterbi(ctx: Context, chain: Chain, workspace: int) -> tuple[Array, Array]:
    """Return a path of largest weight, [*batch, T], and the log of its weight, [*batch]."""
    run = _run(ctx, chain, workspace, for_best=True)
    states = best_paths(run)
    return states, weights_of_paths(run.device, run.chain, states)


def sample(ctx: Context, chain: Chain, workspace: int, out: Array, uniforms: Array) -> None:
    """Write paths into `out`, [num_samples, *batch, T]; see the array implementation."""
    from arraylogchain._cuda import self_check

    is_trusted = partial(self_check.is_trusted, ctx, "sample")
    draw_paths(_run(ctx, chain, workspace), out, uniforms, is_trusted)


def log_weight(ctx: Context, chain: Chain, workspace: int, states: Array) -> Array:
    """Return the log weights of paths, states [..., T] whose axes broadcast with the batch."""
    return weights_of_paths(ctx.kernels, _in_result_dtype(ctx, chain), states)


def entropy(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the entropies [*batch] in nats; 0 where there is no path."""
    return ctx.to_result(entropies(_run(ctx, chain, workspace, compute=ctx.widest.name)))


def value_and_pullback(
    ctx: Context, chain: Chain, workspace: int, keep: bool
) -> tuple[Array, Pullback]:
    """Return the logs of the sums over all paths, [*batch], and their pullback.

    It takes cotangents and the names of the arrays whose gradients are wanted, of 'potentials',
    'transitions', 'initial' and 'final', and returns these by name. With `keep`, all states are
    kept for it though they take more than the workspace.
    """
    value, kept = forward_pass(_run(ctx, chain, workspace), keep=keep)

    def pullback(cotangent: Array, wanted: Collection[str]) -> dict[str, Array]:
        ctx.uses(*kept.arrays)
        found = gradients(kept, ctx.to_result(cotangent), wanted)
        return {
            name: ctx.xp.astype(x, getattr(chain, name).dtype, copy=False)
            for name, x in found.items()
        }

    return value, pullback


def _run(ctx: Context, chain: Chain, workspace: int, **options: Any) -> ChainRun:
    """Return the launches of a chain."""
    return ChainRun(ctx.kernels, _in_result_dtype(ctx, chain), workspace, **options)


def _in_result_dtype(ctx: Context, chain: Chain) -> Chain:
    """Return a chain all arrays of which have the dtype of the result."""
    given = {name: getattr(chain, name) for name in PARTS}
    arrays = {name: ctx.to_result(x) for name, x in given.items() if x is not None}
    return replace(chain, **arrays)
