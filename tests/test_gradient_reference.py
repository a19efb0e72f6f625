"""The references of gradients agree with mpmath, and their bounds notice what is lost."""

import mpmath
import numpy as np
import pytest

from tests import error_model, gradient_reference, reference
from tests.chain_reference import Exact
from tests.error_model import assert_within

INF = np.inf


def normal(*shape, sd=1.0, seed=0):
    return np.random.default_rng(seed).normal(0, sd, shape)


def uniform(*shape, seed=0):
    return np.random.default_rng(seed).random(shape)


def assert_close(gradient, exact, factor=100.0):
    found = getattr(gradient, "exact", gradient)
    assert_within(found, exact, factor * error_model.REFERENCE_EPS * (1 + np.abs(exact)))


def derivative(function, point, which, index):
    """Return the derivative of `function` with respect to one entry, by mpmath.diff."""

    def along(value):
        moved = [p.copy() for p in point]
        moved[which][index] = value
        return function(*moved)

    return np.longdouble(mpmath.nstr(mpmath.diff(along, point[which][index]), 25))


# ------------------------------------------------------------------------------------- products


@pytest.mark.parametrize("sd", [1, 30, 1000])
def test_product_gradients_agree_with_mpmath(sd):
    a, b, g = normal(3, 4, sd=sd), normal(4, 2, sd=sd, seed=1), normal(3, 2, seed=2)
    a[1, 2] = b[0, 1] = -INF
    found = gradient_reference.logmatmulexp(a, b, g)
    exact = gradient_reference.evaluate_mp(gradient_reference.logmatmulexp_mp(g), [a, b])
    for gradient, expected in zip(found, exact, strict=True):
        assert_close(gradient, expected, factor=100 + sd)
    assert found[0].exact[1, 2] == found[1].exact[0, 1] == 0


def test_product_gradients_agree_with_differences():
    a, b, g = normal(2, 3), normal(3, 2, seed=1), normal(2, 2, seed=2)
    found = gradient_reference.logmatmulexp(a, b, g)

    def loss(a, b):
        terms = gradient_reference.exp_mp(a[:, :, None] + b[None])
        logs = np.vectorize(mpmath.log, otypes=[object])(terms.sum(axis=1))
        return np.sum(gradient_reference.to_mpmath(g) * logs)

    with mpmath.workdps(60):
        point = [gradient_reference.to_mpmath(x) for x in (a, b)]
        for which, gradient in enumerate(found):
            expected = np.empty_like(gradient.exact)
            for index in np.ndindex(expected.shape):
                expected[index] = derivative(loss, point, which, index)
            assert_close(gradient, expected)


def test_crossed_maxima_share_their_gradient():
    a, b = np.array([[0.0, -5000.0]]), np.array([[-5000.0], [0.0]])
    da, db = gradient_reference.logmatmulexp(a, b, np.ones((1, 1)))
    assert da.exact.tolist() == [[0.5, 0.5]]
    assert db.exact.tolist() == [[0.5], [0.5]]


def test_infinite_sums_have_no_gradient():
    a = np.array([[-INF, -INF], [INF, 0.0], [0.0, 0.0], [np.nan, 0.0]])
    b = np.array([[-INF, 0.0], [0.0, 0.0]])
    da, db = gradient_reference.logmatmulexp(a, b, np.ones((4, 2)))
    assert da.exact[:3].tolist() == [[0, 0], [0, 0], [0.5, 1.5]]
    assert np.isnan(da.exact[3]).all()
    assert np.isnan(db.exact).all()
    _, db = gradient_reference.logmatmulexp(a[:3], b, np.ones((3, 2)))
    assert db.exact.tolist() == [[0, 0.5], [1, 0.5]]


