"""Memory that a call takes from the pool of its library on a device."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from benchmarks.devices import counter
from tests.conftest import Backend


def nbytes(*arrays: Any) -> int:
    return sum(int(x.nbytes) for x in arrays if x is not None)


def peak(backend: Backend, call: Callable[[], Any]) -> tuple[int, Any]:
    """Return the peak memory of a call in the pool, including its results, and the results."""
    gc.collect()
    return (_peak_of_cupy if backend.library == "cupy" else _peak_of_torch)(backend.xp, call)


def in_use(backend: Backend) -> int:
    """Return the bytes that arrays take now."""
    gc.collect()
    if backend.library == "cupy":
        return int(backend.xp.get_default_memory_pool().used_bytes())
    return int(backend.xp.cuda.memory_allocated())


def held(backend: Backend) -> int:
    """Return the bytes that the pool has taken from the device, in use or not."""
    gc.collect()
    if backend.library == "cupy":
        return int(backend.xp.get_default_memory_pool().total_bytes())
    return int(backend.xp.cuda.memory_reserved())


def let_go(backend: Backend) -> None:
    """Return unused memory of the pool to the device."""
    gc.collect()
    if backend.library == "cupy":
        backend.xp.get_default_memory_pool().free_all_blocks()
    else:
        backend.xp.cuda.empty_cache()


def _peak_of_torch(torch: Any, call: Callable[[], Any]) -> tuple[int, Any]:
    # Bytes asked for; those allocated count the unused rest of each block as well.
    name = "requested_bytes.all"
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()[f"{name}.current"]
    results = call()
    return torch.cuda.memory_stats()[f"{name}.peak"] - before, results


def _peak_of_cupy(cupy: Any, call: Callable[[], Any]) -> tuple[int, Any]:
    with counter(cupy) as counted:
        results = call()
    return counted.peak, results
