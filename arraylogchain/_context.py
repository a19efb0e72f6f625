"""What a computation knows of the arrays at hand: their library, device and precision."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import array_api_compat.numpy as numpy_namespace
import numpy as np

from arraylogchain import _threads
from arraylogchain._fold import Box, boxes

# An array of whatever library the caller uses; the array API standard has no common base class.
Array = Any

# Elements from which elementwise work is shared with other threads. Two take 0.65 of the time of
# one for 2**20 exponentials, but not after a matrix multiply: BLAS's own threads go on waiting
# actively for some milliseconds, and two then took 0.8 to 1.5 times as long.
_SHARED_FROM = 1 << 23


@dataclass(frozen=True, slots=True)
class Precision:
    """A format that we compute in: float32 or float64, by what the error analysis needs of it."""

    name: str
    itemsize: int
    eps: float  # distance from 1 to the next number
    tiny: float  # smallest normal number
    top: int  # exponent of the largest power of two


SINGLE = Precision("float32", 4, 2.0**-23, 2.0**-126, 127)
DOUBLE = Precision("float64", 8, 2.0**-52, 2.0**-1022, 1023)


@dataclass(frozen=True, slots=True)
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
    hand_back : callable
        Turns a result of `xp` into an array of the caller's library.
    has_out : bool
        Whether functions of `xp` take ``out=``.
    kernels : object or None
        Where CUDA kernels run on these arrays, a `Device` of `_cuda.device`; None where plain
        array operations compute.
    powers : dict of str to array
        Tables of powers of two by precision, made when they are first needed.
    """

    xp: Any
    device: Any
    result_name: str
    precision: Precision
    widest: Precision
    block: int
    hand_back: Callable[[Array], Array]
    has_out: bool
    kernels: Any = None
    powers: dict[str, Array] = field(default_factory=dict)

    @property
    def is_numpy(self) -> bool:
        return self.xp is numpy_namespace

    @property
    def result_dtype(self) -> Any:
        return getattr(self.xp, self.result_name)

    def dtype(self, precision: Precision) -> Any:
        """Return the namespace's own name for a precision."""
        return getattr(self.xp, precision.name)

    def load(self, x: Array, precision: Precision) -> Array:
        """Return `x` in the given precision: a copy only where the dtype differs."""
        dtype = self.dtype(precision)
        return x if x.dtype == dtype else self.xp.astype(x, dtype)

    def to_result(self, x: Array) -> Array:
        """Return `x` in the dtype of the result: a copy only where that differs."""
        return self.xp.astype(x, self.result_dtype, copy=False)

    def handed_back(self, found: Any) -> Any:
        """Return a result, or each of a tuple, as an array of the caller's library, or None."""
        if isinstance(found, tuple):
            return tuple(x if x is None else self.hand_back(x) for x in found)
        return self.hand_back(found)

    def computing(self) -> AbstractContextManager[None]:
        """Return what everything that is done to arrays is done within."""
        if self.is_numpy or library_name(self.xp) != "cupy":
            return quiet()
        return _on_cupy_device(self.device)

    def uses(self, *arrays: Array) -> None:
        """Say that what is queued next reads arrays that may have been made on another stream.

        torch does not give their memory to others before that has passed. CuPy has no such means.
        """
        if library_name(self.xp) == "torch" and "cuda" in str(self.device):
            stream = sys.modules["torch"].cuda.current_stream(self.device)
            for x in arrays:
                x.record_stream(stream)

    @property
    def index_dtype(self) -> Any:
        """Return int64, or int32 on devices without 64-bit integers."""
        if self.is_numpy:
            return np.int64
        defaults = self.xp.__array_namespace_info__().default_dtypes(device=self.device)
        return defaults["indexing"]

    def integers(self, x: np.ndarray) -> Array:
        """Return integers of the host as an array of the library."""
        return self.xp.asarray(x.tolist(), dtype=self.index_dtype, device=self.device)

    def powers_of_two(self, precision: Precision) -> Array:
        """Return 2**-(top - 1) ... 2**top, built exactly: pow and exp2 need not round right."""
        if precision.name not in self.powers:
            values = [math.ldexp(1.0, k) for k in range(-precision.top + 1, precision.top + 1)]
            self.powers[precision.name] = self.xp.asarray(
                values, dtype=self.dtype(precision), device=self.device
            )
        return self.powers[precision.name]

    def transposed(self, x: Array, precision: Precision) -> Array:
        """Return a copy of x [batch, m, n] as a contiguous [batch, n, m]."""
        batch, m, n = x.shape
        copy = self.empty((batch, n, m), self.dtype(precision))
        copy[...] = self.load(self.xp.matrix_transpose(x), precision)
        return copy

    def apply(self, function: Callable[..., Array], *args: Any, out: Array) -> None:
        """Write `function(*args)` into `out`, without a temporary where the library can."""
        if self.has_out:
            function(*args, out=out)
        else:
            out[...] = function(*args)

    def in_blocks(self, work: Callable[[Box], None], shape: tuple[int, ...], block: int) -> None:
        """Call `work` on boxes of at most `block` points, which threads share where that pays."""
        size = math.prod(shape)
        if size <= block:
            work((slice(None),) * len(shape))
        elif size < _SHARED_FROM:
            for box in boxes(shape, block):
                work(box)
        else:
            self.share(work, list(boxes(shape, block)))

    def share(self, work: Callable[[Any], None], items: Sequence[Any]) -> None:
        """Call `work` on all items, which write to memory of their own; threads share them.

        Only NumPy's functions let go of the interpreter and are not shared out already.
        """

        def run(start: int, stop: int) -> None:
            for item in items[start:stop]:
                work(item)

        _threads.share(run, len(items), 1, None if self.is_numpy else 1)

    def extremes(self, x: Array) -> tuple[float, float]:
        """Return the largest and the smallest entry of an array that has any; NaN if it has one."""
        if not self.is_numpy:
            return float(self.xp.max(x)), float(self.xp.min(x))
        # Nothing is written: blocks that stay in L3 have fewer calls.
        block = 16 * self.block
        if x.size <= block:
            return float(x.max()), float(x.min())
        found: list[tuple[Any, Any]] = []
        self.in_blocks(lambda box: found.append((x[box].max(), x[box].min())), x.shape, block)
        tops, lows = np.asarray(found, x.dtype).T
        return float(tops.max()), float(lows.min())

    def are_within(self, limit: float, *arrays: Array) -> bool:
        """Tell whether all entries are at most `limit` away from 0; False where one is NaN."""
        for x in arrays:
            # One call instead of two where that proves it.
            if self.is_numpy and x.size <= self.block and np.vdot(x, x) <= limit * limit:
                continue
            top, low = self.extremes(x)
            if not (top <= limit and low >= -limit):
                return False
        return True

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

    def put(self, target: Array, index: tuple[Any, ...], values: Array, add: bool) -> None:
        """Write values to target[index], or add them; no place of target comes up twice.

        The standard assigns to slices only, libraries to arrays of indices as well.
        """
        arrays = [i for i in index if not isinstance(i, int) and i is not ...]
        if not self.has_out and arrays:
            for e in range(int(arrays[0].shape[0])):
                at = tuple(int(i[e]) if any(i is a for a in arrays) else i for i in index)
                target[at] = target[at] + values[e, ...] if add else values[e, ...]
        elif add:
            target[index] += values
        else:
            target[index] = values

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        if self.is_numpy:
            return np.empty(shape, dtype)
        return self.xp.empty(shape, dtype=dtype, device=self.device)


