"""The problem that started the project, the formulation that ran out of memory, and a reference.

A model computes ``p0 · D_0 · P_1 · D_1 · … · P_{v-1} · x_{v-1}`` in log space for each of n rows:
``x`` [n, t, v, c] holds log weights, D_i is the diagonal matrix of exp(x_i), ``bulk``
[1, t, v-1, c, c] holds the matrices P_i, and ``p0`` [1, t, c] the initial weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from arraylogchain.plan import pairwise_bytes

Floats = NDArray[np.floating[Any]]

# The sizes n, t, v, c at which the forum's user ran out of memory.
FULL_SIZE = (500, 1, 40, 200)
# Exponentials below this one were replaced by it, to keep the logarithm finite.
_CLAMP = 1e-10


@dataclass(frozen=True, slots=True)
class Problem:
    """Inputs of the forum's model, under the names that they have there."""

    x: Floats  # [n, t, v, c]
    bulk: Floats  # [1, t, v-1, c, c]
    p0: Floats  # [1, t, c]

    def astype(self, dtype: DTypeLike) -> Problem:
        """Return the same problem in another precision."""
        return Problem(self.x.astype(dtype), self.bulk.astype(dtype), self.p0.astype(dtype))


def random_problem(size: tuple[int, int, int, int], seed: int) -> Problem:
    """Draw a problem of size n, t, v, c in float32, from the distributions that the forum used."""
    n, t, v, c = size
    rng = np.random.default_rng(seed)
    return Problem(
        x=rng.standard_normal((n, t, v, c), dtype=np.float32) - np.float32(2),
        bulk=rng.random((1, t, v - 1, c, c), dtype=np.float32),
        p0=rng.random((1, t, c), dtype=np.float32),
    )


def multiply_in_pairs(problem: Problem) -> Floats:
    """Solve a problem by pairwise reduction: multiply neighbouring matrices until one is left.

    Kept with what is wrong in it, to be measured: every matrix is expanded to [n, t, c, c], small
    exponentials are clamped, and an odd number of matrices is filled up with a matrix of zeros,
    which in log space is all ones and not the identity.

    Returns
    -------
    array [n, t]
        What should be log Z.
    """
    with np.errstate(divide="ignore"):
        log_bulk, log_p0 = np.log(problem.bulk), np.log(problem.p0)
    stack = problem.x[..., :-1, :, None] + log_bulk
    del log_bulk
    while stack.shape[-3] > 1:
        stack = _multiply_neighbours(stack)
    tail = _logsumexp(stack[..., 0, :, :] + problem.x[..., -1, None, :])
    return _logsumexp(log_p0 + tail)


def _multiply_neighbours(stack: Floats) -> Floats:
    if stack.shape[-3] % 2:
        filling = np.zeros_like(stack[..., :1, :, :])
        stack = np.concatenate([stack, filling], axis=-3)
    left, right = stack[..., 0::2, :, :], stack[..., 1::2, :, :]
    left_max = left.max(axis=-1, keepdims=True)
    right_max = right.max(axis=-2, keepdims=True)
    # Out of place throughout, as the forum's code is: `count_temporaries` counts these arrays.
    left = np.exp(left - left_max)
    left = np.maximum(left, _CLAMP)
    right = np.exp(right - right_max)
    right = np.maximum(right, _CLAMP)
    product: Floats = left @ right
    shift: Floats = left_max + right_max
    product = np.log(product)
    return shift + product


def _logsumexp(terms: Floats) -> Floats:
    shift = terms.max(axis=-1, keepdims=True)
    total: Floats = np.log(np.sum(np.exp(terms - shift), axis=-1)) + shift[..., 0]
    return total


def count_temporaries(size: tuple[int, int, int, int]) -> int:
    """Return the bytes that `multiply_in_pairs` holds in float32 at its worst moment."""
    n, t, v, c = size
    return pairwise_bytes(n * t, v, c, itemsize=4)


def recursion_in_float64(problem: Problem) -> Floats:
    """Solve a problem in float64 with a vector per row, by plain NumPy, to compare with."""
    exact = problem.astype(np.float64)
    x = exact.x
    with np.errstate(divide="ignore"):
        log_alpha = np.log(exact.p0) + x[..., 0, :]
        for i in range(1, x.shape[-2]):
            shift = log_alpha.max(axis=-1, keepdims=True)
            # [t, n, c] @ [t, c, c]: rows that share their matrices make one product.
            alpha = np.moveaxis(np.exp(log_alpha - shift), 0, 1)
            alpha = np.moveaxis(alpha @ exact.bulk[0, :, i - 1], 1, 0)
            log_alpha = np.log(alpha) + shift + x[..., i, :]
    return _logsumexp(log_alpha)
