"""logmatmulexp on CUDA: the kernels' own source and launches, run on the CPU.

Shapes choose the kernels: extents up to 32 take a warp for each product, up to 4 rows or columns
are thin, and everything else goes through tiles.
"""

from __future__ import annotations

import numpy as np
import pytest

from arraylogchain._cuda.launch import Launch
from arraylogchain._cuda.products import log_product
from arraylogchain._cuda.products.tiles import PRODUCT_TILES, choose_tile
from arraylogchain._fold import fold
from tests import error_model
from tests.cuda.cpu_device import CpuDevice
from tests.cuda.product_checks import (
    INF,
    NAN,
    Allocations,
    WithoutExact,
    check_logmatmulexp,
    context,
    half_flushed,
    kernels,
    normal,
)

pytestmark = pytest.mark.usefixtures("compiler")

# Rows, terms and columns, and the kernels that they are for.
TILED = ["maxima", "factors", "logmatmulexp", "exact"]
SHAPES = {
    "small": ((13, 16, 11), ["small"]),
    "thin": ((3, 70, 45), ["thin"]),
    "tiles": ((70, 37, 90), TILED),
}
PATHS = pytest.mark.parametrize("path", SHAPES)


@pytest.mark.parametrize("sd", [1, 10, 20, 30, 100, 1000])
@PATHS
def test_normal_entries(path: str, sd: float) -> None:
    (rows, terms, columns), expected = SHAPES[path]
    device = CpuDevice()
    a, b = normal(rows, terms, sd=sd), normal(terms, columns, sd=sd, seed=1)
    check_logmatmulexp(device, "float32", a, b)
    assert kernels(device) == expected
    # Few rows and few columns are the same to a kernel that may turn a product.
    check_logmatmulexp(device, "float32", b.T, a.T)


@pytest.mark.parametrize("sd", [1, 1000])
@pytest.mark.parametrize("shape", [(16, 12, 9), (2, 40, 33), (70, 37, 66)])
def test_float64(shape: tuple[int, int, int], sd: float) -> None:
    rows, terms, columns = shape
    check_logmatmulexp(
        CpuDevice(), "float64", normal(rows, terms, sd=sd), normal(terms, columns, sd=sd, seed=1)
    )


@pytest.mark.parametrize(
    ("precision", "shape"),
    [("float16", (16, 12, 9)), ("float16", (40, 70, 66)), ("bfloat16", (8, 7, 5))],
)
@pytest.mark.parametrize("sd", [1, 100])
def test_half_precisions(precision: str, shape: tuple[int, int, int], sd: float) -> None:
    rows, terms, columns = shape
    check_logmatmulexp(
        CpuDevice(), precision, normal(rows, terms, sd=sd), normal(terms, columns, sd=sd, seed=1)
    )


@pytest.mark.sanitized
@PATHS
def test_any_order_of_threads(device: CpuDevice, path: str) -> None:
    """Proved entries beside entries that are not, in every part of ragged tiles."""
    (rows, terms, columns), _ = SHAPES[path]
    a, b = normal(rows, terms), normal(terms, columns, seed=1)
    a[::4, 1:] -= 110
    b[:-1, ::3] -= 110
    check_logmatmulexp(device, "float32", a, b)
    # A shift that is not the maximum would overflow.
    check_logmatmulexp(device, "float32", normal(rows, terms, sd=300), normal(terms, columns))
    check_logmatmulexp(device, "float32", normal(rows, terms), normal(terms, columns, sd=300))


@pytest.mark.parametrize("sd", [20, 30, 300])
@PATHS
def test_where_subnormal_numbers_are_flushed(path: str, sd: float) -> None:
    """CuPy compiles for float32 so; the certificate stands on the smallest normal number."""
    (rows, terms, columns), _ = SHAPES[path]
    a, b = normal(rows, terms, sd=sd), normal(terms, columns, sd=sd, seed=1)
    check_logmatmulexp(CpuDevice(flush_to_zero=True), "float32", a, b)


def test_sums_that_have_lost_most_of_their_terms_are_not_proved() -> None:
    a, b = half_flushed()
    check_logmatmulexp(CpuDevice(flush_to_zero=True), "float32", a, b)
    check_logmatmulexp(CpuDevice(flush_to_zero=True), "float32", a[:20, :30], b[:30, :20])


