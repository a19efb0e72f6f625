"""`python -m benchmarks`: measure, and write JSON, a table and a plot."""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from arraylogchain._text import duration
from benchmarks import report
from benchmarks.cases import CASES
from benchmarks.definitions import Case
from benchmarks.machine import describe_machine, describe_versions
from benchmarks.runner import Settings, run_case

_THOROUGH = Settings(rounds=9, input_sets=2, seconds_per_contestant=2.0, pause=0.05, quick=False)
_QUICK = Settings(rounds=2, input_sets=1, seconds_per_contestant=0.5, pause=0.0, quick=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes: only show that all runs")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="PATTERN",
        default=["*"],
        help="cases by name, in this order, e.g. 'forum-*' 'chain-*'",
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", default=Path(__file__).parent / "results"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    args = parser.parse_args(argv)
    chosen = {
        case.name: case
        for pattern in args.only
        for case in CASES
        if fnmatch.fnmatch(case.name, pattern)
    }
    cases = list(chosen.values())
    if not cases:
        parser.error(f"no case matches {args.only!r}; --list shows their names")
    if args.list:
        width = max(len(case.name) for case in cases)
        print("\n".join(f"{case.name:<{width}}  {case.title}" for case in cases))
        return 0
    path = measure(cases, _QUICK if args.quick else _THOROUGH, args.output)
    print(report.write(path), file=sys.stderr)
    return 0


def measure(cases: Sequence[Case], settings: Settings, folder: Path) -> Path:
    """Run the cases one after the other; return the file that holds what was found."""
    now = datetime.now(UTC)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{now:%Y-%m-%d-%H%M}{'-quick' if settings.quick else ''}.json"
    content: dict[str, Any] = {
        "date": now.isoformat(timespec="seconds"),
        "quick": settings.quick,
        "machine": describe_machine(),
        "versions": describe_versions(),
        "cases": [],
    }
    for number, case in enumerate(cases, start=1):
        print(f"[{number}/{len(cases)}] {case.name}", file=sys.stderr)
        start = time.perf_counter()
        content["cases"].append(run_case(case, settings, _show_progress))
        _show_progress(duration(time.perf_counter() - start))
        # After every case, so that a long run that is interrupted leaves what it found.
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


def _show_progress(text: str) -> None:
    print(f"    {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
