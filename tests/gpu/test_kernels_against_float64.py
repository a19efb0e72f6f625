"""Every kind of kernel against long double on the host, and against array operations on NumPy.

Sizes lie at, just below and just above those where another kernel or another tile is chosen.
"""

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import arraylogchain as alc
from tests import error_model, reference
from tests.checks import check_chain, check_logmatmulexp, check_matmul, check_maxplus
from tests.conftest import make_backend
from tests.error_model import assert_within
from tests.gradient_checks import (
    check_posterior,
    check_vjp_chain,
    check_vjp_logmatmulexp,
    check_vjp_maxplus,
)
from tests.path_checks import Case
from tests.test_properties import operands
from tests.test_sampling import assert_possible, draw

INF = float("inf")
SIZES = [
    (1, 1, 1),
    (7, 5, 3),
    (8, 8, 8),
    (16, 17, 16),
    (32, 32, 32),
    (33, 31, 32),
    (1, 300, 700),
    (2, 65, 513),
    (3, 1000, 33),
    (5, 129, 200),
    (600, 300, 1),
    (64, 64, 64),
    (65, 63, 127),
    (128, 8, 128),
    (129, 130, 257),
    (17, 400, 130),
    (200, 2000, 9),
]
sizes = pytest.mark.parametrize("size", SIZES, ids=["x".join(map(str, s)) for s in SIZES])


def normal(*shape, sd=1.0, seed=0):
    return np.random.default_rng(seed).normal(0, sd, shape)


def _closed(a, b, share):
    rng = np.random.default_rng(7)
    a, b = (np.where(rng.random(x.shape) < share, -INF, x) for x in (a, b))
    a[0], b[:, -1] = -INF, -INF
    return a, b


def _band(a, b):
    rows, terms = np.indices(a.shape)
    return np.where(abs(rows - terms) > 2, -INF, a), b


def _crossed(a, b):
    """Where a row has its largest entry, columns have their smallest ones."""
    slope = np.linspace(0, 400, a.shape[1])
    return a + slope, b - 1.5 * slope[:, None]


def _special(a, b):
    rng = np.random.default_rng(8)
    for x in (a, b):
        for value in (np.nan, INF, -INF):
            x[tuple(rng.integers(0, n) for n in x.shape)] = value
    return a, b


PATTERNS = {
    "moderate": lambda a, b: (a, b),
    "wide": lambda a, b: (30 * a, 30 * b),
    "very wide": lambda a, b: (1000 * a, 1000 * b),
    "far from zero": lambda a, b: (a + 1e4, b - 2e4),
    "closed": lambda a, b: _closed(a, b, 0.3),
    "nearly all closed, wide": lambda a, b: _closed(100 * a, 100 * b, 0.95),
    "band": _band,
    "crossed": _crossed,
    "special": _special,
}
patterns = pytest.mark.parametrize("pattern", list(PATTERNS))


def pair(size, pattern, batch=()):
    m, k, n = size
    return PATTERNS[pattern](normal(*batch, m, k), normal(*batch, k, n, seed=1))


@sizes
@patterns
def test_logmatmulexp(backend, dtype, size, pattern):
    check_logmatmulexp(backend, dtype, *pair(size, pattern))


@sizes
@pytest.mark.parametrize("pattern", ["moderate", "very wide", "closed", "special"])
def test_maxplus(backend, dtype, size, pattern):
    check_maxplus(backend, dtype, *pair(size, pattern))


@sizes
def test_matmul(backend, dtype, size):
    check_matmul(backend, dtype, *pair(size, "moderate"))


@sizes
@pytest.mark.parametrize("pattern", ["moderate", "wide", "closed"])
def test_half_precisions(backend, half, size, pattern):
    a, b = pair(size, pattern)
    check_logmatmulexp(backend, half, a, b)
    check_maxplus(backend, half, a, b)


SOME = [(7, 5, 3), (32, 32, 32), (3, 200, 65), (65, 63, 127), (129, 130, 40), (40, 1100, 50)]


@pytest.mark.parametrize("size", SOME, ids=str)
@patterns
def test_gradients(backend, dtype, size, pattern):
    a, b = pair(size, pattern)
    check_vjp_logmatmulexp(backend, dtype, a, b)
    if pattern not in ("band", "crossed", "special"):
        check_vjp_maxplus(backend, dtype, a, b)


@pytest.mark.parametrize("workspace", [1 << 20, None])
@pytest.mark.parametrize("size", [(16, 16, 16), (3, 90, 70), (70, 90, 66)], ids=str)
@pytest.mark.parametrize("batches", [((5,), (5,)), ((4, 1), (3,)), ((), (6,)), ((2, 1, 3), (4, 1))])
def test_broadcast_batches(backend, dtype, size, batches, workspace):
    m, k, n = size
    a, b = normal(*batches[0], m, k, sd=30), normal(*batches[1], k, n, sd=30, seed=1)
    check_logmatmulexp(backend, dtype, a, b, workspace=workspace)
    check_maxplus(backend, dtype, a, b, workspace=workspace)


