"""Memory that is made is written before it is read, whatever lies in it."""

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain import _dispatch
from arraylogchain._context import Context
from arraylogchain.chain import PLANNED
from tests.chain_scenarios import normal, uniform

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

    monkeypatch.setattr(_dispatch, "COMPILED", False)
    return lambda: monkeypatch.setattr(Context, "empty", empty)


def chains():
    """Return chains whose states stay linear, change their form on the way, or are ragged."""
    two_groups = normal(40, 4)
    two_groups[:30, 2:] -= 40.0
    two_groups[-1, :2] = -INF
    halves = np.kron(np.eye(2), np.full((2, 2), 0.5))[None]
    return {
        "narrow": alc.LogChain(normal(5, 9, 4), transitions=uniform(8, 4, 4)),
        "wide": alc.LogChain(normal(5, 9, 4, sd=500), transitions=uniform(8, 4, 4)),
        "changing": alc.LogChain(two_groups, transitions=halves),
        "ragged": alc.LogChain(
            normal(3, 9, 4, sd=30), transitions=uniform(3, 8, 4, 4), lengths=[9, 2, 5]
        ),
    }


@pytest.mark.parametrize("case", ["narrow", "wide", "changing", "ragged"])
def test_chains(poisoned, case):
    def results():
        chain = chains()[case]
        names = [n for n in PLANNED if n != "sample"]
        found = {
            name: getattr(chain, name)() for name in names if name not in ("log_weight", "viterbi")
        }
        found["viterbi"], weight = chain.viterbi()
        found["log_weight"] = weight
        found["sample"] = chain.sample(5, rng=np.random.default_rng(0))
        value, pullback = alc.vjp.log_partition(chain)
        found |= pullback(np.ones_like(value))._asdict()
        return found

    expected = results()
    poisoned()
    for name, found in results().items():
        np.testing.assert_equal(found, expected[name], err_msg=name)


@pytest.mark.parametrize("sd", [1, 40, 2000])
def test_products(poisoned, sd):
    a, b = normal(2, 30, 17, sd=sd), normal(2, 17, 20, sd=sd, seed=1)
    a[0, 3], b[1, :, 4], a[a > sd] = -INF, -INF, -INF

    def results():
        found = []
        for function in (alc.vjp.logmatmulexp, alc.vjp.matmul, alc.vjp.maxplus_matmul):
            given = (a, b) if function is not alc.vjp.matmul else (np.exp(a / sd), np.exp(b / sd))
            value, pullback = function(*given)
            value = getattr(value, "values", value)
            found += [value, *pullback(np.ones_like(value))]
        return [*found, alc.logchainexp(normal(7, 4, 4, sd=sd))]

    expected = results()
    poisoned()
    for x, y in zip(results(), expected, strict=True):
        np.testing.assert_array_equal(x, y)
