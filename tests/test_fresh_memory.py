"""Memory that is made is written before it is read, whatever lies in it."""

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain import _select
from arraylogchain._core.context import Context
from tests.chain_scenarios import make, normal
from tests.test_state import everything, parts_of

INF = np.inf


@pytest.fixture
def poisoned(monkeypatch):
    """Fill all new memory of floating-point numbers with NaN."""
    made = Context.empty

    def empty(self, shape, dtype):
        x = made(self, shape, dtype)
        if x.dtype.kind == "f":
            x[...] = np.nan
        return x

    monkeypatch.setattr(_select, "COMPILED", False)
    return lambda: monkeypatch.setattr(Context, "empty", empty)


# Chains whose states stay linear, or do not, change their form on the way, or are ragged.
NAMES = ["rows share matrices, linear", "sd = 1000, linear", "disconnected states, linear"]
NAMES += ["ragged, matrices of each row, logs"]


@pytest.mark.parametrize("name", NAMES)
def test_chains(poisoned, name):
    def results():
        options = make(name)
        chain = alc.LogChain(options.pop("x"), **options)
        value, pullback = alc.vjp.log_partition(chain)
        return parts_of([*everything(chain), value, pullback(np.ones_like(value))])

    expected = results()
    poisoned()
    for result, known in zip(results(), expected, strict=True):
        np.testing.assert_array_equal(result, known)


@pytest.mark.parametrize("sd", [1, 40, 2000])
def test_products(poisoned, sd):
    a, b = normal(2, 30, 17, sd=sd), normal(2, 17, 20, sd=sd, seed=1)
    a[0, 3], b[1, :, 4], a[a > sd] = -INF, -INF, -INF

    def results():
        result = []
        for function in (alc.vjp.logmatmulexp, alc.vjp.matmul, alc.vjp.maxplus_matmul):
            arguments = (
                (a, b) if function is not alc.vjp.matmul else (np.exp(a / sd), np.exp(b / sd))
            )
            value, pullback = function(*arguments)
            value = getattr(value, "values", value)
            result += [value, *pullback(np.ones_like(value))]
        return [*result, alc.logchainexp(normal(7, 4, 4, sd=sd))]

    expected = results()
    poisoned()
    for x, y in zip(results(), expected, strict=True):
        np.testing.assert_array_equal(x, y)
