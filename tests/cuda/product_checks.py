"""Products of the CUDA kernels against the references, within the bounds of the error model."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import array_api_compat.numpy
import numpy as np

from arraylogchain import _arrays
from arraylogchain._context import Context
from arraylogchain._cuda.dtypes import compute_type
from arraylogchain._cuda.launch import Launch
from arraylogchain._cuda.products import gradients, log_product, maxplus
from arraylogchain._fold import fold
from tests import error_model, gradient_reference, reference
from tests.cuda.cpu_device import CpuDevice, bfloat16, from_bfloat16
from tests.gradient_checks import assert_gradient, cotangent, product_shape

INF, NAN = np.inf, np.nan
WORKSPACE = 1 << 22


def normal(*shape: int, sd: float = 1.0, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, sd, shape)


def on_device(x: Any, dtype: str) -> np.ndarray:
    """Return x in `dtype`: itself, with its strides, where it is so already."""
    return bfloat16(x) if dtype == "bfloat16" else np.asarray(x).astype(dtype, copy=False)


def from_device(x: np.ndarray, dtype: str) -> np.ndarray:
    return from_bfloat16(x) if dtype == "bfloat16" else x


# What kernels ask a library for, with bfloat16 as the device has it.
_NAMESPACE = SimpleNamespace(**vars(array_api_compat.numpy), bfloat16=np.uint16)


def context(device: CpuDevice, dtype: str) -> Context:
    """Return the context of arrays of one dtype on a device."""
    ctx = _arrays._numpy_context("float64" if dtype == "float64" else "float32")
    return replace(ctx, xp=_NAMESPACE, kernels=device, result_name=dtype)


def half_flushed(n: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Return operands whose sums keep one term, and lose 37 to underflow, each exp(-2) of it."""
    a, b = np.full((n, n), -44.0), np.full((n, n), -44.0)
    a[:, 0], a[:, 1], a[:, -1] = 0, -200, -43
    b[0], b[1], b[-1] = -200, 0, -43  # what is kept comes last: a sum above tiny loses nothing
    return a, b


def check_logmatmulexp(
    device: CpuDevice,
    dtype: str,
    a: Any,
    b: Any,
    *,
    workspace: int = WORKSPACE,
    tensor_cores: bool = False,
    count: float | None = None,
) -> np.ndarray:
    a, b = on_device(a, dtype), on_device(b, dtype)
    before = a.copy(), b.copy()
    layout = fold(a.shape, b.shape)
    given = (context(device, dtype), layout, a, b, workspace)
    out = log_product.multiply(*given, tensor_cores=tensor_cores)
    out = from_device(out, dtype)
    held = from_device(a, dtype), from_device(b, dtype)
    exact = reference.logmatmulexp(*held)
    error_model.assert_within(out, exact, error_model.product_bound(*held, exact, dtype, count))
    for x, y in zip((a, b), before, strict=True):
        np.testing.assert_array_equal(x, y)
    return out


def kernels(device: CpuDevice) -> list[str]:
    """Return the names of the kernels that have been launched, in order."""
    return [launch.kernel.partition("<")[0] for launch in device.launches]


class Allocations(CpuDevice):
    """A device that counts the bytes it is asked for."""

    allocated = 0

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        array = super().empty(shape, dtype)
        self.allocated += array.nbytes
        return array


class WithoutExact(CpuDevice):
    """Leaves out what repairs entries that are not proved."""

    def run(self, launch: Launch) -> None:
        if launch.source != "products/exact.cu":
            super().run(launch)


def check_maxplus(
    device: CpuDevice, dtype: str, a: Any, b: Any, *, workspace: int = WORKSPACE
) -> tuple[np.ndarray, np.ndarray]:
    """Compare values, which are exact, and indices, the first that numpy.argmax finds."""
    a, b = on_device(a, dtype), on_device(b, dtype)
    ctx, layout = context(device, dtype), fold(a.shape, b.shape)
    values, indices = maxplus.maxplus_matmul(ctx, layout, a, b, workspace)
    values = from_device(values, dtype)
    left, right = from_device(a, dtype), from_device(b, dtype)
    computed = error_model.compute_dtype(dtype)
    exact = reference.maxplus(left, right, computed)
    error_model.assert_within(values, exact, error_model.half_ulp(exact, dtype))
    left, right = left.astype(computed), right.astype(computed)
    with np.errstate(invalid="ignore", over="ignore"):
        terms = (
            np.atleast_2d(left)[..., :, :, None]
            + (right[:, None] if right.ndim == 1 else right)[..., None, :, :]
        )
    np.testing.assert_array_equal(indices, np.argmax(terms, axis=-2).reshape(indices.shape))
    return values, indices


def check_gradients(
    device: CpuDevice,
    dtype: str,
    a: Any,
    b: Any,
    g: Any = "normal",
    *,
    workspace: int = WORKSPACE,
) -> list[np.ndarray]:
    """Compare the gradients of logmatmulexp with the reference."""
    a, b = on_device(a, dtype), on_device(b, dtype)
    g = cotangent(g, product_shape(a, b), dtype) if isinstance(g, str) else g
    g = on_device(g, dtype)
    layout = fold(a.shape, b.shape)
    out = log_product.logmatmulexp(context(CpuDevice(), dtype), layout, a, b, workspace)
    ctx = context(device, dtype)
    found = gradients.logmatmulexp_gradients(ctx, layout, a, b, out, g, workspace)
    held = [from_device(x, dtype) for x in (a, b, g)]
    exact = gradient_reference.logmatmulexp(*held)
    results = []
    for x, expected in zip(found, exact, strict=True):
        assert x is not None
        results.append(from_device(x, dtype))
        bound = error_model.product_gradient_bound(expected, a.shape[-1], dtype)
        assert_gradient(results[-1], expected, bound)
    return results


def check_maxplus_gradients(
    device: CpuDevice, dtype: str, a: Any, b: Any, g: Any = "normal"
) -> list[np.ndarray]:
    """Compare the gradients of maxplus_matmul with the reference."""
    a, b = on_device(a, dtype), on_device(b, dtype)
    g = cotangent(g, product_shape(a, b), dtype) if isinstance(g, str) else g
    g = on_device(g, dtype)
    layout = fold(a.shape, b.shape)
    ctx = context(CpuDevice(), dtype)
    values, indices = maxplus.maxplus_matmul(ctx, layout, a, b, WORKSPACE)
    ctx, shapes = context(device, dtype), (a.shape, b.shape)
    found = maxplus.maxplus_gradients(ctx, layout, shapes, indices, g, values, WORKSPACE)
    held = [from_device(x, dtype) for x in (a, b)]
    exact = gradient_reference.maxplus(*held, indices, from_device(g, dtype))
    results = []
    for x, expected in zip(found, exact, strict=True):
        results.append(from_device(x, compute_type(dtype)))
        assert_gradient(results[-1], expected, error_model.summation_bound(expected, dtype))
    return results
