"""What README and the documentation say about speed and memory comes from one record."""

import re

import pytest

from benchmarks import plot, report, tables
from benchmarks.showcase import GROUPS
from tests.conftest import import_or_skip

RECORD = report.latest()
PAGES = report.pages()
# Pages that say what instructions and sizes predict, not what was measured.
PREDICTIONS = ("hot_loops.md", "kernels.md")
# A quantity with a unit of time or memory, or a ratio; not the sizes of a matrix.
FIGURE = re.compile(r"\d[\d.,]*(?:e-?\d+)?\s?(?:(?:ns|µs|ms|s|[kMGT]i?B)\b|×(?!\s*[\d\[]))")
# Figures that follow from sizes.
COMPUTED = {
    "14.3 GB": 179 * 500 * 200 * 200 * 4 / 1e9,
    "16 MB": 500 * 40 * 200 * 4 / 1e6,
    "1.07 GB": 8192 * 8 * 64 * 64 * 4 / 1e9,  # weights that a product expands
    "64 MiB": 64.0,  # the default of `workspace`
    "10.75 GiB": 10.75,  # the forum's GPU
}


def quoted(text):
    """Return the figures of a page, but for code and for what is between marks."""
    prose = report.BLOCK.sub("", text)
    prose = re.sub(r"^```.*?^```", "", prose, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"`[^`\n]*`", "", prose)
    return [match.group().rstrip() for match in FIGURE.finditer(prose)]


def test_there_is_one_record():
    assert [p for p in report.RESULTS.glob("[0-9]*.json") if not p.stem.endswith("-quick")] == [
        RECORD
    ]
    assert report.full_report(report.read(RECORD), f"{RECORD.stem}.png") == RECORD.with_suffix(
        ".md"
    ).read_text("utf-8")


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_page_is_what_the_record_gives(page):
    text = page.read_text("utf-8")
    assert report.filled(text, report.read(RECORD)) == text, "run benchmarks.report --readme"


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_page_quotes_no_other_figure(page):
    if page.name in PREDICTIONS:
        pytest.skip("predictions")
    assert [figure for figure in quoted(page.read_text("utf-8")) if figure not in COMPUTED] == []


def test_figures_are_found():
    text = (
        "It takes 3.5 ms, 2 × as long, 1.2e-3 s and 14 MB.\n```\n7 ms\n```\n`8 ms` 2 × 3, 4 steps"
    )
    assert quoted(text) == ["3.5 ms", "2 ×", "1.2e-3 s", "14 MB"]
    block = "<!-- benchmarks: a -->\n9 ms\n<!-- /benchmarks -->"
    assert quoted(block) == []


def test_computed_figures():
    for text, value in COMPUTED.items():
        assert float(text.split()[0]) == pytest.approx(value, abs=0.05)


# a record that is made up -------------------------------------------------------------------------


def result(label, median=None, error=1e-7, **options):
    kept = {"is_yardstick": False, "is_ours": False, "wrong_infinities": 0.0, "routes": []}
    kept |= {"label": label, "median": median, "error": error, "spread": None, "temporaries": 0}
    return kept | {"on_device": None, "not_run": None if median else "not installed"} | options


def case_of(*results, name="a-case"):
    flags = {"has_gradients": False, "has_paths": False, "has_capacity": False}
    return {"name": name, "title": "a case", "sizes": {}, "results": list(results), **flags}


CASE = case_of(
    result("arraylogchain", 0.01),
    result("arraylogchain, torch", 0.009, is_ours=True),
    result("np.matmul", 0.001, is_yardstick=True),
    result("plain in NumPy", 0.002, wrong_infinities=0.25),
    result("rough in torch", 0.003, error=0.1),
    result("hmmlearn, log", 0.02),
    result("dynamax, compiled"),
)


def test_overview_compares_with_the_fastest_right_answer():
    row = tables.overview([CASE]).splitlines()[2]
    expected = "| a case | 10 ms | 1e-07 | hmmlearn, log | 20 ms | 1e-07 | 2 × faster | "
    assert row == f"{expected}plain in NumPy: 2 ms, 1e-07, 25 % wrong |"


def test_losses_are_shown():
    case = case_of(result("arraylogchain", 0.01), result("hmmlearn, log", 0.004))
    assert "| 2.5 × slower |" in tables.overview([case])


def test_case_without_rivals():
    row = tables.overview([case_of(result("arraylogchain", 0.01))]).splitlines()[2]
    assert row.count("|") == 9
    row = tables.overview([case_of(result("arraylogchain"))]).splitlines()[2]
    assert row.count("|") == 9
    assert "not installed" in row


