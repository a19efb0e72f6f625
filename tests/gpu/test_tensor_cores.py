"""Products over tensor cores, on a device that has them: what the CPU emulates at its worst."""

import numpy as np
import pytest

import arraylogchain as alc
from tests import error_model, reference
from tests.checks import check_logmatmulexp
from tests.error_model import assert_within
from tests.gpu.tensor_cores import EVERY, tensor_cores
from tests.gpu.test_kernels_against_float64 import normal, pair, patterns


@pytest.fixture(autouse=True)
def _over_tensor_cores(cupy):
    architecture = int(cupy.cuda.Device().compute_capability)
    if architecture not in EVERY:
        pytest.skip(f"compute capability {architecture / 10} has no tensor cores that would do")
    with tensor_cores():
        yield


SIZES = [(33, 31, 64), (64, 64, 64), (65, 63, 127), (128, 8, 128), (129, 130, 257), (90, 1, 40)]
sizes = pytest.mark.parametrize("size", SIZES, ids=["x".join(map(str, s)) for s in SIZES])


@sizes
@patterns
def test_logmatmulexp(backend, dtype, size, pattern):
    check_logmatmulexp(backend, dtype, *pair(size, pattern))


@sizes
@pytest.mark.parametrize("pattern", ["moderate", "wide", "closed"])
def test_half_precisions(backend, half, size, pattern):
    check_logmatmulexp(backend, half, *pair(size, pattern))


@pytest.mark.parametrize("workspace", [1 << 20, None])
@pytest.mark.parametrize("batches", [((5,), (5,)), ((4, 1), (3,)), ((), (6,)), ((2, 1, 3), (4, 1))])
def test_broadcast_batches(backend, dtype, batches, workspace):
    a = normal(*batches[0], 70, 90, sd=30)
    b = normal(*batches[1], 90, 66, sd=30, seed=1)
    check_logmatmulexp(backend, dtype, a, b, workspace=workspace)


def check_large(backend, dtype, sd):
    """More of the largest tiles than any device has multiprocessors, with ragged edges."""
    a, b = (backend.asarray(normal(1700, 300, sd=sd, seed=seed), dtype) for seed in (0, 1))
    out = backend.read(alc.logmatmulexp(a, b.T), dtype)
    a, b = (backend.read(x, dtype).astype(float) for x in (a, b))
    expected = alc.logmatmulexp(a, b.T)
    # In float64 NumPy errs as well, by as much.
    both = 2 if dtype == "float64" else 1
    assert_within(out, expected, both * error_model.product_bound(a, b.T, expected, dtype))


@pytest.mark.parametrize("sd", [1, 25])
def test_the_largest_tiles(backend, dtype, sd):
    check_large(backend, dtype, sd)


@pytest.mark.parametrize("sd", [1, 25])
def test_the_largest_tiles_of_half_precisions(backend, half, sd):
    check_large(backend, half, sd)


def test_what_is_cut_off_does_not_add_up(backend):
    a, b = np.full((33, 4096), -0.123), np.full((4096, 33), -0.321)
    a[:, 0] = b[0] = 0
    check_logmatmulexp(backend, "float32", a, b)


def test_devices_are_no_worse_than_is_assumed(backend):
    """Terms that may be cut off beside the largest: docs/numerics.md says how many that are."""
    a, b = np.full((33, 16), np.log(0.99 * error_model.EPS["float32"])), np.zeros((16, 33))
    a[:, 3] = 0
    a, b = a.astype("float32"), b.astype("float32")
    exact = reference.logmatmulexp(a, b)
    out = backend.read(alc.logmatmulexp(*(backend.asarray(x) for x in (a, b))), "float32")
    worst = error_model.roundings_of_tensor_cores(16)
    assert_within(out, exact, error_model.product_bound(a, b, exact, "float32", worst))
