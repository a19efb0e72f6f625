"""Recipes print what the page shows, and agree with sums over all paths."""

import itertools
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import import_or_skip
from tests.test_docs import DOCS, fences

PAGE = DOCS / "recipes.md"
SECTIONS = re.split(r"^### (.*)\n", PAGE.read_text("utf-8"), flags=re.M)[1:]
RECIPES = dict(zip(SECTIONS[::2], SECTIONS[1::2], strict=True))
TABLE = (Path(__file__).parent / "recipes.txt").read_text("utf-8")
CHECKS = dict(re.findall(r"^(\w.*)\n((?:  .*\n)+)", TABLE, re.M))


class AllPaths:
    """All paths of the chain of a snippet, with factors of their weights or with other arrays."""

    def __init__(self, snippet, factors=1, **arrays):
        names = ("x", "transitions", "initial")
        x, transitions, initial = (np.asarray(arrays.get(n, snippet[n])) for n in names)
        self.states = np.array([*itertools.product(range(3), repeat=len(x))])
        weights = np.exp(x)[np.arange(len(x)), self.states].prod(axis=-1) * factors
        weights *= initial[self.states[:, 0]]
        weights *= transitions[self.states[:, :-1], self.states[:, 1:]].prod(axis=-1)
        self.log_z, self.p = np.log(weights.sum()), weights / weights.sum()
        self.best, self.log_best = self.states[weights.argmax()], np.log(weights.max())
        is_at = np.eye(3)[self.states]
        self.marginals = np.einsum("p,ptk->tk", self.p, is_at)
        self.pairs = np.einsum("p,pti,ptj->tij", self.p, is_at[:, :-1], is_at[:, 1:])


def by_em(snippet, initial, transitions, prior=None):
    """Return transitions after 20 rounds of EM; without a prior, initial weights learn too."""
    for _ in range(20):
        every = AllPaths(snippet, initial=initial, transitions=transitions)
        counts = every.pairs.sum(axis=0) + (1e-300 * transitions if prior is None else prior)
        transitions = counts / counts.sum(axis=1, keepdims=True)
        initial = every.marginals[0] if prior is None else initial
    return transitions


@pytest.mark.parametrize("title", RECIPES)
def test_recipe_prints_what_is_shown_and_agrees_with_enumeration(title, capsys):
    text = RECIPES[title]
    code, printed = (re.findall(rf"```{x}\n(.*?)```", text, re.S)[0] for x in ("python", "text"))
    if "import torch" in code:
        import_or_skip("torch")
    snippet = {"itertools": itertools}
    exec(compile(fences(PAGE)[0] + code, title, "exec"), snippet)
    assert capsys.readouterr().out == printed
    snippet["all_paths"], snippet["by_em"] = partial(AllPaths, snippet), partial(by_em, snippet)
    snippet["every"] = AllPaths(snippet)
    for computed, expected in re.findall(r"^  (\w.*|\[.*)\n((?:    .*\n)+)", CHECKS[title], re.M):
        values = (eval(f"({x})", snippet) for x in (computed, expected))
        np.testing.assert_allclose(*values, atol=1e-12, err_msg=computed)