class quiet:  # noqa: N801
    """Compute without NumPy's floating-point warnings and without torch's autocast.

    Infinities and NaN are values here, no accidents. Autocast would let matrix multiplies of
    float32 tensors drop to half precision behind our back.
    """

    __slots__ = ("_autocasts", "_errors")

    def __enter__(self) -> None:
        self._errors = np.errstate(all="ignore")
        self._errors.__enter__()
        torch = sys.modules.get("torch")
        self._autocasts = [
            torch.autocast(kind, enabled=False)
            for kind in ("cpu", "cuda")
            if torch is not None and torch.is_autocast_enabled(kind)
        ]
        for autocast in self._autocasts:
            autocast.__enter__()

    def __exit__(self, *error: Any) -> None:
        for autocast in reversed(self._autocasts):
            autocast.__exit__(*error)
        self._errors.__exit__(*error)


@contextmanager
def _on_cupy_device(device: Any) -> Iterator[None]:
    """Make a device the current one: CuPy computes there, wherever the arrays are."""
    with quiet(), device:
        yield


def library_name(xp: Any) -> str:
    name = str(xp.__name__)
    return name.removeprefix("array_api_compat.").partition(".")[0]


def shape_of(x: Array) -> tuple[int, ...]:
    return x.shape if type(x) is np.ndarray else tuple(int(n) for n in x.shape)


def is_transposed(x: Array) -> bool:
    """Tell whether the last axis but one is the contiguous one; False where strides are hidden."""
    strides = getattr(x, "strides", None) or (x.stride() if hasattr(x, "stride") else None)
    return strides is not None and 0 < abs(strides[-2]) < abs(strides[-1])


def whole_maximum(
    ctx: Context, x: Array, axis: int | tuple[int, ...], precision: Precision
) -> Array:
    """Return maxima rounded to integers, 0 where they are not finite; axes are kept."""
    return whole_part(ctx, ctx.xp.max(x, axis=axis, keepdims=True), precision)


def whole_part(ctx: Context, x: Array, precision: Precision) -> Array:
    """Return x rounded to integers, 0 where it is not finite."""
    xp = ctx.xp
    x = xp.round(ctx.load(x, precision))
    return xp.where(xp.isfinite(x), x, xp.zeros_like(x))
