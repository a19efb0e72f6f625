"""CUDA kernels, where array operations cannot serve; CuPy compiles and starts them.

`products` has the log-sum-exp matmul and the max-plus one, `chains` the recursion of chains; the
``.cu`` files beside them are the kernels. `device` knows where memory and streams come from,
`kernels` compiles, and `self_check` compares a kernel with NumPy before it is first used.
"""
