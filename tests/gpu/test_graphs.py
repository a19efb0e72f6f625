"""Calls on tensors can be captured in CUDA graphs: they wait for nothing and decide nothing.

A graph captured with easy inputs must be right for hard ones: a graph has no second path.
"""

import numpy as np
import pytest

from arraylogchain._inputs.arrays import prepare_inputs
from tests import error_model, reference
from tests.chain_reference import Exact
from tests.conftest import make_backend
from tests.gpu.calls import CALLS, WITHOUT_WAITING


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_kernel_that_is_not_loaded_is_one_clear_sentence(torch):
    backend, call = make_backend("torch-cuda"), CALLS["maxplus_matmul"]
    arrays = call.arguments(backend, "float16")
    prepare_inputs({"a": arrays[0]})[0].kernels.usable.clear()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="call once before"), torch.cuda.graph(graph):
        call.run(*arrays)


def captured(torch, call, arrays):
    """Return a graph of a call on these arrays, and its results."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # compiles, and lets libraries allocate their workspaces
            call(*arrays)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(*arrays)
    return graph, out


@pytest.mark.parametrize("name", WITHOUT_WAITING)
def test_replay_with_other_inputs(torch, name):
    backend, call = make_backend("torch-cuda"), CALLS[name]
    arrays = call.arguments(backend)
    graph, out = captured(torch, call.run, arrays)
    for seed in (1, 2):
        fresh = call.arguments(backend, seed=seed)
        for array, values in zip(arrays, fresh, strict=True):
            array.copy_(values)
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(out, call.run(*fresh), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sd", [30, 100, 1000])
@pytest.mark.parametrize("shapes", [((150, 96), (96, 130)), ((2, 96), (96, 130)), ((16, 16),) * 2])
def test_entries_that_need_another_path_after_capture(torch, shapes, sd):
    backend, call = make_backend("torch-cuda"), CALLS["logmatmulexp"]
    rng = np.random.default_rng(3)
    easy = [backend.asarray(rng.normal(size=shape), "float32") for shape in shapes]
    graph, (out,) = captured(torch, call.run, easy)
    hard = [rng.normal(0, sd, shape).astype("float32") for shape in shapes]
    hard[0][rng.random(shapes[0]) < 0.2] = -np.inf
    hard[0][0] = -np.inf
    for array, values in zip(easy, hard, strict=True):
        array.copy_(torch.from_numpy(values))
    graph.replay()
    exact = reference.logmatmulexp(*hard)
    bound = error_model.product_bound(*hard, exact, "float32")
    error_model.assert_within(backend.read(out, "float32"), exact, bound)


@pytest.mark.parametrize("sd", [30, 1000])
def test_chains_that_need_another_path_after_capture(torch, sd):
    backend, call = make_backend("torch-cuda"), CALLS["log_partition"]
    arrays = call.arguments(backend)
    graph, (out,) = captured(torch, call.run, arrays)
    x, P, p0 = (v.astype("float32") for v in call.values(seed=4))
    x, P = (sd * x).astype("float32"), np.where(P < 0.5, 0, P).astype("float32")
    for array, values in zip(arrays, (x, P, p0), strict=True):
        array.copy_(torch.from_numpy(values))
    graph.replay()
    exact = Exact({"log_potentials": x, "transitions": P, "initial": p0})
    log_z, gap = exact.log_partition
    bound = error_model.chain_bound(log_z, gap, exact.T, exact.K, "float32")
    error_model.assert_within(backend.read(out, "float32").reshape(-1), log_z, bound)
