"""Segments of long chains that begin with guessed messages: verified, or not used at all."""

import importlib

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain import _dispatch, plan
from arraylogchain._array.chains import time_parallel
from arraylogchain._compiled import why_not
from arraylogchain._inputs.chain import GuessesFailedError
from arraylogchain.plan import Choice
from tests import reference
from tests.checks import check_chain
from tests.error_model import assert_within, chain_bound
from tests.gradient_checks import check_posterior, check_vjp_chain
from tests.path_checks import Case
from tests.test_chain import FORMS, given_as, normal, uniform
from tests.test_workspace import temporaries

INF, NAN = np.inf, np.nan
K, LENGTH = 5, 50
T = 5 * LENGTH + 10
SEGMENTED = (
    "log_partition",
    "marginals",
    "expected_transitions",
    "posterior",
    "value_and_pullback",
)


@pytest.fixture
def guesses(monkeypatch):
    """Let chains guess, whatever their plan would be; return whether guesses held, in a list."""
    held = []

    class Spy(time_parallel.Segments):
        def __init__(self, *args):
            held.append(True)
            super().__init__(*args)

    class FailedError(GuessesFailedError):
        def __init__(self):
            held[-1] = False

    def choose(operation, sizes, *args):
        segments = (sizes.num_steps - 1) // LENGTH
        if segments < 2 or sizes.is_ragged or operation not in SEGMENTED:
            return plan.choose(operation, sizes, *args)
        return Choice("segments", "forced", segments)

    for name in ("posterior", "values", "time_parallel"):
        # The package has functions of these names.
        module = importlib.import_module(f"arraylogchain._array.chains.{name}")
        monkeypatch.setattr(module, "Segments", Spy)
        monkeypatch.setattr(module, "GuessesFailedError", FailedError, raising=False)
    monkeypatch.setattr(_dispatch, "choose", choose)
    monkeypatch.setattr(_dispatch, "COMPILED", False)
    return held


def sticky(stay):
    """Return a matrix that stays in each state with a given probability."""
    return (stay * np.eye(K) + (1 - stay) / (K - 1) * (1 - np.eye(K)))[None]


def check(backend, dtype, x, **options):
    """Check sums, posteriors and gradients."""
    check_chain(backend, dtype, x, **options)
    check_posterior(backend, dtype, x, **options)
    check_vjp_chain(backend, dtype, x, **options)


SHAPES = {
    "one matrix": ((T, K), (1, K, K), (K,)),
    "one per step": ((T, K), (T - 1, K, K), None),
    "rows": ((3, T, K), (1, K, K), (3, K)),
    "rows, one per step": ((3, T, K), (T - 1, K, K), (K,)),
    "matrices of their own": ((2, 1, T, K), (2, 3, T - 1, K, K), (2, 1, K)),
    "one matrix each": ((T, K), (2, 1, K, K), None),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=list(SHAPES))
def test_chains_that_forget(guesses, np_backend, dtype, shapes, form):
    x, transitions, initial = shapes
    options = given_as(form, uniform(*transitions), None if initial is None else uniform(*initial))
    check(np_backend, dtype, normal(*x), **options)
    assert all(guesses)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
def test_elsewhere(guesses, backend, dtype, form):
    x, options = normal(2, T, 3), given_as(form, uniform(1, 3, 3), uniform(3))
    check(backend, dtype, x, **options)
    # Without float64 logs may round too much to be compared.
    assert all(guesses) or "float64" not in backend.dtypes


@pytest.mark.parametrize("stay", [0.5, 0.8, 0.9, 0.95, 0.99, 0.999, 0.9999999])
def test_chains_that_forget_slowly_are_right(guesses, np_backend, dtype, stay):
    """Whether a guess holds depends on the dtype; what is returned does not depend on that."""
    x, options = normal(T, K, sd=0.1), {"transitions": sticky(stay), "initial": uniform(K)}
    check(np_backend, dtype, x, **options)
    if stay < 0.7:
        assert guesses[0]
    if stay > 0.998:
        assert not any(guesses)


