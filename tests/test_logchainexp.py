"""logchainexp: products of many matrices, square or not, in any number."""

import itertools

import numpy as np
import pytest

import arraylogchain as alc
from tests import reference
from tests.checks import Given
from tests.error_model import assert_within, product_bound, product_chain_bound

INF = np.inf


def normal(*shape, sd=1.0, seed=0):
    return np.random.default_rng(seed).normal(0, sd, shape)


def check_stack(backend, dtype, stack, workspace=None):
    """Compare the product of an array [..., n, K, K] with the reference."""
    given = Given(backend, dtype, stack)
    out = backend.read(alc.logchainexp(given.arrays[0], workspace=workspace), dtype)
    given.assert_unchanged()
    _compare(out, list(np.moveaxis(given.held[0], -3, 0)), dtype)
    return out


def check_sequence(backend, dtype, matrices, workspace=None):
    """Compare the product of a sequence of arrays [..., K_i, K_{i+1}] with the reference."""
    given = Given(backend, dtype, *matrices)
    out = backend.read(alc.logchainexp(given.arrays, workspace=workspace), dtype)
    given.assert_unchanged()
    _compare(out, given.held, dtype)
    return out


def _compare(out, matrices, dtype):
    exact = reference.logchainexp(matrices)
    assert_within(out, exact, product_chain_bound(matrices, exact, dtype))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8, 9, 31])
def test_every_count(backend, dtype, n):
    """Odd counts need care: in logs the identity has 0 on its diagonal and -inf elsewhere."""
    check_stack(backend, dtype, normal(n, 4, 4, sd=3))


@pytest.mark.parametrize("sd", [1, 30, 100, 1000])
def test_wide_ranges(backend, dtype, sd):
    check_stack(backend, dtype, normal(2, 7, 6, 6, sd=sd))


def test_two_factors_are_a_product(backend, dtype):
    """With two factors the sharper bound of a single product holds."""
    a, b = normal(7, 7, sd=40), normal(7, 7, sd=40, seed=1)
    given = Given(backend, dtype, np.stack([a, b]))
    out = backend.read(alc.logchainexp(given.arrays[0]), dtype)
    a, b = given.held[0]
    exact = reference.logmatmulexp(a, b)
    assert_within(out, exact, product_bound(a, b, exact, dtype))


def test_no_factors_give_the_identity(backend, dtype):
    out = backend.read(alc.logchainexp(backend.asarray(np.empty((0, 3, 3)), dtype)), dtype)
    np.testing.assert_array_equal(out, np.where(np.eye(3) == 1, 0, -INF))
    out = backend.read(alc.logchainexp(backend.asarray(np.empty((2, 0, 3, 3)), dtype)), dtype)
    np.testing.assert_array_equal(out, np.where(np.eye(3) == 1, 0, -INF) * np.ones((2, 1, 1)))


def test_one_factor_is_returned_as_it_is(backend, dtype):
    """A copy: writing to the result does not reach the input."""
    stack = backend.asarray(normal(1, 3, 3), dtype)
    out = alc.logchainexp(stack)
    np.testing.assert_array_equal(backend.read(out, dtype), backend.to_numpy(stack)[0])
    before = backend.to_numpy(stack).copy()
    out[0, 0] = 7.0
    np.testing.assert_array_equal(backend.to_numpy(stack), before)


def test_identities_change_nothing(backend, dtype):
    identity = np.where(np.eye(5) == 1, 0, -INF)
    x = normal(5, 5, sd=300).astype(dtype)
    out = check_stack(backend, dtype, np.stack([identity, x, identity]))
    np.testing.assert_allclose(out, x, rtol=0, atol=2 * np.finfo(dtype).eps * np.ptp(x))


