"""The kernels for paths of chains, entropy and normalised messages; and last weights in all."""

from dataclasses import replace

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain import _arrays, _dispatch
from arraylogchain._context import quiet
from arraylogchain._cuda.chains import recursion
from arraylogchain._cuda.chains.geometry import BestGeometry
from tests import test_chain_ends, test_sampling, test_viterbi
from tests import test_filtered as test_filtered_chains
from tests.cuda.chain_checks import SMALL, make
from tests.cuda.cpu_device import CpuDevice
from tests.cuda.test_chain_gradients import CountingDevice
from tests.error_model import EPS, roundings
from tests.path_checks import MIXED_FORMS, Case, given_in_forms
from tests.test_chain import FORMS, given_as, normal, uniform

INF, NAN = np.inf, np.nan
OPERATIONS = ("viterbi", "sample", "log_weight", "entropy", "filtered")

pytestmark = pytest.mark.usefixtures("compiler")


def chain_of(dtype, K, form, steps, sd=3):
    """Return a ragged chain with all weights; nothing past a row's end is to be read."""
    lengths = np.array([6, 1, 3, 2, 5])
    x = normal(5, 6, K, sd=sd)
    x[np.arange(6) >= lengths[:, None]] = NAN
    x[4, 2] = -INF
    edges = uniform(steps, K, K) * (np.random.default_rng(5).random((steps, K, K)) < 0.7)
    chain = make(dtype, x, lengths=lengths, **given_as(form, edges, uniform(K))).chain
    final = np.asarray(uniform(5, K, seed=3), dtype)
    logs = form == "logs"
    return replace(chain, final=np.log(final) + 1000 if logs else final, final_in_logs=logs)


def compute(operation, device, chain, workspace=1 << 20):
    """Return what kernels on a device compute, or array operations where that is None."""
    ctx = replace(_arrays._numpy_context(str(chain.potentials.dtype)), kernels=device)
    function = _dispatch.implementation(operation, "array" if device is None else "cuda")
    rng, shape = np.random.default_rng(7), (3, *chain.batch, chain.num_steps)
    with quiet():
        if operation == "sample":
            out = rng.random(shape).view(np.int64)
            uniforms = out.view(np.float64) if device else out.view(np.float64).copy()
            function(ctx, chain, workspace, out, uniforms)
            return out
        if operation == "log_weight":
            return function(ctx, chain, workspace, rng.integers(0, chain.num_states, shape))
        found = function(ctx, chain, workspace)
        if operation == "filtered":
            return np.concatenate([found[0], found[1][..., None]], axis=-1)
        return found[0] if operation == "viterbi" else found


@pytest.mark.sanitized
@pytest.mark.parametrize(
    "form", [FORMS[0], *(pytest.param(form, marks=pytest.mark.exhaustive) for form in FORMS[1:])]
)
@pytest.mark.parametrize("K", [3, 37])
@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_order_of_threads(device, dtype, operation, K, form, steps):
    """The same paths as array operations, from the same random numbers; also in small parts."""
    device.flush_to_zero = dtype == "float32"
    chain = chain_of(dtype, K, form, steps)
    expected = compute(operation, None, chain)
    tolerance = 6 * chain.num_steps * roundings(K) * EPS[dtype]  # of an entropy
    for workspace in (1 << 20, 3000):
        found = compute(operation, device, chain, workspace)
        if expected.dtype == np.int64:
            np.testing.assert_array_equal(found, expected)
        else:
            atol = tolerance if operation == "filtered" else 0
            np.testing.assert_allclose(found, expected, rtol=tolerance, atol=atol)


@pytest.mark.parametrize("forms", MIXED_FORMS[2:])
@pytest.mark.parametrize("K", [1, 5, 37])
@pytest.mark.parametrize("sd", [1, 1000])
def test_against_references(kernels, np_backend, dtype, forms, K, sd):
    kernels.flush_to_zero = dtype == "float32"
    options = given_in_forms(forms, uniform(5, K, K), uniform(K))
    case = Case(np_backend, dtype, normal(2, 3, 6, K, sd=sd), **options)
    case.check_viterbi()
    case.check_entropy()
    case.check_log_weight(np.random.default_rng(1).integers(0, K, (4, 1, 3, 6)))
    if K == 5:
        test_sampling.assert_possible(case, test_sampling.draw(case, 20))
    sources = {launch.source for launch in kernels.launches}
    assert sources >= {f"chains/{name}.cu" for name in ("trace", "log_weight", "entropy")}


@pytest.mark.parametrize("K", [3, 37])
@pytest.mark.parametrize("sd", [1, 1000])
def test_filtered(kernels, np_backend, dtype, K, sd):
    options = {"transitions": uniform(8, K, K), "initial": uniform(K)}
    test_filtered_chains.check_filtered(np_backend, dtype, normal(2, 3, 9, K, sd=sd), **options)
    test_filtered_chains.test_steps_that_no_state_can_explain(np_backend, dtype)
    test_filtered_chains.test_infinities_and_nan(np_backend, dtype)
    assert "chains/filtered.cu" in {launch.source for launch in kernels.launches}


