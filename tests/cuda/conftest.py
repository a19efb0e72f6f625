"""The CPU as a device, and the requirements of the tests of kernels."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from arraylogchain._core.context import Context
from arraylogchain._inputs import arrays
from tests.conftest import skip_or_fail
from tests.cuda.cpu_compiler import COMPILER
from tests.cuda.cpu_device import CpuDevice

# One order that is kind to missing barriers, the opposite one, and one shuffled order of each kind.
SEEDS = (0, 1, 2, 3)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "sanitized: test_memory_errors.py runs this test under AddressSanitizer as well"
    )


@pytest.fixture(autouse=True)
def no_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off the check of kernels on first use, which takes long on a CPU."""
    monkeypatch.setenv("ARRAYLOGCHAIN_SELF_CHECK", "0")


@pytest.fixture
def compiler() -> None:
    if sys.platform != "linux" or shutil.which(COMPILER) is None:
        skip_or_fail("g++", f"kernels run on the CPU on Linux with {COMPILER}")


# Only the last is a test that is not exhaustive: a shuffled order that is not kind.
SEED_PARAMS = [pytest.param(seed, marks=pytest.mark.exhaustive) for seed in SEEDS[:-1]]
SEED_PARAMS.append(pytest.param(SEEDS[-1]))


@pytest.fixture(params=SEED_PARAMS, ids="seed{}".format)
def device(request: pytest.FixtureRequest, compiler: None) -> Iterator[CpuDevice]:
    device = CpuDevice(seed=request.param)
    with device:
        yield device


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], Any]]:
    """Return a function that lets a device, or none, run kernels for arrays on the CPU."""

    def forget() -> None:
        arrays._numpy_context.cache_clear()

    def on(device: Any) -> Any:
        monkeypatch.setattr(arrays, "_kernels_for", lambda *_: device)
        # Shortcuts for NumPy arrays are not taken for arrays on a device.
        is_numpy = property(lambda ctx: ctx.xp is np and ctx.kernels is None)
        monkeypatch.setattr(Context, "is_numpy", is_numpy)
        forget()
        return device

    yield on
    monkeypatch.undo()
    forget()


@pytest.fixture
def kernels(use: Callable[[Any], Any], compiler: None) -> CpuDevice:
    """Let kernels compute with NumPy arrays, and with torch tensors on the CPU."""
    device: CpuDevice = use(CpuDevice(seed=3))
    return device
