"""Arrays and a device that count their launches and waits, on a machine without a GPU.

`DeviceArray` is a subclass of NumPy's array behind a namespace that passes for CuPy's. Each
operation that CuPy would launch is recorded; views, allocations and operations on empty arrays are
free. The library's kernels run on `CountingDevice`.
"""

from __future__ import annotations

import collections
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import array_api_compat
import array_api_compat.numpy
import numpy as np
import pytest

import arraylogchain.vjp  # noqa: F401  imports all modules that `counting` patches
from arraylogchain._inputs import arrays
from tests.cuda.cpu_device import CpuDevice

# Functions of NumPy that launch nothing.
VIEWS = {
    "broadcast_to", "moveaxis", "transpose", "permute_dims", "swapaxes", "expand_dims", "squeeze",
    "shape", "ndim", "size", "result_type", "can_cast", "broadcast_arrays", "shares_memory",
    "may_share_memory", "matrix_transpose", "empty_like", "iscomplexobj", "isrealobj", "flip",
    "atleast_1d", "atleast_2d", "array_repr", "array_str", "unstack",
}  # fmt: skip
# Kernels, matrix multiplies, other array operations, copies from the host, reads of device values.
KINDS = ("kernels", "gemm", "array", "h2d", "sync")
CREATION = ("empty", "zeros", "ones", "full", "arange", "eye", "linspace")
# Methods of a device, by their cost; loading a kernel is part of its first call only.
COUNTED_METHODS = frozenset({"run", "multiply"})
FREE_METHODS = frozenset({"empty", "pointer", "strides", "load", "is_capturing"})


class Tally:
    """Launches and waits by kind and by name, and the seconds spent inside NumPy and kernels."""

    def __init__(self) -> None:
        self.kinds: collections.Counter[str] = collections.Counter()
        self.names: collections.Counter[str] = collections.Counter()
        self.seconds = 0.0
        self._is_on = False

    def record(self, kind: str, name: str, count: int = 1) -> None:
        if self._is_on and count > 0:
            self.kinds[kind] += count
            self.names[f"{kind}:{name}"] += count

    def timed(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a function, and add its time to `seconds`."""
        start = time.perf_counter()
        result = function(*args, **options)
        self.seconds += time.perf_counter() - start
        return result

    def row(self) -> dict[str, Any]:
        """Return the counts of all kinds, their sum without waits, and the most frequent names."""
        row: dict[str, Any] = {kind: self.kinds[kind] for kind in KINDS}
        row["launches"] = sum(row[kind] for kind in KINDS if kind != "sync")
        return row | {"top": dict(self.names.most_common(8))}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Count from zero inside the context."""
        self.kinds.clear()
        self.names.clear()
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False


TALLY = Tally()


def to_host(x: Any) -> Any:
    """Return NumPy's view of an array, or of all arrays in a container."""
    if isinstance(x, DeviceArray):
        return x.view(np.ndarray)
    if isinstance(x, dict):
        return {key: to_host(value) for key, value in x.items()}
    return _map_items(to_host, x)


def to_device(x: Any) -> Any:
    """Return an array as a `DeviceArray`, or a container with all its arrays so."""
    if isinstance(x, np.ndarray | np.generic) and not isinstance(x, DeviceArray):
        return np.asarray(x).view(DeviceArray)
    return _map_items(to_device, x)


def _map_items(function: Callable[[Any], Any], x: Any) -> Any:
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*map(function, x))
    return type(x)(map(function, x)) if isinstance(x, list | tuple) else x


