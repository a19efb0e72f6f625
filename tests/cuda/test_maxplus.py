"""maxplus_matmul on CUDA: exact values, and the smallest of the indices that reach them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cuda.cpu_device import CpuDevice
from tests.cuda.product_checks import (
    INF,
    NAN,
    Allocations,
    check_maxplus,
    check_maxplus_gradients,
    kernels,
    normal,
)

pytestmark = pytest.mark.usefixtures("compiler")


@pytest.mark.sanitized
def test_any_order_of_threads(device: CpuDevice) -> None:
    check_maxplus(device, "float32", normal(70, 37), normal(37, 90, seed=1))
    assert kernels(device) == ["factors", "maxplus"]


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (5, 1, 64), (65, 33, 63), (129, 17, 257), (300, 9, 5), (20, 40, 150)]
)
def test_ragged_edges(shape: tuple[int, int, int]) -> None:
    rows, terms, columns = shape
    check_maxplus(CpuDevice(seed=3), "float32", normal(rows, terms), normal(terms, columns, seed=1))


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["float64", "float16"])
def test_other_precisions(precision: str) -> None:
    check_maxplus(CpuDevice(), precision, normal(40, 21), normal(21, 35, seed=1))


@pytest.mark.parametrize("workspace", [1 << 22, 60_000])
def test_ties_go_to_the_smallest_index(workspace: int) -> None:
    rng = np.random.default_rng(1)
    a, b = rng.integers(0, 3, (40, 600)).astype(float), rng.integers(0, 3, (600, 70)).astype(float)
    a[:, :300] = -5.0
    _, indices = check_maxplus(CpuDevice(), "float32", a, b, workspace=workspace)
    assert indices.min() >= 300


def test_halves_tie_as_they_are_computed() -> None:
    """Sums that differ in float32 and round to the same half, in different parts of the terms."""
    a, b = np.zeros((40, 900)), np.zeros((900, 50))
    a[:, 0], a[:, 800] = 1024, 1024
    b[800] = 2.0**-4
    _, indices = check_maxplus(CpuDevice(), "float16", a, b, workspace=60_000)
    assert np.all(indices == 800)


def test_minus_infinity_everywhere_is_a_tie() -> None:
    values, indices = check_maxplus(
        CpuDevice(), "float32", np.full((34, 20), -INF), np.zeros((20, 3))
    )
    assert np.all(values == -INF)
    assert np.all(indices == 0)


@pytest.mark.parametrize("workspace", [1 << 22, 60_000])
def test_infinities_and_nan(workspace: int) -> None:
    rng = np.random.default_rng(2)
    a, b = normal(50, 700), normal(700, 66, seed=1)
    for x in (a, b):
        for value in (-INF, INF, NAN):
            x.ravel()[rng.integers(0, x.size, 12)] = value
    check_maxplus(CpuDevice(), "float32", a, b, workspace=workspace)
    values = [-INF, -1.0, 0.0, INF, NAN]
    a = np.stack(np.meshgrid(values, values, indexing="ij"), axis=-1).reshape(-1, 2)
    check_maxplus(CpuDevice(), "float32", a, a.T)


def test_overflow() -> None:
    a = np.clip(normal(34, 9) * 3e38, -3.3e38, 3.3e38)
    check_maxplus(CpuDevice(), "float32", a, a.T)


def test_views() -> None:
    a = normal(80, 60).astype("float32")[::2, ::3]
    b = normal(20, 45, seed=1).astype("float32")
    for left in (a, np.asfortranarray(a), a[::-1, ::-1], np.broadcast_to(a[:1], a.shape)):
        for right in (b, np.asfortranarray(b), b[::-1, ::-1]):
            check_maxplus(CpuDevice(seed=2), "float32", left, right)


@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [((7,), (7,)), ((7,), (7, 40)), ((3, 5, 7), (7, 6)), ((2, 3, 1, 5, 7), (3, 4, 7, 6))],
)
def test_batch_axes(a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> None:
    check_maxplus(CpuDevice(seed=1), "float32", normal(*a_shape), normal(*b_shape, seed=1))


@pytest.mark.parametrize("shape", [(300, 40, 270), (40, 900, 50)])
def test_workspace_is_kept(shape: tuple[int, int, int]) -> None:
    rows, terms, columns = shape
    device = Allocations()
    values, indices = check_maxplus(
        device, "float32", normal(rows, terms), normal(terms, columns, seed=1), workspace=60_000
    )
    assert device.allocated - values.nbytes - indices.nbytes <= 60_000
    assert kernels(device).count("maxplus") > 1


@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [((7,), (7,)), ((40, 7), (7,)), ((40, 30), (30, 50)), ((2, 3, 1, 5, 7), (3, 4, 7, 6))],
)
def test_gradients(a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> None:
    a, b = normal(*a_shape), normal(*b_shape, seed=1)
    check_maxplus_gradients(CpuDevice(seed=2), "float32", a, b)


def test_gradients_of_halves_and_turned_cotangents() -> None:
    check_maxplus_gradients(CpuDevice(), "float16", normal(40, 21), normal(21, 35, seed=1))
    g = normal(50, 40).astype("float32").T
    check_maxplus_gradients(CpuDevice(), "float32", normal(40, 7), normal(7, 50), g)


def test_there_is_no_gradient_through_infinities_and_nan() -> None:
    a, b = normal(40, 12), normal(12, 35, seed=1)
    a[2, 3], a[5], b[4, 1], b[5, 6] = INF, -INF, -INF, NAN
    check_maxplus_gradients(CpuDevice(), "float32", a, b)
