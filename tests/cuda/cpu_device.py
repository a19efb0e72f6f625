"""A device for the package's launches that runs the kernels' own source on the CPU."""

from __future__ import annotations

import ctypes
import math
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import array_api_compat.numpy as numpy_namespace
import numpy as np

from arraylogchain._core.context import Context
from arraylogchain._cuda import kernels
from arraylogchain._cuda.device import Tables
from arraylogchain._cuda.kernels import Kernel
from arraylogchain._inputs import arrays
from tests.cuda.cpu_compiler import KernelError, compile_for_cpu


class Launch(NamedTuple):
    """A launch that has been run."""

    kernel: Kernel
    grid: int
    block: int
    arguments: tuple[Any, ...]
    shared_memory: int = 0


class CpuDevice:
    """Arrays of NumPy, and kernels run by tests/cuda/cuda_shim.h.

    Parameters
    ----------
    seed : int
        Chooses the order in which threads run, see `Order` in shim/blocks.h: 0 warp by warp,
        1 lane by lane from the last, larger ones shuffled, the even ones warp by warp.
    options : sequence of str
        Further flags for the compiler, e.g. ``["-DMISSING_BARRIER"]``.
    flush_to_zero : bool
        Whether subnormal numbers become 0, as in float32 on a device. On the CPU float64 goes
        with it: for kernels that compute in float32 alone.
    folder : Path
        Where the sources are.

    Attributes
    ----------
    launches : list of Launch
        Launches that have been run.
    multiprocessors, shared_memory, architecture : int
        Those of some device; tests may set others before they make launches.
    """

    multiprocessors = 4
    shared_memory = 227 << 10
    architecture = 90
    identity = "a CPU"
    captures = False  # a graph, for which no kernel is loaded

    def __init__(
        self,
        seed: int = 0,
        options: tuple[str, ...] | list[str] = (),
        *,
        flush_to_zero: bool = False,
        folder: Path = kernels.FOLDER,
    ) -> None:
        self.seed = seed
        self.options = tuple(options)
        self.flush_to_zero = flush_to_zero
        self.folder = folder
        self.launches: list[Launch] = []
        self.usable: dict[Kernel, bool] = {}
        self.loaded: list[Kernel] = []
        self.tables = Tables(self.is_capturing)
        self.depth: ContextVar[int] = ContextVar("depth")  # of contexts of the device

    def __enter__(self) -> None:
        self.depth.set(self.depth.get(0) + 1)

    def __exit__(self, *_: object) -> None:
        self.depth.set(self.depth.get() - 1)

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """Return an array of NaN, so that entries without a result show."""
        if not self.depth.get(0):
            raise KernelError("no context has made the device current")
        format = np.dtype(dtype)
        memory = np.full(math.prod(shape) * format.itemsize, 0xFF, np.uint8)
        return memory.view(format).reshape(shape)

    def pointer(self, x: np.ndarray | None) -> int:
        return 0 if x is None else x.ctypes.data

    def strides(self, x: np.ndarray) -> tuple[int, ...]:
        return tuple(step // x.itemsize for step in x.strides)

    def multiply(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a @ b

    def is_capturing(self) -> bool:
        return self.captures

    def load(self, kernel: Kernel) -> None:
        if self.captures:
            raise KernelError(f"{kernel.name} would be loaded while a graph is captured")
        self.loaded.append(kernel)

    def run(self, *sizes_and_arguments: Any) -> None:
        """Run a launch to its end; raise KernelError where a device would hang or refuse it."""
        launch = Launch(*sizes_and_arguments)
        library = _library(launch.kernel, self.options, self.folder)
        packed = [_pack(argument) for argument in launch.arguments]
        pointers = (ctypes.c_void_p * len(packed))(*(x.ctypes.data for x in packed))
        sizes = (ctypes.c_int * len(packed))(*(x.nbytes for x in packed))
        header = (ctypes.c_longlong * 6)(
            launch.grid,
            launch.block,
            launch.shared_memory,
            self.shared_memory,
            self.seed,
            self.flush_to_zero,
        )
        self.launches.append(launch)
        if library.shim_launch(header, pointers, len(packed), sizes):
            raise KernelError(f"{launch.kernel.name}: {library.shim_failure().decode()}")


def _pack(argument: Any) -> np.ndarray:
    """Return the bytes of an argument as a kernel takes it."""
    if argument is None:
        return np.zeros((), np.uint64)
    if isinstance(argument, bytes):
        return np.frombuffer(argument, np.uint8)
    if isinstance(argument, np.generic):
        return np.array(argument)
    if isinstance(argument, np.ndarray):
        return np.array(argument.ctypes.data, np.uint64)
    raise KernelError(f"a {type(argument).__name__} as an argument; use a NumPy scalar")


@cache
def _library(kernel: Kernel, options: tuple[str, ...], folder: Path) -> ctypes.PyDLL:
    """Return a kernel compiled for the CPU. PyDLL keeps the lock: the scheduler is global."""
    library = ctypes.PyDLL(str(compile_for_cpu(*kernel, options, folder)))
    library.shim_failure.restype = ctypes.c_char_p
    return library


def context(device: CpuDevice, dtype: str) -> Context:
    """Return the context of NumPy arrays whose kernels run on a device; bfloat16 is ml_dtypes'."""
    if dtype != "bfloat16":
        return replace(arrays._numpy_context(dtype), kernels=device)
    namespace = ModuleType("array_api_compat.numpy")
    vars(namespace).update(vars(numpy_namespace), bfloat16=np.dtype("bfloat16"))
    ctx = arrays._numpy_context("float32")
    return replace(ctx, kernels=device, result_name=dtype, xp=namespace)
