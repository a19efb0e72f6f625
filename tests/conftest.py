"""The libraries that every test can run on, and the settings of the property tests."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

# Processes side by side have one core each; the libraries read this as they are loaded.
if "PYTEST_XDIST_WORKER" in os.environ:
    for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(_name, "1")

import array_api_compat
import hypothesis
import numpy as np
import pytest

hypothesis.settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    max_examples=100,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("suite")

# (library, device) and the dtypes to test there. The device without float64 catches code that
# silently counts on it. array-api-strict has a device without 64-bit integers as well, but its
# own argmax, nonzero and count_nonzero fail there (2.6.1).
BACKENDS = {
    "numpy": ("numpy", None, ("float16", "float32", "float64")),
    "strict": ("array_api_strict", "CPU_DEVICE", ("float32", "float64")),
    "strict-no_float64": ("array_api_strict", "no_float64", ("float32",)),
    "torch": ("torch", "cpu", ("float16", "bfloat16", "float32", "float64")),
}
FULL_PRECISION = ("float32", "float64")


@dataclass(frozen=True)
class Backend:
    """A library of arrays on one device: makes arrays for a test and reads results."""

    name: str
    xp: ModuleType
    device: Any
    dtypes: tuple[str, ...]

    def asarray(self, x: Any, dtype: str | None = None) -> Any:
        """Return a new array of `dtype`, or of x's own; NumPy's are read-only."""
        host = np.array(x)
        dtype = dtype or host.dtype.name
        if self.name == "torch":
            return self.xp.from_numpy(host).to(getattr(self.xp, dtype))
        host = host.astype(dtype)
        if self.name == "numpy":
            host.flags.writeable = False
            return host
        return self.xp.asarray(host, device=self.device)

    def to_numpy(self, x: Any) -> np.ndarray:
        if self.name == "numpy":
            return x
        if self.name == "torch" and x.dtype is self.xp.bfloat16:
            x = x.float()
        return np.from_dlpack(x)

    def owns(self, x: Any) -> bool:
        """Tell whether x is an array of this library on this device."""
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


def _is_required(library: str) -> bool:
    required = os.environ.get("ALC_REQUIRE_BACKENDS", "").replace(",", " ").split()
    return library in required or bool(os.environ.get("CI"))


@cache
def _import(library: str) -> ModuleType | ImportError:
    try:
        return importlib.import_module(library)
    except ImportError as error:
        return error


def make_backend(name: str) -> Backend:
    """Return a backend; where its library cannot be imported, skip, or fail if it is required."""
    library, device, dtypes = BACKENDS[name]
    module = _import(library)
    if isinstance(module, ImportError):
        reason = f"{library} cannot be imported: {module}"
        if _is_required(library):
            pytest.fail(f"{reason}; CI or ALC_REQUIRE_BACKENDS requires it")
        pytest.skip(reason)
    if device is not None:
        device = module.Device(device) if library == "array_api_strict" else module.device(device)
    return Backend(name, module, device, dtypes)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Backend:
    return make_backend(request.param)


@pytest.fixture
def np_backend() -> Backend:
    return make_backend("numpy")


@pytest.fixture
def torch_backend() -> Backend:
    return make_backend("torch")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests that ask for `backend`, `dtype` or `half` on all there are, in all combinations.

    `dtype` is a full precision, `half` one of float16 and bfloat16, each where the device has it.
    Tests that choose among them themselves are left alone.
    """
    chosen = metafunc.definition.iter_markers("parametrize")
    if any("backend" in mark.args[0] for mark in chosen):
        return
    kinds = {"dtype": FULL_PRECISION, "half": ("float16", "bfloat16")}
    asked = [name for name in kinds if name in metafunc.fixturenames]
    if "backend" not in metafunc.fixturenames:
        for name in asked:
            metafunc.parametrize(name, [d for d in kinds[name] if d in BACKENDS["numpy"][2]])
    elif not asked:
        metafunc.parametrize("backend", list(BACKENDS), indirect=True)
    else:
        (name,) = asked
        pairs = [
            (backend, dtype)
            for backend, (_, _, dtypes) in BACKENDS.items()
            for dtype in kinds[name]
            if dtype in dtypes
        ]
        metafunc.parametrize(("backend", name), pairs, indirect=["backend"])
