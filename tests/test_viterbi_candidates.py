"""Max-plus products from few of the sums: bit for bit what all sums give."""

import itertools

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain._chain.viterbi import ranks as best_ranks
from arraylogchain._chain.viterbi.candidates import Candidates
from arraylogchain._chain.viterbi.ranks import Ranks, SortedColumns, thresholds
from arraylogchain._chain.viterbi.steps import BestSteps
from tests.conftest import make_backend
from tests.test_workspace import SMALLEST, temporaries

pytestmark = pytest.mark.chains

INF = np.inf
K, N = 24, 70
KINDS = ["plain", "wide states", "wide matrix", "left to right", "sparse", "dead column", "ties"]
KINDS += ["one start", "closed states", "half and half", "one open column", "tiny", "huge"]


def make(kind, groups=1, seed=0):
    """Return states [groups, K, N] and logs [groups, K, K]."""
    rng = np.random.default_rng(seed)
    states, logs = rng.normal(size=(groups, K, N)), rng.normal(size=(groups, K, K))
    if kind == "wide states":
        states *= 100
    elif kind == "wide matrix":
        logs *= 100
    elif kind == "left to right":
        logs[:, np.eye(K) + np.eye(K, k=1) == 0] = -INF
    elif kind == "sparse":
        logs[rng.random(logs.shape) < 0.8] = -INF
    elif kind == "dead column":
        logs[:, :, [0, 5, K - 1]] = -INF
        logs[:, 3] = -INF
    elif kind == "ties":
        states, logs = np.round(states), np.round(logs)
    elif kind == "one start":
        states[:, 1:] = -INF
    elif kind == "closed states":
        states[rng.random(states.shape) < 0.5] = -INF
        states[..., ::7] = -INF
    elif kind == "half and half":
        states[..., ::2] *= 100
        states[..., 1::2] *= 0.01
    elif kind == "one open column":
        logs[:, np.eye(K) == 0] = -INF
        logs[:, :, 4] = rng.normal(size=K)
    elif kind == "tiny":
        states, logs = states * 1e-40, logs * 1e-40
    elif kind == "huge":
        # Sums and differences overflow.
        states, logs = np.clip(states, -3, 0) * 1e38, np.clip(logs, -3, 0) * 1e38
    return states.astype(np.float32), logs.astype(np.float32)


def dense(states, logs):
    with np.errstate(all="ignore"):
        return np.max(states[:, :, None, :] + logs[..., None], axis=1)


def multiplied(candidates, states, logs):
    """Return the product, or None where it asks for all sums."""
    out = np.full_like(states, np.nan)
    with np.errstate(all="ignore"):
        return out if candidates.multiply(states, out, lambda: logs) else None


def with_ranks(columns, own, logs, dtype=np.float32, rows=N):
    """Return candidates that do not choose for themselves."""
    candidates = Candidates(K, rows, dtype, logs)
    candidates.ranks = Ranks(columns=columns, own=own, steps_left=10**6)
    return candidates


