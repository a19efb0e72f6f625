"""README's snippets run in the order shown, and what goes with it is consistent."""

import importlib
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import yaml

import arraylogchain as alc
from arraylogchain.__main__ import main
from tests.conftest import import_or_skip

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
MOST_BYTES = 6500


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippet_runs(number):
    """A snippet runs after those before it; only one of them needs torch."""
    namespace = {}
    for snippet in SNIPPETS[: number + 1]:
        if "import torch" in snippet and snippet is not SNIPPETS[number]:
            continue
        if "import torch" in snippet:
            import_or_skip("torch")
        exec(compile(snippet, "README.md", "exec"), namespace)


def test_readme_is_short_and_has_three_snippets():
    assert len(README.encode()) <= MOST_BYTES
    assert ["LogChain" in s for s in SNIPPETS] == [True, True, False]
    assert ["import torch" in s for s in SNIPPETS] == [False, True, False]


def test_first_command_ends_with_the_script_of_the_package():
    """Which imports what is installed, not what is in the folder where it is called."""
    script = re.search(r"^pip install \. && (\S+)", README, re.MULTILINE)[1]
    module, _, function = PROJECT["scripts"][script].partition(":")
    assert getattr(importlib.import_module(module), function) is main


def test_every_method_is_listed():
    methods = {name for name in vars(alc.LogChain) if not name.startswith("_")}
    # The messages are in the documentation; a plan computes nothing.
    assert methods - set(re.findall(r"`(\w+)`", README)) == {
        "plan",
        "forward_messages",
        "backward_messages",
    }


# addresses ----------------------------------------------------------------------------------------

SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PROJECT = SETTINGS["project"]
REPOSITORY = PROJECT["urls"]["Repository"]


def links_of(text):
    """Return the targets of links, in the text and in references."""
    return re.findall(r"\]\((.+?)\)", text) + re.findall(r"^\[\w+\]: (\S+)$", text, re.MULTILINE)


LINKS = links_of(README)


@pytest.mark.parametrize("link", LINKS)
def test_links_lead_somewhere_from_any_host(link):
    assert link.startswith("https://") or (ROOT / link).exists()
    assert "OWNER" not in README


def test_links_are_absolute_where_an_index_shows_readme():
    text = README
    for rule in SETTINGS["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"][
        "substitutions"
    ]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    links = links_of(text)
    assert len(links) == len(LINKS)
    for link in [*links, *PROJECT["urls"].values()]:
        assert link.startswith("https://")
        assert link.startswith(REPOSITORY) or "arraylogchain" not in link


def test_results_that_readme_tells():
    namespace = {}
    exec(SNIPPETS[0], namespace)
    told = [float(x) for x in re.findall(r"-?\d+\.\d+", "".join(re.findall("#.*", SNIPPETS[0])))]
    loaded, counts = namespace["loaded"], namespace["counts"]
    found = [namespace["score"], loaded[0], loaded[140], namespace["log_weight"], *counts.flat]
    np.testing.assert_allclose(told, found, atol=0.06)


def test_references_are_defined():
    names = set(re.findall(r"\]\[(\w+)\]", README))
    assert names == set(re.findall(r"^\[(\w+)\]: ", README, re.MULTILINE))


def test_citation_has_the_same_address():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["repository-code"] == REPOSITORY
    assert citation["version"] == alc.__version__


# what goes with it --------------------------------------------------------------------------------


def test_workflow_runs_every_python_that_is_named():
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text("utf-8"))
    jobs = workflow["jobs"]
    assert {"run": ".ci/run"} in jobs["everything"]["steps"]
    matrix = jobs["numpy"]["strategy"]["matrix"]
    result = {*matrix["python"], *(row["python"] for row in matrix["include"])}
    prefix = "Programming Language :: Python :: "
    named = {text.removeprefix(prefix) for text in PROJECT["classifiers"] if prefix in text}
    assert result == named - {"3"}
    assert f">={min(result, key=lambda version: int(version[2:]))}" == PROJECT["requires-python"]
