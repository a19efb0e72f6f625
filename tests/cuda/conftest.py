"""The CPU as a device, and what has to be installed for the tests of kernels."""

from __future__ import annotations

import importlib
import shutil
import sys

import pytest

from tests.conftest import _import, _is_required
from tests.cuda.cpu_compiler import COMPILER
from tests.cuda.cpu_device import CpuDevice

# One order that is kind to missing barriers, the opposite one, and one shuffled order of each kind.
SEEDS = (0, 1, 2, 3)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "sanitized: test_memory_errors.py runs this test under AddressSanitizer as well"
    )


def need(name: str, is_there: bool, reason: str) -> None:
    """Skip a test where something is missing; fail if CI or ALC_REQUIRE_BACKENDS requires it."""
    if is_there:
        return
    if _is_required(name):
        pytest.fail(f"{reason}; CI or ALC_REQUIRE_BACKENDS requires it")
    pytest.skip(reason)


@pytest.fixture
def compiler() -> None:
    is_there = sys.platform == "linux" and shutil.which(COMPILER) is not None
    need("g++", is_there, f"kernels run on the CPU on Linux with {COMPILER}")


@pytest.fixture(params=SEEDS, ids="seed{}".format)
def device(request: pytest.FixtureRequest, compiler: None) -> CpuDevice:
    return CpuDevice(seed=request.param)


@pytest.fixture(scope="session")
def nvrtc_library() -> None:
    cupy = _import("cupy")
    need("cupy", not isinstance(cupy, ImportError), f"cupy cannot be imported: {cupy}")
    try:
        importlib.import_module("cupy_backends.cuda.libs.nvrtc").getVersion()
    except RuntimeError as error:
        need("cupy", False, f"NVRTC cannot be loaded: {error}")
