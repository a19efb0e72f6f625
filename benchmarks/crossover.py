"""Where compiled loops and array operations cross: ``python -m benchmarks.crossover``.

Both compute the same chains on the CPU, by turns. The constants of `arraylogchain.plan` are fitted
to the times, printed, and written to a file of results with them; so is what is lost where those
that are in force pick the slower one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import nnls

import arraylogchain as alc
from arraylogchain import _dispatch, plan
from arraylogchain._array.products.tiling import DEFAULT_WORKSPACE
from arraylogchain._inputs.chain import enter_chain
from arraylogchain._text import duration
from benchmarks.machine import describe_machine, describe_versions

# Rows, steps, states.
SIZES = (
    (1, 200, 3),
    (1, 1000, 16),
    (1, 500, 64),
    (1, 200, 200),
    (8, 200, 4),
    (8, 200, 32),
    (8, 100, 128),
    (50, 40, 8),
    (50, 40, 64),
    (50, 40, 200),
    (500, 40, 8),
    (500, 40, 32),
    (500, 20, 200),
    (1000, 100, 5),
    (1000, 50, 16),
    (4000, 20, 5),
    (4000, 20, 32),
    (64, 200, 32),
    (200, 30, 100),
)
BACKENDS = ("compiled", "array")
_SECONDS = 0.25  # of both on one chain, after which no round is begun but the third
_ROUNDS = 7


class Row(NamedTuple):
    """Median seconds of both implementations on a chain."""

    operation: str
    dtype: str
    rows: int
    steps: int
    states: int
    compiled: float
    array: float

    @property
    def sizes(self) -> plan.Sizes:
        num_real, matrices = self.rows * self.steps, num_matrices(self.operation, self.steps)
        return plan.Sizes(1, self.rows, self.steps, self.states, num_real, False, matrices)

    def ratio_of_choice(self) -> float:
        """Return the time of what is chosen over that of the faster one."""
        chosen = plan.choose(self.operation, self.sizes, BACKENDS, DEFAULT_WORKSPACE).route
        seconds = self.compiled if chosen == "compiled" else self.array
        return seconds / min(self.compiled, self.array)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.crossover", description=__doc__)
    parser.add_argument("--operations", nargs="+", default=list(plan.KINDS), metavar="NAME")
    parser.add_argument("--output", type=Path, help="where to write the times, as JSON")
    parser.add_argument("--quick", action="store_true", help="few sizes: only show that all runs")
    args = parser.parse_args(argv)
    rows = []
    for row in measure(args.operations, SIZES[:4] if args.quick else SIZES):
        rows.append(row)
        times = f"{duration(row.compiled):>9} {duration(row.array):>9}"
        print(f"{times} {row.ratio_of_choice():6.2f}  {' '.join(map(str, row[:5]))}", flush=True)
    fits = {
        kind: {backend: fit(rows, kind, backend) for backend in BACKENDS}
        for kind in sorted({plan.KINDS[row.operation] for row in rows})
    }
    print(json.dumps(fits, indent=1))
    ratios = [row.ratio_of_choice() for row in rows]
    print(f"chosen / faster: median {statistics.median(ratios):.2f}, largest {max(ratios):.2f}")
    if args.output:
        record = {
            "machine": describe_machine(),
            "versions": describe_versions(),
            "date": time.strftime("%Y-%m-%d"),
            "seconds": [row._asdict() for row in rows],
            "fits": fits,
        }
        args.output.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def measure(operations: Sequence[str], sizes: Sequence[tuple[int, int, int]]) -> Iterator[Row]:
    """Time both implementations of operations on chains of some sizes."""
    for operation, dtype, size in itertools.product(operations, ("float32", "float64"), sizes):
        calls = [_call(operation, backend, dtype, size) for backend in BACKENDS]
        yield Row(operation, dtype, *size, *_medians(calls))


def num_matrices(operation: str, steps: int) -> int:
    """Gradients are wanted of the forum's model, which has a matrix for each step."""
    return steps - 1 if operation == "value_and_pullback" else 1


def _call(
    operation: str, backend: str, dtype: str, size: tuple[int, int, int]
) -> Callable[[], object]:
    rng = np.random.default_rng(0)
    rows, steps, states = size
    x = rng.normal(size=(rows, steps, states)).astype(dtype)
    shape = (num_matrices(operation, steps), states)
    transitions = rng.dirichlet(np.ones(states), shape).astype(dtype)
    chain = alc.LogChain(x, transitions=transitions)
    ctx, entered = enter_chain(chain.arrays, chain.lengths)
    function: Callable[..., Any] = _dispatch.implementation(operation, backend)
    more: tuple[Any, ...] = ()
    if operation == "value_and_pullback":
        more = (True,)
    elif operation == "sample":
        paths = np.empty((1, rows, steps), np.int64)
        more = (paths, paths.view(np.float64))
    wanted = frozenset({"potentials", "transitions"})
    cotangent = np.ones(rows, dtype)

    def call() -> object:
        with ctx.computing():
            if operation == "sample":
                more[1][...] = 0.5  # paths take the place of the uniform numbers
            found = function(ctx, entered, DEFAULT_WORKSPACE, *more)
            return found[1](cotangent, wanted) if operation == "value_and_pullback" else found

    return call


def _medians(calls: Sequence[Callable[[], object]]) -> list[float]:
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    begin = time.perf_counter()
    for number in range(_ROUNDS):
        for call, seconds in zip(calls, times, strict=True):
            call()  # caches and threads are those of the other one
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        if number >= 2 and time.perf_counter() - begin > _SECONDS:
            break
    return [statistics.median(each) for each in times]


def fit(rows: Sequence[Row], kind: str, backend: str) -> dict[str, float]:
    """Return the constants of `plan.Cost` with the smallest squares of relative errors."""
    terms, seconds = [], []
    for row in rows:
        in_packs = plan.packs_serve(row.rows, row.steps, row.states, DEFAULT_WORKSPACE)
        if plan.KINDS[row.operation] == kind and not in_packs:
            segments = plan.count_segments(row.operation, row.sizes, DEFAULT_WORKSPACE)
            terms.append(plan.terms(row.operation, backend, row.sizes, segments))
            seconds.append(getattr(row, backend))
    scaled = np.asarray(terms) / np.asarray(seconds)[:, None]
    found = nnls(scaled, np.ones(len(seconds)))[0]
    digits = [float(f"{each:.1e}") for each in found]
    return dict(zip(plan.Cost._fields, digits, strict=True)) | {
        "largest error": math.exp(float(np.abs(np.log(scaled @ found)).max()))
    }


if __name__ == "__main__":
    raise SystemExit(main())
