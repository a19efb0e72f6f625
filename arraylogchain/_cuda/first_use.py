"""Kernels compiled side by side, before an operation first launches them."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from arraylogchain import _dispatch
from arraylogchain._context import Context
from arraylogchain._cuda.device import Device, Remembered
from arraylogchain._cuda.launch import Kernel, Launch
from arraylogchain._inputs.chain import PARTS

# NVRTC takes about a second for a kernel, on one core.
_THREADS = 8


@dataclass
class Probe:
    """A device that notes which kernels are launched, and may leave out to run them."""

    device: Device
    multiprocessors: int
    runs: bool = False
    remembered: Remembered = field(default_factory=Remembered)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.device, name)

    def run(self, launch: Launch) -> None:
        self.remembered.launched.add(Kernel(launch.source, launch.kernel))
        if self.runs:
            self.device.run(launch)


def load(device: Device, kernels: AbstractSet[Kernel]) -> None:
    """Make kernels ready to run, several at a time."""
    new = kernels - device.remembered.launched
    if len(new) > 1:
        with ThreadPoolExecutor(min(_THREADS, len(new))) as pool:
            list(pool.map(lambda kernel: device.load(*kernel), new))


def load_for(ctx: Context, operation: str, backend: str, *args: Any, **options: Any) -> None:
    """Make ready what the first call of an operation in some dtype is about to launch."""
    device, key = ctx.kernels, (operation, backend, ctx.result_name)
    if key in device.remembered.loaded or device.is_capturing():
        return
    device.remembered.loaded.add(key)
    probe = Probe(device, device.multiprocessors)
    function = _dispatch.implementation(operation, backend)
    found = function(replace(ctx, kernels=probe), *args, **options)
    if operation == "value_and_pullback":
        value, pullback = found
        given = [name for name in PARTS if getattr(args[0], name) is not None]
        pullback(value, frozenset(given))
    load(device, probe.remembered.launched)
