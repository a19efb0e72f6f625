"""The check that kernels go through where they first run: passed by all of them, and in time."""

import time

import pytest

import arraylogchain as alc
from arraylogchain._arrays import enter
from arraylogchain._cuda import self_check
from arraylogchain._cuda.tuning import FIRST_WITH_TENSOR_CORES
from tests.cuda.test_self_check import OPERATIONS, A, B


def skip_without_tensor_cores(ctx, kernels):
    if kernels == "cuda.tensor_cores" and ctx.kernels.architecture < FIRST_WITH_TENSOR_CORES:
        pytest.skip("the device has no tensor cores that would do")


@pytest.mark.parametrize(("operation", "kernels"), OPERATIONS)
def test_kernels_pass(backend, dtype, operation, kernels):
    ctx, _ = enter({"a": backend.asarray(A, dtype)})
    skip_without_tensor_cores(ctx, kernels)
    with ctx.computing():
        assert self_check.check(ctx, operation, None, kernels).problem is None  # compiles
        begin = time.perf_counter()
        assert self_check.check(ctx, operation, None, kernels).problem is None
    # By the case for each kernel; a call checks those alone that it launches.
    assert time.perf_counter() - begin < 1


@pytest.mark.parametrize(
    ("operation", "kernels"), [x for x in OPERATIONS if x.values[0] in self_check._LOGS]
)
def test_half_precisions_pass(backend, half, operation, kernels):
    ctx, _ = enter({"a": backend.asarray(A, half)})
    skip_without_tensor_cores(ctx, kernels)
    with ctx.computing():
        assert self_check.check(ctx, operation, None, kernels).problem is None


def test_a_first_call_checks(backend, monkeypatch, tmp_path, recwarn):
    monkeypatch.setenv("ARRAYLOGCHAIN_SELF_CHECK", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    a, b = backend.asarray(A, "float32"), backend.asarray(B, "float32")
    ctx, _ = enter({"a": a})
    ctx.kernels.checked.clear()
    alc.logmatmulexp(a, b)
    assert list((tmp_path / "arraylogchain" / "devices").iterdir())
    assert not recwarn.list
