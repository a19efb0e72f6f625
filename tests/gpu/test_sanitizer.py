"""compute-sanitizer finds nothing: no access out of bounds, no race in shared memory."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def find_sanitizer():
    """Return the tool, from PATH or from where CUDA is installed; None where it is not there."""
    folders = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    places = [Path(f) / sub for f in folders if f for sub in ("bin", "compute-sanitizer")]
    path = os.pathsep.join([os.environ.get("PATH", ""), *map(str, places)])
    return shutil.which("compute-sanitizer", path=path)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_every_kernel(cupy, tool):
    sanitizer = find_sanitizer()
    if sanitizer is None:
        pytest.skip("compute-sanitizer is neither on PATH nor in CUDA_HOME")
    ours = [sys.executable, "-m", "tests.gpu.every_kernel"]
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20", *ours]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "kernels are right" in done.stdout
