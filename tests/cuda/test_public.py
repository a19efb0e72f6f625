"""The public functions on the kernels' path: NumPy arrays as if they were on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain._core.context import Context
from tests.chain_checks import check_chain
from tests.chain_scenarios import ONLY_FLOAT64, SCENARIOS, make, normal, uniform
from tests.checks import check_logmatmulexp, check_maxplus
from tests.gradient_checks import check_vjp_logmatmulexp


def ran(kernels: Any, name: str) -> bool:
    return any(launch.kernel.name.startswith(name) for launch in kernels.launches)


@pytest.mark.parametrize("sd", [1, 30, 300])
@pytest.mark.parametrize(
    ("a", "b"), [((40, 50), (50, 45)), ((2, 9, 1, 7), (9, 7, 8)), ((5,), (5, 3)), ((0, 3), (3, 2))]
)
def test_products(kernels, np_backend, dtype, a, b, sd):
    left, right = normal(*a, sd=sd), normal(*b, sd=sd, seed=1)
    check_logmatmulexp(np_backend, dtype, left, right)
    check_maxplus(np_backend, dtype, left, right)
    assert ran(kernels, "logmatmulexp") == ran(kernels, "maxplus") == (0 not in a)
    check_vjp_logmatmulexp(np_backend, dtype, left, right)


def test_more_axes_than_one_can_count(kernels, np_backend):
    """Axes that cannot be merged in place are copied."""
    axes = (2,) * 9
    check_logmatmulexp(np_backend, "float32", normal(*axes, 3, 4), normal(*axes, 4, 2, seed=1))
    mixed = normal(*(2, 1) * 4, 3, 4), normal(*(1, 3) * 4, 4, 2, seed=1)
    check_logmatmulexp(np_backend, "float32", *mixed)
    assert ran(kernels, "logmatmulexp")
    kernels.launches.clear()
    large = normal(*(2, 1) * 4, 30, 400), normal(*(1, 3) * 4, 400, 20, seed=1)
    alc.logmatmulexp(*large, workspace=1 << 20)
    stack = normal(9000, 16, 2)  # the maxima alone exceed the workspace
    alc.logmatmulexp(stack, stack.swapaxes(1, 2), workspace=1 << 20)
    assert not kernels.launches


@pytest.mark.parametrize("name", [n for n in SCENARIOS if not n.startswith("shards")])
def test_scenario(kernels, np_backend, dtype, name):
    if dtype == "float32" and name.startswith(ONLY_FLOAT64):
        pytest.skip("float32 does not hold its numbers")
    check_chain(np_backend, dtype, **make(name))


def test_ragged_rows_take_a_block_in_one_launch(kernels):
    """Results have the same bits each time, so that nothing depends on values past the lengths."""
    chain = alc.LogChain(normal(3, 6, 4), transitions=uniform(5, 4, 4), lengths=[6, 2, 4])
    chain.posterior()
    assert len([x for x in kernels.launches if x.kernel.source == "chain_steps.cu"]) == 2


def test_plan_and_kernels_of_a_chain(kernels):
    chain = alc.LogChain(normal(3, 6, 40), transitions=uniform(5, 40, 40))
    assert chain.plan().route == "kernels"
    chain.viterbi()
    assert ran(kernels, "chain_steps<double, false")
    assert ran(kernels, "chain_trace")
    wide = alc.LogChain(np.zeros((1, 2, 1025)), transitions=np.ones((1, 1025, 1025)))
    assert wide.plan().route == "arrays"


def test_a_first_call_loads_few_modules(kernels):
    """One for a product, and one for a chain, in both directions."""
    alc.logmatmulexp(normal(50, 40), normal(40, 30))
    assert len({launch.kernel for launch in kernels.launches}) == 1
    kernels.launches.clear()
    chain = alc.LogChain(normal(5, 6, 40), transitions=uniform(1, 40, 40))
    chain.log_partition()
    assert len({launch.kernel for launch in kernels.launches}) == 1
    chain.posterior()
    assert {k.kernel.name.partition("<")[0] for k in kernels.launches} <= {
        "chain_steps",
        "logmatmulexp",
        "settle",
    }


def test_tensors(kernels, torch_backend, monkeypatch):
    """Autograd's forward takes the same path, with operands of two dtypes as well."""
    monkeypatch.setattr(Context, "is_numpy", True)
    torch = torch_backend.xp
    b = torch.from_numpy(normal(4, 5, seed=1))
    for dtype in (torch.float32, torch.float64):
        a = torch.from_numpy(normal(3, 4)).to(dtype).requires_grad_()
        kernels.launches.clear()
        out = alc.logmatmulexp(a, b)
        assert ran(kernels, "logmatmulexp<double>")
        torch.testing.assert_close(out, torch.logsumexp(a[:, :, None] + b, 1), rtol=1e-14, atol=0)
        (gradient,) = torch.autograd.grad(out.sum(), a)
        expected = torch.softmax(a[:, :, None] + b, 1).sum(2)
        torch.testing.assert_close(gradient, expected.detach().to(dtype))


def test_chains_do_not_wait(kernels, monkeypatch):
    """Array operations ask whether weights may stay linear; kernels need not know."""
    arguments = {"transitions": uniform(5, 5, 5), "initial": uniform(5), "final": uniform(5)}
    chain = alc.LogChain(normal(3, 6, 5), **arguments, lengths=[6, 2, 4])
    monkeypatch.setattr(Context, "are_between", None)
    for method in ("log_partition", "viterbi", "forward_messages", "backward_messages"):
        getattr(chain, method)()
    assert ran(kernels, "chain_steps<double, true")
