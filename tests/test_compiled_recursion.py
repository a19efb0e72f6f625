"""Chains in segments of few steps, by compiled loops and by array operations, and their forms."""

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain._backends.array import ArrayBackend
from arraylogchain._backends.interface import Keep
from arraylogchain._backends.shards import shards
from arraylogchain._inputs import arrays
from arraylogchain._inputs.chain import make_chain
from arraylogchain._numba import why_not
from tests import drifting_chains
from tests.chain_checks import check_chain
from tests.chain_scenarios import make, normal, uniform

if why_not() is not None:
    pytest.skip(why_not(), allow_module_level=True)

from arraylogchain._backends.compiled.backend import CompiledBackend

INF = np.inf
MESSAGES = ("log_partition", "messages", "posterior", "paths")
routes = pytest.mark.parametrize("chains_on", ["segments", "array"], indirect=True)


@pytest.fixture
def log_rows(monkeypatch):
    """Return a function that computes messages both ways, and counts carries in log space."""
    count, advance = [], CompiledBackend.advance

    def counted(*args):
        segment = advance(*args)
        count.append(np.count_nonzero(segment.carry.is_log))
        return segment

    def messages(x, **weights):
        count.clear()
        chain = alc.LogChain(x, **weights)
        chain.forward_messages(), chain.backward_messages()
        return sum(count)

    monkeypatch.setattr(CompiledBackend, "advance", counted)
    return messages


NAMES = [
    "two batch axes, matrices along one, linear",
    "ragged, matrices of each row, logs",
    "ragged, two batch axes, linear",
    "final weights, ragged, nine rows, linear",
    "rows that widen, sd = 400, linear",
    "nan in x, linear",
    "inf in transitions, logs",
    "sparse, matrix for each step, sd = 30, logs",
    "hole, underflow from both ends",
    "zero weights beside wide potentials",
    "falling through subnormals",
    "leaving the range",
    "potentials near 1e4",
]


@routes
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("steps", [1, 3])
def test_scenarios_in_segments(np_backend, cut, name, steps):
    cut(steps=steps)
    check_chain(np_backend, "float64", **make(name), only=MESSAGES)


@routes
@pytest.mark.parametrize("kind", drifting_chains.KINDS)
@pytest.mark.parametrize("block", range(4))
def test_drifting_chains_in_segments(np_backend, cut, kind, block):
    rng = np.random.default_rng(block)
    for steps in (2, 5, 11):
        cut(steps=steps)
        options = getattr(drifting_chains, kind)(rng, 300.0)
        check_chain(np_backend, "float64", **options, only=MESSAGES)


@routes
@pytest.mark.parametrize("entry", [2.0**n for n in (-399, -401, -699, -701, -1021, -1023, -1074)])
@pytest.mark.parametrize("weight", [-400.0, -415.0, -417.0, -480.0, -690.0, -699.0, -701.0])
def test_weights_and_entries_about_the_least(np_backend, cut, entry, weight):
    """A state that is reached through a small entry only, from a state of small weight only."""
    P = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, entry], [0.0, 0.0, 1.0]])
    x = np.zeros((9, 5, 3))
    x[:, 0] = [0.0, weight, -INF]
    cut(steps=2)
    for scale in (1.0, 2.0**-40, 2.0**40):
        check_chain(np_backend, "float64", x, transitions=P * scale, only=MESSAGES)


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("shift", [-30.0, 30.0, 1e5])
def test_weights_that_grow_and_fall_stay_linear(log_rows, rows, shift):
    assert log_rows(normal(rows, 300, 3) + shift, transitions=1e3 * uniform(3, 3)) == 0


def test_rows_become_linear_again(log_rows, cut):
    x = normal(9, 40, 3)
    x[:5, 20, 1] = -1000.0
    arguments = {"transitions": np.full((3, 3), 0.5)}
    assert log_rows(x, **arguments) == 2 * 5
    # Backward, the carry of the segment is in log space as well.
    cut(steps=10)
    assert log_rows(x, **arguments) == 3 * 5


@pytest.mark.parametrize("K", [40, 65])
@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("mixes", [False, True])
def test_few_entries(np_backend, log_rows, K, width, mixes):
    """Left to right or in any order, so long that weights do not fit linear numbers."""
    k, j = np.indices((K, K))
    P = np.where((j >= k) & (j < k + width), 0.5, 0.0)
    P = P[:, np.random.default_rng(K).permutation(K)] if mixes else P
    x, arguments = normal(2, 2 * K, K, sd=60), {"transitions": P, "initial": np.eye(K)[0]}
    check_chain(np_backend, "float64", x, **arguments, only=MESSAGES)
    assert log_rows(x, **arguments) > 0


@pytest.mark.parametrize("recursion", [CompiledBackend, ArrayBackend])
def test_states_that_are_given_are_left_as_they_are(recursion):
    ctx = arrays._numpy_context("float64")
    chain = make_chain({"log_potentials": normal(9, 8, 3), "transitions": uniform(3, 3)}, None)
    backend = recursion(*shards(ctx, chain, *chain.sizes), 1 << 26)

    def parts(x):
        return x.values, x.shifts, x.exponents, x.is_log

    state = backend.advance(None, slice(0, 4), False, Keep.NOTHING).carry
    before, states = [np.copy(x) for x in parts(state)], []
    for keep in (Keep.NOTHING, Keep.UPDATED, Keep.ALL):
        states.append(parts(backend.advance(state, slice(4, 8), False, keep).carry))
    for result, first, old, now in zip(*states[1:], before, parts(state), strict=False):
        np.testing.assert_array_equal(result, first)
        np.testing.assert_array_equal(old, now)
    for stored, alone in zip(states[1], states[0], strict=True):
        np.testing.assert_array_equal(stored, alone)


@routes
def test_products_of_small_weights_and_entries_are_not_lost(chains_on):
    """The only path multiplies a weight near the least one of linear space by the least entry."""
    transitions, initial = np.diag([1, 2.0**-699]), np.array([1, 2.0**-680])
    options = {"transitions": transitions, "initial": initial, "final": np.array([0.0, 1])}
    log_z = alc.LogChain(np.zeros((2, 2)), **options).log_partition()
    np.testing.assert_allclose(log_z, -(680 + 699) * np.log(2), rtol=1e-15)
