"""The benchmark: its table, what it measures and compares, and what pages quote of its record."""

import json
import re

import numpy as np
import pytest

import benchmarks.contestants  # noqa: F401  registers everyone
from benchmarks import __main__ as command
from benchmarks import machine, references, report, runner
from benchmarks.cases import CASES, SHOWN
from benchmarks.devices import Cpu, host
from benchmarks.registry import CONTESTANTS, REFERENCES, Case, Contestant
from tests.conftest import import_or_skip

SETTINGS = runner.Settings(rounds=1, seconds=1.0, pause=0.0, quick=True)
BY_NAME = {case.name: case for case in CASES}
# One case for each operation but those of whole processes, which compile for minutes.
OF_OPERATIONS = {c.operation: c for c in reversed(CASES) if not c.operation.startswith("process")}
RECORD = report.latest()
PAGES = report.pages()


# the table ----------------------------------------------------------------------------------------


def test_names():
    assert len(BY_NAME) == len(CASES)
    assert set(BY_NAME) >= SHOWN
    assert {case.operation for case in CASES} == set(CONTESTANTS) == set(REFERENCES)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_everyone_has_a_place(device):
    met = {}
    for case in CASES:
        if device in case.devices:
            first, *others = case.contestants(device)
            assert first.is_ours
            assert others or case.operation.endswith("bounded"), case.name
            met |= dict.fromkeys((c.label, c.call) for c in (first, *others))
            assert len({c.label for c in others}) == len(others)
    everyone = (c for some in CONTESTANTS.values() for c in some if device in c.devices)
    expected = {(c.label, c.call) for c in everyone}
    assert {label for label, call in expected - set(met) if "," not in label} == set()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(runner, "_SHORTEST_TIMING", 1e-9)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jax
@pytest.mark.parametrize("case", OF_OPERATIONS.values(), ids=list(OF_OPERATIONS))
def test_case_runs(case, quick):
    """With everyone who is installed, and all who are right at such sizes."""
    if case.contestants("cpu")[0].missing():
        import_or_skip("torch")
    outcome = runner.run_case(case, SETTINGS, Cpu())
    for result in json.loads(json.dumps(outcome))["results"]:
        if (result["not_run"] or "").endswith("is not installed"):
            continue
        assert result["not_run"] is None, result
        assert result["median"] > 0
        assert result["state"] == "warm"
        if not result["is_yardstick"] and result["label"] != "forum's code":
            assert (result["error"] or 0) < 1e-4, result
            assert result["wrong"] == 0


@pytest.mark.parametrize("case", OF_OPERATIONS.values(), ids=list(OF_OPERATIONS))
def test_references_see_errors(case):
    """A value that is a little off, or NaN, does not pass for a right one."""
    inputs = case.inputs(quick=True)
    check = REFERENCES[case.operation](inputs)
    device = Cpu()
    ours = case.contestants("cpu")[0]
    if ours.missing():
        import_or_skip("torch")
    value = host(ours.call(*ours.bind(device.xp, device.put, inputs)))

    def changed(by):
        parts = value if isinstance(value, tuple) else (value,)
        whole = parts[0].dtype.kind == "i"
        parts = tuple(x * 0 - 1 if whole else x + x.dtype.type(by) for x in parts)
        return parts if isinstance(value, tuple) else parts[0]

    error, wrong = check(changed(0.1))
    assert (error or 0) > 1e-4 or wrong > 0
    _, wrong = check(changed(np.nan))
    assert wrong > 0


# measuring ----------------------------------------------------------------------------------------


def case_of(*calls, state="warm"):
    """Return a case of this test's own, and register who should double an array of ones."""
    CONTESTANTS["test"] = [
        Contestant(f"{i}", call, is_ours=i == 0, state=state) for i, call in enumerate(calls)
    ]
    REFERENCES["test"] = lambda inputs: references.entries((), 2 * inputs["a"].astype("g"))
    return Case("a-case", "a case", "test", lambda rng, n: {"a": np.ones(n)}, {"n": 3}, "Group")


@pytest.fixture
def own_case():
    yield case_of
    CONTESTANTS.pop("test", None)
    REFERENCES.pop("test", None)


def run(case):
    return runner.run_case(case, SETTINGS, Cpu())["results"]


