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
from arraylogchain._context import Array, Context, shape_of, whole_maximum
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


@dataclass(frozen=True, slots=True)
class Shifted:
    """Matrices of logarithms: `values` plus `offset`; `top` is the integer part of their maxima."""

    values: Array
    top: Array  # [..., 1, 1]
    offset: Array  # [..., 1, 1], in the widest precision

    def rest(self) -> Array:
        return self.values - self.top

    def __getitem__(self, matrices: slice) -> Shifted:
        """Return some of matrices [..., n, K, K]."""
        return Shifted(*(x[..., matrices, :, :] for x in (self.values, self.top, self.offset)))


Step = tuple[Shifted, Shifted, Array]  # both operands of a product, and the product


@dataclass(frozen=True, slots=True)
class PairTree:
    """What multiplies matrices, and in which library and dtypes."""

    xp: Any
    computed: Any
    widest: Any
    multiply: Multiply
    tape: list[Step] | None = None  # of all products in order, for their gradients

    def shifted(self, x: Array) -> Shifted:
        """Return matrices in the dtype that is computed in."""
        xp = self.xp
        x = self._as(x, self.computed)
        if 0 in x.shape:
            top = xp.sum(detached(x), axis=(-2, -1), keepdims=True)
        else:
            top = xp.round(xp.max(detached(x), axis=(-2, -1), keepdims=True))
            top = xp.where(xp.isfinite(top), top, xp.zeros_like(top))
        return Shifted(x, top, self._as(xp.zeros_like(top), self.widest))

    def times(self, left: Shifted, right: Shifted) -> Shifted:
        product = self.shifted(self.multiply(left.rest(), right.rest()))
        if self.tape is not None:
            self.tape.append((left, right, product.values))
        tops = self._as(left.top, self.widest) + self._as(right.top, self.widest)
        return replace(product, offset=left.offset + right.offset + tops)

    def stack(self, x: Shifted) -> Shifted:
        """Return the product of matrices [..., n, K, K], n > 0, in pairs of neighbours.

        One that is left over waits for the next level.
        """
        while (count := x.values.shape[-3]) > 1:
            even = count // 2 * 2
            pairs = self.times(x[0:even:2], x[1:even:2])
            x = self.joined(pairs, x[even:]) if count > even else pairs
        return x

    def joined(self, first: Shifted, second: Shifted) -> Shifted:
        """Return matrices one after the other."""
        pairs = ((first.values, second.values), (first.top, second.top))
        offsets = (first.offset, second.offset)
        return Shifted(*(self.xp.concat(pair, axis=-3) for pair in (*pairs, offsets)))

    def sequence(self, matrices: Sequence[Array]) -> Shifted:
        """Return the product of matrices [..., K_i, K_{i+1}] in the cheapest order."""
        held: list[Any] = [None] * len(matrices)

        def taken(i: int) -> Shifted:
            x, held[i] = held[i], None
            return self.shifted(matrices[i]) if x is None else x

        for i, j in multiplication_order(sizes_of(matrices)):
            held[i] = self.times(taken(i), taken(j))
        return taken(0)

    def whole(self, x: Shifted, dtype: Any) -> Array:
        return self._as(self._as(x.values, self.widest) + x.offset, dtype)

    def _as(self, x: Array, dtype: Any) -> Array:
        return self.xp.astype(x, dtype, copy=False)


def array_tree(ctx: Context, budget: int, tape: list[Step] | None = None) -> PairTree:
    """Return what multiplies plain arrays."""
    inner = replace(ctx, result_name=ctx.precision.name)

    def multiply(a: Array, b: Array) -> Array:
        layout = fold(shape_of(a), shape_of(b))
        return _dispatch.product("logmatmulexp", inner, layout, a, b, budget)

    return PairTree(ctx.xp, ctx.dtype(ctx.precision), ctx.dtype(ctx.widest), multiply, tape)


def identities(xp: Any, shape: Sequence[int], dtype: Any, device: Any) -> Array:
    """Return logarithms of identity matrices [..., K, K]."""
    identity = xp.eye(shape[-1], dtype=xp.float32, device=device)
    return xp.asarray(xp.broadcast_to(xp.astype(xp.log(identity), dtype), tuple(shape)), copy=True)