@pytest.mark.parametrize("name", ["logmatmulexp", "matmul", "maxplus"])
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((2, 3, 4), (4, 5)),
        ((3, 4), (2, 4, 5)),
        ((2, 1, 3, 4), (6, 4, 5)),
        ((1, 3, 4), (2, 4, 5)),
        ((4,), (2, 4, 5)),
        ((2, 3, 4), (4,)),
        ((4,), (4,)),
        ((3, 0), (0, 5)),
        ((0, 3, 4), (4, 5)),
    ],
)
def test_broadcast_axes_are_summed(name, left, right):
    """The gradient of an operand is the sum of those of its copies."""
    a, b = normal(*left), normal(*right, seed=1)
    shape = (a @ b).shape
    g = normal(*shape, seed=2)
    function = getattr(gradient_reference, name)
    rows, columns = a[None] if a.ndim == 1 else a, b[:, None] if b.ndim == 1 else b
    batch = np.broadcast_shapes(rows.shape[:-2], columns.shape[:-2])
    indices = np.zeros((*batch, rows.shape[-2], columns.shape[-1]), int)
    if name == "maxplus" and a.shape[-1]:
        with np.errstate(invalid="ignore"):
            indices = np.argmax(rows[..., None] + columns[..., None, :, :], axis=-2)
    extra = (indices.reshape(shape),) if name == "maxplus" else ()
    found = function(a, b, *extra, g)

    wide_a = np.broadcast_to(rows, (*batch, *rows.shape[-2:]))
    wide_b = np.broadcast_to(columns, (*batch, *columns.shape[-2:]))
    g = g.reshape(indices.shape)
    sums = [np.zeros(left), np.zeros(right)]
    for at in np.ndindex(batch):
        extra = (indices[at],) if name == "maxplus" else ()
        parts = function(wide_a[at], wide_b[at], *extra, g[at])
        for total, part, own in zip(sums, parts, (rows, columns), strict=True):
            own_at = tuple(
                0 if n == 1 else i for i, n in zip(at[::-1], own.shape[-3::-1], strict=False)
            )
            full = total.reshape(own.shape)
            full[own_at[::-1]] += part.exact.astype(float)
    for gradient, expected in zip(found, sums, strict=True):
        np.testing.assert_allclose(gradient.exact.astype(float), expected, atol=1e-13)


def test_maxplus_gradient_goes_to_the_index():
    a, b = np.array([[1.0, 2.0, -INF]]), np.array([[5.0, -INF], [4.0, -INF], [0.0, -INF]])
    da, db = gradient_reference.maxplus(a, b, np.array([[1, 0]]), np.array([[3.0, 7.0]]))
    assert da.exact.tolist() == [[0, 3, 0]]
    assert db.exact.tolist() == [[0, 0], [3, 0], [0, 0]]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_gradients_of_a_sequence_agree_with_those_of_its_chain(n):
    """One row, one column: the log of a product of matrices is that of a chain's sum."""
    stack = normal(n, 3, 3, sd=3)
    stack[0, 1, 2] = -INF
    first, last = normal(3, seed=1), normal(3, seed=2)
    g = 0.7
    matrices = [first[None], *stack, last[:, None]]
    found = gradient_reference.logchainexp(matrices, np.array([[g]]))
    x = np.zeros((n + 1, 3))
    x[-1] = last
    function = gradient_reference.all_paths(True, True, g)
    at_x, at_edges, at_start = gradient_reference.evaluate_mp(function, [x, stack, first])
    assert_close(found[0], at_start[None])
    for i in range(n):
        assert_close(found[1 + i], at_edges[i])
    assert_close(found[-1], at_x[-1][:, None])


def test_gradients_of_a_sequence_sum_broadcast_axes():
    matrices = [normal(2, 1, 3, 2), normal(4, 2, 3, seed=1), normal(3, 2, seed=2)]
    g = normal(2, 4, 3, 2, seed=3)
    found = gradient_reference.logchainexp(matrices, g)
    inner = reference.logmatmulexp(matrices[0], matrices[1])
    _, last = gradient_reference.logmatmulexp(inner.astype(float), matrices[2], g)
    assert_close(found[2], last.exact, factor=1e5)
    assert [d.exact.shape for d in found] == [m.shape for m in matrices]


# --------------------------------------------------------------------------------------- bounds


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
    plain, _ = gradient_reference.logmatmulexp(a, b, g)
    large, _ = gradient_reference.logmatmulexp(a, b, 1e30 * g)
    ratio = error_model.product_gradient_bound(
        large, 5, "float32"
    ) / error_model.product_gradient_bound(plain, 5, "float32")
    np.testing.assert_allclose(ratio.astype(float), 1e30, rtol=1e-6)


def test_matmul_gradients_are_products():
    a, b, g = normal(3, 4), normal(4, 5, seed=1), normal(3, 5, seed=2)
    da, db = gradient_reference.matmul(a, b, g)
    np.testing.assert_allclose(da.exact.astype(float), g @ b.T)
    np.testing.assert_allclose(db.exact.astype(float), a.T @ g)
    assert da.terms == 5
    assert db.terms == 3
