"""What is available on this machine, and the devices that `python -m arraylogchain` computes on."""

from __future__ import annotations

import importlib
import os
import platform
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import array_api_compat
import numpy as np

from arraylogchain import __version__, _compiled
from arraylogchain._context import Array
from arraylogchain._cuda import records
from arraylogchain._cuda.device import Device as KernelDevice
from arraylogchain._cuda.device import Unavailable, find
from arraylogchain._text import duration
from arraylogchain._threads import num_workers


class UnavailableError(RuntimeError):
    """A library or a device that was asked for cannot be used; the message says why."""


@dataclass(slots=True)
class Peak:
    """Most bytes that were allocated at one time."""

    size: int = 0


@dataclass(frozen=True, slots=True)
class Device:
    """A place to compute.

    Attributes
    ----------
    name : str
    put, get : callable
        Bring a NumPy array there, and a result back.
    wait : callable
        Return when all work is done.
    trace : callable
        A context that yields a `Peak`, valid when the context is left.
    """

    name: str
    put: Callable[[Any], Array]
    get: Callable[[Array], Any]
    wait: Callable[[], object]
    trace: Callable[[], Any]


def open_device(name: str) -> Device:
    """Return the device `cpu` or `cuda`; raise UnavailableError where there is none."""
    if name == "cpu":
        return Device("cpu", np.asarray, np.asarray, lambda: None, _trace_cpu)
    cupy = _usable_cupy()
    return Device(
        name=_cuda_name(cupy),
        put=cupy.asarray,
        get=cupy.asnumpy,
        wait=cupy.cuda.get_current_stream().synchronize,
        trace=lambda: _trace_cuda(cupy),
    )


@contextmanager
def _trace_cpu() -> Iterator[Peak]:
    peak = Peak()
    tracemalloc.start()
    try:
        yield peak
    finally:
        peak.size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()


@contextmanager
def _trace_cuda(cupy: Any) -> Iterator[Peak]:
    peak = Peak()

    class Meter(cupy.cuda.MemoryHook):  # type: ignore[misc]
        name = "arraylogchain"
        in_use = 0

        def malloc_postprocess(self, *, mem_size: int, **_: object) -> None:
            self.in_use += mem_size
            peak.size = max(peak.size, self.in_use)

        def free_postprocess(self, *, mem_size: int, **_: object) -> None:
            self.in_use -= mem_size

    with Meter():
        yield peak


def describe() -> str:
    """Say what computes here. Imports Numba, CuPy and torch where they are installed."""
    found = {
        "numpy": np.__version__,
        "array-api-compat": array_api_compat.__version__,
        "numba": _describe_numba(),
        "cupy": _describe_cupy(),
        "torch": _describe_torch(),
        "threads": f"{num_workers()} of {os.cpu_count()} CPU cores",
    }
    width = max(map(len, found))
    lines = [
        f"arraylogchain {__version__} on Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}",
        *(f"  {name:<{width}}  {text}" for name, text in found.items()),
    ]
    return "\n".join(lines)


def _describe_numba() -> str:
    if reason := _compiled.why_not():
        return f"array operations ({reason})"
    return f"{importlib.import_module('numba').__version__}, compiled loops for chains"


def _describe_cupy() -> str:
    try:
        cupy = _import("cupy", "install the extra cuda12 or cuda13")
        name, found = _cuda_name(_usable_cupy()), find("cupy", cupy.cuda.Device())
        measured = [] if isinstance(found, Unavailable) else timings(found)
        text = f"{cupy.__version__}, {name}, {_what_computes(found)}"
        return "\n    measured: ".join([text, *measured])
    except UnavailableError as reason:
        return str(reason)


def _describe_torch() -> str:
    try:
        torch = _import("torch", "install the extra torch")
    except UnavailableError as reason:
        return str(reason)
    if not torch.cuda.is_available() or not torch.cuda.device_count():
        return f"{torch.__version__}, CPU only"
    found = find("torch", torch.device("cuda"))
    return f"{torch.__version__}, {torch.cuda.get_device_name()}, {_what_computes(found)}"


def _what_computes(found: KernelDevice | Unavailable) -> str:
    """Say what computes on a CUDA device, and why it is not the kernels if it is not."""
    return f"array operations ({found})" if isinstance(found, Unavailable) else "CUDA kernels"


def timings(device: KernelDevice) -> list[str]:
    """Return what implementations take on a device, which takes the fastest."""
    names = {"cuda": "kernel", "cuda.tensor_cores": "tensor cores", "array": "array operations"}
    return [
        f"{fact['subject']}: "
        + ", ".join(f"{names[key]} {duration(t)}" for key, t in fact["seconds"].items())
        for fact in records.of_device(device.identity)
        if "seconds" in fact
    ]


def _usable_cupy() -> Any:
    cupy = _import("cupy", "install the extra cuda12 or cuda13")
    try:
        cupy.cuda.runtime.getDeviceCount()
        cupy.zeros(1)
    except RuntimeError as error:
        raise UnavailableError(
            f"{cupy.__version__}, but no device can be used: {_first_line(error)}"
        ) from error
    return cupy


def _cuda_name(cupy: Any) -> str:
    device = cupy.cuda.Device()
    properties = cupy.cuda.runtime.getDeviceProperties(device.id)
    return f"cuda:{device.id} {properties['name'].decode()}"


def _import(name: str, remedy: str) -> ModuleType | Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise UnavailableError(f"cannot be imported: {_first_line(error)}") from error
        raise UnavailableError(f"not installed ({remedy})") from error
    except (ImportError, OSError, RuntimeError) as error:
        raise UnavailableError(f"cannot be imported: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
