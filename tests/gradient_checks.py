"""Checks of gradients and posteriors that many tests share."""

from __future__ import annotations

from typing import Any

import numpy as np

import arraylogchain as alc
from tests import error_model, gradient_reference, reference
from tests.checks import Given, make_chain
from tests.conftest import Backend
from tests.error_model import assert_within
from tests.gradient_reference import Gradient

# Cotangents as they come: from a plain sum, from less of one, a loss of any sign, one that ignores
# much, and one whose parts differ by more than a dtype resolves.
COTANGENTS = ("ones", "minus ones", "normal", "sparse", "mixed")


def cotangent(kind: str, shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    normal = rng.normal(size=shape)
    if kind in ("ones", "minus ones"):
        return np.ones(shape) if kind == "ones" else -np.ones(shape)
    if kind == "sparse":
        return normal * (rng.random(shape) < 0.3)
    if kind == "mixed":
        exponent = 3 if dtype == "float16" else 30
        return normal * 10.0 ** rng.choice([-exponent, 0, exponent], shape)
    return normal


def product_shape(a: Any, b: Any) -> tuple[int, ...]:
    return (np.zeros(np.shape(a)) @ np.zeros(np.shape(b))).shape


def check_vjp_logmatmulexp(
    backend: Backend,
    dtype: str,
    a: Any,
    b: Any,
    g: Any = "normal",
    *,
    workspace: int | None = None,
) -> list[np.ndarray]:
    """Compare value and gradients of logmatmulexp with the reference; return the gradients."""
    given = Given(backend, dtype, a, b, _cotangent_of(g, a, b, dtype))
    value, pullback = alc.vjp.logmatmulexp(*given.arrays[:2], workspace=workspace)
    gradients = [backend.read(d, dtype) for d in pullback(given.arrays[2])]
    a, b, g = given.held
    exact = reference.logmatmulexp(a, b)
    bound = error_model.product_bound(a, b, exact, dtype)
    assert_within(backend.read(value, dtype), exact, bound)
    for found, expected in zip(gradients, gradient_reference.logmatmulexp(a, b, g), strict=True):
        bound = error_model.product_gradient_bound(expected, a.shape[-1], dtype)
        assert_gradient(found, expected, bound)
    given.assert_unchanged()
    return gradients


def check_vjp_matmul(
    backend: Backend,
    dtype: str,
    a: Any,
    b: Any,
    g: Any = "normal",
    *,
    workspace: int | None = None,
) -> list[np.ndarray]:
    given = Given(backend, dtype, a, b, _cotangent_of(g, a, b, dtype))
    value, pullback = alc.vjp.matmul(*given.arrays[:2], workspace=workspace)
    gradients = [backend.read(d, dtype) for d in pullback(given.arrays[2])]
    a, b, g = given.held
    exact = reference.matmul(a, b)
    bound = error_model.linear_bound(a, b, exact, dtype)
    assert_within(backend.read(value, dtype), exact, bound)
    for found, expected in zip(gradients, gradient_reference.matmul(a, b, g), strict=True):
        assert_gradient(found, expected, error_model.summation_bound(expected, dtype))
    given.assert_unchanged()
    return gradients


def check_vjp_maxplus(
    backend: Backend,
    dtype: str,
    a: Any,
    b: Any,
    g: Any = "normal",
    *,
    workspace: int | None = None,
) -> list[np.ndarray]:
    """Compare maxplus_matmul: its value is that of the plain function, index by index."""
    given = Given(backend, dtype, a, b, _cotangent_of(g, a, b, dtype))
    product, pullback = alc.vjp.maxplus_matmul(*given.arrays[:2], workspace=workspace)
    assert isinstance(product, alc.MaxPlusProduct)
    gradients = [backend.read(d, dtype) for d in pullback(given.arrays[2])]
    plain = alc.maxplus_matmul(*given.arrays[:2], workspace=workspace)
    for found, expected in zip(product, plain, strict=True):
        np.testing.assert_array_equal(backend.to_numpy(found), backend.to_numpy(expected))
    a, b, g = given.held
    indices = backend.to_numpy(product.indices)
    exact = gradient_reference.maxplus(a, b, indices, g)
    for found, expected in zip(gradients, exact, strict=True):
        assert_gradient(found, expected, error_model.summation_bound(expected, dtype))
    given.assert_unchanged()
    return gradients


CHECKS = {
    "logmatmulexp": check_vjp_logmatmulexp,
    "matmul": check_vjp_matmul,
    "maxplus_matmul": check_vjp_maxplus,
}


def check_vjp_logchainexp(
    backend: Backend, dtype: str, matrices: Any, g: Any = "normal", *, workspace: int | None = None
) -> Any:
    """Compare the product of a stack (an array) or of a sequence (a list), and its gradients."""
    stacked = not isinstance(matrices, list)
    parts = list(np.moveaxis(np.asarray(matrices), -3, 0)) if stacked else matrices
    exact_shape = reference.logchainexp([np.asarray(m) for m in parts]).shape
    g = cotangent(g, exact_shape, dtype) if isinstance(g, str) else g
    given = Given(backend, dtype, *([matrices] if stacked else matrices), g)
    ours = given.arrays[0] if stacked else given.arrays[:-1]
    value, pullback = alc.vjp.logchainexp(ours, workspace=workspace)
    (gradient,) = pullback(given.arrays[-1])
    if stacked:
        gradient = backend.read(gradient, dtype)
        assert gradient.shape == given.held[0].shape
        held, found = (list(np.moveaxis(x, -3, 0)) for x in (given.held[0], gradient))
    else:
        assert isinstance(gradient, list)
        held, found = given.held[:-1], [backend.read(d, dtype) for d in gradient]
    exact = reference.logchainexp(held)
    bound = error_model.product_chain_bound(held, exact, dtype)
    assert_within(backend.read(value, dtype), exact, bound)
    gradients = gradient_reference.logchainexp(held, given.held[-1])
    for ours, expected in zip(found, gradients, strict=True):
        bound = error_model.product_chain_gradient_bound(held, expected, dtype)
        assert_gradient(ours, expected, bound)
    given.assert_unchanged()
    return gradient


def check_posterior(
    backend: Backend,
    dtype: str,
    x: Any,
    *,
    transitions: Any = None,
    log_transitions: Any = None,
    initial: Any = None,
    log_initial: Any = None,
    workspace: int | None = None,
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Compare marginals, expected transitions and backward messages of a chain; return them."""
    given = Given(backend, dtype, x, transitions, log_transitions, initial, log_initial)
    chain = make_chain(given.arrays, workspace)
    exact = _exact_posterior(given.held, dtype)
    T, K = np.shape(x)[-2:]

    marginals = backend.read(chain.marginals(), dtype)
    bound = error_model.posterior_bound(exact.marginals, T, K, dtype)
    assert_gradient(marginals, exact.marginals, bound)
    assert not np.any(marginals < 0)
    counts = None
    if exact.counts is not None:
        counts = backend.read(chain.expected_transitions(), dtype)
        bound = error_model.posterior_bound(exact.counts, T, K, dtype)
        assert_gradient(counts, exact.counts, bound)
        assert not np.any(counts < 0)
    backward = backend.read(chain.backward_messages(), dtype)
    steps = np.arange(T, 0, -1)[:, None]
    bound = error_model.chain_bound(exact.backward, exact.backward_gaps, steps, K, dtype)
    assert_within(backward, exact.backward, bound)
    given.assert_unchanged()
    return marginals, counts, backward


def check_vjp_chain(
    backend: Backend,
    dtype: str,
    x: Any,
    g: Any = "normal",
    *,
    transitions: Any = None,
    log_transitions: Any = None,
    initial: Any = None,
    log_initial: Any = None,
    workspace: int | None = None,
) -> tuple[np.ndarray | None, ...]:
    """Compare the gradients of log_partition with the reference; return them."""
    arrays = (x, transitions, log_transitions, initial, log_initial)
    axes = (2, 3, 3, 1, 1)
    batch = np.broadcast_shapes(
        *(np.shape(y)[:-n] for y, n in zip(arrays, axes, strict=True) if y is not None)
    )
    g = cotangent(g, batch, dtype) if isinstance(g, str) else g
    given = Given(backend, dtype, *arrays, g)
    chain = make_chain(given.arrays[:-1], workspace)
    value, pullback = alc.vjp.log_partition(chain)
    found = pullback(given.arrays[-1])
    assert found._fields == ("log_potentials", "transitions", "initial", "final")
    assert found.final is None

    exact = _exact_posterior(given.held[:-1], dtype, given.held[-1])
    T, K = np.shape(x)[-2:]
    forward = _forward(given.held[:-1], dtype)
    bound = error_model.chain_bound(forward.log_partition, forward.partition_gap, T, K, dtype)
    assert_within(backend.read(value, dtype), forward.log_partition, bound)
    gradients = []
    for ours, name in zip(found[:3], found._fields[:3], strict=True):
        expected = getattr(exact, name)
        if expected is None:
            assert ours is None
            gradients.append(None)
            continue
        bound = error_model.posterior_bound(expected, T, K, dtype)
        gradients.append(backend.read(ours, dtype))
        is_linear = {"transitions": transitions, "initial": initial}.get(name) is not None
        largest = error_model.LARGEST_DERIVATIVE[error_model.compute_dtype(dtype)]
        size = float(np.max(np.abs(given.held[-1]), initial=0))
        limit = largest * size if is_linear else np.inf
        assert_gradient(gradients[-1], expected, bound, limit)
    given.assert_unchanged()
    return tuple(gradients)


def assert_gradient(
    found: np.ndarray, expected: Gradient, bound: np.ndarray, limit: float = np.inf
) -> None:
    """Fail unless gradients lie within `bound`, and are exactly 0 where nothing adds to them.

    Sums of parts beyond `limit`, or near the largest number, may overflow, but never to NaN.
    """
    assert found.shape == expected.exact.shape, f"{found.shape}, expected {expected.exact.shape}"
    too_large = expected.mass > min(limit, float(np.finfo(found.dtype).max) / 2**10)
    assert not np.any(np.isnan(found[too_large]))
    ours, exact = (np.where(too_large, 0, v).astype(v.dtype) for v in (found, expected.exact))
    assert_within(ours, exact, np.where(too_large, 0, bound))
    nothing = expected.mass == 0
    assert np.all(found[nothing] == 0), "a gradient is not exactly 0 where there is none"


def _cotangent_of(g: Any, a: Any, b: Any, dtype: str) -> Any:
    return cotangent(g, product_shape(a, b), dtype) if isinstance(g, str) else g


def _logs(linear: np.ndarray | None, logs: np.ndarray | None) -> np.ndarray | None:
    with np.errstate(divide="ignore"):
        return logs if linear is None else np.log(reference.wide(linear))


def _options(held: list, dtype: str) -> tuple[list, dict]:
    x, linear, logs, p0, log_p0 = held
    return [x, _logs(linear, logs), _logs(p0, log_p0)], {
        "edges_in_logs": logs is not None,
        "initial_in_logs": log_p0 is not None,
        "log_form_beyond": error_model.certificate(dtype),
    }


def _forward(held: list, dtype: str) -> reference.Chain:
    arguments, options = _options(held, dtype)
    return reference.chain(*arguments, **options)


def _exact_posterior(held: list, dtype: str, g: Any = 1.0) -> gradient_reference.Posterior:
    arguments, options = _options(held, dtype)
    return gradient_reference.chain(*arguments, g, **options)
