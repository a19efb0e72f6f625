"""Chains by CUDA kernels, where `Context.kernels` runs them: the counterpart of `solve`."""

from __future__ import annotations

from dataclasses import replace

from arraylogchain._arrays import Array, Context
from arraylogchain._chain.posterior.results import Pullback, arrays_of
from arraylogchain._chain.steps import Chain


def has_kernel(ctx: Context, chain: Chain) -> bool:
    """Tell whether there are kernels for a chain where its arrays are."""
    if ctx.kernels is None or chain.size == 0 or 0 in chain.batch:
        return False
    from arraylogchain._cuda import launch
    from arraylogchain._cuda.chains import geometry

    kernels, item = ctx.kernels, ctx.precision.itemsize
    sizes = kernels.multiprocessors, kernels.shared_memory
    try:
        geometry.choose(chain.size, *chain.sizes, item, *sizes)
    except ValueError:
        return False
    return len(chain.batch) <= launch.MAX_AXES


def log_partition(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the logs of the sums over all paths, [*batch]."""
    from arraylogchain._cuda.chains import recursion

    chain = _of_one_dtype(ctx, chain)
    return recursion.log_partition(ctx.kernels, chain, workspace, _lengths(ctx, chain))


def forward_messages(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the logs of the weights after every step, [*batch, count, K]."""
    return _messages(ctx, chain, workspace, backward=False)


def backward_messages(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the logs of the weights that follow each step, [*batch, count, K]."""
    return _messages(ctx, chain, workspace, backward=True)


def marginals(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the posterior probabilities of all states at all steps, [*batch, count, K]."""
    from arraylogchain._cuda.chains import gradients

    chain = _of_one_dtype(ctx, chain)
    return gradients.marginals(ctx.kernels, chain, workspace, _lengths(ctx, chain))


def expected_transitions(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return expected counts in the shape of the transitions."""
    from arraylogchain._cuda.chains import gradients

    chain = _of_one_dtype(ctx, chain)
    return gradients.expected_transitions(ctx.kernels, chain, workspace, _lengths(ctx, chain))


def log_partition_and_pullback(
    ctx: Context, chain: Chain, workspace: int, keep: bool
) -> tuple[Array, Pullback]:
    """Return the logs of the sums over all paths and their pullback; see `results`."""
    from arraylogchain._cuda.chains import gradients

    given, xp = arrays_of(chain), ctx.xp
    chain = _of_one_dtype(ctx, chain)
    out, kept = gradients.forward_pass(
        ctx.kernels, chain, workspace, _lengths(ctx, chain), keep=keep
    )

    def pullback(cotangent: Array, wanted: frozenset[str]) -> dict[str, Array]:
        cotangent = xp.astype(cotangent, ctx.result_dtype, copy=False)
        found = gradients.gradients(kept, cotangent, wanted)
        return {name: xp.astype(x, given[name].dtype, copy=False) for name, x in found.items()}

    return out, pullback


def _messages(ctx: Context, chain: Chain, workspace: int, backward: bool) -> Array:
    from arraylogchain._cuda.chains import recursion

    chain = _of_one_dtype(ctx, chain)
    lengths = _lengths(ctx, chain)
    return recursion.messages(ctx.kernels, chain, workspace, lengths, backward=backward)


def _of_one_dtype(ctx: Context, chain: Chain) -> Chain:
    """Return a chain whose arrays have the result's dtype, which is that of all of them."""

    def cast(x: Array | None) -> Array | None:
        return None if x is None else ctx.xp.astype(x, ctx.result_dtype, copy=False)

    return replace(
        chain,
        potentials=cast(chain.potentials),
        transitions=cast(chain.transitions),
        start=cast(chain.start),
    )


def _lengths(ctx: Context, chain: Chain) -> Array | None:
    """Return the lengths of all rows, in the kernels' order, on the device."""
    from arraylogchain._cuda.chains import recursion

    found = recursion.row_lengths(chain)
    return None if found is None else ctx.xp.asarray(found, device=ctx.device)
