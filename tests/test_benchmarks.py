"""The benchmark on the CPU: cases of chains run at small sizes, and what is recorded with them."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from arraylogchain import LogChain
from arraylogchain._compiled import why_not
from arraylogchain._threads import num_workers
from benchmarks import __main__ as command
from benchmarks import compare, crossover, first_calls, machine, runner, showcase, tables
from benchmarks.cases import CASES
from benchmarks.device import Cpu
from tests.conftest import import_or_skip

SETTINGS = runner.Settings(
    rounds=1, input_sets=1, seconds_per_contestant=1.0, pause=0.0, quick=True
)
ROOT = Path(__file__).parents[1]
BY_NAME = {case.name: case for case in CASES}
SMALL = [
    f"{prefix}-{size}"
    for prefix in ("chain", "gradients-chain-value", "paths-marginals", "paths-sample")
    for size in ("100-3", "32-50-10")
]


def test_names_are_unique():
    assert len(BY_NAME) == len(CASES)


def test_showcase_names_cases():
    assert set(showcase.PATTERNS) <= set(BY_NAME)
    assert len(set(showcase.PATTERNS)) == len(showcase.PATTERNS)


@pytest.mark.parametrize(
    "name",
    [
        *SMALL,
        "paths-viterbi-1000-100-5",
        "chain-left-to-right-20000-40",
        "paths-viterbi-left-to-right-20000-40",
        "elementwise-multiply",
        "range-1",
    ],
)
def test_case_runs(name):
    """With all contestants that need nothing but what the tests need."""
    case = BY_NAME[name]
    known = {"scipy", "numba"}
    some = tuple(each for each in case.contestants if known.issuperset(each.requires))
    case = dataclasses.replace(case, contestants=some)
    found = runner.run_case(case, SETTINGS, lambda text: None, Cpu())
    for result in json.loads(json.dumps(found))["results"]:
        assert result["not_run"] is None
        assert result["median"] > 0
        if not result["is_yardstick"]:
            assert (result["error"] or 0) < 1e-5
            assert result["wrong_infinities"] == 0


def test_routes_are_recorded():
    case = BY_NAME["paths-viterbi-100-3"]
    in_numpy = tuple(each for each in case.contestants if not each.requires)
    case = dataclasses.replace(case, contestants=in_numpy)
    found = runner.run_case(case, SETTINGS, lambda text: None, Cpu())
    ours, other = found["results"]
    chain = LogChain(np.zeros((10, 3)), transitions=np.ones((1, 3, 3)))
    assert ours["routes"] == [chain.plan("viterbi").route]
    assert other["routes"] == []
    assert f"| arraylogchain ({ours['routes'][0]}) |" in tables.all_contestants(found)


def test_override_of_blas_is_told(monkeypatch):
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    content = {"machine": machine.describe_machine(), "versions": {}, "date": "", "commit": ""}
    assert "**OPENBLAS_CORETYPE=Haswell: " in tables.conditions(content | {"quick": False})
    monkeypatch.delenv("OPENBLAS_CORETYPE")
    assert machine.describe_machine()["blas overrides"] == {}


@pytest.fixture
def several_threads(monkeypatch):
    """As many as there are, though tests that run side by side have one each."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    num_workers.cache_clear()
    yield num_workers()
    monkeypatch.undo()
    num_workers.cache_clear()


def test_threads_are_limited(several_threads):
    threadpoolctl = import_or_skip("threadpoolctl")
    with machine.limit_threads(1):
        assert num_workers() == 1
        assert {each["num_threads"] for each in threadpoolctl.threadpool_info()} == {1}
    assert num_workers() == several_threads
    assert "OMP_NUM_THREADS" not in os.environ


@pytest.mark.exhaustive  # it compiles
def test_first_call_is_made_in_a_process():
    inputs = BY_NAME["first-log-partition"].make(np.random.default_rng(0), steps=5, states=2)
    x, transitions, initial = (inputs[name] for name in ("x", "P", "p0"))
    expected = LogChain(x, transitions=transitions, initial=initial).log_partition()
    given = (x, transitions, initial)
    for call in (first_calls.cold, first_calls.warm):
        np.testing.assert_allclose(call("log_partition")(*given), expected)