class DeviceArray(np.ndarray):
    """An array that the library takes for one of CuPy's."""

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **options: Any) -> Any:
        out, host_options = options.get("out"), to_host(options)
        result = TALLY.timed(getattr(ufunc, method), *map(to_host, args), **host_options)
        if not _is_empty(result):
            if ufunc is np.matmul:
                for x in args:
                    has_matrix = isinstance(x, np.ndarray) and x.ndim > 1 and x.size > 0
                    TALLY.record("array", "copy for gemm", int(has_matrix and not _is_matrix(x)))
            name = ufunc.__name__ + ("" if method == "__call__" else f".{method}")
            TALLY.record("gemm" if ufunc is np.matmul else "array", name)
        return out[0] if out is not None and len(out) == 1 else to_device(result)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        result = TALLY.timed(function, *to_host(tuple(args)), **to_host(options))
        name = function.__name__
        first = result[0] if isinstance(result, tuple | list) and result else result
        if name == "copyto" or (name not in VIEWS and isinstance(first, np.ndarray | np.generic)):
            is_view = name in ("reshape", "ravel", "asarray")
            is_view = is_view and np.shares_memory(first, to_host(args[0]))
            if not is_view and not _is_empty(first):
                TALLY.record("array", name)
                TALLY.record("sync", name, int(name in ("nonzero", "argwhere")))
        out = options.get("out")
        return out if out is not None else to_device(result)

    def __setitem__(self, index: Any, value: Any) -> None:
        host, host_index = self.view(np.ndarray), to_host(index)
        if host[host_index].size:
            TALLY.record("array", "set")
            TALLY.record("sync", "mask", int(_has_mask(host_index)))
        TALLY.timed(np.ndarray.__setitem__, host, host_index, to_host(value))

    def __getitem__(self, index: Any) -> Any:
        host_index = to_host(index)
        result = np.ndarray.__getitem__(self.view(np.ndarray), host_index)
        if _has_arrays(host_index) and np.size(result):
            TALLY.record("array", "gather")
            TALLY.record("sync", "mask", int(_has_mask(host_index)))
        return to_device(result)

    def astype(self, dtype: Any, *args: Any, copy: bool = True, **options: Any) -> Any:
        result = TALLY.timed(self.view(np.ndarray).astype, dtype, *args, copy=copy, **options)
        is_copy = result.size > 0 and (copy or result.dtype != self.dtype)
        TALLY.record("array", "astype", int(is_copy))
        return to_device(result)

    def copy(self, *args: Any) -> Any:
        TALLY.record("array", "copy", int(self.size > 0))
        return to_device(TALLY.timed(self.view(np.ndarray).copy, *args))

    def reshape(self, *args: Any, **options: Any) -> Any:
        result = TALLY.timed(self.view(np.ndarray).reshape, *args, **options)
        is_copy = result.size > 0 and not np.shares_memory(result, self)
        TALLY.record("array", "reshape copies", int(is_copy))
        return to_device(result)

    def _read(self, kind: type) -> Any:
        TALLY.record("sync", kind.__name__)
        return kind(self.view(np.ndarray))

    def __float__(self) -> float:
        return self._read(float)

    def __int__(self) -> int:
        return self._read(int)

    def __bool__(self) -> bool:
        return self._read(bool)

    def item(self, *args: Any) -> Any:
        TALLY.record("sync", "item")
        return self.view(np.ndarray).item(*args)

    def get(self) -> np.ndarray:
        TALLY.record("sync", "get")
        return self.view(np.ndarray)

    @property
    def device(self) -> Any:
        return PLACE


