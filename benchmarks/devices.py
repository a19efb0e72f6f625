"""A device: its array library, how to wait for it, and how to measure the memory of a call.

Allocations are counted by tracemalloc for NumPy, by torch's own counters, and by a hook for CuPy.
Internal memory of BLAS libraries and jax is not counted. This library may use two allocators at a
time: the sum of their peaks is an upper bound.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Call = Callable[[], Any]

# Keeps torch's profiler from reporting its own start and stop; read when torch is imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


class Cpu:
    """The host."""

    name = "cpu"
    xp: Any = np

    def synchronize(self) -> None:
        pass

    def put(self, library: str, x: Any) -> Any:
        """Bring an array, or a tuple of arrays, to a contestant's library."""
        if isinstance(x, tuple):
            return tuple(self.put(library, each) for each in x)
        if not isinstance(x, np.ndarray):
            return x
        if library == "float64":
            return x.astype(np.float64) if x.dtype.kind == "f" else x
        if library == "jax":
            import jax

            if x.dtype.kind == "f":
                jax.config.update("jax_enable_x64", x.dtype == np.float64)
            return jax.numpy.asarray(x)
        return self._tensor(x) if library == "torch" else self._array(x)

    def _array(self, x: Any) -> Any:
        return x

    def _tensor(self, x: Any) -> Any:
        import torch

        return torch.from_numpy(x)

    def peak(self, library: str, call: Call) -> tuple[int | None, Any]:
        """Run a call; return the most bytes that it held, and its result."""
        if library == "jax":
            return None, call()
        return _peak_of_torch(call) if library == "torch" else _peak_of_numpy(call)

    def describe(self) -> dict[str, Any]:
        return {}


class Cuda(Cpu):
    """The current CUDA device, by CuPy and by torch; float32 is multiplied without TF32."""

    name = "cuda"

    def __init__(self) -> None:
        os.environ["CUPY_TF32"] = "0"  # read when CuPy is imported
        import cupy
        import torch

        self.xp, self._torch = cupy, torch
        torch.set_float32_matmul_precision("highest")
        cupy.cuda.runtime.getDeviceProperties(0)  # raises where there is none

    def synchronize(self) -> None:
        self.xp.cuda.get_current_stream().synchronize()
        if self._torch.cuda.is_available():
            self._torch.cuda.synchronize()

    def _array(self, x: Any) -> Any:
        return self.xp.asarray(x)

    def _tensor(self, x: Any) -> Any:
        return self._torch.from_numpy(x).to("cuda")

    def peak(self, library: str, call: Call) -> tuple[int | None, Any]:
        gc.collect()
        statistics = self._torch.cuda
        statistics.reset_peak_memory_stats()
        before = statistics.memory_allocated()
        with counter(self.xp) as counted:
            value = call()
            self.synchronize()
        return counted.peak + statistics.max_memory_allocated() - before, value

    def describe(self) -> dict[str, Any]:
        runtime = self.xp.cuda.runtime
        name = runtime.getDeviceProperties(0)["name"].decode()
        return {"gpu": f"{name}, CUDA {runtime.runtimeGetVersion()}"}


def host(value: Any) -> Any:
    """Return a result, or a tuple of results, as NumPy arrays."""
    if isinstance(value, tuple):
        return tuple(map(host, value))
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        return value.numpy() if value.dtype.itemsize > 2 else value.double().numpy()
    return value.get() if hasattr(value, "get") else np.asarray(value)


def size(value: Any) -> int:
    """Return the bytes of a result."""
    if isinstance(value, tuple):
        return sum(map(size, value))
    return int(value.nbytes) if hasattr(value, "nbytes") else 0


def _peak_of_numpy(call: Call) -> tuple[int, Any]:
    gc.collect(1)  # all generations would take longer than most calls
    tracemalloc.start()
    try:
        result = call()
        return tracemalloc.get_traced_memory()[1], result
    finally:
        tracemalloc.stop()


def _peak_of_torch(call: Call) -> tuple[int, Any]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        of_numpy, result = _peak_of_numpy(call)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    memory = [event for event in events if event.get("name") == "[memory]"]
    in_use = peak = 0
    for event in sorted(memory, key=lambda event: event["ts"]):
        in_use += event["args"]["Bytes"]
        peak = max(peak, in_use)
    return of_numpy + peak, result


def counter(cupy: Any) -> Any:
    """Return a context manager that counts allocations from CuPy's pool."""

    class Counter(cupy.cuda.MemoryHook):  # type: ignore[misc]
        name = "Counter"

        def __init__(self) -> None:
            self.sizes: dict[int, int] = {}  # requested sizes by address
            self.in_use = self.peak = 0

        def malloc_postprocess(self, **of: Any) -> None:
            if of["mem_ptr"]:  # 0 where there was not enough memory
                self.sizes[of["mem_ptr"]] = of["size"]
                self.in_use += of["size"]
                self.peak = max(self.peak, self.in_use)

        def free_postprocess(self, **of: Any) -> None:
            # Memory that was allocated before the call does not count.
            self.in_use -= self.sizes.pop(of["mem_ptr"], 0)

    return Counter()
