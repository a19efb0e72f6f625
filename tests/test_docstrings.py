"""The examples in docstrings run and print the expected output."""

import doctest
import importlib
import pkgutil

import pytest

import arraylogchain as alc
from tests.conftest import import_or_skip

# Imports of optional parts of the package.
OPTIONAL = {"_numba": "numba", "_dask": "dask.array", "_torch": "torch", "operators": "torch"}
MODULES = [
    name
    for _, name, _ in pkgutil.walk_packages(alc.__path__, "arraylogchain.")
    if not name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    parts = {"_numba" if part == "compiled" else part for part in name.split(".")}
    for part in parts & set(OPTIONAL):
        import_or_skip(OPTIONAL[part])
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_public_docstrings_have_an_example():
    names = ("matmul", "logmatmulexp", "maxplus_matmul", "logchainexp", "LogChain")
    methods = ("log_partition", "forward_messages", "plan")
    documented = [getattr(alc, name) for name in names] + [
        getattr(alc.LogChain, n) for n in methods
    ]
    assert all(">>>" in x.__doc__ for x in documented)
