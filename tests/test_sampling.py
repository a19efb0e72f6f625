"""LogChain.sample: paths as often as their weights say, and never one of weight 0.

Frequencies are compared by chi-square tests, with fixed seeds. Were the library to change how it
uses random numbers, a right one would fail one of them with a probability of at most 1e-6: each of
the at most 1000 tests in this file has a level of 1e-9.
"""

import tracemalloc

import numpy as np
import pytest
from scipy import stats

import arraylogchain as alc
from tests import gradient_reference, reference
from tests.checks import CHAIN_SHAPES, mentions
from tests.path_checks import MIXED_FORMS, Case, given_in_forms
from tests.test_chain import FORMS, given_as, normal, uniform

pytestmark = pytest.mark.chains

INF = np.inf
LEVEL = 1e-9
# Fewer are expected in a cell of a chi-square test at the least; others are put together.
SMALLEST_CELL = 25


def assert_frequencies(counts, expected, level=LEVEL, lost=0):
    """Compare counts with what is expected of them, `lost` being the estimated parameters."""
    counts, expected = np.ravel(counts).astype(float), np.ravel(expected).astype(float)
    assert not np.any(counts[expected == 0]), "a draw that has no probability"
    order = np.argsort(-expected)
    counts, expected = counts[order], expected[order]
    rare = expected < SMALLEST_CELL
    cells = [
        (counts[~rare], expected[~rare]),
        (counts[rare].sum()[None], expected[rare].sum()[None]),
    ]
    counts, expected = (np.concatenate(parts) for parts in zip(*cells, strict=True))
    kept = expected > 1e-3 * SMALLEST_CELL
    counts, expected = counts[kept], expected[kept]
    freedom = len(counts) - 1 - lost
    if freedom > 0:
        distance = np.sum((counts - expected) ** 2 / expected)
        assert stats.chi2.sf(distance, freedom) > level, f"chi-square {distance} of {freedom}"


def draw(case, count, seed=0):
    """Return samples, having checked their type and that each is a path of positive weight."""
    states = case.read(case.chain.sample(count, np.random.default_rng(seed)), "int64")
    batch = case.lattice.x.shape[:-2]
    assert states.shape == (count, *batch, case.steps)
    assert np.all((states >= 0) & (states < max(case.size, 1)))
    case.given.assert_unchanged()
    return states


def assert_possible(case, states):
    """Every path has a weight, but those of rows that have none: these are 0."""
    possible = np.isfinite(reference.best_path(case.lattice).log_weight)
    weights, _ = reference.path_weights(states, case.lattice)
    np.testing.assert_array_equal(np.isfinite(weights), np.broadcast_to(possible, weights.shape))
    assert not np.any(states[:, ~possible])


def assert_paths(case, states):
    """Compare the frequencies of all paths with their shares, in every row."""
    _, weights = reference.enumerate_paths(case.lattice)
    shares = np.exp(weights - reference.logsumexp(weights, axis=-1)[..., None])
    code = states @ case.size ** np.arange(case.steps)[::-1]
    for at in np.ndindex(shares.shape[:-1]):
        counts = np.bincount(code[(slice(None), *at)], minlength=shares.shape[-1])
        assert_frequencies(counts, len(states) * shares[at])


@pytest.mark.parametrize("forms", MIXED_FORMS)
@pytest.mark.parametrize("T", [1, 2, 4])
def test_paths_are_drawn_by_their_weights(backend, dtype, forms, T):
    options = given_in_forms(forms, uniform(T - 1, 3, 3), uniform(3))
    case = Case(backend, dtype, normal(2, T, 3), **options)
    assert_paths(case, draw(case, 10_000))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("x", "transitions", "initial"), CHAIN_SHAPES)
def test_batch_axes(backend, form, x, transitions, initial):
    start = None if initial is None else uniform(*initial)
    options = given_as(form, uniform(*transitions, seed=1), start)
    case = Case(backend, "float32", normal(*x), **options)
    states = draw(case, 600)
    batch = np.broadcast_shapes(x[:-2], transitions[:-3], () if initial is None else initial[:-1])
    assert states.shape == (600, *batch, x[-2])
    if x[-1] == 0:
        assert not np.any(states)
        return
    marginals = case.read(case.chain.marginals()).reshape(-1, *x[-2:])
    rows = states.reshape(600, *marginals.shape[:-1])
    for row, step in np.ndindex(marginals.shape[:-1]):
        counts = np.bincount(rows[:, row, step], minlength=x[-1])
        # All steps of all rows together are one test.
        assert_frequencies(counts, 600 * marginals[row, step], LEVEL / marginals.size)


def assert_pairs(case, states):
    """Compare how often neighbouring states follow each other with their posterior."""
    T, K = case.steps, case.size
    x, edges, initial = case.arguments
    edges = np.broadcast_to(edges, (*edges.shape[:-3], T - 1, K, K))
    exact = gradient_reference.chain(x, edges, initial)
    for t in range(T - 1):
        code = states[..., t] * K + states[..., t + 1]
        counts = np.bincount(code, minlength=K * K)
        assert_frequencies(counts, len(states) * exact.counts.exact[t], LEVEL / T)


