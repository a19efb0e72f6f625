"""A device for the package's launches that runs the kernels' own source on the CPU."""

from __future__ import annotations

import ctypes
import math
import subprocess
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from arraylogchain._cuda import modules
from arraylogchain._cuda.device import Remembered
from arraylogchain._cuda.launch import Kernel, Launch, is_struct
from tests.cuda.cpu_compiler import WAVEFRONT_FLAGS, KernelError, compile_for_cpu
from tests.cuda.instantiations import INSTANTIATIONS


class Access(NamedTuple):
    """What a line of a kernel's source does in shared memory."""

    kernel: str
    place: str  # file:line
    is_store: bool


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
    counts_wavefronts : bool
        Whether `wavefronts` is filled in. Kernels then take several times as long.

    Attributes
    ----------
    launches : list of Launch
        What has been run.
    wavefronts : dict
        By `Access`: instructions of a warp, wavefronts of shared memory, and how many of these
        are conflicts of banks. See shim/wavefronts.h.
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
        counts_wavefronts: bool = False,
    ) -> None:
        self.seed = seed
        self.options = (*options, *(WAVEFRONT_FLAGS if counts_wavefronts else ()))
        self.wavefronts: dict[Access, np.ndarray] = defaultdict(lambda: np.zeros(3, np.int64))
        self.flush_to_zero = flush_to_zero
        self.folder = folder
        self.launches: list[Launch] = []
        self.remembered = Remembered()
        self._ready: set[tuple[str, str]] = set()

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """Return an array of NaN: what no kernel has written shows."""
        format = np.dtype("uint16" if dtype == "bfloat16" else dtype)
        memory = np.full(math.prod(shape) * format.itemsize, 0xFF, np.uint8)
        return memory.view(format).reshape(shape)

    def pointer(self, x: np.ndarray) -> int:
        return x.ctypes.data

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
        self.remembered.launched.add(Kernel(launch.source, launch.kernel))
        if library.shim_launch(header, pointers, len(packed), sizes):
            raise KernelError(f"{launch.kernel}: {library.shim_failure().decode()}")
        if WAVEFRONT_FLAGS[0] in self.options:
            self._count(launch.kernel, library)

    def _count(self, kernel: str, library: ctypes.PyDLL) -> None:
        table = np.zeros((4096, 5), np.int64)
        table = table[: library.shim_wavefronts(table.ctypes.data_as(ctypes.c_void_p))]
        places = _places(library._name, tuple(map(hex, table[:, 0].tolist())))
        for place, (_, is_store, *counts) in zip(places, table.tolist(), strict=True):
            self.wavefronts[Access(kernel, place, bool(is_store))] += counts


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


@cache
def _places(library: str, addresses: tuple[str, ...]) -> list[str]:
    """Return the lines of the source that addresses in a library are of."""
    command = ("addr2line", "-e", library, *addresses)
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # "/path/products/thin.cu:12 (discriminator 3)"
    return [line.partition(" ")[0] for line in found.splitlines()]


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Return float32 numbers as bfloat16, in the bits of a uint16 array."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def from_bfloat16(x: np.ndarray) -> np.ndarray:
    """Return the float32 numbers that uint16 bits of bfloat16 stand for."""
    return (np.asarray(x).astype(np.uint32) << 16).view(np.float32)
