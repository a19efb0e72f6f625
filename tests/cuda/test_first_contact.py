"""A kernel's first use: it is loaded and checked once, and whatever goes wrong is no traceback."""

from __future__ import annotations

import ctypes
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain import _cli
from arraylogchain._cuda import self_check
from arraylogchain._cuda.kernels import FOLDER, INSTANTIATIONS, Kernel
from arraylogchain._inputs import arrays
from tests.chain_scenarios import normal, uniform
from tests.cuda.cpu_device import CpuDevice
from tests.test_state import everything, parts_of

HALVES = [
    Kernel("prepare_matrices.cu", "prepare_matrices<float, __nv_bfloat16>"),
    Kernel("logmatmulexp.cu", "logmatmulexp<__nv_bfloat16>"),
    Kernel("marginals.cu", "marginals<__nv_bfloat16>"),
]
KERNELS = [
    Kernel(s, n) for s, names in INSTANTIATIONS.items() for n in names if "bfloat16" not in n
]
STEPS = [kernel for kernel in KERNELS if kernel.name.startswith("chain_steps<float, true")]
pytestmark = pytest.mark.usefixtures("compiler")


@pytest.fixture(autouse=True)
def checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Let kernels be checked, with nothing known of them; return which are."""
    monkeypatch.delenv("ARRAYLOGCHAIN_SELF_CHECK")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    checked: list[str] = []
    largest_error = self_check.largest_error

    def counted(ctx: Any, kernel: Kernel, steps: Any = None) -> float:
        checked.append(kernel.name)
        return largest_error(ctx, kernel, steps)

    monkeypatch.setattr(self_check, "largest_error", counted)
    return checked


def product() -> np.ndarray:
    return alc.logmatmulexp(normal(9, 8).astype("f4"), normal(8, 7).astype("f4"))


def partition() -> np.ndarray:
    x, p = normal(9, 6, 4).astype("f4"), uniform(1, 4, 4).astype("f4")
    chain = alc.LogChain(x, transitions=p)
    return np.append(chain.log_partition(), chain.viterbi().log_weight)


def without_kernels(call: Any, use: Any) -> np.ndarray:
    use(None)
    return call()


def check(ctx: Any, kernel: Kernel) -> None:
    """Check a kernel; that an array operation took its place would not show in results."""
    with ctx.kernels:
        assert self_check.largest_error(ctx, kernel) <= 1
    assert kernel in {launch.kernel for launch in ctx.kernels.launches}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_every_kernel_passes_its_check(kernel):
    check(replace(arrays._numpy_context("float32"), kernels=CpuDevice(seed=3)), kernel)


@pytest.mark.parametrize("multiprocessors", [pytest.param(1, marks=pytest.mark.exhaustive), 132])
@pytest.mark.parametrize("kernel", STEPS, ids=lambda k: k.name)
def test_layouts_of_the_recursion_are_checked_on_any_device(multiprocessors, kernel):
    device = CpuDevice(seed=3)
    device.multiprocessors = multiprocessors
    check(replace(arrays._numpy_context("float32"), kernels=device), kernel)


BROKEN = {
    "logmatmulexp<float>": ("logmatmulexp.cu", "exponential(x - shift)", "exponential(x)"),
    "finish_gradients<float>": ("log_gradients.cu", "* factor + sums[i]", "* factor"),
    "prepare_matrices<float, float>": ("prepare_matrices.cu", "!is_log] = largest", "!is_log] = 0"),
    STEPS[1].name: (
        "chain_steps.cu",
        "!is_certified(predicted[r], chain.threshold) &&",
        "false &&",
    ),
    "log_partition<float>": ("log_partition.cu", "((last.shifts[row] +", "(("),
    "pair_marginals<float, float>": ("marginals.cu", "(high - scales[2 * at]) + high_x", "high_x"),
    "entropies<float>": ("entropies.cu", "logs[k * K + j]", "logs[j * K + k]"),
    "sample_paths<float>": ("sample_paths.cu", "lane & by", "!(lane & by)"),
    "chain_trace<float>": ("chain_trace.cu", "from[k] + to_state[k]", "to_state[k]"),
}


@pytest.mark.parametrize(
    "name", [x if "log" in x else pytest.param(x, marks=pytest.mark.exhaustive) for x in BROKEN]
)
def test_a_broken_kernel_fails_its_check(tmp_path, name):
    source, text, broken = BROKEN[name]
    before = (FOLDER / source).read_text()
    assert text in before
    (tmp_path / source).write_text(before.replace(text, broken))
    device = CpuDevice(seed=3, folder=tmp_path)
    ctx = replace(arrays._numpy_context("float32"), kernels=device)
    with device:
        assert self_check.largest_error(ctx, Kernel(source, name)) > 1


def test_checks_take_tensors_of_half_precision():
    """Some of their results are arrays of NumPy, in which float16 is the only such dtype."""
    torch = pytest.importorskip("torch")
    from tests.cuda.counting_torch import TensorDevice

    x = torch.zeros(1, dtype=torch.bfloat16)
    ctx = replace(arrays.prepare_inputs({"x": x})[0], kernels=TensorDevice(3))
    for kernel in HALVES:
        check(ctx, kernel)


@pytest.mark.parametrize("call", [product, partition])
def test_a_kernel_is_checked_once(use, checks, call):
    for device in (CpuDevice(3), CpuDevice(3)):
        use(device)
        call()
        call()
        assert len(checks) == len(set(checks)) == len(device.loaded) > 0
    other = CpuDevice(3)
    other.identity = "a CPU, NVRTC 12.9"
    use(other)
    before = len(checks)
    call()
    assert len(checks) == 2 * before


@pytest.mark.parametrize("call", [product, partition])
def test_a_check_takes_few_launches(use, call):
    device = use(CpuDevice(3))
    call()
    assert len(device.launches) <= 10 + 8 * len(device.loaded)


@pytest.mark.parametrize("when", ["load", "run"])
@pytest.mark.parametrize("call", [product, partition])
@pytest.mark.parametrize(
    "error", [RuntimeError("nvrtc: no such arch"), AssertionError(), OSError()]
)
def test_whatever_goes_wrong_array_operations_take_over(use, call, error, when):
    def fail(*_: object) -> None:
        raise error

    device = use(CpuDevice(3))
    setattr(device, when, fail)
    with pytest.warns(
        RuntimeWarning, match=rf"kernel \w+<.*> cannot be used on a CPU: {type(error).__name__}"
    ):
        result = call()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(call(), result)
    np.testing.assert_allclose(result, without_kernels(call, use), rtol=1e-5)


def every_method() -> np.ndarray:
    chain = alc.LogChain(normal(9, 6, 4).astype("f4"), transitions=uniform(5, 4, 4).astype("f4"))
    log_z, pullback = alc.vjp.log_partition(chain)
    results = parts_of([everything(chain), pullback(np.ones_like(log_z))])
    return np.concatenate([x.ravel() for x in results])


@pytest.mark.parametrize("source", [x for x in INSTANTIATIONS if "math" not in x])
def test_array_operations_replace_any_one_kernel(use, monkeypatch, source):
    """Whole operations by kernels read messages that are logs, as those of kernels are."""
    monkeypatch.setenv("ARRAYLOGCHAIN_SELF_CHECK", "0")
    device = use(CpuDevice(3))

    def load(kernel: Kernel) -> None:
        if kernel.source == source:
            raise RuntimeError("nvrtc: no such arch")

    monkeypatch.setattr(device, "load", load)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = every_method()
    np.testing.assert_allclose(result, without_kernels(every_method, use), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("call", [product, partition])
def test_wrong_results_are_found(use, call, monkeypatch):
    device = use(CpuDevice(3))
    run = device.run

    def spoilt(*launch: Any) -> None:
        run(*launch)
        kernel, _, _, arguments, *_ = launch
        for n, x in enumerate(arguments):
            if isinstance(x, np.ndarray):
                x.reshape(-1)[:2] += 1
            is_message = kernel.source == "chain_steps.cu" and n >= 2
            if is_message and (logs := int.from_bytes(x[:8], sys.byteorder)):
                first = (ctypes.c_float * 2).from_address(logs)
                first[:] = [y + 1 for y in first]

    monkeypatch.setattr(device, "run", spoilt)
    with pytest.warns(RuntimeWarning, match="results err by"):
        result = call()
    np.testing.assert_allclose(result, without_kernels(call, use), rtol=1e-5)


class OutOfMemoryError(RuntimeError):
    """As torch's."""


