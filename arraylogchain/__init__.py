"""Long products of matrices in log space: exact, fast and within a memory bound."""

from arraylogchain import vjp
from arraylogchain.chain import ChainPath, ChainPosterior, FilteredChain, LogChain
from arraylogchain.einsum import EinsumPlan, logeinsumexp, maxplus_einsum, plan_einsum
from arraylogchain.padding import PaddedStates, pad_states
from arraylogchain.plan import Plan
from arraylogchain.products import (
    MaxPlusProduct,
    logchainexp,
    logmatmulexp,
    matmul,
    maxplus_matmul,
)

__version__ = "0.1.0"

__all__ = [
    "ChainPath",
    "ChainPosterior",
    "EinsumPlan",
    "FilteredChain",
    "LogChain",
    "MaxPlusProduct",
    "PaddedStates",
    "Plan",
    "__version__",
    "logchainexp",
    "logeinsumexp",
    "logmatmulexp",
    "matmul",
    "maxplus_einsum",
    "maxplus_matmul",
    "pad_states",
    "plan_einsum",
    "vjp",
]
