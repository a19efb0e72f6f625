"""The table of implementations: of products, every folder has the same operations."""

import inspect

import numpy as np
import pytest

from arraylogchain import _compiled, _dispatch
from arraylogchain._arrays import enter
from tests.error_model import assert_within, product_bound
from tests.reference import logmatmulexp

LATER = [
    (operation, backend)
    for operation, backends in _dispatch.PRODUCTS.items()
    for backend in backends
    if backend != "array"
]


@pytest.mark.parametrize("operation", list(_dispatch.PRODUCTS))
def test_arrays_compute_every_product(operation):
    assert "array" in _dispatch.PRODUCTS[operation]
    assert _dispatch.implementation(operation, "array").__name__ == operation


@pytest.mark.parametrize(("operation", "backend"), LATER)
def test_one_signature(operation, backend):
    if backend == "compiled" and _compiled.why_not() is not None:
        pytest.skip(_compiled.why_not())
    found = _dispatch.implementation(operation, backend)
    assert found.__name__ == operation
    assert inspect.signature(found) == inspect.signature(
        _dispatch.implementation(operation, "array")
    )


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
