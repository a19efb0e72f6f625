"""Counts that no 16-bit or 32-bit number holds: batches, offsets, elements."""

import numpy as np
import pytest

import arraylogchain as alc
from tests import error_model, reference
from tests.error_model import assert_within
from tests.gpu.memory import let_go

GIB = 2**30


@pytest.mark.parametrize("sd", [1, 30])
@pytest.mark.parametrize(
    ("batch", "a", "b"),
    [(65_536, (3, 5), (5, 4)), (66_000, (40, 34), (34, 33)), (100_000, (16, 16), (16, 16))],
)
def test_many_matrices(backend, dtype, batch, a, b, sd):
    """More than a grid has rows, of sizes below a tile's; a hundred of them over and over."""
    rng = np.random.default_rng(0)
    count = -(-batch // 100)
    left, right = (np.tile(rng.normal(0, sd, (100, *x)), (count, 1, 1))[:batch] for x in (a, b))
    assert_repeats(backend, left, right, period=100, dtype=dtype)
    assert_repeats(backend, left, right[0], period=100, dtype=dtype)
    arguments = [backend.asarray(x, dtype) for x in (left, right)]
    values = backend.to_numpy(alc.maxplus_matmul(*arguments).values)
    np.testing.assert_array_equal(values, values[np.arange(batch) % 100])


def assert_repeats(backend, a, b, period, dtype):
    """Check all matrices of a batch that repeats itself; the exact results are computed once."""
    arguments = [backend.asarray(x, dtype) for x in (a, b)]
    out = backend.read(alc.logmatmulexp(*arguments), dtype)
    left, right = (backend.to_numpy(x[:period] if len(x.shape) == 3 else x) for x in arguments)
    exact = reference.logmatmulexp(left, right)
    bound = error_model.product_bound(left, right, exact, dtype)
    for first in range(0, len(out), period):
        part = out[first : first + period]
        assert_within(part, exact[: len(part)], bound[: len(part)])


def test_chains_of_many_rows(backend):
    """A row in each of 70,000 groups, and 200,000 rows in one."""
    rng = np.random.default_rng(3)
    x = np.tile(rng.normal(size=(100, 4, 3)), (2000, 1, 1))
    shared, per_row = rng.random((1, 3, 3)), rng.random((100, 1, 3, 3))
    for transitions, rows in [(shared, 200_000), (np.tile(per_row, (700, 1, 1, 1)), 70_000)]:
        arguments = [backend.asarray(v, "float32") for v in (x[:rows], transitions)]
        out = backend.read(
            alc.LogChain(arguments[0], transitions=arguments[1]).log_partition(), "float32"
        )
        small_batch = alc.LogChain(x[:100], transitions=per_row if rows == 70_000 else shared)
        expected = np.tile(small_batch.log_partition(), rows // 100)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def need_memory(backend, size):
    let_go(backend)
    if backend.library == "cupy":
        free = backend.xp.cuda.runtime.memGetInfo()[0]
    else:
        free = backend.xp.cuda.mem_get_info()[0]
    if free < size:
        pytest.skip(f"{size / GIB:.0f} GiB of device memory are not free")


def assert_rows(backend, a, b, out, rows, dtype):
    """Compare some rows of a product that is too large to be computed twice."""
    b = backend.to_numpy(b)
    for row in rows:
        a_row = backend.to_numpy(a[row : row + 1]).copy()
        exact = reference.logmatmulexp(a_row, b)
        bound = error_model.product_bound(a_row, b, exact, dtype)
        assert_within(backend.to_numpy(out[row : row + 1]), exact, bound)


@pytest.mark.slow
def test_result_of_more_than_2_to_the_31(backend):
    need_memory(backend, 12 * GIB)
    size = 46_400
    assert size**2 > 2**31
    rng = np.random.default_rng(4)
    a = backend.asarray(rng.normal(0, 20, (size, 9)), "float32")
    b = backend.asarray(rng.normal(0, 20, (9, size)), "float32")
    out = alc.logmatmulexp(a, b)
    assert tuple(out.shape) == (size, size)
    assert_rows(backend, a, b, out, [0, 1, 20_000, 46_285, size - 1], "float32")
    del out
    let_go(backend)


@pytest.mark.slow
def test_operand_of_more_than_2_to_the_31(backend):
    """Its last rows lie behind element 2**31; most rows are the same few ones."""
    need_memory(backend, 24 * GIB)
    rows, terms = 70_000, 32_768
    assert rows * terms > 2**31
    rng = np.random.default_rng(5)
    a = backend.xp.broadcast_to(
        backend.asarray(rng.normal(0, 20, (1, 1000, terms)), "float16"), (70, 1000, terms)
    )
    a = a.reshape(rows, terms)
    b = backend.asarray(rng.normal(0, 20, (terms, 40)), "float16")
    out = alc.logmatmulexp(a, b)
    assert_rows(backend, a, b, out, [0, 999, 65_535, 65_536, rows - 1], "float16")
    values = backend.to_numpy(out).reshape(70, 1000, 40)
    np.testing.assert_allclose(values, np.broadcast_to(values[0], values.shape), rtol=2e-3)
    indices = alc.maxplus_matmul(a, b).indices
    result = backend.to_numpy(indices).reshape(70, 1000, 40)
    np.testing.assert_array_equal(result, np.broadcast_to(result[0], result.shape))
    del a, b, out, indices
    let_go(backend)


@pytest.mark.slow
def test_chain_of_more_than_2_to_the_31(backend):
    """Potentials [1,000,000, 36, 60] in half precision, a few hundred rows over and over."""
    need_memory(backend, 12 * GIB)
    rng = np.random.default_rng(6)
    small_batch = backend.asarray(rng.normal(size=(1, 500, 36, 60)), "float16")
    x = backend.xp.broadcast_to(small_batch, (2000, 500, 36, 60)).reshape(1_000_000, 36, 60)
    assert x.shape[0] * 36 * 60 > 2**31
    P = backend.asarray(rng.random((1, 60, 60)), "float16")
    out = backend.to_numpy(alc.LogChain(x, transitions=P).log_partition()).reshape(2000, 500)
    expected = backend.to_numpy(alc.LogChain(small_batch[0], transitions=P).log_partition())
    np.testing.assert_allclose(out, np.broadcast_to(expected, out.shape), rtol=2e-3)
    del x
    let_go(backend)
