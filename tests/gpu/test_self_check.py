"""The check that kernels go through where they first run: passed by all of them, and in time."""

import time

import pytest

import arraylogchain as alc
from arraylogchain._arrays import enter
from arraylogchain._cuda import self_check
from tests.cuda.test_self_check import ALL, OPERATIONS, A, B


@pytest.mark.parametrize("operation", OPERATIONS)
def test_kernels_pass(backend, dtype, operation):
    ctx, _ = enter({"a": backend.asarray(A, dtype)})
    with ctx.computing():
        assert self_check.check(ctx, operation, ALL) is None  # compiles
        begin = time.perf_counter()
        assert self_check.check(ctx, operation, ALL) is None
    # By the case for each kernel; a call checks those alone that it launches.
    assert time.perf_counter() - begin < 1


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name in self_check._LOGS])
def test_half_precisions_pass(backend, half, operation):
    ctx, _ = enter({"a": backend.asarray(A, half)})
    with ctx.computing():
        assert self_check.check(ctx, operation, ALL) is None


def test_a_first_call_checks(backend, monkeypatch, tmp_path, recwarn):
    monkeypatch.setenv("ARRAYLOGCHAIN_SELF_CHECK", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    a, b = backend.asarray(A, "float32"), backend.asarray(B, "float32")
    ctx, _ = enter({"a": a})
    ctx.kernels.checked.clear()
    alc.logmatmulexp(a, b)
    assert list((tmp_path / "arraylogchain" / "passed").iterdir())
    assert not recwarn.list