def views(backend, x, dtype):
    """Yield arrays of x's values that lie in memory in different ways."""
    xp = backend.xp
    yield "plain", backend.asarray(x, dtype)
    padded = np.full((x.shape[0], 2 * x.shape[1], x.shape[2] + 3), np.nan)
    padded[:, ::2, 1:-2] = x
    yield "with gaps", backend.asarray(padded, dtype)[:, ::2, 1:-2]
    turned = backend.asarray(np.ascontiguousarray(x.swapaxes(-1, -2)), dtype)
    yield "transposed", xp.swapaxes(turned, -1, -2)
    last = backend.asarray(np.ascontiguousarray(np.moveaxis(x, 0, -1)), dtype)
    yield "batch axis last", xp.moveaxis(last, -1, 0)
    # No vector of several entries is aligned.
    shifted = backend.asarray(np.concatenate([[np.nan], x.ravel()]), dtype)
    yield "one entry on", shifted[1:].reshape(x.shape)
    if backend.library == "cupy":
        backwards = backend.asarray(np.ascontiguousarray(x[::-1, ::-1, ::-1]), dtype)
        yield "negative strides", backwards[::-1, ::-1, ::-1]


@pytest.mark.parametrize("size", [(16, 16, 16), (2, 90, 70), (70, 90, 66)], ids=str)
@pytest.mark.parametrize("sd", [1, 100])
def test_views(backend, dtype, size, sd):
    m, k, n = size
    a, b = normal(3, m, k, sd=sd).astype(dtype), normal(3, k, n, sd=sd, seed=1).astype(dtype)
    exact = reference.logmatmulexp(a, b)
    bound = error_model.product_bound(a, b, exact, dtype)
    best = alc.maxplus_matmul(a, b)
    for _, left in views(backend, a, dtype):
        for _, right in views(backend, b, dtype):
            assert_within(backend.read(alc.logmatmulexp(left, right), dtype), exact, bound)
            values, indices = alc.maxplus_matmul(left, right)
            np.testing.assert_array_equal(backend.read(values, dtype), best.values)
            np.testing.assert_array_equal(backend.read(indices, "int64"), best.indices)


def test_views_of_a_chain(backend, dtype):
    x, P = normal(4, 9, 33, sd=5).astype(dtype), np.random.default_rng(1).random((8, 33, 33))
    P = P.astype(dtype)
    plain = [backend.asarray(v, dtype) for v in (x, P)]
    expected = backend.to_numpy(alc.LogChain(plain[0], transitions=plain[1]).log_partition())
    for _, potentials in views(backend, x, dtype):
        for _, transitions in views(backend, P, dtype):
            chain = alc.LogChain(potentials, transitions=transitions)
            out = backend.read(chain.log_partition(), dtype)
            np.testing.assert_allclose(out, expected, rtol=20 * error_model.EPS[dtype])


# Rows, steps, states, matrices: from one chain to many, at and around the sizes of warps and
# blocks, and with more states than a block has on chip.
CHAINS = [
    (1, 2, 1, 1),
    (1, 40, 5, 39),
    (900, 7, 4, 6),
    (300, 5, 16, 1),
    (3, 9, 31, 1),
    (33, 6, 32, 5),
    (5, 7, 33, 1),
    (70, 5, 64, 4),
    (9, 12, 100, 1),
    (2, 6, 129, 5),
    (40, 4, 200, 3),
    (3, 4, 257, 1),
    (2, 3, 600, 2),
]
chains = pytest.mark.parametrize("shape", CHAINS, ids=["x".join(map(str, s)) for s in CHAINS])


def chain_of(shape, pattern, logs):
    rows, T, K, matrices = shape
    rng = np.random.default_rng(9)
    x, P = rng.normal(size=(rows, T, K)), rng.random((matrices, K, K))
    if pattern == "wide":
        x = 30 * x
    elif pattern == "very wide":
        x = 1000 * x
    elif pattern == "closed":
        x[rng.random(x.shape) < 0.2] = -INF
        P[rng.random(P.shape) < 0.6] = 0
    elif pattern == "left to right":
        x, P = 20 * x, P * (np.eye(K) + np.eye(K, k=1))
    elif pattern == "tiny and large weights":
        P = 10.0 ** rng.uniform(-30, 30, P.shape)
    if logs:
        with np.errstate(divide="ignore"):
            return x, {"log_transitions": np.log(P), "log_initial": rng.normal(size=K)}
    return x, {"transitions": P, "initial": rng.random(K)}


chain_patterns = pytest.mark.parametrize(
    "pattern",
    ["moderate", "wide", "very wide", "closed", "left to right", "tiny and large weights"],
)


