"""Properties of products: ties, layouts, dtypes, cotangents, and many factors."""

import importlib.util
import itertools

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import arraylogchain as alc
from tests import error_model, reference
from tests.chain_scenarios import normal
from tests.checks import check_logmatmulexp, check_matmul, mentions
from tests.conftest import BACKENDS, import_or_skip, make_backend
from tests.error_model import assert_within
from tests.gradient_checks import CHECKS, check_vjp_logchainexp, check_vjp_logmatmulexp

INF, NAN = np.inf, np.nan
FUNCTIONS = list(CHECKS)


# ------------------------------------------------------------------------- values and their kinds


def test_largest_finite_entries(backend, dtype):
    """Sums of two of the largest numbers overflow to infinity, as in NumPy."""
    top = float(np.finfo(dtype).max)
    out = check_logmatmulexp(backend, dtype, [[top, -top]], [[-top], [top]])
    assert abs(out[0, 0] - np.log(2)) < 1e-6
    ours = [backend.asarray(x, dtype) for x in ([[top]], [[top]])]
    assert backend.to_numpy(alc.logmatmulexp(*ours))[0, 0] == np.inf
    ours = [backend.asarray(x, dtype) for x in ([[-top]], [[-top]])]
    assert backend.to_numpy(alc.logmatmulexp(*ours))[0, 0] == -np.inf


def test_half_matmul_adds_in_single_precision(backend, half):
    check_matmul(backend, half, normal(4, 500), normal(500, 5, seed=1))
    # Added one by one in half precision, ones would stop at 2048 (float16) or 256 (bfloat16).
    ones = backend.asarray(np.ones((1, 5000)), half)
    out = alc.matmul(ones, backend.asarray(np.ones((5000, 1)), half))
    total = backend.read(out, half)[0, 0]
    assert total == pytest.approx(5000, rel=2.0 ** -error_model.HALVES[half][0])


PROMOTIONS = [
    ("float16", "float32", "float32"),
    ("float16", "float64", "float64"),
    ("float32", "float64", "float64"),
    ("bfloat16", "float16", "float32"),
    ("bfloat16", "float32", "float32"),
    ("bfloat16", "float64", "float64"),
]


@pytest.mark.parametrize(
    ("backend", "first", "second", "expected"),
    [
        (name, *dtypes)
        for name, (_, _, supported) in BACKENDS.items()
        for dtypes in PROMOTIONS
        if set(dtypes) <= set(supported)
    ],
    indirect=["backend"],
)
@pytest.mark.parametrize("function", ["matmul", "logmatmulexp", "maxplus_matmul"])
def test_mixed_precisions_promote(backend, function, first, second, expected):
    """Values have the wider dtype, gradients the dtype of their operand."""
    x, y = normal(3, 4), normal(4, 3, seed=1)
    for dtypes in [(first, second), (second, first)]:
        arguments = [backend.asarray(v, d) for v, d in zip((x, y), dtypes, strict=True)]
        wide = [backend.asarray(backend.to_numpy(v), expected) for v in arguments]
        g = backend.asarray(normal(3, 3), expected)
        (value, pullback), (plain, plain_pullback) = (
            getattr(alc.vjp, function)(*p) for p in (arguments, wide)
        )
        if function == "maxplus_matmul":
            value, plain = value.values, plain.values
        results, references = (value, *pullback(g)), (plain, *plain_pullback(g))
        for ours, theirs, dtype in zip(results, references, (expected, *dtypes), strict=True):
            ours, theirs = backend.read(ours, dtype), backend.to_numpy(theirs)
            bound = 50 * error_model.eps_of(dtype) * np.abs(theirs) + 1e-6
            assert_within(ours, theirs, bound + error_model.half_ulp(theirs, dtype))


def test_promotion_of_a_sequence(np_backend):
    matrices = [normal(3, 3).astype("float16"), normal(3, 3).astype("float32")]
    assert alc.logchainexp(matrices).dtype == np.float32


@pytest.mark.parametrize("through_vjp", [False, True])
def test_results_without_axes_are_numpy_scalars_or_arrays_of_the_library(backend, through_vjp):
    """Scalars can be rounded and written as JSON; tensors and other arrays stay arrays."""
    a, b = (backend.asarray(normal(4, seed=i), "float32") for i in (0, 1))
    module = alc.vjp if through_vjp else alc
    results = [getattr(module, name)(a, b) for name in ("matmul", "logmatmulexp")]
    results.append(module.maxplus_matmul(a, b))
    if importlib.util.find_spec("opt_einsum"):
        results.append(module.logeinsumexp("i,i->", a, b))
        results.append(
            alc.vjp.logeinsumexp("i->", a) if through_vjp else alc.maxplus_einsum("i->", a)
        )
    for result in results:
        value, pullback = result if through_vjp else (result, None)
        parts = value if isinstance(value, tuple) else (value,)
        for x in parts:
            assert x.shape == ()
            assert backend.owns(x)
            assert isinstance(x, np.generic) == (backend.library == "numpy")
        if pullback is not None:
            expected = pullback(1.0)
            for g in (parts[0] * 0 + 1, backend.asarray(np.ones(()), "float32")):
                for ours, theirs in zip(pullback(g), expected, strict=True):
                    assert ours.shape == (4,)
                    np.testing.assert_array_equal(*map(backend.to_numpy, (ours, theirs)))


