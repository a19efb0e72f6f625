"""Time this checkout and another one: ``python -m benchmarks.compare OTHER_CHECKOUT``.

The cases of this checkout run with both libraries, each in its own process, by public functions
only. The two take turns. Lower quartiles of their times are printed with their ratio: above 1, this
checkout is slower. Cases of whole processes (``first-*``) compile nothing beforehand where their
names say so.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cases import CASES, SHOWN
from benchmarks.devices import Cpu
from benchmarks.registry import Case, Contestant
from benchmarks.report import duration
from benchmarks.runner import repeats_for, time_once

HERE = Path(__file__).parents[1]
SLOWER_FROM = 1.05
_SECONDS = 4.0  # of a contestant on both sides; afterwards only a third round may begin
_PAUSE = 0.05  # threads of the one before keep spinning for some milliseconds
_WARM_UP = 0.04  # virtual processors come back late: two threads ran on one for 20 ms
# The library comes from the first folder, the cases from the second.
_WORKER = (
    "import sys; sys.path.insert(0, sys.argv[1]); import arraylogchain; sys.path[0] = sys.argv[2]; "
    "from benchmarks.compare import serve; serve()"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code, 0 even where this checkout is slower."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("other", type=Path, metavar="OTHER_CHECKOUT")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", default=["*"], help="cases by name")
    parser.add_argument("--shown", action="store_true", help="what README and the docs show")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="small sizes: only show that all runs")
    args = parser.parse_args(argv)
    slower, missing = [], []
    with tempfile.TemporaryDirectory() as caches, ExitStack() as stack:
        sides = []
        for path in (HERE, args.other.resolve()):
            sides.append(Side(path, Path(caches, str(len(sides)))))
            stack.callback(sides[-1].end)
        print("this checkout  the other  ratio")
        for case, contestant in _ours(args.only, args.shown):
            name = f"{case.name}, {contestant.label}"
            try:
                for side in sides:
                    side.ask(case=case.name, label=contestant.label, quick=args.quick)
                mine, theirs = _take_turns(sides, 2 if args.quick else args.rounds)
            except FailedError as error:
                missing.append(f"{name}: {error}")
                continue
            ratio = mine / theirs
            slower += [f"{name}: {ratio:.2f}"] * (ratio > SLOWER_FROM)
            line = f"{duration(mine):>13}  {duration(theirs):>9}  {ratio:5.2f}  {name}"
            print(line, flush=True)
    print("\n".join([f"\nslower by more than {SLOWER_FROM - 1:.0%}: {len(slower)}", *slower]))
    print("\n".join([f"\nnot run: {len(missing)}", *missing]))
    return 0


def _ours(patterns: Sequence[str], shown: bool) -> Iterator[tuple[Case, Contestant]]:
    """Yield the cases that this library can run with the installed packages."""
    for case in CASES:
        matches = any(fnmatch.fnmatch(case.name, pattern) for pattern in patterns)
        if matches and "cpu" in case.devices and (case.name in SHOWN or not shown):
            for contestant in case.contestants("cpu"):
                if contestant.is_ours and not contestant.missing():
                    yield case, contestant


def _take_turns(sides: Sequence[Side], rounds: int) -> list[float]:
    """Return the lower quartile of each side's times: less disturbed than the median."""
    times: list[list[float]] = [[] for _ in sides]
    start = time.monotonic()
    for number in range(rounds):
        for side, seconds in zip(sides, times, strict=True):
            time.sleep(_PAUSE)
            seconds.append(side.ask())
        if number >= 2 and time.monotonic() - start > _SECONDS:
            break
    return [statistics.quantiles(each, n=4, method="inclusive")[0] for each in times]


class FailedError(RuntimeError):
    """A contestant could not run; the message names the process and the reason."""


class Side:
    """A process with the library of one checkout, which times cases on request.

    It compiles into a cache of its own. A process that ends early costs one case: the next
    question starts another.
    """

    def __init__(self, checkout: Path, cache: Path) -> None:
        self._checkout, self._name, self._cache = checkout, checkout.name, cache
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _WORKER, str(self._checkout), str(HERE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "NUMBA_CACHE_DIR": str(self._cache), "PYTHONPATH": ""},
        )
        answer = self._read()
        if not Path(answer.get("library", "")).is_relative_to(self._checkout):
            self.end()
            raise SystemExit(f"{self._checkout} holds no arraylogchain that can be imported")

    def end(self) -> None:
        self._process.communicate()  # closes its input, at which it ends

    def ask(self, **request: Any) -> float:
        """Return the seconds of a contestant of a case, which is prepared where it is named."""
        if self._process.poll() is not None:
            self._start()
        assert self._process.stdin
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        if "failed" in answer:
            raise FailedError(f"{self._name}: {answer['failed']}")
        return float(answer["seconds"])

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            return {"failed": f"its process ended, exit code {self._process.returncode}"}
        answer: dict[str, Any] = json.loads(line)
        return answer


def serve() -> None:
    """Answer requests line by line; redirect the output of contestants."""
    import arraylogchain

    answers, sys.stdout = sys.stdout, sys.stderr

    def answer(**content: Any) -> None:
        print(json.dumps(content), file=answers, flush=True)

    answer(library=arraylogchain.__file__)
    timer = Timer()
    for line in sys.stdin:
        try:
            with np.errstate(all="ignore"):
                answer(seconds=timer.run(**json.loads(line)))
        except Exception as error:  # an earlier library may lack anything
            answer(failed=f"{type(error).__name__}: {error}")


class Timer:
    """Times the contestant that was named last."""

    def __init__(self) -> None:
        self._device = Cpu()

    def run(self, **request: Any) -> float:
        if request:
            self._prepare(**request)
            return 0.0
        if self._is_warm:
            # Caches hold data of the other side; threads and processors have been idle.
            start = time.monotonic()
            while time.monotonic() - start < _WARM_UP:
                self._call()
        return time_once(self._call, self._repeats, self._device)

    def _prepare(self, case: str, label: str, quick: bool) -> None:
        result = next(each for each in CASES if each.name == case)
        contestant = next(c for c in result.contestants("cpu") if c.label == label)
        arguments = contestant.bind(self._device.xp, self._device.put, result.inputs(quick=quick))
        self._call = lambda: contestant.call(*arguments)
        self._is_warm = contestant.state == "warm"
        if contestant.state != "cold":
            self._call()  # compiles, and runs late imports
        self._repeats = repeats_for(self._call, self._device) if self._is_warm else 1


if __name__ == "__main__":
    sys.exit(main())
