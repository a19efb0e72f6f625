"""The references agree with each other, and the error model notices errors."""

import numpy as np
import pytest
import scipy.special

from tests import error_model, reference
from tests.error_model import assert_within


def test_longdouble_product_has_the_semantics_of_scipy():
    values = np.array([-np.inf, -1.0, 0.0, 3.0, np.inf, np.nan])
    a = np.stack(np.meshgrid(values, values, indexing="ij"), axis=-1).reshape(-1, 2)
    b = a.T
    with np.errstate(all="ignore"):
        expected = scipy.special.logsumexp(a[:, :, None] + b[None], axis=1)
    out = reference.logmatmulexp(a, b)
    for kind in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(kind(out), kind(expected))
    finite = np.isfinite(expected)
    np.testing.assert_allclose(out[finite].astype(float), expected[finite], rtol=1e-14)


@pytest.mark.parametrize(
    ("out", "exact"),
    [
        (1.1, 1.0),
        (np.inf, 1.0),
        (np.nan, 1.0),
        (1.0, np.nan),
        (np.inf, -np.inf),
        (0.0, -np.inf),
        (np.nan, np.inf),
    ],
)
def test_assert_within_notices(out, exact):
    with pytest.raises(AssertionError, match=r"the worst is \(1,\)"):
        assert_within(np.array([2.0, out]), np.array([2.0, exact]), 0.01)


def test_assert_within_notices_a_shape():
    with pytest.raises(AssertionError, match="shape"):
        assert_within(np.zeros(2), np.zeros((1, 2)), 1.0)


def test_assert_within_accepts_what_agrees():
    values = np.array([1.0, np.inf, -np.inf, np.nan])
    assert_within(values, values, 0.0)
    assert_within(np.array([1.005]), np.array([1.0]), 0.01)


def test_product_bound_drops_the_gap_where_the_shifted_product_proves_nothing():
    a, b = np.array([[0.0, -60.0]]), np.array([[-60.0], [0.0]])
    exact = reference.logmatmulexp(a, b)
    near = error_model.product_bound(a, b, exact, "float32")
    eps = error_model.eps_of("float32")
    assert float(near[0, 0] / eps) == pytest.approx(3 * 60 + error_model.roundings(2), rel=0.02)
    far = error_model.product_bound(2 * a, 2 * b, 2 * exact, "float32")
    assert float(far[0, 0] / eps) == pytest.approx(2 * 120 + error_model.roundings(2), rel=0.02)
