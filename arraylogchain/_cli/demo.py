"""`python -m arraylogchain`: the forum's case, beside the formulation that ran out of memory."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from arraylogchain._cli.environment import Device, open_device
from arraylogchain._cli.forum import (
    Floats,
    Problem,
    count_temporaries,
    multiply_in_pairs,
    random_problem,
    recursion_in_float64,
)
from arraylogchain._text import amount, duration
from arraylogchain.chain import LogChain

Size = tuple[int, int, int, int]

# Sizes at which the forum's user had tested: 4 matrices, a power of two, and 5.
_SMALL_SIZES = ((10, 1, 5, 40), (10, 1, 6, 40))
# The forum's formulation is run where its temporaries stay below this many bytes.
_SAFE_BYTES = 200_000_000
_MOST_RUNS = 7
_TIME_LIMIT = 2.0
_LEGEND = """
n, t, v, c: batch, parameter sets, steps, states. route: what computes, see LogChain.plan.
time: median of a few runs. memory: peak beyond the inputs. error: largest distance of log Z from
a recursion in float64, in nats.
~ computed, not run: time in proportion to n, memory by counting the arrays alive at once.
The forum's formulation multiplies the v - 1 matrices in pairs and completes an odd number with
a matrix of ones, so it is right only where v - 1 is a power of two."""
# From this error on a result is called wrong: about 10 % in the weights themselves.
_WRONG_FROM = 0.1


@dataclass(frozen=True, slots=True)
class Measurement:
    """How long a computation took, what it held at most, and how far off it was."""

    seconds: float
    peak: int
    error: float


def print_demo(size: Size, seed: int, device_name: str) -> None:
    """Solve the forum's case at a given size and smaller ones; print a row for each."""
    device = open_device(device_name)
    n, t, v, c = size
    print(
        f"The forum's case: {n * t} chains of {v} steps with {c} states, float32, seed {seed}, "
        f"on {device.name}\n"
    )
    columns = f"{'time':>9} {'memory':>9} {'error':>9}"
    print(f"{'':17}  {'arraylogchain':^39}    {'formulation of the forum':^29}")
    print(f"{'n, t, v, c':>17}  {'route':<8}  {columns}    {columns}", flush=True)
    seconds_per_row: float | None = None
    for row_size in _row_sizes(size):
        problem = random_problem(row_size, seed)
        exact = recursion_in_float64(problem)
        chain = _chain_of(problem, device)
        plan = chain.plan()
        ours = _measure(chain.log_partition, device, exact)
        print(f"{', '.join(map(str, row_size)):>17}  {plan.route:<8}", end="  ")
        print(_columns(ours), end="    ", flush=True)
        if row_size[2] > 1 and count_temporaries(row_size) <= _SAFE_BYTES:
            theirs = _measure(partial(multiply_in_pairs, problem), open_device("cpu"), exact)
            print(_columns(theirs))
            if row_size[1:] == size[1:]:
                seconds_per_row = theirs.seconds / row_size[0]
        else:
            print(_estimate(row_size, seconds_per_row))
    print(f"\nThe route of the last row is {plan.route}: {plan.reason}.")
    print(_LEGEND)


def _row_sizes(size: Size) -> Iterator[Size]:
    """Yield sizes that are safe for the forum's formulation, then the one that was asked for."""
    yield from (small for small in _SMALL_SIZES if small != size)
    _, t, v, c = size
    if v > 1:
        fitting = _SAFE_BYTES // count_temporaries((1, t, v, c))
        power_of_two = 1 << int(math.log2(v - 1))
        reduced = ((fitting, t, power_of_two + 1, c), (fitting, t, v, c))
        yield from (s for s in dict.fromkeys(reduced) if 0 < fitting < size[0])
    yield size


def _chain_of(problem: Problem, device: Device) -> LogChain:
    x, bulk, p0 = (device.put(a) for a in (problem.x, problem.bulk, problem.p0))
    return LogChain(x, transitions=bulk, initial=p0)


def _measure(call: Callable[[], Floats], device: Device, exact: Floats) -> Measurement:
    """Run once to compile what is used, once to trace memory, then a few times for the time."""
    call()
    with device.trace() as peak:
        result = device.get(call())
    times: list[float] = []
    while len(times) < _MOST_RUNS and sum(times) < _TIME_LIMIT:
        start = time.perf_counter()
        call()
        device.wait()
        times.append(time.perf_counter() - start)
    error = float(np.max(np.abs(result - exact), initial=0.0))
    return Measurement(statistics.median(times), peak.size, error)


def _columns(m: Measurement) -> str:
    error = f"{m.error:.1e}" if m.error < _WRONG_FROM else f"{m.error:.3g}"
    return f"{duration(m.seconds):>9} {amount(m.peak):>9} {error:>9}"


def _estimate(size: Size, seconds_per_row: float | None) -> str:
    needed = count_temporaries(size)
    if not needed:
        return f"{'nothing to multiply':>29}"
    took = "" if seconds_per_row is None else f"~ {duration(seconds_per_row * size[0])}"
    return f"{took:>9} {'~ ' + amount(needed):>9} {'not run':>9}"
