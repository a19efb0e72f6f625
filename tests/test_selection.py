"""The options that choose among tests: what is left out of one run comes in another."""

from types import SimpleNamespace

import pytest

from tests import selection

EVERY_RUN = [f"test_a.py::test_short[{n}]" for n in range(3)]
SAMPLED = [f"test_a.py::{name}[{n}]" for name in ("test_long", "test_wide") for n in range(10)]


class Item:
    def __init__(self, nodeid):
        self.nodeid, self.marks = nodeid, {"exhaustive"} if nodeid in SAMPLED else set()

    def add_marker(self, mark):
        self.marks.add(mark.name)

    def get_closest_marker(self, name):
        return name in self.marks


@pytest.fixture
def selected():
    """Return the names of tests that options select, having checked that others are reported."""

    def select(**options):
        items, deselected = [Item(name) for name in (*EVERY_RUN, *SAMPLED)], []
        hook = SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))
        values = {"sample": None, "seed": "", "passed": None, **options}
        selection.select(SimpleNamespace(getoption=values.get, hook=hook), items)
        assert len(items) + len(deselected) == len(EVERY_RUN) + len(SAMPLED)
        return [item.nodeid for item in items]

    return select


def test_sample_has_every_short_test_and_some_of_each_function(selected):
    names = selected(sample=4)
    assert names[:3] == EVERY_RUN
    for kind in ("test_long", "test_wide"):
        assert sum(kind in name for name in names) == 3


def test_sample_depends_on_the_seed_alone(selected):
    assert selected(sample=4, seed="a") == selected(sample=4, seed="a")
    assert selected(sample=4, seed="a") != selected(sample=4, seed="b")


def test_samples_of_many_seeds_have_every_test(selected):
    names = {name for seed in range(100) for name in selected(sample=8, seed=str(seed))}
    assert names == {*EVERY_RUN, *SAMPLED}


def test_no_option_leaves_all_tests(selected):
    assert selected() == [*EVERY_RUN, *SAMPLED]


def test_passed_tests_are_sampled_in_the_next_run(selected, tmp_path):
    file = str(tmp_path / "passed")
    assert selected(sample=4, passed=file)[:3] == EVERY_RUN
    passed = selection.Passed(file)
    for name in EVERY_RUN:
        for when, is_passed in (("setup", True), ("call", name != EVERY_RUN[0])):
            report = SimpleNamespace(nodeid=name, when=when, passed=is_passed)
            passed.pytest_runtest_logreport(report)
    passed.pytest_sessionfinish()
    names = selected(sample=4, passed=file)
    assert EVERY_RUN[0] in names
    assert sum(name in names for name in EVERY_RUN[1:]) == 1
