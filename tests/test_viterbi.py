"""LogChain.viterbi: no path is better, ties go to the smallest state, weights are exact."""

import itertools
import math

import hypothesis
import numpy as np
import pytest

import arraylogchain as alc
from tests import reference
from tests.checks import CHAIN_SHAPES
from tests.conftest import make_backend
from tests.path_checks import MIXED_FORMS, Case, given_in_forms
from tests.test_chain import FORMS, given_as, normal, uniform, wide_linear_weights, wide_log_weights
from tests.test_properties import DTYPES, WORKSPACES, chains

pytestmark = pytest.mark.chains

INF = np.inf


def best_of_all(lattice):
    """Return the best path and its weight, by visiting all of them."""
    paths, weights = reference.enumerate_paths(lattice)
    at = np.argmax(weights, axis=-1)
    return paths[at], np.max(weights, axis=-1)


@pytest.mark.parametrize("forms", MIXED_FORMS)
@pytest.mark.parametrize("T", [1, 2, 3, 6])
def test_agrees_with_all_paths(backend, dtype, forms, T):
    options = given_in_forms(forms, uniform(T - 1, 3, 3), uniform(3))
    case = Case(backend, dtype, normal(5, T, 3), **options)
    states, _ = case.check_viterbi()
    expected, weight = best_of_all(case.lattice)
    np.testing.assert_array_equal(states, expected)
    np.testing.assert_allclose(weight, reference.best_path(case.lattice).log_weight, rtol=1e-15)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("x", "transitions", "initial"), CHAIN_SHAPES)
def test_batch_axes(backend, dtype, form, x, transitions, initial):
    start = None if initial is None else uniform(*initial)
    options = given_as(form, uniform(*transitions, seed=1), start)
    case = Case(backend, dtype, normal(*x), **options)
    states, weight = case.check_viterbi()
    batch = np.broadcast_shapes(x[:-2], transitions[:-3], () if initial is None else initial[:-1])
    assert states.shape == (*batch, x[-2])
    assert weight.shape == batch
    if x[-1]:
        np.testing.assert_array_equal(states, best_of_all(case.lattice)[0])


def test_one_step_needs_no_transitions(backend, dtype):
    case = Case(backend, dtype, np.array([[[1.0, 3.0, 2.0]], [[0.0, 0.0, -1.0]]]))
    states, weight = case.check_viterbi()
    assert states.tolist() == [[1], [0]]
    assert weight.tolist() == [3, 0]


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
    starts = [integers(rng, K, closed / 5) for _ in range(rows)]
    case = Case(
        backend,
        dtype,
        np.array(xs, float),
        log_transitions=np.array(edges, float),
        log_initial=np.array(starts, float),
    )
    states, weight = case.check_viterbi()
    for found, total, x, start in zip(states, weight, xs, starts, strict=True):
        path, best = by_integers(x, edges, start)
        assert found.tolist() == path
        assert total == best


@pytest.mark.parametrize("per_step", [False, True], ids=["one matrix", "one per step"])
def test_ties_among_open_and_closed_edges(backend, dtype, per_step):
    """Linear transitions of 0 and 1 are exact as logs; many steps may be cut into segments."""
    T, K = 200, 3
    rng = np.random.default_rng(5)
    open_edges = rng.random((T - 1 if per_step else 1, K, K)) < 0.8
    open_edges[:, range(K), range(K)] = True
    x = integers(rng, (T, K), 0)
    edges = np.where(open_edges, 0, np.array(-INF, object)).tolist()
    case = Case(backend, dtype, np.array(x, float), transitions=open_edges.astype(float))
    states, weight = case.check_viterbi()
    path, best = by_integers(x, edges, [0] * K)
    assert states.tolist() == path
    assert weight == best


def test_ties_of_long_chains(np_backend, dtype):
    T = 3000
    rng = np.random.default_rng(6)
    for K, steps in itertools.product((2, 5), (1, T - 1)):
        x, edges = integers(rng, (T, K), 0), integers(rng, (steps, K, K), 0.2, low=-2)
        case = Case(np_backend, dtype, np.array(x, float), log_transitions=np.array(edges, float))
        states, weight = case.check_viterbi()
        path, best = by_integers(x, edges, [0] * K)
        assert states.tolist() == path
        assert weight == best


