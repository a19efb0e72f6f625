"""The check that kernels go through where they first run, and what the device measures there."""

import time

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain.__main__ import main
from arraylogchain._arrays import enter
from arraylogchain._cli import check
from arraylogchain._cuda import records, self_check
from arraylogchain._cuda.tuning import LARGE, has_tensor_cores
from tests.cuda.test_self_check import OPERATIONS, A, B


def skip_without_tensor_cores(ctx, kernels):
    if kernels == "cuda.tensor_cores" and not has_tensor_cores(ctx.kernels):
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


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_first_large_product_is_timed(backend, monkeypatch, tmp_path, dtype):
    """And remembered, unless there is one way only."""
    monkeypatch.delenv("ARRAYLOGCHAIN_AUTOTUNE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    a = backend.asarray(np.zeros((LARGE, LARGE)), dtype)
    ctx, _ = enter({"a": a})
    skip_without_tensor_cores(ctx, "cuda.tensor_cores")
    ctx.kernels.remembered.measured.clear()
    out = backend.to_numpy(alc.logmatmulexp(a, a))
    np.testing.assert_allclose(out, np.log(LARGE), rtol=1e-6)
    (fact,) = records.of_device(ctx.kernels.identity)
    assert all(0 < seconds < 1 for seconds in fact["seconds"].values())
    ctx.kernels.remembered.measured.clear()


def test_the_command_checks_and_times(capsys, monkeypatch):
    monkeypatch.setattr(check, "PRODUCTS", ((200, 200, 200),))
    monkeypatch.setattr(check, "CHAINS", ((5, 4, 3),))
    assert main(["--device", "cuda", "--check"]) == 0
    out = capsys.readouterr().out
    assert "does not run" not in out


def test_a_first_call_checks(backend, monkeypatch, tmp_path, recwarn):
    monkeypatch.setenv("ARRAYLOGCHAIN_SELF_CHECK", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    a, b = backend.asarray(A, "float32"), backend.asarray(B, "float32")
    ctx, _ = enter({"a": a})
    ctx.kernels.remembered.checked.clear()
    alc.logmatmulexp(a, b)
    assert list(records.of_device(ctx.kernels.identity))
    assert not recwarn.list
