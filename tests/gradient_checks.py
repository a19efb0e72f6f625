"""Checks of gradients and posteriors that many tests share."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import arraylogchain as alc
from tests import error_model, gradient_reference, reference
from tests.checks import Inputs
from tests.conftest import Backend
from tests.error_model import assert_gradient, assert_within

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


def check_vjp(
    name: str,
    backend: Backend,
    dtype: str,
    a: Any,
    b: Any,
    g: Any = "normal",
    *,
    workspace: int | None = None,
) -> list[np.ndarray]:
    """Compare gradients of a product with the reference, and return them.

    The value is to the bit that of the plain function, and a pullback's second call as its first,
    but on CUDA devices.
    """
    inputs = Inputs(backend, dtype, a, b, _cotangent_of(g, a, b, dtype))
    value, pullback = getattr(alc.vjp, name)(*inputs.arrays[:2], workspace=workspace)
    plain = getattr(alc, name)(*inputs.arrays[:2], workspace=workspace)
    gradients = [backend.read(d, dtype) for d in pullback(inputs.arrays[2])]
    again = [backend.to_numpy(d) for d in pullback(inputs.arrays[2])]
    pairs = zip(value, plain, strict=True) if isinstance(value, tuple) else [(value, plain)]
    pairs = [tuple(map(backend.to_numpy, pair)) for pair in pairs]
    twice = zip(gradients, again, strict=True) if backend.adds_in_order else ()
    for result, exact in (*pairs, *twice):
        np.testing.assert_array_equal(result, exact)
    a, b, g = inputs.held
    if name == "maxplus_matmul":
        assert isinstance(value, alc.MaxPlusProduct)
        expected = gradient_reference.maxplus(a, b, backend.to_numpy(value.indices), g)
    else:
        expected = getattr(gradient_reference, name)(a, b, g)
    for operand, result, exact in zip("ab", gradients, expected, strict=True):
        if name == "logmatmulexp":
            bound = error_model.product_gradient_bound(exact, a.shape[-1], dtype)
        else:
            bound = error_model.summation_bound(exact, dtype)
        label = error_model.label(f"vjp.{name}, gradient of {operand}", backend.name, dtype)
        assert_gradient(result, exact, bound, label=label)
    inputs.assert_unchanged()
    return gradients


CHECKS = {n: partial(check_vjp, n) for n in ("logmatmulexp", "matmul", "maxplus_matmul")}
check_vjp_logmatmulexp = CHECKS["logmatmulexp"]


def check_vjp_logchainexp(backend: Backend, dtype: str, matrices: Any) -> Any:
    """Compare the product of a stack (an array) or of a sequence (a list), and its gradients."""
    stacked = not isinstance(matrices, list)
    parts = list(np.moveaxis(np.asarray(matrices), -3, 0)) if stacked else matrices
    exact_shape = reference.logchainexp([np.asarray(m) for m in parts]).shape
    g = cotangent("normal", exact_shape, dtype)
    inputs = Inputs(backend, dtype, *([matrices] if stacked else matrices), g)
    ours = inputs.arrays[0] if stacked else inputs.arrays[:-1]
    value, pullback = alc.vjp.logchainexp(ours)
    (gradient,) = pullback(inputs.arrays[-1])
    if stacked:
        gradient = backend.read(gradient, dtype)
        assert gradient.shape == inputs.held[0].shape
        held, result = (list(np.moveaxis(x, -3, 0)) for x in (inputs.held[0], gradient))
    else:
        assert isinstance(gradient, list)
        held, result = inputs.held[:-1], [backend.read(d, dtype) for d in gradient]
    exact = reference.logchainexp(held)
    bound = error_model.contraction_bound(held, exact, dtype)
    label = error_model.label("vjp.logchainexp", backend.name, dtype)
    assert_within(backend.read(value, dtype), exact, bound, label)
    gradients = gradient_reference.logchainexp(held, inputs.held[-1])
    for i, (ours, expected) in enumerate(zip(result, gradients, strict=True)):
        bound = error_model.contraction_gradient_bound(held, expected, dtype)
        name = f"vjp.logchainexp, gradient of matrix {i}"
        label = error_model.label(name, backend.name, dtype)
        assert_gradient(ours, expected, bound, label=label)
    inputs.assert_unchanged()
    return gradient


def _cotangent_of(g: Any, a: Any, b: Any, dtype: str) -> Any:
    shape = (np.zeros(np.shape(a)) @ np.zeros(np.shape(b))).shape
    return cotangent(g, shape, dtype) if isinstance(g, str) else g
