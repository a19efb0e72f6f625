"""Calls whose kernels run on the CPU allocate at most `workspace`."""

from collections import deque

import numpy as np
import pytest

import arraylogchain as alc
from tests.test_workspace import CHAINS, METHODS, SMALLEST, normal, temporaries, uniform

NAMES = ["large K", "logs, sd 1000", "many rows, sd 1000", "float16", "float64", "time first"]
CASES = [pytest.param(name, marks=pytest.mark.exhaustive) for name in NAMES]


@pytest.fixture(autouse=True)
def forget_launches(kernels):
    """Keep no launches, which hold their arrays."""
    kernels.launches = deque(maxlen=0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", ["left to right", *CASES])
def test_chains(case, method):
    x, options = CHAINS[case]()
    chain = alc.LogChain(x, **options, workspace=SMALLEST)
    assert temporaries(getattr(chain, method)) <= SMALLEST


def test_matrices_of_many_steps():
    """A segment holds the matrices of its steps: the planner counts them."""
    x, transitions = normal(3, 60, 50), uniform(59, 50, 50)
    chain = alc.LogChain(x, transitions=transitions, workspace=SMALLEST)
    assert temporaries(chain.posterior) <= SMALLEST
    assert temporaries(chain.viterbi) <= SMALLEST


@pytest.mark.parametrize(
    ("workspace", "kept_steps"),
    [pytest.param(1_200_000, 40, id="messages"), pytest.param(SMALLEST, 10, id="checkpoints")],
)
def test_gradients(workspace, kept_steps):
    """A pullback also keeps the messages of all steps if they fit the workspace, or of a few."""
    x, transitions = normal(66, 40, 50), uniform(39, 50, 50)

    def gradients():
        chain = alc.LogChain(x, transitions=transitions, workspace=workspace)
        value, pullback = alc.vjp.log_partition(chain)
        return value, *pullback(np.ones_like(value))

    assert temporaries(gradients) <= workspace + x.nbytes * kept_steps // 40
