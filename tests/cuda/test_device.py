"""Calls of CuPy and torch for memory and for kernels.

No device is needed: all tests but the last use stand-ins for the two libraries, which record their
calls. The tests in tests/gpu use the libraries themselves.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from arraylogchain._cuda import device as device_module
from arraylogchain._cuda import kernels
from arraylogchain._cuda.device import Device, TorchDevice, Unavailable, find
from arraylogchain._cuda.kernels import Kernel, Struct
from arraylogchain._inputs import arrays
from tests.chain_scenarios import normal
from tests.conftest import import_or_skip

ATTRIBUTES = {"MultiProcessorCount": 132, "MaxSharedMemoryPerBlockOptin": 232448}


class CUDARuntimeError(RuntimeError):
    """As CuPy's."""


class FakeFunction:
    """A kernel that records its launches."""

    shared_size_bytes = 1024

    def __init__(self, cupy: FakeCupy, name: str) -> None:
        self.cupy, self.name = cupy, name
        self.max_dynamic_shared_size_bytes = 0

    @property
    def kernel(self) -> FakeFunction:
        return self

    @property
    def ptr(self) -> int:
        """An address by which `launchKernel` knows the function."""
        self.cupy.functions[id(self)] = self
        return id(self)


class FakeCupy(ModuleType):
    """The functions of CuPy that the package calls, with two devices."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.__version__ = "14.2.0"
        self.devices, self.set, self.stream = [0], [0], "CuPy's"
        self.compiled: list[tuple[str, int]] = []
        self.launches: list[Any] = []
        self.functions: dict[int, FakeFunction] = {}
        self.made: list[Any] = []
        self.compute_capability = "90"
        self.captures = False
        fake = self

        class Device:
            def __init__(self, index: int) -> None:
                self.id, self.compute_capability = index, fake.compute_capability
                self.attributes = ATTRIBUTES

            def __enter__(self) -> Device:
                fake.devices.append(self.id)
                return self

            def __exit__(self, *_: object) -> None:
                fake.devices.pop()

            def use(self) -> None:
                fake.set.append(self.id)

            def synchronize(self) -> None:
                pass

        class Stream:
            def __init__(self, name: str) -> None:
                self.name, self.ptr = name, 600

            @classmethod
            def from_external(cls, stream: Any) -> Stream:
                return cls(f"stream {stream.__cuda_stream__()} of device {fake.devices[-1]}")

            def use(self) -> None:
                fake.stream = self.name

            def is_capturing(self) -> bool:
                return fake.captures

        self.cuda = SimpleNamespace(
            Device=Device,
            Stream=Stream,
            get_current_stream=lambda: Stream(fake.stream),
            runtime=SimpleNamespace(
                is_hip=False,
                getDeviceProperties=lambda index: {"name": b"NVIDIA H%d" % index},
                driverGetVersion=lambda: 13000,
                runtimeGetVersion=lambda: 12090,
                CUDARuntimeError=CUDARuntimeError,
            ),
            nvrtc=SimpleNamespace(getVersion=lambda: (13, 0)),
            driver=SimpleNamespace(launchKernel=self.launch),
        )

    def launch(self, function: int, *given: int) -> None:
        """Record a launch, with the first eight bytes of each parameter."""
        *sizes, shared, stream, parameters, extra = given
        assert self.set[-1] == self.devices[-1]
        assert extra == 0
        first = ctypes.c_int64.from_address(parameters).value  # right behind the addresses
        addresses = (ctypes.c_int64 * ((first - parameters) // 8)).from_address(parameters)
        values = [ctypes.string_at(x, 8) for x in addresses]
        where = (self.devices[-1], stream)
        self.launches.append((self.functions[function], where, tuple(sizes), values, shared))

    def RawModule(self, *, code: str, options: Any, name_expressions: Any = None) -> Any:  # noqa: N802
        def get_function(name: str) -> FakeFunction:
            self.compiled.append((name, self.devices[-1]))
            return FakeFunction(self, name)

        return SimpleNamespace(get_function=get_function)

    def empty(self, shape: Any, dtype: Any) -> Any:
        self.made.append((shape, dtype, self.devices[-1]))
        return np.empty(shape, dtype)


@dataclass
class FakeTensor:
    pointer: int
    dtype: str = "torch.bfloat16"

    def data_ptr(self) -> int:
        return self.pointer

    def stride(self) -> tuple[int, ...]:
        return (0, -3, 1)


@dataclass
class FakeTorch(ModuleType):
    """The functions of torch that the package calls."""

    made: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__("torch")
        self.Tensor = FakeTensor
        self.float32, self.bfloat16, self.int64 = "torch.float32", "torch.bfloat16", "torch.int64"
        self.version = SimpleNamespace(hip=None)
        self.cuda = SimpleNamespace(
            current_device=lambda: 1,
            current_stream=lambda index: SimpleNamespace(cuda_stream=700 + index),
            device=lambda index: sys.modules["cupy"].cuda.Device(index),
            is_current_stream_capturing=lambda: sys.modules["cupy"].captures,
        )

    def device(self, kind: str, index: int) -> Any:
        return SimpleNamespace(type=kind, index=index)

    def empty(self, shape: Any, *, dtype: Any, device: Any) -> Any:
        self.made.append((shape, dtype, device.type, device.index))
        return FakeTensor(5000)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Let no test find the devices and kernels of another."""
    clears = device_module._devices.clear, kernels.compiled.cache_clear
    for clear in clears:
        clear()
    yield
    for clear in clears:
        clear()


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    fake = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", fake)
    return fake


