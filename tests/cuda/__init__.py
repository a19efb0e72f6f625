"""Proof of the CUDA kernels on machines without a CUDA device.

Two things are checked. What kernels compute: `cpu_device.CpuDevice` runs the launches of the
package's own code with the kernels' own source, compiled for the CPU behind cuda_shim.h, which says
what it finds and what it cannot. That they compile for every architecture: `nvrtc` asks NVRTC with
CuPy's options, for all kernels in `INSTANTIATIONS`; none but some of double may have a stack. Where
ALC_OTHER_NVRTC names a folder with another NVRTC, that compiles them too.

A test of a kernel takes `device` from conftest.py and calls what the package calls::

    @pytest.mark.sanitized  # runs once more under AddressSanitizer
    def test_product(device):
        ctx = context(device, "float32")
        out = products.by_tiles(ctx, fold(a.shape, b.shape), a, b)

`device` comes with several orders of the threads; a test that only needs one makes
``CpuDevice(seed=...)`` itself. bfloat16 is that of ml_dtypes.

Where ALC_REQUIRE_BACKENDS has ``g++``, ``cupy`` or ``hatchling``, tests that need these
fail without them; elsewhere they are skipped.
"""
