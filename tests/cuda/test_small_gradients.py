"""Gradients of many small log products on CUDA: one launch, the bounds of those in tiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from arraylogchain._cuda.launch import Launch
from arraylogchain._cuda.products import gradients, log_product, small
from arraylogchain._fold import fold
from tests.cuda.cpu_device import CpuDevice, bfloat16
from tests.cuda.product_checks import (
    INF,
    NAN,
    WORKSPACE,
    check_gradients,
    context,
    half_flushed,
    kernels,
    normal,
)
from tests.gradient_checks import COTANGENTS

pytestmark = pytest.mark.usefixtures("compiler")

# Rows, terms and columns: one for each instantiation, and with edges that are no whole vectors.
SHAPES = [(8, 8, 8), (16, 16, 16), (32, 32, 32), (7, 5, 3), (11, 13, 9), (21, 30, 17)]
Pair = tuple[Any, Any]


def pair(shape: tuple[int, int, int], sd: float = 1.0, batch: tuple[int, ...] = ()) -> Pair:
    rows, terms, columns = shape
    return normal(*batch, rows, terms, sd=sd), normal(*batch, terms, columns, sd=sd, seed=1)


def run(
    device: CpuDevice, dtype: str, a: Any, b: Any, g: Any, **options: Any
) -> tuple[np.ndarray | None, ...]:
    """Return gradients as the device has them."""
    convert = bfloat16 if dtype == "bfloat16" else lambda x: np.asarray(x, dtype)
    a, b, g = convert(a), convert(b), convert(g)
    layout = fold(a.shape, b.shape)
    out = log_product.logmatmulexp(context(CpuDevice(), dtype), layout, a, b, WORKSPACE)
    ctx = context(device, dtype)
    return gradients.logmatmulexp_gradients(ctx, layout, a, b, out, g, WORKSPACE, **options)


def assert_kinds_as_in_tiles(
    dtype: str, a: Any, b: Any, g: Any, *, propagates_nan: bool = True
) -> Pair:
    """Compare where NaN and infinities are with what more rows, without cotangents, lead to."""
    device = CpuDevice(seed=2)
    found = run(device, dtype, a, b, g, propagates_nan=propagates_nan)
    more = 33 - len(a)
    taller = [np.concatenate([x, np.zeros((more, x.shape[1]))]) for x in (a, g)]
    tiles = CpuDevice()
    da, db = run(tiles, dtype, taller[0], b, taller[1], propagates_nan=propagates_nan)
    assert kernels(device) == ["small_gradients"]
    assert "posterior_weights" in kernels(tiles)
    assert da is not None
    for x, expected in zip(found, (da[: len(a)], db), strict=True):
        np.testing.assert_array_equal(np.isnan(x), np.isnan(expected))
        np.testing.assert_array_equal(np.isinf(x), np.isinf(expected))
    return found[0], found[1]


@pytest.mark.parametrize("kind", COTANGENTS)
@pytest.mark.parametrize("sd", [1, 10, 20, 30, 100, 1000])
def test_normal_entries(sd: float, kind: str) -> None:
    for shape in SHAPES:
        check_gradients(CpuDevice(), "float32", *pair(shape, sd), kind)


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["float64", "float16", "bfloat16"])
def test_other_precisions(precision: str) -> None:
    for shape in SHAPES:
        for sd in (1, 20, 1000):
            check_gradients(CpuDevice(seed=1), precision, *pair(shape, sd))


@pytest.mark.sanitized
def test_any_order_of_threads(device: CpuDevice) -> None:
    """Entries that are proved, open, zero and NaN beside each other; warps without a product."""
    for shape in SHAPES[-3:]:
        a, b = pair(shape, batch=(5,))
        a[:, ::4, 1:] -= 110
        b[:, :-1, ::3] -= 110
        a[1, 2], b[2, :, 1] = -INF, -INF
        a[3, 0, 0] = NAN
        a[4] *= 1000
        check_gradients(device, "float32", a, b)
    assert kernels(device) == 3 * ["small_gradients"]


@pytest.mark.sanitized
@pytest.mark.parametrize("sd", [1, 30])
def test_all_extents(sd: float) -> None:
    device = CpuDevice(seed=3)
    for n in range(1, 33):
        check_gradients(device, "float32", *pair((n, n * 7 % 32 + 1, n * 19 % 32 + 1), sd))
    check_gradients(device, "float32", *pair((1, 1, 1), sd))
    assert set(kernels(device)) == {"small_gradients"}


@pytest.mark.parametrize("sd", [20, 30, 300])
def test_where_subnormal_numbers_are_flushed(sd: float) -> None:
    for shape in SHAPES:
        check_gradients(CpuDevice(flush_to_zero=True), "float32", *pair(shape, sd))


def test_sums_that_have_lost_most_of_their_terms_are_not_proved() -> None:
    for size in (1, 1e-12):
        g = size * normal(32, 32)
        check_gradients(CpuDevice(flush_to_zero=True), "float32", *half_flushed(32), g)


@pytest.mark.parametrize("low", [-10, -80, -110, -400, -1e4, -1e30])
def test_crossed_maxima_share_their_gradient(low: float) -> None:
    da, db = check_gradients(CpuDevice(), "float32", [[0.0, low]], [[low], [0.0]], [[1.0]])
    assert da == pytest.approx(0.5, rel=1e-5)
    assert db == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("offset", "sd"), [(1e4, 3), (1e4, 1000), (1e6, 1000)])
def test_offsets(offset: float, sd: float, sign: int) -> None:
    for shape in SHAPES[3:]:
        a, b = pair(shape, sd)
        check_gradients(CpuDevice(), "float32", a + offset, b + sign * offset / 3)


@pytest.mark.parametrize("sd", [1, 1000])
@pytest.mark.parametrize(
    "place", [np.s_[3], np.s_[:, 4], np.s_[:], np.s_[::2, ::2]], ids=["row", "term", "all", "some"]
)
def test_minus_infinity(place: tuple, sd: float) -> None:
    for shape in SHAPES[3:]:
        a, b = pair(shape, sd)
        a[place] = -INF
        da, _ = check_gradients(CpuDevice(), "float32", a, b)
        assert np.all(da[a == -INF] == 0)
        check_gradients(CpuDevice(), "float32", b.T, a.T)
        b[::3, ::2] = -INF
        check_gradients(CpuDevice(), "float32", a, b)


def test_banded_matrices() -> None:
    band = np.where(np.abs(np.subtract.outer(np.arange(20), np.arange(20))) < 3, 0, -INF)
    a, b = pair((20, 20, 20), 30)
    check_gradients(CpuDevice(), "float32", a + band, b + band)
    check_gradients(CpuDevice(), "float32", np.triu(a) + band, b + band)


@pytest.mark.parametrize("sd", [1, 100])
@pytest.mark.parametrize("value", [INF, NAN])
def test_special_values(value: float, sd: float) -> None:
    for shape in SHAPES[4:]:
        a, b = pair(shape, sd)
        g = normal(shape[0], shape[2])
        a[2, 3] = value
        check_gradients(CpuDevice(), "float32", a, b)
        b[4, 1], b[3, 7] = -INF, -INF
        check_gradients(CpuDevice(), "float32", a, b)
        for propagates_nan in (True, False):
            assert_kinds_as_in_tiles("float32", a, b, g, propagates_nan=propagates_nan)
        b[5, 6] = value
        check_gradients(CpuDevice(), "float32", a, b)


def test_a_nan_that_does_not_spoil() -> None:
    a, b = pair((20, 12, 17))
    a[2, 3] = NAN
    ones = np.ones((20, 17))
    da, db = assert_kinds_as_in_tiles("float32", a, b, ones, propagates_nan=False)
    assert np.all(da[2] == 0)
    np.testing.assert_allclose(db.sum(axis=0), len(a) - 1, rtol=1e-5)
    da, db = assert_kinds_as_in_tiles("float32", a, b, ones)
    assert np.isnan(da[2]).all()
    assert np.isnan(db).all()


@pytest.mark.parametrize("value", [INF, NAN])
def test_cotangents_that_are_not_finite(value: float) -> None:
    """On entries that are proved, that are not, and that are -inf."""
    a, b = pair((11, 13, 9))
    a[4, 1:] -= 110
    b[:-1, 5] -= 110
    a[6] = -INF
    for place in ((2, 3), (4, 5), (6, 7)):
        g = normal(11, 9)
        g[place] = value
        da, db = assert_kinds_as_in_tiles("float32", a, b, g)
        is_shown = place[0] != 6
        assert np.isfinite(da).all() == np.isfinite(db).all() == (not is_shown)


def test_large_and_small_cotangents() -> None:
    for size in (1e36, 1e-36):
        for shape in SHAPES[3:]:
            g = size * normal(shape[0], shape[2])
            check_gradients(CpuDevice(), "float32", *pair(shape, 20), g)


@pytest.mark.parametrize("precision", ["float16", "float32"])
def test_products_that_overflow_have_no_gradient(precision: str) -> None:
    top = float(np.finfo(precision).max)
    a, b = np.zeros((9, 9)), np.zeros((9, 9))
    a[1], b[:, 2] = 0.6 * top, 0.6 * top
    g = np.ones((9, 9))
    g[1, 2] = 100
    da, db = assert_kinds_as_in_tiles(precision, a, b, g)
    assert float(da[1].sum()) == pytest.approx(8, rel=1e-2)
    assert float(db[:, 2].sum()) == pytest.approx(8, rel=1e-2)
    # Finite ones have theirs, however near the largest number.
    a[1], b[:, 2] = 0.49 * top, 0.49 * top
    check_gradients(CpuDevice(), precision, a, b, g)


@pytest.mark.sanitized
def test_views() -> None:
    device = CpuDevice(seed=2)
    a = normal(32, 48, sd=20).astype("float32")[::2, ::3]
    b = normal(16, 12, sd=20, seed=1).astype("float32")
    g = normal(12, 16, seed=2).astype("float32").T
    for left in (a, np.asfortranarray(a), np.ascontiguousarray(a), a[::-1, ::-1]):
        for right in (b, np.asfortranarray(b), b[::-1]):
            check_gradients(device, "float32", left, right, g)
            check_gradients(device, "float32", left, right, np.ascontiguousarray(g))
    check_gradients(device, "float32", a, b, np.broadcast_to(g[:1, :1], g.shape))
    check_gradients(device, "float32", np.broadcast_to(a[:1], a.shape), b, g)
    check_gradients(device, "float32", a, np.broadcast_to(b[:, :1], b.shape), g[:, ::-1])


@pytest.mark.parametrize("first", [0, 1, 2, 4])
@pytest.mark.parametrize("pitch", [16, 17, 18, 20])
def test_alignment(first: int, pitch: int) -> None:
    """Vectors are read only where memory is aligned, and extents are whole vectors."""
    device = CpuDevice()
    for dtype in ("float32", "float16", "float64"):
        a = normal(16, first + pitch).astype(dtype)[:, first : first + 16]
        b = normal(3 * 16 * pitch + first).astype(dtype)[first:].reshape(3, 16, pitch)[..., :16]
        g = normal(16, first + pitch).astype(dtype)[:, first : first + 16]
        check_gradients(device, dtype, a, b[1], g)
        check_gradients(device, dtype, a[:, :14], b[2, :14, :10], g[:, :10])


@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [
        ((7,), (7,)),
        ((7,), (7, 9)),
        ((9, 7), (7,)),
        ((5, 6, 7), (5, 7, 6)),
        ((4, 1, 3, 5), (6, 5, 4)),
        ((3, 1, 2, 4, 5), (1, 2, 2, 5, 6)),
        ((2, 3, 1, 1, 6, 5), (3, 2, 2, 5, 6)),
        ((3, 9, 20), (20, 10)),
        ((9, 20), (3, 20, 10)),
        ((2, 3, 13, 20), (2, 3, 20, 17)),
    ],
)
def test_batch_axes(a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> None:
    layout = fold(a_shape, b_shape)
    # What a batch axis is, both operands have: no gradient is a sum over it.
    assert all(layout.a_shape[axis] == layout.b_shape[axis] for axis in layout.batch_axes)
    device = CpuDevice(seed=1)
    check_gradients(device, "float32", normal(*a_shape, sd=20), normal(*b_shape, sd=20, seed=1))
    turned = [normal(*shape[::-1], sd=20).T for shape in (a_shape, b_shape)]
    g = normal(*layout.out_shape[::-1]).T
    check_gradients(device, "float32", *turned, g)
    assert kernels(device) == 2 * ["small_gradients"]


def test_an_operand_without_strides_along_the_batch() -> None:
    """Each of its entries that are one in memory has a gradient of its own."""
    a, b = pair((6, 7, 8), batch=(5,))
    a = np.broadcast_to(a[:1], a.shape)
    da, _ = check_gradients(CpuDevice(), "float32", a.astype("float32", copy=False), b)
    shared = np.broadcast_to(a[0].astype("float32"), a.shape)
    found, _ = check_gradients(CpuDevice(), "float32", shared, b)
    np.testing.assert_array_equal(found, da)


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_wanted_gradients_alone(wanted: tuple[bool, bool]) -> None:
    a, b = pair((16, 16, 16), 20)
    g = normal(16, 16)
    both = run(CpuDevice(), "float32", a, b, g)
    found = run(CpuDevice(), "float32", a, b, g, wanted=wanted)
    for x, y, want in zip(found, both, wanted, strict=True):
        if want:
            np.testing.assert_array_equal(x, y)
        else:
            assert x is None


class Recorder(CpuDevice):
    """Records launches of sizes that a CPU would take long for."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype), shape)

    def run(self, launch: Launch) -> None:
        self.launches.append(launch)


def test_several_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small, "MAX_GRID", 1)
    device = CpuDevice()
    check_gradients(device, "float32", *pair((7, 5, 3), batch=(9,)))
    assert kernels(device) == 3 * ["small_gradients"]


def test_batches_beyond_the_largest_grid() -> None:
    count = 5 * 2**32
    x = np.broadcast_to(np.zeros((), "float32"), (count, 1, 1))
    device = Recorder()
    ctx, layout = context(device, "float32"), fold(x.shape, x.shape)
    gradients.logmatmulexp_gradients(ctx, layout, x, x, x, x, WORKSPACE)
    following = 0
    for launch in device.launches:
        first, batches = launch.arguments[5:7]
        assert first == following
        assert launch.grid == -(-batches // 4) < 2**31
        following += batches
    assert following == count
