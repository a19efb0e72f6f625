"""Tests of other modules, to be run again with fixtures of the module that takes them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def borrowed(
    modules: Iterable[str], fixtures: set[str], but: set[str]
) -> dict[str, Callable[..., Any]]:
    """Return, by new names, tests that ask for one of some fixtures, but for those named."""
    found = {}
    for module in modules:
        for name, test in vars(importlib.import_module(f"tests.{module}")).items():
            if not name.startswith("test_") or name in but or not callable(test):
                continue
            if fixtures & set(inspect.signature(test).parameters):
                found[f"{module}_{name.removeprefix('test_')}"] = test
    return found
