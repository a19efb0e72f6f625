"""CONTRIBUTING's table of tests lists every module of the package and every test file."""

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEADING = "## Which tests cover which module\n"


def rows():
    """Yield the names in both cells of each row of the section's tables."""
    section = (
        (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition(HEADING)[2].partition("\n## ")[0]
    )
    for line in section.splitlines():
        cells = [re.findall(r"`([\w/]+\.py)`", cell) for cell in line.split("|")[1:-1]]
        if any(cells):
            yield cells


def has_code(path):
    """Return whether a module has more than a docstring."""
    return len(ast.parse(path.read_text("utf-8")).body) > 1


def test_table_of_tests_lists_each_module_once():
    package = ROOT / "arraylogchain"
    listed = Counter(name for modules, _ in rows() for name in modules)
    modules = [path.relative_to(package) for path in package.rglob("*.py") if has_code(path)]
    assert listed == Counter(path.as_posix() for path in modules)


def test_table_of_tests_lists_every_test_file():
    tests = ROOT / "tests"
    listed = {name for _, files in rows() for name in files}
    assert listed == {path.relative_to(tests).as_posix() for path in tests.rglob("test_*.py")}


def test_table_of_tests_names_a_test_for_each_module():
    assert [modules for modules, files in rows() if not files] == []
