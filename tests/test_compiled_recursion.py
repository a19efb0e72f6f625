"""Messages of compiled and array backends in segments of any steps, and their forms."""

import numpy as np
import pytest

from arraylogchain._backends.array import ArrayBackend
from arraylogchain._backends.interface import Keep
from arraylogchain._backends.shards import shards
from arraylogchain._inputs import arrays
from arraylogchain._inputs.chain import make_chain
from arraylogchain._numba import why_not
from tests import drifting_chains
from tests.chain_scenarios import make, normal, uniform
from tests.recursions import check_recursions

if why_not() is not None:
    pytest.skip(why_not(), allow_module_level=True)

from arraylogchain._backends.compiled.backend import CompiledBackend

INF = np.inf
backends = pytest.mark.parametrize("recursion", [CompiledBackend, ArrayBackend])


def check(recursion, x, **options):
    """Compare all messages; return the number of rows of all segments in log space."""
    blocks = check_recursions(recursion, arrays._numpy_context("float64"), x, **options)
    return sum(np.count_nonzero(block.carry.is_log) for block in blocks)


def on_one_shard(recursion, x, P):
    ctx = arrays._numpy_context("float64")
    chain = make_chain({"log_potentials": x, "transitions": P}, None)
    return recursion(*shards(ctx, chain, *chain.sizes), 1 << 26)


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


@backends
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cuts", [(1, 2, 3, 4, 5, 6), (3,), (2, 20)])
def test_scenarios_in_blocks(recursion, name, cuts):
    options = make(name)
    check(recursion, options.pop("x"), cuts=cuts, **options)


@backends
@pytest.mark.parametrize("kind", drifting_chains.KINDS)
@pytest.mark.parametrize("block", range(4))
def test_drifting_chains_in_blocks(recursion, kind, block):
    rng = np.random.default_rng(block)
    for _ in range(4):
        options = getattr(drifting_chains, kind)(rng, 300.0)
        cuts = tuple(np.unique(rng.integers(1, 60, 5)).tolist())
        check(recursion, options.pop("x"), cuts=cuts, **options)


@backends
@pytest.mark.parametrize("entry", [2.0**n for n in (-399, -401, -699, -701, -1021, -1023, -1074)])
@pytest.mark.parametrize("weight", [-400.0, -415.0, -417.0, -480.0, -690.0, -699.0, -701.0])
def test_weights_and_entries_about_the_least(recursion, entry, weight):
    """A state that is reached through a small entry only, from a state of small weight only."""
    P = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, entry], [0.0, 0.0, 1.0]])
    x = np.zeros((9, 5, 3))
    x[:, 0] = [0.0, weight, -INF]
    for scale in (1.0, 2.0**-40, 2.0**40):
        check(recursion, x, transitions=P * scale, cuts=(2, 4))


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("shift", [-30.0, 30.0, 1e5])
def test_weights_that_grow_and_fall_stay_linear(rows, shift):
    assert (
        check(CompiledBackend, normal(rows, 300, 3) + shift, transitions=1e3 * uniform(3, 3)) == 0
    )


def test_rows_become_linear_again():
    x = normal(9, 40, 3)
    x[:5, 20, 1] = -1000.0
    arguments = {"transitions": np.full((3, 3), 0.5)}
    assert check(CompiledBackend, x, **arguments) == 2 * 5
    # Backward, the carry of the segment is in log space as well.
    assert check(CompiledBackend, x, cuts=(10, 20, 30), **arguments) == 3 * 5


@pytest.mark.parametrize("K", [40, 65])
@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("mixes", [False, True])
def test_few_entries(K, width, mixes):
    """Left to right or in any order, so long that weights do not fit linear numbers."""
    k, j = np.indices((K, K))
    P = np.where((j >= k) & (j < k + width), 0.5, 0.0)
    P = P[:, np.random.default_rng(K).permutation(K)] if mixes else P
    x = normal(2, 2 * K, K, sd=60)
    assert check(CompiledBackend, x, transitions=P, initial=np.eye(K)[0]) > 0


@backends
def test_states_that_are_given_are_left_as_they_are(recursion):
    backend = on_one_shard(recursion, normal(9, 8, 3), uniform(3, 3))

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


@backends
@pytest.mark.parametrize("u", [0.0, np.nextafter(1.0, 0.0)])
def test_states_of_weight_0_are_never_drawn(recursion, u):
    x = np.array([[-INF, 0.0, 0.1, -INF]] * 3)
    backend, steps = on_one_shard(recursion, x, np.full((4, 4), 0.1)), slice(0, 3)
    updated = backend.advance(None, steps, False, Keep.UPDATED).updated
    after = np.full((1, 1, 1), 1 if u == 0.0 else 2)
    assert np.all(
        backend.sampling_backtrace(updated, after, steps, np.full((3, 1, 1, 1), u)) == after
    )
