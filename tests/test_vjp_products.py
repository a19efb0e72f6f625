"""Gradients of the products: probabilities right to rounding on every range of the entries."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import arraylogchain as alc
from tests import error_model
from tests.checks import mentions
from tests.conftest import make_backend
from tests.gradient_checks import (
    CHECKS,
    COTANGENTS,
    check_vjp_logchainexp,
    check_vjp_logmatmulexp,
    check_vjp_maxplus,
    cotangent,
    product_shape,
)
from tests.test_properties import DTYPES, WORKSPACES, entries, operands

INF, NAN = np.inf, np.nan
FUNCTIONS = list(CHECKS)


def normal(*shape, sd=1.0, seed=0):
    return np.random.default_rng(seed).normal(0, sd, shape)


# ---------------------------------------------------------------------------------------- range


@pytest.mark.parametrize("low", [-10, -60, -80, -110, -400, -800, -1e4, -1e30])
def test_crossed_maxima_share_their_gradient(backend, dtype, low):
    """Both terms are equal, and a shifted product of exponentials holds neither of them."""
    da, db = check_vjp_logmatmulexp(backend, dtype, [[0.0, low]], [[low], [0.0]], [[1.0]])
    assert da == pytest.approx(0.5, rel=100 * error_model.EPS[dtype])
    assert db == pytest.approx(0.5, rel=100 * error_model.EPS[dtype])


def test_crossed_maxima_among_others(backend, dtype):
    a, b = normal(33, 17), normal(17, 29, seed=1)
    far = -110.0 if dtype == "float32" else -800.0
    a[::4, 1:] += far
    b[:-1, ::3] += far
    check_vjp_logmatmulexp(backend, dtype, a, b)


@pytest.mark.parametrize("kind", COTANGENTS)
@pytest.mark.parametrize("sd", [1, 10, 20, 30, 100, 1000])
def test_normal_entries(backend, dtype, sd, kind):
    check_vjp_logmatmulexp(backend, dtype, normal(21, 30, sd=sd), normal(30, 17, sd=sd), kind)


@pytest.mark.parametrize("sd", [1, 20, 1000])
def test_long_sums(np_backend, dtype, sd):
    a, b = normal(3, 3000, sd=sd), normal(3000, 4, sd=sd, seed=1)
    check_vjp_logmatmulexp(np_backend, dtype, a, b)


@pytest.mark.parametrize("centre", [1e4, -1e4])
@pytest.mark.parametrize("sign", [1, -1])
def test_large_entries(backend, dtype, centre, sign):
    """Results far from 0, or cancelling: probabilities must not carry the rounding of a result."""
    a, b = normal(9, 12, sd=3) + centre, normal(12, 7, sd=3, seed=1) + sign * centre
    check_vjp_logmatmulexp(backend, dtype, a, b)


def test_large_entries_with_crossed_maxima(backend, dtype):
    a, b = np.array([[0.0, -800.0]]) + 1e4, np.array([[-800.0], [0.0]]) + 1e4
    da, db = check_vjp_logmatmulexp(backend, dtype, a, b, [[1.0]])
    assert da == pytest.approx(0.5, rel=1e4 * error_model.EPS[dtype])
    assert db == pytest.approx(0.5, rel=1e4 * error_model.EPS[dtype])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("offset", [1e4, 1e6])
def test_offsets_of_wide_entries(backend, dtype, offset, sign):
    """What all entries have in common must not be rounded with those that get their own maximum."""
    a, b = normal(9, 12, sd=1000) + offset, normal(12, 7, sd=1000, seed=1) + sign * offset / 3
    check_vjp_logmatmulexp(backend, dtype, a, b)


@pytest.mark.parametrize("offset", [0.0, 1e4, 1e6])
def test_offset_of_crossed_maxima(backend, dtype, offset):
    """The maxima of row and column belong to other terms than that of the sum."""
    far = 1500.0 if dtype == "float64" else 150.0
    a = np.array([[0.25, -far, -2 * far]]) - offset
    b = np.array([[-far], [0.0], [-1.0]]) - offset / 3
    a, b = (x.astype(dtype).astype(float) for x in (a, b))
    check_vjp_logmatmulexp(backend, dtype, a, b, [[1.0]])
    first = float(1 / (1 + np.exp((a[0, 1] - a[0, 0]) + (b[1, 0] - b[0, 0]))))
    _, pullback = alc.vjp.logmatmulexp(*(backend.asarray(x, dtype) for x in (a, b)))
    da, _ = pullback(backend.asarray(np.ones((1, 1)), dtype))
    # Only the distances from row and column count, which are at most 2 far.
    tolerance = 8 * far * error_model.EPS[dtype]
    assert backend.to_numpy(da)[0] == pytest.approx([first, 1 - first, 0], abs=tolerance)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 7, 1), (65, 3, 1), (1, 3, 67), (32, 32, 33)])
def test_shapes(backend, dtype, function, shape):
    rows, inner, columns = shape
    CHECKS[function](backend, dtype, normal(rows, inner, sd=5), normal(inner, columns, sd=5))


def test_rows_of_a_gradient_sum_to_the_cotangents(np_backend, dtype):
    """The probabilities of a sum add up to 1."""
    a, b, g = normal(8, 20, sd=9), normal(20, 6, sd=9), normal(8, 6)
    da, db = check_vjp_logmatmulexp(np_backend, dtype, a, b, g)
    tolerance = 1000 * error_model.EPS[dtype]
    np.testing.assert_allclose(da.sum(axis=1), g.sum(axis=1), atol=tolerance)
    np.testing.assert_allclose(db.sum(axis=0), g.sum(axis=0), atol=tolerance)


# ------------------------------------------------------------------------------- infinities, NaN


@pytest.mark.parametrize("function", ["logmatmulexp", "maxplus_matmul"])
@pytest.mark.parametrize("sd", [1, 1000])
@pytest.mark.parametrize(
    "place",
    [np.s_[3], np.s_[:, 4], np.s_[:], np.s_[2:, :9], np.s_[::2, ::2]],
    ids=["row", "column", "everything", "block", "checkerboard"],
)
def test_minus_infinity(backend, dtype, function, place, sd):
    """An entry of -inf has gradient 0, and so has everything in a sum of such terms only."""
    a, b = normal(12, 10, sd=sd), normal(10, 11, sd=sd, seed=1)
    a[place] = -INF
    da, _ = CHECKS[function](backend, dtype, a, b)
    assert np.all(da[a == -INF] == 0)
    CHECKS[function](backend, dtype, b.T, a.T)
    b[place[::-1] if isinstance(place, tuple) else place] = -INF
    da, db = CHECKS[function](backend, dtype, a, b)
    assert np.all(da[a == -INF] == 0)
    assert np.all(db[b == -INF] == 0)


@pytest.mark.parametrize(("below", "above"), [(0, 1), (1, 1), (0, 0), (40, 0)])
def test_bands(backend, dtype, below, above):
    n = 45
    rows, columns = np.indices((n, n))
    a = np.where((columns < rows - below) | (columns > rows + above), -INF, normal(n, n, sd=3))
    check_vjp_logmatmulexp(backend, dtype, a, a.T)
    a[:, 10:20] -= 700 if dtype == "float64" else 90
    check_vjp_logmatmulexp(backend, dtype, a, a.T)


def test_disjoint_supports_have_no_gradient(backend, dtype):
    a, b = normal(6, 8), normal(8, 7)
    a[:, 4:], b[:4] = -INF, -INF
    da, db = check_vjp_logmatmulexp(backend, dtype, a, b)
    assert not np.any(da)
    assert not np.any(db)


def test_plus_infinity_has_no_gradient(backend, dtype):
    a, b = normal(5, 4), normal(4, 6, seed=1)
    a[1, 2] = b[0, 3] = INF
    da, db = check_vjp_logmatmulexp(backend, dtype, a, b)
    assert np.all(da[1] == 0)
    assert np.all(db[:, 3] == 0)


def test_infinities_that_do_not_meet_make_no_nan(backend, dtype):
    a, b = normal(6, 5), normal(5, 4, seed=1)
    a[0, 1], a[1, :], a[2, 0], a[3, 4] = INF, -INF, -INF, INF
    b[2, 1], b[0, 2], b[3, :] = INF, -INF, -INF
    a[:, 2] = np.where(np.isfinite(a[:, 2]), a[:, 2], 0)
    da, db = check_vjp_logmatmulexp(backend, dtype, a, b)
    assert not np.isnan(da).any()
    assert not np.isnan(db).any()


@pytest.mark.parametrize("others", [-INF, 0.0, 200.0])
def test_infinities_that_meet_stay_in_their_row(backend, dtype, others):
    """+inf and -inf add up to NaN, as in the value; no other row of the gradient shows it."""
    a, b = normal(4, 3), normal(3, 5, seed=1)
    a[:, 2] = others
    a[1, 0], b[0, 2] = INF, -INF
    arrays = [backend.asarray(x, dtype) for x in (a, b, np.ones((4, 5)))]
    value, pullback = alc.vjp.logmatmulexp(*arrays[:2])
    assert np.isnan(backend.to_numpy(value)[1, 2])
    da, _ = (backend.read(d, dtype) for d in pullback(arrays[2]))
    rows = np.arange(4) != 1
    expected, _ = check_vjp_logmatmulexp(backend, dtype, a[rows], b, np.ones((3, 5)))
    np.testing.assert_allclose(da[rows], expected, atol=100 * error_model.EPS[dtype])


@pytest.mark.parametrize("sd", [1, 1000])
def test_nan_stays_in_its_row_and_column(backend, dtype, sd):
    a, b, g = normal(6, 5, sd=sd), normal(5, 4, sd=sd, seed=1), normal(6, 4, seed=2)
    a[2, 3] = NAN
    arrays = [backend.asarray(x, dtype) for x in (a, b, g)]
    _, pullback = alc.vjp.logmatmulexp(*arrays[:2])
    da, db = (backend.read(d, dtype) for d in pullback(arrays[2]))
    others = np.arange(6) != 2
    expected, _ = check_vjp_logmatmulexp(backend, dtype, a[others], b, g[others])
    assert np.isnan(da[2]).any()
    assert np.isnan(db).any()
    np.testing.assert_allclose(da[others], expected, atol=100 * error_model.EPS[dtype])

    b[0, 1], a[2, 3] = NAN, 0
    arrays = [backend.asarray(x, dtype) for x in (a, b, g)]
    _, pullback = alc.vjp.logmatmulexp(*arrays[:2])
    da, db = (backend.read(d, dtype) for d in pullback(arrays[2]))
    others = np.arange(4) != 1
    _, expected = check_vjp_logmatmulexp(backend, dtype, a, b[:, others], g[:, others])
    assert np.isnan(da).any()
    assert np.isnan(db[:, 1]).any()
    np.testing.assert_allclose(db[:, others], expected, atol=100 * error_model.EPS[dtype])


# ------------------------------------------------------------------------------- shapes, layouts

BROADCASTS = [
    ((5, 3, 4), (4, 6)),
    ((3, 4), (5, 4, 6)),
    ((5, 1, 3, 4), (7, 4, 6)),
    ((7, 4, 1, 3), (4, 3, 2)),
    ((1, 3, 4), (5, 4, 6)),
    ((1, 3, 4), (4, 6)),
    ((3, 4), (1, 1, 4, 6)),
    ((2, 1, 5, 1, 3, 4), (3, 1, 2, 4, 2)),
    ((2, 5, 3, 4), (2, 5, 4, 6)),
    ((4,), (4, 6)),
    ((3, 4), (4,)),
    ((4,), (4,)),
    ((4,), (5, 4, 6)),
    ((5, 3, 4), (4,)),
    ((1,), (1,)),
]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("left", "right"), BROADCASTS)
def test_broadcasts(backend, dtype, function, left, right):
    """The gradient of what is broadcast is summed, and has the operand's own shape."""
    da, db = CHECKS[function](backend, dtype, normal(*left, sd=3), normal(*right, sd=3, seed=1))
    assert (da.shape, db.shape) == (left, right)


