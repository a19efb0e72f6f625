"""References, computed in other ways than the library's and in higher precision.

The workhorse is NumPy's long double (64 bits of mantissa on x86), where each sum is shifted by its
own maximum. mpmath checks the workhorse, and sums all paths of small chains one by one.
"""

from __future__ import annotations

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
    left, right, finish = as_matrices(a, b)
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
    left, right, finish = as_matrices(a, b)
    with np.errstate(invalid="ignore", over="ignore"):
        terms = (left[..., :, :, None] + right[..., None, :, :]).astype(dtype)
    return finish(np.max(terms, axis=-2, initial=-np.inf))


def logchainexp(matrices: list[np.ndarray]) -> np.ndarray:
    """Return the log-space product of a list of matrices, from left to right."""
    product = wide(matrices[0])
    for matrix in matrices[1:]:
        product = logmatmulexp(product, matrix)
    return product


def long_chain(x: np.ndarray, transitions: np.ndarray, initial: np.ndarray) -> np.longdouble:
    """Return log_partition of one long chain of moderate range, with linear transitions.

    Linear mantissas and a power of two, which long double can keep for many steps between two
    rescalings: much faster than logs. `transitions` is [T-1, K, K] or [1, K, K].
    """
    x, transitions = wide(x), wide(transitions)
    top = np.max(x, axis=-1, keepdims=True)
    emissions = np.exp(x - top)
    alpha, exponent = wide(initial) * emissions[0], 0
    for i in range(1, len(x)):
        alpha = (alpha @ transitions[min(i, len(transitions)) - 1]) * emissions[i]
        if i % 50 == 0:
            # In long double this spans 4900 decades; 50 moderate steps need a few hundred.
            shift = int(np.frexp(np.max(alpha))[1])
            alpha = np.ldexp(alpha, -shift)
            exponent += shift
    return np.log(np.sum(alpha)) + exponent * np.log(wide(2)) + np.sum(top)


def as_matrices(a: np.ndarray, b: np.ndarray):
    """Return both as matrices, and a function that removes the added axes from the product."""
    a, b = wide(a), wide(b)
    left = a[None, :] if a.ndim == 1 else a
    right = b[:, None] if b.ndim == 1 else b

    def finish(out: np.ndarray) -> np.ndarray:
        out = out[..., 0] if b.ndim == 1 else out
        return out if a.ndim > 1 else out[..., 0] if b.ndim == 1 else out[..., 0, :]

    return left, right, finish
