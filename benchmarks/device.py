"""What a device is to the runner: how arrays get there, how a call is timed, what memory it takes.

`Cpu` is here; `cuda_device` has the other.
"""

from __future__ import annotations

import gc
import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from benchmarks.definitions import Contestant
from benchmarks.inputs import Inputs
from benchmarks.machine import limit_threads
from benchmarks.memory import peak_of_numpy, peak_of_torch

# Of a contestant, with the number of the call, which picks one of several copies of its inputs.
Call = Callable[[int], Any]


@dataclass(frozen=True, slots=True)
class Timing:
    """One timing of repeated calls."""

    seconds: float  # per call
    on_device: float | None  # per call, had the device never waited for the host
    value: Any  # what the last call returned


@dataclass(frozen=True, slots=True)
class FirstCalls:
    """What happens before a contestant is as fast as it will be."""

    seconds: float  # of the very first call, with all that it compiles
    kept: int  # bytes that it holds from now on, between calls


class Device(Protocol):
    """A place where contestants compute.

    Attributes
    ----------
    name : str
    runs_small_first : bool
        Whether a call on small inputs comes first, for what is imported late.
    records_routes : bool
        Whether it is noted which routes chains take.
    """

    name: str
    runs_small_first: bool
    records_routes: bool

    def describe(self) -> dict[str, Any]:
        """Return what a measurement depends on, besides the host."""

    def lacks(self, contestant: Contestant) -> str | None:
        """Say why a contestant cannot run here; None if it can."""

    def sets(self, inputs: Inputs, wanted: int) -> int:
        """Return how many sets of different inputs of such a size to make."""

    def begin(self) -> None:
        """Get ready for a case."""

    def bring(self, contestant: Contestant, inputs: Inputs) -> list[tuple[Any, ...]]:
        """Return a contestant's arguments, once or in several copies."""

    def first(self, contestant: Contestant, call: Call) -> FirstCalls | None:
        """Make the calls that compile; None where nothing is compiled at first use."""

    def peak(self, contestant: Contestant, call: Callable[[], Any]) -> tuple[int, Any]:
        """Run a call; return the most bytes that it held, inputs not counted, and its result."""

    def time(self, contestant: Contestant, call: Call, repeats: int) -> Timing:
        """Time calls, one after another."""

    def readable(self, contestant: Contestant, value: Any) -> Any:
        """Return a result as references read it."""

    def size(self, value: Any) -> int:
        """Return the bytes of a result, which may be a tuple of a value and its gradients."""

    def fault(self) -> str | None:
        """Say why the device computes no more; None while it does."""

    def rest(self) -> None:
        """Let go of much memory that nobody uses."""


class Cpu:
    """The host: NumPy arrays, and whatever contestants convert them to."""

    name = "cpu"
    runs_small_first = True
    records_routes = True

    def describe(self) -> dict[str, Any]:
        return {}

    def lacks(self, contestant: Contestant) -> str | None:
        missing = [name for name in contestant.requires if importlib.util.find_spec(name) is None]
        return f"{missing[0]} is not installed" if missing else None

    def sets(self, inputs: Inputs, wanted: int) -> int:
        return wanted

    def begin(self) -> None:
        pass

    def bring(self, contestant: Contestant, inputs: Inputs) -> list[tuple[Any, ...]]:
        return [contestant.arguments(inputs)]

    def first(self, contestant: Contestant, call: Call) -> FirstCalls | None:
        return None

    def peak(self, contestant: Contestant, call: Callable[[], Any]) -> tuple[int, Any]:
        measure = peak_of_torch if contestant.library == "torch" else peak_of_numpy
        with limit_threads(contestant.threads):
            return measure(call)

    def time(self, contestant: Contestant, call: Call, repeats: int) -> Timing:
        with limit_threads(contestant.threads), no_collection():
            if repeats > 1:
                call(0)
            start = time.perf_counter()
            for turn in range(repeats):
                value = call(turn)
            seconds = time.perf_counter() - start
        return Timing(seconds / repeats, None, value)

    def readable(self, contestant: Contestant, value: Any) -> Any:
        return value

    def size(self, value: Any) -> int:
        if isinstance(value, tuple):
            return sum(map(self.size, value))
        return int(np.asarray(value).nbytes)

    def fault(self) -> str | None:
        return None

    def rest(self) -> None:
        pass


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector out of a timing."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
