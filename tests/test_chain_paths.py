"""Best paths and weights of given paths: ties, many states, types of integers, invalid paths."""

import itertools
import math

import mpmath
import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain import _select
from tests.chain_checks import ChainCase, check_log_weight, check_paths
from tests.chain_reference import all_paths
from tests.chain_scenarios import normal, uniform
from tests.checks import mentions
from tests.error_model import EPS

pytestmark = pytest.mark.chains

INF = np.inf


def by_integers(x, edges, start):
    """Return the path that the rule for ties asks for, and its weight, in exact numbers.

    Python's integers, and -inf, of one chain: the smallest last state, then the smallest
    predecessor of each.
    """
    count, size = len(x), len(start)
    score = [start[k] + x[0][k] for k in range(size)]
    origins = []
    for i in range(1, count):
        into = edges[min(i, len(edges)) - 1]
        terms = [[score[k] + into[k][j] for k in range(size)] for j in range(size)]
        origins.append([row.index(max(row)) for row in terms])
        score = [max(row) + x[i][j] for j, row in enumerate(terms)]
    if max(score) == -INF:
        return [0] * count, -INF
    path = [score.index(max(score))]
    for origin in reversed(origins):
        path.append(origin[path[-1]])
    return path[::-1], max(score)


def integers(rng, shape, closed, low=-1):
    """Return small integers with -inf among them, as nested lists of Python's numbers."""
    x = rng.integers(low, 2, shape).astype(object)
    x[rng.random(shape) < closed] = -math.inf
    return x.tolist()


@pytest.mark.parametrize("closed", [0, 0.15, 0.5])
@pytest.mark.parametrize("per_step", [False, True], ids=["one matrix", "one per step"])
@pytest.mark.parametrize(("T", "K", "rows"), [(7, 2, 40), (12, 4, 20), (70, 3, 6), (3, 9, 20)])
def test_ties_go_to_the_smallest_state(backend, dtype, T, K, rows, per_step, closed):
    """Weights of -1, 0 and 1: sums are exact in every dtype, and many paths are best."""
    rng = np.random.default_rng(K)
    edges = integers(rng, (T - 1 if per_step else 1, K, K), closed)
    xs = [integers(rng, (T, K), closed / 5) for _ in range(rows)]
    has_initial = closed or not per_step  # else it is 0 for all states
    starts = [integers(rng, K, closed / 5) if has_initial else [0] * K for _ in range(rows)]
    case = ChainCase(
        backend,
        dtype,
        np.array(xs, float),
        log_transitions=np.array(edges, float),
        log_initial=np.array(starts, float) if has_initial else None,
    )
    states, weight = check_paths(case)
    for result, total, x, start in zip(states, weight, xs, starts, strict=True):
        path, best = by_integers(x, edges, start)
        assert result.tolist() == path
        assert total == best


@pytest.mark.parametrize("closed", [0, 0.2, 0.6])
@pytest.mark.parametrize(
    ("T", "K", "rows", "num_paths"),
    [(1, 1, 1, 3), (1, 5, 2, 3), (5, 1, 1, 2), (5, 3, 9, 300), (4, 4, 1, 7), (3, 9, 4, 40)],
)
def test_best_paths_are_all_paths_in_order(backend, dtype, T, K, rows, num_paths, closed):
    """Small whole weights: sums are exact in every dtype, and many paths have equal ones."""
    rng = np.random.default_rng(T)
    x, edges = integers(rng, (rows, T, K), closed / 3), integers(rng, (T - 1 or 1, K, K), closed)
    final, lengths = integers(rng, K, closed / 5), rng.integers(1, T + 1, rows)
    arrays = {"x": np.array(x, float), "log_transitions": np.array(edges, float)[: T - 1]}
    arrays["log_final"] = np.array(final, float)
    if K > 4:  # one matrix for all steps
        arrays["log_transitions"] = arrays["log_transitions"][:1]
    arrays = {name: array for name, array in arrays.items() if array.size}
    case = ChainCase(backend, dtype, **arrays, lengths=lengths)
    result = case.chain.best_paths(num_paths)
    states = backend.read(result.states, "int64")
    log_weights = backend.read(result.log_weight, dtype)
    paths, weights = all_paths(case.exact)
    for r, length in enumerate(lengths):
        of_row = {(-w, *p[length - 1 :: -1]) for w, p in zip(weights[:, r], paths, strict=True)}
        expected = sorted(key for key in of_row if key[0] < INF)[:num_paths]
        for i, (weight, *path) in enumerate(expected):
            assert log_weights[i, r] == -weight
            assert states[i, r, :length].tolist() == path[::-1]
        assert np.all(log_weights[len(expected) :, r] == -INF)
        assert np.all(states[len(expected) :, r, :length] == 0)
        assert np.all(states[:, r, length:] == -1)


