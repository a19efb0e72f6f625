"""Products of many matrices with their pullbacks, from the tape of a `PairTree`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from arraylogchain import _dispatch
from arraylogchain._array.products.pair_tree import (
    Step,
    array_tree,
    multiplication_order,
    sizes_of,
)
from arraylogchain._context import Array, Context, shape_of
from arraylogchain._fold import fold

# Takes a step and the cotangent of its product to the gradients of its operands.
Gradients = Callable[[Step, Array], tuple[Array, Array]]


def chain_and_pullback(
    ctx: Context, matrices: Sequence[Array], is_stack: bool, budget: int
) -> tuple[Array, Callable[[Array], list[Array]]]:
    """Return the product of matrices, or of the one stack that is given, and its pullback."""
    tape: list[Step] = []
    tree = array_tree(ctx, budget, tape)
    if is_stack:
        value = tree.stack(matrices[0], ctx.result_dtype)
    else:
        value = tree.sequence(matrices, ctx.result_dtype)

    def gradients(step: Step, g: Array) -> tuple[Array, Array]:
        a, b = (tree.rest(x)[0] for x in step[:2])
        inner = replace(ctx, result_name=ctx.precision.name)
        arguments = (fold(shape_of(a), shape_of(b)), a, b, step[2], g, budget)
        # Products have a NaN where +inf meets -inf as well.
        has_nan = any(0 not in x.shape and math.isnan(float(ctx.xp.max(x))) for x in matrices)
        found: tuple[Array, Array] = _dispatch.product(
            "logmatmulexp_gradients", inner, *arguments, propagates_nan=has_nan
        )
        return found

    def pullback(g: Array) -> list[Array]:
        xp = ctx.xp
        ctx.uses(*itertools.chain(*tape))
        g = xp.where(xp.isinf(value), 0.0, ctx.load(g, ctx.precision))
        found = (_of_stack if is_stack else _of_sequence)(ctx, matrices, tape, gradients, g)
        # What is NaN in an operand is NaN in its gradient.
        found = [xp.where(xp.isnan(x), math.nan, g) for x, g in zip(matrices, found, strict=True)]
        return [xp.astype(g, x.dtype, copy=False) for x, g in zip(matrices, found, strict=True)]

    return value, pullback


def _of_stack(
    ctx: Context, matrices: Sequence[Array], tape: list[Step], gradients: Gradients, g: Array
) -> list[Array]:
    if 0 in matrices[0].shape:
        return [ctx.xp.zeros_like(matrices[0])]
    g = g[..., None, :, :]
    for step in reversed(tape):
        pairs = int(step[2].shape[-3])
        below = ctx.empty((*g.shape[:-3], pairs + g.shape[-3], *g.shape[-2:]), g.dtype)
        for i, of_operand in enumerate(gradients(step, g[..., :pairs, :, :])):
            below[..., i : 2 * pairs : 2, :, :] = of_operand
        below[..., 2 * pairs :, :, :] = g[..., pairs:, :, :]
        g = below
    return [g]


def _of_sequence(
    ctx: Context, matrices: Sequence[Array], tape: list[Step], gradients: Gradients, g: Array
) -> list[Array]:
    held: list[Any] = [g, *matrices[1:]]
    order = multiplication_order(sizes_of(matrices))
    for (i, j), step in zip(reversed(order), reversed(tape), strict=True):
        held[i], held[j] = gradients(step, held[i])
    return held
