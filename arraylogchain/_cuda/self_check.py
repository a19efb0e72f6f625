"""Kernels prove themselves on the device they meet, before their first results are handed out.

One small hard case of each kernel is compared with NumPy in long double or float64. Passed: an
empty file remembers that, for the model of the device, its driver, NVRTC, CuPy and the kernel's
source. Failed, or refused by the compiler or the driver: a warning, and array operations compute
from then on.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import os
import platform
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from arraylogchain import __version__
from arraylogchain._arrays import on_host, prepare_inputs
from arraylogchain._context import Array, Context
from arraylogchain._cuda.device import find
from arraylogchain._cuda.kernels import INSTANTIATIONS, Kernel, source_text
from arraylogchain._fold import fold
from arraylogchain._text import duration

_lock = threading.Lock()


def is_usable(ctx: Context, kernel: Kernel) -> bool:
    """Tell whether a kernel is right on this device; it is loaded, and checked if it is new."""
    known = ctx.kernels.known
    if kernel not in known:
        with _lock:
            if kernel not in known:
                known[kernel] = _has_no_problem(ctx, kernel)
    return bool(known[kernel])


def _has_no_problem(ctx: Context, kernel: Kernel) -> bool:
    device = ctx.kernels
    if device.is_capturing():
        raise RuntimeError(
            f"a CUDA graph is being captured, and the kernel {kernel.name} has not been loaded; "
            "make the same call once before the capture"
        )
    try:
        device.load(kernel)
        if _has_passed(device, kernel):
            return True
        problem = check(ctx, kernel)
    except Exception as error:  # the compiler's, the driver's, ...
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            raise
        problem = f"{type(error).__name__}: {error}"
    if problem is None:
        _remember(device, kernel)
        return True
    warnings.warn(
        f"the CUDA kernel {kernel.name} cannot be used on {device.identity}: {problem}; array "
        "operations take its place from now on. Please report this, with what "
        "python -m arraylogchain --device cuda --check prints",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


def check(ctx: Context, kernel: Kernel) -> str | None:
    """Return what is wrong with a kernel, by its hard case."""
    ratio = largest_error(ctx, kernel)
    return None if ratio <= 1 else f"results err by {ratio:.3g} times what is allowed"


def largest_error(ctx: Context, kernel: Kernel) -> float:
    """Return the largest error of a kernel's hard case, as a part of what is allowed."""
    name = kernel.name.partition("<")[0]
    case = {"chain_steps": _steps, "chain_trace": _trace}.get(name, _product)
    with ctx.computing(), np.errstate(all="ignore"):
        pairs = list(case(ctx, kernel))
    return max(_ratio(ctx, *pair) for pair in pairs)


def _remember(device: Any, kernel: Kernel) -> None:
    """Note on disk that a kernel has passed, if that can be done."""
    with suppress(OSError):
        _record(device, kernel).parent.mkdir(parents=True, exist_ok=True)
        _record(device, kernel).touch()


def _has_passed(device: Any, kernel: Kernel) -> bool:
    if os.environ.get("ARRAYLOGCHAIN_SELF_CHECK") == "0":
        return True
    with suppress(OSError):
        return _record(device, kernel).exists()
    return False


def _record(device: Any, kernel: Kernel) -> Path:
    text = f"{device.identity} {__version__} {kernel.name} {source_text(kernel.source)}"
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    return Path(cache) / "arraylogchain" / hashlib.sha256(text.encode()).hexdigest()[:32]


def _ratio(ctx: Context, result: Array, exact: np.ndarray, reach: float) -> float:
    """Return the largest error as a part of eps * (2 |exact| + reach)."""
    if "float16" in ctx.result_name and "int" not in str(result.dtype):
        result = ctx.xp.astype(result, ctx.xp.float32)
    y = np.asarray(on_host("result", result), np.float64)
    eps = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(ctx.result_name, ctx.precision.eps)
    with np.errstate(all="ignore"):
        error = np.abs(y - exact) / (2 * eps * np.abs(exact) + ctx.precision.eps * reach)
    error = np.where((y == exact) | (np.isnan(y) & np.isnan(exact)), 0, error)
    return float(np.max(np.nan_to_num(error, nan=np.inf), initial=0.0))