@pytest.mark.parametrize(
    "shapes",
    [
        [(3, 5)],
        [(3, 5), (5, 2)],
        [(10, 2), (2, 30), (30, 1), (1, 7)],
        [(1, 6), (6, 6), (6, 6), (6, 1)],
        [(2, 1, 3, 4), (3, 4, 5), (5, 2)],
        [(4, 3), (2, 3, 3), (3, 1, 3, 2)],
        [(3, 0), (0, 4), (4, 2)],
        [(0, 4), (4, 5)],
        [(3, 4), (0, 4, 4), (4, 2)],
    ],
)
def test_sequences(backend, dtype, shapes):
    """Rectangular factors and batch axes that broadcast."""
    matrices = [normal(*shape, sd=20, seed=i) for i, shape in enumerate(shapes)]
    check_sequence(backend, dtype, matrices)


def test_sequence_may_be_a_tuple(np_backend):
    matrices = [normal(3, 3), normal(3, 3, seed=1)]
    np.testing.assert_array_equal(alc.logchainexp(tuple(matrices)), alc.logchainexp(matrices))


def test_association_order_does_not_show(np_backend, dtype):
    """Narrow waists at either end, the cheap order from the right or from the left."""
    for sizes in ([40, 30, 20, 1], [1, 20, 30, 40], [30, 1, 40, 1, 30], [2, 50, 3, 50, 2]):
        shapes = itertools.pairwise(sizes)
        matrices = [normal(*shape, sd=10, seed=i) for i, shape in enumerate(shapes)]
        check_sequence(np_backend, dtype, matrices)


def test_unreachable_entries(backend, dtype):
    """Upper bidiagonal factors: n steps reach n states to the right, and no further."""
    K, n = 9, 5
    stack = np.full((n, K, K), -INF)
    states = np.arange(K)
    stack[:, states, states] = normal(n, K, sd=50)
    stack[:, states[:-1], states[1:]] = normal(n, K - 1, sd=50, seed=1)
    out = check_stack(backend, dtype, stack)
    rows, columns = np.indices((K, K))
    np.testing.assert_array_equal(np.isfinite(out), (columns >= rows) & (columns <= rows + n))


@pytest.mark.parametrize("n", [2, 3, 5, 8, 13])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("sd", [0, 1, 500])
def test_random_supports(backend, dtype, n, share, sd):
    """Any pattern of -inf, with rows and columns that are -inf throughout."""
    rng = np.random.default_rng(n)
    stack = normal(2, n, 3, 3, sd=sd)
    stack[rng.random(stack.shape) < share] = -INF
    stack[0, n // 2, :, 1], stack[1, n // 2, 2] = -INF, -INF
    check_stack(backend, dtype, stack)


@pytest.mark.parametrize("value", [INF, np.nan])
def test_special_values(backend, dtype, value):
    stack = normal(5, 3, 3)
    stack[2, 1, 0] = value
    out = check_stack(backend, dtype, stack)
    assert not np.any(np.isfinite(out))


@pytest.mark.parametrize("n", [2, 3, 5])
def test_infinity_in_the_last_factor(backend, dtype, n):
    """It waits for the last product; elsewhere entries stay finite."""
    stack = normal(n, 3, 3)
    stack[-1, 1, 0] = INF
    out = check_stack(backend, dtype, stack)
    np.testing.assert_array_equal(np.isinf(out), [[True, False, False]] * 3)


def test_half_precisions(backend, half):
    check_stack(backend, half, normal(5, 4, 4, sd=3))


def test_long_products(np_backend, dtype):
    """A thousand factors of one matrix: the result grows linearly, and stays accurate."""
    x = normal(3, 3)
    stack = np.broadcast_to(x, (1000, 3, 3))
    check_stack(np_backend, dtype, stack)


@pytest.mark.parametrize("workspace", [1 << 20, 1 << 22])
def test_workspace_changes_no_answer(np_backend, dtype, workspace):
    check_stack(np_backend, dtype, normal(6, 11, 12, 12, sd=10), workspace=workspace)


@pytest.mark.parametrize("sd", [1, 100])
def test_large_matrices_in_little_memory(np_backend, dtype, sd):
    """Strips of rows times strips of columns, far from 0 as well."""
    stack = normal(2, 3, 110, 110, sd=sd) + np.array([1e4, -2e4, 1e4])[:, None, None]
    check_stack(np_backend, dtype, stack, workspace=1 << 20)
