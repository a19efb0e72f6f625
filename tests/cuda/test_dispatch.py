"""Products that the table has kernels for: the same results as the array implementation's."""

from dataclasses import replace

import numpy as np
import pytest

from arraylogchain import _dispatch
from arraylogchain._arrays import enter
from arraylogchain._fold import fold
from tests.cuda.cpu_device import CpuDevice
from tests.cuda.product_checks import normal

BUDGET = 1 << 22
OPERATIONS = [name for name, backends in _dispatch.PRODUCTS.items() if "cuda" in backends]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_kernels_agree_with_arrays(compiler, operation):
    a, b = normal(2, 9, 7, sd=2), normal(7, 8, sd=2, seed=1)
    ctx, _ = enter({"a": a})
    layout, device = fold(a.shape, b.shape), CpuDevice(seed=1)
    out = _dispatch.product("logmatmulexp", ctx, layout, a, b, BUDGET)
    values, indices = _dispatch.product("maxplus_matmul", ctx, layout, a, b, BUDGET)
    g = normal(*out.shape, seed=2)
    arguments = {
        "logmatmulexp": (a, b, BUDGET),
        "logmatmulexp_gradients": (a, b, out, g, BUDGET),
        "maxplus_matmul": (a, b, BUDGET),
        "maxplus_gradients": ((a.shape, b.shape), indices, g, values, BUDGET),
    }[operation]
    expected = _dispatch.product(operation, ctx, layout, *arguments)
    found = _dispatch.product(operation, replace(ctx, kernels=device), layout, *arguments)
    assert device.launches
    for one, other in zip(_several(found), _several(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-13, atol=1e-13)


def _several(results):
    return results if isinstance(results, tuple) else (results,)
