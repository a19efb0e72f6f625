"""An installed package has its kernels' sources."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from arraylogchain._cuda import kernels
from tests.conftest import import_or_skip

ROOT = Path(__file__).parents[2]

READ_ALL = """
import json
from arraylogchain._cuda import kernels

files = sorted(str(p.relative_to(kernels.FOLDER)) for p in kernels.FOLDER.rglob("*.cu*"))
texts = {name: (kernels.FOLDER / name).read_text() for name in files}
print(json.dumps([str(kernels.FOLDER), texts]))
"""


def python(*arguments: str, cwd: Path, path: str = "") -> str:
    """Run Python and return its output."""
    command, environment = [sys.executable, *arguments], {**os.environ, "PYTHONPATH": path}
    return subprocess.check_output(command, cwd=cwd, env=environment, text=True)


def test_the_wheel_has_every_source_file(tmp_path):
    # Without the build tool's own environment, which would have to be downloaded.
    import_or_skip("hatchling")
    python("-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "wheel"), cwd=ROOT)
    (wheel,) = (tmp_path / "wheel").iterdir()
    target = tmp_path / "installed"
    pip = ("-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target), str(wheel))
    python(*pip, cwd=tmp_path)

    folder, result = json.loads(python("-c", READ_ALL, cwd=tmp_path, path=str(target)))
    assert Path(folder).is_relative_to(target)
    here = [str(p.relative_to(kernels.FOLDER)) for p in kernels.FOLDER.rglob("*.cu*")]
    assert result == {name: (kernels.FOLDER / name).read_text() for name in here}
    assert any(name.endswith(".cu") for name in here)
