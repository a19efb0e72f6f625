"""Plans of chains, from shapes and dtypes alone."""

import tracemalloc

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain.chain import PLANNED


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
