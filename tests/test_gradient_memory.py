"""Gradients take no more memory than their results and the workspace."""

import tracemalloc

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain._backends.array import ArrayBackend
from arraylogchain._chains.planning import ChainSizes, plan_shards
from tests.test_workspace import CHAINS, PRODUCTS, SMALLEST, normal, temporaries, uniform


def value_and_gradients(function, *arguments, **options):
    value, pullback = function(*arguments, **options)
    return value, pullback(np.ones_like(getattr(value, "values", value)))


@pytest.mark.parametrize("workspace", [SMALLEST, 1 << 22])
@pytest.mark.parametrize("function", ["matmul", "logmatmulexp", "maxplus_matmul"])
@pytest.mark.parametrize("case", [c for c in PRODUCTS if c != "mixed"])
def test_pullbacks_of_products_keep_to_the_workspace(case, function, workspace):
    a, b = PRODUCTS[case]()
    value, pullback = getattr(alc.vjp, function)(a, b, workspace=workspace)
    g = np.ones_like(getattr(value, "values", value))
    assert temporaries(lambda: pullback(g)) <= workspace


@pytest.mark.parametrize("shapes", [((2048, 8, 1, 64), (8, 64, 64)), ((64, 300, 20), (20, 30))])
def test_products_save_little_for_their_gradients(shapes):
    """Beside value and inputs, no more than their size is kept: nothing of their product."""
    a, b = (normal(*shape) for shape in shapes)
    for function in (alc.vjp.matmul, alc.vjp.logmatmulexp):
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            value, pullback = function(a, b)
            held = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert held <= 2 * value.nbytes + a.nbytes + b.nbytes
        del pullback


def test_matrices_are_not_kept_for_pullbacks():
    x, options = CHAINS["matrix per row"]()
    chain = alc.LogChain(x, **options, workspace=SMALLEST)
    used = temporaries(lambda: value_and_gradients(alc.vjp.log_partition, chain)[1])
    assert used <= 3 * SMALLEST  # with the saved messages of 300 chains


@pytest.mark.chains
@pytest.mark.parametrize("size", [(2000, 20, 20), (300, 60, 100)])
def test_pullbacks_of_many_pieces_keep_one_state_in_many(size):
    """The number of stored messages follows from the memory of one shard."""
    x, weights = normal(*size), uniform(size[-1], size[-1])
    chain = alc.LogChain(x, transitions=weights, workspace=SMALLEST)
    used = temporaries(lambda: value_and_gradients(alc.vjp.log_partition, chain)[1])
    assert used <= SMALLEST + x.nbytes // 4
    sizes = ChainSizes(1, *size, has_one_matrix=False, holds_matrices=True)
    plan = plan_shards(sizes, ArrayBackend, 4, SMALLEST, True, 10, 1 << 28)
    assert plan.steps >= size[1] ** 0.5 - 1


@pytest.mark.chains
def test_the_forums_case():
    """n, t, v, c = 500, 1, 40, 200, value and all gradients: within three times the potentials.

    The forum's code takes 13.7 GB, one matrix per row and step 80 MB per step.
    """
    n, v, c = 500, 40, 200
    x, transitions, initial = normal(n, 1, v, c), uniform(1, v - 1, c, c), uniform(1, c)

    chain = alc.LogChain(x, transitions=transitions, initial=initial)
    assert temporaries(chain.log_partition) <= x.nbytes

    def call():
        value, gradients = value_and_gradients(alc.vjp.log_partition, chain)
        return value, *gradients[:3]

    assert temporaries(call) <= 2 * x.nbytes - transitions.nbytes
