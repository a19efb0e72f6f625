"""The references agree with each other, and the error model notices errors."""

import numpy as np
import pytest
import scipy.special

import arraylogchain as alc
from tests import error_model, reference
from tests.chain_checks import check_chain
from tests.error_model import assert_gradient, assert_within
from tests.gradient_reference import Gradient


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
def test_assert_within_wrong_entry_fails(out, exact):
    with pytest.raises(AssertionError, match=r"entry \(1,\)"):
        assert_within(np.array([2.0, out]), np.array([2.0, exact]), 0.01)


def test_message_of_a_gradient_names_operation_backend_dtype_entry_error_and_bound(
    np_backend, monkeypatch
):
    right = alc.vjp.log_partition

    def wrong(chain):
        value, pullback = right(chain)
        return value, lambda g: pullback(2 * g)

    monkeypatch.setattr(alc.vjp, "log_partition", wrong)
    options = {"transitions": np.ones((2, 2)), "only": ("gradients",)}
    message = (
        r"^vjp.log_partition, gradient of log_potentials on numpy(-array)?, float64: "
        r"entry \(0, 0\) is \S+, exact \S+, error \S+, bound \S+; 6 of 6 entries out of bound$"
    )
    with pytest.raises(AssertionError, match=message):
        check_chain(np_backend, "float64", np.zeros((3, 2)), **options)


def test_assert_gradient_rounding_where_no_term_exists_fails():
    zero = Gradient(*(np.zeros(2),) * 4, terms=1)
    message = r"^gradient: entry \(1,\) is 1e-30, exact 0.0, error 1e-30, bound 0; 1 of 2"
    with pytest.raises(AssertionError, match=message):
        assert_gradient(np.array([0.0, 1e-30]), zero, np.ones(2))


def test_assert_within_wrong_shape_fails():
    with pytest.raises(AssertionError, match="shape"):
        assert_within(np.zeros(2), np.zeros((1, 2)), 1.0)


def test_assert_within_equal_entries_pass():
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
