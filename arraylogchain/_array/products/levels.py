"""Products of square matrices in log space by pairs of neighbours, level by level.

As in `sequence`, the whole part of the maximum of each product is taken off and added up apart, so
that rounding depends on the range of entries and not on how large they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from arraylogchain._context import Array, Context, shape_of, whole_maximum
from arraylogchain._fold import boxes

Multiply = Callable[[Context, Array, Array], Array]

# Matrices that one of a group takes at the most: the group as it is given and without whole parts,
# and the level above with the room that it is put together in.
_COPIES = 4


def without_whole_part(ctx: Context, x: Array) -> tuple[Array, Array]:
    """Return matrices in the precision of the computation, and what was taken off each of them."""
    shift = whole_maximum(ctx, x, (-2, -1), ctx.precision)
    return ctx.load(x, ctx.precision) - shift, shift


def pairs_of(x: Array) -> tuple[Array, Array, Array]:
    """Return the left and the right factors of a level, and the one that is left over."""
    even = int(x.shape[-3]) // 2 * 2
    return x[..., 0:even:2, :, :], x[..., 1:even:2, :, :], x[..., even:, :, :]


def next_level(ctx: Context, x: Array, multiply: Multiply) -> tuple[Array, Array]:
    """Return the products of neighbours among matrices [..., n, K, K], and what was taken off.

    One that is left over waits for the next level.
    """
    xp = ctx.xp
    x, shift = without_whole_part(ctx, x)
    left, right, rest = pairs_of(x)
    product = multiply(replace(ctx, result_name=ctx.precision.name), left, right)
    total = xp.sum(ctx.load(shift, ctx.widest), axis=-3, keepdims=True)
    return xp.concat((product, rest), axis=-3), total


def most_matrices(size: int, ctx: Context, budget: int) -> int:
    """Return how many matrices `multiply_stack` may take at once: 3 or more if it can be used."""
    return budget // (_COPIES * size * size * ctx.precision.itemsize)


def multiply_stack(ctx: Context, stack: Array, multiply: Multiply, budget: int) -> Array:
    """Return the products of matrices [..., n, K, K], in groups that fit into a workspace."""
    *batch, count, size, _ = shape_of(stack)
    most = most_matrices(size, ctx, budget)
    at_once = min(count, most - 1)
    out = ctx.empty((*batch, size, size), ctx.result_dtype)
    for box in boxes(tuple(batch), max(1, most // (at_once + 1))):
        part = stack[(*box, ...)]
        product, offset = ctx.load(part[..., :1, :, :], ctx.precision), 0.0
        for first in range(1, count, at_once):
            group = part[..., first : first + at_once, :, :]
            x = ctx.xp.concat((product, ctx.load(group, ctx.precision)), axis=-3)
            while x.shape[-3] > 1:
                x, total = next_level(ctx, x, multiply)
                offset = offset + total
            product = x
        out[(*box, ...)] = (ctx.load(product, ctx.widest) + offset)[..., 0, :, :]
    return out
