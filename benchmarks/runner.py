"""Measure the contestants of a case in interleaved rounds."""

from __future__ import annotations

import gc
import importlib.util
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from benchmarks.definitions import Case, Contestant
from benchmarks.inputs import Inputs
from benchmarks.memory import peak_of_numpy, peak_of_torch
from benchmarks.references import AnyReference

# A timing lasts at least this long: shorter calls are repeated within it.
_SHORTEST_TIMING = 5e-3
_MOST_REPEATS = 2000
# Tracing takes some seconds with torch; a call that took longer is not repeated for its time alone.
_TRACED_IS_LONG = 1.0


@dataclass(frozen=True, slots=True)
class Settings:
    """How thoroughly to measure."""

    rounds: int
    input_sets: int
    seconds_per_contestant: float  # no new round is begun beyond this
    pause: float  # seconds before each timing
    quick: bool


@dataclass(slots=True)
class Result:
    """What was found about one contestant."""

    label: str
    is_yardstick: bool
    is_ours: bool
    seconds: list[float] = field(default_factory=list)  # one per round
    median: float | None = None
    spread: float | None = None  # half the distance between the quartiles
    temporaries: int | None = None  # peak bytes beyond inputs, output and gradients
    error: float | None = None  # a yardstick computes something else, and samples have none
    wrong_infinities: float | None = None
    not_run: str | None = None

    def summarise(self) -> None:
        """Fill in what follows from the times."""
        self.median = statistics.median(self.seconds)
        if len(self.seconds) > 1:
            lower, _, upper = statistics.quantiles(self.seconds, n=4, method="inclusive")
            self.spread = (upper - lower) / 2


@dataclass(slots=True)
class Entry:
    """A contestant who takes part, with its arguments for each set of inputs."""

    contestant: Contestant
    result: Result
    arguments: list[tuple[Any, ...]]
    repeats: int = 1

    def call(self, inputs: int) -> Any:
        return self.contestant.call(*self.arguments[inputs])


def run_case(case: Case, settings: Settings, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure all contestants of a case; return what goes into the JSON file."""
    sizes = case.quick_sizes if settings.quick else case.sizes
    sets = [case.make(np.random.default_rng(seed), **sizes) for seed in range(settings.input_sets)]
    references = [case.reference(inputs) for inputs in sets]
    everyone = [_enter(case, contestant, sets) for contestant in case.contestants]
    entries = [entry for entry in everyone if not entry.result.not_run]
    small = case.make(np.random.default_rng(0), **case.quick_sizes)
    for entry in entries:
        progress(f"warm-up: {entry.contestant.label}")
        # What is imported late must not count as memory of the first call.
        _attempt(entry, partial(entry.contestant.run, small))
        if not entry.result.not_run:
            _attempt(entry, partial(_warm_up, entry, references[0]))
    for number in range(settings.rounds):
        progress(f"round {number + 1} of {settings.rounds}")
        _run_round(entries, number, references, settings)
    for entry in entries:
        if entry.result.seconds:
            entry.result.summarise()
    return {
        "name": case.name,
        "title": case.title,
        "has_gradients": case.has_gradients,
        "has_paths": case.has_paths,
        "sizes": dict(sizes),
        "results": [asdict(entry.result) for entry in everyone],
    }


def _enter(case: Case, contestant: Contestant, sets: list[Inputs]) -> Entry:
    """Bring the inputs to a contestant, or note why it does not take part."""
    result = Result(contestant.label, contestant.is_yardstick, contestant.is_ours)
    result.not_run = _reason_not_to_run(case, contestant)
    entry = Entry(contestant, result, [])
    if not result.not_run:
        for inputs in sets:
            entry.arguments.append(contestant.arguments(inputs))
    return entry


def _reason_not_to_run(case: Case, contestant: Contestant) -> str | None:
    if contestant.label in case.not_run:
        return case.not_run[contestant.label]
    missing = [name for name in contestant.requires if importlib.util.find_spec(name) is None]
    return f"{missing[0]} is not installed" if missing else None


def _attempt(entry: Entry, action: Callable[[], None]) -> None:
    """Run; note a failure in the result instead of stopping everyone else."""
    try:
        with np.errstate(all="ignore"):
            action()
    except (ArithmeticError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        entry.result.not_run = f"failed: {type(error).__name__}: {error}"


def _warm_up(entry: Entry, reference: AnyReference) -> None:
    """Run untimed, for memory, and find out how often a timing must repeat the call."""
    if entry.contestant.temporaries:
        entry.result.temporaries = entry.contestant.temporaries(*entry.arguments[0])
        value, seconds = entry.call(0), 0.0  # this call compiles
    else:
        measure = peak_of_torch if "torch" in entry.contestant.requires else peak_of_numpy
        start = time.perf_counter()
        peak, value = measure(lambda: entry.call(0))
        seconds = time.perf_counter() - start
        entry.result.temporaries = max(0, peak - _bytes_of(value))
    _compare(entry, value, reference)
    if seconds < _TRACED_IS_LONG:
        start = time.perf_counter()
        entry.call(0)
        seconds = max(time.perf_counter() - start, 1e-7)
    entry.repeats = min(_MOST_REPEATS, math.ceil(_SHORTEST_TIMING / seconds))


def _run_round(
    entries: list[Entry], number: int, references: list[AnyReference], settings: Settings
) -> None:
    """Let all contestants run in turn on the same inputs, a different one first in each round."""
    which = number % len(references)
    first = number % max(1, len(entries))
    for entry in entries[first:] + entries[:first]:
        spent = sum(entry.result.seconds) * entry.repeats
        if entry.result.not_run or spent > settings.seconds_per_contestant:
            continue
        # Threads of the one before keep spinning for some milliseconds after their last work.
        time.sleep(settings.pause)
        _attempt(entry, partial(_time_once, entry, which, references[which]))


def _time_once(entry: Entry, which: int, reference: AnyReference) -> None:
    if entry.repeats > 1:
        entry.call(which)
    gc.disable()
    try:
        start = time.perf_counter()
        for _ in range(entry.repeats):
            value = entry.call(which)
        entry.result.seconds.append((time.perf_counter() - start) / entry.repeats)
    finally:
        gc.enable()
    _compare(entry, value, reference)


def _compare(entry: Entry, value: Any, reference: AnyReference) -> None:
    """Keep the largest error seen."""
    result = entry.result
    if result.is_yardstick:
        return
    error, wrong = reference.compare(value)
    if error is not None:
        result.error = max(error, result.error or 0.0)
    result.wrong_infinities = max(wrong, result.wrong_infinities or 0.0)


def _bytes_of(value: Any) -> int:
    """Return the size of a result, which may be a tuple of a value and its gradients."""
    if isinstance(value, tuple):
        return sum(map(_bytes_of, value))
    return int(np.asarray(value).nbytes)
