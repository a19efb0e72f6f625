"""LogChain.sample: paths as often as their weights say, and never one of weight 0.

Frequencies are compared by chi-square tests, with fixed seeds. Were the library to change how it
uses random numbers, a right one would fail one of them with a probability of at most 1e-6: each of
the at most 1000 tests in this file has a level of 1e-9.
"""

import numpy as np
import pytest
from scipy import stats

import arraylogchain as alc
from tests.chain_checks import ChainCase, assert_possible
from tests.chain_reference import all_paths
from tests.chain_scenarios import FORMS, normal, uniform, weights_as
from tests.checks import mentions
from tests.reference import logsumexp

pytestmark = pytest.mark.chains

INF = np.inf
LEVEL = 1e-9
# Fewer are expected in a cell of a chi-square test at the least; others are put together.
SMALLEST_CELL = 25


def assert_frequencies(counts, expected, level=LEVEL, lost=0):
    """Compare counts with their expectations; `lost` is the number of estimated parameters."""
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
    is_large = expected > 1e-3 * SMALLEST_CELL
    counts, expected = counts[is_large], expected[is_large]
    freedom = len(counts) - 1 - lost
    if freedom > 0:
        distance = np.sum((counts - expected) ** 2 / expected)
        assert stats.chi2.sf(distance, freedom) > level, f"chi-square {distance} of {freedom}"


def draw(case, count, seed=0):
    """Return samples [count, rows, T], each of them a path of positive weight if there is one."""
    states = case.backend.read(case.chain.sample(count, rng=np.random.default_rng(seed)), "int64")
    assert states.shape == (count, *case.batch, case.T)
    case.assert_unchanged()
    states = states.reshape(count, case.exact.rows, case.T)
    assert_possible(case, states)
    return states


def assert_paths(case, states):
    """Compare the frequencies of all paths with their shares, in every row."""
    paths, weights = all_paths(case.exact)
    probabilities = np.exp(weights - logsumexp(weights, axis=0))
    code = states @ case.K ** np.arange(case.T)[::-1]
    for row in range(case.exact.rows):
        counts = np.bincount(code[:, row], minlength=len(paths))
        assert_frequencies(counts, len(states) * probabilities[:, row])


@pytest.mark.parametrize("form", ["linear", "logs", "mixed"])
@pytest.mark.parametrize("T", [1, 2, 4])
def test_paths_are_drawn_by_their_weights(backend, dtype, form, T):
    options = weights_as(form, uniform(T - 1, 3, 3), uniform(3), np.array([0.2, 0.0, 1.0]))
    case = ChainCase(backend, dtype, normal(2, T, 3), **options)
    assert_paths(case, draw(case, 10_000))


def test_rows_of_different_lengths(backend, dtype):
    """Each ends where it ends; final weights are of its own last state."""
    P, final = uniform(2, 2), np.array([0.2, 0.5])
    x = np.stack([normal(3, 2)] * 3)
    case = ChainCase(backend, dtype, x, transitions=P, final=final, lengths=[3, 2, 1])
    states = draw(case, 20_000)
    for row, length in enumerate((3, 2, 1)):
        alone = ChainCase(backend, dtype, x[row, :length], transitions=P, final=final)
        assert_paths(alone, states[:, row : row + 1, :length])


def test_samples_follow_the_uniforms():
    """The first state up to which weights sum up to more than u times all of them."""
    x, P = normal(4, 3), uniform(1, 3, 3)
    chain = alc.LogChain(x, transitions=P)
    states = chain.sample(200, rng=np.random.default_rng(4))
    uniforms = np.random.default_rng(4).random((200, 4))
    alpha = np.exp(chain.forward_messages())
    for path, u in zip(states, uniforms, strict=True):
        for t in reversed(range(4)):
            weights = alpha[t] * (P[0][:, path[t + 1]] if t < 3 else 1)
            assert path[t] == np.argmax(np.cumsum(weights) > u[t] * weights.sum())


def test_weights_that_are_hardly_numbers(np_backend):
    """1 to 1.3, of which subnormal numbers would make the same."""
    x = np.array([[-260 * np.log(2), np.log(1.3) - 260 * np.log(2), 0], [0, -INF, -INF]])
    transitions = np.zeros((1, 3, 3))
    transitions[0, :2, 0] = 1e-305
    case = ChainCase(np_backend, "float64", x, transitions=transitions)
    assert_paths(case, draw(case, 20_000))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sd", [1, 30])
def test_pairs_of_larger_chains(backend, dtype, form, sd):
    options = weights_as(form, uniform(14, 6, 6) ** 3, uniform(6))
    case = ChainCase(backend, dtype, normal(15, 6, sd=sd), **options)
    states = draw(case, 4000)
    for t in range(14):
        counts = np.bincount(states[:, 0, t] * 6 + states[:, 0, t + 1], minlength=36)
        assert_frequencies(counts, len(states) * case.exact.pairs[0][0, t], LEVEL / 15)


