"""What a measurement depends on besides the code."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

_PACKAGES = (
    "numpy",
    "array-api-compat",
    "scipy",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "torch",
    "triton",
    "torch-semiring-einsum",
    "hmmlearn",
    "dynamax",
    "jax",
)


def describe_machine() -> dict[str, Any]:
    """Return the processor, its cores, and the BLAS library that NumPy calls."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "blas": f"{blas['name']} {blas['version']}",
        "threads": {k: v for k, v in os.environ.items() if k.endswith("_NUM_THREADS")},
        "long double bits": int(np.finfo(np.longdouble).nmant),
    }


def describe_versions() -> dict[str, str]:
    """Return the versions of Python, this library, and what took part."""
    import arraylogchain

    found = {"python": platform.python_version(), "arraylogchain": arraylogchain.__version__}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()
