"""Random numbers from the caller's generator, as arrays of the library that computes."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from arraylogchain._core.axes import Shape
from arraylogchain._core.context import Array, Context


def check_generator(rng: Any, x: Array) -> Any:
    """Return the generator of samples for an array x; an integer or None seeds one of NumPy's.

    Raises
    ------
    TypeError
        For other objects, and for a generator of torch if x is not a tensor.
    ValueError
        For a negative integer.
    """
    if rng is None or (isinstance(rng, (int, np.integer)) and not isinstance(rng, bool)):
        if rng is None or rng >= 0:
            return np.random.default_rng(rng)
        raise ValueError(f"rng must be at least 0 as a seed, got {rng}")
    library = _package_of(rng) if type(rng).__name__ == "Generator" else ""
    if library == "torch" and _package_of(x) != "torch":
        raise TypeError(
            f"rng must be a generator of NumPy or CuPy for a {type(x).__name__}, got a "
            "torch.Generator; np.random.default_rng(seed) makes one for any array"
        )
    if library not in ("cupy", "torch") and not isinstance(rng, np.random.Generator):
        raise TypeError(
            "rng must be None, an integer, or a generator of NumPy, CuPy or torch, got a "
            f"{type(rng).__name__}; np.random.default_rng(seed) makes one"
        )
    return rng


def check_count(name: str, shape: Shape) -> None:
    """Raise ValueError if an array of paths of this shape exceeds addressable memory."""
    count, *path_shape = shape
    limit = sys.maxsize // 8 // max(1, math.prod(path_shape))
    if count > limit:
        raise ValueError(f"{name} must be at most {limit}, got {count}")


def workspace_for_samples(ctx: Context, shape: Shape) -> tuple[Array, Array]:
    """Return arrays for samples, of integers, and for the uniform numbers that they are drawn with.

    Both share memory if the library has views of another dtype: a number is read before a sample
    overwrites it.
    """
    check_count("num_samples", shape)
    xp = ctx.xp
    out, dtype = ctx.empty(shape, ctx.index_dtype), ctx.dtype(ctx.widest)
    is_shared = ctx.has_out and out.dtype == xp.int64 and ctx.widest.itemsize == 8
    return out, out.view(dtype) if is_shared else ctx.empty(shape, dtype)


def fill(ctx: Context, rng: Any, numbers: Array) -> None:
    """Write random numbers in [0, 1) into a contiguous array.

    They are drawn in the order of its entries, so that a generator gives the same samples on all
    backends.
    """
    if _package_of(rng) == "torch":
        torch = sys.modules["torch"]
        x = torch.rand(numbers.shape, generator=rng, dtype=torch.float64, device=rng.device)
        torch.as_tensor(numbers).copy_(x)
        return
    if isinstance(numbers, np.ndarray) and isinstance(rng, np.random.Generator):
        rng.random(out=numbers)
        return
    x = rng.random(numbers.shape)
    if _package_of(x) == "cupy" and _package_of(numbers) != "cupy":
        x = x.get()
    numbers[...] = ctx.xp.asarray(x, dtype=numbers.dtype, device=ctx.device)


def _package_of(x: Any) -> str:
    return type(x).__module__.partition(".")[0]
