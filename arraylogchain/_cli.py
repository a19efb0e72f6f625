"""Output of the command: versions and backends, errors of kernels, and the reference workload.

A model computes ``p0 · D_0 · P_1 · D_1 · … · P_{v-1} · x_{v-1}`` in log space for each of n rows:
``x`` [n, t, v, c] holds log weights, D_i is the diagonal matrix of exp(x_i), ``bulk``
[1, t, v-1, c, c] holds the matrices P_i, and ``p0`` [1, t, c] the initial weights.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import platform
import sys
import timeit
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import array_api_compat
import numpy as np

from arraylogchain import _numba, vjp
from arraylogchain._core.context import Array, Context
from arraylogchain._core.progress import LOGGER
from arraylogchain._core.text import amount, duration
from arraylogchain._core.threads import num_workers
from arraylogchain._cuda.device import NO_CUPY, find
from arraylogchain._cuda.kernels import INSTANTIATIONS, Kernel
from arraylogchain._cuda.self_check import largest_error
from arraylogchain._inputs.arrays import prepare_inputs
from arraylogchain._version import __version__
from arraylogchain.chain import LogChain
from arraylogchain.products import logmatmulexp

# Sizes n, t, v, c of the reference workload.
SIZES = (500, 1, 40, 200)


def describe() -> str:
    """Return versions and backends as text; import Numba, CuPy and torch if they are installed."""
    reason = _numba.why_not()
    result = {
        "numpy": np.__version__,
        "array-api-compat": array_api_compat.__version__,
        "numba": f"array operations ({reason})" if reason else _imported("numba").__version__,
        "cupy": _on_device("cupy"),
        "torch": _on_device("torch"),
        "threads": f"{num_workers()} of {os.cpu_count()} CPU cores",
    }
    system = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    lines = [f"  {name:<16}  {text}" for name, text in result.items()]
    return "\n".join([f"arraylogchain {__version__} on {system}", *lines])


@contextmanager
def shown_progress() -> Iterator[None]:
    """Print messages about compilation within the context."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("  %(message)s"))
    level = LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOGGER.setLevel(level)
        LOGGER.removeHandler(handler)


def compile_loops() -> str:
    """Compile all loops that are not in Numba's cache; return a message with the time it took."""
    if _numba.why_not():
        return "nothing to compile: array operations compute"
    seconds = timeit.timeit(compile_all, number=1)
    return f"all loops are compiled, and kept on disk: {duration(seconds)}"


def compile_all() -> None:
    """Call each compiled function, including those for entries that are not certified."""
    chain = LogChain(np.zeros((2, 3, 2)), transitions=np.ones((1, 2, 2)), lengths=[3, 2])
    chain.log_partition()
    chain.marginals()
    chain.viterbi()
    chain.best_paths(2)
    LogChain(np.zeros((3, 16)), transitions=np.eye(16)).log_partition()  # mostly zeros
    LogChain(np.zeros((3, 9)), transitions=np.ones((9, 9))).viterbi()  # more than eight states
    chain.sample(1, rng=np.random.default_rng(0))
    _, pullback = vjp.logmatmulexp(np.array([[0.0, -2000.0]]), np.array([[-2000.0], [0.0]]))
    pullback(np.ones((1, 1)))


def show_case(device: str) -> None:
    """Solve the reference workload; print its time, memory and error."""
    xp = _imported("cupy") if device == "cuda" else np
    n, t, v, c = SIZES
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, t, v, c), dtype=np.float32) - np.float32(2)
    bulk = rng.random((1, t, v - 1, c, c), dtype=np.float32)
    p0 = rng.random((1, t, c), dtype=np.float32)
    arguments: dict[str, Any] = {"log_potentials": x, "transitions": bulk, "initial": p0}
    exact = LogChain(**{name: x.astype(float) for name, x in arguments.items()}).log_partition()
    chain = LogChain(**{name: xp.asarray(x) for name, x in arguments.items()})
    size = f"{n * t} chains of {v} steps with {c} states, float32, on {device}"
    print(f"The forum's case: {size}", flush=True)

    def solve() -> Any:
        result = chain.log_partition()
        return result if xp is np else xp.asnumpy(result)

    result, times = solve(), timeit.repeat(solve, number=1, repeat=5)
    print(f"  time    {duration(min(times))}, the best of {len(times)} runs")
    if xp is np:
        pairs = f"matrices, expanded for all rows, take {amount(n * bulk.nbytes)}"
        tracemalloc.start()
        chain.log_partition()
        print(f"  memory  {amount(tracemalloc.get_traced_memory()[1])} beyond the inputs; {pairs}")
        tracemalloc.stop()
    print(f"  error   {np.max(np.abs(result - exact)):.1e} nats at most, against float64")
    plan = chain.plan()
    print(f"  route   {plan.route}: {plan.reason}")


