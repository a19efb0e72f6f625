"""Kernels prove themselves on the device they meet, before their first results are handed out.

An operation that uses a kernel is computed for a small hard example, on the device and by array
operations on NumPy arrays in float64. If the results agree, an empty file remembers that, for the
model of the device, its driver, NVRTC, CuPy and the sources of the kernels. If they do not, or if
the compiler or the driver rejects the kernel, there is a warning, and array operations compute from
then on.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from arraylogchain._core.context import Array, Context
from arraylogchain._core.precision import DOUBLE, SINGLE
from arraylogchain._cuda.device import refuse_capture
from arraylogchain._cuda.kernels import C_TYPES, Kernel, options
from arraylogchain._version import __version__

# Compiled loops take NumPy's own namespace only, so that none is compiled for a check.
_NUMPY = Context(
    array_namespace(np.empty(0)), "cpu", "float64", DOUBLE, DOUBLE, 2**16, None, has_out=True
)
_DTYPES = {c_type: dtype for dtype, c_type in C_TYPES.items()}

_lock = threading.Lock()
# Whether a kernel is being checked in this thread: its example then takes all kernels, as array
# operations in their place would say nothing about it.
_is_checking = ContextVar("_is_checking", default=False)


# An operation that uses a kernel, and arrays for it by name. It returns an array or a tuple of
# arrays, given a context and the arrays. Errors of 200 terms are allowed; sums over many rows have
# more, whose roundings mostly cancel.
Example = tuple[Callable[..., Any], dict[str, np.ndarray]]
_TERMS = 200
# By names of kernels: functions of a context and of a kernel's template arguments, which matter for
# variants of `chain_steps` only.
EXAMPLES: dict[str, Callable[[Context, Sequence[str]], Example]] = {}


def is_usable(ctx: Context, kernel: Kernel, recursion: Kernel | None = None) -> bool:
    """Return whether a kernel passed its check; it is loaded, and checked if it is new.

    `recursion` is the variant of `chain_steps` that the caller's operation runs; the example is
    shaped to run it, too. During a check every kernel counts as usable.
    """
    if _is_checking.get():
        return True
    usable = ctx.kernels.usable
    if kernel not in usable:
        with _lock:
            if kernel not in usable:
                usable[kernel] = _passes(ctx, kernel, recursion)
    return bool(usable[kernel])


def _passes(ctx: Context, kernel: Kernel, recursion: Kernel | None) -> bool:
    device = ctx.kernels
    refuse_capture(device.is_capturing(), f"the kernel {kernel.name} has not been loaded")
    try:
        device.load(kernel)
        record = _record(device, kernel)
        is_checked = os.environ.get("ARRAYLOGCHAIN_SELF_CHECK") != "0"
        if not is_checked or os.path.exists(record):  # noqa: PTH110 (no folder is an error here)
            return True
        ratio = largest_error(ctx, kernel, recursion)
        if ratio <= 1:
            with suppress(OSError):
                record.parent.mkdir(parents=True, exist_ok=True)
                record.touch()
            return True
        problem = f"results err by {ratio:.3g} times the allowed error"
    except Exception as error:  # the compiler's, the driver's, ...
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            raise
        problem = f"{type(error).__name__}: {error}"
    warnings.warn(
        f"the CUDA kernel {kernel.name} cannot be used on {device.identity}: {problem}; array "
        "operations take its place from now on. Please report this, with what "
        "arraylogchain --device cuda --check prints",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


def largest_error(ctx: Context, kernel: Kernel, recursion: Kernel | None = None) -> float:
    """Return the largest ratio of an error of a kernel's example to the allowed one.

    An error of eps * (2 |exact| + reach) is allowed, with the eps of results and of the precision:
    a certified sum is at least tiny / eps, which bounds how far a result may lie below the shifts
    that its terms are relative to.
    """
    dtype = [_DTYPES[x] for x in kernel.arguments if x in _DTYPES][-1]
    precision = DOUBLE if dtype == "float64" else SINGLE
    ctx = replace(ctx, result_name=dtype, precision=precision)
    example = EXAMPLES[kernel.name.partition("<")[0]]
    operation, arrays = example(ctx, (recursion or kernel).arguments[1:])
    reach = 3 * math.log(precision.eps / precision.tiny) + 4 * _TERMS
    token = _is_checking.set(True)
    try:
        with ctx.computing(), np.errstate(all="ignore"):
            inputs, exact_inputs = dict(arrays), dict(arrays)
            for name, x in arrays.items():
                if x.dtype.kind == "f":
                    inputs[name] = ctx.to_result(ctx.xp.asarray(x, device=ctx.device))
                    exact_inputs[name] = _as_float64(inputs[name])
            results = operation(ctx, **inputs), operation(_NUMPY, **exact_inputs)
            pairs = zip(*results, strict=True) if isinstance(results[0], tuple) else [results]
            return max(_ratio(ctx, *pair, reach) for pair in pairs)
    finally:
        _is_checking.reset(token)


def _as_float64(x: Array) -> np.ndarray:
    return np.asarray(x.tolist(), np.float64)


def _ratio(ctx: Context, result: Array, exact: Array, reach: float) -> float:
    """Return the largest error as a part of eps * (2 |exact| + reach)."""
    y = _as_float64(result)
    eps = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(ctx.result_name, ctx.precision.eps)
    error = np.abs(y - exact) / (2 * eps * np.abs(exact) + ctx.precision.eps * reach)
    error = np.where((y == exact) | (np.isnan(y) & np.isnan(exact)), 0, error)
    return float(np.max(np.nan_to_num(error, nan=np.inf), initial=0.0))


def _record(device: Any, kernel: Kernel) -> Path:
    """Return the file that exists once a kernel has passed."""
    text = f"{device.identity} {__version__} {kernel.name} {options()[-1]}"
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    return Path(cache) / "arraylogchain" / hashlib.sha256(text.encode()).hexdigest()[:32]
