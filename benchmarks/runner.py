"""Measure the contestants of a case in interleaved rounds."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from arraylogchain import _dispatch
from benchmarks.definitions import Case, Contestant
from benchmarks.device import Device
from benchmarks.inputs import Inputs
from benchmarks.references import AnyReference

# A timing lasts at least this long: shorter calls are repeated within it.
_SHORTEST_TIMING = 5e-3
_MOST_REPEATS = 2000
# Tracing takes some seconds with torch; a call that took longer is not repeated for its time alone.
_TRACED_IS_LONG = 1.0
_LONGEST_REASON = 300

Progress = Callable[[str], None]


class BrokenDeviceError(RuntimeError):
    """Nothing can be computed on the device any more, in this process."""


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
    first_call: float | None = None  # with what it compiles, where that is at first use
    device_seconds: list[float] = field(default_factory=list)  # had it not waited for the host
    on_device: float | None = None  # their median
    largest_batch: int | None = None  # of what fits into memory: see `capacity`
    bytes_per_row: float | None = None
    routes: list[str] = field(default_factory=list)  # that plans have taken for its chains

    def summarise(self) -> None:
        """Fill in what follows from the times."""
        self.median = statistics.median(self.seconds)
        if len(self.seconds) > 1:
            lower, _, upper = statistics.quantiles(self.seconds, n=4, method="inclusive")
            self.spread = (upper - lower) / 2
        if self.device_seconds:
            self.on_device = statistics.median(self.device_seconds)


@dataclass(slots=True)
class Entry:
    """A contestant who takes part, with its arguments for each set of inputs, and copies."""

    contestant: Contestant
    result: Result
    arguments: list[list[tuple[Any, ...]]] = field(default_factory=list)
    repeats: int = 1

    def call(self, inputs: int, turn: int = 0) -> Any:
        copies = self.arguments[inputs]
        return self.contestant.call(*copies[turn % len(copies)])


def run_case(case: Case, settings: Settings, progress: Progress, device: Device) -> dict[str, Any]:
    """Measure all contestants of a case; return what goes into the JSON file."""
    sizes = case.quick_sizes if settings.quick else case.sizes
    device.begin()
    progress("inputs and references")
    sets = [case.make(np.random.default_rng(0), **sizes)]
    for seed in range(1, device.sets(sets[0], settings.input_sets)):
        sets.append(case.make(np.random.default_rng(seed), **sizes))
    references = [case.reference(inputs) for inputs in sets]
    everyone = [Entry(contestant, new_result(contestant)) for contestant in case.contestants]
    small = case.make(np.random.default_rng(0), **case.quick_sizes)
    try:
        for entry in everyone:
            progress(f"warm-up: {entry.contestant.label}")
            _get_ready(case, entry, sets, references[0], small, device)
            if entry.result.not_run:
                progress(f"{entry.contestant.label}: {entry.result.not_run}")
        entries = [entry for entry in everyone if not entry.result.not_run]
        for number in range(settings.rounds):
            progress(f"round {number + 1} of {settings.rounds}")
            _run_round(entries, number, references, settings, device)
    except BrokenDeviceError as error:
        progress(str(error))
        for entry in everyone:
            if not (entry.result.seconds or entry.result.not_run):
                entry.result.not_run = f"not reached: {error}"
    for entry in everyone:
        if entry.result.seconds:
            entry.result.summarise()
    return outcome(case, sizes, [entry.result for entry in everyone])


def outcome(case: Case, sizes: Mapping[str, Any], results: Sequence[Result]) -> dict[str, Any]:
    """Return what goes into the JSON file about a case."""
    reduced = dict(sizes) != dict(case.sizes)
    return {
        "name": case.name,
        "title": f"{case.name}, reduced" if reduced else case.title,
        "has_gradients": case.has_gradients,
        "has_paths": case.has_paths,
        "has_capacity": case.has_capacity,
        "sizes": dict(sizes),
        "results": [_record(result) for result in results],
    }


def _record(result: Result) -> dict[str, Any]:
    """Return what is kept of a result: of its times their number and what they sum up to."""
    kept = asdict(result)
    kept["rounds"] = len(kept.pop("seconds"))
    del kept["device_seconds"]
    return {name: _rounded(value) for name, value in kept.items()}


def _rounded(value: Any) -> Any:
    """Keep seven digits of a float."""
    return float(f"{value:.6e}") if isinstance(value, float) else value


def not_run_at_all(case: Case, reason: str) -> dict[str, Any]:
    """Return what goes into the JSON file about a case of which nothing is known."""
    results = [new_result(contestant) for contestant in case.contestants]
    for result in results:
        result.not_run = reason
    return outcome(case, {}, results)


def new_result(contestant: Contestant) -> Result:
    return Result(contestant.label, contestant.is_yardstick, contestant.is_ours)


def _get_ready(
    case: Case,
    entry: Entry,
    sets: list[Inputs],
    reference: AnyReference,
    small: Inputs,
    device: Device,
) -> None:
    """Bring the inputs to a contestant and warm it up, or note why it does not take part."""
    contestant, result = entry.contestant, entry.result
    result.not_run = case.not_run.get(contestant.label) or device.lacks(contestant)

    def bring() -> None:
        entry.arguments.extend(device.bring(contestant, inputs) for inputs in sets)

    steps: list[Callable[[], object]] = [bring]
    if device.runs_small_first:
        # What is imported late must not count as memory of the first call.
        steps.append(partial(contestant.run, small))
    steps.append(partial(_warm_up, entry, reference, device))
    for step in steps:
        if not result.not_run:
            attempt(result, step, device)


def attempt(result: Result, action: Callable[[], object], device: Device) -> None:
    """Run; note a failure in the result instead of stopping everyone else."""
    try:
        with np.errstate(all="ignore"):
            action()
    # Compilers and drivers raise whatever they like.
    except Exception as error:
        message = " ".join(str(error).split())
        result.not_run = f"failed: {type(error).__name__}: {message[:_LONGEST_REASON]}"
    if result.not_run:
        fault = device.fault()
        if fault:
            raise BrokenDeviceError(f"{result.label}: {result.not_run}; since then: {fault}")
        device.rest()


def _warm_up(entry: Entry, reference: AnyReference, device: Device) -> None:
    """Run untimed, for memory, and find out how often a timing must repeat the call."""
    contestant, result = entry.contestant, entry.result
    if contestant.temporaries:
        result.temporaries = contestant.temporaries(*entry.arguments[0][0])
        value, seconds = entry.call(0), 0.0  # this call compiles
    else:
        first = device.first(contestant, partial(entry.call, 0))
        start = time.perf_counter()
        with _taken_routes() if device.records_routes else nullcontext([]) as routes:
            peak, value = device.peak(contestant, partial(entry.call, 0))
        result.routes = sorted(set(routes))
        seconds = time.perf_counter() - start
        result.temporaries = max(0, peak - device.size(value))
        if first is not None:
            result.first_call = first.seconds
            result.temporaries += first.kept
    _compare(entry, device.readable(contestant, value), reference)
    del value
    if seconds < _TRACED_IS_LONG:
        timing = device.time(contestant, partial(entry.call, 0), 1)
        seconds = max(timing.seconds, 1e-7)
    entry.repeats = min(_MOST_REPEATS, math.ceil(_SHORTEST_TIMING / seconds))


@contextmanager
def _taken_routes() -> Iterator[list[str]]:
    """Collect the routes that are chosen for chains."""
    routes: list[str] = []
    choose = _dispatch.choose

    def choose_and_tell(*given: Any) -> Any:
        choice = choose(*given)
        routes.append(choice.route)
        return choice

    with mock.patch.object(_dispatch, "choose", choose_and_tell):
        yield routes


def _run_round(
    entries: list[Entry],
    number: int,
    references: list[AnyReference],
    settings: Settings,
    device: Device,
) -> None:
    """Let all contestants run in turn on the same inputs, a different one first in each round."""
    which = number % len(references)
    # Each set of inputs once, and at the end again: an error that moves is a race.
    compare = number < len(references) or number == settings.rounds - 1
    first = number % max(1, len(entries))
    for entry in entries[first:] + entries[:first]:
        spent = sum(entry.result.seconds) * entry.repeats
        if entry.result.not_run or spent > settings.seconds_per_contestant:
            continue
        # Threads of the one before keep spinning for some milliseconds after their last work.
        time.sleep(settings.pause)
        reference = references[which] if compare else None
        action = partial(_time_once, entry, which, reference, device)
        attempt(entry.result, action, device)
        device.rest()


def _time_once(entry: Entry, which: int, reference: AnyReference | None, device: Device) -> None:
    timing = device.time(entry.contestant, partial(entry.call, which), entry.repeats)
    entry.result.seconds.append(timing.seconds)
    if timing.on_device is not None:
        entry.result.device_seconds.append(timing.on_device)
    if reference is not None:
        _compare(entry, device.readable(entry.contestant, timing.value), reference)


def _compare(entry: Entry, value: Any, reference: AnyReference) -> None:
    """Keep the largest error seen."""
    result = entry.result
    if result.is_yardstick:
        return
    error, wrong = reference.compare(value)
    if error is not None:
        result.error = max(error, result.error or 0.0)
    result.wrong_infinities = max(wrong, result.wrong_infinities or 0.0)
