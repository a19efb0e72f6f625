"""Chains of several lengths: each row is that of its first steps, whatever lies past them."""

import hypothesis
import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import strategies as st

import arraylogchain as alc
from arraylogchain import _dispatch
from tests.checks import mentions
from tests.conftest import make_backend
from tests.path_checks import MIXED_FORMS, given_in_forms
from tests.ragged_checks import Ragged
from tests.test_chain import FORMS, given_as, normal, uniform
from tests.test_properties import DTYPES, WORKSPACES, entries

pytestmark = pytest.mark.chains

INF = np.inf

# Shapes of potentials, transitions and initial weights, and lengths that broadcast with them.
SHAPES = {
    "one chain": ((6, 4), (5, 4, 4), (4,), 4),
    "one chain, one matrix": ((6, 4), (1, 4, 4), None, 3),
    "rows": ((5, 6, 4), (5, 4, 4), (4,), [1, 6, 3, 2, 5]),
    "one matrix": ((5, 6, 4), (1, 4, 4), (5, 4), [4, 6, 1, 6, 2]),
    "matrices of their own": ((3, 6, 4), (3, 5, 4, 4), (4,), [5, 1, 3]),
    "one matrix each": ((3, 6, 4), (3, 1, 4, 4), (3, 4), [1, 2, 6]),
    "shared potentials": ((1, 6, 4), (3, 5, 4, 4), (4,), [2, 3, 4]),
    "batch of transitions": ((6, 4), (3, 5, 4, 4), None, [6, 1, 2]),
    "batch of initial weights": ((6, 4), (5, 4, 4), (4, 4), [3, 1, 6, 3]),
    "two axes": ((2, 3, 6, 4), (3, 1, 4, 4), (2, 1, 4), [[1, 2, 3], [6, 5, 4]]),
    "first axis": ((2, 3, 6, 4), (3, 5, 4, 4), (4,), [[4], [2]]),
    "last axis": ((2, 3, 6, 4), (2, 1, 5, 4, 4), (3, 4), [2, 6, 1]),
    "for all": ((2, 3, 6, 4), (5, 4, 4), None, 3),
    "axes of one": ((2, 1, 6, 4), (3, 5, 4, 4), (4,), [[[2]]][0]),
    "all full": ((3, 6, 4), (5, 4, 4), (4,), [6, 6, 6]),
    "all equal": ((3, 6, 4), (5, 4, 4), (4,), [4, 4, 4]),
    "all one": ((3, 6, 4), (1, 4, 4), (4,), [1, 1, 1]),
    "all one of many matrices": ((3, 6, 4), (3, 5, 4, 4), None, [1, 1, 1]),
    "two steps": ((4, 2, 4), (1, 4, 4), (4,), [1, 2, 2, 1]),
    "one step": ((2, 1, 4), (1, 4, 4), (4,), [1, 1]),
    "one state": ((3, 6, 1), (5, 1, 1), (1,), [3, 6, 1]),
}
FEW = ["rows", "one matrix", "two axes", "all one of many matrices"]


def ragged(backend, dtype, shapes, forms, **options):
    x, transitions, initial, lengths = shapes
    start = None if initial is None else uniform(*initial)
    weights = given_in_forms(forms, uniform(*transitions, seed=1), start)
    return Ragged(backend, dtype, normal(*x), lengths, **weights, **options)


def check_all(case):
    case.check_sums()
    case.check_paths()


@pytest.mark.parametrize("forms", MIXED_FORMS)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=list(SHAPES))
def test_batch_axes(np_backend, dtype, shapes, forms):
    check_all(ragged(np_backend, dtype, shapes, forms))


@pytest.mark.parametrize("forms", MIXED_FORMS[:2])
@pytest.mark.parametrize("shapes", FEW)
def test_elsewhere(backend, dtype, shapes, forms):
    check_all(ragged(backend, dtype, SHAPES[shapes], forms))


@pytest.mark.parametrize("garbage", [INF, -INF])
@pytest.mark.parametrize("form", FORMS)
def test_any_garbage(backend, dtype, form, garbage):
    check_all(ragged(backend, dtype, SHAPES["rows"], (form, form), garbage=garbage))


