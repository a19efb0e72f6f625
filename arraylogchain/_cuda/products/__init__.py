"""Matrix products by kernels, and their gradients: what `_dispatch` picks.

The modules say which kernels are launched, on what, in which order.
"""

from arraylogchain._cuda.products.gradients import logmatmulexp_gradients
from arraylogchain._cuda.products.log_product import logmatmulexp
from arraylogchain._cuda.products.maxplus import maxplus_gradients, maxplus_matmul

__all__ = ["logmatmulexp", "logmatmulexp_gradients", "maxplus_gradients", "maxplus_matmul"]
