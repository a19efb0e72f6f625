"""CUDA kernels, where array operations cannot serve; CuPy compiles and starts them.

The ``.cu`` files here are the kernels; `_products.cuda` and `_backends.cuda` launch them. `device`
knows where memory and streams come from, `kernels` compiles, and `self_check` compares a kernel
with NumPy before it is first used.
"""
