"""Examples by which CUDA kernels are checked: operations on small products and chains.

The arrays are hard: wide ranges, zeros, terms that are not certified; several groups, or rows of
two lengths. Their entries are integers, so that maxima of sums are exact and often equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from arraylogchain._chains import entropy, marginals, messages, paths
from arraylogchain._core.axes import Fold, fold
from arraylogchain._core.context import Array, Context, shape_of
from arraylogchain._cuda.self_check import EXAMPLES, Example
from arraylogchain._inputs.chain import PARTS, Chain
from arraylogchain._products import certified, cuda, gradients, maxplus
from arraylogchain._products.operand import PullbackInputs

_WORKSPACE = 2**24
_STEPS = 5
# Not 0: devices differ in whether a subnormal weight counts as positive.
_UNIFORMS = np.array([1e-9, 0.6])[:, None, None, None]


def _entries(ctx: Context, seed: int, sd: float, *shape: int) -> np.ndarray:
    """Return integers, some of them in wide ranges, and -inf, the log of a weight of 0."""
    depth = 120.0 if ctx.precision.name == "float32" else 800.0
    x = np.rint(np.random.default_rng(seed).normal(0, sd, shape))
    x[..., 3::7, :] *= 4
    x[..., ::5, 1::2] -= depth
    x[..., -1] -= depth
    # As a matrix [from, to]: state 1 is reached from the last one alone; rows 2, 11, ... are small.
    x[..., :-1, 1] -= depth
    x[..., 2::9, :-1] -= depth
    x[..., 4::9, 2:] = -np.inf
    return x


def _product_example(operation: Any, ctx: Context, _: Sequence[str]) -> Example:
    """Return operands whose sizes are no multiples of a tile's.

    Rows of a and columns of b are largest at different terms.
    """
    b = np.roll(_entries(ctx, 1, 15.0, 66, 37), 1, axis=1).T
    arrays = {"a": _entries(ctx, 0, 15.0, 140, 37), "b": np.ascontiguousarray(b)}
    return partial(_run_product, operation), arrays


def _run_product(function: Callable[..., Any], ctx: Context, a: Array, b: Array) -> Any:
    return function(ctx, fold(shape_of(a), shape_of(b)), a, b, _WORKSPACE)


def _large_product(ctx: Context, layout: Fold, a: Array, b: Array, workspace: int) -> Array:
    """Return the log product by the route for large ones: cuBLAS, then `log_epilogue`."""
    if ctx.kernels is None:
        return certified.logmatmulexp(ctx, layout, a, b, workspace)
    return cuda.log_product(ctx, layout, a, b, by_blas=True)


def _product_gradients(ctx: Context, layout: Fold, a: Array, b: Array, workspace: int) -> Any:
    """Return both gradients of a log product, which kernels compute for several panels of rows."""
    out = certified.logmatmulexp(ctx, layout, a, b, workspace)
    g = ctx.to_result(ctx.xp.where(a[:, :1] > b[:1, :], 0.5, -0.25))
    budget = 26_000 * ctx.precision.itemsize
    return gradients.logmatmulexp_gradients(ctx, layout, PullbackInputs(a, b, out, g), budget)


def _chain_example(operation: Any, ctx: Context, variant: Sequence[str]) -> Example:
    """Return an operation, and a chain for which `geometry_of` selects a variant of `chain_steps`.

    The variant's template arguments follow from the chain's shapes, on any device.
    """
    is_recursion = len(variant) == 4
    sums, in_warp, block_rows, on_chip = variant if is_recursion else ("true", "true", "1", "false")
    states, rows = (13, 5) if in_warp == "true" else (37, 3)
    groups, matrices = (1, 1) if on_chip == "true" else (2, _STEPS - 1)
    if block_rows == "4":
        rows = 2 * ctx.kernels.multiprocessors + 5
    index = np.arange(rows) % 5
    arrays = {
        "potentials": _entries(ctx, 0, 1.0, groups, 5, _STEPS, states)[:, index],
        "transitions": _entries(ctx, 1, 1.0, groups, 1, matrices, states, states),
        "initial": _entries(ctx, 2, 1.0, groups, 5, states)[:, index],
        "final": _entries(ctx, 3, 1.0, 2, states)[1],
    }
    # At the first step, messages of both directions are largest at different states.
    arrays["transitions"][..., ::2, :] -= 100
    if on_chip == "true":
        arrays["lengths"] = np.where(index == 1, 3, _STEPS)[None]
    return partial(_run_chain, operation if sums == "true" else _best_paths), arrays


def _run_chain(
    function: Callable[..., Any], ctx: Context, lengths: np.ndarray | None = None, **parts: Array
) -> Any:
    chain = Chain(shape_of(parts["initial"])[:-1], parts, logs=tuple(parts), lengths=lengths)
    return function(ctx, chain, _WORKSPACE)


def _messages(*arguments: Any) -> tuple[Array, ...]:
    operations = messages.forward_messages, messages.backward_messages, messages.log_partition
    return tuple(operation(*arguments) for operation in operations)


def _best_paths(ctx: Context, *arguments: Any) -> tuple[Array, ...]:
    last = paths.best_message(ctx, *arguments)
    return *paths.viterbi(ctx, *arguments), last - ctx.xp.max(last, axis=-1, keepdims=True)


def _gradients(ctx: Context, chain: Chain, workspace: int) -> tuple[Array, ...]:
    _, pullback = marginals.value_and_pullback(ctx, chain, workspace, True)
    cotangent = ctx.xp.where(chain.parts["initial"][..., 0] > 0, 0.5, -0.25)
    result = pullback(cotangent, frozenset(PARTS))
    return tuple(result[name] for name in PARTS)


def _sample(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Draw by numbers near 0, which choose the first state with weight, and by larger ones."""
    numbers = np.broadcast_to(_UNIFORMS, (2, *chain.batch, _STEPS))
    states = ctx.empty(numbers.shape, ctx.index_dtype)
    uniforms = ctx.xp.asarray(numbers.copy(), device=ctx.device)
    paths.sample(ctx, chain, workspace, states, uniforms)
    return states


# The kernels that an operation checks; `_best_paths` checks those that take part in best paths.
for _example, _operation, _kernels in (
    (_product_example, certified.logmatmulexp, "prepare_factors logmatmulexp"),
    (_product_example, _large_product, "log_epilogue"),
    (_product_example, _product_gradients, "gradient_weights finish_gradients"),
    (_product_example, maxplus.maxplus_matmul, "maxplus_matmul"),
    (_chain_example, _messages, "prepare_matrices chain_steps log_partition"),
    (_chain_example, _gradients, "marginals pair_marginals boundary_gradients"),
    (_chain_example, messages.filtered, "filtered"),
    (_chain_example, entropy.entropy, "entropies"),
    (_chain_example, _sample, "sample_paths"),
    (_chain_example, _best_paths, "chain_trace best_last_states"),
):
    EXAMPLES.update(dict.fromkeys(_kernels.split(), partial(_example, _operation)))