# ---------------------------------------------------------------------------------------- layouts


def layouts(dtype):
    """Return arrays of 3 x 6 x 6 that lie in memory in different ways."""
    x = normal(3, 6, 6, sd=40).astype(dtype)
    padded = np.full((3, 12, 8), np.nan, dtype)
    padded[:, ::2, 1:7] = x
    backwards = np.ascontiguousarray(x[::-1, ::-1, ::-1])
    read_only = x.copy()
    read_only.flags.writeable = False
    return {
        "view with gaps": padded[:, ::2, 1:7],
        "negative strides": backwards[::-1, ::-1, ::-1],
        "Fortran order": np.asfortranarray(x),
        "transposed": np.ascontiguousarray(np.swapaxes(x, -1, -2)).swapaxes(-1, -2),
        "batch axis last": np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 0, -1)), -1, 0),
        "expanded row": as_strided(x, x.shape, (0, 0, x.itemsize)),
        "expanded column": as_strided(x, x.shape, (0, x.itemsize, 0)),
        "expanded number": as_strided(x, x.shape, (0, 0, 0)),
        "read-only": read_only,
    }


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("layout", list(layouts("float32")))
@pytest.mark.parametrize("function", FUNCTIONS)
def test_memory_layouts(function, dtype, layout, library):
    """Results and gradients, also by autograd, depend on the values only.

    The operands are not changed.
    """
    view, expected = layouts(dtype)[layout], None
    plain = np.array(view, order="C")
    if library == "torch":
        if layout in ("negative strides", "read-only"):
            pytest.skip("torch has none")
        view, plain = map(import_or_skip("torch").from_numpy, (view, plain))
    for arguments in itertools.product((plain, view), repeat=3):
        value, pullback = getattr(alc.vjp, function)(*arguments[:2])
        result = [*(value if isinstance(value, tuple) else (value,)), *pullback(arguments[2])]
        if library == "torch":
            leaves = [x.detach().requires_grad_() for x in arguments[:2]]
            value = getattr(alc, function)(*leaves)
            values = value.values if function == "maxplus_matmul" else value
            result += import_or_skip("torch").autograd.grad(values, leaves, arguments[2])
        expected = expected or result
        for x, y in zip(result, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(view, plain)


# ------------------------------------------------------------------------------------- gradients


def test_small_cotangents_beside_large_entries(backend, dtype):
    """exp(70) in float32, exp(670) in float64: a cotangent divided by it may underflow."""
    size, g = (35.0, 1e-20) if dtype == "float32" else (335.0, 1e-100)
    a, b, gs = (backend.asarray(np.full((4, 4), x), dtype) for x in (size, size, g))
    _, pullback = alc.vjp.logmatmulexp(a, b)
    for gradient in pullback(gs):
        np.testing.assert_allclose(backend.to_numpy(gradient), g, rtol=1e-5)


def test_infinite_cotangents_reach_no_zero(backend, dtype):
    """Recomputed entries: a term of weight 0 has gradient 0 even for an infinite cotangent."""
    a, b = np.array([[0.0, -2000.0, -INF]]), np.array([[-2000.0], [0.0], [0.0]])
    _, pullback = alc.vjp.logmatmulexp(*(backend.asarray(x, dtype) for x in (a, b)))
    for gradient in pullback(backend.asarray(np.full((1, 1), INF), dtype)):
        assert backend.to_numpy(gradient).ravel().tolist() == [INF, INF, 0]


def test_half_precisions_of_large_results(backend, half):
    """Probabilities must not be computed from a result that is rounded to 3 digits."""
    check_vjp_logmatmulexp(backend, half, normal(6, 8) + 300, normal(8, 5, seed=1) + 300)


def pullback_of(function, a, b):
    """Return the pullback of an operation of matrices, or of a chain with them."""
    if function == "log_partition":
        return alc.vjp.log_partition(alc.LogChain(a, log_transitions=b))
    return getattr(alc.vjp, function)(*(([a, b],) if function == "logchainexp" else (a, b)))


EVERY = pytest.mark.parametrize("function", [*FUNCTIONS, "logchainexp", "log_partition"])


@EVERY
@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda g: g[:-1], ValueError),
        (lambda g: g[None], ValueError),
        (lambda g: g[..., :1], ValueError),
        (lambda g: np.asarray(2.0), ValueError),
        (lambda g: 2.0, ValueError),
        (lambda g: None, TypeError),
        (lambda g: g.tolist(), TypeError),
        (lambda g: g.astype(int), TypeError),
        (lambda g: g + 0j, TypeError),
        (lambda g: import_or_skip("torch").from_numpy(g), TypeError),
    ],
    ids=["row", "axis", "column", "0-d", "number", "None", "list", "integers", "complex", "torch"],
)
def test_cotangents_that_do_not_fit(function, make, error):
    value, pullback = pullback_of(function, normal(3, 5, 4), normal(4, 4))
    g = np.ones(getattr(value, "values", value).shape)
    shapes = [f"shape {np.shape(make(g))}", g.shape] if error is ValueError else []
    with pytest.raises(error, match=mentions("cotangent", *shapes)):
        pullback(make(g))


