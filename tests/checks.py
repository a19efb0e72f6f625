"""Checks that many tests share: calls of the library against the reference and its bounds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import arraylogchain as alc
from tests import error_model, reference
from tests.conftest import Backend
from tests.error_model import assert_within


class Inputs:
    """Arrays handed to the library, the values that they hold, and a check that they still do."""

    def __init__(self, backend: Backend, dtype: str, *arrays: Any) -> None:
        self.backend = backend
        self.arrays = [None if x is None else backend.asarray(x, dtype) for x in arrays]
        self.held = [None if x is None else backend.to_numpy(x).copy() for x in self.arrays]

    def assert_unchanged(self) -> None:
        for array, held in zip(self.arrays, self.held, strict=True):
            if array is not None:
                np.testing.assert_array_equal(self.backend.to_numpy(array), held)


# The reference of a product, and the bound of its entries.
EXACT = {
    "logmatmulexp": (reference.logmatmulexp, error_model.product_bound),
    "matmul": (reference.matmul, error_model.linear_bound),
}


def check_product(name: str, backend: Backend, dtype: str, a: Any, b: Any, **options: Any) -> Any:
    """Compare a product with the reference, in value, kind of array and inputs left alone."""
    inputs = Inputs(backend, dtype, a, b)
    out = backend.read(getattr(alc, name)(*inputs.arrays, **options), dtype)
    compute, bound_of = EXACT[name]
    exact = compute(*inputs.held)
    bound = backend.roundings * bound_of(*inputs.held, exact, dtype)
    assert_within(out, exact, bound, error_model.label(name, backend.name, dtype))
    inputs.assert_unchanged()
    return out


check_logmatmulexp, check_matmul = (partial(check_product, name) for name in EXACT)


def check_maxplus(
    backend: Backend, dtype: str, a: Any, b: Any, *, workspace: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Compare maxplus_matmul: exact values, and the smallest indices of the largest terms."""
    inputs = Inputs(backend, dtype, a, b)
    product = alc.maxplus_matmul(*inputs.arrays, workspace=workspace)
    values = backend.read(product.values, dtype)
    indices = backend.read(product.indices, "int64")
    computed = error_model.compute_dtype(dtype)
    exact = reference.maxplus(*inputs.held, computed)
    label = error_model.label("maxplus_matmul", backend.name, dtype)
    assert_within(values, exact, error_model.half_ulp(exact, dtype), label)
    if inputs.held[0].shape[-1]:
        largest = largest_terms(*inputs.held, computed)
        np.testing.assert_array_equal(indices, largest, label)
    else:
        assert np.all(indices == -1)
    inputs.assert_unchanged()
    return values, indices


def run_python(code: str, **environment: str) -> str:
    """Return the output of code in a new process, which may fork and must succeed."""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
        cwd=Path(__file__).parents[1],
    )
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout.strip()


def mentions(*words: object) -> str:
    """Return a pattern that finds all the words, in any order, none as a part of a longer one."""
    return "(?s)" + "".join(rf"(?=.*(?<!\w){re.escape(str(w))}(?!\w))" for w in words)


def largest_terms(a: np.ndarray, b: np.ndarray, dtype: str) -> np.ndarray:
    """Return the first k of the largest a[..., i, k] + b[..., k, j], or of NaN."""
    left = (a[None, :] if a.ndim == 1 else a).astype(dtype)
    right = (b[:, None] if b.ndim == 1 else b).astype(dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        terms = left[..., :, :, None] + right[..., None, :, :]
    lacking = (-2,) * (a.ndim == 1) + (-1,) * (b.ndim == 1)
    return np.squeeze(np.argmax(terms, axis=-2), axis=lacking)
