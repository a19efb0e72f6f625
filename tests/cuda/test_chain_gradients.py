"""The chain's kernels in the backward pass: marginals, expected transitions and derivatives."""

import weakref
from functools import partial

import numpy as np
import pytest

from arraylogchain._cuda.chains import backward_pass, matrices
from arraylogchain._cuda.chains.geometry import Geometry
from arraylogchain._cuda.chains.recursion import ChainRun
from tests.checks import CHAIN_SHAPES
from tests.cuda.chain_checks import SMALL, check_gradients, make
from tests.cuda.cpu_device import CpuDevice
from tests.error_model import EPS, roundings
from tests.gradient_checks import COTANGENTS
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
@pytest.mark.parametrize("T", [1, 2, pytest.param(3, marks=pytest.mark.exhaustive), 8])
def test_every_order_of_threads(device, dtype, form, T):
    options = given_as(form, uniform(T - 1, 7, 7), uniform(7))
    check_gradients(device, dtype, normal(6, T, 7, sd=9), **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("x", "transitions", "initial"), [case for case in CHAIN_SHAPES if 0 not in case[0]]
)
def test_batch_axes(cpu, form, x, transitions, initial):
    """Gradients have the shapes of what they belong to, summed over what was broadcast."""
    start = None if initial is None else uniform(*initial)
    options = given_as(form, uniform(*transitions, seed=1), start)
    check_gradients(cpu, "float32", normal(*x), **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("g", COTANGENTS)
@pytest.mark.parametrize("steps", [1, 5])
def test_cotangents(cpu, dtype, form, g, steps):
    options = given_as(form, uniform(steps, 5, 5), uniform(5))
    check_gradients(cpu, dtype, normal(7, 6, 5, sd=3), g, **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sd", [1, 30, 100, 1000])
def test_wide_potentials(cpu, dtype, form, sd):
    x = normal(5, 12, 8, sd=sd)
    check_gradients(cpu, dtype, x, **given_as(form, uniform(11, 8, 8), uniform(8)))


@pytest.mark.parametrize("centre", [1e4, -1e4])
def test_shifted_potentials(cpu, dtype, centre):
    check_gradients(cpu, dtype, normal(3, 20, 5, sd=3) + centre, transitions=uniform(1, 5, 5))


@pytest.mark.parametrize("decades", [5, 30])
def test_wide_linear_transitions(cpu, dtype, decades):
    x, options = wide_linear_weights(decades)
    check_gradients(cpu, dtype, x, **options)


@pytest.mark.parametrize("sd", [1, 20, 100, 1000])
@pytest.mark.parametrize("steps", [1, 9])
def test_wide_log_transitions(cpu, dtype, sd, steps):
    x, options = wide_log_weights(sd, steps)
    check_gradients(cpu, dtype, x, **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sd", [1, 30, 1000])
def test_sparse_transitions(cpu, dtype, form, sd):
    rng = np.random.default_rng(9)
    transitions = uniform(11, 7, 7) * (rng.random((11, 7, 7)) < 0.3)
    x = normal(4, 12, 7, sd=sd)
    x[rng.random(x.shape) < 0.1] = -INF
    options = given_as(form, transitions, np.eye(7)[2])
    found = check_gradients(cpu, dtype, x, **options)
    assert np.all(found["potentials"][x == -INF] == 0)
    assert np.all(found["counts"][transitions == 0] == 0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("log_ratio", [-30, -300, -1500])
def test_only_path_leads_through_unlikely_states(cpu, dtype, form, log_ratio):
    K = T = 9
    x = np.zeros((T, K))
    x[1:-1, 1:] = log_ratio / (T - 2)
    x[-1, :-1] = -INF
    transitions = 0.5 * (np.eye(K) + np.eye(K, k=1))
    found = check_gradients(cpu, dtype, x, **given_as(form, transitions[None], np.eye(K)[0]))
    np.testing.assert_allclose(found["marginals"], np.eye(K), atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("where", ["x", "edge", "start", "no path"])
@pytest.mark.parametrize("value", [INF, NAN])
def test_infinities_and_nan(cpu, dtype, form, where, value):
    """Infinite sums and impossible ones have no gradient; NaN shows in all of its row's."""
    x, edges, start = normal(3, 5, 4), uniform(4, 4, 4), uniform(4)
    x[:, 1, 3] = -INF
    if where == "x":
        x[0, 2, 1] = value
    elif where == "edge":
        edges[2, 3, 1] = value
    elif where == "start":
        start[2] = value
    else:
        x[0, 3] = -INF
    check_gradients(cpu, dtype, x, "ones", **given_as(form, edges, start))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("narrow", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(3, 6, 5), (1, 6, 5)])
def test_halves(cpu, narrow, form, shape):
    """Sums over rows and steps are rounded once."""
    options = given_as(form, uniform(1, 5, 5), uniform(3, 5))
    check_gradients(cpu, narrow, normal(*shape, sd=2), **options)


@pytest.mark.parametrize("form", FORMS)
def test_lengths(device, form):
    """What lies past a row's end is not read, and its gradient is 0."""
    lengths = np.array([[6, 1, 3, 2, 5], [4, 4, 1, 2, 2]])
    x, edges = normal(2, 5, 6, 4, sd=8), uniform(2, 1, 5, 4, 4)
    x[np.arange(6) >= lengths[..., None]] = NAN
    edges[1, 0, 3:] = NAN
    check_gradients(device, "float32", x, lengths=lengths, **given_as(form, edges, uniform(4)))
    shared = given_as(form, uniform(1, 4, 4), uniform(4))
    check_gradients(device, "float32", x, lengths=lengths, **shared)


def strided_views(x):
    return np.repeat(x, 2, axis=-1)[..., ::2]


@pytest.mark.parametrize("layout", [np.asfortranarray, strided_views])
@pytest.mark.parametrize("form", FORMS)
def test_layouts(cpu, form, layout):
    options = given_as(form, uniform(2, 1, 5, 4, 4), uniform(3, 4))
    check_gradients(cpu, "float32", normal(3, 6, 4), layout=layout, **options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("steps", [1, 8])
@pytest.mark.parametrize("workspace", [0, 6000])
@pytest.mark.parametrize("keep", [False, True])
def test_small_workspace_cuts_time(cpu, form, steps, workspace, keep):
    """States of a few steps at a time; sums over steps and over rows are carried on."""
    x, edges = normal(3, 9, 5, sd=20), uniform(steps, 5, 5)
    options = given_as(form, edges, uniform(5))
    limits = {"workspace": workspace, "keep": keep}
    check_gradients(cpu, "float32", x, **limits, **options)
    check_gradients(cpu, "float64", x[:1], **limits, **given_as(form, edges, uniform(3, 5)))
    lengths = np.array([9, 4, 1])
    check_gradients(cpu, "float32", x, lengths=lengths, **limits, **options)


class CountingDevice(CpuDevice):
    """Counts the bytes that are in use, and the most that have been."""

    live = peak = 0

    def empty(self, shape, dtype):
        array = super().empty(shape, dtype)
        self._add(array.nbytes)
        weakref.finalize(array, self._add, -array.nbytes)
        return array

    def run(self, launch):
        super().run(launch)
        self.launches.clear()  # they hold on to their arrays

    def _add(self, nbytes):
        self.live += nbytes
        self.peak = max(self.peak, self.live)


def test_what_the_backward_pass_reads_is_known(cpu):
    """It may run on another stream, before which the library must not hand the memory out."""
    case = make("float32", normal(3, 20, 4), transitions=uniform(19, 4, 4), lengths=[20, 1, 7])
    for keep, workspace in ((True, 1 << 20), (False, 2000)):
        _, kept = backward_pass.forward_pass(ChainRun(cpu, case.chain, workspace, SMALL), keep=keep)
        assert (kept.history is None) == (not keep)
        histories = [kept.history] if keep else list(kept.before.values())
        states = [x for history in histories for x in (history.states, history.scales)]
        given = [case.chain.potentials, case.chain.transitions, kept.run.lengths]
        assert {id(x) for x in kept.arrays} == {id(x) for x in [kept.total, *states, *given]}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("steps", [1, 5])
def test_posterior_is_what_its_parts_are(cpu, form, steps):
    case = make("float32", normal(3, 6, 7, sd=9), **given_as(form, uniform(steps, 7, 7)))
    run = ChainRun(cpu, case.chain, 1 << 20, SMALL)
    total, marginals, counts = backward_pass.posterior_of(run)
    np.testing.assert_array_equal(total, run.log_partition())
    np.testing.assert_array_equal(marginals, backward_pass.state_marginals(run))
    np.testing.assert_array_equal(counts, backward_pass.transition_counts(run))
    alone = make("float32", normal(3, 1, 7))
    _, marginals, counts = backward_pass.posterior_of(ChainRun(cpu, alone.chain, 1 << 20, SMALL))
    assert counts is None
    np.testing.assert_allclose(marginals.sum(-1), 1, rtol=1e-5)


def value_and_gradients(run):
    value, kept = backward_pass.forward_pass(run, keep=False)
    return [value, *backward_pass.gradients(kept, None, {"potentials", "transitions"}).values()]


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("steps", [1, 299])
def test_workspace_is_kept(form, steps):
    """All states together would take several times as much."""
    case = make("float32", normal(4, 300, 6), **given_as(form, uniform(steps, 6, 6)))
    workspace = 40_000
    for call in (
        ChainRun.log_partition,
        partial(ChainRun.messages, backward=True),
        backward_pass.state_marginals,
        backward_pass.transition_counts,
        value_and_gradients,
    ):
        device = CountingDevice(seed=3)
        out = call(ChainRun(device, case.chain, workspace, SMALL))
        results = sum(x.nbytes for x in (out if isinstance(out, list) else [out]))
        assert device.peak - device.live <= workspace
        assert device.live <= results  # array operations make some
    assert 2 * workspace < 4 * 300 * (2 * 6 * 4 + 3 * 8)


@pytest.mark.sanitized
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("steps", [1, 3])
def test_several_tiles_and_splits_of_rows(cpu, form, steps):
    """More states than a block has entries of a matrix, and rows for several blocks."""
    x = normal(70, 4, 3, sd=20)
    check_gradients(cpu, "float32", x, **given_as(form, uniform(steps, 3, 3), uniform(3)))
    geometry = Geometry(4, 1, 3, 2)
    x = normal(2, 4, 70, sd=20)
    check_gradients(cpu, "float32", x, geometry=geometry, transitions=uniform(steps, 70, 70))


def test_blocks_that_share_rows(cpu):
    geometry = Geometry(4, 1, 1, 2, slices=2)
    x, edges = normal(5, 4, 40, sd=30), uniform(3, 40, 40)
    x[2, 1, 39] = NAN
    check_gradients(cpu, "float32", x, geometry=geometry, transitions=edges, initial=uniform(40))
    edges[1, 3, 38] = NAN
    check_gradients(cpu, "float32", x, geometry=geometry, transitions=edges)


def test_many_equal_rows(cpu):
    """Their terms, added to one sum, are rounded to the same side again and again."""
    rows, x, edges = 10_000, normal(2, 4), uniform(1, 4, 4)
    one = backward_pass.transition_counts(
        ChainRun(cpu, make("float64", x, transitions=edges).chain, 1 << 20)
    )
    cpu.multiprocessors = 1
    many = backward_pass.transition_counts(
        ChainRun(cpu, make("float32", np.tile(x, (rows, 1, 1)), transitions=edges).chain, 1 << 24)
    )
    np.testing.assert_allclose(many, rows * one, rtol=EPS["float32"] * roundings(rows))


@pytest.mark.parametrize("count", [1, 9])
def test_launches_are_short(cpu, monkeypatch, count):
    """Devices with a screen end those that take seconds."""
    monkeypatch.setattr(matrices, "MAX_STEPS", 4)
    x, edges = normal(3, 10, 4, sd=9), uniform(count, 4, 4)
    check_gradients(cpu, "float32", x, transitions=edges, initial=uniform(4))
    for source in ("chains/chain.cu", "chains/small.cu"):
        packed = [launch.arguments[0] for launch in cpu.launches if launch.source == source]
        assert max(int(c["last"] - c["first"]) for c in packed) == 4
