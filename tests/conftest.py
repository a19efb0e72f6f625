"""Backends of all tests, and settings of the property tests."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, NoReturn

# Each of several processes has one core; libraries read this when they are loaded.
if "PYTEST_XDIST_WORKER" in os.environ:
    for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(_name, "1")

import array_api_compat
import hypothesis
import numpy as np
import pytest

from arraylogchain import _select
from arraylogchain._chains import passes
from tests import selection

hypothesis.settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    max_examples=100,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("suite")

# Library, device and dtypes. The device without float64 detects code that requires it.
# array-api-strict 2.6.1 also has a device without 64-bit integers, where its argmax fails.
CPU_BACKENDS = {
    "numpy": ("numpy", None, ("float16", "float32", "float64")),
    "strict": ("array_api_strict", "CPU_DEVICE", ("float32", "float64")),
    "strict-no_float64": ("array_api_strict", "no_float64", ("float32",)),
    "torch": ("torch", "cpu", ("float16", "bfloat16", "float32", "float64")),
}
# The same for a GPU. CuPy itself has no bfloat16.
CUDA_BACKENDS = {
    "cupy": ("cupy", 0, ("float16", "float32", "float64")),
    "torch-cuda": ("torch", "cuda:0", ("float16", "bfloat16", "float32", "float64")),
}
ON_CUDA = os.environ.get("ALC_TEST_DEVICE") == "cuda"
# Backends of the fixture `backend`; tests without it do not depend on ALC_TEST_DEVICE.
BACKENDS = CUDA_BACKENDS if ON_CUDA else CPU_BACKENDS
FULL_PRECISION = ("float32", "float64")
# Without Numba, chains run on the array implementation anyway.
HAS_NUMBA = importlib.util.find_spec("numba") is not None


@dataclass(frozen=True)
class Backend:
    """A library of arrays on one device: makes arrays for a test and reads results."""

    name: str
    xp: ModuleType
    device: Any
    dtypes: tuple[str, ...]
    # Factor of the error bound of a product.
    roundings: float = 1.0

    @property
    def library(self) -> str:
        return self.xp.__name__

    @property
    def adds_in_order(self) -> bool:
        """Whether entries with the same index are added in the same order each time."""
        return self.device is None or "cuda" not in str(self.device).lower()

    def asarray(self, x: Any, dtype: str | None = None) -> Any:
        """Return a new array of `dtype`, or of x's own; NumPy's are read-only."""
        host = np.array(x)
        dtype = dtype or host.dtype.name
        if self.library == "torch":
            return self.xp.from_numpy(host).to(self.device, getattr(self.xp, dtype))
        host = host.astype(dtype)
        if self.library == "numpy":
            host.flags.writeable = False
            return host
        if self.library == "cupy":
            with self.device:
                return self.xp.asarray(host)
        return self.xp.asarray(host, device=self.device)

    def to_numpy(self, x: Any) -> np.ndarray:
        if self.library == "numpy":
            return x
        if self.library == "cupy":
            return x.get()
        if self.library == "torch":
            x = (x.float() if x.dtype is self.xp.bfloat16 else x).cpu()
        return np.from_dlpack(x)

    def owns(self, x: Any) -> bool:
        """Return whether x is an array on this device, or a NumPy scalar if it has no axes."""
        if self.library == "numpy" and not x.ndim:
            return isinstance(x, np.generic)
        kind = type(self.asarray(np.zeros(1, np.float32)))
        device = array_api_compat.device(x) if type(x) is kind else None
        return type(x) is kind and (self.device is None or device == self.device)

    @staticmethod
    def dtype_name(x: Any) -> str:
        return str(getattr(x.dtype, "name", x.dtype)).rpartition(".")[2]

    def read(self, x: Any, dtype: str) -> np.ndarray:
        """Return a result as a NumPy array, having checked its library, device and dtype."""
        assert self.owns(x), f"{type(x)} is no array of {self.name}"
        assert self.dtype_name(x) == dtype
        return self.to_numpy(x)


def required() -> list[str]:
    """Return required names: libraries, ``g++``, or ``cuda`` for a CUDA device."""
    return os.environ.get("ALC_REQUIRE_BACKENDS", "").replace(",", " ").split()


# Tests of tables, of which one in so many runs by default; the others are exhaustive.
ONE_IN = {
    "tests/cuda/test_count_launches.py::test_call_takes_few_launches_and_never_waits": 3,
    "tests/cuda/test_public.py::test_gradients": 3,
    "tests/cuda/test_public.py::test_scenario": 16,
    "tests/cuda/test_public.py::test_samples_are_those_of_array_operations": 8,
    "tests/cuda/test_public.py::test_chains": 4,
    "tests/cuda/test_public.py::test_drifting_chains": 2,
    "tests/cuda/test_recursions.py::test_layouts": 2,
    "tests/cuda/test_first_contact.py::test_array_operations_replace_any_one_kernel": 3,
    "tests/test_chain_gradients.py::test_cotangents": 3,
    "tests/test_compiled_recursion.py::test_weights_and_entries_about_the_least": 4,
    "tests/test_product_table.py::test_gradients": 2,
    "tests/test_state.py::test_pullback_after_changes_of_what_was_returned_gives_the_same": 2,
    "tests/test_workspace.py::test_chains": 4,
    "tests/test_workspace.py::test_best_paths": 4,
    "tests/test_dask.py::test_products": 24,
    "tests/test_dask.py::test_chains": 60,
    "tests/test_dask.py::test_what_chunks_of_time_hand_over": 4,
} | ({} if ON_CUDA else {"tests/test_chain_table.py::test_scenario": 5})
# Parts of names of tests of long chains, and of many or wide rows.
LONG = ("shards", "drifting", "widen", "disconnected", "identity", "leaving", "many rows")
LONG = (*LONG, "K = 40", "K = 130", "2000")
LONGEST_ID = 80


def skip_or_fail(name: str, reason: str) -> NoReturn:
    """Skip a test that lacks a library, compiler or device; fail if it is required."""
    if name in required():
        pytest.fail(f"{reason}; ALC_REQUIRE_BACKENDS requires it")
    pytest.skip(reason)


def import_or_skip(library: str) -> ModuleType:
    """Import a library; if this fails, skip the test, or fail if the library is required."""
    module = _import(library)
    if isinstance(module, ImportError):
        skip_or_fail(library.partition(".")[0], f"{library} cannot be imported: {module}")
    return module


@cache
def _import(library: str) -> ModuleType | ImportError:
    try:
        return importlib.import_module(library)
    except ImportError as error:
        return error


def make_backend(name: str) -> Backend:
    """Return a backend; if it is missing, skip the test, or fail if it is required."""
    library, device, dtypes = (CPU_BACKENDS | CUDA_BACKENDS)[name]
    if name in CUDA_BACKENDS and (reason := why_no_cuda(library)):
        if ON_CUDA:
            pytest.fail(f"{reason}; ALC_TEST_DEVICE asks for CUDA")
        skip_or_fail("cuda", reason)
    module = import_or_skip(library)
    if library == "cupy":
        device = module.cuda.Device(device)
    elif device is not None:
        device = module.Device(device) if library == "array_api_strict" else module.device(device)
    return Backend(name, module, device, dtypes)


def why_not_there(library: str) -> str | None:
    """Return the reason why a library cannot be used, or None."""
    module = _import(library)
    return f"{library} cannot be imported: {module}" if isinstance(module, ImportError) else None


def why_missing(name: str) -> str | None:
    """Return the reason why a library, or the compiler g++, is missing, or None."""
    if name == "g++":
        return None if shutil.which(name) else "g++ is not installed"
    return why_not_there(name)


def why_no_cuda(library: str) -> str | None:
    """Return the reason why a library cannot use a CUDA device, or None."""
    if reason := why_not_there(library):
        return reason
    with warnings.catch_warnings():
        # torch also warns if the driver is missing or too old.
        warnings.simplefilter("ignore")
        is_available = _import(library).cuda.is_available()
    return None if is_available else f"{library} finds no CUDA device"


def pytest_addoption(parser: pytest.Parser) -> None:
    selection.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "exhaustive: takes long; left out by default, see CONTRIBUTING"
    )
    config.addinivalue_line(
        "markers", "chains: of chains; runs on compiled loops, and on the array implementation"
    )
    if not hasattr(config, "workerinput"):
        if file := config.getoption("passed"):
            config.pluginmanager.register(selection.Passed(file))
        reasons = [why_missing(name) for name in required() if name != "cuda"]
        if any(reasons):
            missing = " and ".join(reason for reason in reasons if reason)
            raise pytest.UsageError(f"{missing}; ALC_REQUIRE_BACKENDS requires it")
    requested = os.environ.get("ALC_TEST_DEVICE", "cpu")
    if requested not in ("cpu", "cuda"):
        raise pytest.UsageError(f"ALC_TEST_DEVICE is {requested!r}; it can be cpu or cuda")
    reasons = [why_no_cuda(library) for library, _, _ in CUDA_BACKENDS.values()] if ON_CUDA else []
    if reasons and all(reasons):
        raise pytest.UsageError(f"ALC_TEST_DEVICE asks for CUDA, but {' and '.join(reasons)}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark most tests of tables, and long ones that repeat others, as exhaustive.

    array-api-strict runs long tests only on its device without float64, where they take seconds,
    and of scenarios with both linear and log weights only the linear ones. Tensors have the
    backends of NumPy's arrays, and run the tables in float64 and half precision only.
    """
    long = [item for item in items if any(word in item.name for word in LONG)]
    for item in long:
        is_cut = "shards" in item.name and "float32" in item.name
        if is_cut or "strict" in item.name or "torch-" in item.name:
            item.add_marker(pytest.mark.exhaustive)
    for item in items:
        is_log = "strict" in item.name and item.name.endswith(" logs]")
        is_float32 = "torch-float32" in item.name and item.path.name.endswith("_table.py")
        if is_log or is_float32:
            item.add_marker(pytest.mark.exhaustive)
    for item in items:
        share = ONE_IN.get(item.nodeid.partition("[")[0], 1)
        if selection.digest("", item.nodeid)[0] % share:
            item.add_marker(pytest.mark.exhaustive)
    twice = {item for item in long if "strict-float64" in item.name}
    config.hook.pytest_deselected(items=list(twice))
    items[:] = [item for item in items if item not in twice]
    selection.select(config, items)


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Name the argument in the id of a number, a flag, a container or an error, such as `sd=30`."""
    label = f"{argname}={val!r}" if _is_plain(val) else ""
    return label if 0 < len(label) <= LONGEST_ID else None


def _is_plain(x: object) -> bool:
    """Return whether the representation of x is short and the same in each process."""
    if isinstance(x, dict):
        x = list(x.values())
    if isinstance(x, tuple | list):
        return all(isinstance(item, str) or _is_plain(item) for item in x)
    if isinstance(x, Exception):
        return _is_plain(x.args)
    return x is None or isinstance(x, int | float | slice)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Backend:
    return make_backend(request.param)


@pytest.fixture(autouse=True)
def chains_on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run chains on compiled loops where selected, on these without whole chains, or on arrays."""
    chosen = getattr(request, "param", "compiled")
    monkeypatch.setattr(_select, "COMPILED", chosen != "array")
    monkeypatch.setattr(_select, "FUSED", chosen != "segments")


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that limits the steps of the segments of chains."""
    plan_shards = passes.plan_shards

    def limit(steps: int) -> None:
        def plan(*sizes: Any) -> Any:
            plan = plan_shards(*sizes)
            return plan._replace(steps=min(plan.steps, steps))

        monkeypatch.setattr(passes, "plan_shards", plan)

    return limit


@pytest.fixture(params=["numpy"])
def np_backend(request) -> Backend:
    return make_backend(request.param)


@pytest.fixture
def torch_backend() -> Backend:
    return make_backend("torch")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize tests over all backends and dtypes of their arguments `backend`, `dtype`, `half`.

    `dtype` is a full precision, `half` one of float16 and bfloat16, each where the device has it.
    Tests with their own parameters are unchanged. Tests in tests/gpu run on a GPU only.

    Tests of chains run on compiled loops, on these without whole chains in one call, and on the
    array implementation: those that ask for `backend` have two more, "numpy-segments" and
    "numpy-array"; the others run again, as exhaustive tests.
    array-api-strict is slow: where a dtype is asked for, its device without float64 has float32,
    and the other has float64, in exhaustive tests.
    """
    backends = CUDA_BACKENDS if metafunc.definition.path.parent.name == "gpu" else BACKENDS
    is_chain = metafunc.definition.get_closest_marker("chains") is not None
    on_both = is_chain and HAS_NUMBA and backends is CPU_BACKENDS
    chosen = metafunc.definition.iter_markers("parametrize")
    chooses = any("backend" in mark.args[0] for mark in chosen)
    asks = "backend" in metafunc.fixturenames and not chooses
    if on_both and not asks:
        others = [pytest.param(way, marks=pytest.mark.exhaustive) for way in ("segments", "array")]
        metafunc.parametrize("chains_on", ["compiled", *others], indirect=True)
    if chooses:
        return
    kinds = {"dtype": FULL_PRECISION, "half": ("float16", "bfloat16")}
    requested = next((name for name in kinds if name in metafunc.fixturenames), None)
    if not asks:
        if requested:
            metafunc.parametrize(requested, kinds[requested])
        return
    runs = [(name, "compiled", name) for name in backends]
    if on_both:
        runs[1:1] = [("numpy", way, f"numpy-{way}") for way in ("array", "segments")]
    indirect, again = ["backend", "chains_on"], ("segments", "float32")
    if not requested:
        rows = [pytest.param(backend, way, id=label) for backend, way, label in runs]
        metafunc.parametrize(indirect, rows, indirect=True)
        return
    rows = [
        pytest.param(
            backend,
            way,
            dtype,
            id=f"{label}-{dtype}",
            marks=[pytest.mark.exhaustive] if backend == "strict" or again == (way, dtype) else [],
        )
        for backend, way, label in runs
        for dtype in kinds[requested]
        if dtype in backends[backend][2] and (backend, dtype) != ("strict", "float32")
    ]
    metafunc.parametrize([*indirect, requested], rows, indirect=indirect)
