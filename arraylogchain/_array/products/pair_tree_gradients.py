"""Gradients of products of many matrices, from the tape of a `PairTree`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from arraylogchain import _dispatch
from arraylogchain._array.products.pair_tree import Step, multiplication_order, sizes_of
from arraylogchain._context import Array, Context, shape_of
from arraylogchain._fold import fold


def stack_gradient(ctx: Context, stack: Array, tape: list[Step], g: Array, budget: int) -> Array:
    """Return the gradient with respect to the matrices of `PairTree.stack`, recorded on a tape."""
    if 0 in stack.shape:
        return ctx.xp.zeros(shape_of(stack), dtype=stack.dtype, device=ctx.device)
    g = g[..., None, :, :]
    gradients = _gradients_of_products(ctx, [stack], budget)
    for step in reversed(tape):
        pairs = int(step[2].shape[-3])
        of_left, of_right = gradients(step, g[..., :pairs, :, :])
        below = ctx.empty((*g.shape[:-3], pairs + g.shape[-3], *g.shape[-2:]), g.dtype)
        below[..., 0 : 2 * pairs : 2, :, :] = of_left
        below[..., 1 : 2 * pairs : 2, :, :] = of_right
        below[..., 2 * pairs :, :, :] = g[..., pairs:, :, :]
        g = below
    return _as_operand(ctx, g, stack)


def sequence_gradients(
    ctx: Context, matrices: Sequence[Array], tape: list[Step], g: Array, budget: int
) -> list[Array]:
    """Return the gradients with respect to the matrices of `PairTree.sequence`."""
    held: list[Any] = [None] * len(matrices)
    held[0] = g
    gradients = _gradients_of_products(ctx, matrices, budget)
    order = multiplication_order(sizes_of(matrices))
    for (i, j), step in zip(reversed(order), reversed(tape), strict=True):
        held[i], held[j] = gradients(step, held[i])
    return [_as_operand(ctx, x, like) for x, like in zip(held, matrices, strict=True)]


def _gradients_of_products(
    ctx: Context, matrices: Sequence[Array], budget: int
) -> Callable[[Step, Array], tuple[Array, Array]]:
    """Return what takes a step and its cotangent to the gradients of its operands."""
    inner = replace(ctx, result_name=ctx.precision.name)
    # Products have a NaN where +inf meets -inf as well.
    has_nan = any(0 not in x.shape and math.isnan(float(ctx.xp.max(x))) for x in matrices)

    def gradients(step: Step, g: Array) -> tuple[Array, Array]:
        left, right, out = step
        a, b = left.rest(), right.rest()
        layout = fold(shape_of(a), shape_of(b))
        found: tuple[Array, Array] = _dispatch.product(
            "logmatmulexp_gradients", inner, layout, a, b, out, g, budget, propagates_nan=has_nan
        )
        return found

    return gradients


def _as_operand(ctx: Context, g: Array, like: Array) -> Array:
    """Return a gradient in its operand's dtype; what is NaN there is NaN here."""
    xp = ctx.xp
    g = xp.where(xp.isnan(like), xp.full_like(g, math.nan), g)
    return xp.astype(g, like.dtype, copy=False)
