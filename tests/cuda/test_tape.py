"""Launches that are repeated with other pointers: the same results as if they were worked out."""

import numpy as np
import pytest

from arraylogchain import _dispatch
from arraylogchain._cuda import tape
from arraylogchain._fold import fold
from tests.cuda.cpu_device import CpuDevice, bfloat16
from tests.cuda.product_checks import context, kernels, normal

pytestmark = pytest.mark.usefixtures("compiler")

BUDGET = 1 << 22


def product(device, dtype, a, b, operation="logmatmulexp", **options):
    """Return results, of a recorded call if there is one, and of one that is not recorded."""
    layout, ctx = fold(a.shape, b.shape), context(device, dtype)
    function = _dispatch.implementation(operation, "cuda")
    if operation == "logmatmulexp_gradients":
        out = _dispatch.implementation("logmatmulexp", "cuda")(ctx, layout, a, b, BUDGET)
        arguments = (layout, a, b, out, out, BUDGET)
    else:
        arguments = (layout, a, b, BUDGET)
    device.launches.clear()
    found = tape.call(function, ctx, *arguments, **options)
    names = kernels(device)
    device.launches.clear()
    expected = function(ctx, *arguments, **options)
    assert kernels(device) == names
    return found, expected


def assert_same(found, expected):
    assert isinstance(found, tuple) is isinstance(expected, tuple)
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    for x, y in pairs:
        np.testing.assert_array_equal(x, y)


def operands(dtype, shapes, seed):
    a, b = (normal(*shape, sd=30, seed=seed + i) for i, shape in enumerate(shapes))
    if dtype == "bfloat16":
        return bfloat16(a), bfloat16(b)
    return a.astype(dtype), b.astype(dtype)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "shapes",
    # Maxima of the last are taken of parts of the terms, by two launches.
    [((5, 7), (7, 4)), ((70, 40), (40, 70)), ((2, 40), (3, 40, 50)), ((40, 1100), (1100, 50))],
)
@pytest.mark.parametrize("operation", ["logmatmulexp", "maxplus_matmul", "logmatmulexp_gradients"])
def test_repeated_launches(operation, shapes, precision):
    device = CpuDevice(seed=1)
    for seed in (0, 10, 20):
        given = operands(precision, shapes, seed)
        assert_same(*product(device, precision, *given, operation))
    (found,) = device.remembered.tapes.values()
    assert found is not None


def test_views_and_what_is_not_wanted():
    device = CpuDevice(seed=1)
    for seed in (0, 10):
        a, b = operands("float32", ((80, 50), (50, 70)), seed)
        for x, y in ((a, b), (a[::2, ::-1], b), (a, b[:, :64]), (a.T.copy().T, b)):
            assert_same(*product(device, "float32", x, y))
        for wanted in ((True, False), (False, True)):
            options = {"operation": "logmatmulexp_gradients", "wanted": wanted}
            assert_same(*product(device, "float32", a, b, **options))
    assert len(device.remembered.tapes) == 6


def test_arrays_that_are_the_same_one():
    """They are not the next time; an operand is not its own transpose."""
    device = CpuDevice(seed=1)
    x, y = operands("float32", ((40, 40), (40, 40)), 0)
    for pair in ((x, x), (x, y), (y, x), (y, y)):
        assert_same(*product(device, "float32", *pair))
    assert len(device.remembered.tapes) == 2


def test_what_array_operations_have_made_is_not_repeated():
    device = CpuDevice(seed=1)
    a, b = operands("float32", ((40, 50), (50, 40)), 0)
    for seed in (0, 1):
        b = normal(50, 40, seed=seed)  # converted by every call
        assert_same(*product(device, "float32", a, b))
    assert list(device.remembered.tapes.values()) == [None]


def test_tapes_are_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(tape, "_MOST_TAPES", 3)
    device = CpuDevice(seed=1)
    for n in range(2, 9):
        assert_same(*product(device, "float32", *operands("float32", ((n, 4), (4, n)), 0)))
        assert len(device.remembered.tapes) <= 3


def test_many_launches_are_not_repeated(monkeypatch):
    monkeypatch.setattr(tape, "_MOST_STEPS", 8)
    device = CpuDevice(seed=1)
    given = operands("float32", ((70, 40), (40, 70)), 0)
    for _ in range(2):
        assert_same(*product(device, "float32", *given))
    assert list(device.remembered.tapes.values()) == [None]