@pytest.mark.parametrize("trials", [1, 2])
def test_results_are_better_guesses(guesses, monkeypatch, np_backend, dtype, trials):
    """What the steps of a guess do not forget, a whole segment, or two, may."""
    monkeypatch.setattr(time_parallel, "_TRIALS", trials)
    transitions = sticky(0.85 if dtype == "float32" else 0.68)
    check_chain(np_backend, dtype, np.zeros((T, K)), transitions=transitions, initial=np.eye(K)[0])
    assert all(guesses) == any(guesses) == (trials > 1)


@pytest.mark.parametrize("kind", ["identity", "left to right", "periodic", "two halves"])
def test_chains_that_never_forget(guesses, np_backend, dtype, kind):
    transitions = {
        "identity": np.eye(K),
        "left to right": 0.5 * (np.eye(K) + np.eye(K, k=1)),
        "periodic": np.roll(np.eye(K), 1, axis=1),
        "two halves": np.kron(np.eye(2), np.ones((3, 3)))[:K, :K],
    }[kind]
    options = {"transitions": transitions[None], "initial": np.arange(1.0, K + 1)}
    check(np_backend, dtype, normal(T, K), **options)
    assert not any(guesses)


@pytest.mark.parametrize("value", [-INF, INF, NAN])
@pytest.mark.parametrize(
    "at", [T - 40, *(pytest.param(i, marks=pytest.mark.exhaustive) for i in (0, 100, T - 1))]
)
def test_special_values(guesses, np_backend, dtype, value, at):
    """A closed state is guessed right; +inf and NaN are not, wherever they are."""
    x = normal(T, K)
    x[at, 1] = value
    check(np_backend, dtype, x, transitions=uniform(1, K, K))
    if value == -INF:
        assert all(guesses)


@pytest.mark.parametrize("at", [0, 100, T - 1])
def test_chains_without_a_path(guesses, np_backend, dtype, at):
    x = normal(2, T, K)
    x[0, at] = -INF
    check(np_backend, dtype, x, transitions=uniform(1, K, K))


@pytest.mark.parametrize("sd", [10, 30, 1000])
def test_wide_ranges(guesses, np_backend, dtype, sd):
    """Logs far below the largest are rounded to more than guesses may be off by."""
    x = normal(2, T, K, sd=sd)
    check(np_backend, dtype, x, transitions=uniform(1, K, K))
    assert all(guesses) or sd > 10


def test_sparse_transitions(guesses, np_backend, dtype):
    """Zeros in the same places, at the guesses' ends and the results'."""
    rng = np.random.default_rng(5)
    transitions = uniform(T - 1, K, K) * (rng.random((T - 1, K, K)) < 0.6)
    check(np_backend, dtype, normal(T, K), transitions=transitions)


def test_scale_is_carried_exactly(guesses, np_backend):
    """Large offsets of each step add up to what they are, without a rounding at each segment."""
    x = np.round(normal(T, K)) + 1e6
    case = Case(np_backend, "float64", x, transitions=np.full((1, K, K), 1.0))
    weights = reference.wide(np.exp(x - 1e6)).sum(axis=-1)
    exact = np.sum(np.log(weights)) + T * np.longdouble(10**6)
    out = case.read(case.chain.log_partition())
    assert_within(out, exact, chain_bound(exact, 0 * exact, 1, K, "float64"))
    assert all(guesses)


def test_a_long_chain_guesses_by_itself(monkeypatch, dtype):
    monkeypatch.setattr(_dispatch, "COMPILED", False)
    x = normal(20_000, 8).astype(dtype)
    plan = alc.LogChain(x, transitions=uniform(1, 8, 8).astype(dtype)).plan()
    assert plan.segments > 100
    assert "guesses" in str(plan)


@pytest.mark.parametrize("operation", ["marginals", "expected_transitions"])
def test_plans_of_posteriors(monkeypatch, operation):
    monkeypatch.setattr(_dispatch, "COMPILED", False)
    chain = alc.LogChain(normal(20_000, 8), transitions=uniform(1, 8, 8))
    plan = chain.plan(operation)
    assert plan.segments > 100
    assert plan.flops > chain.plan().flops


@pytest.mark.parametrize("T", [17, 40, 100, 300])
def test_short_chains_are_not_cut(monkeypatch, T):
    """Guessing costs a few hundred steps: it does not pay before."""
    monkeypatch.setattr(_dispatch, "COMPILED", False)
    assert alc.LogChain(normal(T, 8), transitions=uniform(1, 8, 8)).plan().segments == 1