@pytest.mark.parametrize(("left", "right"), BROADCASTS)
def test_broadcasts_of_wide_entries(backend, dtype, left, right):
    check_vjp_logmatmulexp(backend, dtype, normal(*left, sd=300), normal(*right, sd=300, seed=1))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((3, 0), (0, 5)),
        ((0, 4), (4, 5)),
        ((3, 4), (4, 0)),
        ((0, 3, 4), (4, 5)),
        ((3, 4), (0, 4, 5)),
        ((0, 3, 4), (1, 4, 5)),
        ((0,), (0,)),
        ((2, 3, 0), (0,)),
    ],
)
def test_empty_axes(backend, dtype, function, left, right):
    da, db = CHECKS[function](backend, dtype, np.ones(left), np.ones(right))
    assert not np.any(da)
    assert not np.any(db)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_half_precisions(backend, half, function):
    CHECKS[function](backend, half, normal(9, 12, sd=3), normal(5, 12, 7, sd=3, seed=1))
    CHECKS[function](backend, half, normal(4, 9, 12), normal(12, 7, seed=1), "mixed")


def test_half_precisions_of_large_results(backend, half):
    """A result that is rounded to 3 digits must not be what probabilities are computed from."""
    check_vjp_logmatmulexp(backend, half, normal(6, 8) + 300, normal(8, 5, seed=1) + 300)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_mixed_precisions(np_backend, function):
    """A gradient has the dtype of its operand."""
    a, b = normal(3, 4).astype("float32"), normal(4, 5, seed=1)
    value, pullback = getattr(alc.vjp, function)(a, b)
    da, db = pullback(normal(3, 5))
    assert getattr(value, "values", value).dtype == np.float64
    assert (da.dtype, db.dtype) == (np.float32, np.float64)
    expected = CHECKS[function](np_backend, "float64", a.astype(float), b, normal(3, 5))
    np.testing.assert_allclose(da, expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(db, expected[1], rtol=1e-12)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_views(torch_backend, function, dtype):
    """Negative strides, gaps, transposes, Fortran order, expanded axes: the same as copies."""
    a, b, g = normal(12, 10).astype(dtype), normal(8, 20).astype(dtype), normal(8, 6).astype(dtype)
    views = (a[::-2, ::-1], b.T[::2, ::-1], np.asfortranarray(g.T))
    copies = [v.copy() for v in views]
    results = []
    for left, right, cotangent_ in (views, copies):
        _, pullback = getattr(alc.vjp, function)(left, right)
        results.append(pullback(cotangent_))
    for viewed, plain in zip(*results, strict=True):
        np.testing.assert_allclose(viewed, plain, rtol=1e-4, atol=1e-5)

    xp = torch_backend.xp
    left = xp.ones(1, 5, dtype=getattr(xp, dtype)).expand(3, 5)
    right = torch_backend.asarray(normal(5, 4), dtype)
    _, pullback = getattr(alc.vjp, function)(left, right)
    da, db = pullback(xp.ones(1, 1, dtype=left.dtype).expand(3, 4))
    plain = getattr(alc.vjp, function)(left.clone(), right)[1](xp.ones(3, 4, dtype=left.dtype))
    np.testing.assert_allclose(da.numpy(), plain[0].numpy(), rtol=1e-5)
    np.testing.assert_allclose(db.numpy(), plain[1].numpy(), rtol=1e-5)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_expanded_cotangent(np_backend, dtype, function):
    a, b = normal(5, 3, 4).astype(dtype), normal(4, 6).astype(dtype)
    _, pullback = getattr(alc.vjp, function)(a, b)
    expanded = pullback(np.broadcast_to(np.asarray(2.0, dtype), (5, 3, 6)))
    full = pullback(np.full((5, 3, 6), 2.0, dtype))
    for d, e in zip(expanded, full, strict=True):
        np.testing.assert_allclose(d, e, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------ calls and errors


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("sd", [1, 1000])
def test_pullback_can_be_called_again(backend, dtype, function, sd):
    a, b = (
        backend.asarray(x, dtype) for x in (normal(3, 7, 5, sd=sd), normal(5, 4, sd=sd, seed=1))
    )
    g, other = (backend.asarray(normal(3, 7, 4, seed=i), dtype) for i in (2, 3))
    _, pullback = getattr(alc.vjp, function)(a, b)
    first = [backend.to_numpy(d).copy() for d in pullback(g)]
    pullback(other)
    for d, again in zip(first, pullback(g), strict=True):
        np.testing.assert_array_equal(d, backend.to_numpy(again))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_value_is_that_of_the_plain_function(backend, dtype, function):
    a, b = (backend.asarray(x, dtype) for x in (normal(6, 5, sd=30), normal(5, 4, sd=30, seed=1)))
    value, _ = getattr(alc.vjp, function)(a, b)
    plain = getattr(alc, function)(a, b)
    pairs = zip(value, plain, strict=True) if isinstance(value, tuple) else [(value, plain)]
    for found, expected in pairs:
        np.testing.assert_array_equal(backend.to_numpy(found), backend.to_numpy(expected))


def test_small_cotangents_beside_large_entries(backend, dtype):
    """exp(70) in float32, exp(670) in float64: a cotangent divided by it may underflow."""
    size, g = (35.0, 1e-20) if dtype == "float32" else (335.0, 1e-100)
    a, b, gs = (backend.asarray(np.full((4, 4), x), dtype) for x in (size, size, g))
    _, pullback = alc.vjp.logmatmulexp(a, b)
    for gradient in pullback(gs):
        np.testing.assert_allclose(backend.to_numpy(gradient), g, rtol=1e-5)


def test_infinite_rows_beside_exact_entries(backend, dtype):
    """Of the first row's entries there is no posterior; the second's are computed one by one."""
    a, b = np.array([[INF, 0.0], [0.0, -2000.0]]), np.array([[-2000.0, -2000.0], [0.0, 0.0]])
    _, pullback = alc.vjp.logmatmulexp(backend.asarray(a, dtype), backend.asarray(b, dtype))
    da, db = (backend.to_numpy(x) for x in pullback(backend.asarray(np.ones((2, 2)), dtype)))
    np.testing.assert_allclose(da, [[0, 0], [1, 1]], rtol=1e-6)
    np.testing.assert_allclose(db, np.full((2, 2), 0.5), rtol=1e-6)


def test_ties_go_to_the_smallest_index(backend, dtype):
    da, db = check_vjp_maxplus(backend, dtype, np.zeros((2, 5)), np.zeros((5, 3)), "ones")
    assert da.tolist() == [[3, 0, 0, 0, 0]] * 2
    assert db.tolist() == [[2, 2, 2]] + [[0, 0, 0]] * 4


def test_maxplus_has_no_gradient_through_what_is_not_finite(backend, dtype):
    """+inf that meets -inf makes NaN as the value, which hangs on no operand."""
    a, b = np.array([[-INF, -INF], [INF, 0.0], [1.0, 2.0]]), np.array([[0.0, -INF], [0.0, 0.0]])
    value, pullback = alc.vjp.maxplus_matmul(*(backend.asarray(x, dtype) for x in (a, b)))
    assert np.isnan(backend.to_numpy(value.values)[1, 1])
    da, db = pullback(backend.asarray(np.ones((3, 2)), dtype))
    assert backend.to_numpy(da).tolist() == [[0, 0], [0, 0], [0, 2]]
    assert backend.to_numpy(db).tolist() == [[0, 0], [1, 1]]


@pytest.mark.exhaustive
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("workspace", [1 << 20, 1 << 22])
@pytest.mark.parametrize("sd", [1, 25, 1000])
def test_workspace_changes_no_gradient(np_backend, dtype, function, workspace, sd):
    a, b = normal(2, 40, 250, sd=sd), normal(250, 50, sd=sd, seed=1)
    if function == "logmatmulexp":
        a[0, :, ::3] = -INF
    CHECKS[function](np_backend, dtype, a, b, workspace=workspace)


@pytest.mark.parametrize("function", [*FUNCTIONS, "logchainexp"])
@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda g: g[:-1], ValueError),
        (lambda g: g[None], ValueError),
        (lambda g: g[:, :1], ValueError),
        (lambda g: np.asarray(2.0), ValueError),
        (lambda g: 2.0, TypeError),
        (lambda g: None, TypeError),
        (lambda g: g.tolist(), TypeError),
        (lambda g: g.astype(int), TypeError),
        (lambda g: g + 0j, TypeError),
    ],
    ids=["row", "axis", "column", "0-d", "number", "None", "list", "integers", "complex"],
)
def test_cotangents_that_do_not_fit(function, make, error):
    a, b, g = normal(3, 4), normal(4, 5), normal(3, 5)
    operands = ([a, b],) if function == "logchainexp" else (a, b)
    _, pullback = getattr(alc.vjp, function)(*operands)
    with pytest.raises(error, match=mentions("cotangent")):
        pullback(make(g))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_cotangent_of_another_library(torch_backend, function):
    _, pullback = getattr(alc.vjp, function)(normal(3, 4), normal(4, 5))
    with pytest.raises(TypeError, match=mentions("cotangent")):
        pullback(torch_backend.asarray(normal(3, 5)))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_operands_that_do_not_fit(function):
    """They are refused before a pullback is made, as the plain functions do."""
    with pytest.raises(ValueError, match=r"\(3, 4\)"):
        getattr(alc.vjp, function)(normal(3, 4), normal(5, 6))
    with pytest.raises(TypeError, match=mentions("a")):
        getattr(alc.vjp, function)(normal(3, 4).tolist(), normal(4, 6))
    with pytest.raises(ValueError, match=mentions("workspace")):
        getattr(alc.vjp, function)(normal(3, 4), normal(4, 6), workspace=1)