@pytest.mark.parametrize(
    "shape",
    [(5, 1, 64), (64, 1, 5), (65, 33, 63), (129, 17, 257), (300, 9, 190), (20, 40, 150)],
)
def test_ragged_edges(shape: tuple[int, int, int]) -> None:
    rows, terms, columns = shape
    a, b = normal(rows, terms, sd=20), normal(terms, columns, sd=20, seed=1)
    check_logmatmulexp(CpuDevice(seed=3), "float32", a, b)
    # Entries that are all proved: what is written beyond an edge must not be left to the repair.
    check_logmatmulexp(WithoutExact(seed=3), "float32", a / 20, b / 20)


def test_every_tile_is_chosen() -> None:
    device = CpuDevice()
    for rows, columns in [(200, 260), (64, 64), (16, 130)]:
        check_logmatmulexp(device, "float32", normal(rows, 34), normal(34, columns, seed=1))
    chosen = [x.kernel for x in device.launches if x.kernel.startswith("logmatmulexp<")]
    assert chosen == [f"logmatmulexp<float, {tile}>" for tile in PRODUCT_TILES["float32"]]


def test_tiles_are_not_larger_than_what_they_cover() -> None:
    """Many products of 64 x 64 keep a device at work, but fill only a fourth of large tiles."""
    device = CpuDevice()
    tiles = PRODUCT_TILES["float32"]
    assert choose_tile(device, tiles, "float32", 1000, 64, 64) == tiles[1]
    assert choose_tile(device, tiles, "float32", 1, 4096, 64) == tiles[1]
    assert choose_tile(device, tiles, "float32", 1000, 128, 128) == tiles[0]
    assert choose_tile(device, tiles, "float32", 1, 4096, 4096) == tiles[0]
    assert choose_tile(device, tiles, "float32", 1, 128, 128) == tiles[1]
    device.shared_memory = 64 << 10  # as of compute capability 7.5: room for no large tile's totals
    assert choose_tile(device, tiles, "float32", 1, 4096, 4096) == tiles[1]


@pytest.mark.sanitized
def test_terms_are_shared_out_where_tiles_are_few(device: CpuDevice) -> None:
    """Proved entries beside others, +inf and NaN, in sums that several blocks have parts of."""
    a, b = normal(20, 2300, sd=3), normal(2300, 70, seed=1)
    a[::4, 1:] -= 110
    b[:-1, ::3] -= 110
    a[3], a[5, 7], b[9, 11] = -INF, NAN, INF
    check_logmatmulexp(device, "float32", a, b, workspace=1 << 24)
    joined = ["maxima", "maxima", "factors", "logmatmulexp", "settle", "exact"]
    assert kernels(device) == joined
    assert device.launches[3].grid == 8  # a tile in eight parts
    check_logmatmulexp(WithoutExact(), "float32", a[1:3], b[:, 1:3] / 9, workspace=1 << 24)


@pytest.mark.parametrize("shape", [(16, 4096, 4096), (60, 200_000, 50), (512, 4096, 512)])
def test_few_tiles_keep_a_device_busy(shape: tuple[int, int, int]) -> None:
    rows, terms, columns = shape
    device = Recorder()
    device.multiprocessors = 132
    a, b = (np.broadcast_to(np.zeros((), "float32"), x) for x in ((rows, terms), (terms, columns)))
    log_product.logmatmulexp(context(device, "float32"), fold(a.shape, b.shape), a, b, 1 << 28)
    blocks = {x.kernel.partition("<")[0]: x.grid for x in device.launches[::-1]}
    assert blocks["logmatmulexp"] >= 132
    assert blocks["maxima"] >= 132


@pytest.mark.parametrize("low", [-10, -60, -80, -110, -400, -1e4, -1e30])
def test_crossed_maxima(low: float) -> None:
    a, b = np.array([[0.0, low]]), np.array([[low], [0.0]])
    device = CpuDevice()
    for rows, columns in [(1, 1), (2, 40), (40, 40)]:
        out = check_logmatmulexp(
            device, "float32", np.repeat(a, rows, axis=0), np.repeat(b, columns, axis=1)
        )
        expected = np.float32(low) + np.log(2)
        assert out == pytest.approx(expected, rel=4 * error_model.EPS["float32"])