@pytest.mark.parametrize("segment", [0, 2])
def test_a_wrong_guess_does_not_hold(guesses, monkeypatch, np_backend, segment):
    """One entry of a guess, off by a thousandth: what segments end with tells, and is right."""
    calls = []

    def spoilt(*args, **options):
        logs, whole = last_message(*args, **options)
        calls.append(args)
        if len(calls) == 2:
            logs[segment, 2] += 1e-3
        return logs, whole

    chain = alc.LogChain(normal(T, K), transitions=uniform(1, K, K))
    right = chain.log_partition()
    last_message = time_parallel.last_message
    monkeypatch.setattr(time_parallel, "last_message", spoilt)
    np.testing.assert_allclose(chain.log_partition(), right, rtol=1e-14)
    # The front and guesses; twice what lies between segments and within.
    assert len(calls) == 6
    calls.clear()
    monkeypatch.setattr(time_parallel, "_TRIALS", 1)
    np.testing.assert_allclose(chain.log_partition(), right, rtol=1e-14)
    assert guesses == [True, True, False]


@pytest.mark.parametrize("segment", [1, 3])
@pytest.mark.parametrize("number", [2, 3], ids=["forward", "backward"])
def test_a_wrong_guess_of_a_posterior_does_not_hold(
    guesses, monkeypatch, np_backend, number, segment
):
    calls = []

    def spoilt(*args, **options):
        logs, whole = last_message(*args, **options)
        calls.append(args)
        # After the front, guesses.
        if len(calls) == number:
            logs[segment, 2] += 1e-3
        return logs, whole

    chain = alc.LogChain(normal(T, K), transitions=1 + uniform(1, K, K))
    right = chain.marginals()
    last_message = time_parallel.last_message
    monkeypatch.setattr(time_parallel, "last_message", spoilt)
    np.testing.assert_allclose(chain.marginals(), right, rtol=1e-13)
    assert guesses == [True, False]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    "workspace", [pytest.param(1 << 20, marks=pytest.mark.exhaustive), 1 << 22]
)
def test_segments_keep_to_the_workspace(monkeypatch, workspace, shared):
    monkeypatch.setattr(_dispatch, "COMPILED", False)
    x, transitions = normal(20_000, 8), uniform(1 if shared else 19_999, 8, 8)
    chain = alc.LogChain(x, transitions=transitions, workspace=workspace)
    assert chain.plan("marginals").segments > 10
    assert temporaries(chain.marginals) <= workspace
    assert temporaries(chain.expected_transitions) <= workspace

    def gradients():
        value, pullback = alc.vjp.log_partition(chain)
        return value, *pullback(np.asarray(1.0))[:2]

    assert temporaries(gradients) <= workspace


def test_failed_guesses_leave_nothing_behind(monkeypatch):
    """Results that were begun are given back before they are computed without segments."""
    monkeypatch.setattr(_dispatch, "COMPILED", False)
    x, size, workspace = normal(12_000, 16), 16, 1 << 20
    # This matrix forgets slowly: of the value, a second guess holds.
    edges = 0.5 * np.eye(size) + 0.5 / size
    chain = alc.LogChain(x, transitions=edges, workspace=workspace)
    assert chain.plan("marginals").segments > 10
    assert temporaries(chain.marginals) <= workspace

    def gradients():
        value, pullback = alc.vjp.log_partition(chain)
        return value, *pullback(np.asarray(1.0))[:2]

    assert temporaries(gradients) <= workspace


@pytest.mark.skipif(why_not() is not None, reason="needs compiled loops")
def test_loops_take_over_where_guesses_fail(monkeypatch):
    x, left_to_right = normal(T, K), np.triu(uniform(K, K))[None]
    chain = alc.LogChain(x, transitions=left_to_right)
    expected, backends, find = chain.log_partition(), [], _dispatch.implementation

    def spy(operation, backend):
        if operation in _dispatch.CHAINS:
            backends.append(backend)
        return find(operation, backend)

    monkeypatch.setattr(_dispatch, "implementation", spy)
    monkeypatch.setattr(_dispatch, "choose", lambda *_: Choice("segments", "forced", 4))
    assert chain.log_partition() == expected
    assert backends == ["array", "compiled"]
