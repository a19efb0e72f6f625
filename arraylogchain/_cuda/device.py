"""CUDA devices as the launching code sees them: where memory comes from and where kernels run.

Everything happens on the stream and in the memory pool of the library that the arrays are from, so
that its own tools see the truth: torch's peak memory, CuPy's memory hooks, both libraries' streams,
and graph capture. Only what happens once waits for the device: compiling a kernel, and copying
integers from the host.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from arraylogchain._core.context import Array, multiply_in_float64, torch_allows_tf32
from arraylogchain._cuda.kernels import Kernel, compiled, options, parameters

OLDEST_ARCHITECTURE = 75
NO_CUPY = "CuPy is not installed; for CUDA devices install the extra cuda12 or cuda13"
OLDEST_CUPY = (14, 2)  # the first whose cache on disk knows kernels by their template arguments

# One and zero, cuBLAS's scale factors.
_SCALARS: dict[str, Any] = {"s": (ctypes.c_float * 2)(1, 0), "d": (ctypes.c_double * 2)(1, 0)}
# Headers of CUDA that kernels include must be installed, too.
_PROBE = '#include <cuda_bf16.h>\n#include <cuda_fp16.h>\nextern "C" __global__ void probe() {}\n'


def refuse_capture(is_capturing: bool, missing: str) -> None:
    """Raise RuntimeError if a graph is being captured; `missing` is the rest of the message."""
    if is_capturing:
        raise RuntimeError(
            f"a CUDA graph is being captured, and {missing}; make the same call once before the "
            "capture"
        )


class Tables:
    """Copies on a device of integers of the host, such as lengths.

    The latest 64 are kept, and all that a captured graph reads.

    Parameters
    ----------
    is_capturing : callable
        Returns whether a graph is being captured.
    synchronize : callable
        Waits for the device: other streams may read a copy as soon as it is made.
    """

    def __init__(
        self, is_capturing: Callable[[], bool], synchronize: Callable[[], Any] = lambda: None
    ) -> None:
        self._is_capturing, self._synchronize = is_capturing, synchronize
        self._tables: dict[tuple[Any, ...], Array] = {}  # in order of use
        self._captured: set[tuple[Any, ...]] = set()
        self._lock = threading.Lock()

    def read(self, library: str, x: np.ndarray, copy: Callable[[np.ndarray], Array]) -> Array:
        """Return the copy of an array in a library's memory, made by `copy` if there is none."""
        key, is_capturing = (library, x.shape, x.dtype.str, x.tobytes()), self._is_capturing()
        with self._lock:
            table = self._tables.pop(key, None)
            if table is None:
                refuse_capture(is_capturing, "lengths have not been copied to the device")
                table = copy(x)
                self._synchronize()
            self._tables[key] = table
            if is_capturing:
                self._captured.add(key)
            if len(self._tables) > 64 + len(self._captured):
                del self._tables[next(x for x in self._tables if x not in self._captured)]
            return table


class Unavailable(str):
    """Why kernels cannot be used: a sentence without its full stop."""


class _NotNow(Unavailable):
    """A reason that may have passed by the next call."""


_devices: dict[tuple[str, int], Device | Unavailable] = {}


def find(library: str, device: Any) -> Device | Unavailable:
    """Return where kernels run for arrays of a library on one of its devices.

    Parameters
    ----------
    library : {'cupy', 'torch'}
        Whose memory and streams are used. CuPy compiles and starts the kernels of both.
    device : object
        A CUDA device, as the library names it.
    """
    if library not in ("cupy", "torch"):
        return Unavailable(f"there are kernels for arrays of CuPy and torch, not of {library}")
    index = device.id if library == "cupy" else device.index
    if index is None:
        index = sys.modules["torch"].cuda.current_device()
    result = _devices.get((library, index)) or _open(library, index)
    if not isinstance(result, _NotNow):
        _devices[library, index] = result
    return result


