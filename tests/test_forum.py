"""The case that started the project, and the formula that it replaces."""

import numpy as np
import pytest

import arraylogchain as alc
from tests import reference
from tests.chain_reference import Exact


def model(T, n=1, K=3):
    """Return a small model of the forum's kind: x - 2 normal, P and p0 uniform."""
    rng = np.random.default_rng(T)
    return rng.normal(size=(n, T, K)) - 2, rng.random((T - 1, K, K)), rng.random(K)


def solve(x, transitions, initial):
    return alc.LogChain(x, transitions=transitions, initial=initial).log_partition()


def exact_log_z(x, transitions, initial):
    given = {"log_potentials": x, "transitions": transitions, "initial": initial}
    return float(Exact(given).log_partition[0][0])


@pytest.mark.parametrize("T", range(2, 10))
def test_formula_is_right_for_powers_of_two(T):
    """Its padding is wrong for other counts of matrices."""
    given = model(T)
    exact = exact_log_z(*given)
    np.testing.assert_allclose(solve(*given), exact, rtol=1e-14)
    error = abs(reference.forum_formula(*given)[0] - exact)
    assert error < 1e-7 * abs(exact) if (T - 1).bit_count() == 1 else error > 0.1


def test_clamp_bends_small_entries():
    """Even for a power of two: paths below 1e-10 of the best count too much in the formula."""
    x, transitions, initial = model(3)
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
