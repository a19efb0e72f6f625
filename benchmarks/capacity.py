"""The largest batch that fits into a given memory: inputs, outputs, gradients and all between.

The batch is the first axis of the first input. What a batch takes is measured where there is room
for it, until the largest that should fit is known to a row or two; then the pool is limited to
that memory, and the batch is tried. The CUDA context and the libraries' code are not counted.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.cuda_device import Cuda
from benchmarks.cuda_libraries import Library
from benchmarks.definitions import Case, Contestant
from benchmarks.inputs import Inputs
from benchmarks.runner import (
    BrokenDeviceError,
    Progress,
    Result,
    Settings,
    attempt,
    new_result,
    outcome,
)

_GUESSES = 6
_TRIES = 8
_STEP_BACK = 0.98

# Solves a batch of so many rows.
Solve = Callable[[int], Any]


def run_case(case: Case, settings: Settings, progress: Progress, device: Cuda) -> dict[str, Any]:
    """Find every contestant's largest batch; return what goes into the JSON file."""
    sizes = dict(case.quick_sizes if settings.quick else case.sizes)
    limit = sizes.pop("limit")
    device.begin()
    inputs = case.make(np.random.default_rng(0), **sizes)
    results = []
    for contestant in case.contestants:
        progress(f"largest batch: {contestant.label}")
        result = new_result(contestant)
        results.append(result)
        result.not_run = device.lacks(contestant)
        if result.not_run:
            continue
        library = device.libraries[contestant.library]
        solve = _solver(contestant, library, inputs)
        try:
            attempt(result, partial(_search, result, solve, library, limit), device)
        except BrokenDeviceError as error:
            result.not_run = str(error)
            break
        progress(f"{result.largest_batch} rows" if not result.not_run else result.not_run)
        for each in device.libraries.values():
            each.release()
    return outcome(case, {**sizes, "limit": limit}, results)


def _solver(contestant: Contestant, library: Library, inputs: Inputs) -> Solve:
    """Return a function that makes a batch, and solves it.

    A batch is what the case has, over and over: what is in it makes no difference to its size.
    """
    base, *others = contestant.takes
    given = {name: library.put(inputs[name]) for name in contestant.takes}
    rows = len(inputs[base])

    def grown(name: str, batch: int) -> Any:
        if len(inputs[name]) != rows:
            return given[name]
        return given[name][library.put(np.arange(batch) % rows)]

    def solve(batch: int) -> Any:
        return contestant.call(grown(base, batch), *(grown(name, batch) for name in others))

    return solve


def _search(result: Result, solve: Solve, library: Library, limit: int) -> None:
    solve(1)  # compiles
    library.release()

    def size(batch: int) -> int:
        taken, value = library.peak(partial(solve, batch))
        del value
        library.release()
        return taken

    smaller, larger = 8, 32
    at_smaller, at_larger = size(smaller), size(larger)
    for _ in range(_GUESSES):
        more = max(1.0, (at_larger - at_smaller) / (larger - smaller))  # for one row more
        # Never far beyond what was seen: what holds for few rows need not hold for many.
        guess = max(1, min(larger + int((limit - at_larger) / more), 16 * larger))
        if abs(guess - larger) <= larger // 200:
            break
        if abs(guess - larger) > larger // 10:  # from points too close, a slope is mostly noise
            smaller, at_smaller = larger, at_larger
        larger, at_larger = guess, size(guess)
    result.bytes_per_row = at_larger / larger
    batch = max(1, larger + int((limit - at_larger) / more))
    for _ in range(_TRIES):
        if _fits(batch, solve, library, limit):
            result.largest_batch = batch
            return
        # The pool hands out blocks, with gaps between them.
        batch = int(batch * _STEP_BACK)
    raise MemoryError(
        f"{batch:,} rows do not fit, although they should by {result.bytes_per_row:,.0f} B each"
    )


def _fits(batch: int, solve: Solve, library: Library, limit: int) -> bool:
    """Try a batch in the memory that there is to be."""
    with library.limit(limit):
        try:
            solve(batch)
            library.wait()
            return True
        # CuPy raises MemoryError, torch a RuntimeError of its own.
        except (MemoryError, RuntimeError) as error:
            if "memory" not in str(error).lower():
                raise
            return False
        finally:
            gc.collect()
            library.release()
