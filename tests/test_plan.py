"""Plans of chains, from shapes and dtypes alone."""

import tracemalloc

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain.chain import PLANNED
from tests.chain_scenarios import left_to_right
from tests.conftest import HAS_NUMBA


def forum_chain(fill=0.0, n=500):
    """Return the forum's chain, made of one number that is seen everywhere: nothing to compute."""
    value = np.asarray(fill, "float32")
    return alc.LogChain(
        np.broadcast_to(value, (n, 1, 40, 200)),
        transitions=np.broadcast_to(value, (1, 39, 200, 200)),
        initial=np.broadcast_to(value, (1, 200)),
    )


@pytest.mark.parametrize(
    "word", ["500 rows", "40 steps", "200 states", "float32", "route", "workspace"]
)
def test_printed_plan_says(word):
    assert word in str(forum_chain().plan())


def test_printed_plan_of_one_row_step_and_state():
    assert "1 row, 1 step, 1 state, float64" in str(alc.LogChain(np.zeros((1, 1))).plan())


def test_plan_depends_on_shapes_and_dtypes_only():
    assert str(forum_chain(0.0).plan()) == str(forum_chain(np.nan).plan())


@pytest.mark.skipif(not HAS_NUMBA, reason="there are no compiled loops")
@pytest.mark.parametrize(
    ("batch", "transitions", "route"),
    [
        pytest.param((), np.ones((3, 3)), "loops", id="few states"),
        pytest.param((20_000,), np.ones((6, 6)), "loops", id="few states, many rows"),
        pytest.param((1000,), np.ones((24, 24)), "loops", id="24 states, many rows"),
        pytest.param((1000,), np.ones((48, 48)), "arrays", id="48 states, many rows"),
        pytest.param((16,), np.ones((201, 201)), "arrays", id="many states, some rows"),
        pytest.param((2,), np.ones((201, 201)), "loops", id="many states, few rows"),
        pytest.param((), np.ones((500, 500)), "loops", id="many states, one row"),
        pytest.param((), np.ones((1000, 1000)), "arrays", id="very many states, one row"),
        pytest.param((16,), left_to_right(201), "loops", id="zeros"),
        pytest.param((16, 1), left_to_right(201)[None], "loops", id="zeros, one for each step"),
        pytest.param((16,), np.stack([left_to_right(201)] * 2), "arrays", id="zeros, unshared"),
    ],
)
def test_plan_selects_loops_unless_a_full_multiply_pays(batch, transitions, route):
    """The route is that of the number of entries, whatever dtype and form they have."""
    K = transitions.shape[-1]
    for dtype in ("float32", "float64"):
        x = np.broadcast_to(np.zeros(1, dtype), (*batch, 3, K))
        with np.errstate(divide="ignore"):
            arguments = {"transitions": transitions, "log_transitions": np.log(transitions)}
        for name, matrix in arguments.items():
            chain = alc.LogChain(x, **{name: matrix.astype(dtype)})
            assert chain.plan("marginals").route == route
            assert chain.plan("viterbi").route == "loops"


def test_planning_allocates_nothing_of_note():
    """A chain whose potentials would take 3 TB is planned in a few kilobytes."""
    tracemalloc.start()
    try:
        plan = forum_chain(n=100_000_000).plan()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "workspace" in str(plan).lower()
    assert peak < 1 << 18


@pytest.mark.parametrize("operation", PLANNED)
def test_every_method_has_a_plan(operation):
    plan = forum_chain().plan(operation)
    assert plan.operation == operation
    assert plan.reason in str(plan)
