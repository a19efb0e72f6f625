"""The examples in docstrings run and print what they say."""

import doctest
import importlib
import pkgutil

import pytest

import arraylogchain
from tests.conftest import import_or_skip

# What optional parts of the package import.
OPTIONAL = {"_compiled": "numba", "_dask": "dask.array", "_torch": "torch"}
MODULES = [
    name
    for _, name, _ in pkgutil.walk_packages(arraylogchain.__path__, "arraylogchain.")
    if not name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    part = name.split(".")[1]
    if part in OPTIONAL:
        import_or_skip(OPTIONAL[part])
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize(
    "documented",
    [
        arraylogchain.matmul,
        arraylogchain.logmatmulexp,
        arraylogchain.maxplus_matmul,
        arraylogchain.logchainexp,
        arraylogchain.LogChain,
        arraylogchain.LogChain.log_partition,
        arraylogchain.LogChain.forward_messages,
        arraylogchain.LogChain.plan,
    ],
)
def test_public_docstrings_have_an_example(documented):
    assert ">>>" in documented.__doc__
