"""Array operations: weights over hundreds of powers of ten."""

import pytest

import arraylogchain as alc
from arraylogchain import _dispatch
from tests.adversarial import check_huge_gradients, check_sum_and_counts


@pytest.fixture(autouse=True)
def _array(monkeypatch):
    monkeypatch.setattr(_dispatch, "COMPILED", False)


@pytest.mark.parametrize("block", range(4))
def test_sums_and_counts(block):
    for seed in range(50 * block, 50 * (block + 1)):
        check_sum_and_counts(alc.LogChain, seed)


def test_counts_of_weights_whose_gradients_are_huge():
    check_huge_gradients(alc.LogChain, alc.vjp.log_partition, rtol=1e-12)