def launch(device: Any, *arguments: Any, kernel: str = "f<float>") -> None:
    with device:
        device.run(Kernel("f.cu", kernel), 70000, 256, arguments, 100)


def test_cupy_s_memory_and_stream_are_used_on_the_arrays_device(cupy):
    result = find("cupy", cupy.cuda.Device(1))
    assert isinstance(result, Device)
    assert find("cupy", cupy.cuda.Device(1)) is result
    assert (result.multiprocessors, result.shared_memory, result.architecture) == (132, 232448, 90)
    assert result.identity == "NVIDIA H1, driver 13000, NVRTC 13.0, CuPy 14.2.0"
    with result:
        x = result.empty((2, 3), "float16")
    assert cupy.made == [((2, 3), np.float16, 1)]
    assert result.strides(x.T[::-1]) == (-1, 3)
    array = SimpleNamespace(data=SimpleNamespace(ptr=5000))
    launch(result, array, np.int32(5), Struct((np.int32, "rows n")).pack(rows=3), None)
    ((kernel, where, sizes, received, shared),) = cupy.launches
    assert (kernel.name, where) == ("f<float>", (1, 600))  # CuPy's own current one
    assert (sizes, shared) == ((70000, 1, 1, 256, 1, 1), 100)
    assert received == [x.to_bytes(8, sys.byteorder) for x in (5000, 5, 3, 0)]
    assert cupy.devices == [0]


def test_kernels_are_compiled_once_for_each_device(cupy):
    for index in (0, 1, 1, 0):
        result = find("cupy", cupy.cuda.Device(index))
        for kernel in ("f<float>", "f<double>"):
            launch(result, None, kernel=kernel)
    compiled = [entry for entry in cupy.compiled if entry[0] != "probe"]
    assert compiled == [("f<float>", 0), ("f<double>", 0), ("f<float>", 1), ("f<double>", 1)]
    # Static shared memory counts against the limit of a block.
    assert {k.max_dynamic_shared_size_bytes for k, *_ in cupy.launches} == {232448 - 1024}


def test_tables_are_copied_once_and_kept_for_graphs():
    captures, copies = [False], []

    def copy(x: np.ndarray) -> np.ndarray:
        copies.append(x.tolist())
        return x.copy()

    tables = device_module.Tables(lambda: captures[0])
    first = tables.read("numpy", np.arange(3), copy)
    assert tables.read("numpy", np.arange(3), copy) is first
    captures[0] = True
    assert tables.read("numpy", np.arange(3), copy) is first
    with pytest.raises(RuntimeError, match="once before the capture"):
        tables.read("numpy", np.arange(4), copy)
    captures[0] = False
    for n in range(100, 200):
        tables.read("numpy", np.arange(n), copy)
    assert tables.read("numpy", np.arange(3), copy) is first
    tables.read("numpy", np.arange(100), copy)
    assert len(copies) == 102


def test_tables_are_copied_once_for_all_threads():
    """A graph that was captured must not lose its copy to another thread's."""
    copies = []

    def copy(x: np.ndarray) -> np.ndarray:
        copies.append(x.copy())
        return copies[-1]

    def is_capturing() -> bool:
        time.sleep(0.001)  # lets the other threads in
        return False

    tables = device_module.Tables(is_capturing, lambda: time.sleep(0.001))
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: tables.read("numpy", np.arange(3), copy), range(40)))
    assert len(copies) == 1
    assert all(x is copies[0] for x in results)


