"""A CUDA device to the runner: copies of inputs in turn, events, the libraries' own pools."""

from __future__ import annotations

import contextlib
import csv
import gc
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.cuda_libraries import Cupy, Library, Torch
from benchmarks.definitions import Contestant
from benchmarks.device import Call, FirstCalls, Timing, no_collection
from benchmarks.inputs import Inputs

# Copies of inputs take turns until a call's own are no longer in the cache.
_MOST_COPIES = 256
_CACHES = 4
# Several sets of random inputs, and their references, only below this size.
_SMALL_INPUTS = 32e6
# A call that takes longer is not repeated to see whether it becomes faster.
_IS_LONG = 0.5
# Where the host needs more than this share of the time, the device is also timed alone.
_HOST_SHARE = 0.5
_LONGEST_HOLD = 0.05
# A pool with more than this is emptied between contestants: the other library needs room as well.
_MUCH = 8e9
_COPIED = 1 << 30


class NoDeviceError(RuntimeError):
    """No array library can use a CUDA device; the message says why."""


@dataclass(frozen=True, slots=True)
class Remote:
    """A result on the device, of which only those entries are fetched that are asked for."""

    value: Any
    library: Library

    def __getitem__(self, index: Any) -> Any:
        return self.library.pick(self.value, index)


class Cuda:
    """The current CUDA device.

    Parameters
    ----------
    libraries : mapping of str to Library
        Those that can use it.
    missing : mapping of str to str
        Why others cannot.
    description : mapping
        What is known of the device; its ``L2`` decides how many copies of inputs there are.
    """

    name = "cuda"
    runs_small_first = False
    records_routes = False  # what torch has compiled would be compiled again

    def __init__(
        self,
        libraries: Mapping[str, Library],
        missing: Mapping[str, str],
        description: Mapping[str, Any],
    ) -> None:
        self.libraries = libraries
        self._missing = missing
        self._description = description
        self._brought: dict[tuple[str, int], list[Any]] = {}

    def describe(self) -> dict[str, Any]:
        return {"gpu": dict(self._description)}

    def lacks(self, contestant: Contestant) -> str | None:
        return self._missing.get(contestant.library)

    def sets(self, inputs: Inputs, wanted: int) -> int:
        return wanted if _bytes_of_inputs(inputs) < _SMALL_INPUTS else 1

    def begin(self) -> None:
        self._brought.clear()
        if "torch._dynamo" in sys.modules:
            # What an earlier case compiled would count towards the most that a function may have.
            sys.modules["torch"].compiler.reset()
        # What is there now stays: the garbage collector need not look through it before each call.
        gc.collect()
        gc.freeze()
        for library in self.libraries.values():
            library.release()

    def bring(self, contestant: Contestant, inputs: Inputs) -> list[tuple[Any, ...]]:
        size = max(1, _bytes_of_inputs(inputs))
        copies = math.ceil(_CACHES * self._description.get("L2", 0) / size)
        copies = min(_MOST_COPIES, max(1, copies))
        taken = [self._bring(contestant.library, inputs[name], copies) for name in contestant.takes]
        return list(zip(*taken, strict=True))

    def _bring(self, name: str, x: Any, copies: int) -> list[Any]:
        """Return copies of an array, the same ones for all contestants of a case."""
        key = (name, id(x))
        if key not in self._brought:
            library = self.libraries[name]
            first = library.put(x)
            self._brought[key] = [first, *(library.copy(first) for _ in range(copies - 1))]
        return self._brought[key]

    def first(self, contestant: Contestant, call: Call) -> FirstCalls | None:
        library = self.libraries[contestant.library]
        for each in self.libraries.values():
            each.release()
        before = library.reserved()
        seconds = []
        # Graphs are recorded in the second and third call.
        for turn in range(3):
            start = time.perf_counter()
            call(turn)
            library.wait()
            seconds.append(time.perf_counter() - start)
            if turn > 0 and seconds[-1] > _IS_LONG:
                break
        library.release()
        return FirstCalls(seconds[0], max(0, library.reserved() - before))

    def peak(self, contestant: Contestant, call: Callable[[], Any]) -> tuple[int, Any]:
        return self.libraries[contestant.library].peak(call)

    def time(self, contestant: Contestant, call: Call, repeats: int) -> Timing:
        library = self.libraries[contestant.library]
        call(0)  # takes its memory from the device
        library.wait()
        with no_collection():
            seconds, queued, value = _span(library, call, repeats)
            on_device = seconds
            if queued > _HOST_SHARE * seconds:
                # The device waited for the host. Busy until calls are queued, it does not.
                few = max(1, min(repeats, int(_LONGEST_HOLD / queued)))
                if few * queued <= _LONGEST_HOLD:
                    library.hold(1.5 * few * queued)
                    on_device, _, value = _span(library, call, few)
        return Timing(seconds, min(seconds, on_device), value)

    def readable(self, contestant: Contestant, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self.readable(contestant, part) for part in value)
        return Remote(value, self.libraries[contestant.library])

    def size(self, value: Any) -> int:
        return sum(map(self.size, value)) if isinstance(value, tuple) else int(value.nbytes)

    def fault(self) -> str | None:
        for library in self.libraries.values():
            try:
                library.wait()
            except Exception as error:
                return _first_line(error)
        return None

    def rest(self) -> None:
        for library in self.libraries.values():
            if library.reserved() > _MUCH:
                library.release()


def open_cuda() -> Cuda:
    """Return the current CUDA device; raise NoDeviceError where there is none."""
    os.environ["CUPY_TF32"] = "0"  # read when CuPy is imported
    libraries: dict[str, Library] = {}
    missing = {}
    description: dict[str, Any] = {}
    for name, kind in (("cupy", Cupy), ("torch", Torch)):
        try:
            library = kind()
        except (ImportError, RuntimeError) as error:
            missing[name] = _first_line(error)
        else:
            libraries[name] = library
            description = library.describe() | description
    if not libraries:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
        raise NoDeviceError(f"no CUDA device can be used here ({reasons})")
    description |= _ask_driver()
    description["copy, bytes per second"] = _copy_bandwidth(next(iter(libraries.values())))
    return Cuda(libraries, missing, description)


def _span(library: Library, call: Call, repeats: int) -> tuple[float, float, Any]:
    """Return the seconds per call on the device and on the host, and the last result."""
    value = None
    start = library.stamp()
    begin = time.perf_counter()
    for turn in range(repeats):
        value = None  # lets go of its memory, for the next call to take
        value = call(turn)
    queued = time.perf_counter() - begin
    end = library.stamp()
    library.wait()
    return library.between(start, end) / repeats, queued / repeats, value


def _copy_bandwidth(library: Library) -> float:
    """Return the bytes that a large copy within the device reads and writes in a second."""
    x = library.put(np.ones(_COPIED, dtype=np.uint8))
    library.copy(x)
    seconds, _, _ = _span(library, lambda _: library.copy(x), 10)
    return 2 * _COPIED / seconds


def _ask_driver() -> dict[str, str]:
    """Return what nvidia-smi says of the first device; nothing where it says nothing."""
    program = shutil.which("nvidia-smi")
    asked = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")
    if program is None:
        return {}
    command = [program, f"--query-gpu={','.join(asked)}", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, StopIteration):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        answers = next(csv.reader(done.stdout.splitlines(), skipinitialspace=True))
        return dict(zip(asked, answers, strict=False))
    return {}


def _bytes_of_inputs(inputs: Inputs) -> int:
    return sum(x.nbytes for x in inputs.values())


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
