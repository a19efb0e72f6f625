"""``python -m benchmarks``: measure, and write a record with its page of tables."""

from __future__ import annotations

import argparse
import fnmatch
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.cases import CASES, FIRST, SHOWN
from benchmarks.devices import Cpu, Cuda
from benchmarks.machine import describe_commit, describe_machine, describe_versions
from benchmarks.registry import Case
from benchmarks.runner import Settings, run_case

_THOROUGH = Settings(rounds=9, seconds=2.0, pause=0.05, quick=False)
_SHOWN = Settings(rounds=9, seconds=0.7, pause=0.05, quick=False)
_QUICK = Settings(rounds=2, seconds=0.2, pause=0.0, quick=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    args = _parser().parse_args(argv)
    cases = _chosen(args)
    if args.list:
        return _list(cases)
    _name_what_is_missing(cases, args.device)
    for name, value in describe_machine()["blas overrides"].items():
        _tell(f"benchmarks: {name}={value} is set: unset it for real figures")
    try:
        device = Cuda() if args.device == "cuda" else Cpu()
    except Exception as error:  # of CuPy, torch or the driver
        _tell(f"benchmarks: no CUDA device can be used here ({str(error).splitlines()[0]})")
        return 2
    settings = _QUICK if args.quick else _SHOWN if args.showcase else _THOROUGH
    path = args.into or _new_file(args.output, args.device, args.quick)
    measure(cases, settings, path, device)
    content = report.read(path)
    for title, some in report.grouped(content["cases"]):
        print(f"\n{title}\n\n{report.aligned(report.overview(some))}")
    print(f"\n{report.conditions(content)}")
    _tell(f"\n{path}\n{report.write(path)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cpu", help="where to measure (default: cpu)")
    add("--quick", action="store_true", help="small sizes: only show that all runs")
    add("--showcase", action="store_true", help="what README and the documentation show")
    add("--only", nargs="+", metavar="PATTERN", help="cases by name, e.g. 'forum-*' 'chain-*'")
    add("--output", type=Path, metavar="DIR", default=report.RESULTS)
    add("--into", type=Path, metavar="FILE", help="add to this record the cases that it lacks")
    add("--list", action="store_true", help="print the names of the cases")
    return parser


def _chosen(args: argparse.Namespace) -> list[Case]:
    """Return the cases that were asked for."""
    cases = [case for case in CASES if args.device in case.devices]
    if args.only:
        cases = [c for c in cases if any(fnmatch.fnmatch(c.name, each) for each in args.only)]
    elif args.showcase:
        cases = [case for case in cases if case.name in SHOWN]
    elif args.quick:  # processes of their own compile for minutes
        cases = [case for case in cases if case.group != FIRST]
    if not cases:
        _parser().error(f"no case matches {args.only!r}; --list shows their names")
    return cases


def _list(cases: Sequence[Case]) -> int:
    width = max(len(case.name) for case in cases)
    try:
        for case in cases:
            print(f"{case.name:<{width}}  {case.title}", flush=True)
    except BrokenPipeError:  # whoever read has seen enough
        sys.stdout = None
    return 0


def _name_what_is_missing(cases: Iterable[Case], device: str) -> None:
    """Say which libraries to compare with are not installed, and how to install them."""
    reasons = {each.missing() for case in cases for each in case.contestants(device)}
    missing = ", ".join(sorted(reason.partition(" ")[0] for reason in reasons if reason))
    if missing:
        _tell(f"benchmarks: left out: {missing}; pip install -e '.[bench]' brings them")


def _new_file(folder: Path, device: str, quick: bool) -> Path:
    """Return the name of a record; its folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = [f"{datetime.now(UTC):%Y-%m-%d-%H%M}", "cuda" * (device == "cuda"), "quick" * quick]
    return folder / f"{'-'.join(filter(None, parts))}.json"


def measure(cases: Sequence[Case], settings: Settings, path: Path, device: Cpu) -> None:
    """Run the cases that a record lacks, and add each to it as soon as it is known."""
    content = report.read(path) if path.exists() else _new_content(settings, device)
    present = {case["name"] for case in content["cases"]}
    for number, case in enumerate(cases, start=1):
        if case.name in present:
            continue
        start = time.perf_counter()
        try:
            runs = run_case(case, settings, device)
        except (ImportError, MemoryError) as error:  # of inputs and references
            _tell(f"{case.name}: {type(error).__name__}: {error}")
            continue
        content["cases"].append(runs)
        report.save(path, content)
        _tell(f"[{number}/{len(cases)}] {case.name}: {time.perf_counter() - start:.1f} s")
        for result in runs["results"]:
            if (result["not_run"] or "").startswith("failed"):
                _tell(f"    {result['label']}: {result['not_run']}")
    report.save(path, content)


def _new_content(settings: Settings, device: Cpu) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": describe_commit(),
        "quick": settings.quick,
        "device": device.name,
        "machine": describe_machine() | device.describe(),
        "versions": describe_versions(),
        "cases": [],
    }


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
