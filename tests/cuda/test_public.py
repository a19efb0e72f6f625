"""The public functions on the kernels' path: NumPy arrays as if they were on a device."""

import numpy as np
import pytest

import arraylogchain as alc
from tests.checks import check_chain, check_logmatmulexp
from tests.gradient_checks import (
    check_posterior,
    check_vjp_chain,
    check_vjp_logmatmulexp,
    check_vjp_maxplus,
)
from tests.test_chain import FORMS, given_as, normal, uniform
from tests.test_logchainexp import check_stack
from tests.test_workspace import temporaries


@pytest.mark.parametrize("sd", [1, 30, 300])
@pytest.mark.parametrize(
    ("a", "b"), [((40, 50), (50, 45)), ((2, 9, 1, 7), (9, 7, 8)), ((5,), (5, 3)), ((0, 3), (3, 2))]
)
def test_logmatmulexp(kernels, np_backend, dtype, a, b, sd):
    check_logmatmulexp(np_backend, dtype, normal(*a, sd=sd), normal(*b, sd=sd, seed=1))
    assert bool(kernels.launches) == (0 not in a)


@pytest.mark.parametrize("n", [2, 3, 7, 20])
@pytest.mark.parametrize("workspace", [1 << 20, None])
def test_stacks_of_matrices(kernels, np_backend, dtype, n, workspace):
    """By pairs of neighbours, in groups of matrices and parts of the batch that fit."""
    check_stack(np_backend, dtype, normal(3, n, 33, 33, sd=30), workspace)
    assert kernels.launches


@pytest.mark.parametrize("workspace", [1 << 20, 1 << 22])
def test_workspace_of_stacks(kernels, monkeypatch, workspace):
    def run(launch, run=kernels.run):
        run(launch)
        kernels.launches.clear()  # they hold on to their arrays

    monkeypatch.setattr(kernels, "run", run)
    stack = normal(3, 40, 64, 64)
    assert stack.nbytes > 3 * (1 << 20)
    alc.logchainexp(stack[:, :3])  # what is imported and compiled stays
    assert temporaries(lambda: alc.logchainexp(stack, workspace=workspace)) <= workspace


def test_more_axes_than_kernels_take(kernels, np_backend):
    """Array operations compute: the product, its gradients, and chains."""
    axes = (2,) * 9
    a, b = normal(*axes, 3, 4), normal(*axes, 4, 2, seed=1)
    check_logmatmulexp(np_backend, "float32", a, b)
    check_vjp_logmatmulexp(np_backend, "float32", a, b)
    check_vjp_maxplus(np_backend, "float32", a, b)
    chain = alc.LogChain(a, transitions=uniform(1, 4, 4))
    assert chain.plan().route != "kernel"
    assert not kernels.launches
    ones = (1,) * 9
    check_logmatmulexp(np_backend, "float32", normal(*ones, 3, 4), normal(*ones, 4, 2, seed=1))
    assert kernels.launches


def test_lengths(kernels, np_backend):
    """They are read once, when the chain is made."""
    lengths = np.array([6, 1, 4])
    chain = alc.LogChain(normal(3, 6, 4), transitions=uniform(5, 4, 4), lengths=lengths)
    before = chain.log_partition()
    lengths[...] = 6
    np.testing.assert_array_equal(chain.log_partition(), before)
    assert {launch.source for launch in kernels.launches} >= {"chains/lengths.cu"}


def test_mixed_dtypes(kernels):
    a, b = normal(3, 4).astype("float32"), normal(4, 5)
    np.testing.assert_allclose(
        alc.logmatmulexp(a, b), np.log(np.exp(a.astype(float)) @ np.exp(b)), rtol=1e-14
    )
    chain = alc.LogChain(a, transitions=np.exp(normal(2, 4, 4)))
    plain = alc.LogChain(a.astype(float), transitions=np.exp(normal(2, 4, 4)))
    assert chain.log_partition() == plain.log_partition()
    assert kernels.launches


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "shapes",
    [
        ((6, 4), (5, 4, 4), None),
        ((3, 6, 4), (1, 4, 4), (3, 4)),
        ((2, 3, 6, 4), (2, 1, 5, 4, 4), (3, 4)),
        ((3, 6, 0), (5, 0, 0), (0,)),
    ],
)
def test_chain(kernels, np_backend, dtype, shapes, form):
    x, transitions, initial = shapes
    options = given_as(form, uniform(*transitions), None if initial is None else uniform(*initial))
    check_chain(np_backend, dtype, normal(*x), **options)
    assert bool(kernels.launches) == (0 not in x)


def test_plan_says_so(kernels):
    chain = alc.LogChain(normal(3, 6, 4), transitions=uniform(5, 4, 4))
    assert chain.plan().route == "kernel"
    assert "on chip" in str(chain.plan())
    assert "route=kernel" in repr(chain)


def test_long_chains_are_cut(kernels):
    chain = alc.LogChain(normal(100_000, 4), transitions=uniform(1, 4, 4))
    assert chain.plan("marginals").route == "segments"
    assert (chain.plan().route, chain.plan().segments) == ("kernel", 316)
    assert not kernels.launches


def test_tensors(kernels, torch_backend):
    """Autograd's forward takes the same path."""
    torch = torch_backend.xp
    a = torch.from_numpy(normal(3, 4)).requires_grad_()
    b = torch.from_numpy(normal(4, 5, seed=1))
    out = alc.logmatmulexp(a, b)
    assert kernels.launches
    torch.testing.assert_close(out, torch.logsumexp(a[:, :, None] + b, 1))
    (gradient,) = torch.autograd.grad(out.sum(), a)
    expected = torch.softmax(a[:, :, None] + b, 1).sum(2)
    torch.testing.assert_close(gradient, expected.detach())


@pytest.mark.parametrize("sd", [1, 300])
@pytest.mark.parametrize(("a", "b"), [((40, 50), (50, 45)), ((2, 9, 1, 7), (9, 7, 8))])
def test_pullbacks_of_products(kernels, np_backend, dtype, a, b, sd):
    left, right = normal(*a, sd=sd), normal(*b, sd=sd, seed=1)
    check_vjp_logmatmulexp(np_backend, dtype, left, right)
    check_vjp_maxplus(np_backend, dtype, left, right)
    assert len(kernels.launches) > 2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "shapes", [((6, 4), (5, 4, 4), None), ((2, 3, 6, 4), (2, 1, 5, 4, 4), (3, 4))]
)
def test_posterior(kernels, np_backend, dtype, shapes, form):
    x, transitions, initial = shapes
    options = given_as(form, uniform(*transitions), None if initial is None else uniform(*initial))
    check_posterior(np_backend, dtype, normal(*x), **options)
    check_vjp_chain(np_backend, dtype, normal(*x), **options)
    assert len(kernels.launches) > 2
