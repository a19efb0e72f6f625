"""The table of implementations: every folder has the same operations, with the same results."""

import inspect
from dataclasses import replace

import numpy as np
import pytest

from arraylogchain import _compiled, _dispatch
from arraylogchain._arrays import enter
from arraylogchain._inputs.chain import enter_chain
from tests.error_model import assert_within, chain_bound, product_bound
from tests.reference import logmatmulexp

TABLE = _dispatch.PRODUCTS | _dispatch.CHAINS
LATER = [
    (operation, backend)
    for operation, backends in TABLE.items()
    for backend in backends
    if backend != "array"
]


@pytest.mark.parametrize("operation", list(TABLE))
def test_arrays_compute_everything(operation):
    assert "array" in TABLE[operation]
    assert _dispatch.implementation(operation, "array").__name__ == operation


@pytest.mark.parametrize(("operation", "backend"), LATER)
def test_one_signature(operation, backend):
    if backend == "compiled" and _compiled.why_not() is not None:
        pytest.skip(_compiled.why_not())
    found = _dispatch.implementation(operation, backend)
    assert found.__name__ == operation
    first = _dispatch.implementation(operation, "array")
    assert list(inspect.signature(found).parameters) == list(inspect.signature(first).parameters)


@pytest.mark.parametrize("sd", [1, 30, 1000])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("operation", [op for op, b in _dispatch.CHAINS.items() if "compiled" in b])
def test_compiled_chains(operation, sd, ragged, final):
    """Loops against array operations: within the roundings of both, and the same paths."""
    if _compiled.why_not() is not None:
        pytest.skip(_compiled.why_not())
    rng, T, K = np.random.default_rng(sd), 7, 4
    lengths = np.array([7, 2, 5]) if ragged else None
    given = {
        "log_potentials": rng.normal(0, sd, (3, T, K)),
        "transitions": rng.random((T - 1, K, K)) * (rng.random((T - 1, K, K)) < 0.8),
        "initial": rng.random(K),
    }
    ctx, chain = enter_chain(given, lengths)
    chain = replace(chain, final=rng.random((3, K)) if final else None)
    results = []
    for backend in ("compiled", "array"):
        compute = _dispatch.implementation(operation, backend)
        with ctx.computing():
            results.append(np.asarray(_result(operation, compute, ctx, chain)))
    found, expected = results
    if expected.dtype == np.int64:
        np.testing.assert_array_equal(found, expected)
    else:
        gap = np.sum(np.ptp(given["log_potentials"]))
        assert_within(found, expected, 2 * chain_bound(expected, T * gap, T, K, "float64"))


def _result(operation, compute, ctx, chain):
    rng = np.random.default_rng(0)
    if operation == "value_and_pullback":
        _, pullback = compute(ctx, chain, 1 << 20, True)
        names = ["potentials", "initial", *([] if chain.final is None else ["final"])]
        found = pullback(np.array([1.0, -2.0, 0.0]), frozenset(names))
        return np.concatenate([found[name].ravel() for name in names])
    if operation in ("posterior", "filtered", "viterbi"):
        return np.concatenate([x.ravel() for x in compute(ctx, chain, 1 << 20)])
    if operation == "log_weight":
        states = rng.integers(0, chain.num_states, (5, *chain.batch, chain.num_steps))
        return compute(ctx, chain, 1 << 20, states)
    if operation == "sample":
        out = np.empty((20, *chain.batch, chain.num_steps), np.int64)
        uniforms = out.view(np.float64)
        rng.random(out=uniforms)
        compute(ctx, chain, 1 << 20, out, uniforms)
        return out
    return compute(ctx, chain, 1 << 20)


@pytest.mark.parametrize("sd", [1, 100, 3000])
@pytest.mark.parametrize("backend", _dispatch.PRODUCTS["logsumexp_where"])
def test_entries_one_by_one(backend, sd):
    if backend == "compiled" and _compiled.why_not() is not None:
        pytest.skip(_compiled.why_not())
    rng = np.random.default_rng(sd)
    a, b = rng.normal(0, sd, (2, 20, 33)), rng.normal(0, sd, (2, 33, 10))
    a[0, 3], b[1, :, 4], a[rng.random(a.shape) < 0.2] = -np.inf, -np.inf, -np.inf
    ctx, _ = enter({"a": a})
    wanted = rng.random((2, 20, 10)) < 0.7
    exact = logmatmulexp(a, b)
    compute = _dispatch.implementation("logsumexp_where", backend)
    with ctx.computing():
        out = compute(ctx, np.full(wanted.shape, 7.0), a, b, wanted, ctx.precision, 1 << 16, 33)
    assert_within(np.where(wanted, out, exact), exact, product_bound(a, b, exact, "float64"))
    assert np.all(out[~wanted] == 7)
