"""logeinsumexp and maxplus_einsum: any equation, against long double."""

import importlib
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import arraylogchain as alc
from tests import reference
from tests.checks import mentions
from tests.conftest import make_backend
from tests.error_model import assert_within, contraction_bound, contraction_gradient_bound
from tests.gradient_reference import Gradient
from tests.test_properties import entries
from tests.test_workspace import temporaries

opt_einsum = pytest.importorskip("opt_einsum")

# Equations of torch-semiring-einsum's documentation and tests, and of numpy.einsum's.
EQUATIONS = [
    ("a,a,a->a", [(3,), (3,), (3,)]),
    ("a,ab,b->b", [(3,), (3, 4), (4,)]),
    ("abc,bcd->ad", [(2, 3, 4), (3, 4, 5)]),
    ("ijk,jil->kl", [(3, 4, 2), (4, 3, 5)]),
    ("abc,adef,dgh,beg,cfh->abcdefgh", None),
    ("bik,bkj->bij", [(2, 3, 4), (2, 4, 5)]),
    ("bhqd,bhkd->bhqk", [(2, 3, 4, 5), (2, 3, 6, 5)]),
    ("i,j->ij", [(3,), (4,)]),
    ("ij,ij->", [(3, 4), (3, 4)]),
    ("ii->i", [(4, 4)]),
    ("iij,jk->k", [(3, 3, 2), (2, 5)]),
    ("iji->j", [(3, 2, 3)]),
    ("iii->i", [(3, 3, 3)]),
    ("jiijk,ki->jk", [(2, 3, 3, 2, 4), (4, 3)]),
    ("ii", [(4, 4)]),
    ("ba", [(2, 3)]),
    ("ij,jk", [(2, 3), (3, 4)]),
    ("...ij,...jk", [(5, 1, 2, 3), (4, 3, 6)]),
    ("i...->...", [(3, 4, 2)]),
    ("...,ij...->j...", [(2,), (3, 4, 2)]),
    ("ij,jk->ik", [(2, 1), (3, 4)]),
    (",ij->ji", [(), (2, 3)]),
    (",,->", [(), (), ()]),
    ("ij,kl->", [(2, 3), (4, 5)]),
    ("ab,bc,cd,de,ef,fg,gh,hi->ai", [(3, 3)] * 8),
    ("ij,jk->ik", [(2, 0), (0, 3)]),
    ("ij,jk->ik", [(0, 2), (2, 3)]),
]
SIZES = dict(zip("abcdefgh", (2, 3, 1, 2, 3, 2, 1, 2), strict=True))


def all_terms(equation, operands):
    """Return all terms, sums of entries, in long double; indices of the output come first."""
    inputs, output, _ = opt_einsum.parser.parse_einsum_input((equation, *operands))
    inputs = inputs.split(",")
    indices = output + "".join(dict.fromkeys(c for c in "".join(inputs) if c not in output))
    shape = [1] * len(indices)
    total = np.zeros(shape, np.longdouble)
    for term, x in zip(inputs, map(reference.wide, operands), strict=True):
        for c in set(term):
            while term.count(c) > 1:
                first, second = [i for i, other in enumerate(term) if other == c][:2]
                x = np.moveaxis(np.diagonal(x, 0, first, second), -1, first)
                term = term[:second] + term[second + 1 :]
        x = np.transpose(x, [term.index(c) for c in indices if c in term])
        x = np.expand_dims(x, [i for i, c in enumerate(indices) if c not in term])
        with np.errstate(invalid="ignore"):
            total = total + x
    return total, len(output)


def check_einsum(backend, dtype, equation, operands, **options):
    """Check values of both einsums, and gradients."""
    operands = [np.asarray(x).astype(dtype if dtype != "bfloat16" else "float32") for x in operands]
    arrays = [backend.asarray(x, dtype) for x in operands]
    operands = [np.asarray(backend.to_numpy(x)) for x in arrays]
    terms, count = all_terms(equation, operands)
    axes = tuple(range(count, terms.ndim))
    K = math.prod(terms.shape[count:])
    exact = reference.logsumexp(terms, axes)
    out = alc.logeinsumexp(equation, *arrays, **options)
    assert_within(backend.read(out, dtype), exact, contraction_bound(operands, exact, dtype, K))
    best = np.max(terms, axis=axes, initial=-np.inf)
    best = np.where(np.any(np.isnan(terms), axis=axes), np.nan, best)
    result = backend.read(alc.maxplus_einsum(equation, *arrays, **options), dtype)
    assert_within(result, best, contraction_bound(operands, best, dtype, K))