@chains
@chain_patterns
@pytest.mark.parametrize("logs", [False, True], ids=["linear", "logs"])
def test_chains(backend, dtype, shape, pattern, logs):
    x, options = chain_of(shape, pattern, logs)
    check_chain(backend, dtype, x, **options)


@pytest.mark.parametrize("shape", [s for s in CHAINS if s[2] < 600], ids=str)
@pytest.mark.parametrize("pattern", ["moderate", "wide", "closed"])
@pytest.mark.parametrize("logs", [False, True], ids=["linear", "logs"])
def test_posteriors_and_gradients(backend, dtype, shape, pattern, logs):
    x, options = chain_of(shape, pattern, logs)
    check_posterior(backend, dtype, x, **options)
    check_vjp_chain(backend, dtype, x, **options)


@pytest.mark.parametrize("shape", [s for s in CHAINS if s[0] * s[2] < 6000], ids=str)
@chain_patterns
@pytest.mark.parametrize("logs", [False, True], ids=["linear", "logs"])
def test_paths(backend, dtype, shape, pattern, logs):
    x, options = chain_of(shape, pattern, logs)
    case = Case(backend, dtype, x, **options)
    case.check_viterbi()
    case.check_entropy()
    assert_possible(case, draw(case, 10))


@pytest.mark.parametrize("workspace", [1 << 20, 3 << 20])
def test_chains_in_small_workspaces(backend, dtype, workspace):
    x, options = chain_of((70, 30, 100, 29), "wide", logs=True)
    check_chain(backend, dtype, x, **options, workspace=workspace)
    check_vjp_chain(backend, dtype, x, **options, workspace=workspace)


NAMES = st.sampled_from(["cupy", "torch-cuda"])
fewer = hypothesis.settings(max_examples=60)


@fewer
@given(operands=operands(), dtype=st.sampled_from(["float32", "float64"]), name=NAMES)
def test_any_products(operands, dtype, name):
    check_logmatmulexp(make_backend(name), dtype, *operands)
    check_maxplus(make_backend(name), dtype, *operands)


# ---------------------------------------------------------------- against array operations on NumPy


@pytest.mark.parametrize("size", [(1024, 1024, 1024), (4, 3000, 2000), (3000, 17, 1500)], ids=str)
@pytest.mark.parametrize("sd", [1, 25])
def test_large_products_agree_with_numpy(backend, dtype, size, sd):
    """Each path is within its bound of the exact result, so they are within two of each other."""
    m, k, n = size
    a, b = normal(m, k, sd=sd).astype(dtype), normal(k, n, sd=sd, seed=1).astype(dtype)
    out = backend.read(alc.logmatmulexp(*(backend.asarray(x) for x in (a, b))), dtype)
    expected = alc.logmatmulexp(a.astype(float), b.astype(float))
    assert_within(out, expected, 2 * error_model.product_bound(a, b, expected, dtype))


def test_maxplus_agrees_with_numpy_to_the_bit(backend, dtype):
    """Ties included: entries are whole numbers of a small range."""
    a, b = np.round(normal(300, 400, sd=3)), np.round(normal(400, 500, sd=3, seed=1))
    a[a == 2], b[b == 5] = -INF, -INF
    a, b = a.astype(dtype), b.astype(dtype)
    values, indices = alc.maxplus_matmul(*(backend.asarray(x) for x in (a, b)))
    expected = alc.maxplus_matmul(a, b)
    np.testing.assert_array_equal(backend.read(values, dtype), expected.values)
    np.testing.assert_array_equal(backend.read(indices, "int64"), expected.indices)


def test_chains_agree_with_numpy(backend, dtype):
    """The forum's shape; NumPy computes in float64."""
    x, options = chain_of((500, 40, 200, 39), "moderate", logs=False)
    x, P, p0 = (v.astype(dtype) for v in (x, *options.values()))
    given = [backend.asarray(v) for v in (x, P, p0)]
    chain = alc.LogChain(given[0], transitions=given[1], initial=given[2])
    wide = [v.astype(float) for v in (x, P, p0)]
    expected = alc.LogChain(wide[0], transitions=wide[1], initial=wide[2])
    partition = expected.log_partition()
    gap = np.sum(np.ptp(x, axis=-1), axis=-1)  # whatever path decides
    bound = 2 * error_model.chain_bound(partition, gap, 40, 200, dtype)
    assert_within(backend.read(chain.log_partition(), dtype), partition, bound)
    marginals = backend.read(chain.marginals(), dtype)
    np.testing.assert_allclose(
        marginals, expected.marginals(), rtol=0, atol=2e3 * error_model.EPS[dtype]
    )
    np.testing.assert_allclose(marginals.sum(axis=-1), 1, rtol=2e3 * error_model.EPS[dtype])
