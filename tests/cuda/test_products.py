"""Products by kernels, in tiles and with cuBLAS, against long double."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from arraylogchain._core.axes import fold
from arraylogchain._products import cuda
from tests import error_model, reference
from tests.chain_scenarios import normal
from tests.checks import largest_terms
from tests.cuda.cpu_device import CpuDevice, context
from tests.error_model import assert_within
from tests.test_product_table import PAIRS

INF = np.inf
pytestmark = pytest.mark.usefixtures("compiler")


def check(device: CpuDevice, dtype: str, a: Any, b: Any) -> None:
    """Compare both log products and the max-plus one; inputs are left as they are."""
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    device.flush_to_zero = dtype != "float64"
    with np.errstate(all="ignore"):
        a, b = np.asarray(a).astype(dtype), np.asarray(b).astype(dtype)
        wide = a.astype(float), b.astype(float)
        before, ctx, layout = (a.copy(), b.copy()), context(device, dtype), fold(a.shape, b.shape)
        exact = reference.logmatmulexp(*wide)
        bound = error_model.product_bound(*wide, exact, dtype)
        with device, ctx.computing():
            for by_blas in (False, True):
                within(cuda.log_product(ctx, layout, a, b, by_blas), exact, bound, dtype)
            values, indices = cuda.maxplus_matmul(ctx, layout, a, b, 1 << 30)
    if dtype in ("float32", "float64"):
        np.testing.assert_array_equal(values, reference.maxplus(a, b, dtype))
        np.testing.assert_array_equal(indices, largest_terms(a, b, dtype))
    for x, y in zip((a, b), before, strict=True):
        assert x.tobytes() == y.tobytes()


def within(out: np.ndarray, exact: np.ndarray, bound: Any, dtype: str) -> None:
    if dtype == "bfloat16":
        exact = np.where(np.abs(exact) > 3.3961776e38, np.copysign(INF, exact), exact)
        out = out.astype(np.float32)
    assert_within(out, exact, bound)


@pytest.mark.sanitized
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("sd", [1, 30, 300])
@pytest.mark.parametrize(
    "shapes",
    [((40, 50), (50, 45)), ((2, 9, 1, 7), (9, 7, 8)), ((5,), (5, 3)), ((130, 65), (65, 129))],
)
def test_shapes_and_ranges(device, kind, sd, shapes):
    check(device, kind, normal(*shapes[0], sd=sd), normal(*shapes[1], sd=sd, seed=1))


def test_strides(device, dtype):
    a, b = normal(3, 60, 40, sd=9), normal(1, 2, 70, 60, sd=9, seed=1)
    check(device, dtype, a[:, ::-1, ::2].swapaxes(-1, -2), b[0, 1].T[::-1])
    check(device, dtype, np.asfortranarray(a[0]), np.broadcast_to(b[0, 0, 0, :40, None], (40, 30)))


def test_equal_terms(device, dtype):
    """Of many of one size a plain sum would be rounded to the same side again and again."""
    for n in (500, 4096):
        b = np.append(np.full((n - 1, 2), -0.3), [[0, 0]], 0)
        check(device, dtype, np.full((2, n), -0.1), b)


def test_sums_that_keep_one_term_and_lose_many(device):
    a, b = np.full((40, 40), -44.0), np.full((40, 40), -44.0)
    a[:, 0], a[:, 1], a[:, -1] = 0, -200, -43
    b[0], b[1], b[-1] = -200, 0, -43
    check(device, "float32", a, b)


@pytest.mark.parametrize("name", [n for n, pair in PAIRS.items() if all(x.size for x in pair)])
def test_pairs(compiler, dtype, name):
    check(CpuDevice(3), dtype, *PAIRS[name])


def test_large_products_go_through_cublas_where_they_fit(device, monkeypatch):
    monkeypatch.setattr(cuda, "_BLAS_FROM", 64**3)
    ctx, a = context(device, "float32"), normal(64, 64).astype("float32")
    layout = fold(a.shape, a.shape)
    for budget, kernel in ((1 << 20, "log_epilogue<float>"), (1 << 15, "logmatmulexp<float>")):
        device.launches.clear()
        with ctx.computing():
            cuda.logmatmulexp(ctx, layout, a, a, budget)
        assert [launch.kernel.name for launch in device.launches] == [
            "prepare_factors<float>",
            kernel,
        ]
