"""Chains of 100,000 steps: errors do not pile up, and nothing runs out of range."""

import functools

import numpy as np
import pytest

import arraylogchain as alc
from tests import reference
from tests.error_model import assert_within, chain_bound

T, K = 100_000, 4


@functools.cache
def model(per_step, dtype):
    """Return x, transitions, initial and log_partition in long double; one reference per case."""
    rng = np.random.default_rng(11)
    x = rng.normal(size=(T, K)).astype(dtype)
    transitions = rng.random((T - 1 if per_step else 1, K, K)).astype(dtype)
    initial = rng.random(K).astype(dtype)
    return x, transitions, initial, reference.long_chain(x, transitions, initial)


@pytest.mark.parametrize("per_step", [False, True], ids=["one matrix", "one per step"])
@pytest.mark.parametrize("form", ["linear", "logs"])
def test_log_partition(dtype, per_step, form):
    x, transitions, initial, exact = model(per_step, dtype)
    if form == "linear":
        chain = alc.LogChain(x, transitions=transitions, initial=initial)
    else:
        # The logs are rounded: what the library is given differs a little from the reference's.
        logs = np.log(transitions.astype(np.float64)).astype(dtype)
        chain = alc.LogChain(x, log_transitions=logs, log_initial=np.log(initial))
    # On average an emission lies this far below its step's largest, whatever path decides.
    gap = np.sum(reference.wide(np.max(x, axis=-1, keepdims=True) - x).max(axis=-1))
    if form == "logs":
        gap += T * (np.ptp(logs) + np.max(np.abs(logs)))
    assert_within(chain.log_partition(), exact, chain_bound(exact, gap, T, K, dtype))


def test_error_is_far_below_the_bound():
    """Typical errors are a random walk's: single precision keeps six digits of a sum of 10**5."""
    x, transitions, initial, exact = model(True, "float32")
    out = alc.LogChain(x, transitions=transitions, initial=initial).log_partition()
    assert abs(float(out) - float(exact)) < 2e-6 * abs(float(exact))


def test_messages_of_states_that_never_mix(dtype):
    """Identity transitions: each message is the sum of its state's potentials so far."""
    steps = 20_000
    x = np.random.default_rng(12).normal(0, 2, (steps, K)).astype(dtype)
    chain = alc.LogChain(x, transitions=np.eye(K, dtype=dtype)[None])
    exact = np.cumsum(reference.wide(x), axis=0)
    gaps = np.cumsum(np.max(x, axis=-1, keepdims=True) - reference.wide(x), axis=0)
    bound = chain_bound(exact, gaps, np.arange(1, steps + 1)[:, None], K, dtype)
    assert_within(chain.forward_messages(), exact, bound)


def test_uniform_chain_is_exactly_known():
    """Doubly stochastic halves and potentials of 0: every message is log 1 at every step."""
    x = np.zeros((T, 2), np.float32)
    chain = alc.LogChain(x, transitions=np.full((1, 2, 2), 0.5, np.float32))
    assert abs(float(chain.log_partition()) - np.log(2)) < 1e-6
    assert np.max(np.abs(chain.forward_messages())) < 1e-6


def test_batch_of_long_chains(dtype):
    """Rows beside each other do not disturb each other."""
    x, transitions, initial, exact = model(False, dtype)
    steps = 5_000
    rows = np.stack([x[:steps], x[steps : 2 * steps] * 30, x[:steps]])
    out = alc.LogChain(rows, transitions=transitions, initial=initial).log_partition()
    alone = [
        alc.LogChain(row, transitions=transitions, initial=initial).log_partition() for row in rows
    ]
    assert out[0] == out[2]
    np.testing.assert_allclose(out, alone, rtol=100 * np.finfo(dtype).eps)
    assert np.isfinite(exact)
