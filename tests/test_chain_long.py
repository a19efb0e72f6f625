"""Chains of 100,000 steps: errors do not pile up, and nothing runs out of range."""

import functools

import numpy as np
import pytest

import arraylogchain as alc
from tests import reference
from tests.error_model import assert_within, chain_bound

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
    # Whatever path decides, its emissions and edges lie at most this far below the largest.
    gap = np.sum(np.ptp(x, axis=-1))
    if form == "logs":
        gap += T * np.ptp(options["log_transitions"])
    out = alc.LogChain(x, **options).log_partition()
    assert_within(out, exact, chain_bound(exact, gap, T, K, dtype))


def test_error_is_far_below_the_bound():
    """Typical errors are a random walk's: single precision keeps six digits of a sum of 10**5."""
    x, options, exact = model("float32", True, "linear")
    out = alc.LogChain(x, **options).log_partition()
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
    """Doubly stochastic halves and potentials of 0: every message is log 1 at every step.

    Powers of two are exact, so that errors do not pile up, whatever the bound would allow.
    """
    x = np.zeros((T, 2), np.float32)
    chain = alc.LogChain(x, transitions=np.full((1, 2, 2), 0.5, np.float32))
    assert abs(float(chain.log_partition()) - np.log(2)) < 1e-4
    assert np.max(np.abs(chain.forward_messages())) < 1e-4


def test_batch_of_long_chains(dtype):
    """Rows beside each other do not disturb each other, however different their ranges."""
    x, options, _ = model(dtype, False, "linear")
    steps = 5_000
    rows = np.stack([x[:steps], x[steps : 2 * steps] * 30, x[:steps]])
    out = alc.LogChain(rows, **options).log_partition()
    alone = [alc.LogChain(row, **options).log_partition() for row in rows]
    np.testing.assert_allclose(out, alone, rtol=100 * np.finfo(dtype).eps)
    exact = [reference.long_chain(row, *options.values()) for row in rows]
    gap = np.sum(np.ptp(rows, axis=-1), axis=-1)
    assert_within(out, np.array(exact), chain_bound(np.array(exact), gap, steps, K, dtype))
