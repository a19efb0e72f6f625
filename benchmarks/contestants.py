"""The formulations that are measured, each written the way that a user would write it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

import arraylogchain as alc

Array = NDArray[Any]
# Terms in memory at a time where a formulation works in blocks.
BLOCK = 1 << 19


# --- this library ---------------------------------------------------------------------------------


def maxplus_values(a: Array, b: Array) -> Array:
    return alc.maxplus_matmul(a, b).values


def chain(x: Any, transitions: Any, initial: Any) -> Any:
    return alc.LogChain(x, transitions=transitions, initial=initial).log_partition()


def elementwise(function: Callable[..., Array]) -> Callable[..., Array]:
    """Make a contestant of a pass over large arrays, as the library makes them: see `Context`."""

    def call(*given: Array) -> Array:
        from arraylogchain._arrays import enter

        *operands, out = given
        ctx, _ = enter({"out": out})

        def work(box: Any) -> None:
            ctx.apply(function, *(x[box] for x in operands), out=out[box])

        ctx.in_blocks(work, out.shape, ctx.block)
        return out

    return call


def numpy_elementwise(name: str) -> Callable[..., Array]:
    def call(*given: Array) -> Array:
        *operands, out = given
        result: Array = getattr(np, name)(*operands, out=out)
        return result

    return call


# --- products in NumPy ----------------------------------------------------------------------------


def exp_matmul_log(a: Array, b: Array) -> Array:
    """Subtract row and column maxima, exponentiate, multiply: fast, wrong on wide ranges."""
    a_max = a.max(axis=-1, keepdims=True)
    b_max = b.max(axis=-2, keepdims=True)
    return np.log(np.exp(a - a_max) @ np.exp(b - b_max)) + a_max + b_max


def numpy_logsumexp(a: Array, b: Array) -> Array:
    """Every entry with its own maximum, in blocks."""

    def reduce(terms: Array) -> Array:
        top = terms.max(axis=-1)
        shift = np.where(np.isfinite(top), top, 0)
        terms -= shift[..., None]
        np.exp(terms, out=terms)
        return np.log(terms.sum(axis=-1)) + shift

    return _in_blocks(a, b, reduce)


def blocked_scipy_logsumexp(a: Array, b: Array) -> Array:
    from scipy.special import logsumexp

    return _in_blocks(a, b, lambda terms: logsumexp(terms, axis=-1))


def numpy_maxplus(a: Array, b: Array) -> Array:
    """Maxima and their places, in blocks; the maxima are returned."""

    def reduce(terms: Array) -> Array:
        best = terms.argmax(axis=-1)[..., None]
        return np.take_along_axis(terms, best, axis=-1)[..., 0]

    return _in_blocks(a, b, reduce)


def _in_blocks(a: Array, b: Array, reduce: Callable[[Array], Array]) -> Array:
    out = np.empty((*a.shape[:-1], b.shape[-1]), dtype=a.dtype)
    b_rows = np.ascontiguousarray(np.swapaxes(b, -1, -2))
    for batch in np.ndindex(a.shape[:-2]):
        for rows, cols in _blocks(a.shape[-2], b.shape[-1], a.shape[-1]):
            terms = a[batch][rows, None, :] + b_rows[batch][None, cols, :]
            out[batch][rows, cols] = reduce(terms)
    return out


def _blocks(rows: int, cols: int, inner: int) -> Iterator[tuple[slice, slice]]:
    entries = max(1, BLOCK // inner)
    wide = min(cols, entries)
    high = max(1, entries // wide)
    for i in range(0, rows, high):
        for j in range(0, cols, wide):
            yield slice(i, i + high), slice(j, j + wide)


def einsum(subscripts: str, *, optimize: bool = False) -> Callable[[Array, Array], Array]:
    return lambda a, b: np.einsum(subscripts, a, b, optimize=optimize)


# --- chains in NumPy ------------------------------------------------------------------------------


def bare_products(x: Array, bulk: Array) -> Array:
    """The matrix products of the forum's chain and nothing else, on a state that stays the same."""
    state = np.exp(x[:, 0, 0])
    out = np.empty_like(state)
    for i in range(bulk.shape[-3]):
        np.matmul(state, bulk[0, 0, i], out=out)
    return out


def numpy_recursion(x: Array, transitions: Array, initial: Array) -> Array:
    """A vector of logarithms per row, one step after the other; x [..., T, K]."""
    log_alpha = np.log(initial) + x[..., 0, :]
    for i in range(1, x.shape[-2]):
        top = log_alpha.max(axis=-1, keepdims=True)
        alpha = np.exp(log_alpha - top) @ transitions[min(i, len(transitions)) - 1]
        log_alpha = np.log(alpha) + top + x[..., i, :]
    top = log_alpha.max(axis=-1)
    return np.log(np.exp(log_alpha - top[..., None]).sum(axis=-1)) + top


