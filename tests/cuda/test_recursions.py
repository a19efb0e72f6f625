"""Messages and best paths of the recursion's kernels: layouts, groups, segments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraylogchain as alc
from tests.chain_checks import check_chain
from tests.chain_scenarios import normal, uniform
from tests.conftest import Backend
from tests.cuda.cpu_device import CpuDevice

pytestmark = pytest.mark.usefixtures("compiler")


@pytest.fixture
def check(
    device: CpuDevice, use: Callable[[Any], Any], np_backend: Backend
) -> Callable[..., set[str]]:
    """Return a function that checks messages and best paths, and returns the names of kernels.

    With an empty `only` it checks all operations.
    """
    some = ("log_partition", "messages", "paths")

    def by_kernels(dtype: str, x: Any, only: tuple[str, ...] = some, **options: Any) -> set[str]:
        use(device)
        check_chain(np_backend, dtype, x, **options, only=only)
        return {launch.kernel.name for launch in device.launches}

    return by_kernels


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
def test_layouts(device, check, dtype, has_one, states, rows, layout):
    """Part of a warp to a row, a block to a row, a block to four rows; one matrix is on chip."""
    device.multiprocessors = 1
    matrices = (1 if has_one else 5, states, states)
    lengths = np.arange(rows) % 6 + 1
    arguments = {"lengths": lengths, "initial": uniform(states), "final": uniform(rows, states)}
    x = normal(rows, 6, states)
    kernels = check(dtype, x, transitions=uniform(*matrices), **arguments)
    on_chip = str(has_one).lower()
    number = "float" if dtype == "float32" else "double"
    for sums in ("true", "false"):
        assert f"chain_steps<{number}, {sums}, {layout}, {on_chip}>" in kernels


@pytest.mark.parametrize("states", [1, 2, 5, 16, 17, 31, 65])
def test_states(check, dtype, states):
    arguments = {"log_transitions": normal(3, states, states), "log_initial": normal(states)}
    check(dtype, normal(2, 4, states, sd=9), **arguments)


@pytest.mark.sanitized
@pytest.mark.parametrize("batch", [(2, 1, 5), (1, 3, 5), (2, 3, 5), (2, 1, 1), (2, 3, 1)])
@pytest.mark.parametrize("states", [4, 34])
def test_groups(check, batch, states):
    """Matrices that differ from row to row, or along one of two axes."""
    x, P = normal(2, 3, 6, states, sd=3), uniform(*batch, states, states)
    check("float32", x, transitions=P)
    if batch[1] == 1:
        check("float32", x, transitions=P, lengths=[[6, 2, 4], [1, 6, 6]])


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("has_one", [True, False])
def test_segments_go_on_where_others_ended(check, cut, steps, has_one):
    lengths = np.array([7, 5, 3, 2, 1])
    P, x = uniform(1 if has_one else 6, 5, 5), normal(5, 7, 5, sd=30)
    P *= 4.0 ** np.arange(len(P))[:, None, None]  # each matrix has a scale of its own
    cut(steps=steps)
    check("float64", x, only=(), transitions=P, lengths=lengths)


@pytest.mark.parametrize("states", [3, 70])
@pytest.mark.parametrize("reached", [0, 2])
def test_of_equal_paths_the_smallest_states_are_taken(device, use, states, reached):
    """Before the last state, which has all of the final weights."""
    use(device)
    x = np.where(np.arange(states) < reached, -np.inf, np.zeros((5, 6, states)))
    end = np.eye(states)[-1]
    path = alc.LogChain(x, transitions=np.ones((states, states)), final=end).viterbi().states
    assert (path[:, :-1] == reached).all()
    assert (path[:, -1] == states - 1).all()
    assert any(launch.kernel.name.startswith("chain_trace") for launch in device.launches)


def test_weights_of_states_that_nothing_reaches_are_not_rounded_in(check):
    """A matrix's largest weight, and that of a row's first states, may take no part."""
    P = np.array([[[0.3, 1.0], [0.2, 1e220]], [[0.7, 1e-200], [1e220, 1.0]]])
    for x in (np.array([[0.1, -np.inf], [0.3, 0.2], [-0.7, 0.1]]), np.zeros((3, 2))):
        check("float64", x[None], transitions=P, initial=np.array([1.0, 0]))
