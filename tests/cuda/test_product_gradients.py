"""Gradients of logmatmulexp on CUDA in tiles, within the bounds of the error model."""

from __future__ import annotations

import numpy as np
import pytest

from arraylogchain._cuda.products import gradients, log_product
from arraylogchain._fold import fold
from tests.cuda.cpu_device import CpuDevice
from tests.cuda.product_checks import (
    INF,
    NAN,
    Allocations,
    check_gradients,
    context,
    half_flushed,
    kernels,
    normal,
)
from tests.gradient_checks import COTANGENTS

pytestmark = pytest.mark.usefixtures("compiler")


@pytest.mark.parametrize("kind", COTANGENTS)
@pytest.mark.parametrize("sd", [1, 10, 20, 30, 100, 1000])
def test_normal_entries(sd: float, kind: str) -> None:
    check_gradients(CpuDevice(), "float32", normal(40, 30, sd=sd), normal(30, 17, sd=sd), kind)


@pytest.mark.sanitized
def test_any_order_of_threads(device: CpuDevice) -> None:
    """Proved entries beside entries that are not, in every part of ragged tiles."""
    a, b = normal(70, 37), normal(37, 90, seed=1)
    a[::4, 1:] -= 110
    b[:-1, ::3] -= 110
    check_gradients(device, "float32", a, b)
    expected = ["logmatmulexp", "posterior_weights", "exact_posterior"]
    expected += 2 * ["posterior_sums"] + 2 * ["exact_posterior_sums"]
    assert kernels(device) == ["maxima", "factors", *expected]


def test_terms_are_shared_out_where_tiles_are_few() -> None:
    """Proved weights beside others, from sums that several blocks have parts of."""
    device = CpuDevice(seed=3)
    a, b = normal(40, 1100), normal(1100, 50, seed=1)
    a[::4, 1:] -= 110
    b[:-1, ::3] -= 110
    check_gradients(device, "float32", a, b, workspace=1 << 24)
    [launch] = [x for x in device.launches if x.kernel.startswith("logmatmulexp<")]
    assert launch.grid == 4  # a tile in four parts


@pytest.mark.parametrize(
    "shape", [(33, 1, 1), (1, 70, 1), (5, 1, 64), (65, 33, 63), (129, 17, 257), (20, 140, 150)]
)
def test_ragged_edges(shape: tuple[int, int, int]) -> None:
    rows, terms, columns = shape
    a, b = normal(rows, terms, sd=20), normal(terms, columns, sd=20, seed=1)
    check_gradients(CpuDevice(seed=3), "float32", a, b)


@pytest.mark.parametrize("sd", [20, 30, 300])
def test_where_subnormal_numbers_are_flushed(sd: float) -> None:
    a, b = normal(40, 37, sd=sd), normal(37, 50, sd=sd, seed=1)
    check_gradients(CpuDevice(flush_to_zero=True), "float32", a, b)


def test_sums_that_have_lost_most_of_their_terms_are_not_proved() -> None:
    """With ordinary cotangents the weights of such sums are too large to be used anyway."""
    for size in (1, 1e-12):
        g = size * normal(40, 40)
        check_gradients(CpuDevice(flush_to_zero=True), "float32", *half_flushed(), g)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sd", [1, 1000])
@pytest.mark.parametrize("precision", ["float64", "float16"])
def test_other_precisions(precision: str, sd: float) -> None:
    check_gradients(CpuDevice(), precision, normal(40, 21, sd=sd), normal(21, 35, sd=sd, seed=1))


@pytest.mark.parametrize("low", [-10, -80, -110, -400, -1e4, -1e30])
def test_crossed_maxima_share_their_gradient(low: float) -> None:
    a, b = np.full((1, 40), -INF), np.full((40, 1), -INF)
    a[0, :2], b[:2, 0] = (0.0, low), (low, 0.0)
    da, db = check_gradients(CpuDevice(), "float32", a, b, [[1.0]])
    assert da[0, :2] == pytest.approx(0.5, rel=1e-5)
    assert db[:2, 0] == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("offset", "sd"), [(1e4, 3), (1e4, 1000), (1e6, 1000)])
def test_offsets(offset: float, sd: float, sign: int) -> None:
    """What all entries have in common must not be rounded with those that get their own maximum."""
    a, b = normal(35, 12, sd=sd) + offset, normal(12, 7, sd=sd, seed=1) + sign * offset / 3
    check_gradients(CpuDevice(), "float32", a, b)


@pytest.mark.parametrize("sd", [1, 1000])
@pytest.mark.parametrize(
    "place", [np.s_[3], np.s_[:, 4], np.s_[:], np.s_[::2, ::2]], ids=["row", "term", "all", "some"]
)
def test_minus_infinity(place: tuple, sd: float) -> None:
    a, b = normal(40, 20, sd=sd), normal(20, 35, sd=sd, seed=1)
    a[place] = -INF
    da, _ = check_gradients(CpuDevice(), "float32", a, b)
    assert np.all(da[a == -INF] == 0)
    check_gradients(CpuDevice(), "float32", b.T, a.T)
    b[::3, ::2] = -INF
    check_gradients(CpuDevice(), "float32", a, b)


