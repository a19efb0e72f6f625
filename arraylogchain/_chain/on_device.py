"""Chains by CUDA kernels, where `Context.kernels` runs them: the counterpart of `solve`.

What launches kernels is imported when it is needed: most who use the library have no such device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from arraylogchain._chain.posterior.results import Pullback, arrays_of
from arraylogchain._chain.steps import Chain
from arraylogchain._context import Array, Context

if TYPE_CHECKING:
    from arraylogchain._cuda.chains.recursion import ChainRun


def has_kernel(ctx: Context, chain: Chain) -> bool:
    """Tell whether there are kernels for a chain where its arrays are."""
    if ctx.kernels is None or chain.size == 0 or 0 in chain.batch:
        return False
    from arraylogchain._cuda.chains import geometry
    from arraylogchain._cuda.launch import are_packable

    limits = (ctx.kernels.multiprocessors, ctx.kernels.shared_memory)
    fits = geometry.choose(chain.size, *chain.sizes, ctx.precision.itemsize, *limits) is not None
    return fits and are_packable(chain.batch)


def log_partition(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the logs of the sums over all paths, [*batch]."""
    from arraylogchain._cuda.chains import recursion

    return recursion.log_partition(_run(ctx, chain, workspace))


def forward_messages(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the logs of the weights after every step, [*batch, count, K]."""
    from arraylogchain._cuda.chains import recursion

    return recursion.messages(_run(ctx, chain, workspace), backward=False)


def backward_messages(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the logs of the weights that follow each step, [*batch, count, K]."""
    from arraylogchain._cuda.chains import recursion

    return recursion.messages(_run(ctx, chain, workspace), backward=True)


def marginals(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the posterior probabilities of all states at all steps, [*batch, count, K]."""
    from arraylogchain._cuda.chains import gradients

    return gradients.marginals(_run(ctx, chain, workspace))


def expected_transitions(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return expected counts in the shape of the transitions."""
    from arraylogchain._cuda.chains import gradients

    return gradients.expected_transitions(_run(ctx, chain, workspace))


def log_partition_and_pullback(
    ctx: Context, chain: Chain, workspace: int, keep: bool
) -> tuple[Array, Pullback]:
    """Return the logs of the sums over all paths and their pullback; see `results`."""
    from arraylogchain._cuda.chains import gradients

    given, xp = arrays_of(chain), ctx.xp
    out, kept = gradients.forward_pass(_run(ctx, chain, workspace), keep=keep)

    def pullback(cotangent: Array, wanted: frozenset[str]) -> dict[str, Array]:
        ctx.uses(*kept.arrays)
        found = gradients.gradients(kept, ctx.to_result(cotangent), wanted)
        return {name: xp.astype(x, given[name].dtype, copy=False) for name, x in found.items()}

    return out, pullback


def _run(ctx: Context, chain: Chain, workspace: int) -> ChainRun:
    """Return the launches of a chain, all arrays of which get the dtype of the result."""
    from arraylogchain._cuda.chains.recursion import ChainRun

    arrays: dict[str, Any] = {
        name: None if x is None else ctx.to_result(x) for name, x in arrays_of(chain).items()
    }
    return ChainRun(ctx.kernels, replace(chain, **arrays), workspace)
