"""Validation of options: the workspace, the number of threads, and other integers."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

DEFAULT_WORKSPACE = 64 * 2**20
DEFAULT_WORKSPACE_ON_CUDA = 256 * 2**20
# NumPy's own buffers for mixed dtypes take up to a few hundred kilobytes.
SMALLEST_WORKSPACE = 2**20


def check_workspace(workspace: int | None, *arrays: Any) -> int:
    """Return the workspace in bytes for arrays; raise unless it is an integer of at least 1 MiB."""
    if workspace is None:
        for x in arrays:
            # `is_cpu` of a tensor is read faster than the text of its device.
            on_cpu = type(x) is np.ndarray or getattr(x, "is_cpu", None) is True
            if not on_cpu and "cuda" in str(getattr(x, "device", "")).lower():
                return DEFAULT_WORKSPACE_ON_CUDA
        return DEFAULT_WORKSPACE
    return at_least(SMALLEST_WORKSPACE, "workspace", workspace, " bytes")


def check_workers(workers: int | None) -> int | None:
    """Return the number of threads that a caller asks for, or None; raise if it is below 1."""
    return None if workers is None else at_least(1, "workers", workers)


def at_least(lowest: int, name: str, x: int, unit: str = "") -> int:
    """Return an argument as an integer; raise if it is none, or less than `lowest`."""
    is_bool = isinstance(x, bool) or "bool" in str(getattr(x, "dtype", ""))
    value = None
    if not is_bool and not getattr(x, "ndim", False) and hasattr(x, "__index__"):
        with suppress(TypeError):  # arrays without axes may hold other numbers
            value = x.__index__()
    if value is None:
        raise TypeError(f"{name} must be an integer, got {type(x).__name__}")
    if value < lowest:
        raise ValueError(f"{name} must be at least {lowest}{unit}, got {x}")
    return value
