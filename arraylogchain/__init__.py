"""Inference in hidden Markov models and linear-chain CRFs, and products in log space."""

from arraylogchain import vjp
from arraylogchain.chain import ChainPath, ChainPosterior, FilteredChain, LogChain
from arraylogchain.einsum import logeinsumexp, maxplus_einsum
from arraylogchain.plan import Plan
from arraylogchain.products import MaxPlusProduct, logchainexp, logmatmulexp, matmul, maxplus_matmul

__version__ = "0.1.0.dev0"

__all__ = [
    "ChainPath",
    "ChainPosterior",
    "FilteredChain",
    "LogChain",
    "MaxPlusProduct",
    "Plan",
    "__version__",
    "logchainexp",
    "logeinsumexp",
    "logmatmulexp",
    "matmul",
    "maxplus_einsum",
    "maxplus_matmul",
    "vjp",
]