@pytest.mark.parametrize(("equation", "shapes"), EQUATIONS, ids=[e for e, _ in EQUATIONS])
def test_equations(backend, dtype, equation, shapes):
    shapes = shapes or [tuple(SIZES[c] for c in t) for t in equation.split("->")[0].split(",")]
    rng = np.random.default_rng(0)
    operands = [rng.normal(0, 3, shape) for shape in shapes]
    check_einsum(backend, dtype, equation, operands)
    check_gradients(backend, dtype, equation, operands)


def test_results_in_between_are_not_rounded_to_half_precision(backend, half):
    rng = np.random.default_rng(0)
    operands = [rng.normal(0, 3, shape) for shape in ((3, 40), (40, 50), (50, 20), (20, 3))]
    check_einsum(backend, half, "ij,jk,kl,li->i", operands)


def test_mixed_dtypes_are_promoted_first():
    a, b = (np.random.default_rng(0).normal(size=n).astype("f4") for n in ((4, 200), (50, 4)))
    result, same = (alc.logeinsumexp("ba,cb->b", a.astype(float), x) for x in (b, b.astype(float)))
    np.testing.assert_array_equal(result, same)


@st.composite
def problems(draw):
    """Draw an equation and its operands; some axes broadcast."""
    sizes = {c: draw(st.integers(0, 3)) for c in "abcd"}
    common = draw(st.lists(st.integers(1, 2), max_size=2))
    inputs, operands = [], []
    for _ in range(draw(st.integers(1, 4))):
        term = draw(st.text("abcd", max_size=3))
        lengths = {c: sizes[c] if draw(st.integers(0, 4)) else 1 for c in term}
        shape = [lengths[c] for c in term]
        if common and draw(st.booleans()):
            cut = draw(st.integers(0, len(term)))
            batch = [n if draw(st.booleans()) else 1 for n in common]
            batch = batch[draw(st.integers(0, len(batch))) :]
            term, shape = f"{term[:cut]}...{term[cut:]}", shape[:cut] + batch + shape[cut:]
        inputs.append(term)
        operands.append(draw(entries(tuple(shape))))
    equation = ",".join(inputs)
    if draw(st.booleans()):
        letters = sorted(set(equation) - set(",."))
        output = draw(st.permutations(letters))[: draw(st.integers(0, 3))]
        equation = f"{equation}->{'...' if '...' in equation else ''}{''.join(output)}"
    return equation, operands


@given(problem=problems(), dtype=st.sampled_from(["float32", "float64"]))
def test_any_equation(problem, dtype):
    check_einsum(make_backend("numpy"), dtype, *problem)


@given(problem=problems(), name=st.sampled_from(["strict", "strict-no_float64", "torch"]))
def test_any_equation_elsewhere(problem, name):
    check_einsum(make_backend(name), "float32", *problem)


ZEROS = np.zeros((3, 3))
RANGES = {
    "what underflows decides": (
        np.array([[0.0, -800.0], [-np.inf, -np.inf]]),
        np.array([[-800.0, -np.inf], [0.0, -np.inf]]),
        np.array([[-1e5], [0.0]]),
    ),
    **{str(x): (np.where(np.eye(3, k=1) > 0, x, 0), ZEROS, ZEROS) for x in (np.inf, np.nan)},
}


@pytest.mark.parametrize("name", RANGES)
def test_ranges_and_special_values(np_backend, name):
    check_einsum(np_backend, "float64", "ij,jk,kl->il", RANGES[name])


def far(*parts):
    """Return operands whose entries are fractions of the largest number."""
    return [np.array(part) for part in parts]


# Fractions of the largest number: partial sums exceed it, but the sum does not.
FAR = {
    "constants": ("ij,jk,kl->il", far(*(np.full((2, 2), x) for x in (-0.6, -0.6, 0.9)))),
    "numbers": (",,->", far(-0.6, -0.6, 0.9)),
    "beside zeros": ("i,i,ij->j", far([-0.6, -np.inf], [-0.6, 0.9], [[0.9, -np.inf], [0.0, 0.0]])),
    "outer product": ("i,j,k->ijk", far([0.6, 0.5], [0.6, 0.6], [-0.9, -0.7])),
    "four": ("i,i,i,i->i", far([0.9], [0.9], [-0.9], [-0.9])),
}
# Accurate only in a wider dtype.
CROSSED = {
    "crossed": ("i,i,i->", far([0.9, 0.0, 0.0], [0.0, 0.9, 0.0], [0.0, 0.0, 0.9])),
    "opposite": ("ij,jk,kl->il", far([[0.9, -0.9]], [[0.5, 0.0], [0.5, 0.0]], [[-0.9], [0.9]])),
    "beside infinity": ("ij,jk,kl->il", far([[np.inf], [-0.6]], [[-0.6]], [[0.9]])),
}


