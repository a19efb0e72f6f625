"""Proof of the CUDA kernels on machines without a CUDA device.

Results of kernels: `cpu_device.CpuDevice` runs the package's own launches with the kernels' own
source, compiled for the CPU behind cuda_shim.h, whose first comment lists the faults that it finds.
Compilation for every architecture: `nvrtc` compiles all kernels in `INSTANTIATIONS` with CuPy's
options; only some in double precision may have a stack. If ALC_OTHER_NVRTC names a folder with
another NVRTC, that compiles them too. `count_launches` counts the launches of public operations.

A test of a kernel takes `device` from conftest.py and calls the package's launching functions::

    @pytest.mark.sanitized  # runs once more under AddressSanitizer
    def test_product(device):
        ctx = context(device, "float32")
        out = cuda.log_product(ctx, fold(a.shape, b.shape), a, b, by_blas=False)

`device` is parametrized by several orders of the threads; a test that needs only one makes
``CpuDevice(seed=...)`` itself. bfloat16 is that of ml_dtypes.

If ALC_REQUIRE_BACKENDS has ``g++``, ``cupy`` or ``hatchling``, tests that need these fail without
them; otherwise they are skipped.
"""
