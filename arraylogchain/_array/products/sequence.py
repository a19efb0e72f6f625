"""Products of a sequence of rectangular matrices, in an order that costs little."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from arraylogchain._context import Array, Context, whole_maximum

# Finding the best order of n matrices takes time in proportion to n**3.
_LONGEST_OPTIMUM = 64

Pairs = list[tuple[int, int]]


def multiplication_order(sizes: Sequence[int]) -> Pairs:
    """Return the products to make, one after another.

    Parameters
    ----------
    sizes : sequence of int
        Matrix i is sizes[i] by sizes[i + 1].

    Returns
    -------
    list of tuple of int
        A pair (i, j) multiplies the product that begins with matrix i by the one that begins with
        matrix j. Up to 64 matrices, the order has the fewest multiplications; longer sequences are
        multiplied from one end to the other, from the end where that takes fewer.

    References
    ----------
    Cormen, Leiserson, Rivest, Stein, Introduction to Algorithms, 3rd edition, section 15.2.

    Examples
    --------
    >>> multiplication_order([10, 100, 5, 50])  # (A B) C: 7500 multiplications, not 75000
    [(0, 1), (0, 2)]
    """
    n = len(sizes) - 1
    if n > _LONGEST_OPTIMUM:
        from_left = sizes[0] * _neighbours(sizes[1:])
        from_right = sizes[-1] * _neighbours(sizes[:-1])
        if from_left <= from_right:
            return [(0, j) for j in range(1, n)]
        return [(i, i + 1) for i in reversed(range(n - 1))]
    cost = [[0] * n for _ in range(n)]
    last_of_left = [[0] * n for _ in range(n)]
    for length in range(2, n + 1):
        for i in range(n - length + 1):
            j = i + length - 1
            # Spelled out, so that torch.compile can follow it on sizes that vary.
            for k in range(i, j):
                total = cost[i][k] + cost[k + 1][j] + sizes[i] * sizes[k + 1] * sizes[j + 1]
                if k == i or total < cost[i][j]:
                    cost[i][j], last_of_left[i][j] = total, k

    def pairs(i: int, j: int) -> Pairs:
        if i == j:
            return []
        k = last_of_left[i][j]
        return [*pairs(i, k), *pairs(k + 1, j), (i, k + 1)]

    return pairs(0, n - 1)


def _neighbours(sizes: Sequence[int]) -> int:
    return sum(m * n for m, n in itertools.pairwise(sizes))


def multiply_sequence(
    ctx: Context,
    matrices: Sequence[Array],
    multiply: Callable[[Context, Array, Array], Array],
) -> Array:
    """Multiply [..., K_i, K_{i+1}] matrices of logarithms in a cheap order.

    Products in between are kept in the precision of the computation, and without the whole part of
    their maxima, so that their rounding depends on the range of their entries and not on how large
    they are.
    """
    xp = ctx.xp
    if len(matrices) == 1:
        return xp.asarray(matrices[0], dtype=ctx.result_dtype, copy=True)
    inner = replace(ctx, result_name=ctx.precision.name)
    sizes = [int(matrices[0].shape[-2]), *(int(x.shape[-1]) for x in matrices)]
    held: list[Array | None] = list(matrices)
    offset: Array = 0.0

    def taken(i: int) -> Array:
        """Return a product without its shift, and let go of it."""
        nonlocal offset
        x, held[i] = held[i], None
        assert x is not None
        if 0 in x.shape:
            return x
        shift = whole_maximum(ctx, x, (-2, -1), ctx.precision)
        offset = offset + ctx.load(shift, ctx.widest)
        return ctx.load(x, ctx.precision) - shift

    for i, j in multiplication_order(sizes):
        held[i] = multiply(inner, taken(i), taken(j))
    result = ctx.load(held[0], ctx.widest) + offset
    return xp.astype(result, ctx.result_dtype)
