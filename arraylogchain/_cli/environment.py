"""What is available on this machine."""

from __future__ import annotations

import importlib
import os
import platform
import time
from typing import Any

import array_api_compat
import numpy as np

from arraylogchain import LogChain, __version__, _compiled, logmatmulexp
from arraylogchain._cuda.device import find
from arraylogchain._text import duration
from arraylogchain._threads import num_workers


def describe() -> str:
    """Say what computes here. Imports Numba, CuPy and torch where they are installed."""
    reason = _compiled.why_not()
    numba = (
        f"array operations ({reason})" if reason else importlib.import_module("numba").__version__
    )
    threads = f"{num_workers()} of {os.cpu_count()} CPU cores"
    found = {"numpy": np.__version__, "array-api-compat": array_api_compat.__version__}
    found |= {"numba": numba, "cupy": _cupy(), "torch": _torch(), "threads": threads}
    system = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    lines = [f"  {name:<16}  {text}" for name, text in found.items()]
    return "\n".join([f"arraylogchain {__version__} on {system}", *lines])


def compile_loops() -> str:
    """Compile all loops, and say how long that took."""
    if _compiled.why_not():
        return "nothing to compile: array operations compute"
    start = time.perf_counter()
    compile_all()
    return f"all loops are compiled, and kept on disk: {duration(time.perf_counter() - start)}"


def compile_all() -> None:
    """Compile all loops, for chains and products, where Numba's cache does not have them."""
    chain = LogChain(np.zeros((2, 3, 2)), transitions=np.ones((1, 2, 2)), lengths=[3, 2])
    chain.marginals()
    chain.viterbi()
    chain.sample(1, rng=np.random.default_rng(0))
    # No matrix multiply proves the sum of two terms that are as far below the others.
    logmatmulexp(np.array([[0.0, -2000.0]]), np.array([[-2000.0], [0.0]]))


def _cupy() -> str:
    try:
        cupy = usable_cupy()
    except RuntimeError as reason:
        return str(reason).removeprefix("CuPy is ")
    device = cupy.cuda.Device()
    name = cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode()
    return f"{cupy.__version__}, {name}, {_kernels('cupy', device)}"


def _torch() -> str:
    try:
        torch: Any = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        return _why_no(error, "torch")
    has_cuda = torch.cuda.is_available() and torch.cuda.device_count()
    computes = _kernels("torch", torch.device("cuda")) if has_cuda else "CPU only"
    return f"{torch.__version__}, {computes}"


def _kernels(library: str, device: Any) -> str:
    """Say what computes on a CUDA device, and why it is not the kernels if it is not."""
    found = find(library, device)
    return f"array operations ({found})" if isinstance(found, str) else "CUDA kernels"


def usable_cupy() -> Any:
    """Return CuPy; raise RuntimeError where it has no device to compute on."""
    try:
        cupy: Any = importlib.import_module("cupy")
        cupy.zeros(1)
    except Exception as error:  # CuPy's own kinds of errors among them
        raise RuntimeError(f"CuPy is {_why_no(error, 'cupy')}") from error
    return cupy


def _why_no(error: Exception, library: str) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == library:
        return "not installed"
    return f"not usable: {(str(error) or type(error).__name__).splitlines()[0]}"
