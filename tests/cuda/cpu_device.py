"""A device for the package's launches that runs the kernels' own source on the CPU."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from arraylogchain._cuda import modules
from arraylogchain._cuda.launch import Kernel, Launch, is_struct
from tests.cuda.cpu_compiler import KernelError, compile_for_cpu
from tests.cuda.instantiations import INSTANTIATIONS


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
        What has been run.
    multiprocessors, shared_memory, architecture : int
        Those of some device; tests may set others before they make launches.
    """

    multiprocessors = 4
    shared_memory = 227 << 10
    architecture = 90
    identity = "a CPU"
    captures = False  # a graph, for which nothing is copied and no kernel loaded

    def __init__(
        self,
        seed: int = 0,
        options: tuple[str, ...] | list[str] = (),
        *,
        flush_to_zero: bool = False,
        folder: Path = modules.FOLDER,
    ) -> None:
        self.seed = seed
        self.options = tuple(options)
        self.flush_to_zero = flush_to_zero
        self.folder = folder
        self.launches: list[Launch] = []
        self.launched: set[Kernel] = set()
        self.loaded: set[tuple[str, ...]] = set()
        self.checked: dict[tuple[str, str], int] = {}
        self.measured: dict[str, dict[str, float] | None] = {}
        self._ready: set[tuple[str, str]] = set()

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """Return an array of NaN: what no kernel has written shows."""
        format = np.dtype("uint16" if dtype == "bfloat16" else dtype)
        memory = np.full(math.prod(shape) * format.itemsize, 0xFF, np.uint8)
        return memory.view(format).reshape(shape)

    def strides(self, x: np.ndarray) -> tuple[int, ...]:
        return tuple(step // x.itemsize for step in x.strides)

    def dtype_name(self, x: np.ndarray) -> str:
        return "bfloat16" if x.dtype == np.uint16 else x.dtype.name

    def is_capturing(self) -> bool:
        return self.captures

    def copied(self, numbers: np.ndarray) -> np.ndarray:
        return numbers.copy()

    def load(self, source: str, kernel: str) -> None:
        if self.captures and (source, kernel) not in self._ready:
            raise KernelError(f"{kernel} of {source} would be loaded while a graph is captured")
        self._ready.add((source, kernel))

    def seconds(self, run: Callable[[], object]) -> float:
        """Return a second for each launch."""
        before = len(self.launches)
        run()
        return float(len(self.launches) - before)

    def run(self, launch: Launch) -> None:
        """Run a launch to its end; raise KernelError where a device would hang or refuse it."""
        known = INSTANTIATIONS.get(launch.source, ())
        if self.folder == modules.FOLDER and launch.kernel not in known:
            # test_compile.py would not have compiled it.
            raise KernelError(f"{launch.kernel} of {launch.source} is in no INSTANTIATIONS")
        self.load(launch.source, launch.kernel)
        library = _library(launch.source, launch.kernel, self.options, self.folder)
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
        self.launched.add(Kernel(launch.source, launch.kernel))
        if library.shim_launch(header, pointers, len(packed), sizes):
            raise KernelError(f"{launch.kernel}: {library.shim_failure().decode()}")


def _pack(argument: Any) -> np.ndarray:
    """Return the bytes of an argument as CuPy passes it to a kernel."""
    if argument is None:
        return np.zeros((), np.uint64)
    if is_struct(argument) or isinstance(argument, np.generic):
        return np.array(argument)
    if isinstance(argument, np.ndarray):
        return np.array(argument.ctypes.data, np.uint64)
    raise KernelError(
        f"a {type(argument).__name__} as an argument, whose type on a device CuPy would guess; "
        f"use a NumPy scalar"
    )


@cache
def _library(source: str, kernel: str, options: tuple[str, ...], folder: Path) -> ctypes.PyDLL:
    """Return a kernel compiled for the CPU. PyDLL keeps the lock: the scheduler is global."""
    library = ctypes.PyDLL(str(compile_for_cpu(source, kernel, options, folder)))
    library.shim_failure.restype = ctypes.c_char_p
    return library


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Return float32 numbers as bfloat16, in the bits of a uint16 array."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def from_bfloat16(x: np.ndarray) -> np.ndarray:
    """Return the float32 numbers that uint16 bits of bfloat16 stand for."""
    return (np.asarray(x).astype(np.uint32) << 16).view(np.float32)