@pytest.mark.parametrize("cotangent_dtype", ["float16", "bfloat16", "float32", "float64"])
@EVERY
def test_dtype_of_a_cotangent(torch_backend, function, dtype, cotangent_dtype):
    """It changes neither the library nor the dtype in which the pullback computes."""
    a, b = (torch_backend.asarray(x, dtype) for x in (normal(3, 4), normal(4, 4, seed=1)))
    value, pullback = pullback_of(function, a, b)
    g = torch_backend.xp.ones_like(value[0] if function == "maxplus_matmul" else value)
    result, expected = pullback(g.to(getattr(torch_backend.xp, cotangent_dtype))), pullback(g)
    torch_backend.xp.testing.assert_close(result, expected)


# ----------------------------------------------------------------------------------- many factors


def test_no_factors_give_the_identity(backend, dtype):
    for batch in ((), (2,)):
        empty = backend.asarray(np.empty((*batch, 0, 3, 3)), dtype)
        out = backend.read(alc.logchainexp(empty), dtype)
        assert out.shape == (*batch, 3, 3)
        np.testing.assert_array_equal(out, np.where(np.eye(3) == 1, 0, -INF) * np.ones(out.shape))


def test_one_factor_is_returned_as_it_is(backend, dtype):
    """A copy: writing to the result does not reach the input."""
    stack = backend.asarray(normal(1, 3, 3), dtype)
    out = alc.logchainexp(stack)
    np.testing.assert_array_equal(backend.read(out, dtype), backend.to_numpy(stack)[0])
    before = backend.to_numpy(stack).copy()
    out[0, 0] = 7.0
    np.testing.assert_array_equal(backend.to_numpy(stack), before)


@pytest.mark.parametrize("value", [INF, NAN])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_special_values_in_the_last_factor(backend, dtype, value, n):
    """They enter the last product only; entries that do not depend on them stay finite."""
    stack = normal(n, 3, 3)
    stack[-1, 1, 0] = value
    out = backend.read(alc.logchainexp(backend.asarray(stack, dtype)), dtype)
    np.testing.assert_array_equal(np.isfinite(out), [[False, True, True]] * 3)


@pytest.mark.parametrize("library", ["numpy", "strict", "torch"])
def test_products_in_between_beyond_float32_are_computed_in_float64(library):
    backend, largest = make_backend(library), float(np.finfo("float32").max)
    stack = 0.4 * largest * np.array([np.diag(row) - 1 for row in 2 * np.eye(3)])
    expected = alc.logchainexp(stack)
    for matrices in (stack, list(stack)):
        check_vjp_logchainexp(backend, "float32", matrices)
        arrays = [backend.asarray(x, "float32") for x in matrices]
        out = alc.logchainexp(arrays if isinstance(matrices, list) else backend.xp.stack(arrays))
        assert_within(backend.read(out, "float32"), expected, 1e-6 * largest)


STACKS = {f"{n} factors": np.broadcast_to(normal(3, 3), (n, 3, 3)) for n in (31, 1000)}
FAR = np.array([1e4, -2e4, 1e4])[:, None, None]
STACKS |= {f"large, sd = {sd}": normal(2, 3, 110, 110, sd=sd) + FAR for sd in (1, 100)}


@pytest.mark.parametrize("name", STACKS)
def test_many_factors_and_large_ones_in_little_memory(np_backend, dtype, name):
    """Errors do not grow as the result does; tiles of rows times tiles of columns."""
    stack = STACKS[name].astype(dtype)
    parts = list(np.moveaxis(stack, -3, 0))
    exact = reference.logchainexp(parts)
    bound = error_model.contraction_bound(parts, exact, dtype)
    for workspace in (None, 1 << 20):
        assert_within(alc.logchainexp(stack, workspace=workspace), exact, bound)