@pytest.mark.parametrize("error", [MemoryError(), OutOfMemoryError()])
def test_a_lack_of_memory_says_nothing_about_a_kernel(use, monkeypatch, error):
    device = use(CpuDevice(3))
    with monkeypatch.context() as patch:
        patch.setattr(device, "run", lambda *_: (_ for _ in ()).throw(error))
        with pytest.raises(type(error)):
            product()
    product()
    assert device.launches


def test_a_capture_before_the_first_call_is_one_clear_sentence(use):
    device = use(CpuDevice(3))
    device.captures = True
    with pytest.raises(RuntimeError, match=r"prepare_factors<float> has not been loaded; make"):
        product()
    device.captures = False
    product()
    device.captures = True
    product()


def test_threads_check_once(use, checks):
    use(CpuDevice(3))
    barrier = Barrier(4)

    def work(_: int) -> np.ndarray:
        barrier.wait()
        return product()

    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(work, range(4)))) == 4
    assert checks == ["prepare_factors<float>", "logmatmulexp<float>"]


def test_records_that_cannot_be_kept_are_no_error(use, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("in the way")
    use(CpuDevice(3))
    product()


def test_the_report_says_why_there_is_no_device():
    with pytest.raises(RuntimeError, match="CuPy"):
        _cli.report()