def numpy_recursion_of_sets(x: Array, bulk: Array, p0: Array) -> Array:
    """The same on the forum's shapes, set of parameters by set."""
    sets = [numpy_recursion(x[:, t], bulk[0, t], p0[0, t]) for t in range(x.shape[1])]
    return np.stack(sets, axis=1)


def fold_matrices(matrices: Array) -> Array:
    """Multiply one matrix after the other."""
    product = matrices[0]
    for matrix in matrices[1:]:
        product = exp_matmul_log(product, matrix)
    return product


def pair_matrices(matrices: Array) -> Array:
    """Multiply neighbours, all pairs at once, until one matrix is left."""
    while len(matrices) > 1:
        pairs = len(matrices) // 2
        products = exp_matmul_log(matrices[0 : 2 * pairs : 2], matrices[1 : 2 * pairs : 2])
        matrices = np.concatenate([products, matrices[2 * pairs :]])
    return matrices[0]


# --- torch ----------------------------------------------------------------------------------------


def to_torch(x: Array) -> Any:
    import torch

    return torch.from_numpy(x)


def torch_matmul(a: Any, b: Any) -> Any:
    return a @ b


def torch_einsum(subscripts: str) -> Callable[[Any, Any], Any]:
    def call(a: Any, b: Any) -> Any:
        import torch

        return torch.einsum(subscripts, a, b)

    return call


def torch_elementwise(name: str) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        import torch

        *operands, out = given
        return getattr(torch, name)(*operands, out=out)

    return call


def torch_recursion(x: Any, bulk: Any, p0: Any) -> Any:
    """A vector of logarithms per row, on the forum's shapes."""
    import torch

    log_alpha = p0.log() + x[..., 0, :]
    for i in range(1, x.shape[-2]):
        top = log_alpha.detach().amax(-1, keepdim=True)
        alpha = (log_alpha - top).exp().transpose(0, 1) @ bulk[0, :, i - 1]
        log_alpha = alpha.transpose(0, 1).log() + top + x[..., i, :]
    return torch.logsumexp(log_alpha, -1)


def torch_pairs(x: Any, bulk: Any, p0: Any) -> Any:
    """The forum's formulation: expanded matrices, multiplied in pairs, filled up with zeros."""
    import torch

    stack = x[..., :-1, :, None] + bulk.log()
    while stack.shape[-3] > 1:
        if stack.shape[-3] % 2:
            stack = torch.cat([stack, torch.zeros_like(stack[..., :1, :, :])], -3)
        left, right = stack[..., 0::2, :, :], stack[..., 1::2, :, :]
        left_max, right_max = left.amax(-1, keepdim=True), right.amax(-2, keepdim=True)
        product = (left - left_max).exp().clamp(1e-10) @ (right - right_max).exp().clamp(1e-10)
        stack = left_max + right_max + product.log()
    tail = torch.logsumexp(stack.squeeze(-3) + x[..., -1, None, :], -1)
    return torch.logsumexp(p0.log() + tail, -1)


def semiring_product(a: Any, b: Any) -> Any:
    from torch_semiring_einsum import log_einsum

    return log_einsum(_equation(a.ndim), a, b)


def semiring_maxplus(a: Any, b: Any) -> Any:
    from torch_semiring_einsum import log_viterbi_einsum_forward

    return log_viterbi_einsum_forward(_equation(a.ndim), a, b)[0]


@lru_cache
def _equation(ndim: int) -> Any:
    from torch_semiring_einsum import compile_equation

    return compile_equation("ik,kj->ij" if ndim == 2 else "bik,bkj->bij")


# --- hmmlearn, which has one matrix and one row, in float64 ---------------------------------------


def to_float64(x: Array) -> Array:
    return x.astype(np.float64)


def row_by_row(function: Callable[..., Array]) -> Callable[..., Array]:
    """Make a function of one row take many."""

    def call(x: Array, *parameters: Array) -> Array:
        if x.ndim == 2:
            return function(x, *parameters)
        return np.stack([function(row, *parameters) for row in x])

    return call


@row_by_row
def hmmlearn_log(x: Array, transitions: Array, initial: Array) -> Array:
    from hmmlearn import _hmmc

    return np.asarray(_hmmc.forward_log(initial, transitions[0], x)[0])


@row_by_row
def hmmlearn_scaling(x: Array, transitions: Array, initial: Array) -> Array:
    """Its scaled recursion, which takes weights: each step's largest is made 1."""
    from hmmlearn import _hmmc

    top = x.max(axis=-1, keepdims=True)
    value = _hmmc.forward_scaling(initial, transitions[0], np.exp(x - top))[0]
    return np.asarray(value + math.fsum(top[:, 0]))