def test_failures_and_wrong_results_are_seen(quick, own_case):
    """One that fails does not stop the others."""

    def refuse(a):
        raise KeyError("compilers raise\nwhatever " + "they like " * 100)

    first, second, third = run(
        own_case(refuse, lambda a: 2 * a, lambda a: np.where(np.arange(3) > 0, 2.5 * a, np.nan))
    )
    assert first["not_run"].startswith("failed: KeyError: 'compilers raise")
    assert len(first["not_run"]) < 350
    assert (second["error"], second["wrong"]) == (0, 0)
    assert third["error"] == pytest.approx(0.25)
    assert third["wrong"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(("state", "before"), [("cold", 0), ("new process", 1), ("warm", 4)])
def test_first_calls_count_only_where_it_is_cold(state, before, own_case, monkeypatch):
    calls, times, clock = [], [], runner.time_once
    monkeypatch.setattr(runner, "time_once", lambda *g: times.append(len(calls)) or clock(*g))
    (result,) = run(own_case(lambda a: calls.append(1) or 2 * a, state=state))
    assert result["state"] == state
    assert times[-1] >= before
    assert state == "warm" or len(calls) == before + 2  # the round, and to compare


def test_memory_is_counted():
    peak, value = Cpu().peak("arrays", lambda: np.ones(1000) + np.ones(1000) + 1)
    assert 16_000 <= peak < 40_000
    assert value[0] == 3
    torch = import_or_skip("torch")
    peak, _ = Cpu().peak("torch", lambda: torch.ones(1000).double() * 2 + np.ones(1000).sum())
    assert 16_000 <= peak < 60_000


# the command --------------------------------------------------------------------------------------


def test_record(tmp_path, capsys):
    """A run writes it, says of what, and adds what is not yet there."""
    arguments = ["--quick", "--output", str(tmp_path), "--only"]
    assert command.main([*arguments, "logmatmulexp-8"]) == 0
    out = capsys.readouterr().out
    assert "logmatmulexp-8, reduced" in out
    assert "A quick run" in out
    (path,) = tmp_path.glob("*-quick.json")
    assert command.main([*arguments, "logmatmulexp-8", "maxplus-thin", "--into", str(path)]) == 0
    content = report.read(path)
    assert [case["name"] for case in content["cases"]] == ["logmatmulexp-8", "maxplus-thin"]
    assert content["commit"] == machine.describe_commit() != ""
    assert {"numpy", "python"} <= set(content["versions"])
    assert "| arraylogchain | " in path.with_suffix(".md").read_text("utf-8")
    with pytest.raises(SystemExit, match="quick run"):
        report.write_pages(path)
    with pytest.raises(SystemExit, match="lacks: another-case"):
        report.filled("<!-- benchmarks: another-case -->\n<!-- /benchmarks -->", content)


# pages --------------------------------------------------------------------------------------------

# A quantity with a unit of time or memory, or a ratio; not the sizes of a matrix.
FIGURE = re.compile(r"\d[\d.,]*(?:e-?\d+)?\s?(?:(?:ns|µs|ms|s|[kMGT]i?B)\b|×(?!\s*[\d\[]))")
# Figures that follow from sizes.
COMPUTED = {
    "14.3 GB": 179 * 500 * 200 * 200 * 4 / 1e9,
    "16 MB": 500 * 40 * 200 * 4 / 1e6,
    "1.07 GB": 8192 * 8 * 64 * 64 * 4 / 1e9,  # weights that a product expands
    "1 MiB": 1.0,  # the smallest `workspace`
    "64 MiB": 64.0,  # its default
    "256 MiB": 256.0,  # on CUDA devices
    "10.75 GiB": 10.75,  # the forum's GPU
}


def quoted(text):
    """Return the figures of a page, but for code and for what is between marks."""
    prose = report.BLOCK.sub("", text)
    prose = re.sub(r"^```.*?^```", "", prose, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"`[^`\n]*`", "", prose)
    return [match.group().rstrip() for match in FIGURE.finditer(prose)]


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_page_is_what_the_record_gives(page):
    text = page.read_text("utf-8")
    content = report.read(RECORD) if RECORD else None
    assert report.filled(text, content) == text, "run benchmarks.report --readme"
    assert [figure for figure in quoted(text) if figure not in COMPUTED] == []


def test_there_is_one_record_of_each_device_at_most():
    records = [p for p in report.RESULTS.glob("[0-9]*.json") if not p.stem.endswith("-quick")]
    assert [p for p in records if not p.stem.endswith("-cuda")] == [RECORD] * bool(RECORD)
    assert len(records) <= 1 + bool(RECORD)
    for path in records:
        assert report.full_report(report.read(path)) == path.with_suffix(".md").read_text("utf-8")


def test_figures_are_found():
    text = "It takes 3.5 ms, 2 × as long, 1.2e-3 s, 14 MB.\n```\n7 ms\n```\n`8 ms` 2 × 3, 4 steps"
    assert quoted(text) == ["3.5 ms", "2 ×", "1.2e-3 s", "14 MB"]
    assert quoted("<!-- benchmarks: a -->\n9 ms\n<!-- /benchmarks -->") == []
    for text, value in COMPUTED.items():
        assert float(text.split()[0]) == pytest.approx(value, abs=0.05)
