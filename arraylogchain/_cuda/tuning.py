"""Where two implementations are proved for the same work, the device decides which it does faster.

Estimates decide until the first large call on a device. That call times both, once for a model of
device, its driver and CuPy, and what is found is kept on disk. ``ARRAYLOGCHAIN_AUTOTUNE=0`` leaves
it to the estimates, so that results are the same from run to run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from arraylogchain._context import Array, Context
from arraylogchain._cuda import records
from arraylogchain._cuda.chains import geometry, segments
from arraylogchain._cuda.device import Device
from arraylogchain._cuda.self_check import has_failed
from arraylogchain._dispatch import implementation
from arraylogchain._fold import Fold, fold
from arraylogchain._inputs.chain import Chain
from arraylogchain.plan import StepSeconds

Seconds = dict[str, float]

# Products of so many rows, terms and columns are large; parts of at most the other are timed.
LARGE, _SIDE = 1024, 4096
FIRST_WITH_TENSOR_CORES = 80
# Of chains so many steps are timed, where no estimate is so many times the other.
_STEPS, _CLOSE = 32, 4.0
_RUNS = 3


def product_backend(ctx: Context, layout: Fold, a: Array, b: Array, budget: int) -> str:
    """Return which kernels compute a log product: over tensor cores, or 'cuda' for the others."""
    backend, device = "cuda.tensor_cores", ctx.kernels
    if min(layout.sizes[1:]) < LARGE or not has_tensor_cores(device):
        return "cuda"
    if has_failed(device, "logmatmulexp", backend):
        return "cuda"
    subject = f"large log products in {ctx.precision.name}"
    source = "products/logmatmulexp.cu"
    seconds = known(device, subject, source)
    if seconds is None and min(*a.shape[-2:], *b.shape[-2:]) >= LARGE and may_measure(device):
        parts = [x[(0,) * (len(x.shape) - 2)][:_SIDE, :_SIDE] for x in (a, b)]
        given = (ctx, fold(*(tuple(x.shape) for x in parts)), *parts, budget)
        seconds = measure(device, subject, source, _runs("logmatmulexp", ("cuda", backend), *given))
    return "cuda" if seconds is None else min(seconds, key=seconds.__getitem__)


def has_tensor_cores(device: Device) -> bool:
    """Tell whether a device has tensor cores that would do."""
    return device.architecture >= FIRST_WITH_TENSOR_CORES


def chain_step(
    operation: str, ctx: Context, chain: Chain, workspace: int, *, measures: bool
) -> StepSeconds:
    """Return what a step of a chain takes by a kernel, and by array operations.

    With `measures`, the device finds out where neither is clearly faster and none has before.
    """
    device, item, states = ctx.kernels, ctx.precision.itemsize, chain.num_states
    sizes = (states, *chain.sizes, item, device.multiprocessors)
    kernel = geometry.kernel_seconds(*sizes, device.shared_memory)
    arrays = geometry.array_seconds(*sizes)
    if operation == "log_partition":
        count, beside = segments.count_and_seconds(device, chain, item, workspace)
        if count > 1:
            return StepSeconds(beside, arrays, segments=count)
    if not 1 / _CLOSE < kernel / arrays < _CLOSE:
        return StepSeconds(kernel, arrays)
    groups, rows = (1 << round(math.log2(n)) for n in chain.sizes)
    subject = f"{_STEPS} steps of {states} states, {groups} x {rows} rows, in {ctx.result_name}"
    source = geometry.Geometry.source
    seconds = known(device, subject, source)
    if seconds is None and measures and chain.num_steps >= _STEPS and may_measure(device):
        runs = _runs("log_partition", ("cuda", "array"), ctx, _first_steps(chain), workspace)
        seconds = measure(device, subject, source, runs)
    if seconds is None:
        return StepSeconds(kernel, arrays)
    return StepSeconds(seconds["cuda"] / _STEPS, seconds["array"] / _STEPS, is_measured=True)


def _runs(operation: str, backends: Sequence[str], *args: Any) -> dict[str, Callable[[], object]]:
    return {backend: partial(implementation(operation, backend), *args) for backend in backends}


def _first_steps(chain: Chain) -> Chain:
    transitions = chain.transitions
    if transitions is not None and not chain.has_one_matrix:
        transitions = transitions[..., : _STEPS - 1, :, :]
    return replace(
        chain,
        num_steps=_STEPS,
        potentials=chain.potentials[..., :_STEPS, :],
        transitions=transitions,
        lengths=None if chain.lengths is None else np.minimum(chain.lengths, _STEPS),
    )


def is_frozen() -> bool:
    """Tell whether estimates decide, whatever a device takes."""
    return os.environ.get("ARRAYLOGCHAIN_AUTOTUNE") == "0"


def may_measure(device: Device) -> bool:
    """Tell whether implementations can be timed now: not while a graph is captured."""
    return not is_frozen() and not device.is_capturing()


def known(device: Device, subject: str, source: str) -> Seconds | None:
    """Return what implementations took on a model of device, if that has been measured."""
    if is_frozen():
        return None
    measured = device.remembered.measured
    if subject not in measured:
        record = records.read(device.identity, subject, source) or {}
        measured[subject] = record.get("seconds")
    return measured[subject]


def measure(
    device: Device, subject: str, source: str, runs: Mapping[str, Callable[[], object]]
) -> Seconds:
    """Return what implementations take, and remember it."""
    seconds = {name: timed(device, run) for name, run in runs.items()}
    device.remembered.measured[subject] = seconds
    if all(map(math.isfinite, seconds.values())):
        records.write(device.identity, subject, source, seconds=seconds)
    return seconds


def timed(device: Device, run: Callable[[], object]) -> float:
    """Return the least time of a few runs after a first, which compiles; infinity if it fails."""
    try:
        run()
        return min(device.seconds(run) for _ in range(_RUNS))
    except Exception:  # a launch that the driver refuses, too little memory, ...
        return math.inf
