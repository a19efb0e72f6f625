"""Measure the contestants of a case in interleaved rounds."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from benchmarks import contestants  # noqa: F401  registers everyone
from benchmarks.devices import Cpu, host, size
from benchmarks.registry import REFERENCES, Case, Check, Contestant, Inputs, reduced

# A timing lasts at least this long: shorter calls are repeated within it. An untimed warm-up of the
# same duration comes first, because caches hold other data and idle processors resume late.
_SHORTEST_TIMING = 5e-3
_MOST_REPEATS = 2000
_LONGEST_REASON = 300
# Tracing takes seconds with torch; a call that took longer is no longer warmed up.
_IS_LONG = 1.0


@dataclass(frozen=True, slots=True)
class Settings:
    """How thoroughly to measure."""

    rounds: int
    seconds: float  # of one contestant, beyond which no new round is begun
    pause: float  # before each timing: threads of the previous contestant may still spin
    quick: bool


@dataclass(slots=True)
class Entry:
    """A contestant that takes part, and its measurements."""

    contestant: Contestant
    call: Callable[[], Any] | None = None
    repeats: int = 1
    seconds: list[float] = field(default_factory=list)
    temporaries: int | None = None  # peak bytes beyond inputs, output and gradients
    error: float | None = None  # a yardstick computes something else, and samples have none
    wrong: float | None = None  # share of entries that are infinite or NaN, or should be
    not_run: str | None = None

    def record(self) -> dict[str, Any]:
        """Return the entry of the record, times with seven digits."""
        quartiles = statistics.quantiles(self.seconds, n=4) if len(self.seconds) > 1 else None
        return {
            "label": self.contestant.label,
            "is_ours": self.contestant.is_ours,
            "is_yardstick": self.contestant.is_yardstick,
            "state": self.contestant.state,
            "median": _rounded(statistics.median(self.seconds)) if self.seconds else None,
            "spread": _rounded((quartiles[2] - quartiles[0]) / 2) if quartiles else None,
            "rounds": len(self.seconds),
            "temporaries": self.temporaries,
            "error": _rounded(self.error),
            "wrong": _rounded(self.wrong),
            "not_run": self.not_run,
        }


def run_case(case: Case, settings: Settings, device: Cpu) -> dict[str, Any]:
    """Measure all contestants of a case; return its entry in the record."""
    inputs, small = case.inputs(quick=settings.quick), case.inputs(quick=True)
    check = REFERENCES[case.operation](inputs)
    everyone = [Entry(contestant) for contestant in case.contestants(device.name)]
    for entry in everyone:
        reason = case.not_run.get(entry.contestant.label)
        entry.not_run = (None if settings.quick else reason) or entry.contestant.missing()
        attempt(entry, partial(_prepare, entry, inputs, small, check, device))
    for number in range(settings.rounds):
        entries = [entry for entry in everyone if not entry.not_run]
        first = number % max(1, len(entries))  # a different one in each round
        for entry in entries[first:] + entries[:first]:
            spent = sum(entry.seconds) * entry.repeats
            if spent <= settings.seconds:
                is_last = number == settings.rounds - 1
                attempt(entry, partial(_round, entry, check, device, settings.pause, is_last))
    results = [entry.record() for entry in everyone]
    sizes = reduced(dict(case.sizes)) if settings.quick else dict(case.sizes)
    title = f"{case.name}, reduced" if settings.quick else case.title
    kept = {"name": case.name, "title": title, "group": case.group, "sizes": sizes}
    return {**kept, "results": results}


def attempt(entry: Entry, action: Callable[[], None]) -> None:
    """Run; note a failure in the entry instead of stopping everyone else."""
    if entry.not_run:
        return
    try:
        with np.errstate(all="ignore"):
            action()
    # Compilers and drivers raise whatever they like.
    except Exception as error:
        message = " ".join(str(error).split())
        entry.not_run = f"failed: {type(error).__name__}: {message[:_LONGEST_REASON]}"


def _prepare(entry: Entry, inputs: Inputs, small: Inputs, check: Check, device: Cpu) -> None:
    """Bring the inputs, make the first calls unless these are timed, count memory, compare."""
    contestant = entry.contestant
    bind = partial(contestant.bind, device.xp, device.put)
    entry.call = partial(contestant.call, *bind(inputs))
    if contestant.state != "warm":
        if contestant.state == "new process":
            entry.call()  # compiles into the cache
        return
    contestant.call(*bind(small))  # imports, and compiles
    start = time.perf_counter()
    peak, value = device.peak(contestant.library, entry.call)
    if peak is not None:
        entry.temporaries = max(0, peak - size(value))
    _compare(entry, value, check)
    del value
    if time.perf_counter() - start < _IS_LONG:
        entry.repeats = repeats_for(entry.call, device)


def repeats_for(call: Callable[[], Any], device: Cpu) -> int:
    """Warm a call up; return how often a timing must repeat it."""
    start, seconds = time.perf_counter(), []
    while len(seconds) < 3 or time.perf_counter() - start < 4 * _SHORTEST_TIMING:
        seconds.append(time_once(call, 1, device))
        if sum(seconds) > _IS_LONG:
            break
    return min(_MOST_REPEATS, math.ceil(_SHORTEST_TIMING / max(min(seconds), 1e-7)))


def time_once(call: Callable[[], Any], repeats: int, device: Cpu) -> float:
    """Return the seconds of one of several calls."""
    device.synchronize()
    gc.disable()
    try:
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        device.synchronize()
        return (time.perf_counter() - start) / repeats
    finally:
        gc.enable()


def _round(entry: Entry, check: Check, device: Cpu, pause: float, is_last: bool) -> None:
    assert entry.call
    time.sleep(pause)
    if entry.repeats > 1:
        time_once(entry.call, entry.repeats, device)
    entry.seconds.append(time_once(entry.call, entry.repeats, device))
    if is_last or entry.error is None:  # again: an error that moves is a race
        _compare(entry, entry.call(), check)


def _compare(entry: Entry, value: Any, check: Check) -> None:
    """Keep the largest error seen."""
    if not entry.contestant.is_yardstick:
        error, wrong = check(host(value))
        entry.error = error if error is None else max(error, entry.error or 0.0)
        entry.wrong = max(wrong, entry.wrong or 0.0)


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6e}")
