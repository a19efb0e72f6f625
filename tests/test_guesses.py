"""Segments of long chains that begin with guessed messages: verified, or not used at all."""

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain import plan
from arraylogchain._chain.long import guesses as module
from arraylogchain._chain.long import segments
from arraylogchain._chain.posterior import results
from arraylogchain.plan import Segments
from tests import reference
from tests.checks import check_chain
from tests.error_model import assert_within, chain_bound
from tests.gradient_checks import check_posterior
from tests.path_checks import Case
from tests.test_chain import FORMS, given_as, normal, uniform

pytestmark = pytest.mark.chains

INF, NAN = np.inf, np.nan
K, LENGTH = 5, 50
T = 5 * LENGTH + 10


@pytest.fixture
def guesses(monkeypatch):
    """Let chains guess, whatever their plan would be; return whether guesses held, in a list."""
    held = []

    def spy(*args, **options):
        found = guess(*args, **options)
        held.append(not isinstance(found, float))
        return found

    def guessed(count, *_):
        return Segments(max(1, (count - 1) // LENGTH), 1)

    def spy_on_passes(*args):
        last = verified(*args)
        held.append(last is not None)
        return last

    guess, verified = segments.guessed_messages, results._add_and_verify
    monkeypatch.setattr(segments, "guessed_messages", spy)
    monkeypatch.setattr(results, "_add_and_verify", spy_on_passes)
    monkeypatch.setattr(plan, "best_segments", guessed)
    return held


def sticky(stay):
    """Return a matrix that stays in each state with a given probability."""
    return (stay * np.eye(K) + (1 - stay) / (K - 1) * (1 - np.eye(K)))[None]


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
    check_chain(np_backend, dtype, normal(*x), **options)
    check_posterior(np_backend, dtype, normal(*x), **options)
    assert len(guesses) > 4
    assert all(guesses)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
def test_elsewhere(guesses, backend, dtype, form):
    x, options = normal(2, T, 3), given_as(form, uniform(1, 3, 3), uniform(3))
    check_chain(backend, dtype, x, **options)
    check_posterior(backend, dtype, x, **options)
    Case(backend, dtype, x, **options).check_entropy()
    # Without float64 logs round too much to be compared.
    assert all(guesses) == ("float64" in backend.dtypes)


@pytest.mark.parametrize("stay", [0.5, 0.8, 0.9, 0.95, 0.99, 0.999, 0.9999999])
def test_chains_that_forget_slowly_are_right(guesses, np_backend, dtype, stay):
    """Whether a guess holds depends on the dtype; what is returned does not depend on that."""
    x, options = normal(T, K, sd=0.1), {"transitions": sticky(stay), "initial": uniform(K)}
    check_chain(np_backend, dtype, x, **options)
    check_posterior(np_backend, dtype, x, **options)
    if stay < 0.7:
        assert guesses[0]
    if stay > 0.998:
        assert not any(guesses)


@pytest.mark.parametrize("trials", [1, 2])
def test_results_are_better_guesses(guesses, monkeypatch, np_backend, dtype, trials):
    """What the steps of a guess do not forget, a whole segment, or two, may."""
    monkeypatch.setattr(module, "_TRIALS", trials)
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
    check_chain(np_backend, dtype, normal(T, K), **options)
    assert not any(guesses)


@pytest.mark.parametrize("value", [-INF, INF, NAN])
@pytest.mark.parametrize("at", [0, 100, T - 40, T - 1])
def test_special_values(guesses, np_backend, dtype, value, at):
    """A closed state is guessed right; +inf and NaN are not, wherever they are."""
    x = normal(T, K)
    x[at, 1] = value
    check_chain(np_backend, dtype, x, transitions=uniform(1, K, K))
    check_posterior(np_backend, dtype, x, transitions=uniform(1, K, K))
    if value == -INF:
        assert all(guesses)


@pytest.mark.parametrize("at", [0, 100, T - 1])
def test_chains_without_a_path(guesses, np_backend, dtype, at):
    x = normal(2, T, K)
    x[0, at] = -INF
    check_chain(np_backend, dtype, x, transitions=uniform(1, K, K))
    check_posterior(np_backend, dtype, x, transitions=uniform(1, K, K))


@pytest.mark.parametrize("sd", [10, 30, 1000])
def test_wide_ranges(guesses, np_backend, dtype, sd):
    """Logs far below the largest are rounded to more than guesses may be off by."""
    x = normal(2, T, K, sd=sd)
    check_chain(np_backend, dtype, x, transitions=uniform(1, K, K))
    check_posterior(np_backend, dtype, x, transitions=uniform(1, K, K))
    assert all(guesses) or sd > 10


def test_sparse_transitions(guesses, np_backend, dtype):
    """Zeros in the same places, at the guesses' ends and the results'."""
    rng = np.random.default_rng(5)
    transitions = uniform(T - 1, K, K) * (rng.random((T - 1, K, K)) < 0.6)
    check_chain(np_backend, dtype, normal(T, K), transitions=transitions)
    check_posterior(np_backend, dtype, normal(T, K), transitions=transitions)


def test_scale_is_carried_exactly(guesses, np_backend):
    """Large offsets of each step add up to what they are, without a rounding at each segment."""
    x = np.round(normal(T, K)) + 1e6
    case = Case(np_backend, "float64", x, transitions=np.full((1, K, K), 1.0))
    weights = reference.wide(np.exp(x - 1e6)).sum(axis=-1)
    exact = np.sum(np.log(weights)) + T * np.longdouble(10**6)
    out = case.read(case.chain.log_partition())
    assert_within(out, exact, chain_bound(exact, 0 * exact, 1, K, "float64"))
    assert all(guesses)


@pytest.mark.parametrize("stay", [0.9, 0.97])
def test_segments_get_longer(guesses, np_backend, dtype, stay):
    """The first guesses tell how long it takes to forget."""
    T = 12_000
    x, options = normal(T, 2, sd=0.1), {"transitions": sticky(stay)[:, :2, :2] + (1 - stay) / 2}
    chain = alc.LogChain(x.astype(dtype), transitions=options["transitions"].astype(dtype))
    exact = reference.long_chain(
        *(a.astype(dtype) for a in (x, options["transitions"])), np.ones(2)
    )
    gap = np.sum(np.ptp(x, axis=-1))
    assert_within(chain.log_partition(), exact, chain_bound(exact, gap, T, 2, dtype))
    assert guesses == [False, True]


def test_a_long_chain_guesses_by_itself(dtype):
    x = normal(20_000, 8).astype(dtype)
    chain = alc.LogChain(x, transitions=uniform(1, 8, 8).astype(dtype))
    assert chain.plan().segments.guessed > 100
    assert "guesses" in str(chain.plan())


@pytest.mark.parametrize("method", ["marginals", "expected_transitions", "entropy"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("which", [1, 2, -2])
def test_a_wrong_guess_does_not_hold(guesses, monkeypatch, np_backend, which, backward, method):
    """One entry of any message that a pass begins with, off by a thousandth."""

    def spoilt(ctx, cut, workspace, is_backward):
        logs, whole = unverified(ctx, cut, workspace, is_backward)
        if is_backward == backward:
            logs[which - backward, 2] += 1e-3
        return logs, whole

    x, transitions = normal(T, K), uniform(1, K, K)
    chain = alc.LogChain(x, transitions=transitions)
    right = getattr(chain, method)()
    assert guesses == [True]
    unverified = segments.unverified_messages
    monkeypatch.setattr(segments, "unverified_messages", spoilt)
    found = getattr(chain, method)()
    assert guesses[1:] == [False, True, True]
    np.testing.assert_allclose(found, right, rtol=1e-11, atol=1e-11)