@pytest.mark.parametrize("name", FAR)
def test_partial_sums_beyond_all_numbers_give_the_total(backend, dtype, name):
    equation, parts = FAR[name]
    inputs, output = equation.split("->")
    largest = float(np.finfo(dtype).max)
    for order in itertools.permutations(zip(inputs.split(","), parts, strict=True)):
        terms, operands = zip(*order, strict=True)
        reordered = f"{','.join(terms)}->{output}"
        check_einsum(backend, dtype, reordered, [largest * x for x in operands])
        check_gradients(backend, dtype, reordered, [largest * x for x in operands])


@pytest.mark.parametrize("library", ["numpy", "strict", "torch"])
@pytest.mark.parametrize("name", CROSSED)
def test_partial_sums_beyond_float32_are_computed_in_float64(library, name):
    equation, parts = CROSSED[name]
    operands = [float(np.finfo("float32").max) * x for x in parts]
    for check in (check_einsum, check_gradients):
        check(make_backend(library), "float32", equation, operands)


def test_totals_beyond_all_numbers_are_infinite_and_without_gradients(backend, dtype):
    largest = float(np.finfo(dtype).max)
    for sign in (1, -1):
        operands = [backend.asarray(np.full((2, 2), sign * 0.6 * largest), dtype)] * 3
        value, pullback = alc.vjp.logeinsumexp("ij,jk,kl->il", *operands)
        assert np.all(backend.to_numpy(value) == sign * np.inf)
        for gradient in pullback(backend.asarray(np.ones((2, 2)), dtype)):
            assert not np.any(backend.to_numpy(gradient))


def test_partial_sums_beyond_all_numbers_have_gradients_of_tensors(torch_backend, dtype):
    equation, parts = FAR["constants"]
    largest = float(np.finfo(dtype).max)
    operands = [torch_backend.asarray(largest * x, dtype).requires_grad_() for x in parts]
    alc.logeinsumexp(equation, *operands).sum().backward()
    for x in operands:
        np.testing.assert_allclose(x.grad.numpy(), 1.0, rtol=1e-5)


# ------------------------------------------------------------------------------------- gradients


def gradients_of(equation, operands, g):
    """Return the gradients of sum(g * logeinsumexp), from posterior weights in long double."""
    terms, count = all_terms(equation, operands)
    axes = tuple(range(count, terms.ndim))
    exact = reference.logsumexp(terms, axes)
    with np.errstate(all="ignore"):
        p = np.exp(terms - np.expand_dims(exact, axes))
    p = np.where(np.isfinite(p), p, 0) * np.ones_like(terms)
    inputs, output, _ = opt_einsum.parser.parse_einsum_input((equation, *operands))
    indices = output + "".join(dict.fromkeys(c for c in inputs if c not in output + ","))
    g = np.expand_dims(reference.wide(g), axes)
    for term, x in zip(inputs.split(","), operands, strict=True):
        sums = [np.einsum(f"{indices}->{''.join(dict.fromkeys(term))}", h * p) for h in (g, abs(g))]
        unit = np.einsum(f"{indices}->{''.join(dict.fromkeys(term))}", abs(g) + 0 * p)
        exact, mass, scale = (scatter_gradient(y, term, x.shape) for y in (*sums, unit))
        size = terms.size // max(x.size, 1)
        yield Gradient(exact, mass, np.zeros_like(mass), scale, size)


def scatter_gradient(y, term, shape):
    """Return gradients with respect to diagonals or broadcast axes in the operand's shape."""
    unique = "".join(dict.fromkeys(term))
    lengths = dict(zip(term, shape, strict=True))
    summed = tuple(i for i, c in enumerate(unique) if lengths[c] != y.shape[i])
    y = np.sum(y, axis=summed, keepdims=True)
    out = np.zeros(shape, np.longdouble)
    grid = dict(zip(unique, np.indices(y.shape, sparse=True), strict=True))
    out[tuple(grid[c] for c in term)] = y
    return out


