"""Every operation of every chain of the table, on every backend; and random chains that drift."""

import numpy as np
import pytest

import arraylogchain as alc
from tests import drifting_chains
from tests.chain_checks import CHECKS, ChainCase, check_chain
from tests.chain_scenarios import ONLY_FLOAT64, SCENARIOS, make

pytestmark = pytest.mark.chains
HALVES = (
    "one row, linear",
    "shared matrix, logs",
    "ragged, rows share matrices, linear",
    "sd = 15, linear",
    "final weights, ragged, logs",
)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(backend, dtype, name):
    if dtype == "float32" and name.startswith(ONLY_FLOAT64):
        pytest.skip("float32 does not hold its numbers")
    if name == "initial weights of 1e-37" and (backend.library, dtype) == ("cupy", "float32"):
        pytest.skip("CuPy flushes subnormal numbers of float32 to zero")
    check_chain(backend, dtype, **make(name))


@pytest.mark.parametrize("name", HALVES)
def test_half_precision(backend, half, name):
    check_chain(backend, half, **make(name))


# Each block is of random chains; what README's command runs is one in thirty.
BLOCKS = [pytest.param(n, marks=[pytest.mark.exhaustive] if n else []) for n in range(30)]


@pytest.mark.parametrize("kind", drifting_chains.KINDS)
@pytest.mark.parametrize("block", BLOCKS)
def test_drifting(backend, dtype, kind, block):
    drifting_chains.check(backend, dtype, kind, block)


@pytest.mark.parametrize("kinds", ["float32 float64", "float64 float32", "float16 float32"])
def test_arrays_of_different_precision(backend, kinds):
    """Results have the wider one, gradients that of their array, whose numbers are as given."""
    of_x, others = kinds.split()
    if {of_x, others} - set(backend.dtypes):
        pytest.skip("no such dtype here")
    arrays = make("final weights, linear")
    arguments = {"log_potentials": backend.asarray(arrays.pop("x"), of_x)}
    arguments |= {n: backend.asarray(x, others) for n, x in arrays.items() if x is not None}
    held = {n: backend.to_numpy(x) for n, x in arguments.items()}
    case = ChainCase(backend, max(of_x, others), held.pop("log_potentials"), **held)
    case.chain = alc.LogChain(**arguments)
    for name in CHECKS.keys() - {"gradients", "path_gradients"}:
        CHECKS[name](case)
    value, pullback = alc.vjp.log_partition(case.chain)
    _, expected = alc.vjp.log_partition(case.make())
    g = backend.asarray(np.ones(value.shape), case.dtype)
    gradients, exact = pullback(g)._asdict(), expected(g)._asdict()
    for name in arguments:
        result = backend.read(gradients[name], of_x if name == "log_potentials" else others)
        tolerance = 4e-3 if "float16" in kinds else 1e-5
        np.testing.assert_allclose(result, backend.to_numpy(exact[name]), rtol=tolerance)
