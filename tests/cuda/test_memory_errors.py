"""Kernels under AddressSanitizer: all accesses are within their memory.

Tests marked ``sanitized`` run here once more, each file's in a process that has the sanitizer's
library from its start.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import skip_or_fail
from tests.cuda.cpu_compiler import COMPILER, SANITIZED

pytestmark = pytest.mark.exhaustive

HERE = Path(__file__).parent
MARKED = [
    path.name
    for path in sorted(HERE.glob("test_*.py"))
    if path.name != Path(__file__).name and "pytest.mark.sanitized" in path.read_text()
]


@cache
def libraries() -> tuple[str, ...]:
    """Return the libraries that have to be loaded first; () where the compiler has none."""
    result = []
    for name in ("libasan.so", "libstdc++.so"):
        command = [COMPILER, f"-print-file-name={name}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        path = Path(done.stdout.strip())
        if not path.is_absolute():
            return ()
        result.append(str(path))
    return tuple(result)


def run_sanitized(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with kernels compiled for AddressSanitizer."""
    if not libraries():
        skip_or_fail("g++", f"{COMPILER} comes without AddressSanitizer's library")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ALC_", "PYTEST_"))}
    environment |= {
        SANITIZED: "1",
        "LD_PRELOAD": " ".join(libraries()),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python does not free everything when it ends
    }
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=HERE.parents[1],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", MARKED)
def test_kernels_stay_within_their_memory(name):
    options = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    # Whatever order threads run in, they read and write the same places.
    options = (*options, "-m", "sanitized and not exhaustive")
    done = run_sanitized(*options, f"{HERE / name}")
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert re.search(r"\d+ passed", done.stdout)


FAULT = """
import numpy as np
from tests.cuda.test_shim import run_fault

x = np.ones(1024, np.float32)
run_fault({kernel!r}, {arguments}, np.int32({beyond}), shared=128)
print("nothing found")
"""

# Planted faults: the kernel's arguments, and the sanitizer's name of the fault.
FAULTS = {
    "reads_beyond": ("x[:32].copy(), x", "heap-buffer-overflow"),
    "writes_beyond_static_shared_memory": ("x", "heap-buffer-overflow"),
    "writes_beyond_dynamic_shared_memory": ("x", "heap-buffer-overflow"),
    "writes_beyond_a_thread_s_array": ("x", "stack-buffer-overflow"),
}


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("kernel", list(FAULTS))
def test_a_planted_access_out_of_bounds_is_found(kernel):
    arguments, kind = FAULTS[kernel]
    sound = run_sanitized("-c", FAULT.format(kernel=kernel, arguments=arguments, beyond=0))
    assert sound.returncode == 0, sound.stderr[-4000:]
    assert "nothing found" in sound.stdout
    # By one thread, by one entry.
    faulty = run_sanitized("-c", FAULT.format(kernel=kernel, arguments=arguments, beyond=1))
    assert faulty.returncode != 0
    report = f"AddressSanitizer: {kind}.*{kernel}.* .*faults\\.cu:\\d+"
    assert re.search(report, faulty.stderr, re.DOTALL), faulty.stderr[-4000:]
