"""What `python -m arraylogchain` shows: what computes here, and the case that started the project.

A model computes ``p0 · D_0 · P_1 · D_1 · … · P_{v-1} · x_{v-1}`` in log space for each of n rows:
``x`` [n, t, v, c] holds log weights, D_i is the diagonal matrix of exp(x_i), ``bulk``
[1, t, v-1, c, c] holds the matrices P_i, and ``p0`` [1, t, c] the initial weights.
"""

from __future__ import annotations

import importlib
import os
import platform
import timeit
import tracemalloc
from typing import Any

import array_api_compat
import numpy as np

from arraylogchain import LogChain, __version__, _compiled, logmatmulexp
from arraylogchain._cuda.device import find
from arraylogchain._text import amount, duration
from arraylogchain._threads import num_workers

# The sizes n, t, v, c at which the forum's user ran out of memory.
SIZES = (500, 1, 40, 200)


def describe() -> str:
    """Say what computes here. Imports Numba, CuPy and torch where they are installed."""
    reason = _compiled.why_not()
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


def compile_loops() -> str:
    """Compile all loops that Numba's cache does not have, and say how long that took."""
    if _compiled.why_not():
        return "nothing to compile: array operations compute"
    seconds = timeit.timeit(compile_all, number=1)
    return f"all loops are compiled, and kept on disk: {duration(seconds)}"


def compile_all() -> None:
    """Call what has loops: chains, and products of terms that no matrix multiply proves."""
    chain = LogChain(np.zeros((2, 3, 2)), transitions=np.ones((1, 2, 2)), lengths=[3, 2])
    chain.marginals()
    chain.viterbi()
    chain.sample(1, rng=np.random.default_rng(0))
    logmatmulexp(np.array([[0.0, -2000.0]]), np.array([[-2000.0], [0.0]]))


def show_case(device: str) -> None:
    """Solve the forum's case; print what that took, and how far it is off."""
    cupy = _imported("cupy") if device == "cuda" else None
    n, t, v, c = SIZES
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, t, v, c), dtype=np.float32) - np.float32(2)
    bulk = rng.random((1, t, v - 1, c, c), dtype=np.float32)
    p0 = rng.random((1, t, c), dtype=np.float32)
    arguments: dict[str, Any] = {"log_potentials": x, "transitions": bulk, "initial": p0}
    exact = LogChain(**{name: x.astype(float) for name, x in arguments.items()}).log_partition()
    chain = LogChain(
        **{name: x if cupy is None else cupy.asarray(x) for name, x in arguments.items()}
    )
    what = f"{n * t} chains of {v} steps with {c} states, float32, on {device}"
    print(f"The forum's case: {what}", flush=True)

    def solve() -> Any:
        result = chain.log_partition()
        return result if cupy is None else cupy.asnumpy(result)

    result, times = solve(), timeit.repeat(solve, number=1, repeat=5)
    print(f"  time    {duration(min(times))}, the best of {len(times)} runs")
    if cupy is None:
        pairs = f"matrices, expanded for all rows, take {amount(n * bulk.nbytes)}"
        tracemalloc.start()
        chain.log_partition()
        print(f"  memory  {amount(tracemalloc.get_traced_memory()[1])} beyond the inputs; {pairs}")
        tracemalloc.stop()
    print(f"  error   {np.max(np.abs(result - exact)):.1e} nats at most, against float64")
    plan = chain.plan()
    print(f"  route   {plan.route}: {plan.reason}")


def _on_device(library: str) -> str:
    """Say which version of CuPy or torch is here, and what computes with its arrays."""
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
    """Return a library that computes; raise RuntimeError where there is none, or no device."""
    try:
        result = importlib.import_module(library)
        if library == "cupy":
            result.zeros(1)
    except Exception as error:  # CuPy's own kinds of errors among them
        missing = isinstance(error, ModuleNotFoundError) and error.name == library
        text = "not installed" if missing else f"not usable: {error!r}"
        raise RuntimeError(f"{library} is {text}") from error
    return result
