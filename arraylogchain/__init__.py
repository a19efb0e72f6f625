"""Long products of matrices in log space: exact, fast and within a memory bound."""

from arraylogchain.products import MaxPlusProduct, logmatmulexp, matmul, maxplus_matmul

__version__ = "0.1.0"
