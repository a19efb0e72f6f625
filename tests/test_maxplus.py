"""maxplus_matmul: exact values, and the smallest of the indices that reach them."""

import numpy as np
import pytest

import arraylogchain as alc
from tests.checks import check_maxplus


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def test_result_is_a_named_pair(backend, dtype):
    a, b = backend.asarray([[0.0, 3.0]], dtype), backend.asarray([[5.0], [1.0]], dtype)
    product = alc.maxplus_matmul(a, b)
    values, indices = product
    assert isinstance(product, alc.MaxPlusProduct)
    assert values is product.values
    assert indices is product.indices
    assert backend.read(values, dtype).tolist() == [[5.0]]
    assert backend.to_numpy(indices).tolist() == [[0]]


@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [
        ((5, 7), (7, 3)),
        ((7,), (7, 3)),
        ((5, 7), (7,)),
        ((7,), (7,)),
        ((4, 1, 3, 6), (5, 6, 2)),
        ((2, 1, 5, 7), (0, 7, 3)),
        ((0, 7), (7, 3)),
        ((30, 40), (40, 33)),
    ],
)
def test_shapes(backend, dtype, a_shape, b_shape):
    values, indices = check_maxplus(backend, dtype, normal(*a_shape), normal(*b_shape, seed=1))
    assert values.shape == indices.shape


def test_without_terms(backend, dtype):
    values, indices = check_maxplus(backend, dtype, np.zeros((2, 0)), np.zeros((0, 3)))
    assert np.all(values == -np.inf)
    assert np.all(indices == -1)
    assert values.shape == indices.shape == (2, 3)


@pytest.mark.parametrize("workspace", [None, 1 << 20])
def test_ties_go_to_the_smallest_index(backend, dtype, workspace):
    """Small integers tie often; their sums are exact in every dtype."""
    rng = np.random.default_rng(1)
    a, b = rng.integers(0, 3, (20, 600)).astype(float), rng.integers(0, 3, (600, 30)).astype(float)
    a[:, :300] = -5.0
    _, indices = check_maxplus(backend, dtype, a, b, workspace=workspace)
    terms = a[:, :, None] + b[None]
    np.testing.assert_array_equal(indices, np.argmax(terms, axis=1))
    assert indices.min() >= 300


def test_minus_infinity_everywhere_is_a_tie(backend, dtype):
    a, b = np.full((2, 4), -np.inf), np.zeros((4, 3))
    values, indices = check_maxplus(backend, dtype, a, b)
    assert np.all(values == -np.inf)
    assert np.all(indices == 0)


def test_infinities_and_nan(backend, dtype):
    """+inf with -inf is NaN, and NaN wins, as in numpy.max."""
    values = [-np.inf, -1.0, 0.0, np.inf, np.nan]
    a = np.stack(np.meshgrid(values, values, indexing="ij"), axis=-1).reshape(-1, 2)
    check_maxplus(backend, dtype, a, a.T)


def test_large_entries(backend, dtype):
    rng = np.random.default_rng(1)
    a = rng.normal(size=(8, 9)) * 1e30
    check_maxplus(backend, dtype, a, a.T)


def test_half_precisions(backend, half):
    check_maxplus(backend, half, 10 * normal(6, 9), 10 * normal(9, 5, seed=1))


@pytest.mark.parametrize("workspace", [1 << 20, 1 << 22])
def test_workspace_changes_no_answer(np_backend, dtype, workspace):
    a, b = normal(5, 60, 400), normal(400, 70, seed=1)
    check_maxplus(np_backend, dtype, a, b, workspace=workspace)
