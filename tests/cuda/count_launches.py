"""Count the launches and waits of each public operation on a CUDA device, without a device.

    python -m tests.cuda.count_launches [--json FILE] [--only REGEX] [--limits FILE] [--torch]

Columns of the table, and keys of the JSON file:

    launches  kernels + gemm + array + h2d
    kernels   launches of the library's own kernels
    gemm      matrix multiplies
    array     other array operations: elementwise, reductions, copies, gathers, fills
    h2d       copies of arrays from the host
    sync      waits for the device: reads of numbers and truth values, and indexing with masks
    python    microseconds of Python in a warm call, without the time inside kernels and NumPy
    error     largest difference from the same call on NumPy arrays, relative to 1 + abs(result)
    top       the most frequent launches and waits

`--limits` reads {case: {"launches": n, "sync": n, "python": n}}; the exit status is 1 if a case
exceeds one. `--torch` counts torch's operations in losses and their gradients instead.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import arraylogchain as alc
from tests.cuda.counting import TALLY, CountingDevice, DeviceArray, counting, to_host

METHODS = ("log_partition", "gradients", "posterior", "marginals", "expected_transitions")
METHODS += ("viterbi", "sample", "entropy", "filtered", "forward_messages", "backward_messages")
MAX_CALLS, MAX_SECONDS = 9, 2.0  # of the measurement of Python's time

Arrays = dict[str, np.ndarray]


class Operation(NamedTuple):
    """A public operation and a function that makes its arrays; `lengths` stay on the host."""

    make: Callable[[], Arrays]
    call: Callable[..., Any]


class ChainCase(NamedTuple):
    """Sizes and weights of the chain of a case."""

    n: int
    T: int
    K: int
    is_shared: bool = False
    is_log: bool = False
    has_final: bool = False
    is_ragged: bool = False


CHAINS = {
    "forum-like 8x40x200, own linear": ChainCase(8, 40, 200),
    "small 24x40x33, own linear": ChainCase(24, 40, 33),
    "hmm 40x60x5, one linear": ChainCase(40, 60, 5, is_shared=True),
    "crf 16x40x20, one logs, final, ragged": ChainCase(16, 40, 20, True, True, True, True),
    "own logs 6x12x40": ChainCase(6, 12, 40, is_log=True, has_final=True),
}
# Shapes of both operands, and options of `normal`.
LOG_PRODUCTS: dict[str, tuple[tuple, tuple, dict[str, Any]]] = {
    "8x8": ((8, 8), (8, 8), {}),
    "64^3": ((64, 64), (64, 64), {}),
    "64^3 half": ((64, 64), (64, 64), {"dtype": "float16"}),
    "64^3 sd 1000": ((64, 64), (64, 64), {"sd": 1000.0}),
    "batch 6x1,1x5": ((6, 1, 20, 9), (1, 5, 9, 7), {}),
    "large 648x640x656": ((648, 640), (640, 656), {}),
}


def operations() -> Iterator[tuple[str, Operation]]:
    """Yield all cases by name; arrays come from one generator, in order of the calls."""
    rng = np.random.default_rng(0)

    def normal(*shape: int, sd: float = 1.0, dtype: str = "float32") -> np.ndarray:
        return (sd * rng.standard_normal(shape)).astype(dtype)

    def pair(call: Callable[..., Any], a: tuple, b: tuple, **options: Any) -> Operation:
        return Operation(lambda: {"a": normal(*a, **options), "b": normal(*b, **options)}, call)

    for name, (a, b, options) in LOG_PRODUCTS.items():
        yield f"logmatmulexp {name}", pair(alc.logmatmulexp, a, b, **options)
        with_gradients = value_and_gradients(alc.vjp.logmatmulexp)
        yield f"logmatmulexp {name}, vjp", pair(with_gradients, a, b, **options)
    square = (64, 64), (64, 64)
    yield "matmul 64^3", pair(alc.matmul, *square)
    yield "matmul 512,8,1,64 @ 8,64,64", pair(alc.matmul, (512, 8, 1, 64), (8, 64, 64))
    yield "matmul 64^3, vjp", pair(value_and_gradients(alc.vjp.matmul), *square)
    yield "maxplus 64^3", pair(alc.maxplus_matmul, *square)
    yield "maxplus 64^3, vjp", pair(value_and_gradients(alc.vjp.maxplus_matmul), *square)

    def stack() -> Arrays:
        return {"a": normal(16, 32, 32)}

    yield "logchainexp 16 x 32^2", Operation(stack, alc.logchainexp)
    with_gradients = value_and_gradients(alc.vjp.logchainexp)
    yield "logchainexp 16 x 32^2, vjp", Operation(stack, with_gradients)
    for label, case in CHAINS.items():
        for method in METHODS:
            yield f"{label}: {method}", chain_operation(case, method, rng)


def value_and_gradients(vjp: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes a value and its gradients for a cotangent of ones."""

    def call(*args: Any) -> Any:
        value, pullback = vjp(*args)
        return value, pullback(ones_like(value[0] if isinstance(value, tuple) else value))

    return call


