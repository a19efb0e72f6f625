"""`python -m arraylogchain`: the case that started the project, with time, memory and error.

A model computes ``p0 · D_0 · P_1 · D_1 · … · P_{v-1} · x_{v-1}`` in log space for each of n rows:
``x`` [n, t, v, c] holds log weights, D_i is the diagonal matrix of exp(x_i), ``bulk``
[1, t, v-1, c, c] holds the matrices P_i, and ``p0`` [1, t, c] the initial weights.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arraylogchain._cli.environment import open_device
from arraylogchain._text import amount, duration
from arraylogchain.chain import LogChain

Size = tuple[int, int, int, int]
Floats = NDArray[np.floating[Any]]

# The sizes n, t, v, c at which the forum's user ran out of memory.
FULL_SIZE = (500, 1, 40, 200)
_MOST_RUNS = 7
_TIME_LIMIT = 2.0


def random_problem(size: Size, seed: int) -> tuple[Floats, Floats, Floats]:
    """Draw x, bulk and p0 in float32, from the distributions that the forum used."""
    n, t, v, c = size
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, t, v, c), dtype=np.float32) - np.float32(2)
    bulk = rng.random((1, t, v - 1, c, c), dtype=np.float32)
    return x, bulk, rng.random((1, t, c), dtype=np.float32)


def print_demo(size: Size, seed: int, device_name: str) -> None:
    """Solve the forum's case at a given size; print what it took."""
    device = open_device(device_name)
    n, t, v, c = size
    problem = random_problem(size, seed)
    x, bulk, p0 = (device.put(array) for array in problem)
    chain = LogChain(x, transitions=bulk, initial=p0)
    plan = chain.plan()
    print(
        f"The forum's case: {n * t} chains of {v} steps with {c} states, float32, seed {seed}, "
        f"on {device.name}",
        flush=True,
    )
    # Once to compile what is used, once to trace memory, then a few times for the time.
    chain.log_partition()
    with device.trace() as peak:
        result = device.get(chain.log_partition())
    times: list[float] = []
    while len(times) < _MOST_RUNS and sum(times) < _TIME_LIMIT:
        start = time.perf_counter()
        chain.log_partition()
        device.wait()
        times.append(time.perf_counter() - start)
    error = float(np.max(np.abs(result - recursion_in_float64(*problem)), initial=0.0))
    pairs = f"; expanded matrices, multiplied in pairs, take {amount(plan.pairwise_bytes)}"
    print(f"  time    {duration(statistics.median(times))}, median of {len(times)} runs")
    print(f"  memory  {amount(peak.size)} beyond the inputs{pairs if plan.pairwise_bytes else ''}")
    print(f"  error   {error:.1e} nats at most, against a recursion in float64")
    print(f"  route   {plan.route}: {plan.reason}")


def recursion_in_float64(x: Floats, bulk: Floats, p0: Floats) -> Floats:
    """Return log Z by plain NumPy in float64 with a vector per row, to compare with."""
    x, bulk, p0 = (array.astype(np.float64) for array in (x, bulk, p0))
    with np.errstate(divide="ignore"):
        log_alpha = np.log(p0) + x[..., 0, :]
        for i in range(1, x.shape[-2]):
            shift = log_alpha.max(axis=-1, keepdims=True)
            # [t, n, c] @ [t, c, c]: rows that share their matrices make one product.
            alpha = np.moveaxis(np.exp(log_alpha - shift), 0, 1) @ bulk[0, :, i - 1]
            log_alpha = np.log(np.moveaxis(alpha, 1, 0)) + shift + x[..., i, :]
    shift = log_alpha.max(axis=-1, keepdims=True)
    total: Floats = np.log(np.sum(np.exp(log_alpha - shift), axis=-1)) + shift[..., 0]
    return total
