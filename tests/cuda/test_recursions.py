"""Messages and best paths of the recursion's kernels: layouts, scenarios, drifting chains."""

from __future__ import annotations

import numpy as np
import pytest

from arraylogchain._backends.cuda.backend import CudaBackend
from arraylogchain._backends.interface import Keep
from arraylogchain._backends.shards import shards
from arraylogchain._inputs.chain import make_chain
from tests import drifting_chains
from tests.chain_scenarios import SCENARIOS, make, normal, uniform
from tests.cuda.cpu_device import CpuDevice
from tests.cuda.recursions import check_recursions, context

pytestmark = pytest.mark.usefixtures("compiler")

BEYOND_THE_REFERENCE = (
    "log matrices near 1e+06",
    "potentials of all magnitudes",
    "initial weights of 1e-",
)


def kernels_of(device: CpuDevice) -> set[str]:
    return {launch.kernel.name for launch in device.launches}


@pytest.mark.sanitized
@pytest.mark.parametrize("has_one", [True, False])
@pytest.mark.parametrize(
    ("states", "rows", "layout"),
    [
        (3, 9, "true, 1"),
        (32, 3, "true, 1"),
        (33, 3, "false, 1"),
        (70, 2, "false, 1"),
        (40, 9, "false, 4"),
    ],
)
def test_layouts(device, dtype, has_one, states, rows, layout):
    """Part of a warp to a row, a block to a row, a block to four rows; one matrix is on chip."""
    device.multiprocessors = 1
    matrices = (1 if has_one else 5, states, states)
    lengths = np.arange(rows) % 6 + 1
    arguments = {"lengths": lengths, "initial": uniform(states), "final": uniform(rows, states)}
    check_recursions(
        device, dtype, normal(rows, 6, states), transitions=uniform(*matrices), **arguments
    )
    on_chip = str(has_one).lower()
    number = "float" if dtype == "float32" else "double"
    for sums in ("true", "false"):
        assert f"chain_steps<{number}, {sums}, {layout}, {on_chip}>" in kernels_of(device)


@pytest.mark.parametrize("states", [1, 2, 5, 16, 17, 31, 65])
def test_states(device, dtype, states):
    arguments = {"log_transitions": normal(3, states, states), "log_initial": normal(states)}
    check_recursions(device, dtype, normal(2, 4, states, sd=9), **arguments)


@pytest.mark.sanitized
@pytest.mark.parametrize("batch", [(2, 1, 5), (1, 3, 5), (2, 3, 5), (2, 1, 1), (2, 3, 1)])
@pytest.mark.parametrize("states", [4, 34])
def test_groups(device, batch, states):
    """Matrices that differ from row to row, or along one of two axes."""
    x, P = normal(2, 3, 6, states, sd=3), uniform(*batch, states, states)
    check_recursions(device, "float32", x, transitions=P)
    if batch[1] == 1:
        check_recursions(device, "float32", x, transitions=P, lengths=[[6, 2, 4], [1, 6, 6]])


@pytest.mark.parametrize("cuts", [(1,), (3, 4), (2, 5, 6)])
@pytest.mark.parametrize("has_one", [True, False])
def test_blocks_of_steps_go_on_where_others_ended(device, cuts, has_one):
    lengths = np.array([7, 5, 3, 2, 1])
    P, x = uniform(1 if has_one else 6, 5, 5), normal(5, 7, 5, sd=30)
    check_recursions(device, "float64", x, transitions=P, lengths=lengths, cuts=cuts)


def test_launches_of_few_matrices_where_the_workspace_is_small(device):
    x, P = normal(3, 9, 20, sd=5), uniform(8, 20, 20)
    check_recursions(device, "float32", x, transitions=P, workspace=2 * 2 * 20**2 * 4)
    steps = [k for k in device.launches if k.kernel.name.startswith("chain_steps<float, true")]
    assert len(steps) == 2 * 5


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_half_precisions_are_read(device, kind):
    pytest.importorskip("ml_dtypes")
    check_recursions(device, kind, normal(3, 5, 6, sd=4), transitions=uniform(1, 6, 6))


@pytest.mark.parametrize("states", [3, 70])
@pytest.mark.parametrize("reached", [0, 2])
def test_of_equal_paths_the_smallest_states_are_taken(device, states, reached):
    """Before states from `reached` on, which alone have weights; and of a NaN, where it is."""
    x = np.where(np.arange(states) < reached, -np.inf, np.zeros((5, 6, states)))
    chain = make_chain({"log_potentials": x, "transitions": np.ones((1, states, states))}, None)
    (shard,) = shards(context(device, "float64"), chain, *chain.sizes)
    recursion, steps = CudaBackend(shard, 1 << 20), slice(0, 6)
    with shard.ctx.computing():
        updated = recursion.max_product(None, steps, Keep.UPDATED).updated
        after = np.full((1, 5), states - 1)
        path = recursion.backtrace(updated, after, steps)
        assert (path[-1] == states - 1).all()
        assert (path[:-1] == reached).all()
        updated.values[2, 0, 3, -1] = np.nan
        assert recursion.backtrace(updated, after, steps)[2, 0].tolist() == [reached] * 3 + [
            states - 1,
            reached,
        ]


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenarios(compiler, dtype, name):
    if dtype == "float64" and name.startswith(BEYOND_THE_REFERENCE):
        pytest.skip("sums of large numbers that cancel are no better in long double")
    arguments = make(name)
    for option in ("workspace", "only"):
        arguments.pop(option, None)
    check_recursions(
        CpuDevice(3, flush_to_zero=dtype == "float32"), dtype, arguments.pop("x"), **arguments
    )


@pytest.mark.parametrize("kind", ["short", "long", "crossing"])
@pytest.mark.parametrize("block", range(3))
def test_drifting_chains(compiler, dtype, kind, block):
    rng = np.random.default_rng(block)
    for _ in range(8):
        arguments = getattr(drifting_chains, kind)(rng, 30.0 if dtype == "float32" else 300.0)
        device = CpuDevice(int(rng.integers(8)), flush_to_zero=dtype == "float32")
        check_recursions(device, dtype, arguments.pop("x"), **arguments)


def test_weights_of_states_that_nothing_reaches_are_not_rounded_in(device):
    """A matrix's largest weight, and that of a row's first states, may take no part."""
    P = np.array([[[0.3, 1.0], [0.2, 1e220]], [[0.7, 1e-200], [1e220, 1.0]]])
    for x in (np.array([[0.1, -np.inf], [0.3, 0.2], [-0.7, 0.1]]), np.zeros((3, 2))):
        check_recursions(device, "float64", x[None], transitions=P, initial=np.array([1.0, 0]))
