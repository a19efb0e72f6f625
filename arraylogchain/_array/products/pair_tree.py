"""Products of many matrices in log space: in pairs of neighbours, or in the cheapest order.

The maths is written for any array library and any `multiply`, which may be one that automatic
differentiation follows. The integer part of each matrix's maximum is taken off before it is
multiplied, and added up apart: rounding then depends on the range of the entries and not on how
large they are. To derivatives it is a constant.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from arraylogchain import _dispatch
from arraylogchain._array.products.operand import certificate_threshold, exponentials
from arraylogchain._array.products.tiling import elementwise_block
from arraylogchain._arrays import detached
from arraylogchain._context import Array, Context, shape_of, whole_maximum, whole_part
from arraylogchain._fold import boxes, chunks, fold

Multiply = Callable[[Array, Array], Array]
Pairs = list[tuple[int, int]]

# Finding the best order of n matrices takes time in proportion to n**3.
_LONGEST_OPTIMUM = 64
# Matrices that one of a group takes at the most: the group as it is given and without integer
# parts, and the level above with the room that it is put together in.
_COPIES = 4
# Where the entries of matrices span at most this, products are first tried without logarithms.
_SPAN = {"float32": 30.0, "float64": 330.0}


Step = tuple[Array, Array, Array]  # both operands of a product, and the product


@dataclass(frozen=True, slots=True)
class PairTree:
    """What multiplies matrices, and in which library and dtypes."""

    xp: Any
    computed: Any
    widest: Any
    multiply: Multiply
    tape: list[Step] | None = None  # of all products in order, for their gradients

    def stack(self, x: Array, dtype: Any) -> Array:
        """Return the product of matrices [..., n, K, K]; that of none is the identity."""
        if x.shape[-3] == 0:
            ones = self.xp.ones_like(self.xp.sum(x, axis=-3))
            return self._as(self.xp.log(self.xp.tril(self.xp.triu(ones))), dtype)
        return self.whole(*self.in_pairs(x), dtype)[..., 0, :, :]

    def in_pairs(self, x: Array) -> tuple[Array, Array]:
        """Return the product of neighbours, [..., 1, K, K], and what to add, [..., 1, 1, 1].

        One that is left over waits for the next level.
        """
        offset: Any = 0.0
        while (count := x.shape[-3]) > 1:
            pairs, tops = self._times(*neighbours(x))
            offset = offset + self.xp.sum(tops, axis=-3, keepdims=True)
            x = self.xp.concat((pairs, x[..., -1:, :, :]), axis=-3) if count % 2 else pairs
        return self._as(x, self.computed), offset

    def sequence(self, matrices: Sequence[Array], dtype: Any) -> Array:
        """Return the product of matrices [..., K_i, K_{i+1}] in the cheapest order."""
        held: list[Any] = list(matrices)
        offset: Any = 0.0
        for i, j in multiplication_order(sizes_of(matrices)):
            held[i], tops = self._times(held[i], held[j])
            held[j], offset = None, offset + tops
        return self.whole(held[0], offset, dtype)

    def whole(self, x: Array, offset: Array, dtype: Any) -> Array:
        return self._as(self._as(x, self.widest) + offset, dtype)

    def rest(self, x: Array) -> tuple[Array, Array]:
        """Return matrices without the integer parts of their maxima, and those, [..., 1, 1]."""
        xp = self.xp
        x = self._as(x, self.computed)
        top = (xp.sum if 0 in x.shape else xp.max)(detached(x), axis=(-2, -1), keepdims=True)
        top = xp.round(top)
        top = xp.where(xp.isfinite(top), top, xp.zeros_like(top))
        return x - top, self._as(top, self.widest)

    def _times(self, left: Array, right: Array) -> tuple[Array, Array]:
        (a, top), (b, other) = self.rest(left), self.rest(right)
        product = self.multiply(a, b)
        if self.tape is not None:
            self.tape.append((left, right, product))
        return product, top + other

    def _as(self, x: Array, dtype: Any) -> Array:
        return self.xp.astype(x, dtype, copy=False)


def neighbours(x: Array) -> tuple[Array, Array]:
    """Return the first and the second of each pair of matrices [..., n, K, K]."""
    even = x.shape[-3] // 2 * 2
    return x[..., 0:even:2, :, :], x[..., 1:even:2, :, :]


def array_tree(ctx: Context, budget: int, tape: list[Step] | None = None) -> PairTree:
    """Return what multiplies plain arrays."""
    inner = replace(ctx, result_name=ctx.precision.name)

    def multiply(a: Array, b: Array) -> Array:
        layout = fold(shape_of(a), shape_of(b))
        return _dispatch.product("logmatmulexp", inner, layout, a, b, budget)

    return PairTree(ctx.xp, ctx.dtype(ctx.precision), ctx.dtype(ctx.widest), multiply, tape)


def multiply_stack(ctx: Context, stack: Array, budget: int) -> Array:
    """Return the product of matrices [..., n, K, K] within a workspace."""
    *batch, count, size, _ = shape_of(stack)
    shape = (*batch, size, size)
    # Half is for the products' own workspace.
    tree = array_tree(ctx, budget // 2)
    if count == 0:
        return tree.stack(stack, ctx.result_dtype)
    if 0 in shape or count == 1:
        return ctx.xp.asarray(stack[..., 0, :, :], copy=True)
    if count == 2:
        a, b = stack[..., 0, :, :], stack[..., 1, :, :]
        return _dispatch.product("logmatmulexp", ctx, fold(shape, shape), a, b, budget)
    strip = budget // 2 // (_COPIES * size * ctx.precision.itemsize)
    most = strip // size
    at_once = min(count, most - 1)
    out = ctx.empty(shape, ctx.result_dtype)
    for box in boxes(tuple(batch), max(1, most // max(2, at_once + 1))):
        if at_once < 2:
            _in_strips(ctx, tree, stack[(*box, ...)], strip, out[(*box, ...)])
        else:
            product, offset = _in_groups(ctx, tree, stack[(*box, ...)], at_once, budget)
            out[(*box, ...)] = tree.whole(product, offset, out.dtype)[..., 0, :, :]
    return out


def _in_groups(
    ctx: Context, tree: PairTree, stack: Array, at_once: int, budget: int
) -> tuple[Array, Array]:
    """Return what `PairTree.in_pairs` does, `at_once` matrices at a time."""
    block, _ = elementwise_block(ctx, budget)
    product: Array | None = None
    offset: Any = 0.0
    for n in chunks(int(stack.shape[-3]), at_once):
        group = ctx.load(stack[..., n, :, :], ctx.precision)
        if product is not None:
            group = ctx.xp.concat((product, group), axis=-3)
        product, more = _multiply_exponentials(ctx, group, block) or tree.in_pairs(group)
        offset = offset + more
    assert product is not None
    return product, offset


def _multiply_exponentials(ctx: Context, x: Array, block: int) -> tuple[Array, Array] | None:
    """Return what `PairTree.in_pairs` does, without a logarithm in between; None if not proved.

    A matrix's exponentials are scaled by its maximum. Sums above the certificate's threshold are
    right to rounding, and so far above underflow that they are factors of the next level as exact.
    """
    xp, precision = ctx.xp, ctx.precision
    size = int(x.shape[-1])
    top = xp.max(x, axis=(-2, -1), keepdims=True)
    least = xp.min(x, axis=(-2, -1), keepdims=True) - top
    # +inf and NaN compare False.
    if ctx.kernels is not None or not xp.min(least) >= -_SPAN[precision.name]:
        return None
    top = whole_part(ctx, top, precision)
    flat = (xp.reshape(x, (-1, size, size)), xp.reshape(top, (-1, 1, 1)))
    factors = xp.reshape(exponentials(ctx, *flat, precision, block), x.shape)
    offset = xp.sum(ctx.load(top, ctx.widest), axis=-3, keepdims=True)
    while factors.shape[-3] > 1:
        sums = xp.matmul(*neighbours(factors))
        if not xp.min(sums) >= certificate_threshold(precision, size):
            return None
        shift = xp.round(xp.log(xp.max(sums, axis=(-2, -1), keepdims=True)))
        ctx.apply(xp.multiply, sums, xp.exp(-shift), out=sums)
        offset = offset + xp.sum(ctx.load(shift, ctx.widest), axis=-3, keepdims=True)
        if factors.shape[-3] % 2:
            sums = xp.concat((sums, factors[..., -1:, :, :]), axis=-3)
        factors = sums
    return xp.log(factors), offset


def _in_strips(ctx: Context, tree: PairTree, stack: Array, strip: int, out: Array) -> None:
    """Write the product of large matrices, a strip of rows times a strip of columns at a time."""
    *_, count, size, _ = shape_of(stack)
    for rows in chunks(size, max(1, strip)):
        x, offset = stack[..., 0, rows, :], 0.0
        for i in range(1, count):
            rest, own = tree.rest(x)
            top = whole_maximum(ctx, stack[..., i, :, :], (-2, -1), ctx.precision)
            offset = offset + own + ctx.load(top, ctx.widest)
            x = ctx.empty(shape_of(rest), tree.computed)
            for cols in chunks(size, max(1, strip)):
                part = ctx.load(stack[..., i, :, cols], ctx.precision) - top
                x[..., cols] = tree.multiply(rest, part)
        out[..., rows, :] = tree.whole(x, offset, out.dtype)


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


def sizes_of(matrices: Sequence[Array]) -> list[int]:
    return [int(matrices[0].shape[-2]), *(int(x.shape[-1]) for x in matrices)]
