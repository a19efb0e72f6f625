"""Products of many matrices in log space that keep what their gradients need.

As in `sequence`, the whole part of each product's maximum is taken off and added up apart: a
constant for the gradient, which is that with respect to the product before and after.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from arraylogchain._array.products.gradients import logmatmulexp_gradients
from arraylogchain._array.products.levels import Multiply, next_level, pairs_of, without_whole_part
from arraylogchain._array.products.sequence import multiplication_order, multiply_sequence
from arraylogchain._context import Array, Context, shape_of

Step = tuple[Array, Array, Array]  # the factors of a product as they were multiplied, the product


def through_finite(ctx: Context, value: Array, g: Array) -> Array:
    """Return a cotangent in the precision of the computation, 0 where the value is infinite."""
    xp = ctx.xp
    g = ctx.load(g, ctx.precision)
    return xp.where(xp.isinf(value), xp.zeros_like(g), g)


def multiply_recorded(
    ctx: Context, matrices: Sequence[Array], multiply: Multiply
) -> tuple[Array, list[Step]]:
    """Return the product of [..., K_i, K_{i+1}] matrices, and every product made on the way."""
    tape: list[Step] = []

    def recorded(inner: Context, a: Array, b: Array) -> Array:
        tape.append((a, b, multiply(inner, a, b)))
        return tape[-1][-1]

    return multiply_sequence(ctx, matrices, recorded), tape


def sequence_gradients(
    ctx: Context, matrices: Sequence[Array], tape: list[Step], g: Array, budget: int
) -> list[Array]:
    """Return the gradients with respect to the matrices of `multiply_recorded`."""
    sizes = [int(matrices[0].shape[-2]), *(int(x.shape[-1]) for x in matrices)]
    inner = replace(ctx, result_name=ctx.precision.name)
    held: list[Array | None] = [None] * len(matrices)
    held[0] = g
    order = multiplication_order(sizes)
    spoils = any(map(partial(_has_nan, ctx), matrices))
    for (i, j), (a, b, out) in zip(reversed(order), reversed(tape), strict=True):
        assert held[i] is not None
        held[i], held[j] = logmatmulexp_gradients(inner, a, b, out, held[i], budget, spoils=spoils)
    return [_result(ctx, x, like) for x, like in zip(held, matrices, strict=True)]


def multiply_levels(ctx: Context, stack: Array, multiply: Multiply) -> tuple[Array, list[Array]]:
    """Return the product of matrices [..., n, K, K], and the products in between.

    Neighbours are multiplied in pairs, then those products, and so on; one that is left over waits
    for the next level. The list has the matrices of every level, the given ones first.
    """
    xp = ctx.xp
    *batch, count, size, _ = shape_of(stack)
    shape = (*batch, size, size)
    if count == 0:
        identity = xp.eye(size, dtype=ctx.dtype(ctx.precision), device=ctx.device)
        whole = xp.broadcast_to(xp.astype(xp.log(identity), ctx.result_dtype), shape)
        return xp.asarray(whole, copy=True), [stack]
    if count == 1 or 0 in shape:
        return xp.asarray(stack[..., 0, :, :], copy=True), [stack]
    levels = [stack]
    offset = xp.zeros((*batch, 1, 1, 1), dtype=ctx.dtype(ctx.widest), device=ctx.device)
    while levels[-1].shape[-3] > 1:
        above, total = next_level(ctx, levels[-1], multiply)
        offset = offset + total
        levels.append(above)
    result = ctx.load(levels[-1], ctx.widest) + offset
    return xp.astype(result[..., 0, :, :], ctx.result_dtype), levels


def stack_gradient(ctx: Context, stack: Array, levels: list[Array], g: Array, budget: int) -> Array:
    """Return the gradient with respect to the matrices of `multiply_levels`."""
    xp = ctx.xp
    if stack.shape[-3] == 0 or 0 in stack.shape:
        return xp.zeros(shape_of(stack), dtype=stack.dtype, device=ctx.device)
    inner = replace(ctx, result_name=ctx.precision.name)
    g = g[..., None, :, :]
    spoils = _has_nan(ctx, stack)
    for level, above in zip(reversed(levels[:-1]), reversed(levels[1:]), strict=True):
        x, _ = without_whole_part(ctx, level)
        left, right, _ = pairs_of(x)
        pairs = left.shape[-3]
        of_pairs, of_rest = g[..., :pairs, :, :], g[..., pairs:, :, :]
        da, db = logmatmulexp_gradients(
            inner, left, right, above[..., :pairs, :, :], of_pairs, budget, spoils=spoils
        )
        g = ctx.empty(shape_of(x), ctx.dtype(ctx.precision))
        g[..., 0 : 2 * pairs : 2, :, :] = da
        g[..., 1 : 2 * pairs : 2, :, :] = db
        g[..., 2 * pairs :, :, :] = of_rest
    return _result(ctx, g, stack)


def _has_nan(ctx: Context, x: Array) -> bool:
    """Tell whether a NaN was given: products have one as well where +inf meets -inf."""
    return 0 not in x.shape and math.isnan(float(ctx.xp.max(x)))


def _result(ctx: Context, g: Array | None, like: Array) -> Array:
    """Return a gradient in its operand's dtype; what is NaN there is NaN here."""
    xp = ctx.xp
    assert g is not None
    g = xp.where(xp.isnan(like), xp.full_like(g, math.nan), g)
    return g if g.dtype == like.dtype else xp.astype(g, like.dtype)
