"""The references of products' gradients agree with mpmath, and bounds notice what is lost."""

import numpy as np
import pytest

from tests import error_model, gradient_reference, reference
from tests.chain_reference import Exact
from tests.chain_scenarios import normal, uniform
from tests.error_model import assert_within

INF = np.inf


def assert_close(gradient, exact, factor=100.0):
    assert_within(gradient.exact, exact, factor * error_model.REFERENCE_EPS * (1 + np.abs(exact)))


@pytest.mark.parametrize("sd", [1, 30, 1000])
def test_products_agree_with_chains(sd):
    """Which agree with mpmath: an entry is a chain of one step, its last weights a column."""
    a, b, g = normal(3, 4, sd=sd), normal(4, 2, sd=sd, seed=1), normal(3, 2, seed=2)
    a[1, 2] = b[0, 1] = -INF
    product, (da, db) = reference.logmatmulexp(a, b), gradient_reference.logmatmulexp(a, b, g)
    expected = np.zeros(a.shape, np.longdouble), np.zeros(b.shape, np.longdouble)
    for i, j in np.ndindex(g.shape):
        chain = Exact({"log_potentials": a[i][None], "log_final": b[:, j]})
        share = chain.gradient("log_potentials", g[i, j]).exact[0]
        bound = 8 * error_model.REFERENCE_EPS * (np.abs(product[i, j]) + 1)
        assert_within(product[i, j], chain.log_partition[0][0], bound)
        expected[0][i] += share
        expected[1][:, j] += share
    assert_close(da, expected[0], factor=100 + sd)
    assert_close(db, expected[1], factor=100 + sd)
    assert da.exact[1, 2] == db.exact[0, 1] == 0


@pytest.mark.parametrize("n", [1, 2, 4])
def test_gradients_of_a_sequence_agree_with_those_of_its_chain(n):
    """One row, one column: the log of a product of matrices is that of a chain's sum."""
    stack = normal(n, 3, 3, sd=3)
    stack[0, 1, 2] = -INF
    first, last, g = normal(3, seed=1), normal(3, seed=2), np.array(0.7)
    result = gradient_reference.logchainexp([first[None], *stack, last[:, None]], g[None, None])
    arrays = {"log_initial": first, "log_transitions": stack, "log_final": last}
    chain = Exact({"log_potentials": np.zeros((n + 1, 3)), **arrays})
    assert_close(result[0], chain.gradient("initial", g).exact[None])
    for ours, expected in zip(result[1:-1], chain.gradient("transitions", g).exact, strict=True):
        assert_close(ours, expected)
    assert_close(result[-1], chain.gradient("final", g).exact[:, None])


# bounds -------------------------------------------------------------------------------------------


def test_bounds_notice_a_lost_term(dtype):
    """A probability of some hundred eps, left out, exceeds every bound."""
    a, b, g = normal(3, 20), normal(20, 4, seed=1), normal(3, 4, seed=2)
    da, _ = gradient_reference.logmatmulexp(a, b, g)
    bound = error_model.product_gradient_bound(da, 20, dtype)
    assert np.all(bound < 1000 * error_model.EPS[dtype])
    exact = Exact({"log_potentials": normal(5, 10, 6), "transitions": uniform(9, 6, 6)})
    for gradient in (exact.marginals(), exact.counts()):
        bound = error_model.posterior_bound(gradient, 10, 6, dtype)
        assert np.all(bound < 1000 * error_model.EPS[dtype])


def test_bounds_scale_with_the_cotangent():
    a, b, g = normal(3, 5), normal(5, 4, seed=1), normal(3, 4, seed=2)
    gradients = [gradient_reference.logmatmulexp(a, b, s * g)[0] for s in (1, 1e30)]
    plain, large = (error_model.product_gradient_bound(d, 5, "float32") for d in gradients)
    np.testing.assert_allclose((large / plain).astype(float), 1e30, rtol=1e-6)
