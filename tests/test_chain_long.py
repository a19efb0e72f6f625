"""Long chains, up to 100,000 steps: errors do not pile up, and nothing runs out of range.

Long chains of few states may be cut into segments, whose products are then chained; what is hard
for a chain must be right there as well.
"""

import functools

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain import _dispatch
from tests import reference
from tests.checks import check_chain
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


def _hard_cases():
    """Yield chains of 257 steps and 4 states, two rows, with what they are hard for."""
    rng = np.random.default_rng(13)
    x, transitions = rng.normal(size=(2, 257, 4)), rng.random((256, 4, 4))
    left_to_right = 0.5 * (np.eye(4) + np.eye(4, k=1))[None]
    yield "plain", x, transitions
    yield "wide", 30 * x, transitions
    yield "very wide", 1000 * x, transitions
    yield "sparse", x, transitions * (rng.random(transitions.shape) < 0.4)
    yield "sparse and wide", 100 * x, transitions * (rng.random(transitions.shape) < 0.4)
    yield "left to right", x, left_to_right
    yield "left to right and wide", 100 * x, left_to_right
    yield "never mixing", 20 * x, np.eye(4)[None]
    yield "one matrix for each row", x, transitions[:2, None]
    yield "tiny and large weights", x, 10.0 ** rng.uniform(-30, 30, transitions.shape)
    closed = x.copy()
    closed[0, 100:140, :3], closed[1, ::7, 1] = -np.inf, -np.inf
    yield "closed states", closed, transitions
    ended = x.copy()
    ended[0, 150] = -np.inf
    yield "without a path", ended, transitions
    special = x.copy()
    special[0, 130, 2], special[1, 256, 0] = np.nan, np.inf
    yield "special values", special, transitions


HARD_CASES = {name: arrays for name, *arrays in _hard_cases()}


@pytest.mark.parametrize("form", ["linear", "logs"])
@pytest.mark.parametrize("case", list(HARD_CASES))
def test_hard_cases(np_backend, dtype, case, form):
    x, transitions = HARD_CASES[case]
    if form == "linear":
        options = {"transitions": transitions}
    else:
        with np.errstate(divide="ignore"):
            options = {"log_transitions": np.log(transitions)}
    check_chain(np_backend, dtype, x, **options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["sparse and wide", "special values"])
def test_hard_cases_elsewhere(backend, dtype, case):
    x, transitions = HARD_CASES[case]
    check_chain(backend, dtype, x, transitions=transitions, initial=np.array([0, 0.5, 0, 1e-30]))


def test_infinities_in_segments():
    """A dead start keeps +inf further on from being NaN, segments or not."""
    x = np.zeros((17, 2))
    x[4, 0], x[6, 1] = -np.inf, np.inf
    for steps in (9, 17):
        chain = alc.LogChain(x[:steps], transitions=np.ones((1, 2, 2)))
        assert chain.log_partition() == np.inf


@pytest.mark.parametrize("magnitude", [1e4, 1e6])
def test_opposite_magnitudes_in_segments(monkeypatch, magnitude):
    """Segments of large and of small weights, with a state that no segment goes on from."""
    x = np.random.default_rng(1).normal(size=(4001, 2))
    x[:2000] -= magnitude
    x[2000:4000] += magnitude
    transitions = np.array([[[0.5, 0.5], [0.0, 0.0]]])
    monkeypatch.setattr(_dispatch, "COMPILED", False)
    chain = alc.LogChain(x, transitions=transitions)
    assert chain.plan().route == "segments"
    with np.errstate(divide="ignore"):
        exact = reference.chain(x, np.log(reference.wide(transitions)))
    bound = chain_bound(exact.log_partition, exact.partition_gap, 4001, 2, "float64")
    assert_within(chain.log_partition(), exact.log_partition, bound)


def test_opposite_matrices():
    """Messages do not round at the magnitude of the first matrix."""
    logs = np.random.default_rng(2).normal(size=(40, 2, 2))
    logs[::2] += 1e3
    logs[1::2] -= 1e3
    chain = alc.LogChain(np.zeros((41, 2)), log_transitions=logs)
    exact = reference.chain(np.zeros((41, 2)), logs, edges_in_logs=True)
    steps = np.arange(1, 42)[:, None]
    bound = chain_bound(exact.messages, exact.message_gaps, steps, 2, "float64")
    assert_within(chain.forward_messages(), exact.messages, bound)