@pytest.mark.parametrize("kind", KINDS)
def test_any_ranks_give_what_all_sums_give(dtype, kind):
    states, logs = (x.astype(dtype) for x in make(kind))
    expected = dense(states, logs)
    for columns, own in itertools.product((0, 1, 2, 5, K // 2), (0, 1, 4, K, 100)):
        candidates = with_ranks(columns, own, logs, dtype)
        np.testing.assert_array_equal(multiplied(candidates, states, logs), expected)
        if own > K:
            assert candidates.ranks.columns == columns  # each entry is tried once


@pytest.mark.parametrize("columns", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_views_and_fewer_rows(kind, columns):
    """States come transposed, and as the first of more rows; one set of buffers serves all."""
    states, logs = make(kind)
    expected = dense(states, logs)
    candidates = with_ranks(columns, 2, logs)
    transposed = np.ascontiguousarray(states.swapaxes(1, 2)).swapaxes(1, 2)
    for x, n in itertools.product((states, transposed), (N, N // 2, N)):
        out = np.full_like(x, np.nan)  # as x is laid out
        with np.errstate(all="ignore"):
            assert candidates.multiply(x[..., :n], out[..., :n], lambda: logs)
        np.testing.assert_array_equal(out[..., :n], expected[..., :n])
        assert np.all(np.isnan(out[..., n:]))
        candidates.ranks.columns = columns  # though it may have failed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per_step", [False, True])
def test_groups_and_choices(kind, per_step):
    """It chooses for itself, again and again; every group has its own matrix."""
    states, logs = make(kind, groups=3)
    candidates = Candidates(K, N, np.float32, None if per_step else logs)
    for step in range(40):
        if per_step:
            logs = make(kind, groups=3, seed=step)[1]
        with np.errstate(all="ignore"):
            expected = dense(states, logs)
            found = multiplied(candidates, states, logs)
            if found is not None:
                np.testing.assert_array_equal(found, expected)
            moved = expected + make("plain", 3, step)[0]
            states = moved - np.max(moved, axis=1, keepdims=True).clip(-1e30)


@pytest.mark.parametrize("columns", [0, 2])
@pytest.mark.parametrize("value", [np.nan, INF])
def test_special_values_ask_for_all_sums(value, columns):
    for where in ("states", "logs"):
        states, logs = make("plain", groups=2)
        (states if where == "states" else logs)[1, 3, 5] = value
        candidates = with_ranks(columns, 3, logs)
        assert multiplied(candidates, states, logs) is None
        # Not tried again for a while.
        assert candidates.ranks.columns == -1
        assert candidates.ranks.steps_left == best_ranks._LOOK_AGAIN
        assert multiplied(candidates, *make("plain", groups=2)) is None
    candidates = Candidates(K, N, np.float32, logs)
    assert multiplied(candidates, states, logs) is None


@pytest.mark.parametrize("columns", [0, 1])
def test_states_that_need_more_than_expected(columns):
    """All sums of those that are left, and a rest that doubles each time."""
    states, logs = make("plain")
    candidates = with_ranks(columns, 0, logs)
    for rest in (16, 32, 64):
        np.testing.assert_array_equal(multiplied(candidates, states, logs), dense(states, logs))
        assert candidates.ranks.columns == -1
        assert candidates.ranks.steps_left == rest
        candidates.ranks.columns = columns


def test_next_group_of_one_that_failed():
    states, logs = make("plain", groups=2)
    candidates = with_ranks(0, 0, logs)
    assert multiplied(candidates, states, logs) is None
    assert candidates.ranks.rest == 2 * best_ranks._LOOK_AGAIN


def test_no_ranks_for_few_rows():
    states, logs = make("plain")
    candidates = with_ranks(1, 3, logs)
    assert multiplied(candidates, states[..., :15], logs) is None
    assert multiplied(candidates, states[..., :16], logs) is not None


def test_thresholds_are_safe():
    """The largest entry that is let go improves nothing, in any rounding."""
    rng = np.random.default_rng(1)
    scales = np.array([1e-44, 1e-3, 1, 1e7, 6e37])
    best = (rng.normal(size=(2000, 5)) * rng.choice(scales, (2000, 5))).astype("float32")
    rest = (rng.normal(size=5) * rng.choice(scales[:4], 5)).astype("float32")
    with np.errstate(over="ignore"):
        limits = thresholds(best, rest, 1)
        across = thresholds(best.T, rest[:, None], 0)
    np.testing.assert_array_equal(limits, across)
    assert np.all(limits[:, None] + rest <= best)


def test_thresholds_of_infinities():
    best = np.array([[-INF, 1], [-INF, -INF], [2, 1]])
    with np.errstate(invalid="ignore"):
        some = thresholds(best, np.array([-INF, 0]), 1)
        none = thresholds(best, np.array([-INF, -INF]), 1)
    assert some.tolist() == [
        np.nextafter(1, 0),
        -INF,
        1 - 2**-53,
    ]
    assert np.all(none > 1e308)


def test_sorted_columns():
    logs = make("left to right")[1][0]
    matrix = SortedColumns(logs)
    assert matrix.depth == 2
    assert matrix.ladder() == [0, 1, 2]
    assert np.all(matrix.values[2:] == -INF)
    assert np.array_equal(matrix.values[0], np.max(logs, axis=0))
    assert SortedColumns(make("plain")[1][0]).ladder() == [0, 1, 2, 4, 8, 12]


def test_choices():
    """What is cheap is found: few columns, few own ranks, or neither."""
    rng = np.random.default_rng(2)
    size, rows = 200, 500
    states = rng.normal(size=(size, rows)).astype("float32")
    logs = np.log(rng.random((size, size))).astype("float32")
    banded = np.where(np.tri(size, k=1) - np.tri(size, k=-1), logs, -INF).astype("float32")
    spiked = np.float32(50) * np.eye(size, dtype="float32") + logs
    for matrix, x, columns, own in [
        (banded, states, (2, 2), (0, 0)),
        (logs, 50 * states, (0, 1), (1, 5)),
        (spiked, states, (1, 200), (0, 100)),
        (50 * np.log(-logs), 0 * states, (-1, 200), (0, 1)),
    ]:
        ranks = Ranks()
        with np.errstate(all="ignore"):
            ranks.look(SortedColumns(matrix), x, 1, 0)
        assert columns[0] <= ranks.columns <= columns[1]
        assert own[0] <= ranks.own <= own[1]


def ones_for_rows(batch):
    """Return the batch axes of matrices that differ along the first of two axes."""
    return (batch[0], 1) if len(batch) == 2 else ()


CHAINS = {"rows last": (130, 20, 64), "states last": (90, 12, 100), "groups": (3, 130, 12, 64)}


@pytest.mark.parametrize("kind", ["plain", "left to right", "wide", "special"])
@pytest.mark.parametrize("per_step", [False, True], ids=["one matrix", "one per step"])
@pytest.mark.parametrize("lengths", [False, True], ids=["", "lengths"])
@pytest.mark.parametrize("shape", CHAINS.values(), ids=CHAINS)
def test_chains(monkeypatch, dtype, shape, lengths, per_step, kind):
    """Paths are those that all sums give."""
    used = []
    search = BestSteps._from_candidates

    def count(*args):
        used.append(search(*args))
        return used[-1]

    rng = np.random.default_rng(3)
    *batch, T, size = shape
    x = rng.normal(size=shape) * (50 if kind == "wide" else 1)
    logs = np.log(rng.random((*ones_for_rows(batch), T - 1 if per_step else 1, size, size)))
    if kind == "left to right":
        logs[..., np.eye(size) + np.eye(size, k=1) == 0] = -INF
    elif kind == "special":
        x[..., 3, T // 2, 5] = np.nan
        x[..., 4, 1, 6] = -INF
    ends = {"lengths": rng.integers(1, T + 1, batch)} if lengths else {}
    chain = alc.LogChain(x.astype(dtype), log_transitions=logs.astype(dtype), **ends)
    monkeypatch.setattr(BestSteps, "_from_candidates", count)
    found = chain.viterbi()
    if kind == "left to right":
        assert any(used)
    monkeypatch.setattr(BestSteps, "_from_candidates", lambda *_: False)
    expected = chain.viterbi()
    np.testing.assert_array_equal(found.states, expected.states)
    np.testing.assert_array_equal(found.log_weight, expected.log_weight)


@pytest.mark.parametrize("library", ["strict", "torch"])
def test_libraries(monkeypatch, library):
    """torch on a CPU computes through NumPy; others do not branch on numbers."""
    made = []
    monkeypatch.setattr(Ranks, "look", lambda *_: made.append(1))
    backend = make_backend(library)
    x, logs = np.zeros((130, 9, 64), "float32"), np.zeros((1, 64, 64), "float32")
    alc.LogChain(backend.asarray(x), log_transitions=backend.asarray(logs)).viterbi()
    assert bool(made) == (library == "torch")


@pytest.mark.parametrize("shape", [(2000, 20, 64), (100, 30, 88), (4, 60, 12, 80)])
@pytest.mark.parametrize("kind", ["plain", "left to right"])
def test_memory(shape, kind):
    rng = np.random.default_rng(4)
    *batch, _, size = shape
    x = rng.normal(size=shape).astype("float32")
    logs = np.log(rng.random((*ones_for_rows(batch), 1, size, size))).astype("float32")
    if kind == "left to right":
        logs[..., np.eye(size) + np.eye(size, k=1) == 0] = -INF
    chain = alc.LogChain(x, log_transitions=logs, workspace=SMALLEST)
    chain.viterbi()
    assert temporaries(chain.viterbi) <= SMALLEST
