"""Describe the machine, the versions and the settings of a measurement."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

_PACKAGES = (
    "numpy",
    "numba",
    "array-api-compat",
    "scipy",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "torch",
    "triton",
    "torch-semiring-einsum",
    "pytorch-crf",
    "torch-struct",
    "hmmlearn",
    "dynamax",
    "jax",
)


# Make OpenBLAS take kernels, or blocks, that it would not choose for this processor.
_OVERRIDES = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")


def describe_machine() -> dict[str, Any]:
    """Return the processor, its cores, and the BLAS library that NumPy calls, with its kernels."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "blas": f"{blas['name']} {blas['version']}",
        "blas kernels": _blas_kernels(),
        "blas overrides": {name: os.environ[name] for name in _OVERRIDES if name in os.environ},
        "threads": {k: v for k, v in os.environ.items() if k.endswith("_NUM_THREADS")},
        "long double bits": int(np.finfo(np.longdouble).nmant),
    }


def describe_versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Return the versions of Python, this library, and the contestants."""
    import arraylogchain

    result = {"python": platform.python_version(), "arraylogchain": arraylogchain.__version__}
    for package in packages:
        try:
            result[package] = version(package)
        except PackageNotFoundError:
            continue
    return result


def describe_commit() -> str:
    """Return the commit of this checkout, and whether files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--match="]
    try:
        result = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return result.stdout.strip()


def _blas_kernels() -> list[str]:
    """Return the kernels and the number of threads of each loaded BLAS library."""
    try:
        from threadpoolctl import threadpool_info
    except ModuleNotFoundError:
        return []
    return sorted(
        f"{each['internal_api']} {each['version']}, kernels for {each.get('architecture', '?')}, "
        f"{each['num_threads']} threads"
        for each in threadpool_info()
        if each["user_api"] == "blas"
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()