@pytest.mark.parametrize("forms", MIXED_FORMS)
@pytest.mark.parametrize("sd", [1, 30])
def test_pairs_of_larger_chains(backend, dtype, forms, sd):
    options = given_in_forms(forms, uniform(14, 6, 6) ** 3, uniform(6))
    case = Case(backend, dtype, normal(15, 6, sd=sd), **options)
    states = draw(case, 4000)
    assert_pairs(case, states)
    assert_possible(case, states)


@pytest.mark.parametrize("kind", ["plain", "hardly mixing", "left to right"])
def test_pairs_of_long_chains(np_backend, dtype, kind):
    """Chains that are cut into segments where that is cheaper."""
    T, K = 150, 4
    transitions = uniform(T - 1, K, K) + 0.01
    if kind == "hardly mixing":
        transitions = np.eye(K) + 0.01 * transitions
    elif kind == "left to right":
        transitions = np.eye(K) + 0.01 * np.eye(K, k=1) * transitions
    case = Case(np_backend, dtype, normal(T, K, sd=0.3), transitions=transitions)
    states = draw(case, 2000)
    assert_pairs(case, states)
    assert_possible(case, states)


@pytest.mark.parametrize("T", [2000, pytest.param(20_000, marks=pytest.mark.exhaustive)])
def test_single_long_path_is_a_markov_chain(backend, dtype, T):
    """Normalised transitions and no potentials: the prior. Every step is a draw of its own."""
    K = 3
    P = np.array([[0.9, 0.1, 0.0], [0.05, 0.9, 0.05], [0.2, 0.3, 0.5]])
    case = Case(backend, dtype, np.zeros((T, K)), transitions=P[None], initial=np.eye(K)[1])
    (path,) = draw(case, 1)
    assert path[0] == 1
    counts = np.bincount(path[:-1] * K + path[1:], minlength=K * K).reshape(K, K)
    # Given how often each state is left, where to is multinomial.
    for k in range(K):
        assert_frequencies(counts[k], counts[k].sum() * P[k])
    # Steps are independent of each other: pairs of steps follow P twice.
    twice = np.bincount(path[:-2:2] * K + path[2::2], minlength=K * K).reshape(K, K)
    for k in range(K):
        assert_frequencies(twice[k], twice[k].sum() * (P @ P)[k])


