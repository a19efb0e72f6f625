"""Sums of products over groups of axes, as matrix multiplies on the operands where they lie.

A matrix multiply is fast on operands whose rows or columns are contiguous. Axes that merge into
such matrices without a copy are multiplied as they are, all in one call. Whatever else there is
(axes expanded with stride 0, reversed or interleaved ones, half precisions) is copied in small
boxes first: otherwise NumPy would multiply it without BLAS, and other libraries copy it whole.
"""

from __future__ import annotations

import math

from arraylogchain._array.products.tiling import Tiling, tile_product
from arraylogchain._context import Array, Context, shape_of
from arraylogchain._fold import Box, Fold, Shape, boxes, lengths

# Copied boxes take at most this many times the elements of one elementwise step: 2 MB on a CPU.
_COPIED_BLOCKS = 8


Groups = tuple[Shape, Shape, Shape, Shape]  # lengths of axes: batch, rows, inner, columns


def matmul(ctx: Context, layout: Fold, a: Array, b: Array, budget: int) -> Array:
    """Return a @ b."""
    xp = ctx.xp
    out = ctx.empty(layout.full_shape, ctx.result_dtype)
    groups = (layout.batch, layout.rows, (layout.sizes[3],), layout.cols)
    a, b = layout.view_a(xp, a), layout.view_b(xp, b)
    contract(ctx, a, b, layout.view_out(xp, out), groups, budget)
    return xp.reshape(out, layout.out_shape)


def matmul_gradients(
    ctx: Context,
    layout: Fold,
    a: Array,
    b: Array,
    g: Array,
    budget: int,
    wanted: tuple[bool, bool] = (True, True),
) -> tuple[Array | None, Array | None]:
    """Return the gradients of sum(g * (a @ b)), each of its operand's shape and dtype."""
    xp = ctx.xp
    batch, rows, cols, inner = layout.batch, layout.rows, layout.cols, (layout.sizes[3],)
    g_view = layout.view_out(xp, xp.reshape(g, layout.full_shape))
    nb, nr, nc = len(batch), len(rows), len(cols)
    grad_a = grad_b = None
    if wanted[0]:
        grad_a = ctx.empty(layout.a_shape, a.dtype)
        turned = xp.permute_dims(
            layout.view_b(xp, b), (*range(nb), *range(nb + 1, nb + 1 + nc), nb)
        )
        contract(ctx, g_view, turned, layout.view_a(xp, grad_a), (batch, rows, cols, inner), budget)
        grad_a = xp.reshape(grad_a, shape_of(a))
    if wanted[1]:
        grad_b = ctx.empty(layout.b_shape, b.dtype)
        turned = xp.permute_dims(layout.view_a(xp, a), (*range(nb), nb + nr, *range(nb, nb + nr)))
        contract(ctx, turned, g_view, layout.view_b(xp, grad_b), (batch, inner, rows, cols), budget)
        grad_b = xp.reshape(grad_b, shape_of(b))
    return grad_a, grad_b


def contract(ctx: Context, a: Array, b: Array, out: Array, groups: Groups, budget: int) -> None:
    """Write the sums over `inner` of a times b into `out`.

    Parameters
    ----------
    ctx : Context
        Sums are computed, and added up, in its precision.
    a : array [*batch, *rows, *inner]
    b : array [*batch, *inner, *cols]
    out : array [*batch, *rows, *cols]
        Of any dtype; changed in place.
    groups : tuple of tuple of int
        Lengths of the axes of batch, rows, inner and columns.
    budget : int
        Bytes that temporaries may take.
    """
    batch, rows, inner, cols = groups
    sizes = (math.prod(batch), math.prod(rows), math.prod(cols), math.prod(inner))
    if 0 in sizes:
        out[...] = 0
        return
    item = ctx.precision.itemsize
    nb, nr, ni, nc = (len(group) for group in groups)
    ready_out = _is_ready(ctx, out, (nb, nr, nc))
    if ready_out and _is_ready(ctx, a, (nb, nr, ni)) and _is_ready(ctx, b, (nb, ni, nc)):
        tiling = Tiling(*sizes)
    else:
        limit = min(budget - budget // 4, _COPIED_BLOCKS * ctx.block * item)
        # A factor in half precision is held twice while it is converted; sums of a chunk and of
        # those before it.
        tiling = tile_product(sizes, limit, 2 * item, 3 * item)
    for of_batch in boxes(batch, tiling.batch):
        for of_cols in boxes(cols, tiling.cols):
            right: Array | None = None
            for of_rows in boxes(rows, tiling.rows):
                target = out[(*of_batch, *of_rows, *of_cols)]
                total: Array | None = None
                for of_inner in boxes(inner, tiling.inner):
                    if right is None or tiling.inner < sizes[3]:
                        right = _matrices(ctx, b, (of_batch, of_inner, of_cols))
                    left = _matrices(ctx, a, (of_batch, of_rows, of_inner))
                    if ready_out and tiling.inner == sizes[3]:
                        shape = (left.shape[0], left.shape[1], right.shape[2])
                        _write_product(ctx, left, right, ctx.xp.reshape(target, shape))
                        continue
                    part = ctx.xp.matmul(left, right)
                    total = part if total is None else total + part
                if total is not None:
                    total = ctx.xp.reshape(total, target.shape)
                    target[...] = ctx.xp.astype(total, target.dtype, copy=False)


def _write_product(ctx: Context, left: Array, right: Array, out: Array) -> None:
    if out.shape[0] == 1:
        # Of one entry: no batch to walk over.
        left, right, out = left[0, ...], right[0, ...], out[0, ...]
    ctx.apply(ctx.xp.matmul, left, right, out=out)


def _matrices(ctx: Context, x: Array, box: tuple[Box, Box, Box]) -> Array:
    """Return a box of x as [batch, m, n] that a matrix multiply takes as it is."""
    shape = tuple(math.prod(lengths(group)) for group in box)
    part = ctx.xp.reshape(x[(*box[0], *box[1], *box[2])], shape)
    part = ctx.load(part, ctx.precision)
    if _is_ready(ctx, part, (1, 1, 1)):
        return part
    copy = ctx.empty(shape, part.dtype)
    copy[...] = part
    return copy


def _is_ready(ctx: Context, x: Array, groups: tuple[int, int, int]) -> bool:
    """Tell whether x, its axes merged in three groups, can be multiplied without a copy."""
    strides = _strides(x)
    if strides is None or x.dtype != ctx.dtype(ctx.precision):
        return False
    merged = []
    start = 0
    for count in groups:
        axis = _merge(x.shape[start : start + count], strides[start : start + count])
        if axis is None:
            return False
        merged.append(axis)
        start += count
    _, (m, row), (n, col) = merged
    return (col == 1 and row >= n) or (row == 1 and col >= m)


def _merge(shape: Shape, strides: Shape) -> tuple[int, int] | None:
    """Return length and stride of several axes as one; None where they do not merge."""
    length, stride = 1, None
    for n, step in zip(reversed(shape), reversed(strides), strict=True):
        if n == 1:
            continue
        if stride is None:
            stride = step
        elif step != stride * length:
            return None
        length *= n
    if stride is None:
        # One entry: any stride is as good.
        return 1, strides[-1] if strides else 1
    return length, stride


def _strides(x: Array) -> Shape | None:
    """Return strides in elements, None where a library does not tell them."""
    if hasattr(x, "stride"):
        return tuple(x.stride())
    strides = getattr(x, "strides", None)
    if strides is None:
        return None
    item = x.dtype.itemsize
    if any(step % item for step in strides):
        return None
    return tuple(step // item for step in strides)
