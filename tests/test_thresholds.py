"""Weights of every size, past every constant that a proof rests on: sums just above and just below.

Two terms meet in each sum, or one alone: sizes go down to the least numbers in steps of 2^17 and
less, so that a constant which is 2^20 off takes for proved what has lost a term, or its digits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain import _select
from tests.chain_checks import check_chain
from tests.checks import check_logmatmulexp
from tests.conftest import import_or_skip
from tests.gradient_checks import check_vjp_logmatmulexp

# The least normal number of a dtype is 2^-least.
LEAST = {"float32": 126, "float64": 1022}
STEP = {"float32": 5, "float64": 17}


def exponents(dtype: str, highest: float) -> np.ndarray:
    """Return exponents, none whole, from 0 to `highest` times that of the least normal number."""
    n = np.arange(0, highest * LEAST[dtype], STEP[dtype])
    return n + np.random.default_rng(0).random(n.shape)


def as_powers(exponents: np.ndarray) -> np.ndarray:
    return -np.log(2) * exponents


def product_of_two_terms(dtype: str, copies: int) -> tuple[np.ndarray, np.ndarray]:
    """Return operands whose sums have a term of each size from either side; both maxima are 1."""
    logs = as_powers(exponents(dtype, 1.2))
    a = np.stack([0 * logs, *[logs] * copies], axis=1)
    return a, np.stack([logs, *[0 * logs] * copies])


def chain_of_terms(dtype: str, form: str, rows: int) -> dict[str, Any]:
    """Return rows with a state of weight 1 and one of each size, and a matrix of entries of each.

    States of the first kind are reached from both, from the small one by a weight of 1; those of
    the second kind from the small one alone. Both return to the first state.
    """
    sizes = as_powers(exponents(dtype, 1.0 if form == "linear" else 1.15))
    n = len(sizes)
    logs = np.full((2 + 2 * n, 2 + 2 * n), -np.inf)
    logs[0, :2] = logs[1, 2 : 2 + n] = logs[2:, 0] = 0
    logs[0, 2 : 2 + n] = logs[1, 2 + n :] = sizes
    x = np.zeros((rows, 3, 2 + 2 * n))
    term_weights = as_powers(exponents(dtype, 1.2))
    x[:, 0, 1] = term_weights[:: len(term_weights) // rows][:rows]
    x[:, 0, 2:] = -np.inf
    if form == "logs":
        return {"x": x, "log_transitions": logs}
    return {"x": x, "transitions": np.exp(logs)}


def falling(dtype: str, rows: int) -> dict[str, Any]:
    """Return rows whose second state falls behind, by as much at each step, and decides at last."""
    x = np.zeros((rows, 16, 2))
    x[:, :14, 1] = as_powers(np.linspace(1, LEAST[dtype] / 12, rows))[:, None]
    x[:, -1, 0] = -np.inf
    return {"x": x, "transitions": np.array([[1.0, 0.0], [0.0, 0.7]])}


def meeting(dtype: str) -> dict[str, Any]:
    """Return messages of both directions that are small where the other one is large.

    Their products sum up to every size, down to where they leave the numbers.
    """
    sizes = as_powers(exponents(dtype, 1.0))
    x = np.zeros((len(sizes), 7, 3))
    x[:, :3, 1], x[:, 4:, 0] = sizes[:, None] / 3, sizes[::-1, None] / 3
    x[:, :3, 2] = x[:, 4:, 2] = (sizes + sizes[::-1])[:, None] / 7
    return {"x": x, "transitions": np.eye(3)}


@pytest.fixture(params=[False, True], ids=["gradual", "flushed"])
def flushing(request) -> Iterator[bool]:
    """Processors may treat subnormal numbers as zero, as torch can."""
    if not request.param:
        yield False
        return
    torch = pytest.importorskip("torch")
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    yield True
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("copies", [1, 9])
def test_products(backend, dtype, flushing, copies):
    a, b = product_of_two_terms(dtype, copies)
    check_logmatmulexp(backend, dtype, a, b)


def test_gradients_of_products(backend, dtype):
    a, b = product_of_two_terms(dtype, 3)
    for size in (1, 1e-20):  # which quotients with tiny sums do not make infinite
        g = size * np.random.default_rng(0).normal(size=(len(a[::2]), b[:, 1::2].shape[1]))
        check_vjp_logmatmulexp(backend, dtype, a[::2], b[:, 1::2], g)
    # A quotient times a weight would leave the range of float32.
    check_vjp_logmatmulexp(backend, dtype, [[-33.0, 0]], [[33.0], [0]], np.full((1, 1), 1e30))


@pytest.mark.chains
@pytest.mark.parametrize("form", ["linear", "logs"])
@pytest.mark.parametrize("rows", [1, 20])
def test_terms_of_chains(backend, dtype, flushing, form, rows):
    only = ("log_partition", "messages", "filtered") if flushing else ()
    check_chain(backend, dtype, **chain_of_terms(dtype, form, rows), only=only)


@pytest.mark.chains
@pytest.mark.parametrize("rows", [1, 20])
def test_falling_behind(backend, dtype, flushing, rows):
    only = ("log_partition", "messages", "posterior") if flushing else ()
    for lowest in (1, 6):
        check_chain(backend, dtype, **falling(dtype, rows + lowest), only=only)


@pytest.mark.chains
def test_meeting(backend, dtype):
    check_chain(backend, dtype, **meeting(dtype))


def lost_by_flushing(low: float, high: float, factor: float) -> dict[str, Any]:
    """Return a state that lies 2^-low below the others, which grow to 2^high, and then gets factor.

    On the way it gets as much as is flushed, from all the others together, as array operations
    have their matrix: its entries are large numbers, and small ones beside them.
    """
    K, count = 500, math.ceil(high / 15.9)
    x = np.zeros((1, count + 1, K))
    x[:, :count, 1:] = np.log(2) * high / count
    x[:, count, 0] = np.log(2) * factor
    P = np.zeros((count, K, K))
    P[:] = 2.0**20 * np.eye(K)
    P[-1, 1:, 0], P[-1, 0, 0] = 2.0 ** (20 - 126.6), 2.0 ** (20 - factor)
    initial = np.where(np.arange(K) > 0, 1.0, 2.0**-low)
    return {"x": x, "transitions": P, "initial": initial}


CASES = [(79.9, 9.9, 15.9), (59.9, 29.8, 15.9), (59.9, 9.9, 35.9)]


@pytest.mark.chains
@pytest.mark.parametrize(("low", "high", "factor"), CASES)
def test_what_is_flushed_in_single_precision(np_backend, flushing, monkeypatch, low, high, factor):
    """Each exceeds one of the ranges of linear weights in array operations."""
    monkeypatch.setattr(_select, "COMPILED", False)
    arguments = lost_by_flushing(low, high, factor)
    check_chain(np_backend, "float32", **arguments, only=("log_partition", "messages"))


def test_only_paths_far_below_others_in_single_precision():
    """Each row and state has a path of its own, by another state's far above it at most steps."""
    x = np.random.default_rng(0).normal(0, 1e9, (64, 20, 64)).astype("float32")
    result = alc.LogChain(x, transitions=np.eye(64, dtype="float32")).posterior()
    np.testing.assert_allclose(result.marginals.sum(-1), 1, rtol=1e-5)
    np.testing.assert_allclose(result.expected_transitions.sum(dtype=float), 64 * 19, rtol=1e-6)


def test_sums_of_products_below_normal_numbers_are_certified_where_they_are_flushed(monkeypatch):
    """A sum may be tiny before its row is rescaled; processors can be told to flush to zero."""
    torch = import_or_skip("torch")
    monkeypatch.setattr(_select, "COMPILED", False)
    K = 2048
    initial, P = np.full(K, 2.0**-27, np.float32), np.full((K, K), 2.0**-100, np.float32)
    initial[0], P[0], P[0, 0] = 2.0**-60, 2.0**-40, 1.0
    x = np.zeros((2, K), np.float32)
    weights = initial.astype(float) @ P
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush to zero")
    try:
        found = alc.LogChain(x, transitions=P, initial=initial).filtered().probabilities[1]
    finally:
        torch.set_flush_denormal(False)
    np.testing.assert_allclose(found, weights / weights.sum(), rtol=1e-5)