def _on_device(library: str) -> str:
    """Return the version of CuPy or torch and the backend of its arrays on a device, as text."""
    try:
        xp = _imported(library)
    except RuntimeError as reason:
        return str(reason).partition(" is ")[2]
    if library == "torch" and not (xp.cuda.is_available() and xp.cuda.device_count()):
        return f"{xp.__version__}, CPU only"
    device = xp.cuda.Device() if library == "cupy" else xp.device("cuda")
    kernels = find(library, device)
    computes = f"array operations ({kernels})" if isinstance(kernels, str) else "CUDA kernels"
    return f"{xp.__version__}, {computes}"


def _imported(library: str) -> Any:
    """Return an imported library; raise RuntimeError if it, or a device for CuPy, is not usable."""
    try:
        result = importlib.import_module(library)
        if library == "cupy":
            result.zeros(1)
    except Exception as error:  # CuPy's own classes of errors among them
        name = "CuPy" if library == "cupy" else library
        text = f"{name} is not usable: {error!r}"
        if isinstance(error, ModuleNotFoundError) and error.name == library:
            text = NO_CUPY if library == "cupy" else f"{library} is not installed"
        raise RuntimeError(text) from error
    return result


def report() -> bool:
    """Print errors of all kernels and times next to cuBLAS; return whether all errors are allowed.

    Raises
    ------
    RuntimeError
        If kernels cannot run, with the reason.
    """
    cupy = _imported("cupy")
    ctx, _ = prepare_inputs({"a": cupy.zeros(1, "float32")})
    device = ctx.kernels
    if device is None:
        raise RuntimeError(f"the kernels cannot be used: {find('cupy', ctx.device)}")
    print(
        f"arraylogchain {__version__}, NumPy {np.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}\n{device.identity}, compute capability "
        f"{device.architecture / 10}, {device.multiprocessors} multiprocessors, "
        f"{device.shared_memory} bytes of shared memory for a block\n\nlargest error / bound",
        flush=True,
    )
    passed = [_print_error(ctx, kernel) for kernel in kernels_of_cupy()]
    print("\ntime, and that of the same multiplies by cuBLAS")
    benchmark = partial(importlib.import_module("cupyx.profiler").benchmark, n_repeat=5, n_warmup=1)
    for name, *runs in _timed(ctx):
        print(f"{name:<44}", end="", flush=True)
        with ctx.computing():
            ours, theirs = (float(benchmark(run, name=name).gpu_times.min()) for run in runs)
        print(f"{duration(ours):>12}{duration(theirs):>12}", flush=True)
    return all(passed)


def kernels_of_cupy() -> Iterator[Kernel]:
    """Yield all kernels but those of bfloat16, of which CuPy has no arrays."""
    for source, names in INSTANTIATIONS.items():
        yield from (Kernel(source, name) for name in names if "bfloat16" not in name)


def _print_error(ctx: Context, kernel: Kernel) -> bool:
    print(f"{kernel.name:<44}", end="", flush=True)  # before the kernel is compiled
    try:
        ratio = largest_error(ctx, kernel)
        text = f"{ratio:.2g}"
    except Exception as error:
        ratio, text = math.inf, f"{type(error).__name__}: {error}"
    print(f"{text:>12}{'' if ratio <= 1 else '  FAILED'}", flush=True)
    return ratio <= 1


def _timed(ctx: Context) -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    """Yield names of timed functions, the functions, and the multiplies compared with them."""
    xp = ctx.xp
    for shape in ((4096, 4096), (512, 64, 64)):
        x = xp.astype(xp.sin(xp.reshape(xp.arange(math.prod(shape)), shape)), xp.float32)
        size = " x ".join(map(str, shape))
        ours, theirs = partial(logmatmulexp, x, x), partial(xp.matmul, x, x)
        yield f"logmatmulexp, {size}, float32", ours, theirs
    for rows, steps, states in ((500, 40, 200), (1, 10_000, 4), (64, 1000, 32)):
        shape = (rows, steps, states)
        x = xp.astype(xp.sin(xp.reshape(xp.arange(math.prod(shape)), shape)), xp.float32)
        p = xp.full((states, states), 1 / states, dtype=xp.float32)
        chain = LogChain(x, transitions=p)

        def multiply(x: Array = x, p: Array = p, steps: int = steps) -> None:
            for t in range(steps - 1):
                xp.matmul(x[:, t, :], p)

        yield f"log_partition, {rows} x {steps} x {states}", chain.log_partition, multiply
