"""References for gradients of products, in long double.

A gradient of a log of a sum is a sum of probabilities times cotangents. Here each probability is
exp(term - largest term) over its own sum, so none underflows against another, and offsets of many
thousands cancel before they are rounded. Every gradient has the terms of its bound.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tests import reference
from tests.reference import wide


class Gradient(NamedTuple):
    """Sums of cotangents g times derivatives p, over all terms of an entry of an input."""

    exact: np.ndarray  # sum of g * p
    mass: np.ndarray  # sum of abs(g) * p
    gap: np.ndarray  # sum of abs(g) * p * G, with G as in error_model
    scale: np.ndarray  # sum of abs(g) * the unit in which errors of p are absolute
    terms: int  # how many are summed


def logmatmulexp(a: np.ndarray, b: np.ndarray, g: np.ndarray) -> tuple[Gradient, Gradient]:
    """Return the gradients of sum(g * logmatmulexp(a, b)), one row of `a` at a time.

    G is how far a term's two entries lie below the maxima of their row and column, and how far the
    result does. A sum that is infinite, or NaN for the sake of infinities alone, has no gradient.
    """
    left, right, g = _as_matrices(a, b, g)
    batch, (M, K), N = g.shape[:-2], left.shape[-2:], right.shape[-1]
    broken = np.isnan(left).any(axis=-1)[..., None] | np.isnan(right).any(axis=-2)[..., None, :]
    broken = np.broadcast_to(broken, g.shape)
    below_rows = left - finite_max(left, axes=-1)
    below_columns = right - finite_max(right, axes=-2)
    parts = ("exact", "mass", "gap", "scale")
    da = {part: np.zeros((*batch, M, K), np.longdouble) for part in parts}
    db = {part: np.zeros((*batch, K, N), np.longdouble) for part in parts}
    for i in range(M):
        with np.errstate(invalid="ignore"):
            terms = below_rows[..., i, :, None] + below_columns
        terms = np.broadcast_to(terms, (*batch, K, N))
        p, log_sum = softmax(terms, axes=(-2,), broken=broken[..., i, None, :])
        weight = g[..., i, None, :]
        gap = 2 * (np.abs(finite(terms)) + np.abs(finite(log_sum)))
        for part, summand in _parts(p, gap, weight).items():
            da[part][..., i, :] = np.sum(summand, axis=-1)
            db[part] += summand
    return (
        _summed(da, np.shape(a), left.shape, N),
        _summed(db, np.shape(b), right.shape, M),
    )


def matmul(a: np.ndarray, b: np.ndarray, g: np.ndarray) -> tuple[Gradient, Gradient]:
    """Return the gradients of sum(g * (a @ b))."""
    left, right, g = _as_matrices(a, b, g)
    M, N = g.shape[-2:]
    left_turned, right_turned = np.swapaxes(left, -1, -2), np.swapaxes(right, -1, -2)
    da = {"exact": g @ right_turned, "mass": np.abs(g) @ np.abs(right_turned)}
    db = {"exact": left_turned @ g, "mass": np.abs(left_turned) @ np.abs(g)}
    for parts in (da, db):
        parts["gap"] = parts["scale"] = np.zeros_like(parts["mass"])
    return _summed(da, np.shape(a), left.shape, N), _summed(db, np.shape(b), right.shape, M)


def maxplus(
    a: np.ndarray, b: np.ndarray, indices: np.ndarray, g: np.ndarray
) -> tuple[Gradient, Gradient]:
    """Return the gradients of sum(g * values) of a max-plus product that took these indices."""
    left, right, g = _as_matrices(a, b, g)
    K, (M, N) = left.shape[-1], g.shape[-2:]
    is_index = indices.reshape(g.shape)[..., None, :] == np.arange(K)[:, None]  # [..., M, K, N]
    with np.errstate(invalid="ignore"):
        terms = left[..., :, :, None] + right[..., None, :, :]
    parts = _parts(is_index & np.isfinite(terms), np.zeros(()), g[..., None, :])
    da = {part: np.sum(x, axis=-1) for part, x in parts.items()}
    db = {part: np.sum(x, axis=-3) for part, x in parts.items()}
    return _summed(da, np.shape(a), left.shape, N), _summed(db, np.shape(b), right.shape, M)


def logchainexp(matrices: Sequence[np.ndarray], g: np.ndarray) -> list[Gradient]:
    """Return the gradients of sum(g * logchainexp(matrices)), by products of all to either side.

    G is left at 0: the bound takes that of the products from the entries' range.
    """
    logs = [wide(m) for m in matrices]
    before = list(
        itertools.accumulate(logs[:-1], reference.logmatmulexp, initial=_identity(logs[0], -2))
    )
    after = list(
        itertools.accumulate(
            reversed(logs[1:]),
            lambda x, y: reference.logmatmulexp(y, x),
            initial=_identity(logs[-1], -1),
        )
    )[::-1]
    batch = np.broadcast_shapes(*(m.shape[:-2] for m in logs))
    g = np.broadcast_to(wide(g), (*batch, logs[0].shape[-2], logs[-1].shape[-1]))
    gradients = []
    for left, matrix, right in zip(before, logs, after, strict=True):
        with np.errstate(invalid="ignore"):
            inner = matrix[..., :, :, None] + right[..., None, :, :]  # k, l, j
            terms = left[..., :, :, None, None] + inner[..., None, :, :, :]  # i, k, l, j
        terms = np.broadcast_to(terms, (*batch, *terms.shape[-4:]))
        p, _ = softmax(terms, axes=(-3, -2))
        parts = _parts(p, np.zeros(()), g[..., :, None, None, :])
        sums = {part: np.sum(x, axis=(-4, -1)) for part, x in parts.items()}
        gradients.append(_summed(sums, matrix.shape, matrix.shape, g.shape[-2] * g.shape[-1]))
    return gradients


def _as_matrices(a: np.ndarray, b: np.ndarray, g: np.ndarray):
    """Return the operands and the cotangent as matrices, the cotangent with all batch axes."""
    left, right, _ = reference.as_matrices(a, b)
    batch = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    return left, right, wide(g).reshape(*batch, left.shape[-2], right.shape[-1])


def softmax(
    terms: np.ndarray, axes: tuple[int, ...], broken: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return exp(terms) over their sum, and the log of the sum.

    0 where the sum is infinite, or NaN because of infinities; NaN where it is `broken`.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        top = np.max(terms, axis=axes, keepdims=True, initial=-np.inf)
        valid = np.isfinite(top)
        # A NaN term among others makes the largest NaN.
        exponentials = np.where(valid, np.exp(terms - np.where(valid, top, 0)), 0)
        total = np.sum(exponentials, axis=axes, keepdims=True)
        log_sum = np.where(valid, np.log(total), 0) + top
        p = np.where(valid, exponentials / np.where(valid, total, 1), 0)
    return (p if broken is None else np.where(broken, np.nan, p)), log_sum


def _parts(p: np.ndarray, gap: np.ndarray, g: np.ndarray) -> dict[str, np.ndarray]:
    p = np.broadcast_to(wide(p), np.broadcast_shapes(p.shape, g.shape))
    size = np.abs(g)
    return {
        "exact": g * p,
        "mass": size * p,
        "gap": size * p * gap,
        "scale": np.broadcast_to(size, p.shape),
    }


def _summed(
    parts: dict[str, np.ndarray],
    shape: tuple[int, ...],
    original_shape: tuple[int, ...],
    terms: int,
) -> Gradient:
    """Sum over the axes that were broadcast from `original_shape`, and give what is left
    `shape`."""
    sums = {name: sum_to(x, original_shape).reshape(shape) for name, x in parts.items()}
    broadcast = parts["exact"].size // max(sums["exact"].size, 1)
    return Gradient(**sums, terms=max(terms * broadcast, 1))


def sum_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    added = x.ndim - len(shape)
    ones = (i + added for i, n in enumerate(shape) if n == 1)
    return np.sum(x, axis=(*range(added), *ones), keepdims=True).reshape(shape)


def _identity(matrix: np.ndarray, axis: int) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.eye(matrix.shape[axis], dtype=np.longdouble))


def finite(x: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(x), x, 0)


def finite_max(x: np.ndarray, axes: int | tuple[int, ...]) -> np.ndarray:
    top = np.max(np.where(np.isfinite(x), x, -np.inf), axis=axes, keepdims=True, initial=-np.inf)
    return finite(top)
