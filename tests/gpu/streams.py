"""Streams of CuPy and torch under the same names, and kernels that only take time."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from tests.conftest import Backend

# No GPU's clock is faster, so that a count of cycles takes at least the requested time.
_CYCLES_PER_MS = 2_500_000
_SPIN = """
extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {
    }
}
"""


class CupyStreams:
    """Streams of CuPy on its current device: a new one does not wait for the default one."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self.default = cupy.cuda.Stream.null

    def new(self) -> Any:
        return self._cupy.cuda.Stream(non_blocking=True)

    def current(self, stream: Any) -> Any:
        return stream

    @cached_property
    def _kernel(self) -> Any:
        return self._cupy.RawKernel(_SPIN, "spin")

    def spin(self, milliseconds: int) -> None:
        """Keep the library's current stream busy for at least that long."""
        cycles = self._cupy.int64(milliseconds * _CYCLES_PER_MS)
        self._kernel((1,), (1,), (cycles,))

    def is_done(self, stream: Any) -> bool:
        return bool(stream.done)

    def wait(self) -> None:
        self._cupy.cuda.Device().synchronize()


class TorchStreams:
    """Streams of torch."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.default = torch.cuda.default_stream()

    def new(self) -> Any:
        return self._torch.cuda.Stream()

    def current(self, stream: Any) -> Any:
        return self._torch.cuda.stream(stream)

    def spin(self, milliseconds: int) -> None:
        # torch's own tests of streams use it.
        self._torch.cuda._sleep(milliseconds * _CYCLES_PER_MS)

    def is_done(self, stream: Any) -> bool:
        return bool(stream.query())

    def wait(self) -> None:
        self._torch.cuda.synchronize()


Streams = CupyStreams | TorchStreams


def streams_of(backend: Backend) -> Streams:
    return (CupyStreams if backend.library == "cupy" else TorchStreams)(backend.xp)
