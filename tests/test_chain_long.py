"""Chains of 100,000 steps: errors do not pile up, and nothing runs out of range."""

import functools

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain import _select
from tests import error_model, reference
from tests.chain_checks import check_chain
from tests.chain_scenarios import normal, uniform
from tests.error_model import assert_within, chain_bound

pytestmark = pytest.mark.chains

T, K = 100_000, 4


@functools.cache
def model(dtype, per_step, form):
    """Return the arguments of a chain, and its log_partition in long double."""
    rng = np.random.default_rng(11)
    x = rng.normal(size=(T, K)).astype(dtype)
    transitions = rng.random((T - 1 if per_step else 1, K, K)).astype(dtype)
    initial = rng.random(K).astype(dtype)
    if form == "linear":
        options = {"transitions": transitions, "initial": initial}
        return x, options, reference.long_chain(x, transitions, initial)
    options = {"log_transitions": np.log(transitions), "log_initial": np.log(initial)}
    linear = (np.exp(reference.wide(logs)) for logs in options.values())
    return x, options, reference.long_chain(x, *linear)


@pytest.mark.parametrize("per_step", [False, True], ids=["one matrix", "one per step"])
@pytest.mark.parametrize("form", ["linear", "logs"])
def test_log_partition(dtype, per_step, form):
    x, options, exact = model(dtype, per_step, form)
    # Whatever path decides, its weights lie at most this far below the largest.
    gap = 2 * np.sum(np.ptp(x, axis=-1)) + T * np.ptp(np.log(uniform(K, K)))
    out = alc.LogChain(x, **options).log_partition()
    assert_within(out, exact, chain_bound(exact, gap, T, K, dtype))


def test_error_is_far_below_the_bound():
    """Typical errors are a random walk's: single precision keeps six digits of a sum of 10**5."""
    x, options, exact = model("float32", True, "linear")
    out = alc.LogChain(x, **options).log_partition()
    assert abs(float(out) - float(exact)) < 2e-6 * abs(float(exact))


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_filtered(np_backend, kind):
    """Errors do not grow with the length: the chain forgets steps long ago."""
    if not _select.COMPILED:
        pytest.skip("array operations take seconds")
    x = normal(T, K).astype(kind)
    # The least entry is half of the largest: a step reduces differences to a sixth or less.
    P, initial = (0.5 + 0.5 * uniform(K, K)).astype(kind), uniform(K).astype(kind)
    result = alc.LogChain(x, transitions=P, initial=initial).filtered()
    exact = reference.long_filtered(x, P, initial)
    probability_bound, log_bound = error_model.filtered_bounds(*exact, 2, K, kind)
    assert_within(result.probabilities, exact[0], probability_bound)
    assert_within(result.log_normalizers, exact[1], log_bound)


def test_uniform_chain_is_exactly_known():
    """Doubly stochastic halves and potentials of 0: every message is log 1 at every step.

    Powers of two are exact, so that errors do not pile up, whatever the bound would allow.
    """
    x = np.zeros((T, 2), np.float32)
    chain = alc.LogChain(x, transitions=np.full((1, 2, 2), 0.5, np.float32))
    assert abs(float(chain.log_partition()) - np.log(2)) < 1e-4
    assert np.max(np.abs(chain.forward_messages())) < 1e-4


def test_entropy_of_a_markov_chain_is_known(np_backend, dtype):
    """That of the start and of every step: errors do not pile up, whatever the bound allows."""
    steps = 2000
    stay = np.array([[[0.75, 0.25], [0.25, 0.75]]])
    options = {"transitions": stay, "initial": np.full(2, 0.5), "only": ("entropy",)}
    case = check_chain(np_backend, dtype, np.zeros((steps, 2)), **options)
    expected = np.log(2) - (steps - 1) * (0.75 * np.log(0.75) + 0.25 * np.log(0.25))
    result = case.chain.entropy()
    np.testing.assert_allclose(result, expected, rtol=2e-5 if dtype == "float32" else 1e-12)