def multiply_stack(ctx: Context, stack: Array, budget: int) -> Array:
    """Return the product of matrices [..., n, K, K] within a workspace."""
    *batch, count, size, _ = shape_of(stack)
    shape = (*batch, size, size)
    if count == 0:
        return identities(ctx.xp, shape, ctx.result_dtype, ctx.device)
    if 0 in shape or count == 1:
        return ctx.xp.asarray(stack[..., 0, :, :], copy=True)
    if count == 2:
        a, b = stack[..., 0, :, :], stack[..., 1, :, :]
        return _dispatch.product("logmatmulexp", ctx, fold(shape, shape), a, b, budget)
    # Half is for the products' own workspace.
    room = budget // 2 // (size * ctx.precision.itemsize)
    tree = array_tree(ctx, budget // 2)
    most = room // (_COPIES * size)
    at_once = min(count, most - 1)
    out = ctx.empty(shape, ctx.result_dtype)
    for box in boxes(tuple(batch), max(1, most // max(2, at_once + 1))):
        if at_once < 2:
            _in_strips(ctx, tree, stack[(*box, ...)], room // _COPIES, out[(*box, ...)])
        else:
            product = _in_groups(ctx, tree, stack[(*box, ...)], at_once, budget)
            out[(*box, ...)] = tree.whole(product, out.dtype)[..., 0, :, :]
    return out


def _in_groups(ctx: Context, tree: PairTree, stack: Array, at_once: int, budget: int) -> Shifted:
    """Return the product of matrices [..., n, K, K], `at_once` of them at a time."""
    block, _ = elementwise_block(ctx, budget)
    product: Shifted | None = None
    for n in chunks(int(stack.shape[-3]), at_once):
        group = tree.shifted(stack[..., n, :, :])
        if product is not None:
            group = tree.joined(product, group)
        product = _multiply_exponentials(ctx, group, block) or tree.stack(group)
    assert product is not None
    return product


def _multiply_exponentials(ctx: Context, x: Shifted, block: int) -> Shifted | None:
    """Return what `PairTree.stack` does, without a logarithm in between; None if not proved.

    A matrix's exponentials are scaled by its maximum. Sums above the certificate's threshold are
    right to rounding, and so far above underflow that they are factors of the next level as exact.
    """
    xp, precision = ctx.xp, ctx.precision
    size = int(x.values.shape[-1])
    least = xp.min(x.values, axis=(-2, -1), keepdims=True) - x.top
    if ctx.kernels is not None or not xp.min(least) >= -_SPAN[precision.name]:
        return None
    flat = (-1, size, size)
    values, top = xp.reshape(x.values, flat), xp.reshape(x.top, (-1, 1, 1))
    factors = xp.reshape(exponentials(ctx, values, top, precision, block), x.values.shape)
    offset = x.offset + ctx.load(x.top, ctx.widest)
    while (count := factors.shape[-3]) > 1:
        even = count // 2 * 2
        left, right = (factors[..., i:even:2, :, :] for i in (0, 1))
        sums = xp.matmul(left, right)
        if not xp.min(sums) >= certificate_threshold(precision, size):
            return None
        shift = xp.round(xp.log(xp.max(sums, axis=(-2, -1), keepdims=True)))
        ctx.apply(xp.multiply, sums, xp.exp(-shift), out=sums)
        offsets = offset[..., 0:even:2, :, :] + offset[..., 1:even:2, :, :]
        offsets = offsets + ctx.load(shift, ctx.widest)
        if count > even:
            sums = xp.concat((sums, factors[..., even:, :, :]), axis=-3)
            offsets = xp.concat((offsets, offset[..., even:, :, :]), axis=-3)
        factors, offset = sums, offsets
    return Shifted(xp.log(factors), xp.zeros_like(factors[..., :1, :1]), offset)


def _in_strips(ctx: Context, tree: PairTree, stack: Array, strip: int, out: Array) -> None:
    """Write the product of large matrices, a strip of rows times a strip of columns at a time."""
    *_, count, size, _ = shape_of(stack)
    for rows in chunks(size, max(1, strip)):
        x = tree.shifted(stack[..., 0, rows, :])
        for i in range(1, count):
            top = whole_maximum(ctx, stack[..., i, :, :], (-2, -1), ctx.precision)
            rest, values = x.rest(), ctx.empty(shape_of(x.values), tree.computed)
            for cols in chunks(size, max(1, strip)):
                part = ctx.load(stack[..., i, :, cols], ctx.precision) - top
                values[..., cols] = tree.multiply(rest, part)
            tops = ctx.load(x.top, ctx.widest) + ctx.load(top, ctx.widest)
            x = replace(tree.shifted(values), offset=x.offset + tops)
        out[..., rows, :] = tree.whole(x, out.dtype)


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
