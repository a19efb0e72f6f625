"""Gradients by `vjp.log_partition`: cotangents, and derivatives beyond all numbers."""

import itertools

import numpy as np
import pytest

import arraylogchain as alc
from tests.chain_checks import ChainCase, check_gradients
from tests.chain_scenarios import FORMS, normal, uniform, weights_as
from tests.error_model import EPS
from tests.gradient_checks import COTANGENTS, cotangent

pytestmark = pytest.mark.chains

INF, NAN = np.inf, np.nan


@pytest.mark.parametrize("kind", COTANGENTS)
@pytest.mark.parametrize("form", FORMS)
def test_cotangents(backend, dtype, form, kind):
    options = weights_as(form, uniform(6, 5, 5), uniform(5), uniform(9, 5))
    case = ChainCase(backend, dtype, normal(9, 7, 5, sd=3), **options)
    check_gradients(case, cotangent(kind, (9,), dtype))


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "float64"])
def test_derivatives_beyond_the_dtype(kind, backend):
    """No path may use the edge; several steps of several rows would gain exp(1000) by it."""
    if kind not in backend.dtypes:
        pytest.skip("no such dtype here")
    x, P, initial = np.zeros((4, 8, 2)), np.eye(2), np.asarray([1.0, 0.0])
    x[:, 6, 1] = 1000
    x, P, initial = (backend.asarray(array, kind) for array in (x, P, initial))
    _, pullback = alc.vjp.log_partition(alc.LogChain(x, transitions=P, initial=initial))
    result = backend.to_numpy(pullback(backend.asarray(np.ones(4), kind)).transitions)
    np.testing.assert_array_equal(np.isfinite(result), True)
    assert result[0, 1] > 6e4


def test_derivatives_beyond_the_dtype_of_both_signs(backend):
    """Beside matrices of small weights, each at a step of its own."""
    x = np.full((2, 8, 2), [0.0, -30.0])
    x[0, 3, 1] = x[1, 5, 1] = 30
    arrays = (x, np.asarray([[1e-30, 0], [1e-33, 1e-30]]), np.asarray([1.0, 0.0]))
    potentials, P, initial = (backend.asarray(each, "float32") for each in arrays)
    _, pullback = alc.vjp.log_partition(alc.LogChain(potentials, transitions=P, initial=initial))
    result = pullback(backend.asarray(np.asarray([1.0, -1.0]), "float32")).transitions
    assert np.all(np.isfinite(backend.to_numpy(result)))


@pytest.mark.parametrize("wanted", ["initial", ["log_transitions"], ["x", "initial"]])
def test_wanted_names_are_checked(wanted):
    _, pullback = alc.vjp.log_partition(alc.LogChain(np.zeros((1, 2)), initial=np.ones(2)))
    with pytest.raises(ValueError, match="wanted"):
        pullback(1.0, wanted)


@pytest.mark.parametrize("scale", [1e-30, 1e-25, 1e-20, 1e9, 1e20])
@pytest.mark.parametrize("sd", [1, 8])
def test_cotangents_of_any_size(backend, dtype, sd, scale):
    """Weights of wide rows are kept far from 1; a cotangent must not push them out of range."""
    if backend.name == "strict-no_float64":
        scale = max(scale, 1e-20)  # there the wider range is missing
    rng = np.random.default_rng(0)
    x, transitions = sd * rng.normal(size=(2, 12, 4)), rng.random((1, 4, 4))
    options = {"transitions": transitions, "initial": np.ones(4)}
    check_gradients(ChainCase(backend, dtype, x, **options), np.full(2, scale))


def chains_with_cotangents():
    """Yield names, dtypes, and chains with cotangents far from 1."""
    for form, kind in itertools.product(FORMS, EPS):
        x = np.where(np.arange(2) == 1, 50.0, np.zeros((2, 12, 2)))
        weights = weights_as(form, np.array([[[1, 0], [0.5, 0.5]]]), np.array([1, 0]))
        yield f"large, a state out of reach, {form}, {kind}", kind, {"x": x, **weights}, [1e9, 1]
    # The size of other columns is not rounded into derivatives by those without edges.
    edges = np.array([[0, 0.3, 0], [0, 0.7, 0], [0, 0.5, 0]]) * 1e228
    x, final = normal(2, 2, 3, sd=0.1), np.array([[0.4, 0.3, 0.2], [0, 1, 0]])
    x[1, 0] = [0, -1000, 0]
    weights = {"transitions": np.stack([edges, np.eye(3)])[:, None], "final": final}
    yield "columns without edges beside a row in logs", "float64", {"x": x, **weights}, [1, 1]
    for seed in (243, 251, 258, 261):
        rng = np.random.default_rng(seed)
        rows, steps, states = rng.integers(2, 9), rng.integers(2, 9), rng.integers(2, 7)
        x = rng.normal(size=(rows, steps, states)) * rng.choice([100, 300, 1000])
        edges = rng.normal(size=(1, states, states)) * rng.choice([1, 100, 300])
        for size in (1, 1e-100):
            options = {"x": x, "log_transitions": edges}
            yield f"{size} of wide weights, {seed}", "float64", options, np.full(rows, size)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        x, L = rng.normal(size=(3, 3, 2)), rng.normal(size=(2, 2))
        x[..., 0] -= 2000.0 * rng.integers(2)
        L[0, 0] = -INF
        options = {"x": x, "log_transitions": L, "lengths": [3, 2, 1]}
        yield f"1e-200 of logs, {seed}", "float64", options, rng.uniform(0.1, 1, 3) * 1e-200