def test_process_without_the_call():
    given = np.zeros((5, 2)), np.ones((1, 2, 2)), np.ones(2)
    assert first_calls.warm("nothing")(*given) is None


@pytest.mark.skipif(why_not() is not None, reason="needs compiled loops")
def test_loops_and_array_operations_are_compared(tmp_path, capsys):
    output = tmp_path / "crossover.json"
    given = ["--quick", "--operations", "log_partition", "marginals", "--output", str(output)]
    assert crossover.main(given) == 0
    record = json.loads(output.read_text())
    assert len(record["seconds"]) == 2 * 2 * 4
    assert set(record["fits"]) == {"forward", "states"}
    assert "chosen / faster: median" in capsys.readouterr().out


def test_checkouts_are_compared(tmp_path, capsys):
    """With a copy that lacks a function."""
    ignored = shutil.ignore_patterns("__pycache__")
    copy = shutil.copytree(ROOT / "arraylogchain", tmp_path / "arraylogchain", ignore=ignored)
    with (copy / "products.py").open("a") as file:
        file.write("\n\ndef maxplus_matmul(a, b):\n    raise AttributeError('not yet there')\n")
    given = [str(tmp_path), "--quick", "--only", "logmatmulexp-8", "maxplus-thin"]
    assert compare.main(given) == 0
    out = capsys.readouterr().out
    assert out.count("logmatmulexp-8, arraylogchain\n") == 1
    assert "not run: 1\nmaxplus-thin, arraylogchain: " in out
    assert "AttributeError: not yet there" in out


def test_other_has_to_be_a_checkout(tmp_path):
    with pytest.raises(SystemExit):
        compare.main([str(tmp_path), "--quick", "--only", "logmatmulexp-8"])


# the command -------------------------------------------------------------------------------------

# Runs a module where only the required libraries can be imported.
_BARE = """
import importlib.machinery, runpy, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

MISSING = {"scipy", "torch", "hmmlearn", "dynamax", "jax", "matplotlib", "threadpoolctl",
           "torch_semiring_einsum", "numba", "cupy"}
sys.meta_path.insert(0, Missing())
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name in MISSING else find(name, *a)
sys.argv[0] = "benchmarks"
runpy.run_module("benchmarks", run_name="__main__")
"""


def run_without_extras(*arguments):
    return subprocess.run(
        [sys.executable, "-c", _BARE, *arguments], cwd=ROOT, capture_output=True, text=True
    )


def test_list_needs_only_what_is_required():
    found = run_without_extras("--list")
    assert found.returncode == 0, found.stderr
    assert [line.split()[0] for line in found.stdout.splitlines()] == [c.name for c in CASES]
    assert "not installed, and left out: dynamax, hmmlearn, jax, scipy," in found.stderr
    assert 'pip install -e ".[bench]"' in found.stderr


def test_quick_run_ends_with_a_table(tmp_path):
    given = ("--quick", "--only", "logmatmulexp-8", "chain-100-3", "--output", str(tmp_path))
    found = run_without_extras(*given)
    assert found.returncode == 0, found.stderr
    table = found.stdout.splitlines()
    head = next(line for line in table if line.lstrip().startswith("arraylogchain"))
    assert "fastest other" in head
    assert any(line.startswith("chain-100-3, reduced") for line in table)
    assert "A quick run" in found.stdout
    assert "no plot: matplotlib is not installed" in found.stderr
    assert len(found.stderr.splitlines()) < 12


def test_record_says_which_commit(tmp_path):
    path = tmp_path / "record.json"
    assert command.measure([BY_NAME["logmatmulexp-8"]], SETTINGS, path, Cpu()) == 0
    record = json.loads(path.read_text())
    assert record["commit"] == machine.describe_commit() != ""
    (case,) = record["cases"]
    assert case["results"][0]["rounds"] == SETTINGS.rounds
    assert "seconds" not in case["results"][0]
