"""Matrix products by kernels, and their gradients.

The functions here are what `_dispatch` picks, with the signatures that `_array.products` has. The
modules say which kernels are launched, on what, in which order.
"""

from __future__ import annotations

from arraylogchain._context import Array, Context
from arraylogchain._cuda.products import gradients, log_product, maxplus
from arraylogchain._fold import Fold, Shape

Pair = tuple[Array | None, Array | None]


def logmatmulexp(ctx: Context, layout: Fold, a: Array, b: Array, budget: int) -> Array:
    """Return log(exp(a) @ exp(b))."""
    a, b = ctx.to_result(a), ctx.to_result(b)
    return log_product.logmatmulexp(ctx.kernels, layout, a, b, ctx.result_name, budget)


def logmatmulexp_gradients(
    ctx: Context,
    layout: Fold,
    a: Array,
    b: Array,
    out: Array,
    g: Array,
    budget: int,
    wanted: tuple[bool, bool] = (True, True),
    propagates_nan: bool = True,
) -> Pair:
    """Return the gradients of sum(g * logmatmulexp(a, b)), each of its operand's shape and dtype.

    The kernels' arrays are of one dtype.
    """
    left, right, out, g = (ctx.to_result(x) for x in (a, b, out, g))
    found = gradients.logmatmulexp_gradients(
        ctx.kernels,
        layout,
        left,
        right,
        out,
        g,
        ctx.result_name,
        budget,
        wanted,
        propagates_nan,
    )
    of_a, of_b = (
        None if x is None else ctx.xp.astype(x, like.dtype, copy=False)
        for x, like in zip(found, (a, b), strict=True)
    )
    return of_a, of_b


def maxplus_matmul(
    ctx: Context, layout: Fold, a: Array, b: Array, budget: int
) -> tuple[Array, Array]:
    """Return max_k a[i, k] + b[k, j] and the smallest such k."""
    a, b = ctx.to_result(a), ctx.to_result(b)
    return maxplus.maxplus_matmul(ctx.kernels, layout, a, b, ctx.result_name, budget)


def maxplus_gradients(
    ctx: Context,
    layout: Fold,
    shapes: tuple[Shape, Shape],
    indices: Array,
    g: Array,
    values: Array | None,
    budget: int,
) -> tuple[Array, Array]:
    """Return the gradients of sum(g * values), in the precision of the computation."""
    xp = ctx.xp
    if values is not None:
        values = xp.reshape(ctx.to_result(values), (-1,))
    return maxplus.maxplus_gradients(
        ctx.kernels,
        layout,
        *shapes,
        values,
        xp.reshape(indices, (-1,)),
        ctx.to_result(g),
        ctx.result_name,
    )
