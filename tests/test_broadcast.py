"""Batch axes of either operand, in every arrangement, and however arrays lie in memory."""

import numpy as np
import pytest

import arraylogchain as alc
from tests.checks import check_logmatmulexp, check_matmul, check_maxplus
from tests.error_model import assert_within, linear_bound, product_bound
from tests.reference import logmatmulexp, matmul

CHECKS = {
    "logmatmulexp": check_logmatmulexp,
    "matmul": check_matmul,
    "maxplus_matmul": check_maxplus,
}
BATCHES = {
    "same": ((3,), (3,)),
    "only a": ((3, 2), ()),
    "only b": ((), (3, 2)),
    "a of one": ((1,), (4,)),
    "both, crossed": ((3, 1), (1, 2)),
    "interleaved": ((2, 1, 3, 1), (1, 4, 1, 5)),
    "interleaved with shared": ((2, 3, 1, 2), (3, 4, 2)),
    "shared between own": ((2, 3, 1), (1, 3, 4)),
    "more axes on b": ((3,), (2, 1)),
    "ones": ((1, 1), (1,)),
    "empty axis": ((2, 1), (1, 0)),
}


def normal(*shape, sd=1.0, seed=0):
    return np.random.default_rng(seed).normal(0, sd, shape)


@pytest.mark.parametrize("function", list(CHECKS))
@pytest.mark.parametrize("batches", list(BATCHES))
def test_batch_axes(backend, function, batches):
    a_batch, b_batch = BATCHES[batches]
    a, b = normal(*a_batch, 5, 6, sd=10), normal(*b_batch, 6, 4, sd=10, seed=1)
    CHECKS[function](backend, "float32", a, b)


@pytest.mark.parametrize("batches", list(BATCHES))
def test_batch_axes_of_flagged_entries(backend, dtype, batches):
    """Entries that are computed again find their operands in the right batch."""
    a_batch, b_batch = BATCHES[batches]
    a, b = normal(*a_batch, 5, 6, sd=1000), normal(*b_batch, 6, 4, sd=1000, seed=1)
    a[..., 2, :3] = -np.inf
    check_logmatmulexp(backend, dtype, a, b)


@pytest.mark.parametrize("function", list(CHECKS))
@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [((6,), (6,)), ((6,), (6, 4)), ((5, 6), (6,)), ((6,), (3, 2, 6, 4)), ((3, 2, 5, 6), (6,))],
)
def test_one_dimensional_operands(backend, dtype, function, a_shape, b_shape):
    a, b = normal(*a_shape, sd=50), normal(*b_shape, sd=50, seed=1)
    CHECKS[function](backend, dtype, a, b)
    own = [backend.asarray(x, dtype) for x in (a, b)]
    out = getattr(alc, function)(*own)
    out = out.values if function == "maxplus_matmul" else out
    assert tuple(out.shape) == np.matmul(a, b).shape


@pytest.mark.parametrize("workspace", [1 << 20, 1 << 22])
@pytest.mark.parametrize("function", list(CHECKS))
def test_folds_in_small_workspaces(np_backend, function, workspace):
    """Tiles that cut through batch axes, folded rows and folded columns."""
    for a_batch, b_batch in [((200, 3, 1), (3, 2)), ((3, 1), (40, 3, 5)), ((500,), (500,))]:
        a, b = normal(*a_batch, 4, 30, sd=20), normal(*b_batch, 30, 7, sd=20, seed=1)
        CHECKS[function](np_backend, "float32", a, b, workspace=workspace)


def layouts(dtype):
    """Return arrays of the same values, 3 x 6 x 6, that lie in memory in different ways."""
    x = normal(3, 6, 6, sd=40).astype(dtype)
    padded = np.full((3, 12, 8), np.nan, dtype)
    padded[:, ::2, 1:7] = x
    backwards = np.ascontiguousarray(x[::-1, ::-1, ::-1])
    read_only = x.copy()
    read_only.flags.writeable = False
    return {
        "view with gaps": padded[:, ::2, 1:7],
        "negative strides": backwards[::-1, ::-1, ::-1],
        "Fortran order": np.asfortranarray(x),
        "transposed": np.ascontiguousarray(np.swapaxes(x, -1, -2)).swapaxes(-1, -2),
        "batch axis last": np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 0, -1)), -1, 0),
        "read-only": read_only,
    }


@pytest.mark.parametrize("layout", list(layouts("float32")))
def test_memory_layouts(dtype, layout):
    """The result depends on the values only, and the operands stay as they are."""
    other = layouts(dtype)[layout]
    plain = np.array(other, order="C")
    exact = logmatmulexp(plain, plain)
    bound = product_bound(plain, plain, exact, dtype)
    linear = matmul(plain, plain)
    expected = alc.maxplus_matmul(plain, plain)
    for pair in [(other, other), (other, plain), (plain, other)]:
        assert_within(alc.logmatmulexp(*pair), exact, bound)
        assert_within(alc.matmul(*pair), linear, linear_bound(plain, plain, linear, dtype))
        values, indices = alc.maxplus_matmul(*pair)
        np.testing.assert_array_equal(values, expected.values)
        np.testing.assert_array_equal(indices, expected.indices)
    np.testing.assert_array_equal(other, plain)


@pytest.mark.parametrize("function", list(CHECKS))
def test_expanded_operands(function):
    """Axes of stride 0, batch axes and the summed one, are read and never written."""
    row, column = normal(7, sd=30), normal(6, sd=30, seed=1)
    a = np.broadcast_to(row, (4, 5, 7))
    b = np.broadcast_to(column, (4, 7, 6))
    expected = getattr(alc, function)(a.copy(), b.copy())
    out = getattr(alc, function)(a, b)
    for got, want in zip(_parts(out), _parts(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-13)
    np.testing.assert_array_equal(a, np.broadcast_to(row, (4, 5, 7)))
    np.testing.assert_array_equal(b, np.broadcast_to(column, (4, 7, 6)))


@pytest.mark.parametrize("name", ["bfloat16", "float32", "float64"])
def test_torch_views(torch_backend, name):
    """Expanded and transposed tensors."""
    x = torch_backend.asarray(normal(1, 6, 5, sd=30), name)
    a, b = x.expand(3, 6, 5), x.mT
    exact = logmatmulexp(torch_backend.to_numpy(a), torch_backend.to_numpy(b))
    bound = product_bound(torch_backend.to_numpy(a), torch_backend.to_numpy(b), exact, name)
    assert_within(torch_backend.read(alc.logmatmulexp(a, b), name), exact, bound)


def _parts(out):
    return out if isinstance(out, tuple) else (out,)
