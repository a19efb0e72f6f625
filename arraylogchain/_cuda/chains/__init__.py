"""Chains by kernels: the recursion over time, and sums over pairs of neighbouring states."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from arraylogchain._context import Array, Context
from arraylogchain._cuda.chains.backward_pass import (
    forward_pass,
    gradients,
    posterior_of,
    state_marginals,
    transition_counts,
)
from arraylogchain._cuda.chains.geometry import choose
from arraylogchain._cuda.chains.paths import best_paths
from arraylogchain._cuda.chains.recursion import ChainRun
from arraylogchain._cuda.launch import are_packable
from arraylogchain._inputs.chain import PARTS, Chain

Pullback = Callable[[Array, Collection[str]], dict[str, Array]]


def has_kernels(ctx: Context, chain: Chain) -> bool:
    """Tell whether there are kernels for a chain where its arrays are."""
    # No kernel weighs the last states yet.
    if ctx.kernels is None or chain.final is not None:
        return False
    if chain.num_states == 0 or 0 in chain.batch or not are_packable(chain.batch):
        return False
    limits = (ctx.kernels.multiprocessors, ctx.kernels.shared_memory)
    return choose(chain.num_states, *chain.sizes, ctx.precision.itemsize, *limits) is not None


def log_partition(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the logs of the sums over all paths, [*batch]."""
    return _run(ctx, chain, workspace).log_partition()


def forward_messages(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the logs of the weights after every step, [*batch, T, K]."""
    return _run(ctx, chain, workspace).messages(backward=False)


def backward_messages(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the logs of the weights that follow each step, [*batch, T, K]."""
    return _run(ctx, chain, workspace).messages(backward=True)


def marginals(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the posterior probabilities of all states at all steps, [*batch, T, K]."""
    return state_marginals(_run(ctx, chain, workspace))


def expected_transitions(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return expected counts in the shape of the transitions."""
    return transition_counts(_run(ctx, chain, workspace))


def posterior(ctx: Context, chain: Chain, workspace: int) -> tuple[Array, Array, Array | None]:
    """Return log Z [*batch], marginals [*batch, T, K], and expected counts or None."""
    return posterior_of(_run(ctx, chain, workspace))


def viterbi(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return a path of largest weight, [*batch, T]; see the array implementation."""
    return best_paths(_run(ctx, chain, workspace, for_best=True))


def value_and_pullback(
    ctx: Context, chain: Chain, workspace: int, keep: bool
) -> tuple[Array, Pullback]:
    """Return the logs of the sums over all paths, [*batch], and their pullback.

    It takes cotangents and the names of the arrays whose gradients are wanted, of 'potentials',
    'transitions' and 'initial', and returns these by name. With `keep`, all states are kept for it
    though they take more than the workspace.
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


def _run(ctx: Context, chain: Chain, workspace: int, for_best: bool = False) -> ChainRun:
    """Return the launches of a chain, all arrays of which get the dtype of the result."""
    given = {name: getattr(chain, name) for name in PARTS}
    arrays = {name: ctx.to_result(x) for name, x in given.items() if x is not None}
    return ChainRun(ctx.kernels, replace(chain, **arrays), workspace, for_best=for_best)