def test_a_state_that_nothing_leads_to(monkeypatch, np_backend, dtype):
    """It is zero in all rows alike, wherever they end."""
    monkeypatch.setattr(_dispatch, "COMPILED", False)
    transitions = uniform(1, 4, 4)
    transitions[..., 2] = 0.0
    check_all(Ragged(np_backend, dtype, normal(5, 6, 4), [4, 6, 1, 6, 2], transitions=transitions))


def test_half_precisions(backend, half):
    ragged(backend, half, SHAPES["rows"], ("linear", "logs")).check_sums()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sd", [20, 1000])
def test_wide_ranges(backend, dtype, form, sd):
    """Rows of all ranges side by side: some need wider numbers, or logs, from some step on."""
    x = normal(6, 9, 5) * np.array([1, sd, 1, sd, sd, 1])[:, None, None]
    x[5, 3:, 2] = -INF
    lengths = [9, 9, 5, 7, 1, 4]
    options = given_as(form, uniform(8, 5, 5), uniform(5))
    check_all(Ragged(backend, dtype, x, lengths, **options))


@pytest.mark.parametrize("sd", [1, 1000])
def test_workspace_changes_no_answer(np_backend, dtype, sd):
    rng = np.random.default_rng(4)
    x, lengths = normal(30, 16, 12, sd=sd), rng.integers(1, 17, 30)
    options = given_as("linear", uniform(15, 12, 12), uniform(12))
    check_all(Ragged(np_backend, dtype, x, lengths, **options, workspace=1 << 20))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("steps", [1, 99])
def test_long_chains(np_backend, dtype, form, steps):
    """Long chains of few states, which may be cut into segments, of very different lengths."""
    x, transitions = normal(4, 100, 3, sd=3), np.eye(3) + 0.1 * uniform(steps, 3, 3)
    options = given_as(form, transitions, uniform(3))
    check_all(Ragged(np_backend, dtype, x, [100, 1, 17, 70], **options))


@pytest.mark.parametrize("per_row", [False, True], ids=["shared matrices", "matrices per row"])
def test_rows_that_change_their_form_at_different_times(np_backend, dtype, per_row):
    """They come together again in the order of their lengths."""
    n, T, K, rng = 12, 130, 4, np.random.default_rng(3)
    sd = np.where(
        np.arange(T) < rng.integers(0, T, n)[:, None], 1, 40 if dtype == "float32" else 400
    )
    x = normal(n, T, K) * sd[..., None]
    transitions = uniform(*((n,) if per_row else ()), T - 1, K, K, seed=1)
    transitions *= rng.random(transitions.shape) > 0.3
    lengths = rng.integers(1, T + 1, n)
    Ragged(np_backend, dtype, x, lengths, transitions=transitions).check_sums()


@pytest.mark.parametrize("form", FORMS)
def test_rows_without_a_path(backend, dtype, form):
    """A closed step ends a row's paths only if the row gets there."""
    x, transitions = normal(4, 6, 4), uniform(5, 4, 4)
    x[:2, 3] = -INF
    transitions[4] = 0
    case = Ragged(backend, dtype, x, [6, 3, 6, 5], **given_as(form, transitions))
    check_all(case)
    partition = case.read(case.chain.log_partition())
    assert np.isfinite(partition).tolist() == [False, True, False, True]


@pytest.mark.parametrize("kind", ["list", "tuple", "int8", "int32", "uint8", "uint64", "native"])
def test_kinds_of_lengths(backend, dtype, kind):
    x, transitions = normal(3, 6, 4), uniform(1, 4, 4)
    lengths = {
        "list": [2, 6, 3],
        "tuple": (2, 6, 3),
        "native": backend.asarray(np.array([2, 6, 3])),
    }.get(kind)
    given = np.array([2, 6, 3], kind) if lengths is None else lengths
    arrays = [backend.asarray(a, dtype) for a in (x, transitions)]
    chain, expected = (
        alc.LogChain(arrays[0], transitions=arrays[1], lengths=n) for n in (given, [2, 6, 3])
    )
    for name in ("log_partition", "marginals", "expected_transitions"):
        ours, theirs = (backend.read(getattr(c, name)(), dtype) for c in (chain, expected))
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    "lengths",
    [[0, 1, 2], [1, 2, 7], [-1, 2, 3], [1, 2], [[1], [2]], np.ones((3, 1, 3), int), 0, [[[2]] * 2]],
    ids=str,
)
def test_lengths_that_do_not_fit(backend, lengths):
    x, transitions = (backend.asarray(a, "float32") for a in (normal(3, 6, 4), uniform(1, 4, 4)))
    with pytest.raises(ValueError, match=mentions("lengths")):
        alc.LogChain(x, transitions=transitions, lengths=lengths).log_partition()