def test_torch_s_memory_and_stream_are_used(cupy, torch):
    result = find("torch", torch.device("cuda", 1))
    assert isinstance(result, TorchDevice)
    assert find("torch", torch.device("cuda", None)) is result  # the current one
    x = result.empty((2, 3), "bfloat16")
    assert torch.made == [((2, 3), "torch.bfloat16", "cuda", 1)]
    assert cupy.made == []
    assert result.strides(x) == (0, -3, 1)

    launch(result, x, np.float32(2))
    ((_, where, _, arguments, _),) = cupy.launches
    assert where == (1, 701)
    assert arguments[0] == (5000).to_bytes(8, sys.byteorder)
    assert arguments[1] == np.float32([2, 0]).tobytes()
    assert (cupy.devices, cupy.stream) == ([0], "CuPy's")


def raising(error: Exception) -> Callable[..., Any]:
    def function(*_: object, **__: object) -> Any:
        raise error

    return function


def test_reasons(cupy, torch, monkeypatch):
    def reason() -> str:
        device_module._devices.clear()
        result = find("cupy", SimpleNamespace(id=0))
        assert isinstance(result, Unavailable)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(cupy, "compute_capability", "70")
        assert reason() == (
            "CUDA device 0 has compute capability 7.0, and the kernels need 7.5 or newer"
        )
    with monkeypatch.context() as patch:
        patch.setattr(cupy.cuda, "Device", raising(RuntimeError("cudaErrorNoDevice: none\nmore")))
        assert reason() == "CuPy cannot use CUDA device 0: cudaErrorNoDevice: none"
    assert isinstance(find("cupy", SimpleNamespace(id=0)), Device)  # asked again
    with monkeypatch.context() as patch:
        patch.setattr(cupy.cuda.runtime, "is_hip", True)
        assert "ROCm" in reason()
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "hip", "6.0")
        assert "ROCm" in find("torch", torch.device("cuda", 0))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "cupy", None)
        assert reason() == device_module.NO_CUPY
    for version in ("13.6.0", "14.1.2", "14.0.0rc1", "9.2"):
        monkeypatch.setattr(cupy, "__version__", version)
        assert reason() == f"CuPy 14.2 or newer is needed, and this is {version}"
    assert find("dask", None) == "there are kernels for arrays of CuPy and torch, not of dask"


@pytest.mark.parametrize("version", ["14.2.0", "14.10.1", "15.0.0b1", "of somebody"])
def test_later_versions_of_cupy_will_do(cupy, version):
    cupy.__version__ = version
    assert isinstance(find("cupy", SimpleNamespace(id=0)), Device)


def test_cupy_s_import_may_fail_in_any_way(torch, tmp_path, monkeypatch):
    """It makes the folder of its cache, which may not be allowed."""
    (tmp_path / "cupy.py").write_text("raise PermissionError('no such luck')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    assert find("torch", torch.device("cuda", 1)) == (
        "CuPy, which compiles the kernels, cannot be imported: no such luck"
    )


@pytest.mark.parametrize("error", [OSError("no cuda_fp16.h"), AssertionError(), RuntimeError("?")])
def test_a_compiler_that_is_not_there_is_asked_once(cupy, monkeypatch, error):
    """NVRTC or its headers; what to install is for the CUDA that is there."""
    with monkeypatch.context() as patch:
        patch.setattr(cupy, "RawModule", raising(error))
        reason = find("cupy", SimpleNamespace(id=0))
        assert isinstance(reason, Unavailable)
        assert "pip install 'cupy-cuda12x[ctk]'" in reason
        assert reason.endswith(f": {str(error) or type(error).__name__}")
    assert find("cupy", SimpleNamespace(id=0)) is reason


def test_a_capture_by_another_thread_is_one(cupy, monkeypatch):
    stream = SimpleNamespace(is_capturing=raising(CUDARuntimeError("StreamCaptureImplicit")))
    device = find("cupy", SimpleNamespace(id=0))
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: stream)
    assert not isinstance(device, Unavailable)
    assert device.is_capturing()
    with pytest.raises(RuntimeError, match="once before the capture"):
        find("cupy", SimpleNamespace(id=1))


