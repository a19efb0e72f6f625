"""Library, device and precision of a computation, and operations that differ by library."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from arraylogchain._core.axes import boxes
from arraylogchain._core.precision import DOUBLE, Precision
from arraylogchain._core.threads import run_blocks, using

# An array of any library; the array API standard has no common base class.
Array = Any


@dataclass(frozen=True)
class Context:
    """Library, device and precision of a computation.

    Attributes
    ----------
    xp : namespace
        The array API namespace that computes.
    device : object
        Of results.
    result_name : str
        The dtype of the result, one of float16, bfloat16, float32, float64.
    precision : Precision
        Of the computation: float64 for float64, else float32.
    widest : Precision
        float64 where the device has it, else float32.
    block : int
        Elements in one elementwise step.
    hand_back : callable or None
        Converts a result of `xp` to the caller's library, if that is another one.
    has_out : bool
        Whether functions of `xp` take ``out=``.
    kernels : object or None
        The `Device` of `_cuda.device` that runs CUDA kernels on these arrays; None if array
        operations compute.
    """

    xp: Any
    device: Any
    result_name: str
    precision: Precision
    widest: Precision
    block: int
    hand_back: Callable[[Array], Array] | None
    has_out: bool
    kernels: Any = None

    @cached_property
    def is_numpy(self) -> bool:
        return self.xp is np

    @cached_property
    def result_dtype(self) -> Any:
        return getattr(self.xp, self.result_name)

    def dtype(self, precision: Precision) -> Any:
        """Return the dtype of a precision in the namespace."""
        return getattr(self.xp, precision.name)

    def load(self, x: Array, precision: Precision) -> Array:
        """Return `x` in the given precision: a copy only where the dtype differs."""
        dtype = getattr(self.xp, precision.name)
        return x if x.dtype == dtype else self.xp.astype(x, dtype)

    def cast(self, x: Array, dtype: Any) -> Array:
        """Return `x` in a dtype of the namespace: a copy only where it differs."""
        return x if x.dtype == dtype else self.xp.astype(x, dtype)

    def to_result(self, x: Array) -> Array:
        """Return `x` in the dtype of the result: a copy only where that differs."""
        return self.cast(x, self.result_dtype)

    def to_caller(self, result: Any) -> Any:
        """Return a result, or each of a tuple, as an array of the caller's library, or None.

        As NumPy's functions do, results without axes are returned as NumPy scalars.
        """
        if isinstance(result, tuple):
            return tuple(map(self.to_caller, result))
        if self.hand_back is not None and result is not None:
            return self.hand_back(result)
        return result[()] if type(result) is np.ndarray and not result.ndim else result

    def computing(self, workers: int | None = None) -> AbstractContextManager[None]:
        """Return a context manager for computations.

        It limits threads, and disables autocast and floating-point warnings: infinities and NaN are
        ordinary values here.
        """
        if self.is_numpy and workers is None:
            return np.errstate(all="ignore")
        return self._computing(workers)

    @contextmanager
    def _computing(self, workers: int | None) -> Iterator[None]:
        torch: Any = sys.modules.get("torch")
        with using(workers), np.errstate(all="ignore"), ExitStack() as stack:
            if self.kernels is not None or library_name(self.xp) == "cupy":
                # CuPy computes on its current device, not on that of the arrays.
                stack.enter_context(self.kernels or self.device)
            for kind in ("cpu", "cuda"):
                # Autocast would multiply float32 tensors in half precision.
                if torch is not None and torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            yield

    def record_stream(self, *arrays: Array) -> None:
        """Record that the current stream uses these arrays (`Tensor.record_stream`).

        torch then reuses their memory only after that stream; CuPy has no such method.
        """
        if library_name(self.xp) == "torch" and "cuda" in str(self.device):
            stream = sys.modules["torch"].cuda.current_stream(self.device)
            for x in arrays:
                x.record_stream(stream)

    @cached_property
    def index_dtype(self) -> Any:
        """Return int64, or int32 on devices without 64-bit integers."""
        defaults = self.xp.__array_namespace_info__().default_dtypes(device=self.device)
        return defaults["indexing"]

    def integers(self, x: np.ndarray) -> Array:
        """Return host integers as an array of the library; it must not be changed."""
        if self.kernels is not None:
            return self.kernels.tables.read(library_name(self.xp), x, self._integers)
        return self._integers(x)

    def _integers(self, x: np.ndarray) -> Array:
        # NumPy copies: torch.asarray fails to copy a 0-d array to another device.
        return self.xp.asarray(np.array(x), dtype=self.index_dtype, device=self.device)

    def apply(self, function: Callable[..., Array], *args: Any, out: Array) -> None:
        """Write `function(*args)` into `out`, without a temporary if the library has ``out=``."""
        if self.has_out:
            function(*args, out=out)
        else:
            out[...] = function(*args)

    def exp(self, x: Array, out: Array) -> None:
        """Write exp(x) into `out`, which may be x.

        NumPy's float64 results are flushed to 0 where they are subnormal: those take up to 70 times
        as long.
        """
        lowest = math.log(DOUBLE.tiny)
        if self.is_numpy and x.dtype == np.float64 and x.size and x.min() < lowest:
            above = x >= lowest
            np.exp(np.maximum(x, lowest, out=out), out=out)
            np.multiply(out, above, out=out)
        else:
            self.apply(self.xp.exp, x, out=out)

    def scaled(self, x: Array, exponents: Array) -> Array:
        """Return x * 2**exponents, for integers; exact unless it overflows or underflows."""
        if self.is_numpy:
            return np.ldexp(x, exponents.astype(np.int32))
        # In two steps: one factor alone may be out of range.
        half = self.xp.floor(exponents / 2)
        return x * 2.0**half * 2.0 ** (exponents - half)

    def multiply(self, a: Array, b: Array, out: Array | None = None) -> Array:
        """Return a @ b in the full precision of its dtype, written to `out` if given.

        Where TF32 is allowed, float32 products on CUDA devices keep 11 bits: then CuPy multiplies
        for torch, and CuPy itself, or torch without it, multiplies in float64.
        """
        xp = self.xp
        if not self.is_numpy and a.dtype == xp.float32 and self._drops_bits():
            if self.kernels is not None:
                product = self.kernels.multiply(a, b)
            else:
                product = multiply_in_float64(xp, a, b)
        elif out is not None and self.has_out:
            return xp.matmul(a, b, out=out)
        else:
            product = xp.matmul(a, b)
        if out is not None:
            out[...] = product
        return product

    def row_sums(self, x: Array) -> Array:
        """Return sums along the last axis."""
        # NumPy's sum is slow for short rows.
        if self.is_numpy and x.flags.c_contiguous:
            size = x.shape[-1]
            return np.matmul(x.reshape(-1, size), np.ones(size, x.dtype)).reshape(x.shape[:-1])
        if self.is_numpy and is_transposed(x):
            return np.matmul(np.ones(x.shape[-1], x.dtype), x.swapaxes(-1, -2))
        return self.xp.sum(x, axis=-1)

    def _drops_bits(self) -> bool:
        if (library := library_name(self.xp)) == "cupy":
            return os.environ.get("CUPY_TF32") == "1"
        return library == "torch" and "cuda" in str(self.device) and torch_allows_tf32()

    def run_all(self, work: Callable[[Any], None], items: Sequence[Any]) -> None:
        """Call `work` on all items, which write to separate memory; threads share them."""
        run_blocks(lambda start, stop: work(items[start]), len(items), 1)

    def are_within(self, limit: float, *arrays: Array) -> bool:
        """Return whether the magnitudes of all entries are at most `limit`; False for NaN."""
        for x in arrays:
            # One call instead of two; BLAS uses threads for larger arrays.
            if self.is_numpy and x.size < 10_000 and np.vdot(x, x) <= limit * limit:
                continue
            # Blocks stay in cache between the two reductions.
            index_boxes = boxes(x.shape, 16 * self.block)
            if not all(self.are_between(x[box], -limit, limit) for box in index_boxes):
                return False
        return True

    def are_between(self, x: Array, lower: float, upper: float) -> bool:
        """Return whether all entries lie between two numbers; False for NaN."""
        highest, lowest = self.xp.max, self.xp.min
        if self.is_numpy:  # np.max and np.min add a Python call to these
            highest, lowest = np.maximum.reduce, np.minimum.reduce
        is_below = upper == math.inf or float(highest(x, axis=None)) <= upper
        return is_below and float(lowest(x, axis=None)) >= lower

    def add_at(self, target: Array, index: Array, values: Array) -> None:
        """Add values[e, ...] to target[index[e], ...], in place; indices may repeat.

        The standard has no such function; libraries have different ones.
        """
        add = self.xp.add
        if hasattr(add, "at"):
            add.at(target, index, values)
        elif hasattr(target, "index_add_"):
            target.index_add_(0, index, values)
        else:
            for e in range(index.shape[0]):
                target[int(index[e]), ...] += values[e, ...]

    def pick(self, x: Array, index: Array, axis: int) -> Array:
        """Return the entries of x at `index` along an axis, reading no others.

        NumPy's `take` copies all of a view that is not contiguous.
        """
        if self.has_out:
            return x[(slice(None),) * axis + (index,)]
        return self.xp.take(x, index, axis=axis)

    def arange(self, *limits: int) -> Array:
        """Return the integers up to a limit, from 0 or from a limit before it."""
        return self.xp.arange(*limits, dtype=self.index_dtype, device=self.device)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return self.xp.empty(shape, dtype=dtype, device=self.device)


def multiply_in_float64(xp: Any, a: Array, b: Array) -> Array:
    """Return a @ b of float32 arrays, multiplied in float64."""
    return xp.astype(xp.matmul(*(xp.astype(x, xp.float64) for x in (a, b))), xp.float32)


def torch_allows_tf32() -> bool:
    """Return whether torch may drop bits of float32 products on CUDA devices."""
    torch = sys.modules["torch"]
    # Once its newer switch was used, torch raises where it is asked for the older one.
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    precision = precision or torch.get_float32_matmul_precision()
    return precision not in ("none", "ieee", "highest")


def library_name(xp: Any) -> str:
    name = str(xp.__name__)
    return name.removeprefix("array_api_compat.").partition(".")[0]


def shape_of(x: Array) -> tuple[int, ...]:
    return x.shape if type(x) is np.ndarray else tuple(int(n) for n in x.shape)


def is_transposed(x: Array) -> bool:
    """Return whether the second to last axis is contiguous; False if strides are not known."""
    strides = getattr(x, "strides", None) or (x.stride() if hasattr(x, "stride") else None)
    return strides is not None and 0 < abs(strides[-2]) < abs(strides[-1])
