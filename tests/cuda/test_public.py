"""The public functions on the kernels' path: NumPy arrays as if they were on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain._core.context import Context
from tests import drifting_chains
from tests.chain_checks import check_chain
from tests.chain_scenarios import ONLY_FLOAT64, SCENARIOS, make, normal, uniform
from tests.checks import check_logmatmulexp, check_maxplus
from tests.gradient_checks import COTANGENTS, check_vjp_logmatmulexp
from tests.test_product_table import PAIRS


def ran(kernels: Any, name: str) -> bool:
    return any(launch.kernel.name.startswith(name) for launch in kernels.launches)


@pytest.mark.parametrize("name", [n for n, pair in PAIRS.items() if all(x.size for x in pair)])
def test_gradients(kernels, np_backend, dtype, name):
    check_vjp_logmatmulexp(np_backend, dtype, *PAIRS[name])
    assert ran(kernels, "finish_gradients")


@pytest.mark.parametrize("kind", COTANGENTS)
@pytest.mark.parametrize(
    "name", ["sd = 1000", "rows 29 apart, sd = 1", "zeros in a corner of a, sd = 1000"]
)
def test_cotangents(kernels, np_backend, dtype, name, kind):
    check_vjp_logmatmulexp(np_backend, dtype, *PAIRS[name], kind)


def test_gradients_of_panels_where_the_workspace_is_small(kernels, np_backend, dtype):
    a, b = normal(1400, 90, sd=30), normal(90, 110, sd=30, seed=1)
    check_vjp_logmatmulexp(np_backend, dtype, a, b, workspace=1 << 20)
    grids = [x.grid for x in kernels.launches if x.kernel.name.startswith("finish_gradients")]
    assert len(grids) > 2


def test_more_axes_than_one_can_count(kernels, np_backend):
    """Axes that cannot be merged in place are copied."""
    axes = (2,) * 9
    check_logmatmulexp(np_backend, "float32", normal(*axes, 3, 4), normal(*axes, 4, 2, seed=1))
    mixed = normal(*(2, 1) * 4, 3, 4), normal(*(1, 3) * 4, 4, 2, seed=1)
    check_logmatmulexp(np_backend, "float32", *mixed)
    check_maxplus(np_backend, "float32", *mixed)
    assert ran(kernels, "logmatmulexp")
    assert ran(kernels, "maxplus")
    kernels.launches.clear()
    for check in (check_logmatmulexp, check_maxplus):
        check(np_backend, "float32", normal(0, 3), normal(3, 2))
    large = normal(*(2, 1) * 4, 30, 400), normal(*(1, 3) * 4, 400, 20, seed=1)
    alc.logmatmulexp(*large, workspace=1 << 20)
    stack = normal(9000, 16, 2)  # the maxima alone exceed the workspace
    alc.logmatmulexp(stack, stack.swapaxes(1, 2), workspace=1 << 20)
    assert not kernels.launches


@pytest.mark.parametrize("name", [n for n in SCENARIOS if not n.startswith("shards")])
def test_scenario(kernels, np_backend, dtype, name):
    if dtype == "float32" and name.startswith(ONLY_FLOAT64):
        pytest.skip("float32 does not hold its numbers")
    kernels.flush_to_zero = dtype == "float32"
    check_chain(np_backend, dtype, **make(name))


def hard_chains() -> Any:
    """Yield names, and chains that take every path through the kernels of marginals."""
    logs, ends = normal(2, 1, 4, 7, 7, sd=90), {"log_final": normal(2, 3, 7, sd=30)}
    yield "300 states", {"x": normal(2, 3, 300), "transitions": uniform(2, 300, 300)}
    lengths = [[9, 2, 5], [1, 9, 3]]
    own = {"x": normal(2, 3, 9, 40), "transitions": uniform(2, 1, 8, 40, 40), "lengths": lengths}
    yield "matrices of groups in parts, ragged", {**own, "workspace": 1 << 20}
    x = normal(2, 3, 5, 7, sd=200)
    yield "uncertified, own logs", {"x": x, "log_transitions": logs, **ends}
    yield "uncertified, one matrix", {"x": x, "transitions": uniform(7, 7) ** 40}
    yield "groups along two axes", {"x": x, "log_transitions": normal(2, 1, 1, 7, 7), **ends}
    yield "segments", {"x": normal(300, 40, 9), "transitions": uniform(9, 9), "workspace": 1 << 20}


HARD_CHAINS = dict(hard_chains())


@pytest.mark.parametrize("name", HARD_CHAINS)
def test_chains(kernels, np_backend, dtype, name):
    check_chain(np_backend, dtype, **HARD_CHAINS[name])
    assert ran(kernels, "pair_marginals")


@pytest.mark.parametrize("kind", ["short", "long", "crossing"])
def test_drifting_chains(kernels, np_backend, dtype, kind):
    rng, largest = np.random.default_rng(5), 30.0 if dtype == "float32" else 300.0
    kernels.flush_to_zero = dtype == "float32"
    for kernels.seed in range(4):
        check_chain(np_backend, dtype, **getattr(drifting_chains, kind)(rng, largest))


@pytest.mark.parametrize("size", [3, 40])
@pytest.mark.parametrize("kind", ["shared", "own", "one"])
@pytest.mark.parametrize("workspace", [None, 1 << 20])
def test_samples_are_those_of_array_operations(kernels, use, size, kind, workspace):
    batch = (40, 3) if workspace else (5, 3)
    shape = {"shared": (29,), "own": (3, 29), "one": ()}[kind]
    arguments = {"transitions": uniform(*shape, size, size), "initial": uniform(size)}
    lengths = np.arange(np.prod(batch)).reshape(batch) % 30 + 1
    chain = alc.LogChain(
        normal(*batch, 30, size), **arguments, lengths=lengths, workspace=workspace
    )
    samples = chain.sample(4, rng=1)
    assert ran(kernels, "sample_paths")
    use(None)
    np.testing.assert_array_equal(samples, chain.sample(4, rng=1))


def test_messages_that_a_pullback_keeps_are_recorded_for_its_stream(kernels, monkeypatch):
    """torch must not reuse their memory before that stream has read them."""
    recorded = []
    monkeypatch.setattr(Context, "record_stream", lambda _, *arrays: recorded.extend(arrays))
    chain = alc.LogChain(normal(3, 6, 5), transitions=uniform(5, 5))
    value, pullback = alc.vjp.log_partition(chain)
    recorded.clear()
    pullback(value)
    shapes = [x.shape for x in recorded]
    assert shapes.count((6, 1, 3, 5)) == 1
    assert shapes.count((6, 1, 3)) == 2
    assert shapes.count((1, 3, 5)) == 1


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


@pytest.mark.parametrize("is_checked", [False, True])
def test_a_first_call_loads_few_modules(kernels, monkeypatch, tmp_path, is_checked):
    """One for a product, and three for a chain, in both directions; checks need no others."""
    monkeypatch.setenv("ARRAYLOGCHAIN_SELF_CHECK", str(int(is_checked)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def modules() -> int:
        return len({launch.kernel.module for launch in kernels.launches})

    alc.logmatmulexp(normal(50, 40), normal(40, 30))
    assert modules() == 1
    kernels.launches.clear()
    chain = alc.LogChain(normal(5, 6, 40), transitions=uniform(1, 40, 40))
    chain.log_partition()
    assert modules() == 3
    chain.posterior()
    assert modules() == 5


def test_tensors(kernels, torch_backend, monkeypatch):
    """Autograd's forward takes the same path, with operands of two dtypes as well."""
    monkeypatch.setattr(Context, "is_numpy", True)
    torch = torch_backend.xp
    b = torch.from_numpy(normal(4, 5, seed=1))
    for dtype in (torch.float32, torch.float64):
        a = torch.from_numpy(normal(3, 4)).to(dtype).requires_grad_()
        kernels.launches.clear()
        with kernels:  # which contexts of NumPy do not enter
            out = alc.logmatmulexp(a, b)
        assert ran(kernels, "logmatmulexp<double>")
        torch.testing.assert_close(out, torch.logsumexp(a[:, :, None] + b, 1), rtol=1e-14, atol=0)
        with kernels:
            (gradient,) = torch.autograd.grad(out.sum(), a)
        expected = torch.softmax(a[:, :, None] + b, 1).sum(2)
        torch.testing.assert_close(gradient, expected.detach().to(dtype))


def test_chains_do_not_wait(kernels, monkeypatch):
    """Array operations ask whether weights may stay linear; kernels need not know."""
    arguments = {"transitions": uniform(5, 5, 5), "initial": uniform(5), "final": uniform(5)}
    chain = alc.LogChain(normal(3, 6, 5), **arguments, lengths=[6, 2, 4])
    monkeypatch.setattr(Context, "are_between", None)
    methods = "log_partition", "viterbi", "forward_messages", "backward_messages", "posterior"
    for method in (*methods, "filtered", "entropy", "sample"):
        getattr(chain, method)()
    value, pullback = alc.vjp.log_partition(chain)
    pullback(value)
    assert ran(kernels, "chain_steps<double, true")
