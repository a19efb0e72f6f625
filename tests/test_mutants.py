"""Mutations fit the package, each in the source of its symbol."""

import pytest

from tests import mutants
from tests.mutants import Mutant, symbol_span

TEXT = """
LOW, HIGH = 1.0, 2.0

class Chain:
    weight = 1.0

    def scale(self):
        return 1.0

def scale():
    def inner():
        return 1.0
    return 2.0
"""


def not_fitting(mutant):
    try:
        mutant.apply((mutants.ROOT / mutant.file).read_text("utf-8"))
    except (LookupError, FileNotFoundError) as error:
        return str(error)
    return None


def test_mutants_of_the_list_fit_once():
    reasons = {str(mutant): not_fitting(mutant) for mutant in mutants.mutants()}
    assert len(reasons) > 50
    assert {name: reason for name, reason in reasons.items() if reason is not None} == {}


@pytest.mark.parametrize(
    ("symbol", "line"),
    [
        ("HIGH", "LOW, HIGH = 1.0, 3.0"),
        ("Chain.weight", "    weight = 3.0"),
        ("Chain.scale", "        return 3.0"),
        ("scale.inner", "        return 3.0"),
        ("scale", "    return 3.0"),
    ],
)
def test_mutant_of_a_symbol_changes_its_source_only(symbol, line):
    old = "2.0" if symbol in ("HIGH", "scale") else "1.0"
    changed = Mutant("file.py", symbol, old, "3.0", ()).apply(TEXT)
    pairs = zip(TEXT.split("\n"), changed.split("\n"), strict=True)
    assert [new for before, new in pairs if new != before] == [line]


@pytest.mark.parametrize(
    ("symbol", "old", "message"),
    [
        ("scale", "0", "2 places in scale"),
        ("scale", "5", "0 places in scale"),
        ("Chain.missing", "1.0", "0 definitions of Chain.missing"),
    ],
)
def test_mutant_without_one_place_raises(symbol, old, message):
    with pytest.raises(LookupError, match=message):
        Mutant("file.py", symbol, old, "3.0", ()).apply(TEXT)


def test_symbol_span_of_a_class_is_its_source():
    start, stop = symbol_span(TEXT, "Chain")
    assert TEXT[start:stop].startswith("class Chain:")
    assert TEXT[start:stop].endswith("return 1.0\n")