CHAINS = {name: row for name, *row in chains_with_cotangents()}


@pytest.mark.parametrize("name", CHAINS)
def test_cotangents_far_from_one(np_backend, name):
    """A cotangent is a factor of the gradient, and of its errors, whatever its size."""
    kind, options, g = CHAINS[name]
    check_gradients(ChainCase(np_backend, kind, **options), np.array(g))


def test_views_and_an_expanded_cotangent(dtype):
    x, transitions = normal(5, 3, 4).astype(dtype), uniform(4, 4, 4).astype(dtype)
    viewed = alc.LogChain(x.swapaxes(0, 1), transitions=np.asfortranarray(transitions[::-1])[::-1])
    plain = alc.LogChain(x.swapaxes(0, 1).copy(), transitions=transitions)
    ours = alc.vjp.log_partition(viewed)[1](np.broadcast_to(np.asarray(2.0, dtype), (3,)))
    expected = alc.vjp.log_partition(plain)[1](np.full(3, 2.0, dtype))
    for a, b in zip(ours[:2], expected[:2], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e3 * EPS[dtype], atol=1e3 * EPS[dtype])


@pytest.mark.parametrize("size", [1e-200, 1e200])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_cotangents_bring_gradients_into_range(size, sign):
    """Cotangents scale gradients into range that overflow or underflow for a cotangent of 1."""
    x, cotangent = np.array([[0, -1.8 * np.log(size)], [0, 0]]), np.array(sign * size)
    expected = pytest.approx(sign * size**-0.8, rel=1e-12)
    chain = alc.LogChain(x, transitions=np.array([[[1.0, 0], [0, 0]]]))
    assert alc.vjp.log_partition(chain)[1](cotangent).transitions[0, 1, 0] == expected
    chain = alc.LogChain(x[:1], initial=np.array([1.0, 0]))
    assert alc.vjp.log_partition(chain)[1](cotangent).initial[1] == expected


def test_cotangents_as_large_as_numbers_are(np_backend, dtype):
    potentials, P = (np_backend.asarray(np.ones(n), dtype) for n in ((3, 2), (600, 1, 2, 2)))
    _, pullback = alc.vjp.log_partition(alc.LogChain(potentials, transitions=P))
    highest = float(np.finfo(dtype).max)
    opposite = pullback(np.repeat([highest / 9, -highest / 9], 300).astype(dtype)).log_potentials
    assert np.all(np.abs(opposite) < 1e-5 * highest)
    np.testing.assert_allclose(pullback(np.full(600, highest)).log_potentials, highest)


def test_nan_without_a_cotangent():
    """Zero times NaN is NaN, in the row that has it; rows without a path have no derivatives."""
    x = np.zeros((3, 4, 2))
    x[1, 2, 0], x[2, 1] = np.nan, -np.inf
    chain = alc.LogChain(x, transitions=np.full((1, 2, 2), 0.5))
    gradient = alc.vjp.log_partition(chain)[1](np.zeros(3)).log_potentials
    assert np.all(np.isnan(gradient[1]))
    assert np.all(gradient[[0, 2]] == 0)


