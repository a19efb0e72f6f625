"""Memory that is made is written before it is read, whatever lies in it."""

import numpy as np
import pytest

from arraylogchain import _select
from arraylogchain._core.context import Context
from tests.chain_checks import check_chain
from tests.chain_scenarios import make
from tests.gradient_checks import CHECKS, check_vjp_logchainexp
from tests.test_product_table import PAIRS, STACKS


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fill all new memory of floating-point numbers with NaN."""
    made = Context.empty

    def empty(self, shape, dtype):
        x = made(self, shape, dtype)
        if x.dtype.kind == "f":
            x[...] = np.nan
        return x

    monkeypatch.setattr(_select, "COMPILED", False)
    monkeypatch.setattr(Context, "empty", empty)


# Chains whose states stay linear, or do not, change their form on the way, or are ragged.
NAMES = ["rows share matrices, linear", "sd = 1000, linear", "disconnected states, linear"]
NAMES += ["ragged, matrices of each row, logs"]


@pytest.mark.parametrize("name", NAMES)
def test_chains(np_backend, name):
    check_chain(np_backend, "float64", **make(name))


@pytest.mark.parametrize("name", ["same batch, sd = 5", "same batch, sd = 1000", "sd = 30"])
def test_products(np_backend, name):
    for function, check in CHECKS.items():
        finite = (np.where(np.isfinite(x), x, 0) for x in PAIRS[name])
        check(np_backend, "float64", *(finite if function == "matmul" else PAIRS[name]))


@pytest.mark.parametrize("name", ["n = 8, sd = 1", "n = 8, sd = 30"])
def test_stacks(np_backend, name):
    check_vjp_logchainexp(np_backend, "float64", STACKS[name])
