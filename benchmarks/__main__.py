"""`python -m benchmarks`: measure, write a record with its tables and plot, and show a table."""

from __future__ import annotations

import argparse
import faulthandler
import fnmatch
import importlib.util
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from arraylogchain._text import duration
from benchmarks import capacity, cuda_cases, report, runner, showcase, tables
from benchmarks.cases import CASES
from benchmarks.cuda_device import Cuda, NoDeviceError, open_cuda
from benchmarks.definitions import Case
from benchmarks.device import Cpu, Device
from benchmarks.machine import describe_commit, describe_machine, describe_versions
from benchmarks.runner import Settings
from benchmarks.supervisor import BROKEN_DEVICE, NO_DEVICE, load, save, supervise

_THOROUGH = Settings(rounds=9, input_sets=2, seconds_per_contestant=2.0, pause=0.05, quick=False)
_SHOWCASE = Settings(rounds=9, input_sets=1, seconds_per_contestant=0.7, pause=0.05, quick=False)
_QUICK = Settings(rounds=2, input_sets=1, seconds_per_contestant=0.2, pause=0.0, quick=True)
# Events keep out what disturbs a host, and a device is lent for minutes.
_ON_CUDA = Settings(rounds=5, input_sets=2, seconds_per_contestant=0.3, pause=0.0, quick=False)
# On a device, one contestant's warm-up or one round takes no longer, unless a kernel never ends.
_LONGEST_STEP = 200.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    args = _parser().parse_args(argv)
    table = CASES if args.device == "cpu" else cuda_cases.CASES
    patterns = args.only or (showcase.PATTERNS if args.showcase else ["*"])
    chosen = {
        case.name: case
        for pattern in patterns
        for case in table
        if fnmatch.fnmatch(case.name, pattern)
    }
    cases = list(chosen.values())
    if not cases:
        _parser().error(f"no case matches {args.only!r}; --list shows their names")
    if args.list:
        width = max(len(case.name) for case in cases)
        print("\n".join(f"{case.name:<{width}}  {case.title}" for case in cases))
    if args.device == "cpu":
        _name_what_is_missing(cases)
    if args.list:
        return 0
    path = args.into or _new_file(args.output, args.device, args.quick)
    if args.device == "cpu":
        for name, value in describe_machine()["blas overrides"].items():
            print(f"benchmarks: {name}={value} is set: unset it for real figures", file=sys.stderr)
        settings = _QUICK if args.quick else _SHOWCASE if args.showcase else _THOROUGH
        code = measure(cases, settings, path, Cpu(), args.stop_after)
    elif args.into:
        settings = _QUICK if args.quick else _ON_CUDA
        return _measure_on_cuda(cases, settings, path, args.stop_after)
    else:
        quick = ["--quick"] * args.quick
        within = ["--device", "cuda", "--into", str(path), "--only", *chosen, *quick]
        code = supervise(within, cases, path, args.stop_after)
    if path.exists():
        _show(path)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="where to measure (default: cpu)"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: only show that all runs")
    parser.add_argument(
        "--showcase",
        action="store_true",
        help="the cases that README and the documentation show, in about ten minutes",
    )
    parser.add_argument(
        "--only", nargs="+", metavar="PATTERN", help="cases by name, e.g. 'forum-*' 'chain-*'"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", default=Path(__file__).parent / "results"
    )
    parser.add_argument(
        "--stop-after", type=float, metavar="SECONDS", help="begin no case later than this"
    )
    parser.add_argument(
        "--into", type=Path, metavar="FILE", help="add to this record the cases that it lacks"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    return parser


def _name_what_is_missing(cases: Iterable[Case]) -> None:
    """Say which libraries to compare with are not installed, and how to install them."""
    needed = {name for case in cases for each in case.contestants for name in each.requires}
    missing = sorted(name for name in needed if importlib.util.find_spec(name) is None)
    if missing:
        print(
            f"benchmarks: not installed, and left out: {', '.join(missing)}; "
            'pip install -e ".[bench]" brings them',
            file=sys.stderr,
        )


def _new_file(folder: Path, device: str, quick: bool) -> Path:
    """Return the name of a record; its folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = [f"{datetime.now(UTC):%Y-%m-%d-%H%M}", "cuda" * (device == "cuda"), "quick" * quick]
    return folder / f"{'-'.join(filter(None, parts))}.json"


def _show(path: Path) -> None:
    """Print an overview of a record and write its tables."""
    content = load(path)
    for title, cases in showcase.grouped(content["cases"]):
        print(f"\n{title}\n\n{tables.aligned(tables.overview(cases))}")
    print(f"\n{tables.conditions(content)}")
    print(f"\n{path}\n{report.write(path)}", file=sys.stderr)


def _measure_on_cuda(
    cases: Sequence[Case], settings: Settings, path: Path, stop_after: float | None
) -> int:
    try:
        device = open_cuda()
    except NoDeviceError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return NO_DEVICE
    try:
        return measure(cases, settings, path, device, stop_after, _show_progress_or_end)
    finally:
        faulthandler.cancel_dump_traceback_later()


def measure(
    cases: Sequence[Case],
    settings: Settings,
    path: Path,
    device: Device,
    stop_after: float | None = None,
    progress: runner.Progress = lambda text: None,
) -> int:
    """Run the cases that a record lacks, one after the other, and add them to it.

    Returns
    -------
    int
        0, or `BROKEN_DEVICE` where the rest needs another process.
    """
    begin = time.monotonic()
    content = load(path) or _new_content(settings, device)
    present = {case["name"] for case in content["cases"]}
    for number, case in enumerate(cases, start=1):
        if case.name in present:
            continue
        if stop_after is not None and time.monotonic() - begin > stop_after:
            _tell(f"{len(cases) - number + 1} cases not begun: {stop_after:.0f} s are over")
            break
        content["running"] = case.name
        save(path, content)
        start = time.perf_counter()
        content["cases"].append(_run(case, settings, progress, device))
        _tell(f"[{number}/{len(cases)}] {case.name}: {duration(time.perf_counter() - start)}")
        for result in content["cases"][-1]["results"]:
            if (result["not_run"] or "").startswith("failed"):
                _tell(f"    {result['label']}: {result['not_run']}")
        # After every case, so that a long run that is interrupted leaves what it found.
        del content["running"]
        save(path, content)
        if device.fault():
            return BROKEN_DEVICE
    return 0


def _run(
    case: Case, settings: Settings, progress: runner.Progress, device: Device
) -> dict[str, Any]:
    try:
        if case.has_capacity:
            assert isinstance(device, Cuda)
            return capacity.run_case(case, settings, progress, device)
        return runner.run_case(case, settings, progress, device)
    except (ImportError, MemoryError) as error:  # of the host, or bfloat16 without ml_dtypes
        _tell(f"    {error}")
        return runner.not_run_at_all(case, f"{type(error).__name__}: {error}")


def _new_content(settings: Settings, device: Device) -> dict[str, Any]:
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


def _show_progress_or_end(text: str) -> None:
    """Show it; end the process if the next text does not come in time."""
    _tell(f"    {text}")
    faulthandler.dump_traceback_later(_LONGEST_STEP, exit=True)


if __name__ == "__main__":
    sys.exit(main())
