"""Half precisions in and out, and operands of different precision."""

import numpy as np
import pytest

import arraylogchain as alc
from tests import error_model, reference
from tests.checks import check_chain, check_logmatmulexp, check_matmul
from tests.conftest import BACKENDS


def normal(*shape, sd=1.0, seed=0):
    return np.random.default_rng(seed).normal(0, sd, shape)


@pytest.mark.parametrize("sd", [1, 10, 100, 1000])
def test_half_logmatmulexp(backend, half, sd):
    """Computed in single precision and rounded once: half an ulp of the half precision."""
    a, b = normal(9, 30, sd=sd), normal(30, 8, sd=sd, seed=1)
    a[2], a[3, ::2] = -np.inf, -np.inf
    check_logmatmulexp(backend, half, a, b)


def test_half_matmul_adds_in_single_precision(backend, half):
    check_matmul(backend, half, normal(4, 500), normal(500, 5, seed=1))
    # Added one by one in half precision, ones would stop at 2048 (float16) or 256 (bfloat16).
    ones = backend.asarray(np.ones((1, 5000)), half)
    out = alc.matmul(ones, backend.asarray(np.ones((5000, 1)), half))
    total = backend.read(out, half)[0, 0]
    assert total == pytest.approx(5000, rel=2.0 ** -error_model.HALVES[half][0])


@pytest.mark.chains
@pytest.mark.parametrize("sd", [1, 30])
def test_half_chain(backend, half, sd):
    transitions = np.random.default_rng(0).random((5, 4, 4))
    check_chain(backend, half, normal(3, 6, 4, sd=sd), transitions=transitions)
    check_chain(backend, half, normal(3, 6, 4, sd=sd), log_transitions=normal(1, 4, 4))


def test_half_workspace(np_backend):
    a, b = normal(70, 200, sd=20), normal(200, 80, sd=20, seed=1)
    check_logmatmulexp(np_backend, "float16", a, b, workspace=1 << 20)


PROMOTIONS = [
    ("float16", "float32", "float32"),
    ("float16", "float64", "float64"),
    ("float32", "float64", "float64"),
    ("bfloat16", "float16", "float32"),
    ("bfloat16", "float32", "float32"),
    ("bfloat16", "float64", "float64"),
]


@pytest.mark.parametrize(
    ("backend", "first", "second", "expected"),
    [
        (name, *dtypes)
        for name, (_, _, supported) in BACKENDS.items()
        for dtypes in PROMOTIONS
        if set(dtypes) <= set(supported)
    ],
    indirect=["backend"],
)
@pytest.mark.parametrize("function", ["matmul", "logmatmulexp", "maxplus_matmul"])
def test_mixed_precisions_promote(backend, function, first, second, expected):
    x, y = normal(3, 4), normal(4, 3, seed=1)
    for dtypes in [(first, second), (second, first)]:
        a, b = (backend.asarray(v, d) for v, d in zip((x, y), dtypes, strict=True))
        out = getattr(alc, function)(a, b)
        values = backend.read(out[0] if function == "maxplus_matmul" else out, expected)
        held = backend.to_numpy(a), backend.to_numpy(b)
        exact = {
            "matmul": reference.matmul,
            "logmatmulexp": reference.logmatmulexp,
            "maxplus_matmul": lambda p, q: reference.maxplus(p, q, expected),
        }[function](*held)
        np.testing.assert_allclose(
            values, exact.astype(float), rtol=50 * error_model.EPS[expected], atol=1e-6
        )


@pytest.mark.chains
@pytest.mark.parametrize("backend", ["numpy", "strict", "torch"], indirect=True)
def test_mixed_precisions_of_a_chain(backend):
    x, transitions = normal(5, 3), np.random.default_rng(0).random((4, 3, 3))
    chain = alc.LogChain(
        backend.asarray(x, "float32"), transitions=backend.asarray(transitions, "float64")
    )
    exact = reference.chain(x.astype(np.float32), np.log(transitions))
    out = backend.read(chain.log_partition(), "float64")
    assert out == pytest.approx(float(exact.log_partition), rel=1e-13)


def test_promotion_of_a_sequence(np_backend):
    matrices = [normal(3, 3).astype("float16"), normal(3, 3).astype("float32")]
    assert alc.logchainexp(matrices).dtype == np.float32


def test_scalars_come_back_as_arrays(backend, dtype):
    """Results without axes are arrays too, of the caller's library."""
    a = backend.asarray(normal(4), dtype)
    assert backend.read(alc.logmatmulexp(a, a), dtype).shape == ()
    assert backend.read(alc.matmul(a, a), dtype).shape == ()
    chain = alc.LogChain(backend.asarray(normal(1, 4), dtype))
    assert backend.read(chain.log_partition(), dtype).shape == ()


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_device_of_empty_and_full_results(backend, shape):
    """Results without entries are made on the caller's device as well."""
    a = backend.asarray(np.zeros(shape), "float32")
    for function in (alc.matmul, alc.logmatmulexp):
        backend.read(function(a, a.mT if hasattr(a, "mT") else a.T), "float32")
