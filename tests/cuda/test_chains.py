"""The chain's kernels: log_partition and messages, right entry by entry on every range."""

from dataclasses import replace

import numpy as np
import pytest

from arraylogchain import _arrays
from arraylogchain._cuda.chains import geometry as geometries
from arraylogchain._cuda.chains import has_kernels
from arraylogchain._cuda.chains.geometry import Geometry, SmallGeometry
from arraylogchain._cuda.chains.recursion import ChainRun
from arraylogchain._cuda.chains.row_lengths import row_lengths
from tests.checks import CHAIN_SHAPES
from tests.cuda.chain_checks import SMALL, both, check, make
from tests.cuda.cpu_device import CpuDevice
from tests.cuda.instantiations import INSTANTIATIONS
from tests.error_model import EPS, assert_within, chain_bound
from tests.test_chain import (
    FORMS,
    given_as,
    normal,
    uniform,
    wide_linear_weights,
    wide_log_weights,
)

INF, NAN = np.inf, np.nan

pytestmark = pytest.mark.usefixtures("compiler")


@pytest.fixture
def cpu():
    return CpuDevice(seed=3)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("T", [1, 2, 3, 8])
def test_every_order_of_threads(device, dtype, form, T):
    check(device, dtype, normal(6, T, 7, sd=9), **given_as(form, uniform(T - 1, 7, 7), uniform(7)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("x", "transitions", "initial"), [case for case in CHAIN_SHAPES if 0 not in case[0]]
)
def test_batch_axes(cpu, form, x, transitions, initial):
    start = None if initial is None else uniform(*initial)
    check(cpu, "float32", normal(*x), **given_as(form, uniform(*transitions, seed=1), start))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sd", [1, 15, 30, 100, 1000])
def test_wide_potentials(cpu, dtype, form, sd):
    x = normal(5, 12, 8, sd=sd)
    check(cpu, dtype, x, **given_as(form, uniform(11, 8, 8), uniform(8)))


@pytest.mark.parametrize("centre", [1e4, -1e4, 1e30])
def test_shifted_potentials(cpu, dtype, centre):
    check(cpu, dtype, normal(3, 20, 5, sd=3) + centre, transitions=uniform(19, 5, 5))


def test_alternating_shifts_cancel(cpu, dtype):
    """Totals of many thousands come and go; what is left must not carry their rounding."""
    x = np.round(normal(2, 40, 5, sd=3), 1)
    x[:, ::2] += 10_000
    x[:, 1::2] -= 10_000
    check(cpu, dtype, x, transitions=uniform(39, 5, 5))


@pytest.mark.parametrize(("large", "other"), [(1000.3, 0), (2.0**60, 2.0**60)])
def test_what_cancels_leaves_no_rounding(cpu, dtype, large, other):
    """Every state keeps to itself, so that the messages are plain sums, which are small again."""
    x = np.zeros((9, 2))
    x[1:, 1] = [large, 1000.5, -large, -1000.5] * 2
    x[1:, 0] = [other, 0, -other, 0] * 2
    x = x.astype(dtype)
    _, forward, _ = check(cpu, dtype, x, transitions=np.eye(2)[None])
    assert abs(forward[-1, 1]) < 32 * EPS[dtype]
    assert forward[3, 1] == pytest.approx(1000.5, rel=2 * EPS[dtype])


def test_potentials_of_any_magnitude(cpu, dtype):
    rng = np.random.default_rng(7)
    x = rng.normal(size=(4, 6, 5)) * 10.0 ** rng.integers(-20, 20, (4, 6, 5))
    # The reference of backward messages is itself rounded here.
    check(cpu, dtype, x, transitions=uniform(5, 5, 5), has_backward_reference=False)


@pytest.mark.parametrize("decades", [5, 30])
def test_wide_linear_transitions(cpu, dtype, decades):
    x, options = wide_linear_weights(decades)
    check(cpu, dtype, x, **options)


def test_subnormal_weights(cpu):
    """A device takes subnormal numbers for zero wherever it computes with them."""
    weights = 10.0 ** np.random.default_rng(1).uniform(-44, -30, (5, 6, 6))
    start = np.array([1e-40, 0, 1e-44, 1e-39, 0, 1e-42])
    check(cpu, "float32", normal(3, 6, 6), transitions=weights, initial=start)
    weights[:, :, ::2] *= 1e30
    check(cpu, "float32", normal(3, 6, 6, sd=30), transitions=weights, initial=start)


def test_terms_that_underflow_add_up(cpu):
    """One product is just above the smallest normal number, and thirty are just below it."""
    K = 32
    x = np.full((2, K), -127 * np.log(2))
    x[0, :2] = 0, -126 * np.log(2)
    x[1] = 0
    transitions = np.zeros((1, K, K))
    transitions[0, 0, 0] = 1
    transitions[0, 1:, 1] = 2.0**-95.5
    check(cpu, "float32", x, transitions=transitions)


@pytest.mark.parametrize("sd", [1, 20, 100, 1000])
@pytest.mark.parametrize("steps", [1, 9])
def test_wide_log_transitions(cpu, dtype, sd, steps):
    x, options = wide_log_weights(sd, steps)
    check(cpu, dtype, x, **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sd", [1, 30, 1000])
def test_sparse_transitions(cpu, dtype, form, sd):
    """Most edges closed, some states closed: messages are -inf exactly where no path leads."""
    rng = np.random.default_rng(9)
    transitions = uniform(11, 7, 7) * (rng.random((11, 7, 7)) < 0.3)
    x = normal(4, 12, 7, sd=sd)
    x[rng.random(x.shape) < 0.1] = -INF
    check(cpu, dtype, x, **given_as(form, transitions, np.eye(7)[2]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("log_ratio", [-30, -300, -1500])
def test_only_path_leads_through_unlikely_states(cpu, dtype, form, log_ratio):
    K = T = 9
    x = np.zeros((T, K))
    x[1:-1, 1:] = log_ratio / (T - 2)
    x[-1, :-1] = -INF
    transitions = 0.5 * (np.eye(K) + np.eye(K, k=1))
    check(cpu, dtype, x, **given_as(form, transitions[None], np.eye(K)[0]))


@pytest.mark.parametrize("form", FORMS)
def test_rejoining_after_a_long_detour(cpu, dtype, form):
    """Two separate groups of states, one 1200 nats below the other, and only it ends well."""
    x = normal(60, 4)
    x[:30, 2:] -= 40.0
    x[-1, :2] = -INF
    check(cpu, dtype, x, **given_as(form, np.kron(np.eye(2), np.full((2, 2), 0.5))[None]))


@pytest.mark.parametrize("form", FORMS)
def test_no_path(cpu, dtype, form):
    closed = np.triu(uniform(4, 3, 3), 1)
    partition, _, _ = check(cpu, dtype, normal(2, 5, 3), **given_as(form, closed, np.ones(3)))
    assert np.all(np.isneginf(partition))
    dead = normal(2, 5, 3)
    dead[0, 2] = -INF
    partition, _, _ = check(cpu, dtype, dead, **given_as(form, uniform(1, 3, 3), np.zeros(3)))
    assert np.all(np.isneginf(partition))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("where", ["x", "edge", "closed edge", "start"])
@pytest.mark.parametrize("value", [INF, NAN])
def test_infinities_and_nan(cpu, dtype, form, where, value):
    """They show wherever they take part, by the rules of a log of a sum of exponentials."""
    x, edges, start = normal(2, 5, 4), uniform(4, 4, 4), uniform(4)
    edges[:, 1, 2] = 0
    if where == "x":
        x[0, 2, 1] = value
    elif where == "edge":
        edges[2, 3, 1] = value
    elif where == "closed edge":
        edges[2, 3, 1] = value
        x[:, 2, 3] = -INF
    else:
        start[2] = value
    check(cpu, dtype, x, **given_as(form, edges, start))


def test_negative_weights_have_no_logs(cpu, dtype):
    edges = uniform(4, 4, 4)
    edges[1, 2, 3] = -0.25
    edges[2, 1, 1] = -0.0
    _, forward, _ = check(cpu, dtype, normal(2, 5, 4), transitions=edges)
    assert np.all(np.isnan(forward[:, 2, 3]))
    assert not np.any(np.isnan(forward[:, 2, :3]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("narrow", ["float16", "bfloat16"])
def test_halves(cpu, narrow, form):
    with np.errstate(divide="ignore"):
        x = normal(3, 6, 5, sd=4)
    check(cpu, narrow, x, **given_as(form, uniform(5, 5, 5), uniform(5)))


@pytest.mark.sanitized
@pytest.mark.parametrize("form", FORMS)
def test_ragged_edges(cpu, form):
    """Rows, states and columns that fill no block, no part of a sum and no warp."""
    geometry = Geometry(4, 1, 2, 2)
    x, edges = normal(5, 4, 33, sd=30), uniform(3, 33, 33)
    edges[:, :, ::3] = 0
    check(cpu, "float32", x, geometry=geometry, **given_as(form, edges, uniform(33)))
    check(cpu, "float32", x[:, :, :3], workspace=0, **given_as(form, edges[:, :3, :3]))


@pytest.mark.parametrize("form", FORMS)
def test_lengths(device, form):
    """What lies past a row's end is not read; rows of a group end at different steps."""
    lengths = np.array([[6, 1, 3, 2, 5], [4, 4, 1, 2, 2]])
    x, edges = normal(2, 5, 6, 4, sd=8), uniform(2, 1, 5, 4, 4)
    past = np.arange(6) >= lengths[..., None]
    x[past] = NAN
    edges[1, 0, 3:] = NAN
    options = given_as(form, edges, uniform(4))
    check(device, "float32", x, lengths=lengths, **options)
    shared = given_as(form, uniform(5, 4, 4), uniform(4))
    check(device, "float32", x, lengths=lengths, **shared)


def test_many_equal_terms(cpu):
    """Added to one sum, they are rounded to the same side again and again."""
    K, value = 2000, np.float32(1.9876708984375)
    case = make("float32", np.zeros((1, 2, K)), transitions=np.full((1, K, K), value))
    cpu.flush_to_zero = True
    found = ChainRun(cpu, case.chain, 1 << 20, Geometry(1, 1, 8, 1)).log_partition()
    exact = np.log(np.array([K], np.longdouble) ** 2 * value)
    assert_within(found, exact, chain_bound(exact, 0.0, 2, K, "float32"))


def test_scales_of_rows_that_begin_later(cpu, dtype):
    """Backward, the scale of a row has no part of the matrices behind its end."""
    edges = normal(5, 4, 4, sd=3) + 50 * np.arange(1, 6)[:, None, None]
    lengths = np.array([6, 3, 1, 4, 6])
    check(cpu, dtype, normal(5, 6, 4), lengths=lengths, log_transitions=edges)


def test_rows_are_taken_in_the_order_of_their_lengths(cpu):
    lengths = np.array([[6, 1, 3, 3, 5], [4, 4, 1, 2, 2]])
    case = make("float32", normal(2, 5, 6, 4), lengths=lengths, transitions=uniform(2, 1, 5, 4, 4))
    found, order = row_lengths(cpu, case.chain)
    np.testing.assert_array_equal(found, lengths.reshape(-1))
    np.testing.assert_array_equal(order, [0, 4, 2, 3, 1, 5, 6, 8, 9, 7])
    shared = make("float32", normal(2, 5, 6, 4), lengths=lengths, transitions=uniform(5, 4, 4))
    np.testing.assert_array_equal(row_lengths(cpu, shared.chain)[1], [0, 4, 5, 6, 2, 3, 8, 9, 1, 7])


def test_lengths_of_more_rows_than_a_launch_takes(cpu):
    """They travel as arguments, so that no call waits and a graph can be replayed."""
    lengths = np.random.default_rng(0).integers(1, 5, 2100)
    chain = replace(make("float32", normal(2100, 4, 2)).chain, lengths=lengths)
    found, order = row_lengths(cpu, chain)
    np.testing.assert_array_equal(found, lengths)
    np.testing.assert_array_equal(order, np.argsort(-lengths, kind="stable"))
    assert [launch.source for launch in cpu.launches] == ["chains/lengths.cu"] * 6


def test_lengths_of_very_many_rows_are_copied(cpu):
    """But not into a graph, which would copy once more when they are gone."""
    lengths = np.random.default_rng(0).integers(1, 3, 5000)
    chain = replace(make("float32", normal(5000, 2, 2)).chain, lengths=lengths)
    for captures in (False, True):
        cpu.captures = captures
        found, order = row_lengths(cpu, chain)
        np.testing.assert_array_equal(found, lengths)
        np.testing.assert_array_equal(order, np.argsort(-lengths, kind="stable"))
        assert len(cpu.launches) == (10 if captures else 0)


@pytest.mark.parametrize("geometry", both(4))
def test_an_order_says_which_rows_are_computed(cpu, geometry):
    """So that the launches do take the order that they are given."""
    lengths = np.array([3, 1, 6, 2, 4, 5])
    case = make("float32", normal(6, 6, 4), lengths=lengths, transitions=uniform(5, 4, 4))
    run = ChainRun(cpu, case.chain, 1 << 20, geometry)
    expected = run.log_partition()
    run.lengths[1] = [5, 1, 1, 5, 1, 5]
    found = run.log_partition()
    expected[[0, 2, 3, 4]] = NAN
    np.testing.assert_array_equal(found, expected)


def test_which_chains_have_kernels(cpu):
    """All that fit a block: entropies are computed in float64."""
    ctx = replace(_arrays._numpy_context("float32"), kernels=cpu)
    chain = make("float32", normal(3, 6, 4), transitions=uniform(5, 4, 4)).chain
    assert has_kernels("log_partition", ctx, chain)
    assert not has_kernels("log_partition", replace(ctx, kernels=None), chain)
    many = make("float32", np.zeros((1, 2, 8000)), transitions=np.zeros((1, 1, 1))).chain
    assert [has_kernels(name, ctx, many) for name in ("viterbi", "sample", "entropy")] == [1, 1, 0]


def reversed_views(x):
    """The same array, every axis stored backwards."""
    turned = (slice(None, None, -1),) * x.ndim
    return np.ascontiguousarray(x[turned])[turned]


def strided_views(x):
    return np.repeat(x, 2, axis=-1)[..., ::2]


@pytest.mark.parametrize("layout", [np.asfortranarray, reversed_views, strided_views])
@pytest.mark.parametrize("form", FORMS)
def test_layouts(cpu, form, layout):
    options = given_as(form, uniform(2, 1, 5, 4, 4), uniform(3, 4))
    check(cpu, "float32", normal(3, 6, 4), layout=layout, **options)
    check(cpu, "float64", normal(3, 6, 4), layout=layout, **given_as(form, uniform(1, 4, 4)))


def test_broadcast_views(cpu):
    """Strides of zero, along steps as well."""
    one = np.broadcast_to(uniform(4, 4).astype(np.float32), (5, 4, 4))
    x = np.broadcast_to(normal(6, 4).astype(np.float32), (3, 6, 4))
    case = make("float32", x, transitions=one, layout=lambda y: y)
    chain = make("float32", x[:1], transitions=one[:1]).chain
    found = ChainRun(cpu, case.chain, 1 << 20, SMALL).log_partition()
    np.testing.assert_array_equal(
        found, np.repeat(ChainRun(cpu, chain, 1 << 20, SMALL).log_partition(), 3)
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("workspace", [0, 1000])
def test_small_workspace_cuts_time(cpu, dtype, form, workspace):
    """Matrices of a few steps at a time; lengths end within and at the cuts."""
    x, edges = normal(3, 9, 5, sd=20), uniform(8, 5, 5)
    check(cpu, dtype, x, workspace=workspace, **given_as(form, edges, uniform(5)))
    lengths = np.array([9, 4, 1])
    check(cpu, dtype, x, workspace=workspace, lengths=lengths, **given_as(form, edges))
    assert sum(launch.source == "chains/chain.cu" for launch in cpu.launches) >= 12


GEOMETRIES = [
    Geometry(1, 1, 1, 1),
    Geometry(4, 1, 2, 3),  # a warp more than there are columns for, and idle parts
]


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("K", [1, 2, 33])
def test_geometries(cpu, geometry, K):
    x = normal(9, 4, K, sd=5)
    check(cpu, "float32", x, geometry=geometry, transitions=uniform(3, K, K))


def test_many_states(cpu):
    """The forum's number of states, in the geometry that is chosen for it."""
    geometry = geometries.choose(200, 1, 500, 4, 132, 227 << 10)
    assert geometry.columns == 7
    x, edges = normal(9, 3, 200, sd=5), uniform(2, 200, 200)
    edges[:, :, 77] = 0
    check(cpu, "float32", x, geometry=geometry, transitions=edges)


@pytest.mark.parametrize("form", FORMS)
def test_blocks_that_share_rows(device, form):
    """Columns of the same rows in several blocks, a launch for each step."""
    x, edges = normal(5, 4, 40, sd=30), uniform(3, 40, 40)
    geometry = Geometry(4, 1, 1, 2, slices=2)
    check(device, "float32", x, geometry=geometry, **given_as(form, edges, uniform(40)))
    lengths = np.array([4, 1, 3, 2, 1])
    check(device, "float32", x, geometry=geometry, lengths=lengths, **given_as(form, edges))


@pytest.mark.sanitized
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("K", [1, 4, 8, 16, 32])
def test_as_many_lanes_as_states(cpu, form, K):
    """No lane is left over for a state, though some are for rows."""
    geometry = SmallGeometry(max(K, 4), 2)
    x, edges = normal(150 // K + 3, 4, K, sd=30), uniform(3, K, K)
    edges[:, :, ::3] = 0
    check(cpu, "float32", x, geometry=geometry, **given_as(form, edges, uniform(K)))


@pytest.mark.parametrize("item", [4, 8])
@pytest.mark.parametrize("size", [1, 4, 5, 16, 32, 33, 200, 224, 225, 512, 1000, 2048, 4500])
@pytest.mark.parametrize(("groups", "rows"), [(1, 1), (1, 500), (500, 1), (3, 10**6)])
@pytest.mark.parametrize("for_best", [False, True])
def test_chosen_geometries_fit(size, groups, rows, item, for_best):
    geometry = geometries.choose(size, groups, rows, item, 132, 227 << 10, for_best)
    assert geometry.threads <= 32 * geometries.MAX_WARPS
    assert geometry.shared_memory(size, item) <= 227 << 10
    name = geometry.kernel("float" if item == 4 else "double")
    assert name in INSTANTIATIONS[geometry.source]
    if isinstance(geometry, SmallGeometry):
        assert geometry.lanes >= size
        assert geometry.blocks(groups, rows) * geometry.threads >= groups * rows * geometry.lanes
        return
    tiles = -(-size // (32 * geometry.columns))
    assert geometry.column_warps <= -(-tiles // geometry.slices)