@pytest.mark.parametrize(
    "lengths",
    [[1.0, 2.0, 3.0], [True, True, False], ["1", "2", "3"], [None, 2, 3], "6", 2.5],
    ids=str,
)
def test_lengths_that_are_no_integers(backend, lengths):
    x, transitions = (backend.asarray(a, "float32") for a in (normal(3, 6, 4), uniform(1, 4, 4)))
    with pytest.raises(TypeError, match=mentions("lengths", "must hold integers")):
        alc.LogChain(x, transitions=transitions, lengths=lengths).log_partition()


def test_states_matter_within_the_length_only(backend):
    chain = alc.LogChain(
        backend.asarray(normal(2, 5, 4), "float32"),
        transitions=backend.asarray(uniform(1, 4, 4), "float32"),
        lengths=[2, 5],
    )
    states = np.zeros((2, 5), np.int64)
    states[0, 2:] = [-1, 4, 99]
    assert np.isfinite(backend.to_numpy(chain.log_weight(backend.asarray(states)))).all()
    for wrong in (-1, 4):
        states[0, 1] = wrong
        with pytest.raises(ValueError, match=mentions("states")):
            chain.log_weight(backend.asarray(states))


@pytest.mark.exhaustive
def test_rows_in_log_form_a_few_at_a_time(np_backend):
    """All rows need the log form, and its states do not fit the workspace together."""
    n, T, K, rng = 64, 300, 4, np.random.default_rng(0)
    x = np.where(rng.random((n, T, K)) < 0.5, -5000.0, 0.0)
    lengths = rng.integers(T // 2, T + 1, n)
    transitions = (np.eye(K) + np.eye(K, k=1))[None]
    chain = alc.LogChain(x, transitions=transitions, lengths=lengths, workspace=1 << 20)
    found, entropy = chain.marginals(), chain.entropy()
    for row in (0, 17, n - 1):
        alone = alc.LogChain(x[row, : lengths[row]], transitions=transitions)
        np.testing.assert_allclose(found[row, : lengths[row]], alone.marginals(), atol=1e-9)
        np.testing.assert_allclose(entropy[row], alone.entropy(), atol=1e-9)
        assert not np.any(found[row, lengths[row] :])


def test_samples_of_short_rows_beside_windows(np_backend):
    """One long row is drawn in windows of time; those that have ended leave nothing in them."""
    lengths = np.full(64, 3)
    lengths[0] = 40
    x = np.zeros((64, 40, 4))
    chain = alc.LogChain(x, transitions=np.ones((1, 4, 4)), lengths=lengths, workspace=1 << 20)
    states = chain.sample(3, np.random.default_rng(0))
    real = np.arange(40) < lengths[:, None]
    assert np.all((states >= 0) == real)


def test_long_rows_are_cut_for_best_paths(np_backend):
    """Rows of different lengths are what they are alone."""
    T = 3_000
    x, transitions = normal(2, T, 3), uniform(1, 3, 3)
    chain = alc.LogChain(x, transitions=transitions, lengths=[T - 1, 40])
    states, weight = chain.viterbi()
    for row, n in enumerate((T - 1, 40)):
        alone = alc.LogChain(x[row, :n], transitions=transitions).viterbi()
        np.testing.assert_array_equal(states[row, :n], alone.states)
        np.testing.assert_allclose(weight[row], alone.log_weight, rtol=1e-14)
        assert np.all(states[row, n:] == -1)


@pytest.mark.parametrize("rows", [2, 3000])
def test_samples_where_no_row_has_all_steps(backend, dtype, rows):
    """Past the longest row of all, and past that of each tile."""
    lengths = 1 + np.arange(rows) % 4
    x = backend.asarray(np.zeros((rows, 6, 8)), dtype)
    transitions = backend.asarray(np.ones((1, 8, 8)), dtype)
    chain = alc.LogChain(x, transitions=transitions, lengths=lengths)
    states = backend.read(chain.sample(3, np.random.default_rng(0)), "int64")
    real = np.arange(6) < lengths[:, None]
    assert np.all(states[:, ~real] == -1)
    assert np.all((states[:, real] >= 0) & (states[:, real] < 8))


def test_samples_past_the_end_are_no_states(backend, dtype):
    """Also beside rows without a path, whose states are 0 up to their end."""
    case = ragged(backend, dtype, SHAPES["rows"], ("linear", "linear"))
    x = case.given.held[0].copy()
    x[1, 2] = -INF
    case = Ragged(backend, dtype, x, case.lengths, transitions=uniform(5, 4, 4))
    states = case.read(case.chain.sample(50, np.random.default_rng(0)), "int64")
    past = np.broadcast_to(np.arange(6) >= case.lengths[:, None], states.shape)
    np.testing.assert_array_equal(states == -1, past)
    assert not np.any(states[:, 1])
    path = case.read(case.chain.viterbi().states, "int64")
    np.testing.assert_array_equal(path == -1, past[0])
    assert not np.any(path[1])


@st.composite
def ragged_chains(draw):
    """Draw a chain as test_properties.chains does, and lengths for some of its batch axes."""
    T, K = draw(st.integers(2, 8) | st.just(120)), draw(st.integers(1, 4))
    shapes = draw(hnp.mutually_broadcastable_shapes(num_shapes=4, max_dims=2, max_side=3))
    steps = draw(st.sampled_from([T - 1, 1]))
    x_batch, edge_batch, initial_batch, lengths_shape = shapes.input_shapes
    x = draw(entries((*x_batch, T, K)))
    edges = draw(entries((*edge_batch, steps, K, K)))
    initial = draw(st.none() | entries((*initial_batch, K)))
    used = (x_batch, edge_batch, () if initial is None else initial_batch)
    batch = np.broadcast_shapes(*used)
    # Lengths broadcast with the batch axes, and add none.
    shape = lengths_shape[max(0, len(lengths_shape) - len(batch)) :]
    own = batch[len(batch) - len(shape) :]
    shape = tuple(min(a, b) for a, b in zip(shape, own, strict=True))
    lengths = draw(hnp.arrays(np.int64, shape, elements=st.integers(1, T)))
    return x, edges, initial, lengths


@hypothesis.given(
    chain=ragged_chains(),
    dtype=DTYPES,
    workspace=WORKSPACES,
    linear=st.sampled_from([None, 0.1, 1]),
)
@hypothesis.settings(max_examples=40)
def test_any_chain(chain, dtype, workspace, linear):
    """All that is a sum over paths; linear weights reach from 0 over tiny to large ones."""
    x, edges, initial, lengths = chain
    names = ("transitions", "initial") if linear else ("log_transitions", "log_initial")
    if linear:
        edges, initial = (
            None if w is None else np.where(w == -INF, 0, np.exp(np.clip(w * linear, -80, 80)))
            for w in (edges, initial)
        )
    options = dict(zip(names, (edges, initial), strict=True))
    case = Ragged(make_backend("numpy"), dtype, x, lengths, **options, workspace=workspace)
    case.check_sums()


@pytest.mark.parametrize("shape", [(2, 4, 0), (0, 4, 3)])
def test_chains_without_states_end_as_well(backend, dtype, shape):
    """What lies past an end is marked even where there are no states, or no rows."""
    x, edges = np.zeros(shape, dtype), np.ones((1, shape[-1], shape[-1]), dtype)
    lengths = np.asarray([2, 4])[: shape[0]]
    chain = alc.LogChain(backend.asarray(x), transitions=backend.asarray(edges), lengths=lengths)
    expected = np.where(np.arange(4) < lengths[:, None], 0, -1)
    states, weight = chain.viterbi()
    assert np.array_equal(backend.to_numpy(states), expected)
    assert np.all(backend.read(weight, dtype) == -INF)
    samples = backend.to_numpy(chain.sample(2, np.random.default_rng(0)))
    assert np.array_equal(samples, np.broadcast_to(expected, (2, *expected.shape)))
    assert backend.read(chain.marginals(), dtype).shape == shape
