"""logmatmulexp: right to rounding on every range of its entries."""

import mpmath
import numpy as np
import pytest

import arraylogchain as alc
from tests import error_model, reference
from tests.checks import check_logmatmulexp
from tests.error_model import assert_within


def normal(*shape, sd=1.0, seed=0):
    return np.random.default_rng(seed).normal(0, sd, shape)


@pytest.mark.parametrize("low", [-10, -60, -80, -110, -400, -800, -1e4, -1e30])
def test_crossed_maxima(backend, dtype, low):
    """Where row and column maxima do not meet, a shifted product underflows to 0."""
    out = check_logmatmulexp(backend, dtype, [[0.0, low]], [[low], [0.0]])
    with mpmath.workdps(50):
        exact = float(mpmath.mpf(float(np.dtype(dtype).type(low))) + mpmath.log(2))
    assert out[0, 0] == pytest.approx(exact, rel=4 * error_model.EPS[dtype])


def test_crossed_maxima_among_others(backend, dtype):
    """Flagged entries beside proved ones, in every position of a tile's edge."""
    a, b = normal(33, 17), normal(17, 29, seed=1)
    far = -110.0 if dtype == "float32" else -800.0
    a[::4, 1:] += far
    b[:-1, ::3] += far
    check_logmatmulexp(backend, dtype, a, b)


@pytest.mark.parametrize("sd", [1, 10, 20, 30, 100, 1000, 1e6])
def test_normal_entries(backend, dtype, sd):
    check_logmatmulexp(backend, dtype, normal(37, 50, sd=sd), normal(50, 41, sd=sd, seed=1))


@pytest.mark.parametrize("sd", [1, 20, 1000])
def test_long_sums(np_backend, dtype, sd):
    check_logmatmulexp(np_backend, dtype, normal(3, 5000, sd=sd), normal(5000, 4, sd=sd, seed=1))


def test_agrees_with_mpmath(np_backend, dtype):
    a, b = normal(6, 8, sd=40).astype(dtype), normal(8, 6, sd=40, seed=1).astype(dtype)
    exact = reference.logmatmulexp_mp(a, b)
    assert_within(alc.logmatmulexp(a, b), exact, error_model.product_bound(a, b, exact, dtype))


@pytest.mark.parametrize("centre", [1e4, -1e4, 1e30, -1e30])
@pytest.mark.parametrize("sign", [1, -1])
def test_large_entries(backend, dtype, centre, sign):
    """Operands far from 0, on the same side or on opposite sides: their sums may cancel."""
    a, b = normal(9, 12, sd=30), normal(12, 7, sd=30, seed=1)
    check_logmatmulexp(backend, dtype, a + centre, b + sign * centre)


def test_very_different_magnitudes(backend, dtype):
    rng = np.random.default_rng(3)
    a = rng.normal(size=(20, 16)) * 10.0 ** rng.integers(-30, 30, (20, 16))
    b = rng.normal(size=(16, 18)) * 10.0 ** rng.integers(-30, 30, (16, 18))
    check_logmatmulexp(backend, dtype, a, b)


def test_largest_finite_entries(backend, dtype):
    """Sums of two of the largest numbers overflow to infinity, as the sums themselves do."""
    top = float(np.finfo(dtype).max)
    out = check_logmatmulexp(backend, dtype, [[top, -top]], [[-top], [top]])
    assert abs(out[0, 0] - np.log(2)) < 1e-6
    ours = [backend.asarray(x, dtype) for x in ([[top]], [[top]])]
    assert backend.to_numpy(alc.logmatmulexp(*ours))[0, 0] == np.inf
    ours = [backend.asarray(x, dtype) for x in ([[-top]], [[-top]])]
    assert backend.to_numpy(alc.logmatmulexp(*ours))[0, 0] == -np.inf


def test_single_terms_are_sums_of_two_numbers(backend, dtype):
    a, b = normal(5, 1, sd=100), normal(1, 6, sd=100, seed=1)
    check_logmatmulexp(backend, dtype, a, b)


def test_result_near_zero(backend, dtype):
    """Normalised rows: results near log 1, where only the absolute part of the bound counts."""
    a, b = normal(8, 30), normal(30, 8, seed=1)
    a -= np.logaddexp.reduce(a, axis=1, keepdims=True)
    b -= np.logaddexp.reduce(b, axis=1, keepdims=True)
    out = check_logmatmulexp(backend, dtype, a, b)
    assert abs(np.logaddexp.reduce(out.astype(float), axis=1)).max() < 50 * error_model.EPS[dtype]


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 7, 1), (129, 3, 1), (1, 3, 131), (64, 64, 65)])
def test_shapes(backend, dtype, shape):
    rows, inner, columns = shape
    a, b = normal(rows, inner, sd=5), normal(inner, columns, sd=5, seed=1)
    check_logmatmulexp(backend, dtype, a, b)


@pytest.mark.exhaustive
@pytest.mark.parametrize("workspace", [1 << 20, 1 << 22, 1 << 24])
@pytest.mark.parametrize("sd", [1, 25, 1000])
def test_workspace_changes_no_answer(np_backend, dtype, workspace, sd):
    """Small tiles, cut in rows, columns and terms, give what one large tile gives."""
    a, b = normal(3, 70, 300, sd=sd), normal(300, 90, sd=sd, seed=1)
    a[0, :, ::3] = -np.inf
    check_logmatmulexp(np_backend, dtype, a, b, workspace=workspace)
