"""Proof of the CUDA kernels on machines without a CUDA device.

Two things are checked. What kernels compute: `cpu_device.CpuDevice` runs the launches of the
package's own code with the kernels' own source, compiled for the CPU behind cuda_shim.h, which says
what it finds and what it cannot. That they compile for every architecture: `nvrtc` asks NVRTC with
CuPy's options, for all kernels that `instantiations` lists; those that are hot may have no stack.

A test of a kernel takes `device` from conftest.py and calls what the package calls::

    @pytest.mark.sanitized  # runs once more under AddressSanitizer
    def test_product(device):
        ctx = context(device, "float32")
        out = log_product.logmatmulexp(ctx, fold(a.shape, b.shape), a, b, 1 << 20)

`device` comes with several orders of the threads; a test that only needs one makes
``CpuDevice(seed=...)`` itself. bfloat16 arrays are uint16 arrays there: `bfloat16` and
`from_bfloat16` of cpu_device.py convert.

Where ALC_REQUIRE_BACKENDS has ``g++``, ``cupy`` or ``hatchling``, tests that need these
fail without them; elsewhere they are skipped.
"""
