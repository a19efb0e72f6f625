"""Segments of a chain's time, whose products kernels compute side by side."""

from dataclasses import replace

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain import _arrays, _dispatch
from arraylogchain._context import quiet
from arraylogchain._cuda.chains import geometry, log_partition, segments
from tests.checks import CHAIN_SHAPES, check_chain
from tests.cuda.chain_checks import make
from tests.cuda.cpu_device import CpuDevice
from tests.error_model import EPS
from tests.test_chain import FORMS, given_as, normal, uniform, wide_log_weights
from tests.test_workspace import temporaries

INF, NAN = np.inf, np.nan


@pytest.fixture
def in_segments(monkeypatch):
    """Let chains have two or three segments."""

    def count(device, chain, item, workspace):
        return min(3, (chain.num_steps + 2) // 3), 1e-9

    monkeypatch.setattr(segments, "count_and_seconds", count)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sd", [1, 30, 1000])
@pytest.mark.parametrize("one", [False, True])
def test_against_references(kernels, in_segments, np_backend, dtype, form, sd, one):
    K, count = 5, 1 if one else 8
    x = normal(2, 9, K, sd=sd)
    check_chain(np_backend, dtype, x, **given_as(form, uniform(count, K, K), uniform(K)))
    assert alc.LogChain(x, transitions=uniform(count, K, K)).plan().segments == 3


@pytest.mark.parametrize(("x", "transitions", "initial"), CHAIN_SHAPES)
def test_batch_axes(kernels, in_segments, np_backend, x, transitions, initial):
    start = None if initial is None else uniform(*initial)
    options = {"transitions": uniform(*transitions, seed=1), "initial": start}
    if 0 not in x:
        check_chain(np_backend, "float32", normal(*x), **options)


@pytest.mark.parametrize("sd", [20, 1000])
def test_wide_log_transitions(kernels, in_segments, np_backend, dtype, sd):
    x, options = wide_log_weights(sd, 9)
    check_chain(np_backend, dtype, x, **options)


def test_shifts_of_segments_cancel(kernels, in_segments, np_backend, dtype):
    x = np.round(normal(2, 9, 5, sd=3), 1)
    for steps, shift in ((slice(3), 1), (slice(3, 5), -2), (slice(5, 7), 2), (slice(7, 9), -1.5)):
        x[:, steps] += 1e4 * shift
    check_chain(np_backend, dtype, x, transitions=uniform(5, 5)[None])


def test_powers_of_two_cancel_shifts(kernels, in_segments, np_backend):
    """Of large potentials and tiny linear weights, which are kept apart in scales."""
    x, tiny = normal(2, 12, 4) + 690.0, uniform(1, 4, 4) * 1e-300
    check_chain(np_backend, "float64", x, transitions=tiny)


@pytest.mark.parametrize("K", [4, 37])
@pytest.mark.parametrize("form", FORMS)
def test_final_weights_and_what_is_not_finite(compiler, dtype, K, form):
    """As without segments: infinities and NaN show, and a chain may have no path."""
    x, edges, final = normal(6, 8, K, sd=9), uniform(1, K, K), uniform(K, seed=2)
    edges[:, :, 2:] = 0
    x[0, 4, 1], x[1, 5] = NAN, -INF
    x[2, 2, 0] = x[2, 7, 1] = INF
    chain = make(dtype, x, **given_as(form, edges, uniform(K))).chain
    final = np.asarray(final, dtype)
    logs = form == "logs"
    chain = replace(chain, final=np.log(final) if logs else final, final_in_logs=logs)
    ctx = replace(_arrays._numpy_context(dtype), kernels=CpuDevice(seed=3))
    with quiet():
        found, whole = (log_partition(ctx, replace(chain, segments=n), 1 << 20) for n in (3, 1))
    np.testing.assert_allclose(found, whole, rtol=100 * EPS[dtype])


@pytest.mark.parametrize("rows", [1, 3])
def test_zeros_of_products_that_meet_infinity(kernels, dtype, rows):
    """States that are positive in the chain, but not from each state that segments begin with."""
    x, edges = np.zeros((rows, 5, 2)), np.array([[[1.0, 0], [1, 1]]] * 3 + [[[1, 1], [1, 1]]])
    x[0, 3, 1] = INF
    chain = make(dtype, x, transitions=edges).chain
    ctx = replace(_arrays._numpy_context(dtype), kernels=kernels)
    with quiet():
        found, whole = (log_partition(ctx, replace(chain, segments=n), 1 << 20) for n in (2, 1))
    assert found[0] == whole[0] == INF
    np.testing.assert_allclose(found, whole, rtol=10 * EPS[dtype])


def test_infinity_that_meets_a_zero_of_the_chain(kernels, dtype):
    """NaN, though the product of the segment's matrices has no such zero."""
    x = np.array([[[0, 0], [0, 0], [0, INF], [-INF, 0], [0, 0]]])
    chain = make(dtype, x, transitions=np.ones((1, 2, 2))).chain
    ctx = replace(_arrays._numpy_context(dtype), kernels=kernels)
    with quiet():
        found = [log_partition(ctx, replace(chain, segments=n), 1 << 20) for n in (2, 1)]
    assert np.all(np.isnan(found))


def test_kernels_take_over_where_guesses_of_array_operations_fail(kernels):
    """States that are never forgotten."""
    x = normal(40, 2)
    chain = make("float64", x, transitions=np.eye(2)[None]).chain
    ctx = replace(_arrays._numpy_context("float64"), kernels=kernels)
    with quiet():
        found = _dispatch._in_segments("marginals", 4, ctx, chain, 1 << 20)
    weights = np.exp(x.sum(0) - x.sum(0).max())
    np.testing.assert_allclose(found, np.tile(weights / weights.sum(), (40, 1)), rtol=1e-12)
    assert kernels.launches


@pytest.mark.parametrize("steps", [1, 59])
def test_workspace(kernels, monkeypatch, steps):
    def run(launch, run=kernels.run):
        run(launch)
        kernels.launches.clear()  # they hold on to their arrays

    monkeypatch.setattr(kernels, "run", run)
    monkeypatch.setattr(geometry, "LAUNCH", 0)
    workspace = 1 << 20
    x, edges = normal(60, 32), uniform(steps, 32, 32)
    chain = alc.LogChain(x, transitions=edges, workspace=workspace)
    assert chain.plan().segments == 4
    assert temporaries(chain.log_partition) <= workspace


def test_where_segments_pay(use):
    """By estimates: where the device would be idle for most of a step, and memory suffices."""
    device = CpuDevice()
    device.multiprocessors = 132
    use(device)

    def count(rows, steps, states, **options):
        x = np.broadcast_to(np.float32(0), (rows, steps, states))
        edges = np.ones((states, states), np.float32)
        return alc.LogChain(x, transitions=edges, **options).plan().segments

    assert count(1, 100_000, 4) == 316
    assert count(1, 100_000, 128, workspace=1 << 28) == 64
    assert count(1, 10_000, 128, workspace=1 << 25) == 8
    assert count(1, 50, 4) == count(500, 40, 200) == 1
    assert count(2, 100_000, 4, lengths=np.array([100_000, 5])) == 1
    plan = alc.LogChain(np.zeros((100_000, 4), np.float32), transitions=np.ones((4, 4))).plan()
    assert "products of 316 pieces of time" in str(plan)