@pytest.mark.parametrize("of_cotangent", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("function", [*FUNCTIONS, "logchainexp", "log_partition"])
def test_dtype_of_a_cotangent(torch_backend, function, dtype, of_cotangent):
    """It changes neither where the pullback computes nor in what."""
    a, b = (torch_backend.asarray(x, dtype) for x in (normal(3, 4), normal(4, 4, seed=1)))
    operands = {
        "logchainexp": ([a, b],),
        "log_partition": (alc.LogChain(a, log_transitions=b[None].expand(2, 4, 4)),),
    }.get(function, (a, b))
    value, pullback = getattr(alc.vjp, function)(*operands)
    g = torch_backend.xp.ones_like(value[0] if function == "maxplus_matmul" else value)
    found, expected = pullback(g.to(getattr(torch_backend.xp, of_cotangent))), pullback(g)
    torch_backend.xp.testing.assert_close(found, expected)


# ---------------------------------------------------------------------------------- logchainexp


@pytest.mark.parametrize("sd", [1, 30, 1000])
@pytest.mark.parametrize("shape", [(1, 3, 3), (2, 3, 3), (5, 4, 4), (2, 6, 3, 3), (9, 1, 1)])
def test_stacks(backend, dtype, shape, sd):
    stack = normal(*shape, sd=sd)
    check_vjp_logchainexp(backend, dtype, stack)
    check_vjp_logchainexp(backend, dtype, list(np.moveaxis(stack, -3, 0)))


def test_stack_of_no_matrices(backend, dtype):
    stack = backend.asarray(np.zeros((2, 0, 3, 3)), dtype)
    value, pullback = alc.vjp.logchainexp(stack)
    (gradient,) = pullback(backend.asarray(np.ones((2, 3, 3)), dtype))
    assert backend.read(value, dtype).shape == (2, 3, 3)
    assert backend.read(gradient, dtype).shape == (2, 0, 3, 3)


@pytest.mark.parametrize(
    "shapes",
    [
        [(4, 2), (2, 5), (5, 1), (1, 3)],
        [(3, 1, 4, 2), (2, 2, 3), (3, 5)],
        [(2, 3), (4, 3, 3), (1, 3, 2)],
        [(3, 4)],
    ],
)
@pytest.mark.parametrize("sd", [1, 100])
def test_sequences_of_rectangles(backend, dtype, shapes, sd):
    matrices = [normal(*shape, sd=sd, seed=i) for i, shape in enumerate(shapes)]
    gradient = check_vjp_logchainexp(backend, dtype, matrices)
    assert [d.shape for d in gradient] == shapes


@pytest.mark.parametrize("sd", [1, 300])
def test_stacks_with_minus_infinity(backend, dtype, sd):
    stack = normal(6, 4, 4, sd=sd)
    stack[:, np.tril_indices(4, -1)[0], np.tril_indices(4, -1)[1]] = -INF
    stack[2, 1] = -INF
    gradient = check_vjp_logchainexp(backend, dtype, stack)
    assert np.all(gradient[stack == -INF] == 0)
    stack[3] = -INF
    assert not np.any(check_vjp_logchainexp(backend, dtype, stack))


@pytest.mark.parametrize("n", [40, 130])
def test_long_stacks(np_backend, dtype, n):
    check_vjp_logchainexp(np_backend, dtype, normal(n, 3, 3))


def test_stacks_in_half_precision(backend, half):
    check_vjp_logchainexp(backend, half, normal(5, 4, 4))
    check_vjp_logchainexp(backend, half, [normal(2, 3), normal(3, 4)])


@pytest.mark.parametrize("kind", COTANGENTS)
def test_cotangents_of_stacks(np_backend, dtype, kind):
    check_vjp_logchainexp(np_backend, dtype, normal(4, 3, 3, sd=9), kind)


def test_small_workspace_of_stacks(np_backend, dtype):
    check_vjp_logchainexp(np_backend, dtype, normal(30, 12, 4, 4), workspace=1 << 20)


def test_pullback_of_a_stack_can_be_called_again(backend, dtype):
    stack = backend.asarray(normal(6, 3, 3, sd=9), dtype)
    g = backend.asarray(normal(3, 3, seed=1), dtype)
    _, pullback = alc.vjp.logchainexp(stack)
    first = backend.to_numpy(pullback(g)[0]).copy()
    np.testing.assert_array_equal(backend.to_numpy(pullback(g)[0]), first)


# ----------------------------------------------------------------------------------- properties


@hypothesis.given(
    operands=operands(),
    kind=st.sampled_from(COTANGENTS),
    dtype=DTYPES,
    workspace=WORKSPACES,
)
def test_logmatmulexp_of_any_operands(operands, kind, dtype, workspace):
    check_vjp_logmatmulexp(make_backend("numpy"), dtype, *operands, kind, workspace=workspace)


@hypothesis.given(
    operands=operands(), kind=st.sampled_from(COTANGENTS), function=st.sampled_from(FUNCTIONS)
)
@hypothesis.settings(max_examples=80)
def test_products_elsewhere(operands, kind, function):
    if function == "matmul":
        operands = [np.where(np.isfinite(x), x, 0) for x in operands]
    for name in ("strict", "strict-no_float64", "torch"):
        CHECKS[function](make_backend(name), "float32", *operands, kind)


@hypothesis.given(operands=operands(), dtype=DTYPES, function=st.sampled_from(FUNCTIONS))
def test_any_shapes(operands, dtype, function):
    finite = [np.where(np.isfinite(x), x, 0) for x in operands]
    CHECKS[function](make_backend("numpy"), dtype, *finite)


@hypothesis.given(data=st.data(), n=st.integers(1, 6), K=st.integers(1, 4), dtype=DTYPES)
def test_logchainexp_of_any_stack(data, n, K, dtype):
    stack = data.draw(entries((n, K, K)))
    check_vjp_logchainexp(make_backend("numpy"), dtype, stack)
    check_vjp_logchainexp(make_backend("numpy"), dtype, list(stack))


@hypothesis.given(operands=operands())
@hypothesis.settings(max_examples=60)
def test_pullback_is_linear(operands):
    """Twice the cotangent is twice the gradient, and none is none."""
    shape = product_shape(*operands)
    g = cotangent("normal", shape)
    _, pullback = alc.vjp.logmatmulexp(*operands)
    for once, twice, none in zip(
        pullback(g), pullback(2 * g), pullback(np.zeros(shape)), strict=True
    ):
        np.testing.assert_allclose(twice, 2 * once, rtol=1e-12)
        assert not np.any(none)