@pytest.mark.parametrize("sd", [1, 100])
@pytest.mark.parametrize("value", [INF, NAN])
def test_special_values(value: float, sd: float) -> None:
    a, b = normal(40, 20, sd=sd), normal(20, 35, sd=sd, seed=1)
    a[2, 3] = value
    check_gradients(CpuDevice(), "float32", a, b)
    b[4, 1], b[3, 7] = -INF, -INF
    check_gradients(CpuDevice(), "float32", a, b)
    b[5, 6] = value
    check_gradients(CpuDevice(), "float32", a, b)


def test_a_nan_that_does_not_spoil() -> None:
    a, b = normal(40, 20).astype("float32"), normal(20, 35, seed=1).astype("float32")
    a[2, 3] = NAN
    layout = fold(a.shape, b.shape)
    device = CpuDevice()
    ctx = context(device, "float32")
    out = log_product.logmatmulexp(ctx, layout, a, b, 1 << 20)
    g = np.ones_like(out)
    da, db = gradients.logmatmulexp_gradients(
        ctx, layout, a, b, out, g, 1 << 20, propagates_nan=False
    )
    assert da is not None
    assert db is not None
    assert np.all(da[2] == 0)
    np.testing.assert_allclose(db.sum(axis=0), len(a) - 1, rtol=1e-5)


def test_large_and_infinite_cotangents() -> None:
    a, b = normal(35, 12, sd=20), normal(12, 17, sd=20, seed=1)
    check_gradients(CpuDevice(), "float32", a, b, 1e36 * normal(35, 17))
    check_gradients(CpuDevice(), "float32", a, b, 1e-36 * normal(35, 17))


def test_views() -> None:
    a = normal(80, 60, sd=20).astype("float32")[::2, ::3]
    b = normal(20, 45, sd=20, seed=1).astype("float32")
    g = normal(45, 40, seed=2).astype("float32").T
    for left in (a, np.asfortranarray(a), a[::-1, ::-1]):
        for right in (b, np.asfortranarray(b)):
            check_gradients(CpuDevice(seed=2), "float32", left, right, g)
    check_gradients(CpuDevice(), "float32", a, b, np.broadcast_to(g[:1, :1], g.shape))


@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [
        ((70,), (70,)),
        ((70,), (70, 40)),
        ((40, 70), (70,)),
        ((3, 35, 7), (3, 7, 6)),
        ((4, 1, 9, 10), (5, 10, 11)),
        ((3, 1, 2, 20, 10), (1, 2, 2, 10, 21)),
        ((3, 40, 20), (20, 50)),
        ((40, 20), (3, 20, 50)),
    ],
)
def test_batch_axes(a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> None:
    a, b = normal(*a_shape, sd=20), normal(*b_shape, sd=20, seed=1)
    check_gradients(CpuDevice(seed=1), "float32", a, b)


@pytest.mark.parametrize("shape", [(300, 40, 270), (40, 900, 50)])
@pytest.mark.parametrize("sd", [pytest.param(1, marks=pytest.mark.exhaustive), 30])
def test_workspace_is_kept(shape: tuple[int, int, int], sd: float) -> None:
    rows, terms, columns = shape
    device = Allocations()
    a, b = normal(rows, terms, sd=sd), normal(terms, columns, sd=sd, seed=1)
    found = check_gradients(device, "float32", a, b, workspace=60_000)
    assert device.allocated - sum(x.nbytes for x in found) <= 60_000
    assert kernels(device).count("posterior_weights") > 1


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_one_gradient_alone(wanted: tuple[bool, bool]) -> None:
    a, b = (normal(40, 40, seed=s).astype("float32") for s in (0, 1))
    layout, device = fold(a.shape, b.shape), CpuDevice()
    ctx = context(device, "float32")
    out = log_product.logmatmulexp(ctx, layout, a, b, 1 << 20)
    arguments = (ctx, layout, a, b, out, np.ones_like(out), 1 << 20)
    found = gradients.logmatmulexp_gradients(*arguments, wanted)
    both = gradients.logmatmulexp_gradients(*arguments)
    for x, y, want in zip(found, both, wanted, strict=True):
        if want:
            np.testing.assert_array_equal(x, y)
        else:
            assert x is None


@pytest.mark.parametrize("value", [-0.123, -0.321, -0.7])
def test_many_equal_terms(value):
    """Added to one sum, they are rounded to the same side again and again."""
    M, K, N = 5, 40, 3000
    a, b = np.full((M, K), value), np.full((K, N), value)
    a[:, 0] = b[0] = 0  # so that the others are no ones beside it
    for left, right in ((a, b), (b.T, a.T)):
        device = CpuDevice(seed=1, flush_to_zero=True)
        g = np.full((len(left), right.shape[1]), 0.7)
        check_gradients(device, "float32", left, right, g, workspace=1 << 26)


def test_many_equal_terms_that_are_left_open():
    a, b = normal(1, 6, seed=3), np.repeat(normal(6, 1, seed=12), 20_000, axis=1)
    a[:, 0], b[1] = 200, 200  # maxima that do not meet
    a[:, 1] = b[0] = -np.inf
    g = np.full((1, 20_000), 0.7)
    check_gradients(CpuDevice(seed=1, flush_to_zero=True), "float32", a, b, g, workspace=1 << 26)
