"""README's snippets run in the order shown, and its table of methods is that of the package."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import arraylogchain as alc
from arraylogchain import _dispatch
from tests.conftest import import_or_skip

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
MOST_BYTES = 9000


@pytest.fixture(scope="module")
def namespace():
    """What snippets before have defined."""
    return {}


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippet_runs(snippet, namespace):
    if "import torch" in snippet:
        import_or_skip("torch")
    exec(compile(snippet, "README.md", "exec"), namespace)


def test_there_are_three_snippets():
    assert ["LogChain" in s for s in SNIPPETS] == [True, False, True]
    assert ["import torch" in s for s in SNIPPETS] == [False, False, True]


def test_readme_is_short():
    assert len(README.encode()) <= MOST_BYTES


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#:]+)\)", README))
def test_links_lead_somewhere(target):
    assert (ROOT / target).exists()


# methods and implementations ----------------------------------------------------------------------


def rows():
    """Yield each method of the table with its cells."""
    table = README.partition("## Methods and implementations")[2].partition("\n## ")[0]
    for line in table.splitlines():
        first, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for name in re.findall(r"`([\w.]+)`", first) if line.startswith("| `") else ():
            yield name.removeprefix("LogChain."), cells


METHODS = dict(rows())
# They compute nothing themselves.
AROUND = {"pad_states", "plan_einsum", "plan", "arrays", "lengths"}
# What others are made of, and what takes entries one by one.
OPERATIONS = {
    "logchainexp": "logmatmulexp",
    "logeinsumexp": "logmatmulexp",
    "maxplus_einsum": "maxplus_matmul",
}
LOOPS_FOR = {"logmatmulexp": "logsumexp_where"}


def test_everything_public_is_listed():
    functions = {name for name in alc.__all__ if callable(getattr(alc, name)) and name.islower()}
    methods = {name for name in vars(alc.LogChain) if not name.startswith("_")}
    assert set(METHODS) == (functions | methods) - AROUND
    assert {"pad_states", "plan_einsum", "LogChain.plan"} <= set(re.findall(r"`([\w.]+)`", README))


@pytest.mark.parametrize("name", METHODS)
def test_implementations_are_those_of_the_table(name):
    operation = OPERATIONS.get(name, name)
    backends = (_dispatch.PRODUCTS | _dispatch.CHAINS)[operation]
    of_entries = "compiled" in _dispatch.PRODUCTS.get(LOOPS_FOR.get(operation), ())
    loops = "yes" if "compiled" in backends else "in part" if of_entries else ""
    kernels = "yes" if "cuda" in backends else ""
    assert METHODS[name][:3] == ["yes", loops, kernels]


@pytest.mark.parametrize("name", METHODS)
def test_gradients_are_those_of_the_table(name):
    assert ("`vjp`" in METHODS[name][3]) == (name in alc.vjp.__all__)


# what goes with it --------------------------------------------------------------------------------


def test_version_is_cited():
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"version: {alc.__version__}\n" in citation


def test_workflow_runs_every_python_that_is_named():
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text("utf-8"))
    jobs = workflow["jobs"]
    assert {"run": ".ci/run"} in jobs["everything"]["steps"]
    matrix = jobs["numpy"]["strategy"]["matrix"]
    found = {*matrix["python"], *(row["python"] for row in matrix["include"])}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    prefix = "Programming Language :: Python :: "
    named = {text.removeprefix(prefix) for text in project["classifiers"] if prefix in text}
    assert found == named - {"3"}
    assert f">={min(found, key=lambda version: int(version[2:]))}" == project["requires-python"]
