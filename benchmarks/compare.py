"""Time this checkout beside another: ``python -m benchmarks.compare OTHER_CHECKOUT``.

The cases are those of this checkout, run by the library of each, in a process for each. The two
take turns, and the ratio of the medians is printed: above 1 this checkout is slower.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from arraylogchain._text import duration
from benchmarks.cases import CASES
from benchmarks.definitions import Case, Contestant
from benchmarks.device import Cpu

HERE = Path(__file__).parents[1]
SLOWER_FROM = 1.05
_SECONDS = 4.0  # of a contestant on both sides, after which no round is begun but the third
_PAUSE = 0.05  # threads of the one before keep spinning for some milliseconds
_WARM_UP = 0.04  # virtual processors come back late: two threads ran on one for 20 ms
_SHORTEST_TIMING = 5e-3
_MOST_REPEATS = 2000
# The library is that of the first folder, the cases are those of the second.
_WORKER = (
    "import sys; sys.path.insert(0, sys.argv[1]); import arraylogchain; sys.path[0] = sys.argv[2]; "
    "from benchmarks.compare import serve; serve()"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code, 0 even where this checkout is slower."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("other", type=Path, metavar="OTHER_CHECKOUT")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", default=["*"], help="cases by name")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="small sizes: only show that all runs")
    args = parser.parse_args(argv)
    slower, missing = [], []
    with Side(HERE) as here, Side(args.other.resolve()) as other:
        print("this checkout  the other  ratio")
        for case, contestant in _ours(args.only):
            name = f"{case.name}, {contestant.label}"
            try:
                for side in (here, other):
                    side.ask(case=case.name, label=contestant.label, quick=args.quick)
                mine, theirs = _take_turns((here, other), 2 if args.quick else args.rounds)
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


def _ours(patterns: Sequence[str]) -> Iterator[tuple[Case, Contestant]]:
    """Yield what this library computes with what is installed."""
    for case in CASES:
        if any(fnmatch.fnmatch(case.name, pattern) for pattern in patterns):
            for contestant in case.contestants:
                ours = contestant is case.contestants[0] or contestant.is_ours
                if ours and all(map(importlib.util.find_spec, contestant.requires)):
                    yield case, contestant


def _take_turns(sides: tuple[Side, Side], rounds: int) -> list[float]:
    """Return the median time of each side."""
    times: list[list[float]] = [[], []]
    begin = time.monotonic()
    for number in range(rounds):
        for side, seconds in zip(sides, times, strict=True):
            time.sleep(_PAUSE)
            seconds.append(side.ask())
        if number >= 2 and time.monotonic() - begin > _SECONDS:
            break
    return [statistics.median(each) for each in times]


class FailedError(RuntimeError):
    """A contestant could not run; the message says where and why."""


class Side:
    """A process with the library of one checkout, which times what it is asked for."""

    def __init__(self, checkout: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _WORKER, str(checkout), str(HERE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._name = checkout.name
        library = Path(self._read()["library"])
        if not library.is_relative_to(checkout):
            self.__exit__()
            raise SystemExit(f"{checkout} holds no arraylogchain")

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()  # closes its input, at which it ends

    def ask(self, **request: Any) -> float:
        """Return the seconds of a contestant of a case, which is prepared where it is named."""
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
            self.__exit__()
            raise SystemExit(f"{self._name}: ended early, exit code {self._process.returncode}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def serve() -> None:
    """Answer what comes line by line; what contestants print goes elsewhere."""
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
        # Caches are those of the other side; threads and processors have been idle.
        begin = time.monotonic()
        while time.monotonic() - begin < _WARM_UP:
            self._call(0)
        return self._device.time(self._contestant, self._call, self._repeats).seconds

    def _prepare(self, case: str, label: str, quick: bool) -> None:
        found = next(each for each in CASES if each.name == case)
        sizes = found.quick_sizes if quick else found.sizes
        inputs = found.make(np.random.default_rng(0), **sizes)
        self._contestant = next(each for each in found.contestants if each.label == label)
        arguments = self._contestant.arguments(inputs)
        self._call = lambda turn: self._contestant.call(*arguments)
        self._call(0)  # compiles, and imports what is imported late
        seconds = self._device.time(self._contestant, self._call, 1).seconds
        repeats = math.ceil(_SHORTEST_TIMING / max(seconds, 1e-7))
        self._repeats = min(_MOST_REPEATS, repeats)


if __name__ == "__main__":
    sys.exit(main())