@pytest.mark.parametrize("forms", MIXED_FORMS)
@pytest.mark.parametrize("sd", [1, 100, 1000])
def test_wide_potentials(backend, dtype, forms, sd):
    options = given_in_forms(forms, uniform(11, 8, 8), uniform(8))
    Case(backend, dtype, normal(5, 12, 8, sd=sd), **options).check_viterbi()


@pytest.mark.parametrize("decades", [5, 30])
def test_wide_linear_transitions(backend, dtype, decades):
    x, options = wide_linear_weights(decades)
    Case(backend, dtype, x, **options).check_viterbi()


@pytest.mark.parametrize("sd", [20, 1000])
@pytest.mark.parametrize("steps", [1, 9])
def test_wide_log_transitions(backend, dtype, sd, steps):
    x, options = wide_log_weights(sd, steps)
    Case(backend, dtype, x, **options).check_viterbi()


@pytest.mark.parametrize("centre", [1e4, -1e4])
def test_shifted_potentials(backend, dtype, centre):
    x = normal(3, 20, 5, sd=3) + centre
    Case(backend, dtype, x, transitions=uniform(19, 5, 5)).check_viterbi()


def test_alternating_shifts_cancel(backend, dtype):
    """Totals of many thousands come and go; neither path nor weight carries their rounding."""
    x = np.round(normal(2, 40, 5, sd=3), 1)
    x[:, ::2] += 10_000
    x[:, 1::2] -= 10_000
    Case(backend, dtype, x, transitions=uniform(39, 5, 5)).check_viterbi()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sd", [1, 1000])
def test_sparse_transitions(backend, dtype, form, sd):
    rng = np.random.default_rng(9)
    transitions = uniform(11, 7, 7) * (rng.random((11, 7, 7)) < 0.3)
    x = normal(40, 12, 7, sd=sd)
    x[rng.random(x.shape) < 0.1] = -INF
    case = Case(backend, dtype, x, **given_as(form, transitions, np.eye(7)[2]))
    _, weight = case.check_viterbi()
    assert 0 < np.sum(weight == -INF) < 40


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("log_ratio", [-30, -690, -1500])
def test_only_path_leads_through_unlikely_states(backend, dtype, form, log_ratio):
    K = T = 9
    x = np.zeros((T, K))
    x[1:-1, 1:] = log_ratio / (T - 2)
    x[-1, :-1] = -INF
    transitions = 0.5 * (np.eye(K) + np.eye(K, k=1))
    case = Case(backend, dtype, x, **given_as(form, transitions[None], np.eye(K)[0]))
    states, _ = case.check_viterbi()
    assert states.tolist() == list(range(K))


@pytest.mark.parametrize("form", FORMS)
def test_rows_without_a_path(backend, dtype, form):
    """Zeros, also where the closed step comes late, and beside rows that have paths."""
    x, transitions, initial = normal(6, 6, 4), uniform(6, 5, 4, 4), uniform(6, 4)
    x[0] = -INF
    x[1, 3] = -INF
    x[5, 5] = -INF
    transitions[2, 2] = 0
    initial[3] = 0
    case = Case(backend, dtype, x, **given_as(form, transitions, initial))
    states, weight = case.check_viterbi()
    assert np.all(weight[[0, 1, 2, 3, 5]] == -INF)
    assert np.isfinite(weight[4])
    assert states[4].any()


