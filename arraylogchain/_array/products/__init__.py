"""Matrix products and their derivatives on arrays, in tiles that fit a workspace.

The functions here are what `_dispatch` picks; all take the context and the fold of both operands.

`tiling` chooses the tiles, and `tiled` walks over them. `contraction` multiplies over groups of
axes where the operands lie. `certified` computes tiles of the log product, with `exact` for what it
cannot prove; `operand` has what it shares with `gradients`, which are sums over posterior weights,
in factors (`posterior`) or entry by entry (`exact_posterior`). `derivatives` makes tangents and
second derivatives of both. `pair_tree` multiplies many matrices.
"""

from arraylogchain._array.products.certified import logmatmulexp
from arraylogchain._array.products.contraction import matmul, matmul_gradients
from arraylogchain._array.products.derivatives import logmatmulexp_second, logmatmulexp_tangent
from arraylogchain._array.products.exact import logsumexp_where
from arraylogchain._array.products.gradients import logmatmulexp_gradients
from arraylogchain._array.products.maxplus import (
    maxplus_gradients,
    maxplus_matmul,
    maxplus_tangent,
)

__all__ = [
    "logmatmulexp",
    "logmatmulexp_gradients",
    "logmatmulexp_second",
    "logmatmulexp_tangent",
    "logsumexp_where",
    "matmul",
    "matmul_gradients",
    "maxplus_gradients",
    "maxplus_matmul",
    "maxplus_tangent",
]
