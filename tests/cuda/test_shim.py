"""The CPU as a device: it computes as CUDA does, and reports all faults of its list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arraylogchain._cuda.kernels import Kernel, Struct
from tests.cuda.conftest import SEED_PARAMS, SEEDS
from tests.cuda.cpu_device import CpuDevice, KernelError

KERNELS = Path(__file__).parent / "kernels"

pytestmark = pytest.mark.usefixtures("compiler")


def run(
    kernel: str,
    *arguments: Any,
    threads: int = 32,
    blocks: int = 1,
    shared: int = 0,
    source: str = "features.cu",
    seed: int = 0,
    **options: Any,
) -> None:
    device = CpuDevice(seed, folder=KERNELS, **options)
    device.run(Kernel(source, kernel), blocks, threads, arguments, shared)


def run_fault(kernel: str, *arguments: Any, **options: Any) -> None:
    run(kernel, *arguments, source="faults.cu", **{"options": ["-DNEIGHBOUR=1"], **options})


@pytest.mark.sanitized
@pytest.mark.parametrize("seed", SEED_PARAMS)
def test_blocks_work_together(seed, dtype):
    x = np.arange(1000, dtype=dtype)
    sums = np.zeros(8, dtype)
    kernel = f"block_sums<{'float' if dtype == 'float32' else 'double'}>"
    shared = 128 * x.itemsize
    run(kernel, x, sums, np.int32(1000), threads=128, blocks=8, shared=shared, seed=seed)
    assert sums.tolist() == [x[128 * b : 128 * (b + 1)].sum() for b in range(8)]


def test_strided_views_are_pointers_to_their_first_entry():
    memory = np.arange(100, dtype=np.float32)
    sums = np.zeros(3, np.float32)
    run("block_sums<float>", memory[90::-1], sums[2:], np.int32(10), shared=128)
    assert sums.tolist() == [0, 0, sum(range(90, 100))]


@pytest.mark.sanitized
@pytest.mark.parametrize("seed", SEED_PARAMS)
@pytest.mark.parametrize("lanes", [32, 20])
def test_lanes_hand_values_to_each_other(seed, lanes):
    out = np.full(32, -1, np.int32)
    run("neighbours", out, np.int32(lanes), seed=seed)
    assert out[:lanes].tolist() == [10 * (lane ^ 1) for lane in range(lanes)]
    assert (out[lanes:] == -1).all()


def round_trip(x, half):
    y = np.zeros(x.size, np.float32)
    kernel = f"round_trip<{'float' if x.dtype == np.float32 else 'double'}, {half}>"
    run(kernel, x, y, np.int32(x.size), threads=1024, blocks=-(-x.size // 1024))
    return y


def test_float16_rounds_as_numpy_does(dtype):
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(dtype)
    rng = np.random.default_rng(0)
    finite = every[np.isfinite(every)]
    ties = (finite[:-1] + finite[1:]) / 2
    neighbors = [np.nextafter(ties, s * np.inf, dtype=dtype) for s in (-1, 1)]
    random = (rng.standard_normal(10_000) * 10.0 ** rng.uniform(-9, 6, 10_000)).astype(dtype)
    x = np.concatenate([every, ties, *neighbors, random])
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16).astype(np.float32)
    y = round_trip(x, "__half")
    np.testing.assert_array_equal(y, expected)
    assert (np.signbit(y) == np.signbit(expected))[~np.isnan(y)].all()


def test_bfloat16_rounds_to_nearest_even():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    every = np.arange(1 << 16, dtype=np.uint32) << 16
    bits = np.random.default_rng(0).integers(0, 1 << 32, 10_000, dtype=np.uint32)
    x = np.concatenate([every, every | 0x8000, bits]).astype(np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        expected = x.astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(round_trip(x, "__nv_bfloat16"), expected)


def test_parameters_of_every_kind():
    pair = Struct((np.int32, "small"), (np.int64, "first second")).pack(7, 8, 9)
    out = np.zeros(6)
    arguments = (np.int8(-3), pair, np.float32(0.5), None, np.int64(1 << 40), out)
    run("parameters", *arguments, threads=1)
    assert out.tolist() == [-3, 7, 9, 0.5, 1, 1 << 40]


def test_arguments_of_another_size_are_refused():
    x = np.zeros(32, np.float32)
    with pytest.raises(KernelError, match=r"do not fit .* sizes: 8 8 4"):
        run("block_sums<float>", x, x, np.int64(32), shared=128)
    with pytest.raises(KernelError, match="use a NumPy scalar"):
        run("block_sums<float>", x, x, 32, shared=128)


@pytest.mark.parametrize("change", [{"threads": 1025}, {"blocks": 0}, {"shared": 1 << 20}])
def test_launches_that_cuda_refuses(change):
    with pytest.raises(KernelError, match=r"blocks|bytes"):
        run("halve", np.zeros(32, np.float32), np.zeros(32, np.float32), **change)


def test_blocks_are_held_to_their_launch_bounds():
    y = np.zeros(96, np.float32)
    run_fault("bounded<2>", y, None, threads=64)
    with pytest.raises(KernelError, match=r"blocks of 96 threads, and __launch_bounds__\(64\)"):
        run_fault("bounded<2>", y, None, threads=96)
    assert y.tolist() == [1] * 64 + [0] * 32


def test_static_shared_memory_counts():
    y = np.ones(32, np.float32)
    highest = CpuDevice.shared_memory - (40 << 10)
    run_fault("much_static_shared_memory", y, shared=highest)
    assert (y == 2).all()
    with pytest.raises(KernelError, match="40960 bytes of static and 191489 of dynamic"):
        run_fault("much_static_shared_memory", y, shared=highest + 1)


@pytest.mark.parametrize("flush", [False, True])
def test_subnormal_numbers_are_kept_or_flushed(flush):
    tiny = np.finfo(np.float32).tiny
    x = np.full(32, tiny, np.float32)
    y = np.ones(32, np.float32)
    run("halve", x, y, flush_to_zero=flush)
    assert (y == (0 if flush else tiny / 2)).all()
    # The thread that called computes as before.
    assert x[0] * np.float32(0.5) > 0


_THREADS, _NUMBERS = np.arange(64), np.arange(64, dtype=np.float32)
# Kernel, inputs, distance of the threads that exchange values, and expected output.
MISSING = [
    ("missing_barrier", (_NUMBERS,), 1, _THREADS ^ 1),
    ("missing_barrier", (_NUMBERS,), 32, _THREADS ^ 32),
    ("missing_second_barrier", (np.int32(3),), 1, 3 * (_THREADS ^ 1) + 3),
]


@pytest.mark.parametrize(("kernel", "inputs", "neighbour", "expected"), MISSING)
def test_every_order_of_threads_shows_a_missing_barrier(kernel, inputs, neighbour, expected):
    def is_right(seed, *options):
        y = np.zeros(64, np.float32)
        arguments = (*inputs, y) if kernel == "missing_barrier" else (y, *inputs)
        flags = [f"-DNEIGHBOUR={neighbour}", *options]
        run_fault(kernel, *arguments, threads=64, seed=seed, options=flags)
        return bool((y == expected).all())

    assert all(is_right(seed, "-DWITH_BARRIER") for seed in SEEDS)
    assert not any(is_right(seed) for seed in SEEDS)


FAULTS = {
    "barrier_in_a_branch": r"deadlock: thread 0 waits in __syncthreads at faults\.cu:\d+, .* 40 of",
    "two_barriers": r"__syncthreads at faults\.cu:\d+, while others .* __syncthreads at faults",
    "shuffle_without_a_lane": r"__shfl_xor_sync at faults\.cu:\d+: a lane .* returned, thread \d+",
    "lane_outside_its_mask": r"__shfl_xor_sync at faults\.cu:\d+: the mask does not name",
    "trapped": r"__trap at faults\.cu:\d+, thread 3, block 0",
}


@pytest.mark.parametrize("seed", SEED_PARAMS)
@pytest.mark.parametrize("kernel", list(FAULTS))
def test_faults_are_reported_with_their_lines(kernel, seed):
    with pytest.raises(KernelError, match=f"{kernel}: {FAULTS[kernel]}"):
        run_fault(kernel, threads=64, seed=seed)


def test_values_from_nowhere_are_nan():
    y = np.zeros(32, np.float32)
    run_fault("shuffle_from_a_lane_outside", y)
    assert np.isnan(y[:16]).tolist() == [False] * 12 + [True] * 4
    y = np.zeros((2, 4, 2), np.float32)
    run_fault("unwritten_shared_memory", y, blocks=2, threads=4, shared=16)
    assert (y[0] == 1).all()
    assert np.isnan(y[1]).all()


def test_seeds_run_blocks_in_both_orders():
    orders = []
    for seed in (0, 1):
        y = np.zeros(3, np.int32)
        count = np.zeros(1, np.int32)
        run_fault("depends_on_earlier_blocks", count, y, blocks=3, threads=1, seed=seed)
        orders.append(y.tolist())
    assert orders == [[0, 1, 2], [2, 1, 0]]