def test_rows_and_samples_are_independent(backend, dtype):
    """Rows of the same posterior, and samples that follow each other, do not share numbers."""
    K, n = 3, 4000
    x = np.broadcast_to(normal(5, K), (3, 5, K))
    case = Case(backend, dtype, x, transitions=uniform(1, K, K))
    states = draw(case, n)
    shares = case.read(case.chain.marginals())[0].astype(float)
    for t in (0, 2, 4):
        both = np.outer(shares[t], shares[t])
        for first, second in ((0, 1), (0, 2), (1, 2)):
            counts = np.bincount(states[:, first, t] * K + states[:, second, t], minlength=K * K)
            assert_frequencies(counts, n * both)
        for lag in (1, 2, n // 2):
            # Not overlapping, so that the pairs are independent.
            start = np.arange(0, n - lag)
            start = start[start % (2 * lag) < lag]
            counts = np.bincount(
                states[start, 0, t] * K + states[start + lag, 0, t], minlength=K * K
            )
            assert_frequencies(counts, len(start) * both)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sd", [1, 1000])
def test_sparse_transitions(backend, dtype, form, sd):
    rng = np.random.default_rng(9)
    transitions = uniform(11, 7, 7) * (rng.random((11, 7, 7)) < 0.3)
    x = normal(20, 12, 7, sd=sd)
    x[rng.random(x.shape) < 0.1] = -INF
    x[3, 5] = -INF
    case = Case(backend, dtype, x, **given_as(form, transitions, np.eye(7)[2]))
    assert_possible(case, draw(case, 100))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("log_ratio", [-30, -690, -1500])
def test_only_path_leads_through_unlikely_states(backend, dtype, form, log_ratio):
    K = T = 9
    x = np.zeros((T, K))
    x[1:-1, 1:] = log_ratio / (T - 2)
    x[-1, :-1] = -INF
    transitions = 0.5 * (np.eye(K) + np.eye(K, k=1))
    case = Case(backend, dtype, x, **given_as(form, transitions[None], np.eye(K)[0]))
    states = draw(case, 20)
    np.testing.assert_array_equal(states, np.broadcast_to(np.arange(K), states.shape))


class Extreme(np.random.Generator):
    """A generator whose numbers of [0, 1) are all its smallest, or all its largest."""

    value = 0.0

    def random(self, size=None, dtype=np.float64, out=None):
        out = np.empty(size, dtype) if out is None else out
        out[...] = self.value
        return out


@pytest.mark.parametrize("value", [0.0, 1 - 2.0**-53, 2.0**-53])
@pytest.mark.parametrize("form", FORMS)
def test_extreme_random_numbers(backend, dtype, form, value):
    """States of weight 0 lie first and last, and beside tiny ones: none of them is drawn."""
    x = normal(6, 9, 7)
    x[:, :, [0, 6]] = -INF
    x[1, :, 1], x[2, :, 5] = -80, -80
    transitions = uniform(8, 7, 7)
    transitions[::2, :, 1] = 0
    case = Case(backend, dtype, x, **given_as(form, transitions, uniform(7)))
    rng = Extreme(np.random.PCG64(0))
    rng.value = value
    assert_possible(case, case.read(case.chain.sample(5, rng), "int64"))


def test_same_generator_same_samples(backend, dtype):
    case = Case(backend, dtype, normal(3, 20, 4), transitions=uniform(1, 4, 4))
    first, second, other = (draw(case, 50, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, second)
    assert np.any(first != other)
    rng = np.random.default_rng(1)
    again, after = (case.read(case.chain.sample(50, rng), "int64") for _ in range(2))
    np.testing.assert_array_equal(again, first)
    assert np.any(after != first)


def test_torch_generator(torch_backend, dtype):
    torch = torch_backend.xp
    case = Case(torch_backend, dtype, normal(2, 4, 3), transitions=uniform(3, 3, 3))
    first, second = (
        case.read(case.chain.sample(10_000, torch.Generator().manual_seed(3)), "int64")
        for _ in range(2)
    )
    np.testing.assert_array_equal(first, second)
    assert_paths(case, first)


def test_samples_have_no_gradient(torch_backend):
    torch = torch_backend.xp
    x, transitions = torch.zeros(2, 4, 3, requires_grad=True), torch.ones(1, 3, 3)
    states = alc.LogChain(x, transitions=transitions).sample(5, np.random.default_rng(0))
    assert not states.requires_grad
    assert states.shape == (5, 2, 4)


def test_half_precisions(backend, half):
    case = Case(backend, half, normal(2, 4, 3), transitions=uniform(3, 3, 3))
    assert_paths(case, draw(case, 10_000))


@pytest.mark.parametrize("shape", [(4, 3), (2, 4, 3), (0, 4, 3), (2, 4, 0)])
def test_no_samples(backend, dtype, shape):
    K = shape[-1]
    case = Case(backend, dtype, normal(*shape), transitions=uniform(1, K, K))
    assert draw(case, 0).size == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(("T", "K"), [(20_000, 4), (2_000, 12)])
def test_many_samples_of_one_chain_keep_to_the_workspace(np_backend, dtype, T, K):
    x, transitions = normal(T, K).astype(dtype), uniform(1, K, K).astype(dtype)
    chain = alc.LogChain(x, transitions=transitions, workspace=1 << 20)
    chain.sample(2, np.random.default_rng(0))
    tracemalloc.start()
    try:
        states = chain.sample(10, np.random.default_rng(0))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak - states.nbytes <= 1 << 20


def test_workspace_keeps_the_distribution(np_backend, dtype):
    x, transitions = normal(40, 30, 12), uniform(29, 12, 12)
    case = Case(np_backend, dtype, x, transitions=transitions, workspace=1 << 20)
    states = draw(case, 1000)
    counts = gradient_reference.chain(*case.arguments).marginals.exact
    for t in range(30):
        found = np.stack([np.bincount(states[:, n, t], minlength=12) for n in range(40)])
        assert_frequencies(found, 1000 * counts[:, t], LEVEL / 30, lost=39)


@pytest.mark.parametrize(
    "rng",
    [None, 0, np.random.RandomState(0), np.random, np.random.PCG64(0)],
    ids=lambda r: type(r).__name__,
)
def test_what_is_no_generator(backend, rng):
    case = Case(backend, "float32", normal(2, 4, 3), transitions=uniform(1, 3, 3))
    with pytest.raises(TypeError, match=mentions("rng")):
        case.chain.sample(3, rng)


def test_torch_generator_is_for_tensors(np_backend, torch_backend):
    """NumPy's arrays come with NumPy's generators."""
    case = Case(np_backend, "float32", normal(2, 4, 3), transitions=uniform(1, 3, 3))
    with pytest.raises(TypeError, match=mentions("rng")):
        case.chain.sample(3, torch_backend.xp.Generator())


@pytest.mark.parametrize(("count", "error"), [(-1, ValueError), (2.5, TypeError), ("3", TypeError)])
def test_numbers_of_samples_that_are_none(backend, count, error):
    case = Case(backend, "float32", normal(2, 4, 3), transitions=uniform(1, 3, 3))
    with pytest.raises(error, match=mentions("num_samples")):
        case.chain.sample(count, np.random.default_rng(0))
