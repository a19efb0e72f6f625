"""References, computed on other roads than the library's and in higher precision.

The workhorse is NumPy's long double (64 bits of mantissa on x86), where each sum is shifted by its
own maximum. mpmath checks the workhorse, and adds up all paths of small chains one by one.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import mpmath
import numpy as np


def wide(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.longdouble)


def logsumexp(terms: np.ndarray, axis: int) -> np.ndarray:
    """Return the log of the sum of exponentials, by the rules of scipy.special.logsumexp."""
    with np.errstate(all="ignore"):
        top = np.max(terms, axis=axis, keepdims=True, initial=-np.inf)
        shift = np.where(np.isfinite(top), top, 0)
        total = np.log(np.sum(np.exp(terms - shift), axis=axis, keepdims=True)) + shift
    return np.squeeze(total, axis=axis)


def logmatmulexp(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return log(exp(a) @ exp(b)), one row of `a` at a time so that the cube stays small."""
    left, right, finish = _as_matrices(a, b)
    with np.errstate(invalid="ignore"):
        rows = [logsumexp(left[..., i, :, None] + right, axis=-2) for i in range(left.shape[-2])]
    batch = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    empty = np.empty((*batch, 0, right.shape[-1]), np.longdouble)
    return finish(np.stack(rows, axis=-2) if rows else empty)


def matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return wide(a) @ wide(b)


def maxplus(a: np.ndarray, b: np.ndarray, dtype: str) -> np.ndarray:
    """Return max_k a[i, k] + b[k, j], the sums rounded to `dtype`."""
    left, right, finish = _as_matrices(a, b)
    with np.errstate(invalid="ignore", over="ignore"):
        terms = (left[..., :, :, None] + right[..., None, :, :]).astype(dtype)
    return finish(np.max(terms, axis=-2, initial=-np.inf))


def logchainexp(matrices: list[np.ndarray]) -> np.ndarray:
    """Return the log-space product of a list of matrices, from left to right."""
    product = wide(matrices[0])
    for matrix in matrices[1:]:
        product = logmatmulexp(product, matrix)
    return product


class Chain(NamedTuple):
    """Log weights of a chain, and their G: see error_model.chain_bound."""

    log_partition: np.ndarray
    partition_gap: np.ndarray
    messages: np.ndarray
    message_gaps: np.ndarray


def chain(
    x: np.ndarray,
    log_transitions: np.ndarray | None = None,
    log_initial: np.ndarray | None = None,
    *,
    edges_in_logs: bool = False,
    initial_in_logs: bool = False,
    log_form_beyond: float = np.inf,
) -> Chain:
    """Return the forward messages of a chain and the log of their last sum.

    The recursion works on logs relative to the largest of each step; the sum of what was taken off
    is carried in two numbers. Weights that the library was given as logs have their part in G, as
    potentials have; those that it was given in linear space are used as they are. From the step at
    which a state lies more than `log_form_beyond` below the largest of its row, that row's logs are
    rounded at every step, and so how far a state lies below the largest has its part in G.
    """
    x = wide(x)
    K = x.shape[-1]
    initial = np.zeros(K, np.longdouble) if log_initial is None else wide(log_initial)
    steps = x.shape[-2] - 1
    edges = np.zeros((1, K, K), np.longdouble) if log_transitions is None else wide(log_transitions)
    batch = np.broadcast_shapes(x.shape[:-2], edges.shape[:-3], initial.shape[:-1])
    edge_gaps = _below_largest(edges, axis=(-2, -1)) if edges_in_logs else np.zeros_like(edges)
    x_gaps = _below_largest(x, axis=-1)

    with np.errstate(invalid="ignore"):
        alpha = np.broadcast_to(initial + x[..., 0, :], (*batch, K))
    start_gaps = _below_largest(initial, axis=-1) if initial_in_logs else 0
    gap = np.broadcast_to(start_gaps + x_gaps[..., 0, :], (*batch, K))
    offset = rest = np.zeros((*batch, 1), np.longdouble)
    messages, gaps = [alpha], [gap]
    in_log_form = np.zeros((*batch, 1), bool)
    for i in range(steps):
        at = min(i, edges.shape[-3] - 1)
        with np.errstate(invalid="ignore"):
            terms = alpha[..., :, None] + edges[..., at, :, :]
            summed = logsumexp(terms, axis=-2)
            weights = np.exp(terms - summed[..., None, :])
            alpha = summed + x[..., i + 1, :]
        along = _finite(weights) * (gap[..., :, None] + edge_gaps[..., at, :, :])
        gap = np.sum(along, axis=-2) + x_gaps[..., i + 1, :]
        top = _finite(np.max(alpha, axis=-1, keepdims=True, initial=-np.inf))
        alpha = alpha - top
        depth = _finite(-alpha)
        in_log_form = in_log_form | np.any(depth > log_form_beyond, axis=-1, keepdims=True)
        gap = gap + np.where(in_log_form, depth, 0)
        offset, rest = _add_exactly(offset, top, rest)
        messages.append(offset + (rest + alpha))
        gaps.append(gap)

    summed = logsumexp(alpha, axis=-1)
    with np.errstate(invalid="ignore"):
        weights = _finite(np.exp(alpha - summed[..., None]))
    return Chain(
        offset[..., 0] + (rest[..., 0] + summed),
        np.sum(weights * gap, axis=-1),
        np.stack(messages, axis=-2),
        np.stack(gaps, axis=-2),
    )


