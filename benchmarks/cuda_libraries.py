"""CuPy and torch on a CUDA device: arrays, the stream's clock, the pool of memory.

Everything is that of the library itself: its current stream, its events, its pool. `cuda_device`
asks no question about which of the two it is.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from arraylogchain._cli.environment import open_device
from arraylogchain._cuda.device import find

# Cycles in a second, at most: what keeps the stream busy may take longer than asked for.
_CLOCK = 2.0e9

_SPIN = """
extern "C" __global__ void spin(long long cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles) { }
}
"""


class Library(Protocol):
    """One array library on one device."""

    def put(self, x: NDArray[Any]) -> Any:
        """Copy an array of the host to the device."""

    def copy(self, x: Any) -> Any:
        """Copy an array within the device."""

    def pick(self, value: Any, index: Any) -> NDArray[Any]:
        """Return some entries, which alone are brought to the host, as float64 or wider."""

    def wait(self) -> None:
        """Return when all work is done; raise what went wrong in it."""

    def stamp(self) -> Any:
        """Mark this place of the current stream."""

    def between(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks that have been reached."""

    def hold(self, seconds: float) -> None:
        """Keep the current stream busy for about so long."""

    def peak(self, call: Callable[[], Any]) -> tuple[int, Any]:
        """Run a call; return the most bytes that it held beyond what was in use, and its result."""

    def reserved(self) -> int:
        """Return the bytes that the pool has from the device, in use or not."""

    def release(self) -> None:
        """Give back what nobody uses."""

    def limit(self, size: int) -> Any:
        """Return a context in which the pool may not have more than so many bytes."""


class Cupy:
    """CuPy: its current stream, its default pool."""

    def __init__(self) -> None:
        # This tries the device, and raises UnavailableError with a reason.
        self._device = open_device("cuda")
        import cupy

        self._cupy = cupy
        self._pool = cupy.get_default_memory_pool()
        self._spin = cupy.RawKernel(_SPIN, "spin")
        # cuBLAS takes its workspace now, and not as part of somebody's first call.
        for dtype in (np.float16, np.float32, np.float64):
            x = cupy.ones((64, 64), dtype=dtype)
            x @ x
        self.hold(0.0)
        self.wait()

    def wait(self) -> None:
        self._cupy.cuda.get_current_stream().synchronize()

    def put(self, x: NDArray[Any]) -> Any:
        return self._cupy.asarray(x)

    def copy(self, x: Any) -> Any:
        return x.copy()

    def pick(self, value: Any, index: Any) -> NDArray[Any]:
        there = _map_arrays(index, self._cupy.asarray)
        return _widened(self._cupy.asnumpy(value[there]))

    def stamp(self) -> Any:
        event = self._cupy.cuda.Event()
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        return float(self._cupy.cuda.get_elapsed_time(start, end)) / 1e3

    def hold(self, seconds: float) -> None:
        self._spin((1,), (1,), (np.int64(seconds * _CLOCK),))

    def peak(self, call: Callable[[], Any]) -> tuple[int, Any]:
        gc.collect()
        with self._device.trace() as peak:
            value = call()
            self.wait()
        return peak.size, value

    def reserved(self) -> int:
        return int(self._pool.total_bytes())

    def release(self) -> None:
        self._pool.free_all_blocks()

    @contextmanager
    def limit(self, size: int) -> Iterator[None]:
        self.release()
        self._pool.set_limit(size=size)
        try:
            yield
        finally:
            self._pool.set_limit(size=0)  # none

    def describe(self) -> dict[str, Any]:
        """Return what CUDA says of the device."""
        runtime = self._cupy.cuda.runtime
        properties = runtime.getDeviceProperties(self._cupy.cuda.Device().id)
        return {
            "name": properties["name"].decode(),
            "multiprocessors": int(properties["multiProcessorCount"]),
            "compute capability": f"{properties['major']}.{properties['minor']}",
            "memory": int(properties["totalGlobalMem"]),
            "L2": int(properties["l2CacheSize"]),
            "driver's CUDA": int(runtime.driverGetVersion()),
            "CUDA runtime": int(runtime.runtimeGetVersion()),
            "road of CuPy": _road("cupy", self._cupy.cuda.Device()),
        }


class Torch:
    """torch: its current stream, its caching allocator."""

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError(f"torch {torch.__version__} can use no CUDA device")
        self._torch = torch
        # Without TF32: as float32 as CuPy's, whose default this is.
        torch.set_float32_matmul_precision("highest")
        # cuBLAS takes its workspace now, and another one for the thread that goes backward.
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            x = torch.ones((64, 64), dtype=dtype, device="cuda", requires_grad=True)
            (x @ x).sum().backward()
        self.wait()

    def put(self, x: NDArray[Any]) -> Any:
        if x.dtype.name == "bfloat16":  # ml_dtypes' type, which torch does not know
            return self.put(x.view(np.int16)).view(self._torch.bfloat16)
        return self._torch.from_numpy(np.ascontiguousarray(x)).to("cuda")

    def copy(self, x: Any) -> Any:
        return x.clone()

    def pick(self, value: Any, index: Any) -> NDArray[Any]:
        there = _map_arrays(index, lambda i: self._torch.tensor(i, device=value.device))
        return np.asarray(value.detach()[there].double().cpu().numpy())

    def wait(self) -> None:
        self._torch.cuda.synchronize()

    def stamp(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3

    def hold(self, seconds: float) -> None:
        self._torch.cuda._sleep(int(seconds * _CLOCK))

    def peak(self, call: Callable[[], Any]) -> tuple[int, Any]:
        gc.collect()
        self.wait()
        self._torch.cuda.reset_peak_memory_stats()
        before = self._torch.cuda.memory_allocated()
        value = call()
        self.wait()
        return self._torch.cuda.max_memory_allocated() - before, value

    def reserved(self) -> int:
        return int(self._torch.cuda.memory_reserved())

    def release(self) -> None:
        self._torch.cuda.empty_cache()

    @contextmanager
    def limit(self, size: int) -> Iterator[None]:
        self.release()
        total = self._torch.cuda.get_device_properties(0).total_memory
        self._torch.cuda.set_per_process_memory_fraction(min(1.0, size / total))
        try:
            yield
        finally:
            self._torch.cuda.set_per_process_memory_fraction(1.0)

    def describe(self) -> dict[str, Any]:
        """Return what CUDA says of the device."""
        properties = self._torch.cuda.get_device_properties(0)
        return {
            "name": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "compute capability": f"{properties.major}.{properties.minor}",
            "memory": properties.total_memory,
            "L2": getattr(properties, "L2_cache_size", 0),
            "CUDA of torch": self._torch.version.cuda,
            "road of torch": _road("torch", self._torch.device("cuda")),
        }


def _road(library: str, device: Any) -> str:
    """Say what this library computes with, and why not with its kernels if it does not."""
    found = find(library, device)
    return f"array operations ({found})" if isinstance(found, str) else "kernels"


def _map_arrays(index: Any, function: Callable[[NDArray[Any]], Any]) -> Any:
    """Return an index with its arrays replaced, its slices and numbers as they are."""
    if isinstance(index, tuple):
        return tuple(_map_arrays(part, function) for part in index)
    return function(index) if isinstance(index, np.ndarray) else index


def _widened(x: NDArray[Any]) -> NDArray[Any]:
    """Return entries in float64, which every type of contestants fits into."""
    return x.astype(np.float64)
