"""README's examples run, and it says what there is."""

import re
from pathlib import Path

import pytest

import arraylogchain as alc
from tests.conftest import import_or_skip

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example_runs(example):
    if "import torch" in example:
        import_or_skip("torch")
    # The namespace is empty: every example stands on its own.
    exec(compile(example, "README.md", "exec"), {})


def test_there_are_examples():
    assert len(EXAMPLES) >= 6


@pytest.mark.parametrize("name", [n for n in alc.__all__ if not n.startswith("_")])
def test_public_names_are_described(name):
    assert name in README


def test_benchmark_marks_are_in_place():
    begin, end = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
    assert README.count(begin) == README.count(end) == 1
    assert README.index(begin) < README.index(end)
