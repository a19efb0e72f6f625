"""Kernels for CUDA devices, compiled by NVRTC through CuPy when they are first used.

The ``.cu`` and ``.cuh`` files are the kernels. Beside them, the geometry and the order of launches
are worked out from shapes and strides alone, as plain data: a test runs the same launches with the
same source on a CPU. Only `device` talks to CuPy and torch.
"""