def chain_operation(case: ChainCase, method: str, rng: np.random.Generator) -> Operation:
    def make() -> Arrays:
        arrays = {"x": rng.standard_normal((case.n, case.T, case.K)).astype("float32")}
        P = rng.random((1 if case.is_shared else case.T - 1, case.K, case.K)) + 1e-3
        P = (P / P.sum(-1, keepdims=True)).astype("float32")
        arrays |= {"log_transitions": np.log(P)} if case.is_log else {"transitions": P}
        arrays["initial"] = np.full(case.K, 1 / case.K, "float32")
        if case.has_final:
            arrays["log_final"] = rng.standard_normal(case.K).astype("float32")
        if case.is_ragged:
            arrays["lengths"] = np.arange(case.n) % case.T + 1
        return arrays

    def call(x: Any, **options: Any) -> Any:
        chain = alc.LogChain(x, **options, workspace=2**28)  # the default on devices
        if method == "sample":
            return chain.sample(2, rng=0)
        if method == "gradients":
            value, pullback = alc.vjp.log_partition(chain)
            return value, tuple(g for g in pullback(ones_like(value)) if g is not None)
        return getattr(chain, method)()

    return Operation(make, call)


def ones_like(x: Any) -> Any:
    ones = np.ones(np.shape(x), getattr(x, "dtype", float))
    return ones.view(DeviceArray) if isinstance(x, DeviceArray) else ones


def measure(name: str, operation: Operation) -> dict[str, Any]:
    """Return the counts of a warm call, its error and the time of its Python."""
    row, out, arrays = count(operation)
    # Random numbers and best paths may differ between precisions.
    row["error"] = 0.0
    if not name.endswith(("sample", "viterbi")):
        row["error"] = error_of(out, operation.call, arrays)
    row["python"] = round(python_seconds(operation.call, arrays) * 1e6)
    return row


def count(operation: Operation) -> tuple[dict[str, Any], Any, Arrays]:
    """Return the counts of a warm call, its result and its arrays."""
    arrays = operation.make()
    arrays = {k: x if k == "lengths" else x.view(DeviceArray) for k, x in arrays.items()}
    call_with(operation.call, arrays)
    with TALLY.recording():
        out = call_with(operation.call, arrays)
    return TALLY.row(), out, arrays


def call_with(call: Callable[..., Any], arrays: Arrays) -> Any:
    """Call an operation, with operands and potentials by position."""
    args = [x for name, x in arrays.items() if name in ("a", "b", "x")]
    return call(*args, **{k: x for k, x in arrays.items() if k not in ("a", "b", "x")})


def error_of(out: Any, call: Callable[..., Any], arrays: Arrays) -> float:
    """Return the largest relative difference from the results for float64 arrays of NumPy."""
    wide = {k: x if k == "lengths" else to_host(x).astype(float) for k, x in arrays.items()}
    error = 0.0
    with np.errstate(all="ignore"):
        for x, exact in zip(flat(out), flat(call_with(call, wide)), strict=True):
            difference = np.abs(np.where(x == exact, 0, x - exact)) / (1 + np.abs(exact))
            error = max(error, float(np.max(difference, initial=0)))
    return error


def flat(x: Any) -> list[np.ndarray]:
    """Return the arrays of a result in float64."""
    if isinstance(x, tuple | list):
        return [array for item in x for array in flat(item)]
    return [] if x is None else [np.asarray(to_host(x), float)]


def python_seconds(call: Callable[..., Any], arrays: Arrays) -> float:
    best, end = float("inf"), time.perf_counter() + MAX_SECONDS
    for _ in range(MAX_CALLS):
        TALLY.seconds = 0.0
        start = time.perf_counter()
        call_with(call, arrays)
        now = time.perf_counter()
        best = min(best, now - start - TALLY.seconds)
        if now > end:
            break
    return best


def measure_all(pattern: str) -> dict[str, dict[str, Any]]:
    """Return the rows of all cases whose names match; a failure has its text as a row."""
    rows = {}
    with counting(CountingDevice(seed=3)):
        for name, operation in operations():
            if re.search(pattern, name):
                try:
                    rows[name] = measure(name, operation)
                except Exception as error:
                    rows[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
    return rows


def exceeded(rows: dict[str, dict[str, Any]], limits: dict[str, dict[str, int]]) -> list[str]:
    """Return a line for each case that is missing, failed or exceeds a limit."""
    lines = [f"{name}: {row['failed']}" for name, row in rows.items() if "failed" in row]
    for name, limit in limits.items():
        row = rows.get(name, {})
        over = {key: (row[key], n) for key, n in limit.items() if (row.get(key) or 0) > n}
        if name not in rows or over:
            lines.append(f"{name}: {over or 'not measured'}")
    return lines


def print_table(rows: dict[str, dict[str, Any]]) -> None:
    columns = ("launches", "kernels", "gemm", "array", "h2d", "sync", "python")
    print(f"{'':58}", *(f"{column:>8}" for column in columns), "   error")
    for name, row in rows.items():
        if "failed" not in row:
            cells = (f"{'-' if row[column] is None else row[column]:>8}" for column in columns)
            print(f"{name:58}", *cells, f"{row['error']:8.0e}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda.count_launches")
    parser.add_argument("--json", type=Path, help="file that the rows are written to")
    parser.add_argument("--only", default="", help="regular expression of the cases' names")
    parser.add_argument("--limits", type=Path, help="JSON file of limits")
    parser.add_argument("--torch", action="store_true", help="count torch's operations instead")
    options = parser.parse_args()
    if options.torch:
        from tests.cuda.counting_torch import measure_all as measure_tensors

        rows = measure_tensors(options.only)
    else:
        rows = measure_all(options.only)
    print_table(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), "utf-8")
    limits = json.loads(options.limits.read_text("utf-8")) if options.limits else {}
    lines = exceeded(rows, limits)
    print(*lines, sep="\n", end="\n" if lines else "")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