@PATHS
def test_minus_infinity_is_an_exact_zero(path: str) -> None:
    (rows, terms, columns), _ = SHAPES[path]
    device = CpuDevice()
    for sd in (1, 1000):
        a, b = normal(rows, terms, sd=sd), normal(terms, columns, sd=sd, seed=1)
        a[0], a[:, 4], a[::2, ::2] = -INF, -INF, -INF
        check_logmatmulexp(device, "float32", a, b)
        b[:, 0], b[1::2, 1::2] = -INF, -INF
        out = check_logmatmulexp(device, "float32", a, b)
        assert np.all(out[0] == -INF)
        assert np.all(out[:, 0] == -INF)


def test_true_zeros_beside_underflow() -> None:
    """Band matrices: sums without any term, in the same rows as sums that have to be repaired."""
    rows, columns = np.indices((60, 60))
    a = np.where((columns < rows - 6) | (columns > rows + 3), -INF, normal(60, 60, sd=3))
    a[:, 20:40] -= 90
    out = check_logmatmulexp(CpuDevice(), "float32", a, a.T)
    assert 0 < np.count_nonzero(out == -INF) < out.size


def test_lines_without_an_entry_are_not_repaired() -> None:
    """Rows of -inf, as padding makes them, are known from their maxima."""
    device = WithoutExact()
    a, b = normal(70, 40), normal(40, 66, seed=1)
    a[::2] = -INF
    b[:, ::3] = -INF
    check_logmatmulexp(device, "float32", a, b)


@pytest.mark.parametrize("others", [-INF, -1e4, 0.0, 200.0])
def test_every_pair_of_special_values(others: float) -> None:
    values = [-INF, -800.0, 0.0, 800.0, INF, NAN]
    left, right = (v.ravel() for v in np.meshgrid(values, values))
    a = np.stack([left, right, np.full(left.shape, others)], axis=-1)
    device = CpuDevice()
    check_logmatmulexp(device, "float32", a, a.T)  # 36 x 36: tiles
    check_logmatmulexp(device, "float32", a[:18], a[18:].T)
    for i in range(0, 36, 4):
        check_logmatmulexp(device, "float32", a[i : i + 4], a.T)
    assert {"logmatmulexp", "small", "thin"} <= set(kernels(device))


def test_special_values_among_many() -> None:
    rng = np.random.default_rng(4)
    a, b = normal(80, 60, sd=50), normal(60, 75, sd=50, seed=1)
    for x in (a, b):
        for value in (-INF, INF, NAN):
            x.ravel()[rng.integers(0, x.size, 5)] = value
    check_logmatmulexp(CpuDevice(), "float32", a, b)


@pytest.mark.parametrize("centre", [1e4, -1e4, 1e30])
@pytest.mark.parametrize("sign", [1, -1])
@PATHS
def test_large_entries(path: str, centre: float, sign: int) -> None:
    """Operands far from 0: where their sums cancel, nothing of the offset may be left."""
    (rows, terms, columns), _ = SHAPES[path]
    a, b = normal(rows, terms, sd=30), normal(terms, columns, sd=30, seed=1)
    check_logmatmulexp(CpuDevice(), "float32", a + centre, b + sign * centre)


@PATHS
def test_largest_finite_entries(path: str) -> None:
    top = 0.9 * float(np.finfo("float32").max)
    (rows, _, columns), _ = SHAPES[path]
    device = CpuDevice()
    for a, b in [([top, -top], [-top, top]), ([top, -INF], [-INF, top]), ([top, 0], [top, 0])]:
        check_logmatmulexp(device, "float32", np.tile(a, (rows, 1)), np.tile(b, (columns, 1)).T)


def test_errors_that_grow_with_the_distance_from_the_shift_are_corrected() -> None:
    """Neither the rounding of x - shift is left, nor that of its multiple by log2(e)."""
    a, b = np.full((40, 40), -INF), np.full((40, 40), -INF)
    a[:, 0] = 60  # a shift that has no part in any sum
    a[:, 1], b[1] = normal(40) + 0.7, normal(40, seed=1)
    a[:, 1], b[1] = a[:, 1].astype("float32"), b[1].astype("float32")
    device = WithoutExact()
    out = check_logmatmulexp(device, "float32", a, b)
    error = (out - (a[:, 1:2] + b[1])).astype(float)
    assert abs(np.mean(error)) < 1.5e-7
    assert np.max(np.abs(error)) < 1e-6


# --------------------------------------------------------------------------------------- layouts