def _entries(ctx: Context, rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Return numbers that every dtype has: some of them in wide ranges, zeros, infinities."""
    depth = 120.0 if ctx.precision.name == "float32" else 800.0
    x = np.rint(rng.normal(0, 3, shape))
    x[..., 3::7, :] *= 20
    x[..., ::5, 1:] -= depth
    x[..., 4::9, 2:] = -np.inf
    return x


def _log_sum_exp(x: np.ndarray, axis: int) -> np.ndarray:
    top = np.max(x, axis=axis, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    logs: np.ndarray = np.log(np.sum(np.exp(x - top), axis=axis, keepdims=True)) + top
    return np.squeeze(logs, axis)


def _product(ctx: Context, kernel: Kernel) -> Iterator[tuple[Array, np.ndarray, float]]:
    """Multiply two tiles by two, whose edges stand out; maxima do not meet."""
    from arraylogchain._cuda import products

    rng = np.random.default_rng(0)
    a, b = _entries(ctx, rng, 70, 37), _entries(ctx, rng, 66, 37).T
    updated, right = (ctx.to_result(ctx.xp.asarray(x, device=ctx.device)) for x in (a, b))
    terms, layout = a[:, :, None] + b, fold(a.shape, b.shape)
    if kernel.name.startswith("maxplus"):
        values, indices = products.maxplus(ctx, layout, updated, right)
        yield values, terms.max(1), 0.0
        yield indices, terms.argmax(1), 0.0
    else:
        compute = products.by_blas if kernel.name.startswith("settle") else products.by_tiles
        yield compute(ctx, layout, updated, right), _log_sum_exp(terms, 1), _reach(ctx, 37)


def _reach(ctx: Context, terms: int) -> float:
    """Return G + c of the error model: a proved sum is at least tiny / eps."""
    return 3 * math.log(ctx.precision.eps / ctx.precision.tiny) + 4 * terms


def _chain(ctx: Context, states: int, rows: int, has_one: bool) -> tuple[Any, Any, Any]:
    """Return potentials and matrices, in logs, and a piece of two groups of rows of two lengths."""
    from arraylogchain._array.chains.pieces import shards
    from arraylogchain._inputs import Chain

    rng, steps, groups = np.random.default_rng(1), 5, 1 if has_one else 2
    x = _entries(ctx, rng, groups, rows, steps, states)
    logs = _entries(ctx, rng, groups, 1 if has_one else steps - 1, states, states)
    lengths = None if groups > 1 else np.where(np.arange(rows) < rows // 2, steps - 2, steps)
    names = "potentials", "transitions"
    arrays = [ctx.to_result(ctx.xp.asarray(z, device=ctx.device)) for z in (x, logs[:, None])]
    chain = Chain(
        batch=(groups, rows),
        parts=dict(zip(names, arrays, strict=True)),
        logs=names,
        lengths=None if lengths is None else lengths[None],
    )
    (shard,) = shards(ctx, chain, groups, rows)
    order = np.arange(rows) if lengths is None else np.argsort(-lengths, kind="stable")
    return x[:, order], np.broadcast_to(logs, (groups, steps - 1, states, states)), shard


def _steps(ctx: Context, kernel: Kernel) -> Iterator[tuple[Array, np.ndarray, float]]:
    """Take rows of two lengths, or two groups with matrices of each step, both ways."""
    from arraylogchain._array.chains.pieces import UPDATED
    from arraylogchain._cuda.chains import CudaBackend, Geometry

    *_, sums, in_warp, rows, on_chip = kernel.name.rstrip(">").replace(" ", "").split(",")
    geometry = Geometry(sums == "true", in_warp == "true", int(rows), on_chip == "true")
    states = 5 if geometry.in_warp else 37
    x, logs, shard = _chain(ctx, states, geometry.rows + 5, geometry.on_chip)
    whole, recursion = slice(0, 5), CudaBackend(shard, 1 << 24, geometry)
    reach = 5 * _reach(ctx, states)
    lengths = np.full(x.shape[:2], 5) if shard.lengths is None else shard.lengths
    for backward in (False, True) if geometry.sums else (False,):
        exact = _walk(x, logs, lengths, backward, _log_sum_exp if geometry.sums else np.max)
        if geometry.sums:
            block = recursion.advance(None, whole, backward, UPDATED)
        else:
            block = recursion.best(None, whole, UPDATED)
        updated = block.updated.logs(ctx)
        for t in range(5):
            real = np.argwhere(lengths > t)
            yield from ((updated[t, g, r], exact[t, g, r], reach) for g, r in real)


def _walk(
    x: np.ndarray, logs: np.ndarray, lengths: np.ndarray, backward: bool, join: Callable[..., Any]
) -> np.ndarray:
    """Return what leaves each step, [T, groups, rows, K], by sums over pairs of states."""
    x = np.moveaxis(x, 2, 0)
    updated, steps = x.copy(), len(x)
    for t in range(steps - 2, -1, -1) if backward else range(1, steps):
        if backward:
            moved = join(logs[:, None, t] + updated[t + 1][..., None, :], -1)
            updated[t] += np.where((t < lengths - 1)[..., None], moved, 0)
        else:
            updated[t] += join(logs[:, None, t - 1] + updated[t - 1][..., :, None], -2)
    return updated


def _trace(ctx: Context, kernel: Kernel) -> Iterator[tuple[Array, np.ndarray, float]]:
    """Go back through what the recursion would keep."""
    from arraylogchain._array.chains.pieces import Messages
    from arraylogchain._cuda.chains import CudaBackend, Geometry

    x, logs, shard = _chain(ctx, 37, 6, has_one=False)
    updated = np.moveaxis(x, 2, 0)
    after = np.arange(12).reshape(2, 6)
    on_device = ctx.load(ctx.xp.asarray(updated, device=ctx.device), ctx.precision)
    recursion = CudaBackend(shard, 1 << 24, Geometry(False, False, 1, False))
    stored = Messages(on_device, None, None, None)
    result = recursion.trace(stored, ctx.xp.asarray(after, device=ctx.device), slice(0, 5))
    exact = np.empty((5, 2, 6))
    exact[4] = state = after
    for t in range(3, -1, -1):
        to_state = np.stack([logs[g, t][:, state[g]].T for g in range(2)])
        exact[t] = state = np.argmax(updated[t] + to_state, -1)
    yield result, exact, 0.0


# ---------------------------------------------------------------------------------- the report


def report() -> bool:
    """Compare every kernel with NumPy and print times beside cuBLAS's; tell whether all are right.

    Raises
    ------
    RuntimeError
        Why there is no device on which kernels run.
    """
    try:
        cupy = importlib.import_module("cupy")
        contexts = {
            name: prepare_inputs({"a": cupy.zeros(1, name)})[0]
            for name in ("float32", "float64", "float16")
        }
    except Exception as error:
        raise RuntimeError(f"CuPy cannot use a CUDA device: {error}") from error
    ctx = contexts["float32"]
    if ctx.kernels is None:
        raise RuntimeError(f"the kernels cannot be used: {find('cupy', ctx.device)}")
    device = ctx.kernels
    print(
        f"arraylogchain {__version__}, NumPy {np.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}\n{device.identity}, compute capability "
        f"{device.architecture / 10}, {device.multiprocessors} multiprocessors, "
        f"{device.shared_memory} bytes of shared memory for a block\n\nlargest error / bound",
        flush=True,
    )
    passed = [_print_error(contexts[name], kernel) for name, kernel in kernels_of_cupy()]
    print("\ntime, and that of the same multiplies by cuBLAS")
    benchmark = partial(importlib.import_module("cupyx.profiler").benchmark, n_repeat=5, n_warmup=1)
    for name, *runs in _timed(ctx):
        with ctx.computing():
            ours, theirs = (float(benchmark(run, name=name).gpu_times.min()) for run in runs)
        print(f"{name:<44}{duration(ours):>12}{duration(theirs):>12}", flush=True)
    return all(passed)


def kernels_of_cupy() -> Iterator[tuple[str, Kernel]]:
    """Yield all kernels, with the dtypes that they are for; CuPy has no arrays of bfloat16."""
    dtypes = {"float": "float32", "double": "float64", "__half": "float16"}
    for source, names in INSTANTIATIONS.items():
        for name in names:
            first = name.partition("<")[2].rstrip(">").partition(",")[0]
            if first in dtypes:
                yield dtypes[first], Kernel(source, name)


def _print_error(ctx: Context, kernel: Kernel) -> bool:
    try:
        ratio = largest_error(ctx, kernel)
        text = f"{ratio:.2g}"
    except Exception as error:
        ratio, text = math.inf, f"{type(error).__name__}: {error}"
    print(f"{kernel.name:<44}{text:>12}{'' if ratio <= 1 else '  FAILED'}", flush=True)
    return ratio <= 1


def _timed(ctx: Context) -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    """Yield what is timed, and the multiplies that it is compared with."""
    from arraylogchain import LogChain, logmatmulexp

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