@pytest.mark.parametrize("steps", [False, True])
def test_ties(kernels, np_backend, dtype, steps):
    test_viterbi.test_ties_among_open_and_closed_edges(np_backend, dtype, steps)
    test_viterbi.test_special_values_stay_in_their_row(np_backend, dtype)
    assert kernels.launches


def test_samples_are_drawn_by_their_weights(kernels, np_backend):
    case = Case(np_backend, "float32", normal(2, 3, 3), transitions=uniform(2, 3, 3))
    test_sampling.assert_paths(case, test_sampling.draw(case, 2000))
    assert kernels.launches


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lengths", test_chain_ends.LENGTHS, ids=["full", "ragged"])
@pytest.mark.parametrize("shapes", ["one matrix", "each row"])
@pytest.mark.parametrize("sd", [30, pytest.param(1000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("in_blocks", [False, True])
def test_final_weights(kernels, monkeypatch, np_backend, form, lengths, shapes, sd, in_blocks):
    if in_blocks:  # as for many states
        best = BestGeometry(4, 1, 1, 2)
        monkeypatch.setattr(recursion, "choose", lambda *args: best if args[-1] else SMALL)
    shapes = test_chain_ends.SHAPES[shapes]
    test_chain_ends.test_against_references(np_backend, "float32", form, lengths, shapes, sd)
    assert kernels.launches


@pytest.mark.parametrize("value", [INF, NAN])
@pytest.mark.parametrize("where", ["potentials", "transitions", "final"])
def test_infinities_and_nan(dtype, where, value):
    """They show as in array operations, and in samples as rows without a path."""
    cpu, chain = CpuDevice(seed=3), chain_of(dtype, 3, "linear", 5)
    arrays = {name: getattr(chain, name).copy() for name in ("potentials", "transitions", "final")}
    arrays[where][0, 1] = value
    chain = replace(chain, **arrays)
    for operation in ("log_weight", "entropy"):
        found, expected = (compute(operation, device, chain) for device in (cpu, None))
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
        np.testing.assert_array_equal(np.isinf(found), np.isinf(expected))
    possible = np.isfinite(compute("log_partition", cpu, chain))
    samples = compute("sample", cpu, chain)
    assert not np.any(samples[:, ~possible] > 0)
    assert np.all((samples >= -1) & (samples < 3))
    np.testing.assert_array_equal(*(compute("viterbi", d, chain) for d in (cpu, None)))


def test_subnormal_weights(kernels, np_backend):
    """A device takes subnormal float32 numbers for zero wherever it computes with them."""
    kernels.flush_to_zero = True
    weights = 10.0 ** np.random.default_rng(1).uniform(-44, -38, (5, 4, 4))
    case = Case(np_backend, "float32", normal(3, 6, 4), transitions=weights)
    case.check_viterbi()
    case.check_log_weight(np.zeros((3, 6), int))
    assert np.all(case.chain.entropy() > 1)
    assert np.ptp(case.chain.sample(9, np.random.default_rng(0))) > 0


def test_halves(kernels):
    x, edges = normal(3, 6, 5).astype("float16"), uniform(1, 5, 5).astype("float16")
    chain = alc.LogChain(x, transitions=edges, final=edges[0, 0])
    path = chain.viterbi()
    assert path.log_weight.dtype == chain.entropy().dtype == np.float16
    np.testing.assert_array_equal(path.log_weight, chain.log_weight(path.states))
    assert kernels.launches


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("steps", [1, 299])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_workspace_is_kept(operation, form, steps):
    """All states together would take several times as much."""
    device, workspace = CountingDevice(seed=3), 60_000
    chain = make("float32", normal(4, 300, 6), **given_as(form, uniform(steps, 6, 6))).chain
    out = compute(operation, device, chain, workspace)
    # Samples are not made by the device.
    assert device.peak - (0 if operation == "sample" else out.nbytes) <= workspace
    del out
    assert device.live == 0


def test_kernels_of_samples_are_compiled_side_by_side(kernels, monkeypatch):
    """All of them, before the first is launched."""
    loaded, at_launches = set(), []
    run = kernels.run

    def noted(launch):
        at_launches.append(loaded.copy())
        run(launch)

    monkeypatch.setattr(kernels, "load", lambda *kernel: loaded.add(kernel))
    monkeypatch.setattr(kernels, "run", noted)
    alc.LogChain(normal(2, 3, 4), transitions=uniform(2, 4, 4)).sample(2, np.random.default_rng(0))
    assert ("chains/sample.cu", "sample<double>") in at_launches[0]
    assert at_launches[0] == loaded