@PATHS
def test_views(path: str) -> None:
    (rows, terms, columns), _ = SHAPES[path]
    device = CpuDevice(seed=2)
    a = normal(2 * rows, 2 * terms, sd=20).astype("float32")[::2, ::2]
    b = normal(terms, columns, sd=20, seed=1).astype("float32")
    for left in (a, np.asfortranarray(a), a[::-1], a[:, ::-1]):
        for right in (b, np.asfortranarray(b), b[::-1, ::-1]):
            check_logmatmulexp(device, "float32", left, right)
    row = np.broadcast_to(a[:1], a.shape)  # strides of 0
    check_logmatmulexp(device, "float32", row, np.broadcast_to(b[:, :1], b.shape))


@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [
        ((7,), (7,)),
        ((70,), (70, 40)),
        ((40, 70), (70,)),
        ((3, 5, 7), (3, 7, 6)),
        ((4, 1, 9, 10), (5, 10, 11)),
        ((3, 1, 2, 40, 10), (1, 2, 2, 10, 41)),
        ((2, 3, 1, 1, 36, 5), (3, 4, 2, 5, 6)),
        ((3, 40, 20), (20, 50)),
        ((40, 20), (3, 20, 50)),
        ((2, 3, 34, 20), (2, 3, 20, 37)),
    ],
)
def test_batch_axes(a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> None:
    device = CpuDevice(seed=1)
    check_logmatmulexp(device, "float32", normal(*a_shape, sd=20), normal(*b_shape, sd=20, seed=1))
    turned = normal(*a_shape[::-1], sd=20).T
    check_logmatmulexp(device, "float32", turned, normal(*b_shape[::-1], sd=20).T)


def test_many_small_products() -> None:
    device = CpuDevice(seed=2)
    for n in (1, 8, 16, 32):
        a, b = normal(5, n, n, sd=20), normal(5, n, n, sd=20, seed=1)
        a[3] = normal(n, n, sd=1000)
        check_logmatmulexp(device, "float32", a, b)
    assert set(kernels(device)) == {"small"}


# ------------------------------------------------------------------------------------- workspace


@pytest.mark.parametrize("shape", [(300, 40, 270), (40, 900, 50), (130, 300, 140), (10, 40, 3000)])
@pytest.mark.parametrize("sd", [pytest.param(1, marks=pytest.mark.exhaustive), 30])
def test_workspace_is_kept(shape: tuple[int, int, int], sd: float) -> None:
    """Panels of rows and columns, and where few of these fit, sums over some terms at a time."""
    rows, terms, columns = shape
    workspace = 60_000
    device = Allocations()
    a, b = normal(rows, terms, sd=sd), normal(terms, columns, sd=sd, seed=1)
    out = check_logmatmulexp(device, "float32", a, b, workspace=workspace)
    assert device.allocated - out.nbytes <= workspace
    assert kernels(device).count("logmatmulexp") > 1


def test_workspace_of_batches() -> None:
    device = Allocations()
    a, b = normal(7, 40, 20, sd=30), normal(7, 20, 50, sd=30, seed=1)
    out = check_logmatmulexp(device, "float32", a, b, workspace=30_000)
    assert device.allocated - out.nbytes <= 30_000
    assert 1 < kernels(device).count("maxima") < 7


def test_default_workspace_takes_one_panel() -> None:
    x = np.broadcast_to(np.zeros((), "float32"), (2048, 2048))
    device = Recorder()
    log_product.logmatmulexp(context(device, "float32"), fold(x.shape, x.shape), x, x, 64 << 20)
    assert kernels(device) == TILED


class Recorder(CpuDevice):
    """Records launches of sizes that a CPU would take long for."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype), shape)

    def run(self, launch: Launch) -> None:
        self.launches.append(launch)


@pytest.mark.parametrize("kind", ["factors", "exact"])
@pytest.mark.parametrize("shape", [(130, 1024, 130), (64, 1100, 64), (10, 1500, 130)])
def test_many_equal_terms(shape, kind):
    """Added to one sum, they are rounded to the same side again and again."""
    M, K, N = shape
    device = CpuDevice(seed=1, flush_to_zero=True)
    device.multiprocessors = 1
    a, b = np.full((M, K), -0.123, np.float32), np.full((K, N), -0.321, np.float32)
    a[:, 0] = b[0] = 0  # so that the others are no ones beside it
    if kind == "exact":
        a[:, 1], b[2] = 200, 200  # maxima that do not meet: no entry is proved
        a[:, 2] = b[1] = -np.inf
    check_logmatmulexp(device, "float32", a, b, workspace=1 << 24)