@pytest.mark.parametrize(("K", "rows", "num_paths"), [(4, 1, 40), (30, 9, 8), (30, 1, 200)])
@pytest.mark.parametrize("density", [1, 0.05], ids=["full", "sparse"])
def test_loops_and_array_operations_find_the_same_paths(monkeypatch, K, rows, num_paths, density):
    """In one segment or several, whose messages are computed again."""
    P = uniform(K, K) * (uniform(K, K, seed=1) < density) + np.eye(K) + np.eye(K, k=1)
    arguments = {"log_potentials": normal(rows, 300, K), "transitions": P}
    arguments["lengths"] = np.arange(300, 300 - rows, -1)
    chains = [alc.LogChain(**arguments, workspace=n) for n in (None, 1 << 20)]
    states, log_weight = chains[0].best_paths(num_paths)
    assert np.all(np.diff(log_weight, axis=0) <= 0)
    np.testing.assert_allclose(log_weight, chains[0].log_weight(np.maximum(states, 0)), rtol=1e-13)
    for compiled in (True, False):
        monkeypatch.setattr(_select, "COMPILED", compiled)
        for chain in chains:
            result = chain.best_paths(num_paths)
            np.testing.assert_array_equal(result.states, states)
            np.testing.assert_allclose(result.log_weight, log_weight, rtol=1e-13)


def test_ties_of_long_chains(np_backend, dtype):
    T = 1000
    rng = np.random.default_rng(6)
    for K, steps in itertools.product((2, 5), (1, T - 1)):
        x, edges = integers(rng, (T, K), 0), integers(rng, (steps, K, K), 0.2, low=-2)
        case = ChainCase(
            np_backend, dtype, np.array(x, float), log_transitions=np.array(edges, float)
        )
        states, weight = check_paths(case)
        path, best = by_integers(x, edges, [0] * K)
        assert states[0].tolist() == path
        assert weight[0] == best


@pytest.mark.parametrize("steps", [1, 39])
def test_a_level_of_all_log_transitions_hides_nothing(np_backend, steps):
    """Not even one so large that differences of potentials would be rounded away."""
    x = normal(40, 3)
    edges = np.random.default_rng(0).integers(-3, 4, (steps, 3, 3)).astype(float)
    plain, raised = (
        ChainCase(np_backend, "float64", x, log_transitions=edges + level).chain.viterbi().states
        for level in (0, 2.0**52)
    )
    np.testing.assert_array_equal(raised, plain)


@pytest.mark.parametrize("rows", [1, 12])
@pytest.mark.parametrize("kind", ["potentials", "transitions", "log_transitions", "initial"])
def test_nan_shows_in_weights_and_states(backend, dtype, kind, rows):
    """In the rows that it belongs to: another path would hide it."""
    for k in range(3):
        x, P, initial = normal(rows, 6, 3), uniform(3, 3), np.ones(3)
        for wrong in {"potentials": (x[0, 0], x[0, 3], x[0, 5]), "initial": (initial,)}.get(
            kind, P
        ):
            before, wrong[k] = wrong[k], math.nan
            form = "log_transitions" if kind == "log_transitions" else "transitions"
            case = ChainCase(backend, dtype, x, initial=initial, **{form: P})
            path = case.chain.viterbi()
            states = case.read(path.states, "int64")
            samples = case.backend.read(case.chain.sample(2, rng=0), "int64")
            is_own = (np.arange(rows) == 0) | (kind != "potentials")
            np.testing.assert_array_equal(np.isnan(case.read(path.log_weight)), is_own)
            for paths in (states, *samples.reshape(2, rows, 6)):
                np.testing.assert_array_equal(paths == -1, np.tile(is_own[:, None], 6))
            wrong[k] = before


@pytest.mark.parametrize("K", [128, 129, 256, 257, 300])
def test_many_states(backend, dtype, K):
    """States above 127 and 255, which small integer types do not hold."""
    order = np.random.default_rng(K).permutation(K)
    x = normal(2, 5, K)
    x[1, range(5), order[:5]] += 30
    x[1, 2] = np.where(np.arange(K) == K - 1, 0, -INF)
    case = ChainCase(backend, dtype, x, transitions=uniform(1, K, K))
    states, _ = check_paths(case)
    expected = [*order[:2], K - 1, *order[3:5]]
    assert states[1].tolist() == expected


def some_states(*shape, K, seed=3):
    return np.random.default_rng(seed).integers(0, K, shape)


def test_all_paths_add_up(backend, dtype):
    case = ChainCase(backend, dtype, normal(2, 4, 3), transitions=uniform(3, 3, 3))
    paths, _ = all_paths(case.exact)
    weights = check_log_weight(case, paths[:, None]).astype(float)
    backward = np.flip(np.flip(paths[:, None], -1).astype(">i4"), -1)
    given_so = case.backend.to_numpy(case.chain.log_weight(backward))
    np.testing.assert_array_equal(given_so.astype(float), weights)
    total = case.read(case.chain.log_partition()).astype(float)
    tolerance = 1e-5 if dtype == "float32" else 1e-13
    np.testing.assert_allclose(np.logaddexp.reduce(weights, axis=0), total, atol=tolerance)


@pytest.mark.parametrize("axes", [(), (3,), (2, 3), (5, 2, 3), (5, 1, 1), (4, 2, 1)])
def test_paths_with_axes_of_their_own(backend, dtype, axes):
    case = ChainCase(backend, dtype, normal(2, 1, 5, 4), transitions=uniform(3, 1, 4, 4))
    check_log_weight(case, some_states(*axes, 5, K=4))


