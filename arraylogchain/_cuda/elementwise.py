"""Loops over contiguous arrays, before and after other kernels."""

from __future__ import annotations

import math

import numpy as np

from arraylogchain._context import Array
from arraylogchain._cuda.device import Device
from arraylogchain._cuda.dtypes import C_TYPES, compute_type
from arraylogchain._cuda.launch import Launch, ceil_div

INSTANTIATIONS = {
    "elementwise.cu": [
        *(f"rounded<{C_TYPES[half]}>" for half in ("float16", "bfloat16")),
        *(f"zeros<{C_TYPES[full]}>" for full in ("float32", "float64")),
    ]
}

THREADS = 256
# A loop of this many blocks keeps any device busy; longer arrays take more turns.
_MAX_BLOCKS = 1 << 16


def blocks_for(count: int) -> int:
    """Return how many blocks a loop over `count` entries takes."""
    return max(1, min(ceil_div(count, THREADS), _MAX_BLOCKS))


def rounded(device: Device, sums: Array | None, dtype: str) -> Array | None:
    """Return sums in the dtype of the result."""
    if sums is None or compute_type(dtype) == dtype:
        return sums
    out = device.empty(tuple(sums.shape), dtype)
    _run(device, f"rounded<{C_TYPES[dtype]}>", math.prod(sums.shape), sums, out)
    return out


def zeros(device: Device, shape: tuple[int, ...], dtype: str) -> Array:
    """Return a contiguous array of zeros of a full precision."""
    out = device.empty(shape, dtype)
    _run(device, f"zeros<{C_TYPES[dtype]}>", math.prod(shape), out)
    return out


def _run(device: Device, kernel: str, count: int, *arrays: Array) -> None:
    arguments = (*arrays, np.int64(count))
    device.run(Launch("elementwise.cu", kernel, blocks_for(count), THREADS, arguments))