@pytest.mark.parametrize("per_step", [False, True], ids=["one matrix", "one per step"])
@pytest.mark.parametrize("kind", ["plain", "hardly mixing", "left to right", "sparse", "wide"])
@pytest.mark.parametrize(("T", "K"), [(2000, 3), (500, 8)])
def test_long_chains(np_backend, dtype, T, K, kind, per_step):
    """Chains that may be cut into segments of time."""
    rng = np.random.default_rng(K)
    x, transitions = normal(T, K), rng.random((T - 1 if per_step else 1, K, K)) + 0.01
    if kind == "hardly mixing":
        transitions = np.eye(K) + 1e-6 * transitions
    elif kind == "left to right":
        transitions = transitions * (np.eye(K) + np.eye(K, k=1))
    elif kind == "sparse":
        transitions = transitions * ((rng.random(transitions.shape) < 0.3) | np.eye(K, dtype=bool))
    x = 100 * x if kind == "wide" else x
    form = FORMS[per_step]
    Case(np_backend, dtype, x, **given_as(form, transitions)).check_viterbi()


def test_long_chains_elsewhere(backend, dtype):
    x, transitions = normal(2, 300, 3), np.eye(3) + 1e-4 * uniform(299, 3, 3)
    Case(backend, dtype, x, transitions=transitions).check_viterbi()


@pytest.mark.parametrize("K", [128, 129, 256, 257, 300])
def test_many_states(backend, dtype, K):
    """States above 127 and 255, which small integer types do not hold."""
    order = np.random.default_rng(K).permutation(K)
    x = normal(2, 5, K)
    x[1, range(5), order[:5]] += 30
    x[1, 2] = np.where(np.arange(K) == K - 1, 0, -INF)
    case = Case(backend, dtype, x, transitions=uniform(1, K, K))
    states, _ = case.check_viterbi()
    expected = [*order[:2], K - 1, *order[3:5]]
    assert states[1].tolist() == expected


def test_half_precisions(backend, half):
    for forms in MIXED_FORMS:
        options = given_in_forms(forms, uniform(5, 4, 4), uniform(4))
        Case(backend, half, normal(3, 6, 4, sd=3), **options).check_viterbi()


@pytest.mark.parametrize("sd", [1, 1000])
@pytest.mark.parametrize("shape", [(300, 6, 10), (2000, 10), (3, 2, 80)])
def test_workspace_changes_no_answer(np_backend, dtype, shape, sd):
    x, (T, K) = normal(*shape, sd=sd), shape[-2:]
    options = given_as("linear", uniform(T - 1, K, K), uniform(K))
    plain = Case(np_backend, dtype, x, **options).check_viterbi()
    small = Case(np_backend, dtype, x, **options, workspace=1 << 20).check_viterbi()
    np.testing.assert_array_equal(small[0], plain[0])


def test_layouts_and_repeated_calls(np_backend, dtype):
    """Views in, the same answer out, whatever was asked before."""
    x, transitions = normal(5, 3, 4).astype(dtype), uniform(4, 4, 4).astype(dtype)
    plain = alc.LogChain(x.swapaxes(0, 1).copy(), transitions=transitions)
    viewed = alc.LogChain(
        x[::-1].swapaxes(0, 1)[:, ::-1], transitions=np.asfortranarray(transitions[::-1])[::-1]
    )
    first = plain.viterbi()
    for other in (viewed.viterbi(), viewed.viterbi()):
        np.testing.assert_array_equal(other.states, first.states)
        np.testing.assert_array_equal(other.log_weight, first.log_weight)
    plain.marginals()
    np.testing.assert_array_equal(plain.viterbi().states, first.states)


def test_special_values_stay_in_their_row(backend, dtype):
    x, transitions = normal(3, 6, 4), uniform(5, 4, 4)
    expected, _ = Case(backend, dtype, x, transitions=transitions).check_viterbi()
    for value in (np.nan, INF):
        x[1, 2, 1] = value
        case = Case(backend, dtype, x, transitions=transitions)
        states = case.read(case.chain.viterbi().states, "int64")
        np.testing.assert_array_equal(states[[0, 2]], expected[[0, 2]])
        assert np.all((states[1] >= 0) & (states[1] < 4))


@hypothesis.given(chain=chains(), dtype=DTYPES, workspace=WORKSPACES)
@hypothesis.settings(max_examples=60)
def test_any_chain(chain, dtype, workspace):
    x, edges, initial = chain
    backend = make_backend("numpy")
    options = {"log_transitions": edges, "log_initial": initial}
    Case(backend, dtype, x, **options, workspace=workspace).check_viterbi()