@pytest.mark.parametrize("kind", ["int8", "int16", "int32", "int64", "uint8"])
def test_integer_types(backend, dtype, kind):
    case = ChainCase(backend, dtype, normal(2, 5, 4), transitions=uniform(1, 4, 4))
    states = some_states(2, 5, K=4)
    expected = check_log_weight(case, states)
    np.testing.assert_array_equal(check_log_weight(case, states.astype(kind)), expected)
    large = ChainCase(backend, dtype, normal(2, 5, 300), transitions=uniform(4, 300, 300))
    check_log_weight(large, some_states(3, 2, 5, K=min(300, np.iinfo(kind).max)).astype(kind))


def at(place, state):
    """Return paths with one state other than 0."""
    states = np.zeros((2, 5), np.int64)
    states[place] = state
    return states


NO_PATHS = {
    f"state {k} at {place}": (at(place, k), ValueError)
    for place in ((0, 0), (1, 2), (1, 4))
    for k in (-1, 4, 100, -100)
}
SHAPES = ((), (4,), (6,), (3, 5), (2, 5, 1), (5, 2))
NO_PATHS |= {f"shape {shape}": (np.zeros(shape, int), ValueError) for shape in SHAPES}
NO_PATHS |= {kind: (np.zeros((2, 5), kind), TypeError) for kind in ("float32", "bool")}


@pytest.mark.parametrize("wrong", [2**63, 4])
def test_states_beyond_all_states_are_named_as_given(np_backend, wrong):
    case = ChainCase(np_backend, "float32", normal(2, 5, 4), transitions=uniform(1, 4, 4))
    states = np.array([0, 1, wrong, 2, 3], np.uint64)
    with pytest.raises(ValueError, match=f"states must be from 0 to 3, got {wrong}"):
        case.chain.log_weight(states)


@pytest.mark.parametrize(("states", "error"), NO_PATHS.values(), ids=list(NO_PATHS))
def test_log_weight_of_no_path_raises(backend, states, error):
    case = ChainCase(backend, "float32", normal(2, 5, 4), transitions=uniform(1, 4, 4))
    with pytest.raises(error, match=mentions("states")):
        case.chain.log_weight(backend.asarray(states))
    with pytest.raises(TypeError, match=r"path\.states"):
        case.chain.log_weight(case.chain.viterbi())


def test_probability_of_a_path_near_one(backend, dtype):
    """The log is the exact one, relative to itself; of two log weights nothing would be left."""
    T, K = 300, 4
    rng = np.random.default_rng(0)
    states, x, P = rng.integers(0, K, T), rng.normal(size=(T, K)), rng.normal(size=(K, K)) / 3
    x[range(T), states] += 23
    case = ChainCase(backend, dtype, x, log_transitions=P)
    with mpmath.workdps(40):
        exp, exact = np.vectorize(mpmath.exp), np.vectorize(lambda v: mpmath.mpf(float(v)))
        x, P = exact(case.held["log_potentials"]), exact(case.held["log_transitions"])
        message = exp(x[0] - x[0, states[0]])
        for t in range(1, T):
            weights = exp(P - P[states[t - 1], states[t]])
            message = message @ weights * exp(x[t] - x[t, states[t]])
        expected = -mpmath.log(sum(message))
    result = float(case.chain.log_probability(backend.asarray(states)))
    assert result == pytest.approx(float(expected), rel=50 * EPS[dtype])


def test_probabilities_of_all_paths(backend, dtype):
    """They add up to 1, with axes of their own, and are never positive."""
    case = ChainCase(backend, dtype, normal(2, 4, 3), transitions=uniform(3, 3, 3))
    paths, _ = all_paths(case.exact)
    logs = case.backend.read(case.chain.log_probability(backend.asarray(paths[:, None])), dtype)
    assert logs.shape == (81, 2)
    np.testing.assert_allclose(np.exp(logs).sum(axis=0), 1, rtol=100 * EPS[dtype])
    one = case.chain.log_probability(backend.asarray(paths[5]))
    np.testing.assert_array_equal(backend.to_numpy(one), logs[5])
    with pytest.raises(TypeError, match=r"path\.states"):
        alc.vjp.log_probability(case.chain, case.chain.viterbi())


@pytest.mark.parametrize("name", ["initial", "final"])
@pytest.mark.parametrize(
    ("weights", "x", "expected"),
    [
        ([1.0, 1e-310], [0.0, 714.0], -0.5494927),
        ([1e-300, 1e300], [0.0, -1450.0], -1.87499986e270),
        ([1e-38, 1e286], [8453.0, 7629.0], -13846.72),
    ],
)
def test_gradients_by_weights_do_not_need_those_of_other_states(name, weights, x, expected):
    """Which may be beyond all numbers, or 0."""
    chain = alc.LogChain(np.array([x]), **{name: np.array(weights)})
    _, pullback = alc.vjp.log_probability(chain, np.array([0]))
    own = getattr(pullback(-1.0), name)[0]
    assert np.isclose(own, expected, rtol=1e-6)