def long_chain(x: np.ndarray, transitions: np.ndarray, initial: np.ndarray) -> np.longdouble:
    """Return log_partition of one long chain of moderate range, with linear transitions.

    Linear mantissas and a power of two, which long double can keep for many steps between two
    rescalings: much faster than logs. `transitions` is [T-1, K, K] or [1, K, K].
    """
    x, transitions = wide(x), wide(transitions)
    top = np.max(x, axis=-1, keepdims=True)
    emissions = np.exp(x - top)
    alpha = wide(initial) * emissions[0]
    exponent = 0
    for i in range(1, len(x)):
        alpha = (alpha @ transitions[min(i, len(transitions)) - 1]) * emissions[i]
        if i % 50 == 0:
            # In long double this spans 4900 decades; 50 moderate steps need a few hundred.
            shift = int(np.frexp(np.max(alpha))[1])
            alpha = np.ldexp(alpha, -shift)
            exponent += shift
    return np.log(np.sum(alpha)) + exponent * np.log(wide(2)) + np.sum(top)


def logmatmulexp_mp(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return log(exp(a) @ exp(b)) of two matrices with finite or -inf entries, by mpmath."""
    out = np.empty((a.shape[0], b.shape[1]), np.longdouble)
    with mpmath.workdps(60):
        for i, j in np.ndindex(out.shape):
            terms = [
                mpmath.exp(mpmath.mpf(float(p)) + mpmath.mpf(float(q)))
                for p, q in zip(a[i], b[:, j], strict=True)
                if np.isfinite(p) and np.isfinite(q)
            ]
            out[i, j] = _log(mpmath.fsum(terms))
    return out


def all_paths(x: np.ndarray, transitions: np.ndarray, initial: np.ndarray) -> np.longdouble:
    """Return log_partition of a tiny chain: the weights of its K**T paths, added up by mpmath."""
    T, K = x.shape
    with mpmath.workdps(60):
        emissions = [[mpmath.exp(mpmath.mpf(float(v))) for v in row] for row in x]
        edges = [[[mpmath.mpf(float(p)) for p in row] for row in m] for m in transitions]
        total = mpmath.mpf(0)
        for path in itertools.product(range(K), repeat=T):
            weight = mpmath.mpf(float(initial[path[0]])) * emissions[0][path[0]]
            for i, (k, j) in enumerate(itertools.pairwise(path)):
                weight *= edges[min(i, len(edges) - 1)][k][j] * emissions[i + 1][j]
            total += weight
        return _log(total)


def forum_formula(x: np.ndarray, transitions: np.ndarray, initial: np.ndarray) -> np.ndarray:
    """Return log_partition as the forum's code does, mistakes included.

    Neighbouring matrices are multiplied in pairs; an odd one out is paired with zeros, which in
    logs is the matrix of ones and not the identity; entries are clamped from below at 1e-10.
    """
    stack = x[..., :-1, :, None] + np.log(transitions)
    while stack.shape[-3] > 1:
        if stack.shape[-3] % 2:
            stack = np.concatenate([stack, np.zeros_like(stack[..., :1, :, :])], axis=-3)
        left, right = stack[..., 0::2, :, :], stack[..., 1::2, :, :]
        rows = left.max(axis=-1, keepdims=True)
        columns = right.max(axis=-2, keepdims=True)
        factors = (np.maximum(np.exp(m), 1e-10) for m in (left - rows, right - columns))
        stack = np.log(np.matmul(*factors)) + rows + columns
    ends = np.logaddexp.reduce(stack[..., 0, :, :] + x[..., -1, None, :], axis=-1)
    return np.logaddexp.reduce(np.log(initial) + ends, axis=-1)


def _as_matrices(a: np.ndarray, b: np.ndarray):
    """Return both as matrices, and what takes the added axes off the product again."""
    a, b = wide(a), wide(b)
    left = a[None, :] if a.ndim == 1 else a
    right = b[:, None] if b.ndim == 1 else b

    def finish(out: np.ndarray) -> np.ndarray:
        out = out[..., 0] if b.ndim == 1 else out
        return out if a.ndim > 1 else out[..., 0] if b.ndim == 1 else out[..., 0, :]

    return left, right, finish


def _finite(x: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(x), x, 0)


def _below_largest(x: np.ndarray, axis: int | tuple[int, ...]) -> np.ndarray:
    """Return how far each finite entry lies below the largest finite one."""
    finite = np.isfinite(x)
    top = np.max(np.where(finite, x, -np.inf), axis=axis, keepdims=True, initial=-np.inf)
    with np.errstate(invalid="ignore"):
        return np.where(finite, top - x, 0)


def _add_exactly(total: np.ndarray, x: np.ndarray, rest: np.ndarray):
    """Return total + x and rest plus what that sum rounded off (Knuth's two-sum)."""
    s = total + x
    v = s - total
    return s, rest + ((total - (s - v)) + (x - v))


def _log(total: mpmath.mpf) -> np.longdouble:
    if not total:
        return np.longdouble(-math.inf)
    return np.longdouble(mpmath.nstr(mpmath.log(total), 25))
