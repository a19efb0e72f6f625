"""Options that spread exhaustive tests over several runs: a sample of each test function.

    python -m pytest -n auto -m "" --sample 4 --seed "$(git rev-parse HEAD)"

runs all tests that are not exhaustive, and one fourth, rounded up, of the exhaustive tests of each
function, chosen by the seed. With `--passed FILE`, tests that FILE names count as exhaustive,
and FILE becomes the list of all tests that have passed.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from pathlib import Path

import pytest


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("selection", "of tests marked exhaustive")
    group.addoption("--sample", type=int, metavar="N", help="run one of N, of each function")
    group.addoption("--seed", default="", metavar="TEXT", help="what chooses them; see --sample")
    group.addoption("--passed", metavar="FILE", help="tests that count as exhaustive; added to")


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that have passed as exhaustive, and deselect those not in the sample."""
    passed = names_in(config.getoption("passed"))
    for item in items:
        if item.nodeid in passed:
            item.add_marker(pytest.mark.exhaustive)
    if config.getoption("sample") is None:
        return
    kinds = defaultdict(list)
    for item in items:
        if item.get_closest_marker("exhaustive"):
            kinds[item.nodeid.partition("[")[0]].append(item)
    left_out = set()
    for kind in kinds.values():
        kind.sort(key=lambda item: digest(config.getoption("seed"), item.nodeid))
        left_out.update(kind[-(-len(kind) // config.getoption("sample")) :])
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def digest(seed: str, name: str) -> bytes:
    return hashlib.sha256(f"{seed} {name}".encode()).digest()


def names_in(file: str | None) -> set[str]:
    if file is None or not Path(file).exists():
        return set()
    return set(Path(file).read_text("utf-8").splitlines())


class Passed:
    """Writes the names of the tests that pass to a file, those in it included."""

    def __init__(self, file: str) -> None:
        self.file, self.names = Path(file), names_in(file)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.names.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self.file.write_text("".join(f"{name}\n" for name in sorted(self.names)), "utf-8")