def test_table_for_a_terminal():
    lines = tables.aligned(tables.overview([CASE, CASE])).splitlines()
    assert len(lines) == 3
    assert lines[1].index("10 ms") == lines[0].index("arraylogchain")


def test_marks_are_filled():
    content = {"cases": [CASE], "device": "cpu"}
    text = "before\n<!-- benchmarks: a-case -->\nold\n<!-- /benchmarks -->\nafter"
    found = report.filled(text, content)
    assert f"-->\n{tables.overview([CASE])}\n<!--" in found
    assert found.startswith("before\n")
    assert found.endswith("\nafter")
    assert report.filled(found, content) == found
    every = report.filled("<!-- benchmarks-all: a-case -->\n<!-- /benchmarks -->", content)
    assert "| dynamax, compiled | not run: not installed |" in every
    with pytest.raises(SystemExit, match="lacks: another-case"):
        report.filled("<!-- benchmarks: another-case -->\n<!-- /benchmarks -->", content)


def test_table_of_chains_larger_than_memory(tmp_path, monkeypatch):
    """From the record that the benchmark writes; without one there is no table."""
    import_or_skip("distributed")
    from benchmarks import out_of_core

    text = "<!-- benchmarks-out-of-core: -->\n<!-- /benchmarks -->"
    path = tmp_path / "out_of_core.json"
    monkeypatch.setattr(report, "OUT_OF_CORE", path)
    assert report.filled(text, {"cases": []}).count("|") == 0
    run = dict.fromkeys(("date", "commit"), "2026") | {"quick": True, "kind": "time"}
    run |= {"shape": [1000, 16], "dtype": "float64", "blocks": 9, "workers": 2, "memory": "1 GiB"}
    run |= {"machine": out_of_core.describe_machine(), "versions": {}}
    for seconds in (1.0, 2.0):
        found = {"seconds": seconds, "seconds_by_hand": 3.5, "peak_bytes": 5e8}
        out_of_core.add({**run, "results": {"marginals": found}}, path)
    found = report.filled(text, {"cases": []})
    assert "| 1,000 × 16, float64, 128 kB | `marginals` | 2 s | 3.5 s | 500 MB |" in found
    assert found.count("quick run") == 1
    assert report.filled(found, {"cases": []}) == found


def test_quick_runs_are_not_published(tmp_path):
    path = tmp_path / "x-quick.json"
    path.write_text('{"quick": true}')
    with pytest.raises(SystemExit, match="quick run"):
        report.write_pages(path)


def test_record_holds_what_the_showcase_names():
    names = {case["name"] for case in report.read(RECORD)["cases"]}
    assert names >= {name for group in GROUPS.values() for name in group}


# plots -------------------------------------------------------------------------------------------


def test_every_library_has_its_own_colour_and_marker():
    colours, markers = zip(*plot.STYLES.values(), strict=True)
    assert len(set(colours)) == len(set(markers)) == len(plot.STYLES)


def test_all_contestants_belong_to_a_library():
    cases = report.read(RECORD)["cases"]
    labels = {rival["label"] for case in cases for rival in tables.rivals(case)}
    assert {label for label in labels if plot.library(label) is None} == set()
    assert plot.library("torch-semiring-einsum") == "torch-semiring-einsum"
    assert plot.library("logsumexp of scipy, blocks") == "SciPy"


def test_points_are_the_fastest_right_and_a_faster_wrong_one():
    case = case_of(
        result("arraylogchain", 0.01),
        result("slow in NumPy", 0.5),
        result("wrong in NumPy", 0.001, error=1.0),
        result("right in NumPy", 0.02),
        result("wrong and slow in torch", 0.3, error=1.0),
        result("right in torch", 0.2),
    )
    found = [(name, each["label"]) for name, each in plot._points(case)]
    assert found == [
        ("NumPy", "wrong in NumPy"),
        ("NumPy", "right in NumPy"),
        ("torch", "right in torch"),
    ]


def test_plots_are_drawn(tmp_path):
    import_or_skip("matplotlib")
    content = report.read(RECORD)
    plot.draw_times(content, tmp_path / "times.png")
    spreads = [case for case in content["cases"] if case["name"].startswith("range-")]
    plot.draw_range(spreads, tmp_path / "range.svg")
    assert all(path.stat().st_size > 10_000 for path in tmp_path.iterdir())
