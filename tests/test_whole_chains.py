"""Whole chains in one compiled call: when they are taken, declined, and what declined rows get."""

from collections import Counter

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain import _select
from arraylogchain._numba import why_not
from tests.chain_scenarios import left_to_right, normal, uniform

if why_not() is not None:
    pytest.skip(why_not(), allow_module_level=True)

from arraylogchain._backends.compiled.backend import CompiledBackend

INF, NAN = np.inf, np.nan


@pytest.fixture
def rows(monkeypatch):
    """Count rows that calls for whole chains took and declined, and those of segments."""
    count = Counter()

    def watch(name):
        method = getattr(CompiledBackend, name)

        def call(backend, *args, **options):
            result = method(backend, *args, **options)
            num_rows = backend.shard.groups * backend.shard.rows
            num_declined = num_rows if result is None else int(result.declined.sum())
            count["taken"] += num_rows - num_declined
            count["declined"] += num_declined
            return result

        monkeypatch.setattr(CompiledBackend, name, call)

    watch("best_paths")
    watch("posterior")  # `log_partition` calls it
    return count


@pytest.mark.parametrize("K", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("T", [1, 2, 4, 5, 8, 9, 13, 40])
def test_best_paths_of_whole_chains_are_those_of_segments(rows, monkeypatch, K, T):
    x, P = normal(5, T, K), uniform(K, K) * (uniform(K, K, seed=1) < 0.8)
    x[2, T // 2] = -INF
    arguments = {"initial": uniform(K), "log_final": normal(5, K), "lengths": [T, 1, T, T, T]}
    chain = alc.LogChain(x, transitions=P, **arguments)
    whole = chain.viterbi()
    assert rows == {"taken": 5, "declined": 0}
    monkeypatch.setattr(_select, "FUSED", False)
    by_segments = chain.viterbi()
    assert rows.total() == 5
    np.testing.assert_array_equal(whole.states, by_segments.states)
    np.testing.assert_array_equal(whole.log_weight, by_segments.log_weight)


@pytest.mark.parametrize(
    ("arguments", "declined"),
    [
        pytest.param({}, 0, id="few states"),
        pytest.param({"x": normal(4, 6, 9), "transitions": uniform(9, 9)}, 4, id="9 states"),
        pytest.param({"transitions": uniform(5, 3, 3)}, 4, id="a matrix for each step"),
        pytest.param({"transitions": uniform(4, 1, 3, 3)}, 0, id="a matrix for each row"),
        pytest.param({"transitions": np.array([[NAN, 1, 1]] * 3)}, 4, id="NaN transitions"),
        pytest.param({"log_final": np.array([[INF], [0], [0], [0]])}, 1, id="infinite final"),
        pytest.param({"x": normal(4, 6, 3) + 1e5, "lengths": [1, 6, 2, 3]}, 0, id="ragged"),
    ],
)
def test_best_paths_of_whole_chains_are_declined(rows, arguments, declined):
    arguments = {"x": normal(4, 6, 3), "transitions": uniform(3, 3), **arguments}
    if "log_final" in arguments:
        arguments["log_final"] = np.broadcast_to(arguments["log_final"], (4, 3))
    alc.LogChain(arguments.pop("x"), **arguments).viterbi()
    assert rows == {"taken": 4 - declined, "declined": declined}


def test_best_paths_of_long_chains_keep_within_the_workspace(rows):
    x = np.zeros((100_000, 2), np.float32)
    alc.LogChain(x, transitions=np.ones((2, 2), np.float32), workspace=1 << 20).viterbi()
    assert rows == {"taken": 0, "declined": 1}


def results(chain):
    """Return everything that sums compute, and gradients for cotangents of both signs, one 0."""
    value, pullback = alc.vjp.log_partition(chain)
    g = np.resize([1.0, -2.0, 0.0, 0.5], np.shape(value))
    return [chain.log_partition(), *chain.posterior(), chain.marginals(), *pullback(g)]


def assert_those_of_segments(monkeypatch, whole, call, rtol=1e-11, atol=1e-12):
    monkeypatch.setattr(_select, "FUSED", False)
    for result, expected in zip(whole, call(), strict=True):
        if expected is not None:
            np.testing.assert_allclose(result, expected, rtol=rtol, atol=atol)


def turning(num_rows):
    """Return chains whose first row leaves linear space forward."""
    x = normal(num_rows, 60, 4)
    x[0, 20:50, 2:] -= 40.0
    return {"x": x, "transitions": np.kron(np.eye(2), np.ones((2, 2)))}


def detour(num_rows):
    """Return chains the first of which is certified forward, and not in both directions together.

    Its only path lies 520 nats below a dead end, and is what remains after that.
    """
    x = np.zeros((num_rows, 25, 2))
    x[0, :10, 1], x[0, 15, 0] = -52.0, -INF
    return {"x": x, "transitions": np.eye(2)}


CHAINS = {
    "one row": ({"x": normal(30, 3), "transitions": uniform(3, 3)}, 0),
    "one step": ({"x": normal(9, 1, 3)}, 0),
    "logs": ({"x": normal(9, 30, 3), "log_transitions": normal(3, 3, sd=30)}, 0),
    "large weights": ({"x": normal(9, 30, 3), "transitions": 1e200 * uniform(29, 3, 3)}, 0),
    "groups": ({"x": normal(4, 9, 30, 3), "transitions": uniform(4, 1, 1, 3, 3)}, 0),
    "potentials of all rows": ({"x": normal(30, 3), "transitions": uniform(9, 29, 3, 3)}, 0),
    "sparse": ({"x": normal(9, 30, 40), "transitions": left_to_right(40)}, 0),
    "sparse, one row": ({"x": normal(30, 40), "transitions": left_to_right(40)}, 0),
    "blocks": ({"x": normal(300, 5, 33), "log_transitions": normal(33, 33)}, 0),
    "forward": (turning(9), 1),
    "backward": (detour(9), 1),
    "e^-480": ({"x": normal(9, 30, 3), "log_transitions": np.diag([-490.0, 0, 0])}, 9),
    "infinite": ({"x": normal(9, 30, 3), "transitions": np.array([[INF, 1, 1]] * 3)}, 9),
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("ragged", [False, True])
def test_sums_of_whole_chains_are_those_of_segments(rows, monkeypatch, name, ragged):
    arguments, declined = CHAINS[name]
    arguments = dict(arguments)
    x = arguments.pop("x")
    K, batch = x.shape[-1], x.shape[:-2]
    weights = {"log_initial": normal(K), "final": uniform(*batch, K)}
    lengths = None
    if ragged and batch and declined in (0, len(x)):
        lengths = np.resize([x.shape[-2], 1, 7, 12, 3], batch).clip(1, x.shape[-2])
    chain = alc.LogChain(x, **{**weights, **arguments}, lengths=lengths)
    chain.marginals()
    num_rows = rows.total()
    assert rows["declined"] == declined
    whole = results(chain)
    assert rows.total() > num_rows
    assert_those_of_segments(monkeypatch, whole, lambda: results(chain))


@pytest.mark.parametrize("lengths", [None, [3] * 8 + [2] * 8])
def test_counts_of_matrices_that_were_not_prepared_are_zero(rows, monkeypatch, lengths):
    """A group is declined before its matrices are prepared; those of short groups are not all."""
    logs = normal(16, 2, 2, 2)
    logs[7] = [[[-1000.0, 0.0], [-3000.0, -3000.0]], [[0.0, -INF], [0.0, 0.0]]]
    chain = alc.LogChain(normal(16, 3, 2), log_transitions=logs, lengths=lengths)
    whole = results(chain)
    assert rows["taken"] > 0
    assert rows["declined"] > 0
    assert_those_of_segments(monkeypatch, whole, lambda: results(chain))


def test_row_that_is_declined_backward_is_taken_forward(rows):
    arguments = detour(9)
    chain = alc.LogChain(arguments.pop("x"), **arguments)
    chain.log_partition()
    assert rows == {"taken": 9, "declined": 0}


def test_pullback_declines_rows_whose_cotangents_are_out_of_range(rows):
    chain = alc.LogChain(normal(9, 30, 3), transitions=uniform(3, 3))
    _, pullback = alc.vjp.log_partition(chain)
    g = np.ones(9)
    expected = pullback(g)
    rows.clear()
    g[4] = 2.0**100
    gradients = pullback(g)
    assert rows == {"taken": 8, "declined": 1}
    scale = g[:, None, None]
    np.testing.assert_allclose(
        gradients.log_potentials, expected.log_potentials * scale, rtol=1e-13
    )


@pytest.mark.parametrize("shape", [(5,), (2, 3)])
def test_declined_rows_are_computed_by_segments(rows, monkeypatch, shape):
    """Rows of several batch axes, sorted by length, one of which has a NaN."""
    x = normal(*shape, 6, 3)
    x.reshape(-1, 6, 3)[[1, 4], 2, 1] = [NAN, INF]
    lengths = np.resize([3, 6, 1, 4, 5], shape)
    chain = alc.LogChain(x, transitions=uniform(3, 3), lengths=lengths)
    whole = chain.viterbi()
    assert rows == {"taken": np.prod(shape) - 2, "declined": 2}
    assert_those_of_segments(monkeypatch, whole, chain.viterbi, rtol=1e-14, atol=0)


def test_declined_chain_begins_in_log_space(monkeypatch):
    """If a chain as a whole left linear space, its first segment need not be tried there again."""
    forms, advance = {}, CompiledBackend.advance

    def call(backend, carry, steps, *args):
        result = advance(backend, carry, steps, *args)
        forms[steps.start] = result.carry.is_log is None
        return result

    monkeypatch.setattr(CompiledBackend, "advance", call)
    x = normal(20_000, 40)
    x[-9:-3, 20:] = -200.0
    chain = alc.LogChain(x, transitions=np.kron(np.eye(2), uniform(20, 20)))
    whole = chain.log_partition()
    first, *others, last = forms.values()
    assert [first, all(others), last] == [False, True, False]
    monkeypatch.setattr(_select, "FUSED", False)
    np.testing.assert_allclose(chain.log_partition(), whole, rtol=1e-14)
    first, *others, last = forms.values()
    assert [first, all(others), last] == [True, True, False]
    monkeypatch.setattr(_select, "FUSED", True)
    forms.clear()
    alc.LogChain(
        x[:2000], transitions=uniform(40, 40), log_final=normal(40, sd=900)
    ).log_partition()
    assert forms[0]  # it was declined because of its final weights
