"""What a computation knows of the arrays at hand: their library, device and precision."""

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

from arraylogchain._core.axes import Box, boxes
from arraylogchain._core.precision import DOUBLE, Precision
from arraylogchain._core.threads import at_least, run_blocks, using

DEFAULT_WORKSPACE = 64 * 2**20
# NumPy's own buffers for mixed dtypes take up to a few hundred kilobytes.
SMALLEST_WORKSPACE = 2**20

# An array of whatever library the caller uses; the array API standard has no common base class.
Array = Any


@dataclass(frozen=True)
class Context:
    """What a computation needs to know of the arrays it was given.

    Attributes
    ----------
    xp : namespace
        The array API namespace that computes.
    device : object
        Where results are made.
    result_name : str
        The dtype of the result, one of float16, bfloat16, float32, float64.
    precision : Precision
        What is computed in: float64 for float64, else float32.
    widest : Precision
        float64 where the device has it, else float32.
    block : int
        Elements in one elementwise step.
    hand_back : callable or None
        Turns a result of `xp` into an array of the caller's library, where it is none yet.
    has_out : bool
        Whether functions of `xp` take ``out=``.
    kernels : object or None
        Where CUDA kernels run on these arrays, a `Device` of `_cuda.device`; None where plain
        array operations compute.
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
        """Return the namespace's own name for a precision."""
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
        """Return a result, or each of a tuple, as an array of the caller's library, or None."""
        if result is None or self.hand_back is None:
            return result
        if isinstance(result, tuple):
            return tuple(map(self.to_caller, result))
        return self.hand_back(result)

    def computing(self, workers: int | None = None) -> AbstractContextManager[None]:
        """Return what everything is computed within, by no more than so many threads.

        Infinities and NaN are values here, no accidents, of which NumPy would warn.
        """
        if self.is_numpy and workers is None:
            return np.errstate(all="ignore")
        return self._computing(workers)

    @contextmanager
    def _computing(self, workers: int | None) -> Iterator[None]:
        torch: Any = sys.modules.get("torch")
        with using(workers), np.errstate(all="ignore"), ExitStack() as stack:
            if not self.is_numpy and library_name(self.xp) == "cupy":
                # CuPy computes on the current device, wherever the arrays are.
                stack.enter_context(self.device)
            for kind in ("cpu", "cuda"):
                # Else multiplies of float32 tensors would drop to half precision.
                if torch is not None and torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            yield

    def uses(self, *arrays: Array) -> None:
        """Say that what is queued next reads arrays that may have been made on another stream.

        torch does not give their memory to others before that has passed. CuPy has no such means.
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
        """Return integers of the host as an array of the library."""
        # A copy by NumPy: torch.asarray makes none of a single number for another device.
        return self.xp.asarray(np.array(x), dtype=self.index_dtype, device=self.device)

    def apply(self, function: Callable[..., Array], *args: Any, out: Array) -> None:
        """Write `function(*args)` into `out`, without a temporary where the library can."""
        if self.has_out:
            function(*args, out=out)
        else:
            out[...] = function(*args)

    def exp(self, x: Array, out: Array) -> None:
        """Write exp(x) into `out`, which may be x.

        NumPy's in float64 is 0 where that is no normal number, which takes up to 70 times as long.
        """
        lowest = math.log(DOUBLE.tiny)
        if self.is_numpy and x.dtype == np.float64 and x.size and x.min() < lowest:
            above = x >= lowest
            np.exp(np.maximum(x, lowest, out=out), out=out)
            np.multiply(out, above, out=out)
        else:
            self.apply(self.xp.exp, x, out=out)

    def scaled(self, x: Array, exponents: Array) -> Array:
        """Return x * 2**powers, for whole numbers; exact unless that leaves the range."""
        if self.is_numpy:
            return np.ldexp(x, exponents.astype(np.int32))
        # In two steps: one factor alone may be out of range.
        half = self.xp.floor(exponents / 2)
        return x * 2.0**half * 2.0 ** (exponents - half)

    def multiply(self, a: Array, b: Array, out: Array | None = None) -> Array:
        """Return a @ b, written to `out` if there is one, rounded as its dtype is.

        With TF32 allowed, multiplies of float32 on CUDA devices keep 11 bits: then torch's are done
        by CuPy, and CuPy's, or without it, in float64.
        """
        xp = self.xp
        if not self.is_numpy and a.dtype == xp.float32 and self._drops_bits():
            if self.kernels is not None:
                product = self.kernels.multiply(a, b)
            else:
                wide = xp.matmul(*(xp.astype(x, xp.float64) for x in (a, b)))
                product = xp.astype(wide, xp.float32)
        elif out is not None and self.has_out:
            return xp.matmul(a, b, out=out)
        else:
            product = xp.matmul(a, b)
        if out is not None:
            out[...] = product
        return product

    def row_sums(self, x: Array) -> Array:
        """Return sums along the last axis."""
        # NumPy adds short rows one by one.
        if self.is_numpy and x.flags.c_contiguous:
            size = x.shape[-1]
            return np.matmul(x.reshape(-1, size), np.ones(size, x.dtype)).reshape(x.shape[:-1])
        if self.is_numpy and is_transposed(x):
            return np.matmul(np.ones(x.shape[-1], x.dtype), x.swapaxes(-1, -2))
        return self.xp.sum(x, axis=-1)

    def _drops_bits(self) -> bool:
        if (library := library_name(self.xp)) == "cupy":
            return os.environ.get("CUPY_TF32") == "1"
        if library != "torch" or "cuda" not in str(self.device):
            return False
        torch = sys.modules["torch"]
        # Once its newer switch was used, torch raises where it is asked for the older one.
        precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
        precision = precision or torch.get_float32_matmul_precision()
        return precision not in ("none", "ieee", "highest")

    def blocks(self, shape: tuple[int, ...]) -> Iterator[Box]:
        """Cut an index space into boxes for one elementwise step each."""
        return boxes(shape, self.block)

    def run_all(self, work: Callable[[Any], None], items: Sequence[Any]) -> None:
        """Call `work` on all items, which write to memory of their own; threads share them.

        Only NumPy's functions let go of the interpreter and are not shared out already.
        """
        workers = None if self.is_numpy else 1
        run_blocks(lambda start, stop: work(items[start]), len(items), 1, workers)

    def are_within(self, limit: float, *arrays: Array) -> bool:
        """Tell whether all entries are at most `limit` away from 0; False where one is NaN."""
        for x in arrays:
            # One call instead of two where that proves it; BLAS shares out what is larger.
            if self.is_numpy and x.size < 10_000 and np.vdot(x, x) <= limit * limit:
                continue
            # Blocks that stay in cache are read once.
            index_boxes = boxes(x.shape, 16 * self.block)
            if not all(self.are_between(x[box], -limit, limit) for box in index_boxes):
                return False
        return True

    def are_between(self, x: Array, lower: float, upper: float) -> bool:
        """Tell whether all entries lie between two numbers; False where one is NaN."""
        highest, lowest = self.xp.max, self.xp.min
        if self.is_numpy:  # whose functions wrap these, for as long as they take
            highest, lowest = np.maximum.reduce, np.minimum.reduce
        has_most = upper == math.inf or float(highest(x, axis=None)) <= upper
        return has_most and float(lowest(x, axis=None)) >= lower

    def add_at(self, target: Array, index: Array, values: Array) -> None:
        """Add values[e, ...] to target[index[e], ...], in place; an index may occur repeatedly.

        The standard has no such function, and every library has one of its own.
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
        """Return x's entries number `index` along an axis; reads no others.

        NumPy's take first copies all of a view that is not contiguous.
        """
        if self.has_out:
            return x[(slice(None),) * axis + (index,)]
        return self.xp.take(x, index, axis=axis)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return self.xp.empty(shape, dtype=dtype, device=self.device)


def library_name(xp: Any) -> str:
    name = str(xp.__name__)
    return name.removeprefix("array_api_compat.").partition(".")[0]


def shape_of(x: Array) -> tuple[int, ...]:
    return x.shape if type(x) is np.ndarray else tuple(int(n) for n in x.shape)


def is_transposed(x: Array) -> bool:
    """Tell whether the last axis but one is the contiguous one; False where strides are hidden."""
    strides = getattr(x, "strides", None) or (x.stride() if hasattr(x, "stride") else None)
    return strides is not None and 0 < abs(strides[-2]) < abs(strides[-1])


def check_workspace(workspace: int | None) -> int:
    """Return the workspace in bytes; raise where it is no usable number."""
    if workspace is None:
        return DEFAULT_WORKSPACE
    return at_least(SMALLEST_WORKSPACE, "workspace", workspace, "bytes")
