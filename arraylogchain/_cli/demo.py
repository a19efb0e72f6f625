"""The case that started the project, with time, memory and error.

A model computes ``p0 · D_0 · P_1 · D_1 · … · P_{v-1} · x_{v-1}`` in log space for each of n rows:
``x`` [n, t, v, c] holds log weights, D_i is the diagonal matrix of exp(x_i), ``bulk``
[1, t, v-1, c, c] holds the matrices P_i, and ``p0`` [1, t, c] the initial weights.
"""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arraylogchain._cli.environment import usable_cupy
from arraylogchain._text import amount, duration
from arraylogchain.chain import LogChain

Size = tuple[int, int, int, int]
Floats = NDArray[np.floating[Any]]

# The sizes n, t, v, c at which the forum's user ran out of memory.
FULL_SIZE = (500, 1, 40, 200)
_MOST_RUNS, _TIME_LIMIT = 7, 2.0


def random_problem(size: Size) -> tuple[Floats, Floats, Floats]:
    """Draw x, bulk and p0 in float32, from the distributions that the forum used."""
    n, t, v, c = size
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, t, v, c), dtype=np.float32) - np.float32(2)
    bulk = rng.random((1, t, v - 1, c, c), dtype=np.float32)
    return x, bulk, rng.random((1, t, c), dtype=np.float32)


def print_demo(size: Size, device: str) -> None:
    """Solve the forum's case at a given size; print what it took."""
    cupy = usable_cupy() if device == "cuda" else None
    problem = random_problem(size)
    x, bulk, p0 = problem if cupy is None else map(cupy.asarray, problem)
    chain, (n, t, v, c) = LogChain(x, transitions=bulk, initial=p0), size
    what = f"{n * t} chains of {v} steps with {c} states, float32, on {device}"
    print(f"The forum's case: {what}", flush=True)
    result = chain.log_partition()
    times: list[float] = []
    while len(times) < _MOST_RUNS and sum(times) < _TIME_LIMIT:
        start = time.perf_counter()
        result = chain.log_partition()
        if cupy is not None:
            result = cupy.asnumpy(result)
        times.append(time.perf_counter() - start)
    x, bulk, p0 = (array.astype(np.float64) for array in problem)
    error = np.max(np.abs(result - LogChain(x, transitions=bulk, initial=p0).log_partition()))
    print(f"  time    {duration(min(times))}, the best of {len(times)} runs")
    if cupy is None:
        pairs = f"matrices, expanded for all rows, take {amount(4 * n * t * (v - 1) * c * c)}"
        tracemalloc.start()
        chain.log_partition()
        print(f"  memory  {amount(tracemalloc.get_traced_memory()[1])} beyond the inputs; {pairs}")
        tracemalloc.stop()
    print(f"  error   {error:.1e} nats at most, against float64")
    plan = chain.plan()
    print(f"  route   {plan.route}: {plan.reason}")