def check_gradients(backend, dtype, equation, operands):
    arrays = [backend.asarray(x.astype(dtype)) for x in operands]
    operands = [np.asarray(backend.to_numpy(x)) for x in arrays]
    value, pullback = alc.vjp.logeinsumexp(equation, *arrays)
    assert_within(
        backend.read(value, dtype),
        backend.to_numpy(alc.logeinsumexp(equation, *arrays)),
        0,
    )
    g = np.random.default_rng(1).normal(size=value.shape).astype(dtype)
    result = pullback(backend.asarray(g))
    terms, count = all_terms(equation, operands)
    K = math.prod(terms.shape[count:])
    for x, out, exact in zip(operands, result, gradients_of(equation, operands, g), strict=True):
        assert out.shape == x.shape
        bound = contraction_gradient_bound(operands, exact, dtype, K)
        assert_within(backend.read(out, dtype), exact.exact, bound)


@given(problem=problems(), dtype=st.sampled_from(["float32", "float64"]))
def test_gradients_of_any_equation(problem, dtype):
    check_gradients(make_backend("numpy"), dtype, *problem)


def test_gradients_through_infinite_entries_are_zero(torch_backend):
    torch = torch_backend.xp
    for equation in ("i,i->i", "i,j->ij", "ij->ji", "ij,jk,kl->il"):
        shapes = [(2,) * len(term) for term in equation.split("->")[0].split(",")]
        arrays = [np.full(shape, -np.inf) for shape in shapes]
        value, pullback = alc.vjp.logeinsumexp(equation, *arrays)
        assert len({y.ctypes.data for y in pullback(np.ones(value.shape))}) == len(arrays)
        tensors = [torch.from_numpy(x).requires_grad_() for x in arrays]
        alc.logeinsumexp(equation, *tensors).sum().backward()
        for x, y in zip(tensors, pullback(np.ones(value.shape)), strict=True):
            assert not np.any(y)
            assert not x.grad.any()


TORCH_EQUATIONS = [
    ("ij,jk->ik", [(2, 3), (3, 2)]),
    ("ii,ij,kj->k", [(2, 2), (2, 3), (2, 3)]),
    ("i,j->ij", [(2,), (3,)]),
    ("...ij,...j", [(2, 2, 3), (1, 3)]),
]
torch_equations = pytest.mark.parametrize(("equation", "shapes"), TORCH_EQUATIONS)
forward_mode = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def tensors(torch, shapes):
    rng = np.random.default_rng(0)
    return [torch.from_numpy(rng.normal(size=shape)).requires_grad_() for shape in shapes]


@forward_mode
@torch_equations
@pytest.mark.parametrize("function", [alc.logeinsumexp, alc.maxplus_einsum])
def test_autograd(torch_backend, function, equation, shapes):
    torch = torch_backend.xp
    operands = tensors(torch, shapes)

    def f(*operands):
        return function(equation, *operands)

    assert torch.autograd.gradcheck(f, operands, check_forward_ad=function is alc.logeinsumexp)
    assert torch.autograd.gradgradcheck(f, operands)


@forward_mode
@torch_equations
def test_transforms(torch_backend, equation, shapes):
    torch = torch_backend.xp
    stacked = [x.detach() for x in tensors(torch, [(4, *shape) for shape in shapes])]

    def f(*operands):
        return alc.logeinsumexp(equation, *operands)

    out = torch.func.vmap(torch.func.grad(lambda *x: f(*x).sum()))(*stacked)
    for i in range(4):
        row = [x[i].requires_grad_() for x in stacked]
        (g,) = torch.autograd.grad(f(*row).sum(), row[:1])
        torch.testing.assert_close(out[i], g)


# ------------------------------------------------------------ memory, threads, order and errors


def test_broadcasts_are_not_expanded():
    """[64, 300, 8, 1] and [8, 300, 40] broadcast against each other without an expanded array."""
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=s).astype("float32") for s in ((64, 300, 8, 1), (1, 300, 8, 40)))
    used = temporaries(lambda: alc.logeinsumexp("akbx,xkbj->abj", a, b, workspace=1 << 20))
    assert used <= (1 << 20) + a.nbytes + b.nbytes
    assert temporaries(lambda: alc.logeinsumexp("abij->", a, workspace=1 << 20)) <= 1 << 20