class FakeCublas(ModuleType):
    """Multiplies in the CPU's memory, by the definition of cuBLAS; notes dtypes and streams."""

    def __init__(self, cupy: Any) -> None:
        super().__init__("cublas")
        self.cupy, self.calls = cupy, []
        for letter, kind in (("s", np.float32), ("d", np.float64)):
            setattr(self, f"{letter}gemm", partial(self.single, kind))
            setattr(self, f"{letter}gemmStridedBatched", partial(self.batched, kind))

    def single(self, kind: Any, *given: int) -> None:
        handle, ops, sizes, one = given[0], given[1:3], given[3:6], given[6]
        a, lda, b, ldb, zero, c, ldc = given[7:]
        self.batched(kind, handle, *ops, *sizes, one, a, lda, 0, b, ldb, 0, zero, c, ldc, 0, 1)

    def batched(self, kind: Any, *given: int) -> None:
        handle, op_a, op_b, m, n, k, one, a, lda, step_a = given[:10]
        b, ldb, step_b, zero, c, ldc, step_c, batch = given[10:]
        assert handle == 77
        self.calls.append((kind, self.cupy.stream))

        def view(pointer: int, rows: int, columns: int, ld: int, step: int) -> np.ndarray:
            assert ld >= max(1, rows)
            memory = (ctypes.c_char * (1 << 20)).from_address(pointer)
            item = np.dtype(kind).itemsize
            first = np.frombuffer(memory, kind, 1)
            strides = step * item, item, ld * item
            return np.lib.stride_tricks.as_strided(first, (batch, rows, columns), strides)

        scalars = [view(x, 1, 1, 1, 0)[0, 0, 0] for x in (one, zero)]
        assert scalars == [1, 0]
        left = view(a, k, m, lda, step_a).mT if op_a else view(a, m, k, lda, step_a)
        right = view(b, n, k, ldb, step_b).mT if op_b else view(b, k, n, ldb, step_b)
        view(c, m, n, ldc, step_c)[...] = left @ right


@pytest.fixture
def cublas(cupy, monkeypatch) -> FakeCublas:
    fake = FakeCublas(cupy)
    for name in ("cupy_backends", "cupy_backends.cuda", "cupy_backends.cuda.libs"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs.cublas", fake)
    cupy.cuda.device = SimpleNamespace(get_cublas_handle=lambda: 77)
    for device in (Device, TorchDevice):
        monkeypatch.setattr(device, "pointer", lambda self, x: x.ctypes.data)
        steps = lambda self, x: tuple(step // x.itemsize for step in x.strides)  # noqa: E731
        monkeypatch.setattr(device, "strides", steps)
    return fake


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_multiplies_of_float32_are_no_tf32(cupy, torch, cublas, monkeypatch, library):
    """Whatever the libraries' switches are: cuBLAS multiplies on the library's stream."""
    monkeypatch.setenv("CUPY_TF32", "1")
    torch.backends = SimpleNamespace(
        cuda=SimpleNamespace(matmul=SimpleNamespace(fp32_precision="tf32"))
    )
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, **_: np.empty(shape, dtype))
    torch.float32 = np.float32
    device = find(library, SimpleNamespace(id=1, index=1))
    assert not isinstance(device, Unavailable)
    with device:
        product = device.multiply(np.ones((2, 3), np.float32), np.ones((3, 2), np.float32))
    assert product.dtype == np.float32
    assert (product == 3).all()
    stream = "CuPy's" if library == "cupy" else "stream (0, 701) of device 1"
    assert cublas.calls == [(np.float32, stream)]
    assert cupy.stream == "CuPy's"


@pytest.mark.parametrize(
    ("precision", "captures"), [("highest", False), ("highest", True), ("high", True)]
)
def test_torch_multiplies_itself_unless_it_would_drop_bits(monkeypatch, precision, captures):
    """While a graph is captured CuPy cannot call cuBLAS, and torch multiplies in float64."""
    torch, dtypes = pytest.importorskip("torch"), []
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace())
    matmul = torch.matmul
    monkeypatch.setattr(torch, "matmul", lambda a, b: (dtypes.append(a.dtype), matmul(a, b))[1])
    device = object.__new__(TorchDevice)
    device._torch, device._cupy = torch, SimpleNamespace(cuda=None)
    device.is_capturing = lambda: captures
    product = device.multiply(torch.ones(2, 3, 4), torch.ones(2, 4, 3))
    assert product.dtype == torch.float32
    assert (product == 4).all()
    assert dtypes == [torch.float64 if precision == "high" else torch.float32]


