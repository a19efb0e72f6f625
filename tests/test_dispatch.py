"""The table of implementations: every folder has the same operations, with the same results."""

import inspect
from dataclasses import replace

import numpy as np
import pytest

from arraylogchain import _compiled, _dispatch
from arraylogchain._arrays import enter
from arraylogchain._inputs.chain import enter_chain
from tests.error_model import EPS, assert_within, chain_bound, product_bound
from tests.reference import logmatmulexp

TABLE = _dispatch.PRODUCTS | _dispatch.CHAINS | _dispatch.PASSES | _dispatch.LAST
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
    check_compiled(operation, sd, ragged, final)


@pytest.mark.parametrize("sd", [1, 1000])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("operation", ["last_message", "last_message back", "best_message"])
def test_compiled_last_messages(operation, sd, ragged):
    check_compiled(operation, sd, ragged, final=True)


def check_compiled(operation, sd, ragged, final):
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
        compute = _dispatch.implementation(operation.split()[0], backend)
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
        g = np.resize([1.0, -2.0, 0.0], chain.batch).astype(chain.potentials.dtype)
        found = pullback(g, frozenset(names))
        return np.concatenate([found[name].ravel() for name in names])
    if operation in ("posterior", "filtered", "viterbi"):
        return np.concatenate([x.ravel() for x in compute(ctx, chain, 1 << 20)])
    if operation == "best_message":
        logs = compute(ctx, chain, 1 << 20)
        return logs - logs.max(-1, keepdims=True)
    if operation.startswith("last_message"):
        logs, shift = compute(ctx, chain, 1 << 20, operation.endswith("back"))
        return logs + shift[..., None]
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


LAYOUTS = {
    "plain": np.array,
    "read-only": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
    "fortran": np.asfortranarray,
    "shared": lambda x: x[:1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["zeros", "shifted", "wide", "very wide", "poisoned"])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(
    "operation", ["log_partition", "backward_messages", "posterior", "value_and_pullback"]
)
def test_compiled_passes(operation, kind, ragged, layout, monkeypatch):
    """Array operations with loops between matrix multiplies, and without: the same results."""
    if _compiled.why_not() is not None:
        pytest.skip(_compiled.why_not())
    rng, (n, T, K) = np.random.default_rng(0), (6, 7, 37)
    x = rng.normal(0, {"wide": 25, "very wide": 1000}.get(kind, 1), (n, T, K)).astype("float32")
    if kind == "zeros":
        x[0, 2, :5], x[3, 5] = -np.inf, -np.inf
    if kind == "shifted":
        x += rng.normal(0, 300, (n, T, 1)).astype("float32")
    if kind == "poisoned":
        x[1, 3, 7], x[2, 4, 9] = np.inf, np.nan
    given = {
        "log_potentials": LAYOUTS[layout](x),
        "transitions": rng.random((T - 1, K, K)).astype("float32"),
        "initial": rng.random((n, K)).astype("float32"),
    }
    lengths = np.array([7, 2, 5, 7, 1, 6]) if ragged else None
    ctx, chain = enter_chain(given, lengths)
    chain = replace(chain, final=rng.random((n, K)).astype("float32"))
    results = []
    for has_loops in (True, False):
        monkeypatch.setattr(_dispatch, "COMPILED", has_loops)
        passes = _dispatch.for_passes("Weigher", ctx, ctx.precision)
        assert passes.__module__.startswith("arraylogchain._compiled") is has_loops
        with ctx.computing():
            compute = _dispatch.implementation(operation, "array")
            results.append(_result(operation, compute, ctx, chain))
    found, expected = results
    gap = np.sum(np.ptp(np.where(np.isfinite(x), x, 0), axis=(0, 2)))
    assert_within(found, expected, 2 * chain_bound(expected, gap, T, K, "float32"))


@pytest.mark.parametrize("top", [0, 15, 3000])
def test_exponentials_in_float32(top):
    """To a few roundings down to the smallest normal number, and 0 below it."""
    passes = pytest.importorskip("arraylogchain._compiled.passes")
    x = np.linspace(top - 120, top, 100_003, dtype="float32")
    out, shift = np.empty((1, x.size), "float32"), np.empty(1)
    bounds = passes._weigh(np.ones_like(out), x.reshape(1, 1, -1), np.zeros(1, int), 0, out, shift)
    exact = np.exp((x - shift.astype("float32")).astype(float))
    normal = exact > 1.0001 * np.finfo("float32").tiny
    np.testing.assert_allclose(out[0, normal], exact[normal], rtol=3 * EPS["float32"])
    assert np.all(out[0, exact < np.finfo("float32").tiny] == 0)
    assert bounds == (out.min(), out.max())
