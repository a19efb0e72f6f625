"""logmatmulexp over tensor cores, whose sums the CPU emulates at their worst.

They are held to the bound of all other products.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from arraylogchain._cuda.products import log_product
from arraylogchain._fold import fold
from tests import error_model
from tests.cuda.cpu_device import CpuDevice
from tests.cuda.product_checks import (
    INF,
    NAN,
    WORKSPACE,
    Allocations,
    WithoutExact,
    check_logmatmulexp,
    context,
    half_flushed,
    kernels,
    normal,
)

pytestmark = pytest.mark.usefixtures("compiler")

check = partial(check_logmatmulexp, tensor_cores=True)


def chosen(device: CpuDevice) -> list[str]:
    """Return the template arguments of the tiled products that have been launched, in order."""
    names = [launch.kernel for launch in device.launches]
    return [name[13:-1] for name in names if name.startswith("logmatmulexp<")]


@pytest.mark.parametrize("precision", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("sd", [1, 30, 300])
def test_normal_entries(precision: str, sd: float) -> None:
    device = CpuDevice()
    check(device, precision, normal(70, 37, sd=sd), normal(37, 90, sd=sd, seed=1))
    assert [name.rpartition(" ")[2] for name in chosen(device)] == ["true"]


@pytest.mark.sanitized
def test_any_order_of_threads(device: CpuDevice) -> None:
    """Proved entries beside entries that are not, in every part of ragged tiles."""
    a, b = normal(70, 37), normal(37, 90, seed=1)
    a[::4, 1:] -= 110
    b[:-1, ::3] -= 110
    check(device, "float32", a, b)


def test_any_order_of_threads_in_float64(device: CpuDevice) -> None:
    a, b = normal(70, 37), normal(37, 90, seed=1)
    a[::4, 1:] -= 900
    b[:-1, ::3] -= 900
    check(device, "float64", a, b)


@pytest.mark.parametrize(
    "shape", [(33, 1, 64), (64, 8, 33), (65, 33, 63), (129, 17, 257), (300, 9, 190)]
)
def test_ragged_edges(shape: tuple[int, int, int], dtype: str) -> None:
    rows, terms, columns = shape
    a, b = normal(rows, terms, sd=20), normal(terms, columns, sd=20, seed=1)
    check(CpuDevice(seed=3), dtype, a, b)
    # Entries that are all proved: what is written beyond an edge must not be left to the repair.
    check(WithoutExact(seed=3), dtype, a / 20, b / 20)


def test_every_tile_is_chosen(dtype: str) -> None:
    device = CpuDevice()
    for rows, columns in [(200, 260), (64, 64), (16, 130)]:
        check(device, dtype, normal(rows, 34), normal(34, columns, seed=1))
    c_type = {"float32": "float", "float64": "double"}[dtype]
    tiles = log_product.TENSOR_TILES[dtype]
    assert chosen(device) == [f"{c_type}, {tile}" for tile in tiles]
    assert [tile.tensor_cores for tile in tiles] == [True, True, False]


@pytest.mark.parametrize("low", [-10, -60, -80, -110, -400, -1e4, -1e30])
def test_crossed_maxima(low: float) -> None:
    a, b = np.array([[0.0, low]] * 40), np.array([[low] * 40, [0.0] * 40])
    device = CpuDevice()
    out = check(device, "float32", a, b)
    expected = np.float32(low) + np.log(2)
    assert out == pytest.approx(expected, rel=4 * error_model.EPS["float32"])
    assert kernels(device)[-1] == "exact"


def test_lines_without_an_entry_are_not_repaired() -> None:
    a, b = normal(70, 40), normal(40, 66, seed=1)
    a[::2], b[:, ::3], a[1::2, ::2] = -INF, -INF, -INF
    out = check(WithoutExact(), "float32", a, b)
    assert np.all(out[::2] == -INF)
    assert np.all(out[:, ::3] == -INF)


@pytest.mark.parametrize("others", [-INF, -1e4, 0.0, 200.0])
def test_every_pair_of_special_values(others: float) -> None:
    values = [-INF, -800.0, 0.0, 800.0, INF, NAN]
    left, right = (v.ravel() for v in np.meshgrid(values, values))
    a = np.stack([left, right, np.full(left.shape, others)], axis=-1)
    device = CpuDevice()
    check(device, "float32", a, a.T)
    assert "logmatmulexp" in kernels(device)


@pytest.mark.parametrize("sd", [20, 30, 300])
def test_where_subnormal_numbers_are_flushed(sd: float) -> None:
    device = CpuDevice(flush_to_zero=True)
    check(device, "float32", normal(70, 37, sd=sd), normal(37, 90, sd=sd, seed=1))


def test_sums_that_have_lost_most_of_their_terms_are_not_proved() -> None:
    check(CpuDevice(flush_to_zero=True), "float32", *half_flushed())


@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [
        ((3, 1, 2, 40, 10), (1, 2, 2, 10, 41)),
        ((3, 40, 20), (20, 50)),
        ((40, 20), (3, 20, 50)),
        ((2, 3, 34, 20), (2, 3, 20, 37)),
    ],
)
def test_batch_axes(a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> None:
    device = CpuDevice(seed=1)
    check(device, "float32", normal(*a_shape, sd=20), normal(*b_shape, sd=20, seed=1))
    turned = normal(*a_shape[::-1], sd=20).T
    check(device, "float32", turned, normal(*b_shape[::-1], sd=20).T)
    assert set(kernels(device)) == {"maxima", "factors", "logmatmulexp", "exact"}


def test_workspace_is_kept(dtype: str) -> None:
    """Sums over some of the terms at a time."""
    device = Allocations()
    a, b = normal(40, 900, sd=30), normal(900, 50, sd=30, seed=1)
    out = check(device, dtype, a, b, workspace=60_000)
    assert device.allocated - out.nbytes <= 60_000
    assert len(chosen(device)) > 1


@pytest.mark.parametrize("precision", ["float32", "float64", "float16"])
@pytest.mark.parametrize("sd", [1, 30])
def test_both_paths_agree(precision: str, sd: float) -> None:
    """Within what one of them may err by."""
    a, b = (normal(70, 90, sd=sd, seed=seed) for seed in (0, 1))
    a, b = a.astype(precision), b.T.astype(precision)
    product_of = partial(
        log_product.multiply,
        context(CpuDevice(), precision),
        fold(a.shape, b.shape),
        a,
        b,
        WORKSPACE,
    )
    by_fma = product_of(tensor_cores=False)
    bound = error_model.product_bound(a, b, by_fma, precision)
    error_model.assert_within(product_of(tensor_cores=True), by_fma, bound)


def test_what_is_cut_off_does_not_add_up() -> None:
    """4096 equal terms: sums that were cut off each time would lack thousands of eps."""
    a, b = np.full((33, 4096), -0.123), np.full((4096, 33), -0.321)
    a[:, 0] = b[0] = 0
    check(WithoutExact(), "float32", a, b)


def test_the_worst_case() -> None:
    """One term, and others that are cut off beside it though they are nearly an eps of it each."""
    a, b = np.full((33, 16), np.log(0.99 * error_model.EPS["float32"])), np.zeros((16, 33))
    a[:, 3] = 0
    worst = error_model.roundings_of_tensor_cores(16)
    out = check(WithoutExact(), "float32", a, b, count=worst)
    lost = 15 * 0.99
    assert np.all(out == 0)
    assert error_model.roundings(16) < lost < worst


@pytest.mark.parametrize("behind", [-4, 2**12 - 4, 2**12 + 4])
def test_numbers_of_24_bits_are_split_without_loss(behind: int) -> None:
    """What lies behind the first 11 bits of factors is as large as can be beside them."""
    factors = 0.5 + 2.0**-11 * np.arange(1, 41) + behind * 2.0**-24
    a, b = (np.stack([x, np.log(factors) + np.log(2)]) for x in ([np.log(2)] * 40, [-40.0] * 40))
    check(WithoutExact(), "float32", a.T, b)


def test_small_products_are_added_before_large_ones() -> None:
    """What is cut off of them beside the large ones adds up, as here they are all positive."""
    rng = np.random.default_rng(0)
    first_bits, behind = (rng.integers(*limits, (2, 14, 40)) for limits in ((0, 200), (100, 4000)))
    factors = np.log(0.5 + 2.0**-11 * first_bits + 2.0**-24 * behind)
    a, b = (np.concatenate([[[x] * 40, [-40.0 - x] * 40], factors[i]])
            for i, x in enumerate([0.0, -40.0]))  # fmt: skip
    check(WithoutExact(), "float32", a.T, b)