def _open(library: str, index: int) -> Device | Unavailable:
    """Return a device, having seen that it is there and that CuPy compiles for it."""
    try:
        cupy = importlib.import_module("cupy")
    except ModuleNotFoundError:
        return Unavailable(NO_CUPY)
    # It makes a folder for its cache, which may not be allowed, ...
    except Exception as error:
        return Unavailable(f"CuPy, which compiles the kernels, cannot be imported: {error}")
    numbers = re.match(r"(\d+)\.(\d+)", cupy.__version__)
    if numbers is not None and (int(numbers[1]), int(numbers[2])) < OLDEST_CUPY:
        return Unavailable(f"CuPy 14.2 or newer is needed, and this is {cupy.__version__}")
    if cupy.cuda.runtime.is_hip or (library == "torch" and sys.modules["torch"].version.hip):
        return Unavailable("the kernels are for CUDA, and this is a ROCm device")
    try:
        device = (Device if library == "cupy" else TorchDevice)(cupy, index)
    except RuntimeError as error:
        return _NotNow(f"CuPy cannot use CUDA device {index}: {_first_line(error)}")
    if device.architecture < OLDEST_ARCHITECTURE:
        return Unavailable(
            f"CUDA device {index} has compute capability {device.architecture / 10}, "
            f"and the kernels need {OLDEST_ARCHITECTURE / 10} or newer"
        )
    refuse_capture(device.is_capturing(), "no kernel has been loaded")
    # A missing or broken library is found out in many ways, an AssertionError among them.
    try:
        with cupy.cuda.Device(index):
            cupy.RawModule(code=_PROBE, options=options()).get_function("probe")
    except Exception as error:
        package = f"cupy-cuda{cupy.cuda.runtime.runtimeGetVersion() // 1000}x[ctk]"
        return Unavailable(
            f"CUDA's compiler NVRTC, or its headers, are missing or do not work; "
            f"pip install '{package}' brings them: {_first_line(error)}"
        )
    return device


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class Device:
    """A place where kernels run: on arrays of CuPy, in its memory pool and on its current stream.

    CuPy compiles and starts kernels for arrays of torch, too. As a context it makes the device
    current in this thread, as `load`, `run`, `empty` and `multiply` need: `Context.computing`
    enters it.

    Attributes
    ----------
    multiprocessors : int
    shared_memory : int
        Most bytes that a block may have.
    architecture : int
        The compute capability, 90 for 9.0.
    usable : dict of Kernel to bool
        Whether kernels that have been loaded and checked can be used.
    tables : Tables
        Integers of the host that have been copied to the device.
    """

    def __init__(self, cupy: Any, index: int) -> None:
        self._cupy: Any = cupy
        self._torch: Any = sys.modules.get("torch")
        self._index = index
        self._current = cupy.cuda.Device(index)
        attributes = self._current.attributes
        self.multiprocessors = int(attributes["MultiProcessorCount"])
        self.shared_memory = int(attributes["MaxSharedMemoryPerBlockOptin"])
        self.architecture = int(self._current.compute_capability)
        self.usable: dict[Kernel, bool] = {}
        self.tables = Tables(self.is_capturing, self._current.synchronize)

    def __enter__(self) -> None:
        self._current.__enter__()
        self._current.use()  # the driver needs it in each thread, if it is current already, too

    def __exit__(self, *error: object) -> None:
        self._current.__exit__(*error)

    @property
    def identity(self) -> str:
        """The model of the device, and versions of the driver, NVRTC and CuPy."""
        cuda = self._cupy.cuda
        name = cuda.runtime.getDeviceProperties(self._index)["name"].decode()
        nvrtc = ".".join(map(str, cuda.nvrtc.getVersion()))
        driver, cupy = cuda.runtime.driverGetVersion(), self._cupy.__version__
        return f"{name}, driver {driver}, NVRTC {nvrtc}, CuPy {cupy}"

    def run(
        self,
        kernel: Kernel,
        grid: int,
        block: int,
        arguments: tuple[Any, ...],
        shared_memory: int = 0,
    ) -> None:
        """Queue a kernel on the library's current stream; this does not wait for it.

        It calls the driver, as CuPy's own launch takes four times as long.

        Parameters
        ----------
        kernel : Kernel
        grid, block : int
            Blocks, and threads in a block, along one axis.
        arguments : tuple
            The kernel's arguments. Structs, as bytes, and NumPy scalars, of exactly the
            parameter's type, are passed by value, None as a null pointer. Arrays of the device's
            library are passed as pointers to their first entry.
        shared_memory : int
            Bytes of dynamic shared memory for each block.
        """
        driver = self._cupy.cuda.driver
        function = compiled(kernel, self._index, self.shared_memory)
        memory = parameters([self._value(x) for x in arguments])
        sizes = grid, 1, 1, block, 1, 1, shared_memory
        address = ctypes.addressof(memory)
        driver.launchKernel(function.ptr, *sizes, self._stream(), address, 0)

    def _value(self, argument: Any) -> bytes:
        """Return the bytes of an argument."""
        if isinstance(argument, bytes):
            return argument
        if isinstance(argument, np.generic):
            return argument.tobytes()
        return self.pointer(argument).to_bytes(8, sys.byteorder)

    def load(self, kernel: Kernel) -> None:
        """Make a kernel ready to run: while a graph is captured, none can be loaded."""
        compiled(kernel, self._index, self.shared_memory)

    def is_capturing(self) -> bool:
        """Return whether the library's current stream is capturing a graph."""
        try:
            with self._current:
                return self._captures()
        except RuntimeError:
            # Another thread captures, in a mode in which no thread may load a kernel.
            return True

    def _gemm(self, a: Array, b: Array) -> Array | None:
        """Return a product by cuBLAS on CuPy's current stream.

        None where cuBLAS does not read arrays as they are. CuPy's own `matmul` copies transposed
        batches, and may use TF32.
        """
        shapes = [tuple(map(int, x.shape)) for x in (a, b)]
        (rows, terms), columns = shapes[0][-2:], shapes[1][-1]
        batch = np.broadcast_shapes(*(shape[:-2] for shape in shapes))
        left, right = (
            _blas_layout(*x) for x in zip(shapes, map(self.strides, (a, b)), strict=True)
        )
        if left is None or right is None or len(batch) > 1 or 0 in (rows, columns, terms):
            return None
        (op_a, lda, step_a), (op_b, ldb, step_b) = left, right
        if max(rows, columns, terms, lda, ldb, *batch) >= 2**31:
            return None
        cublas = importlib.import_module("cupy_backends.cuda.libs.cublas")
        letter, dtype = ("d", "float64") if a.dtype == np.float64 else ("s", "float32")
        out = self.empty((*batch, rows, columns), dtype)
        one = ctypes.addressof(_SCALARS[letter])
        zero = one + ctypes.sizeof(_SCALARS[letter]) // 2
        # cuBLAS has columns first: it computes out' = b' a'.
        sizes = self._cupy.cuda.device.get_cublas_handle(), op_b, op_a, columns, rows, terms, one
        pointers = [self.pointer(x) for x in (b, a, out)]
        if batch in ((), (1,)):
            inputs = pointers[0], ldb, pointers[1], lda
            getattr(cublas, f"{letter}gemm")(*sizes, *inputs, zero, pointers[2], columns)
        else:
            batches = pointers[0], ldb, step_b, pointers[1], lda, step_a
            result = pointers[2], columns, rows * columns, *batch
            getattr(cublas, f"{letter}gemmStridedBatched")(*sizes, *batches, zero, *result)
        return out

    def _stream(self) -> int:
        """Return the library's current stream on the device."""
        return int(self._cupy.cuda.get_current_stream().ptr)

    def _captures(self) -> bool:
        """Return whether the library's current stream, on the current device, captures a graph."""
        return bool(self._cupy.cuda.get_current_stream().is_capturing())

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Return new memory from the library's pool, for use on its current stream."""
        return self._cupy.empty(shape, np.dtype(dtype))

    def pointer(self, x: Array | None) -> int:
        """Return the address of the first entry of an array; 0 for None."""
        return 0 if x is None else int(x.data.ptr)

    def strides(self, x: Array) -> tuple[int, ...]:
        """Return the strides of an array in elements."""
        return tuple(step // x.dtype.itemsize for step in x.strides)

    def multiply(self, a: Array, b: Array) -> Array:
        """Queue a matrix multiply, at least in float32: no switch makes it TF32."""
        if (out := self._gemm(a, b)) is not None:
            return out
        if a.dtype == np.float32 and os.environ.get("CUPY_TF32") == "1":
            return multiply_in_float64(array_namespace(a), a, b)
        return self._cupy.matmul(a, b)


class TorchDevice(Device):
    """A place for arrays of torch: its caching allocator, and its current stream on the device."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        device = self._torch.device("cuda", self._index)
        return self._torch.empty(shape, dtype=getattr(self._torch, dtype), device=device)

    def pointer(self, x: Array | None) -> int:
        return 0 if x is None else int(x.data_ptr())

    def strides(self, x: Array) -> tuple[int, ...]:
        return x.stride()  # type: ignore[no-any-return]

    def multiply(self, a: Array, b: Array) -> Array:
        torch = self._torch
        if a.dtype != torch.float32 or not torch_allows_tf32():
            return torch.matmul(a, b)
        if not self.is_capturing():  # CuPy does not call cuBLAS then
            cuda = self._cupy.cuda
            # As a context, a stream would leave another one behind than `use` made current.
            before = cuda.get_current_stream()
            cuda.Stream.from_external(_Stream(self._stream())).use()
            try:
                if (out := self._gemm(a, b)) is not None:
                    return out
            finally:
                before.use()
        return multiply_in_float64(array_namespace(a), a, b)

    def _stream(self) -> int:
        return int(self._torch.cuda.current_stream(self._index).cuda_stream)

    def _captures(self) -> bool:
        return bool(self._torch.cuda.is_current_stream_capturing())


def _blas_layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Return how cuBLAS reads a matrix or a batch: whether transposed, and both of its strides.

    Its columns are our rows: a matrix with contiguous rows is not transposed.
    """
    (rows, columns), (row, column) = shape[-2:], strides[-2:]
    batch = strides[0] if len(shape) == 3 and shape[0] > 1 else 0
    if len(shape) > 3 or batch < 0:
        return None
    if (column == 1 or columns == 1) and (row >= columns or rows == 1):
        return 0, row if rows > 1 else columns, batch
    if (row == 1 or rows == 1) and (column >= rows or columns == 1):
        return 1, column if columns > 1 else rows, batch
    return None


@dataclass(frozen=True, slots=True)
class _Stream:
    """A stream by CUDA's protocol, which not every version of torch speaks itself."""

    ptr: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr
