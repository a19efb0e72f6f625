"""The check that kernels go through where they first run."""

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain import _cli
from arraylogchain._cuda import self_check
from arraylogchain._cuda.kernels import INSTANTIATIONS, Kernel
from arraylogchain._inputs.arrays import prepare_inputs

KERNELS = [Kernel(source, name) for source, names in INSTANTIATIONS.items() for name in names]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_kernel_is_right(backend, kernel):
    if "bfloat16" in kernel.name and backend.library == "cupy":
        pytest.skip("CuPy has no arrays of bfloat16")
    ctx, _ = prepare_inputs({"a": backend.asarray(np.zeros(1), "float32")})
    assert self_check.largest_error(ctx, kernel) <= 1


def test_the_report():
    assert _cli.report()


def test_a_first_call_checks_and_remembers(backend, monkeypatch, tmp_path, recwarn):
    monkeypatch.setenv("ARRAYLOGCHAIN_SELF_CHECK", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    a = backend.asarray(np.zeros((9, 9)), "float32")
    ctx, _ = prepare_inputs({"a": a})
    ctx.kernels.usable.clear()
    alc.logmatmulexp(a, a)
    assert len(list((tmp_path / "arraylogchain").iterdir())) == 2  # maxima, then tiles
    assert not recwarn.list