@pytest.mark.parametrize("left", ["ijk", "ikj"])
@pytest.mark.parametrize("right", ["ijk", "ikj"])
@pytest.mark.parametrize(
    "shape", [(3, 4, 5, 6), (1, 4, 5, 6), (3, 1, 5, 6), (3, 4, 1, 6), (3, 4, 5, 1)]
)
def test_multiplies_of_transposed_batches_copy_nothing(cupy, cublas, dtype, left, right, shape):
    batch, rows, terms, columns = shape
    a, b = (normal(batch, *x).astype(dtype) for x in ((rows, terms), (terms, columns)))
    exact = a.astype(float) @ b
    a, b = (
        np.ascontiguousarray(x.mT).mT if order == "ikj" else x
        for x, order in ((a, left), (b, right))
    )
    device = find("cupy", SimpleNamespace(id=1))
    cases = [(a, b, exact), (a[0], b[0], exact[0]), (a[:1], b, a[:1].astype(float) @ b)]
    for x, y, product in cases:
        np.testing.assert_allclose(device.multiply(x, y), product, rtol=1e-5, atol=1e-5)
    assert len(cublas.calls) == 3


def test_multiplies_that_cublas_does_not_read_are_the_library_s(cupy, cublas, monkeypatch):
    monkeypatch.setattr(cupy, "matmul", np.matmul, raising=False)
    device = find("cupy", SimpleNamespace(id=1))
    a = normal(4, 6)[:, ::2]
    np.testing.assert_allclose(device.multiply(a, a.T), a @ a.T)
    monkeypatch.setenv("CUPY_TF32", "1")
    monkeypatch.setattr(cupy, "matmul", None)
    a = normal(4, 6).astype(np.float32)[:, ::2]
    np.testing.assert_array_equal(device.multiply(a, a.T), (a.astype(float) @ a.T).astype("f4"))
    assert cublas.calls == []


# What either of torch's two switches says (the newer one is not in every version), and CuPy's.
SWITCHES = [
    ("torch", {"fp32_precision": "none"}, "highest", "0", False),
    ("torch", {"fp32_precision": "ieee"}, RuntimeError(), "1", False),
    ("torch", {"fp32_precision": "tf32"}, RuntimeError(), "0", True),
    ("torch", {}, "highest", "0", False),
    ("torch", {}, "high", "0", True),
    ("cupy", {}, "high", "0", False),
    ("cupy", {}, "highest", "1", True),
]


@pytest.mark.parametrize(("library", "new", "old", "cupy_tf32", "drops_bits"), SWITCHES)
def test_multiply_with_a_switch_for_tf32_keeps_all_bits(
    torch, monkeypatch, library, new, old, cupy_tf32, drops_bits
):
    """Array operations use another multiply for float32 if their library would drop bits."""

    def precision() -> str:
        if isinstance(old, str):
            return old
        raise old

    torch.get_float32_matmul_precision = precision
    torch.backends = SimpleNamespace(cuda=SimpleNamespace(matmul=SimpleNamespace(**new)))
    monkeypatch.setenv("CUPY_TF32", cupy_tf32)
    names = SimpleNamespace(**vars(np) | {"__name__": f"array_api_compat.{library}"})
    names.matmul = lambda a, b: (a @ b).astype(np.float16).astype(a.dtype)
    names.astype = lambda x, dtype: x.astype(dtype)
    x, y = np.float32([[1 / 3]]), np.ones((1, 1), np.float32)
    device = SimpleNamespace(multiply=np.matmul)
    ctx = replace(arrays._numpy_context("float32"), xp=names, device="cuda:0", kernels=device)
    assert (ctx.multiply(x, y) == x) == drops_bits
    names.matmul = lambda a, b: (a @ b) * (a.dtype == np.float64)
    assert (replace(ctx, kernels=None).multiply(x, y) == x) == drops_bits


def test_captures_are_seen(cupy, torch):
    """Nothing is copied into a graph, and no kernel is checked."""
    devices = find("torch", torch.device("cuda", 1)), find("cupy", SimpleNamespace(id=1))
    assert not any(device.is_capturing() for device in devices)
    cupy.captures = True
    assert all(device.is_capturing() for device in devices)


def test_torch_hears_which_stream_reads(torch, monkeypatch):
    read: list[int] = []
    x = SimpleNamespace(record_stream=lambda stream: read.append(stream.cuda_stream))
    context = arrays._numpy_context("float32")
    context.record_stream(x)
    assert read == []
    names = SimpleNamespace(__name__="array_api_compat.torch")
    replace(context, xp=names, device=1).record_stream(x)
    assert read == []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=7))
    replace(context, xp=names, device="cuda:1").record_stream(x, x)
    assert read == [7, 7]


def test_without_a_device_cupy_itself_is_the_reason():
    if import_or_skip("cupy").cuda.is_available():
        pytest.skip("there is a device")
    result = find("cupy", SimpleNamespace(id=0))
    assert isinstance(result, Unavailable)
    assert result.startswith("CuPy cannot use CUDA device 0: cudaError")
