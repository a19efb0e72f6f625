"""Array operations: weights over hundreds of powers of ten."""

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain import _dispatch
from tests import reference
from tests.adversarial import adversarial
from tests.error_model import EPS


@pytest.fixture(autouse=True)
def _array(monkeypatch):
    monkeypatch.setattr(_dispatch, "COMPILED", False)


@pytest.mark.parametrize("block", range(4))
def test_values_and_counts(block):
    """Within roundings of the sizes of what is summed, as many moves as there are steps."""
    for seed in range(50 * block, 50 * (block + 1)):
        x, P, p0 = adversarial(seed)
        with np.errstate(divide="ignore"):
            exact = reference.chain(x, np.log(reference.wide(P)), np.log(reference.wide(p0)))
        chain = alc.LogChain(x, transitions=P, initial=p0)
        found = chain.log_partition()
        if np.isinf(exact.log_partition):
            assert found == exact.log_partition, seed
            continue
        size = np.abs(np.where(np.isfinite(x), x, 0)).max() + 700
        bound = EPS["float64"] * (abs(exact.log_partition) + len(x) * size)
        assert abs(found - exact.log_partition) <= bound, seed
        moves = len(x) - 1
        assert abs(chain.expected_transitions().sum() - moves) <= 4 * moves * bound, seed


def test_counts_of_weights_whose_gradients_are_huge():
    x = np.array([[0, -2000.0], [0, 0], [0, -2000]])
    for tiny in (1e-300, 1e-304, 1e-306, 1e-308):
        chain = alc.LogChain(x, transitions=np.array([[[tiny, 0], [0, 1]]]))
        np.testing.assert_allclose(chain.expected_transitions(), [[[2, 0], [0, 0]]], rtol=1e-12)
        _, pullback = alc.vjp.log_partition(chain)
        gradient = pullback(1.0).transitions
        np.testing.assert_allclose(
            gradient[0, 0, 0], min(2 / tiny, np.finfo(float).max), rtol=1e-12
        )
