"""Measure in a process of its own, and in another one where that ends early.

A kernel that reads where it must not leaves its process without a device, one that never ends
leaves it waiting. Both cost their case, and not what comes after.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.definitions import Case
from benchmarks.runner import not_run_at_all

# Exit codes: no device, and a device that computes no more.
NO_DEVICE, BROKEN_DEVICE = 2, 3


def supervise(
    arguments: Sequence[str], cases: Sequence[Case], path: Path, stop_after: float | None
) -> int:
    """Run ``python -m benchmarks`` with some arguments until it has been through all cases.

    Parameters
    ----------
    arguments : sequence of str
        With ``--into``, by which cases that are in the file already are passed over.
    cases : sequence of Case
    path : Path
        The file of results.
    stop_after : float, optional
        Seconds from now after which no case is begun.

    Returns
    -------
    int
        The last exit code.
    """
    end = None if stop_after is None else time.monotonic() + stop_after
    while True:
        command = [sys.executable, "-m", "benchmarks", *arguments]
        if end is not None:
            command += ["--stop-after", f"{max(0.0, end - time.monotonic()):.0f}"]
        code = subprocess.run(command, check=False).returncode
        if code in (0, NO_DEVICE):
            return code
        if code != BROKEN_DEVICE and not note_end(path, cases, code):
            return code


def note_end(path: Path, cases: Sequence[Case], code: int) -> bool:
    """Note that a process ended within a case; return whether it had begun one."""
    content = load(path)
    name = content.pop("running", None)
    if name is None:
        return False
    case = next(case for case in cases if case.name == name)
    reason = f"the process ended within this case, exit code {code}"
    content["cases"].append(not_run_at_all(case, reason))
    save(path, content)
    return True


def load(path: Path) -> dict[str, Any]:
    """Return what a file of results holds; nothing where there is none yet."""
    if not path.exists():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def save(path: Path, content: dict[str, Any]) -> None:
    """Write a file of results, whole at any moment."""
    part = path.with_suffix(".part")
    rest = {key: value for key, value in content.items() if key != "cases"}
    cases = ",\n".join(json.dumps(case, ensure_ascii=False) for case in content["cases"])
    head = json.dumps(rest, indent=1, ensure_ascii=False).removesuffix("\n}")
    # A case on each line.
    part.write_text(f'{head},\n "cases": [\n{cases}\n]}}\n', encoding="utf-8")
    part.replace(path)
