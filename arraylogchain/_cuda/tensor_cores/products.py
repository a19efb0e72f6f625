"""Log products over tensor cores: `_cuda.products`, but for the kernel that multiplies."""

from __future__ import annotations

from arraylogchain._context import Array, Context
from arraylogchain._cuda.products.log_product import multiply
from arraylogchain._fold import Fold


def logmatmulexp(ctx: Context, layout: Fold, a: Array, b: Array, budget: int) -> Array:
    """Return log(exp(a) @ exp(b))."""
    return multiply(ctx, layout, a, b, budget, tensor_cores=True)
