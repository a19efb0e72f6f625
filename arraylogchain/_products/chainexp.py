"""Products of many matrices in log space, and their pullbacks, from products of pairs.

These functions work for any array library and any ``multiply(a, b) -> (product, pullback)``. The
pullback maps a cotangent of the product to cotangents of both operands; it is None if automatic
differentiation follows `multiply`, or if no gradient is computed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from arraylogchain._core.axes import Shape, boxes, chunks, fold
from arraylogchain._core.context import Array, Context, shape_of
from arraylogchain._core.precision import Precision
from arraylogchain._core.scaled import whole_part
from arraylogchain._inputs.arrays import are_readable
from arraylogchain._inputs.tensors import detached
from arraylogchain._products.certified import logmatmulexp
from arraylogchain._products.gradients import logmatmulexp_gradients
from arraylogchain._products.operand import PullbackInputs

Multiply = Callable[[Array, Array], tuple[Array, Any]]
Pull = Callable[[Array], Any]
# Entries that are read at a time; their temporaries fit any workspace.
_ENTRIES_READ = 1 << 14
# Finding the best order of n matrices takes O(n**3) time.
_MAX_OPTIMIZED = 64


def product_of_stack(xp: Any, x: Array, multiply: Multiply, widest: Any) -> tuple[Array, Pull]:
    """Return the product of matrices [..., n, K, K], in the widest dtype, and its pullback.

    The product of no matrices is the identity.
    """
    if x.shape[-3] == 0:
        ones = xp.ones_like(xp.sum(x, axis=-3))
        return xp.log(xp.tril(xp.triu(ones))), lambda g: xp.zeros_like(x)
    maxima = shifts(xp, x, x.shape[-3])
    product, pull = _in_pairs(xp, x - maxima, multiply)
    scale = scale_of_sums(x.shape[-3])
    total = xp.sum(xp.astype(maxima, widest) * scale, axis=-3)
    return (xp.astype(product, widest) * scale + total) / scale, pull


def product_of_sequence(
    xp: Any, matrices: Sequence[Array], multiply: Multiply, widest: Any
) -> tuple[Array, Pull]:
    """Return the product of [..., K_i, K_{i+1}] in the cheapest order, and its pullback.

    The pullback returns a list.
    """
    maxima = [shifts(xp, x, len(matrices)) for x in matrices]
    held: list[Any] = [x - top for x, top in zip(matrices, maxima, strict=True)]
    steps = []
    sizes = int(matrices[0].shape[-2]), *(int(x.shape[-1]) for x in matrices)
    for i, j in multiplication_order(sizes):
        held[i], pull = multiply(held[i], held[j])
        held[j] = None
        steps.append((i, j, pull))

    def pullback(g: Array) -> list[Array]:
        result = [g] * len(matrices)
        for i, j, pull in reversed(steps):
            result[i], result[j] = pull(result[i])
        return result

    scale = scale_of_sums(len(matrices))
    total = sum(xp.astype(top, widest) * scale for top in maxima)
    return (xp.astype(held[0], widest) * scale + total) / scale, pullback


def scale_of_sums(count: int) -> float:
    """Return a power of two by which sums of `count` finite numbers are scaled to stay finite."""
    return 2.0 ** -count.bit_length()


def whole_maxima(xp: Any, x: Array, axis: Any = (-2, -1)) -> Array:
    """Return the largest entries of matrices in whole nats, [..., 1, 1]; 0 where not finite.

    Matrices are shifted by them before they are multiplied, and the shifts are summed apart, so
    that rounding errors depend on the range of the entries and not on their size. Derivatives
    treat them as constants.
    """
    maxima = (xp.sum if 0 in x.shape else xp.max)(detached(x), axis=axis, keepdims=True)
    return whole_part(xp, maxima)


def shifts(xp: Any, x: Array, count: int) -> Array:
    """Return the shifts [..., 1, 1] of matrices in a product of `count` matrices.

    Products of two matrices need none, as no intermediate product can overflow.
    """
    return whole_maxima(xp, x) * int(count > 2)


def sums_overflow(xp: Any, arrays: Sequence[Array], count: int, precision: Precision) -> bool:
    """Return whether a partial sum of `count` entries may overflow although the total does not.

    That takes large positive entries: masks with the lowest number alone cannot cancel.
    """
    limit, arrays = 2.0**precision.top / max(count, 1), [detached(x) for x in arrays]
    arrays = [x for x in arrays if 0 not in x.shape]
    if all(float(xp.max(x)) <= limit * precision.eps / 4 for x in arrays):
        return False
    return any(
        float(xp.max(xp.abs(xp.where(xp.isfinite(x[box]), x[box], 0.0)))) > limit
        for x in arrays
        for box in boxes(shape_of(x), _ENTRIES_READ)
    )


def _with_range(ctx: Context, arrays: Sequence[Array], count: int) -> Context:
    """Return a context that computes in float64 if float32 may overflow and values can be read."""
    if ctx.widest is ctx.precision or not are_readable(*arrays):
        return ctx
    if not sums_overflow(ctx.xp, arrays, count, ctx.precision):
        return ctx
    return replace(ctx, precision=ctx.widest)


def _in_pairs(xp: Any, x: Array, multiply: Multiply) -> tuple[Array, Pull]:
    """Return the product of matrices in a tree of pairs of neighbors, and its pullback."""
    *batch, count, rows, cols = x.shape
    if count == 1:
        return x[..., 0, :, :], lambda g: g[..., None, :, :]
    even = count // 2 * 2
    pairs, pull = multiply(x[..., 0:even:2, :, :], x[..., 1:even:2, :, :])
    if count > even:
        pairs = xp.concat((pairs, x[..., even:, :, :]), axis=-3)
    product, pull_pairs = _in_pairs(xp, pairs, multiply)

    def pullback(g: Array) -> Array:
        g = pull_pairs(g)
        operands = xp.stack(pull(g[..., : even // 2, :, :]), axis=-3)
        operands = xp.reshape(operands, (*batch, even, rows, cols))
        return xp.concat((operands, g[..., even // 2 :, :, :]), axis=-3)

    return product, pullback


def multiply_sequence(ctx: Context, matrices: Sequence[Array], budget: int) -> Array:
    """Return the product of matrices; the workspace does not include intermediate products."""
    ctx = _with_range(ctx, matrices, len(matrices))
    loaded = [ctx.load(x, ctx.precision) for x in matrices]
    multiply = multiplier(ctx, budget, None)
    return ctx.to_result(product_of_sequence(ctx.xp, loaded, multiply, ctx.dtype(ctx.widest))[0])


def multiply_stack(ctx: Context, stack: Array, budget: int) -> Array:
    """Return the product in log space of matrices [..., n, K, K] within a workspace.

    The first matrix, in blocks of rows, is multiplied by chunks of the matrices that follow it. The
    product of a chunk is computed in pairs first.
    """
    *batch, count, size, _ = shape_of(stack)
    shape, xp = (*batch, size, size), ctx.xp
    ctx = _with_range(ctx, [stack], count)
    # Half of the budget is the workspace of products; matrices and their products take the rest.
    multiply = multiplier(ctx, budget // 2, None)
    if count == 0 or 0 in shape:
        return ctx.to_result(product_of_stack(xp, stack, multiply, stack.dtype)[0])
    # The number of rows of K entries that fit, with copies.
    num_lines = max(1, budget // 2 // (4 * size * ctx.precision.itemsize))
    num_parallel = min(count, num_lines // size - 1)
    # Unless two matrices and a product fit, matrices are multiplied one by one, in blocks.
    block_size = size if num_parallel > 1 else num_lines
    out, scale = ctx.empty(shape, ctx.result_dtype), scale_of_sums(count)
    for box in boxes(tuple(batch), max(1, num_lines // size // max(2, num_parallel + 1))):
        part, target = stack[(*box, ...)], out[(*box, ...)]
        for rows in chunks(size, block_size):
            x = ctx.load(part[..., 0, rows, :], ctx.precision)
            offset = shifts(xp, x, count)
            x, offset = x - offset, ctx.load(offset, ctx.widest) * scale
            for n in chunks(count - 1, max(1, num_parallel)):
                chunk = part[..., n.start + 1 : n.stop + 1, :, :]
                maxima, result = ctx.load(shifts(xp, chunk, count), ctx.precision), xp.empty_like(x)
                for cols in chunks(size, block_size):
                    factors = ctx.load(chunk[..., cols], ctx.precision) - maxima
                    result[..., cols] = multiply(x, _in_pairs(xp, factors, multiply)[0])[0]
                x = result
                offset = offset + xp.sum(ctx.load(maxima, ctx.widest) * scale, axis=-3)
            x = (ctx.load(x, ctx.widest) * scale + offset) / scale
            target[..., rows, :] = ctx.to_result(x)
    return out


def multiplier(ctx: Context, budget: int, has_nan: Array | bool | None) -> Multiply:
    """Return a `Multiply` of arrays in memory, without pullbacks if `has_nan` is None."""
    narrow, wide = (
        replace(ctx, precision=x, result_name=x.name) for x in (ctx.precision, ctx.widest)
    )
    wide_dtype = ctx.dtype(ctx.widest)

    def multiply(a: Array, b: Array) -> tuple[Array, Any]:
        inner = wide if a.dtype == wide_dtype else narrow
        layout = fold(shape_of(a), shape_of(b))
        product = logmatmulexp(inner, layout, a, b, budget)

        def pull(g: Array) -> Any:
            ctx.record_stream(a, b, product)
            arrays = PullbackInputs(a, b, product, g)
            return logmatmulexp_gradients(inner, layout, arrays, budget, propagates_nan=has_nan)

        return product, None if has_nan is None else pull

    return multiply


def chain_and_pullback(
    ctx: Context, matrices: Sequence[Array], is_stack: bool, budget: int
) -> tuple[Array, Callable[[Array], list[Array]]]:
    """Return the product of a sequence of matrices, or of one stack, and its pullback."""
    xp, count = ctx.xp, matrices[0].shape[-3] if is_stack else len(matrices)
    ctx = _with_range(ctx, matrices, count)
    loaded = [ctx.load(x, ctx.precision) for x in matrices]
    # NaN in products may also come from +inf meeting -inf, which has no gradient.
    # The flag of an array on a device is not waited for.
    maxima = [xp.max(x) for x in loaded if 0 not in x.shape]
    has_nan = xp.any(xp.isnan(xp.stack(maxima))) if maxima else False
    multiply = multiplier(ctx, budget, has_nan)
    function, x = (product_of_stack, loaded[0]) if is_stack else (product_of_sequence, loaded)
    value, pull = function(xp, x, multiply, ctx.dtype(ctx.widest))
    value = ctx.to_result(value)
    is_infinite = xp.isinf(value)

    def pullback(g: Array) -> list[Array]:
        ctx.record_stream(is_infinite)
        result = pull(xp.where(is_infinite, 0.0, ctx.load(g, ctx.precision)))
        # NaN entries of operands have NaN gradients.
        pairs = zip(matrices, [result] if is_stack else result, strict=True)
        return [xp.astype(xp.where(xp.isnan(x), math.nan, d), x.dtype) for x, d in pairs]

    return value, pullback


@lru_cache(maxsize=64)
def multiplication_order(sizes: Shape) -> list[tuple[int, int]]:
    """Return the products to make of matrices [K_i, K_{i+1}], one after another.

    A pair (i, j) multiplies the product that begins with matrix i by the one that begins with
    matrix j. Up to 64 matrices, the order has the fewest multiplications (Cormen, Leiserson,
    Rivest, Stein, Introduction to Algorithms, 3rd edition, section 15.2); longer sequences are
    multiplied from one end to the other, from the end where that takes fewer.
    """
    n = len(sizes) - 1
    if n > _MAX_OPTIMIZED:
        cost_from_left = sizes[0] * sum(p * q for p, q in itertools.pairwise(sizes[1:]))
        cost_from_right = sizes[-1] * sum(p * q for p, q in itertools.pairwise(sizes[:-1]))
        is_from_left = cost_from_left <= cost_from_right
        return [(0, j) if is_from_left else (n - 1 - j, n - j) for j in range(1, n)]

    @cache
    def best(i: int, j: int) -> tuple[int, list[tuple[int, int]]]:
        """Return the cost and the order for matrices i to j."""
        if i == j:
            return 0, []

        def split_after(k: int) -> tuple[int, list[tuple[int, int]]]:
            (left_cost, left_order), (right_cost, right_order) = best(i, k), best(k + 1, j)
            cost = left_cost + right_cost + sizes[i] * sizes[k + 1] * sizes[j + 1]
            return cost, [*left_order, *right_order, (i, k + 1)]

        return min(map(split_after, range(i, j)))

    return best(0, n - 1)[1]