def test_single_long_path_is_a_markov_chain(backend, dtype):
    """Normalised transitions and no potentials: the prior. Every step is a draw of its own."""
    T, K = 1000, 3
    P = np.array([[0.9, 0.1, 0.0], [0.05, 0.9, 0.05], [0.2, 0.3, 0.5]])
    case = ChainCase(backend, dtype, np.zeros((T, K)), transitions=P[None], initial=np.eye(K)[1])
    ((path,),) = draw(case, 1)
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
    case = ChainCase(backend, dtype, x, transitions=uniform(1, K, K))
    states = draw(case, n)
    marginals = case.exact.marginals().exact[0].astype(float)
    for t in (0, 2, 4):
        product = np.outer(marginals[t], marginals[t])
        for first, second in ((0, 1), (0, 2), (1, 2)):
            counts = np.bincount(states[:, first, t] * K + states[:, second, t], minlength=K * K)
            assert_frequencies(counts, n * product)
        for lag in (1, 2, n // 2):
            # Not overlapping, so that the pairs are independent.
            start = np.arange(0, n - lag)
            start = start[start % (2 * lag) < lag]
            counts = np.bincount(
                states[start, 0, t] * K + states[start + lag, 0, t], minlength=K * K
            )
            assert_frequencies(counts, len(start) * product)


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
    """States of weight 0 lie first and last, and next to tiny ones: none of them is drawn."""
    x = normal(6, 9, 7)
    x[:, :, [0, 6]] = -INF
    x[1, :, 1], x[2, :, 5] = -80, -80
    transitions = uniform(8, 7, 7)
    transitions[::2, :, 1] = 0
    case = ChainCase(backend, dtype, x, **weights_as(form, transitions, uniform(7)))
    rng = Extreme(np.random.PCG64(0))
    rng.value = value
    assert_possible(case, case.backend.read(case.chain.sample(5, rng=rng), "int64"))


def test_same_generator_same_samples(backend, dtype):
    case = ChainCase(backend, dtype, normal(3, 20, 4), transitions=uniform(1, 4, 4))
    first, second, other = (draw(case, 50, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, second)
    assert np.any(first != other)
    rng = np.random.default_rng(1)
    again, after = (case.backend.read(case.chain.sample(50, rng=rng), "int64") for _ in range(2))
    np.testing.assert_array_equal(again, first)
    assert np.any(after != first)


def test_torch_generator(torch_backend, dtype):
    torch = torch_backend.xp
    case = ChainCase(torch_backend, dtype, normal(2, 4, 3), transitions=uniform(3, 3, 3))
    first, second = (
        case.backend.read(case.chain.sample(10_000, rng=torch.Generator().manual_seed(3)), "int64")
        for _ in range(2)
    )
    np.testing.assert_array_equal(first, second)
    assert_paths(case, first)


@pytest.mark.parametrize("shape", [(4, 3), (2, 4, 3), (0, 4, 3)])
def test_no_samples(backend, dtype, shape):
    K = shape[-1]
    case = ChainCase(backend, dtype, normal(*shape), transitions=uniform(1, K, K))
    assert draw(case, 0).size == 0


def test_workspace_keeps_the_distribution(np_backend, dtype):
    x, transitions = normal(40, 30, 12), uniform(29, 12, 12)
    case = ChainCase(np_backend, dtype, x, transitions=transitions, workspace=1 << 20)
    states = draw(case, 1000)
    counts = case.exact.marginals().exact
    for t in range(30):
        result = np.stack([np.bincount(states[:, n, t], minlength=12) for n in range(40)])
        assert_frequencies(result, 1000 * counts[:, t], LEVEL / 30, lost=39)


WRONG = [("rng", x, TypeError) for x in (np.random.RandomState(0), np.random, np.random.PCG64(0))]
WRONG += [("rng", x, TypeError) for x in (1.5, True, "seed")]
WRONG += [("num_samples", x, TypeError) for x in (2.5, "3")]
WRONG += [("rng", -1, ValueError), ("num_samples", -1, ValueError)]


@pytest.mark.parametrize(("name", "value", "error"), WRONG)
def test_errors(backend, name, value, error):
    case = ChainCase(backend, "float32", normal(2, 4, 3), transitions=uniform(1, 3, 3))
    with pytest.raises(error, match=mentions(name)):
        case.chain.sample(**{name: value})


def test_torch_generator_is_for_tensors(np_backend, torch_backend):
    """NumPy's arrays take NumPy's generators."""
    case = ChainCase(np_backend, "float32", normal(2, 4, 3), transitions=uniform(1, 3, 3))
    with pytest.raises(TypeError, match=mentions("rng")):
        case.chain.sample(3, rng=torch_backend.xp.Generator())
