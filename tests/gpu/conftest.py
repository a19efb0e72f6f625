"""Fixtures of the tests on a GPU; without one, they are skipped module by module."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import Backend, make_backend, required, why_no_cuda
from tests.gpu.streams import Streams, streams_of


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes minutes, or most of a GPU's memory")


class WithoutDevice(pytest.Module):
    """A module that is imported, so that it does not rot, and skipped as a whole."""

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        assert self.obj is not None
        reasons = [why_no_cuda(library) for library in ("cupy", "torch")]
        pytest.skip(" and ".join(reason for reason in reasons if reason), allow_module_level=True)


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    if "cuda" in required() or not (why_no_cuda("cupy") and why_no_cuda("torch")):
        return None
    return WithoutDevice.from_parent(parent, path=module_path)


@pytest.fixture(autouse=True)
def no_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off the self-check, whose fallback, memory and waits would hide those of the calls."""
    monkeypatch.setenv("ARRAYLOGCHAIN_SELF_CHECK", "0")


@pytest.fixture
def cupy() -> ModuleType:
    return make_backend("cupy").xp


@pytest.fixture
def torch() -> ModuleType:
    return make_backend("torch-cuda").xp


@pytest.fixture
def streams(backend: Backend) -> Streams:
    """Streams of the backend's library; whatever was queued is done when a test begins."""
    streams = streams_of(backend)
    streams.wait()
    return streams
