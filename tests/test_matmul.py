"""matmul: the values and shapes of numpy.matmul."""

import numpy as np
import pytest

import arraylogchain as alc
from tests.checks import check_matmul


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [
        ((5, 7), (7, 3)),
        ((7,), (7, 3)),
        ((5, 7), (7,)),
        ((7,), (7,)),
        ((2, 5, 7), (7,)),
        ((7,), (2, 7, 3)),
        ((40, 8, 1, 16), (8, 16, 16)),
        ((1, 100), (20, 100, 1)),
        ((4, 1, 3, 6), (5, 6, 2)),
        ((0, 7), (7, 3)),
        ((5, 7), (7, 0)),
        ((5, 0), (0, 3)),
        ((0, 5, 7), (7, 3)),
        ((2, 1, 5, 7), (0, 7, 3)),
        ((0,), (0,)),
    ],
)
def test_agrees_with_numpy(backend, dtype, a_shape, b_shape):
    a, b = normal(*a_shape), normal(*b_shape, seed=1)
    out = check_matmul(backend, dtype, a, b)
    assert out.shape == np.matmul(a, b).shape


def test_long_sums(np_backend, dtype):
    check_matmul(np_backend, dtype, normal(4, 20_000), normal(20_000, 5, seed=1))


def test_wide_range(np_backend, dtype):
    rng = np.random.default_rng(2)
    a = rng.normal(size=(9, 11)) * 10.0 ** rng.integers(-15, 15, (9, 11))
    check_matmul(np_backend, dtype, a, a.T)


def test_infinities_and_nan_follow_ieee(backend, dtype):
    a = np.eye(3)
    b = np.array([[np.inf, 1.0, 2.0], [3.0, np.nan, 4.0], [5.0, 6.0, -np.inf]])
    ours = [backend.asarray(x, dtype) for x in (a, b)]
    out = backend.read(alc.matmul(*ours), dtype)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(out, a @ b)


@pytest.mark.parametrize("workspace", [1 << 20, 1 << 22])
def test_workspace_changes_no_answer(np_backend, dtype, workspace):
    a, b = normal(6, 1, 40, 500), normal(3, 500, 70, seed=1)
    check_matmul(np_backend, dtype, a, b, workspace=workspace)