@pytest.mark.parametrize("tiny", [1e-300, 1e-304, 1e-306, 1e-308, 5e-324])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_derivatives_saturate_at_the_largest_number(tiny, sign):
    """Of transitions that are taken twice, and counts that are 2 whatever the derivative."""
    x, largest = np.array([[0, -2000.0], [0, 0], [0, -2000]]), np.finfo(float).max
    chain = alc.LogChain(x, transitions=np.array([[[tiny, 0], [0, 1]]]))
    np.testing.assert_allclose(chain.expected_transitions(), [[[2, 0], [0, 0]]], rtol=1e-12)
    gradient = alc.vjp.log_partition(chain)[1](np.array(sign)).transitions[0, 0, 0]
    expected = sign * min(2 / np.longdouble(tiny), np.longdouble(largest))
    assert gradient == pytest.approx(float(expected), rel=1e-12)
    float32 = alc.LogChain(x.astype("f4"), transitions=np.array([[[1e-44, 0], [0, 1]]], "f4"))
    gradient = alc.vjp.log_partition(float32)[1](np.array(sign)).transitions[0, 0, 0]
    # Array operations clip its log, of which float32 has 4 digits after the point.
    assert gradient == pytest.approx(sign * float(np.finfo(np.float32).max), rel=2e-4)


def test_rows_that_fail_different_proofs():
    """Linear rows whose cotangent or shift is out of range are computed in log space."""
    x = np.random.default_rng(0).normal(size=(3, 4, 2))
    x[1] += 2.0**53
    matrix = np.array([[0.5, 0.5], [0.25, 0.75]])
    _, pullback = alc.vjp.log_partition(alc.LogChain(x, transitions=matrix))
    cotangents = np.array([1e-300, 1.0, 2.0])
    result = pullback(cotangents)
    sums = np.broadcast_to(cotangents[:, None], (3, 4))
    np.testing.assert_allclose(result.log_potentials.sum(axis=-1), sums, rtol=1e-12)
    assert (result.transitions * matrix).sum() == pytest.approx(9.0)


@pytest.mark.parametrize("sd", [1, 300])
@pytest.mark.parametrize("form", FORMS)
def test_a_nan_row_stays_with_itself(sd, form):
    """It has no part in matrices that lead to steps past its end."""
    x, matrices, lengths = normal(3, 5, 3, sd=sd), uniform(4, 3, 3), np.array([5, 2, 4])
    x[1] = NAN

    def gradients(rows, cotangents):
        chain = alc.LogChain(x[rows], **weights_as(form, matrices), lengths=lengths[rows])
        return alc.vjp.log_partition(chain)[1](cotangents)

    expected = gradients([0, 2], np.ones(2))
    result = gradients([0, 1, 2], np.array([1, NAN, 1]))
    np.testing.assert_allclose(result.log_potentials[[0, 2]], expected.log_potentials, rtol=1e-10)
    np.testing.assert_allclose(result.transitions[1:], expected.transitions[1:], rtol=1e-10)
    assert np.all(np.isnan(result.transitions[0]))


@pytest.mark.parametrize("level", [1e16, -1e16])
def test_counts_of_transitions_of_one_huge_level(level):
    """Beyond 2**53 not even differences of scales are exact, unless they begin with 0."""
    chain = alc.LogChain(normal(3, 6, 3), log_transitions=level + normal(3, 5, 3, 3, sd=3))
    assert chain.expected_transitions().sum() == pytest.approx(15, rel=1e-12)
    np.testing.assert_allclose(chain.marginals().sum(axis=-1), 1.0, rtol=1e-12)


def test_levels_that_weights_share(np_backend):
    """A common factor of all transitions changes no count, and neither do opposite potentials."""
    T, K, level = 50, 4, 1e16
    x = normal(T, K)
    x[:, 0] -= 3000
    chain = alc.LogChain(x, log_transitions=np.full((K, K), level))
    p = chain.marginals()
    counts = np.einsum("ti,tj->ij", p[:-1], p[1:])  # steps are independent
    np.testing.assert_allclose(chain.expected_transitions(), counts, rtol=1e-12, atol=1e-12)
    for level, dtype in ((2.0**25, np.float32), (2.0**57, np.float64)):
        x = np.where(np.arange(K) == 0, -INF, np.full((T, K), -level)).astype(dtype)
        weights = np.full((K, K), level, dtype)
        chain = alc.LogChain(x, log_transitions=weights, log_initial=weights[0])
        np.testing.assert_allclose(chain.filtered().log_normalizers, np.log(3), rtol=1e-5)
        if dtype == np.float32:
            np.testing.assert_allclose(chain.log_partition(), T * np.log(3), rtol=1e-5)


def test_levels_past_all_numbers(backend, dtype):
    """Log Z is infinite by its shift alone, on which no gradient depends."""
    x = np.zeros((2, 5, 2))
    x[0, 3:] = np.finfo(dtype).min
    chain = ChainCase(backend, dtype, x, transitions=uniform(1, 2, 2)).chain
    for result in (chain.marginals(), chain.entropy()):
        np.testing.assert_allclose(*backend.to_numpy(result), rtol=1e-5)
