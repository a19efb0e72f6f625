"""Inference in hidden Markov models and linear-chain CRFs, and products in log space."""

from arraylogchain import vjp
from arraylogchain._results import Plan
from arraylogchain._version import __version__
from arraylogchain.chain import ChainPath, ChainPosterior, FilteredChain, LogChain
from arraylogchain.einsum import logeinsumexp, maxplus_einsum
from arraylogchain.products import MaxPlusProduct, logchainexp, logmatmulexp, matmul, maxplus_matmul

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
