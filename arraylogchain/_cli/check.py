"""`python -m arraylogchain --device cuda --check`: a table about kernels, to go with a report."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from arraylogchain import __version__, _dispatch
from arraylogchain._array.products.tiling import check_workspace
from arraylogchain._arrays import enter
from arraylogchain._cli.environment import UnavailableError, open_device, timings
from arraylogchain._context import Context, library_name
from arraylogchain._cuda import self_check, tuning
from arraylogchain._cuda.device import Device, find
from arraylogchain._fold import fold
from arraylogchain._inputs.chain import enter_chain
from arraylogchain._text import duration

DTYPES, TIMED = ("float32", "float64", "float16"), ("float32", "float64")
# Rows, terms and columns; and rows, steps and states, with one matrix for all steps.
PRODUCTS = ((16, 4096, 4096), (1024, 1024, 1024), (4096, 4096, 4096))
CHAINS = ((500, 40, 200), (64, 32, 1024), (64, 32, 4096))
_CUDA, _TENSOR_CORES, _ARRAY = "cuda", "cuda.tensor_cores", "array"

Put = Callable[[Any], Any]
Row = tuple[str, Sequence[str]]


def print_check() -> bool:
    """Check all kernels, and time those that something else could replace; tell if all pass."""
    put = open_device("cuda").put
    contexts = {dtype: enter({"a": put(np.zeros(1, dtype))})[0] for dtype in DTYPES}
    ctx = contexts[DTYPES[0]]
    if ctx.kernels is None:
        reason = find(library_name(ctx.xp), ctx.device)
        raise UnavailableError(f"installed, but the kernels cannot be used: {reason}")
    _print_versions(ctx.kernels)
    passed = _print_errors(contexts)
    _print_table(
        "time of",
        ("kernel", "tensor cores", "array operations"),
        chain(_product_rows(contexts, put), _chain_rows(put)),
    )
    for line in timings(ctx.kernels):
        print(f"in use: {line}")
    return passed


def _print_versions(device: Device) -> None:
    shared = f"{device.shared_memory} bytes of shared memory for a block"
    print(
        f"arraylogchain {__version__}, NumPy {np.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}\n"
        f"{device.identity}, compute capability {device.architecture / 10}, "
        f"{device.multiprocessors} multiprocessors, {shared}\n",
        flush=True,
    )


def _print_errors(contexts: dict[str, Context]) -> bool:
    """Print the largest errors of all operations, as a part of what their bounds allow."""
    problems = []

    def rows() -> Iterator[Row]:
        for operation, backends in (_dispatch.PRODUCTS | _dispatch.CHAINS).items():
            for backend in (name for name in backends if name.startswith(_CUDA)):
                name = operation + (" (tensor cores)" if backend == _TENSOR_CORES else "")
                cells = []
                for dtype, ctx in contexts.items():
                    if backend == _TENSOR_CORES and not tuning.has_tensor_cores(ctx.kernels):
                        cells.append("")
                        continue
                    with ctx.computing():
                        error, problem = self_check.check(ctx, operation, None, backend)
                    cells.append(f"{error:.2g}")
                    if problem is not None:
                        problems.append(f"FAILED: {name}, {dtype}: {problem}")
                yield name, cells

    _print_table("largest error / bound of", tuple(contexts), rows())
    print("\n".join(problems))
    return not problems


def _product_rows(contexts: dict[str, Context], put: Put) -> Iterator[Row]:
    rng, budget = np.random.default_rng(0), check_workspace(None)
    for dtype in TIMED:
        for rows, terms, columns in PRODUCTS:
            shapes = (rows, terms), (terms, columns)
            a, b = (put(rng.standard_normal(shape).astype(dtype)) for shape in shapes)
            given = (contexts[dtype], fold(*shapes), a, b, budget)
            times = _times("logmatmulexp", (_CUDA, _TENSOR_CORES, _ARRAY), *given)
            yield f"log product {rows} x {terms} x {columns}, {dtype}", times


def _chain_rows(put: Put) -> Iterator[Row]:
    rng, budget = np.random.default_rng(0), check_workspace(None)
    for dtype in TIMED:
        for rows, steps, states in CHAINS:
            given = {
                "log_potentials": put(rng.standard_normal((rows, steps, states)).astype(dtype)),
                "transitions": put(rng.random((1, states, states)).astype(dtype)),
            }
            ctx, whole = enter_chain(given, None)
            kernel, array = _times("log_partition", (_CUDA, _ARRAY), ctx, whole, budget)
            yield f"log Z {rows} x {steps} x {states}, {dtype}", [kernel, "", array]


def _times(operation: str, backends: Sequence[str], ctx: Context, *args: Any) -> list[str]:
    """Return what implementations take, in words; those that do not run say so."""
    found = []
    for backend in backends:
        run = partial(_dispatch.implementation(operation, backend), ctx, *args)
        with ctx.computing():
            seconds = tuning.timed(ctx.kernels, run)
        found.append(duration(seconds) if math.isfinite(seconds) else "does not run")
    return found


def _print_table(what: str, columns: Sequence[str], rows: Iterable[Row]) -> None:
    for name, cells in chain([(what, columns)], rows):
        print(f"{name:<44}" + "".join(f"{cell:>18}" for cell in cells), flush=True)