@pytest.mark.parametrize(
    ("equation", "shape"),
    [("ii->i", (900, 900)), ("ii->", (900, 900)), ("iji->j", (300, 9, 300)), ("iii", (90,) * 3)],
)
def test_of_repeated_indices_only_the_diagonal_is_read(equation, shape):
    x = np.random.default_rng(0).normal(size=shape)
    for function in (alc.logeinsumexp, alc.maxplus_einsum):
        assert temporaries(lambda f=function: f(equation, x)) <= 1 << 18 < x.nbytes
    value, pullback = alc.vjp.logeinsumexp(equation, x)
    assert temporaries(lambda: pullback(np.ones(value.shape))) <= 1 << 18


@pytest.mark.parametrize("sd", [1, 1000])
def test_workspace_is_kept(sd):
    rng = np.random.default_rng(0)
    shapes = ((30, 100, 100), (100, 150), (150, 60))
    operands = [rng.normal(0, sd, shape).astype("float32") for shape in shapes]
    equation = "bij,jk,kl->bil"
    between = (
        4 * 30 * 100 * 150
    )  # bytes of the intermediate result in one order, which is less in the other

    def call():
        return alc.logeinsumexp(equation, *operands, workspace=1 << 20)

    assert temporaries(call) <= between + (1 << 20)


PATHS = [[(0, 1, 2)], [(1, 2), (0, 1)], [(0,), (0, 1), (0, 1)], [], [(2, 0)]]


@pytest.mark.parametrize("optimize", ["optimal", "greedy", False, *PATHS])
def test_any_order_gives_the_same(optimize):
    rng = np.random.default_rng(0)
    operands = [rng.normal(size=shape) for shape in ((3, 4), (4, 5), (5, 2))]
    check_einsum(make_backend("numpy"), "float64", "ab,bc,cd->ad", operands, optimize=optimize)


@pytest.mark.parametrize(
    "optimize",
    ["fast", 3.5, [(0, 5)], [()], [0, 1], [("a", "b")], (((0, 1),),), {"a": 1}],
    ids=str,
)
def test_errors_about_the_order(optimize):
    x, equations = np.zeros((2, 2)), ["ab,bc,cd"]
    if isinstance(optimize, str):
        equations += ["ab,bc", "ab->b", "ab"]
    for equation in equations:
        operands = [x] * (equation.count(",") + 1)
        for call in (alc.logeinsumexp, alc.maxplus_einsum, alc.vjp.logeinsumexp):
            with pytest.raises(ValueError, match=mentions(equation, f"optimize={optimize!r}")):
                call(equation, *operands, optimize=optimize)


@pytest.mark.parametrize(
    ("equation", "shapes", "words"),
    [
        ("ij,jk->ik", [(2, 3), (4, 5)], ("(2, 3), (4, 5)", "'j'")),
        ("ij,jk->ik", [(2, 3)], ("operands, 1",)),
        ("...ij,...jk->ik", [(2, 3)], ("(2, 3)",)),
        ("ijk->i", [(2, 3)], ("(2, 3)", "'ijk'")),
        ("i->i", [(2, 3)], ("(2, 3)", "'i'")),
        ("ii->i", [(2, 3)], ("(2, 3)", "'i'")),
        ("ii->i", [(1, 3)], ("(1, 3)", "'ii'", "different lengths")),
        ("ij->ii", [(2, 3)], ("'i'", "more than once")),
        ("ij->k", [(2, 3)], ("'k'", "did not appear")),
        ("i-j->k", [(2, 3)], ("'->'",)),
        ("i......->i", [(2, 3)], ("Ellipses",)),
    ],
)
def test_errors(equation, shapes, words):
    operands = [np.zeros(shape) for shape in shapes]
    for call in (alc.logeinsumexp, alc.maxplus_einsum, alc.vjp.logeinsumexp):
        with pytest.raises(ValueError, match=mentions(*words)):
            call(equation, *operands)


def test_errors_about_what_is_no_array():
    with pytest.raises(TypeError, match=mentions("equation", "string")):
        alc.logeinsumexp(np.zeros(2), "i")
    with pytest.raises(TypeError, match=mentions("operands[1]", "list")):
        alc.logeinsumexp("i,i", np.zeros(2), [0.0, 1.0])
    with pytest.raises(TypeError, match=mentions("operands[1]", "int64")):
        alc.logeinsumexp("i,i", np.zeros(2), np.zeros(2, int))


def test_without_opt_einsum(monkeypatch):
    monkeypatch.setitem(importlib.sys.modules, "opt_einsum", None)
    with pytest.raises(ImportError, match=mentions("opt_einsum", "'arraylogchain[einsum]'")):
        alc.logeinsumexp("i,i", np.zeros(2), np.zeros(2))