def _is_empty(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.size == 0


def _is_matrix(x: np.ndarray) -> bool:
    """Return whether CuPy multiplies x without a copy; batches must be contiguous."""
    if x.ndim > 2 or 1 in x.shape:
        return x.flags.c_contiguous
    (m, n), (row, column) = x.shape, (stride // x.itemsize for stride in x.strides)
    return (column == 1 and row >= n) or (row == 1 and column >= m)


def _has_arrays(index: Any) -> bool:
    items = index if isinstance(index, tuple) else (index,)
    return any(isinstance(item, np.ndarray | list) for item in items)


def _has_mask(index: Any) -> bool:
    items = index if isinstance(index, tuple) else (index,)
    return any(isinstance(item, np.ndarray) and item.dtype == bool for item in items)


class Place:
    """The device of `DeviceArray`, as CuPy's arrays have one."""

    id = 0

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __repr__(self) -> str:
        return "<CUDA Device 0>"


PLACE = Place()


class Namespace:
    """The array API of NumPy, for `DeviceArray`, under the name of CuPy's."""

    __name__ = "array_api_compat.cupy"

    def __init__(self) -> None:
        for name in CREATION:
            setattr(self, name, self._creation_function(name))

    def __getattr__(self, name: str) -> Any:
        return getattr(array_api_compat.numpy, name)

    def __array_namespace_info__(self) -> Any:
        info = array_api_compat.numpy.__array_namespace_info__()

        class Info:
            default_dtypes = staticmethod(lambda device=None: info.default_dtypes())
            dtypes = staticmethod(lambda device=None, kind=None: info.dtypes(kind=kind))

        return Info()

    def _creation_function(self, name: str) -> Callable[..., Any]:
        def create(*args: Any, device: Any = None, **options: Any) -> Any:
            result = TALLY.timed(getattr(np, name), *map(to_host, args), **options)
            TALLY.record("array", name, int(name != "empty" and result.size > 0))
            return result.view(DeviceArray)

        return create

    def zeros_like(self, x: Any, **options: Any) -> Any:
        return self.zeros(x.shape, dtype=options.get("dtype") or x.dtype)

    def ones_like(self, x: Any, **options: Any) -> Any:
        return self.ones(x.shape, dtype=options.get("dtype") or x.dtype)

    def empty_like(self, x: Any, **options: Any) -> Any:
        return self.empty(x.shape, dtype=options.get("dtype") or x.dtype)

    def asarray(self, x: Any, *, dtype: Any = None, device: Any = None, copy: Any = None) -> Any:
        if not isinstance(x, DeviceArray):
            TALLY.record("h2d", "asarray")
            return np.array(x, dtype=dtype).view(DeviceArray)
        if copy or (dtype is not None and np.dtype(dtype) != x.dtype):
            return x.astype(dtype or x.dtype)
        return x


class CountingDevice(CpuDevice):
    """The CPU as a device with the multiprocessors of an H100, which counts its launches."""

    multiprocessors = 132

    def empty(self, shape: Any, dtype: str) -> Any:
        return TALLY.timed(super().empty, shape, dtype).view(DeviceArray)

    def pointer(self, x: Any) -> int:
        return 0 if x is None else int(x.__array_interface__["data"][0])

    def multiply(self, *args: Any, **options: Any) -> Any:
        TALLY.record("gemm", "multiply")
        result = TALLY.timed(super().multiply, *map(to_host, args), **to_host(options))
        return to_device(result)

    def run(self, kernel: Any, *launch: Any) -> None:
        TALLY.record("kernels", kernel.name.partition("<")[0])
        TALLY.timed(super().run, kernel, *to_host(launch))


NAMESPACE = Namespace()
_array_namespace, _device = array_api_compat.array_namespace, array_api_compat.device
_kernels_for = arrays._kernels_for


def array_namespace(*args: Any, **options: Any) -> Any:
    is_on_device = any(isinstance(x, DeviceArray) for x in args)
    return NAMESPACE if is_on_device else _array_namespace(*args, **options)


def device_of(x: Any) -> Any:
    return PLACE if isinstance(x, DeviceArray) else _device(x)


@contextmanager
def counting(device: CpuDevice) -> Iterator[None]:
    """Let the library take `DeviceArray` for CuPy's arrays, whose kernels run on `device`."""

    def kernels_for(xp: Any, place: Any) -> Any:
        return device if xp is NAMESPACE else _kernels_for(xp, place)

    replacements = {"array_namespace": (_array_namespace, array_namespace)}
    replacements["device"] = _device, device_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARRAYLOGCHAIN_SELF_CHECK", "0")
        patch.setattr(arrays, "_kernels_for", kernels_for)
        patch.setattr(arrays, "_known_contexts", {})
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith(("arraylogchain", "array_api_compat")):
                for name, (old, new) in replacements.items():
                    if getattr(module, name, None) is old:
                        patch.setattr(module, name, new)
        yield
