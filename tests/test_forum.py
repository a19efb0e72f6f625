"""The case that started the project, and the formula that it replaces."""

import numpy as np
import pytest

import arraylogchain as alc
from tests import reference
from tests.chain_reference import Exact


def model(T, n=4, K=3):
    """Return a small model of the forum's kind: x - 2 normal, P and p0 uniform."""
    rng = np.random.default_rng(T)
    return rng.normal(size=(n, T, K)) - 2, rng.random((T - 1, K, K)), rng.random(K)


def solve(x, transitions, initial):
    return alc.LogChain(x, transitions=transitions, initial=initial).log_partition()


def exact_log_z(x, transitions, initial):
    given = {"log_potentials": x, "transitions": transitions, "initial": initial}
    return float(Exact(given).log_partition[0][0])


@pytest.mark.parametrize("T", [2, 3, 5, 9, 17])
def test_formula_is_right_for_powers_of_two(T):
    given = model(T)
    np.testing.assert_allclose(solve(*given), reference.forum_formula(*given), rtol=1e-7)


@pytest.mark.parametrize("T", [4, 6, 7, 8])
def test_formula_is_wrong_for_other_counts(T):
    """Its padding is at fault."""
    x, transitions, initial = model(T, n=1)
    exact = exact_log_z(x, transitions, initial)
    assert solve(x, transitions, initial)[0] == pytest.approx(exact, rel=1e-14)
    assert abs(reference.forum_formula(x, transitions, initial)[0] - exact) > 0.1


@pytest.mark.parametrize("T", [2, 3, 5])
def test_the_reference_agrees_where_the_formula_is_right(T):
    x, transitions, initial = model(T, n=1)
    exact = exact_log_z(x, transitions, initial)
    assert reference.forum_formula(x, transitions, initial)[0] == pytest.approx(exact, rel=1e-7)
    assert solve(x, transitions, initial)[0] == pytest.approx(exact, rel=1e-14)


def test_clamp_bends_small_entries():
    """Even for a power of two: paths below 1e-10 of the best count too much in the formula."""
    x, transitions, initial = model(3, n=1)
    # Only state 1 may be visited in the middle, and it is unlikely.
    transitions[0, :, 1] = 1e-14
    x[0, 1, [0, 2]] = -300.0
    exact = exact_log_z(x, transitions, initial)
    assert solve(x, transitions, initial)[0] == pytest.approx(exact, rel=1e-13)
    assert abs(reference.forum_formula(x, transitions, initial)[0] - exact) > 0.1


def test_forum_axes():
    """The forum's own shapes, [n, t, v, c] with [1, t, v-1, c, c] and [1, t, c]."""
    n, t, v, c = 6, 2, 7, 5
    rng = np.random.default_rng(0)
    x, bulk, p0 = (
        rng.normal(size=(n, t, v, c)),
        rng.random((1, t, v - 1, c, c)),
        rng.random((1, t, c)),
    )
    out = solve(x, bulk, p0)
    assert out.shape == (n, t)
    for i, j in np.ndindex(n, t):
        assert out[i, j] == pytest.approx(solve(x[i, j], bulk[0, j], p0[0, j]), rel=1e-13)


def test_full_width_single_precision():
    """The forum's chain at its own K and T: errors stay near 1e-6, as in float64."""
    x, transitions, initial = (z.astype(np.float32) for z in model(40, n=20, K=200))
    single = solve(x, transitions, initial)
    double = solve(*(z.astype(np.float64) for z in (x, transitions, initial)))
    np.testing.assert_allclose(single, double, rtol=2e-6)
