"""Kernels prove themselves on the device they meet, before their first results are handed out.

One small hard case of each kernel is compared with NumPy in float64. Passed: an empty file
remembers that, for the model of the device, its driver, NVRTC, CuPy and the kernel's source.
Failed, or refused by the compiler or the driver: a warning, and array operations compute from then
on.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from arraylogchain._core.context import Array, Context
from arraylogchain._cuda.kernels import Kernel, source_text
from arraylogchain._version import __version__

# Results, exact ones, and the allowed error beyond 2 eps of these, in eps.
Results = Iterator[tuple[Array, np.ndarray, float]]
Case = Callable[[Context, Kernel], Results]

_lock = threading.Lock()


def is_usable(ctx: Context, kernel: Kernel, case: Case) -> bool:
    """Return whether a kernel is right on this device; it is loaded, and checked if it is new."""
    usable = ctx.kernels.usable
    if kernel not in usable:
        with _lock:
            if kernel not in usable:
                usable[kernel] = _has_no_problem(ctx, kernel, case)
    return bool(usable[kernel])


def _has_no_problem(ctx: Context, kernel: Kernel, case: Case) -> bool:
    device = ctx.kernels
    if device.is_capturing():
        raise RuntimeError(
            f"a CUDA graph is being captured, and the kernel {kernel.name} has not been loaded; "
            "make the same call once before the capture"
        )
    try:
        device.load(kernel)
        record = _record(device, kernel)
        is_checked = os.environ.get("ARRAYLOGCHAIN_SELF_CHECK") != "0"
        if not is_checked or os.path.exists(record):  # noqa: PTH110 (no folder is an error here)
            return True
        problem = check(ctx, kernel, case)
    except Exception as error:  # the compiler's, the driver's, ...
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            raise
        problem = f"{type(error).__name__}: {error}"
    if problem is None:
        with suppress(OSError):
            record.parent.mkdir(parents=True, exist_ok=True)
            record.touch()
        return True
    warnings.warn(
        f"the CUDA kernel {kernel.name} cannot be used on {device.identity}: {problem}; array "
        "operations take its place from now on. Please report this, with what "
        "arraylogchain --device cuda --check prints",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


def check(ctx: Context, kernel: Kernel, case: Case) -> str | None:
    """Return the problem of a kernel that fails its hard case, or None if it passes."""
    ratio = largest_error(ctx, kernel, case)
    return None if ratio <= 1 else f"results err by {ratio:.3g} times the allowed error"


def largest_error(ctx: Context, kernel: Kernel, case: Case) -> float:
    """Return the largest error of a kernel's hard case, as a part of the allowed one."""
    with ctx.computing(), np.errstate(all="ignore"):
        pairs = list(case(ctx, kernel))
    return max(_ratio(ctx, *pair) for pair in pairs)


def _record(device: Any, kernel: Kernel) -> Path:
    """Return the file that exists once a kernel has passed."""
    text = f"{device.identity} {__version__} {kernel.name} {source_text(kernel.source)}"
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    return Path(cache) / "arraylogchain" / hashlib.sha256(text.encode()).hexdigest()[:32]


def _ratio(ctx: Context, result: Array, exact: np.ndarray, reach: float) -> float:
    """Return the largest error as a part of eps * (2 |exact| + reach)."""
    y = np.asarray(result.tolist(), np.float64)
    eps = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(ctx.result_name, ctx.precision.eps)
    with np.errstate(all="ignore"):
        error = np.abs(y - exact) / (2 * eps * np.abs(exact) + ctx.precision.eps * reach)
    error = np.where((y == exact) | (np.isnan(y) & np.isnan(exact)), 0, error)
    return float(np.max(np.nan_to_num(error, nan=np.inf), initial=0.0))


def wide_entries(ctx: Context, rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Return numbers that every dtype has: some of them in wide ranges, zeros, infinities."""
    depth = 120.0 if ctx.precision.name == "float32" else 800.0
    x = np.rint(rng.normal(0, 3, shape))
    x[..., 3::7, :] *= 20
    x[..., ::5, 1:] -= depth
    x[..., 4::9, 2:] = -np.inf
    return x


def log_sum_exp(x: np.ndarray, axis: int) -> np.ndarray:
    top = np.max(x, axis=axis, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    logs: np.ndarray = np.log(np.sum(np.exp(x - top), axis=axis, keepdims=True)) + top
    return np.squeeze(logs, axis)


def error_limit(ctx: Context, terms: int) -> float:
    """Return G + c of the error model: a proved sum is at least tiny / eps."""
    return 3 * math.log(ctx.precision.eps / ctx.precision.tiny) + 4 * terms
