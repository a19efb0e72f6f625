"""Checks that many tests share: calls of the library against the reference and its bounds."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

import arraylogchain as alc
from tests import error_model, reference
from tests.conftest import Backend
from tests.error_model import assert_within

# Shapes of potentials, transitions and initial weights: batch axes that broadcast in every way,
# and one matrix for each step or one for all.
CHAIN_SHAPES = [
    ((6, 4), (5, 4, 4), None),
    ((6, 4), (1, 4, 4), (4,)),
    ((3, 6, 4), (5, 4, 4), (4,)),
    ((3, 6, 4), (1, 4, 4), (3, 4)),
    ((3, 6, 4), (3, 5, 4, 4), (4,)),
    ((3, 6, 4), (3, 1, 4, 4), (3, 4)),
    ((3, 6, 4), (1, 5, 4, 4), (1, 4)),
    ((1, 6, 4), (3, 5, 4, 4), (4,)),
    ((2, 1, 6, 4), (3, 5, 4, 4), (4,)),
    ((2, 3, 6, 4), (3, 1, 4, 4), (2, 1, 4)),
    ((6, 4), (3, 5, 4, 4), (2, 1, 4)),
    ((6, 4), (5, 4, 4), (7, 4)),
    ((2, 3, 6, 4), (2, 1, 5, 4, 4), (3, 4)),
    ((2, 1, 4), (1, 4, 4), (4,)),
    ((2, 1, 4), (0, 4, 4), (4,)),
    ((2, 2, 4), (1, 4, 4), (4,)),
    ((6, 1), (5, 1, 1), (1,)),
    ((0, 6, 4), (5, 4, 4), (4,)),
    ((3, 6, 0), (5, 0, 0), (0,)),
]


class Given:
    """Arrays handed to the library, the values that they hold, and a check that they still do."""

    def __init__(self, backend: Backend, dtype: str, *arrays: Any) -> None:
        self.backend = backend
        self.arrays = [None if x is None else backend.asarray(x, dtype) for x in arrays]
        self.held = [None if x is None else backend.to_numpy(x).copy() for x in self.arrays]

    def assert_unchanged(self) -> None:
        for array, held in zip(self.arrays, self.held, strict=True):
            if array is not None:
                np.testing.assert_array_equal(self.backend.to_numpy(array), held)


def check_logmatmulexp(
    backend: Backend, dtype: str, a: Any, b: Any, *, workspace: int | None = None
) -> np.ndarray:
    """Compare logmatmulexp with the reference, in value, kind of array and inputs left alone."""
    given = Given(backend, dtype, a, b)
    out = backend.read(alc.logmatmulexp(*given.arrays, workspace=workspace), dtype)
    exact = reference.logmatmulexp(*given.held)
    assert_within(out, exact, error_model.product_bound(*given.held, exact, dtype))
    given.assert_unchanged()
    return out


def check_matmul(
    backend: Backend, dtype: str, a: Any, b: Any, *, workspace: int | None = None
) -> np.ndarray:
    given = Given(backend, dtype, a, b)
    out = backend.read(alc.matmul(*given.arrays, workspace=workspace), dtype)
    exact = reference.matmul(*given.held)
    assert_within(out, exact, error_model.linear_bound(*given.held, exact, dtype))
    given.assert_unchanged()
    return out


def check_maxplus(
    backend: Backend, dtype: str, a: Any, b: Any, *, workspace: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Compare maxplus_matmul: exact values, and indices whose terms are those values."""
    given = Given(backend, dtype, a, b)
    product = alc.maxplus_matmul(*given.arrays, workspace=workspace)
    values = backend.read(product.values, dtype)
    indices = backend.read(product.indices, "int64")
    computed = error_model.compute_dtype(dtype)
    exact = reference.maxplus(*given.held, computed)
    assert_within(values, exact, error_model.half_ulp(exact, dtype))
    if given.held[0].shape[-1]:
        found = _terms_at(*given.held, indices, computed)
        np.testing.assert_array_equal(found, exact)
    else:
        assert np.all(indices == -1)
    given.assert_unchanged()
    return values, indices


def check_chain(
    backend: Backend,
    dtype: str,
    x: Any,
    *,
    transitions: Any = None,
    log_transitions: Any = None,
    initial: Any = None,
    log_initial: Any = None,
    workspace: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Compare log_partition and forward_messages of a chain, entry by entry."""
    given = Given(backend, dtype, x, transitions, log_transitions, initial, log_initial)
    chain = make_chain(given.arrays, workspace)
    partition = backend.read(chain.log_partition(), dtype)
    messages = backend.read(chain.forward_messages(), dtype)

    x, linear, logs, p0, log_p0 = given.held
    with np.errstate(divide="ignore"):
        exact = reference.chain(
            x,
            logs if linear is None else np.log(reference.wide(linear)),
            log_p0 if p0 is None else np.log(reference.wide(p0)),
            edges_in_logs=logs is not None,
            initial_in_logs=log_p0 is not None,
            log_form_beyond=error_model.certificate(dtype),
        )
    T, K = x.shape[-2:]
    bound = error_model.chain_bound(exact.log_partition, exact.partition_gap, T, K, dtype)
    assert_within(partition, exact.log_partition, bound)
    steps = np.arange(1, T + 1)[:, None]
    bound = error_model.chain_bound(exact.messages, exact.message_gaps, steps, K, dtype)
    assert_within(messages, exact.messages, bound)
    given.assert_unchanged()
    return partition, messages


def make_chain(arrays: list[Any], workspace: int | None = None) -> alc.LogChain:
    """Return a LogChain of (x, transitions, log_transitions, initial, log_initial)."""
    names = ("transitions", "log_transitions", "initial", "log_initial")
    options = {n: v for n, v in zip(names, arrays[1:], strict=True) if v is not None}
    return alc.LogChain(arrays[0], **options, workspace=workspace)


def mentions(*words: object) -> str:
    """Return a pattern that finds all the words, in any order, none as a part of a longer one."""
    return "(?s)" + "".join(rf"(?=.*(?<!\w){re.escape(str(w))}(?!\w))" for w in words)


def _terms_at(a: np.ndarray, b: np.ndarray, indices: np.ndarray, dtype: str) -> np.ndarray:
    """Return a[..., i, k] + b[..., k, j] at k = indices[..., i, j]."""
    left = a[None, :] if a.ndim == 1 else a
    right = b[:, None] if b.ndim == 1 else b
    rows, columns = left.shape[-2], right.shape[-1]
    batch = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    k = indices.astype(np.int64).reshape(*batch, rows, columns)
    assert k.size == 0 or (k.min() >= 0 and k.max() < a.shape[-1])
    left = np.broadcast_to(left, (*batch, *left.shape[-2:]))
    right = np.broadcast_to(right, (*batch, *right.shape[-2:]))
    with np.errstate(invalid="ignore", over="ignore"):
        terms = np.take_along_axis(left, k, axis=-1).astype(dtype) + np.take_along_axis(
            right, k, axis=-2
        ).astype(dtype)
    return terms.reshape(indices.shape)
