"""The plain product and its gradients.

A matrix multiply is fast on operands whose rows or columns are contiguous. Axes that merge into
such matrices without a copy are multiplied in place, in one call. Other operands (expanded with
stride 0, reversed or interleaved axes, half precisions) are copied in small boxes first: NumPy
would multiply them without BLAS, and other libraries copy them whole.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from arraylogchain._core.axes import Fold, Shape
from arraylogchain._core.context import Array, Context, shape_of
from arraylogchain._products.tiling import Tiles, run_on_views, tile_product

# Copied boxes have at most this many times the elements of an elementwise block: 2 MB on a CPU.
_COPIED_BLOCKS = 8


def matmul(ctx: Context, layout: Fold, a: Array, b: Array, budget: int) -> Array:
    """Return a @ b."""
    xp = ctx.xp
    out = ctx.empty(layout.shapes[2], ctx.result_dtype)
    a, b = layout.view(xp, a, 0), layout.view(xp, b, 1)
    _contract(ctx, layout, a, b, layout.view(xp, out, 2), budget)
    return xp.reshape(out, layout.out_shape)


def matmul_gradients(
    ctx: Context,
    layout: Fold,
    a: Array,
    b: Array,
    g: Array,
    budget: int,
    requested: tuple[bool, bool] = (True, True),
) -> tuple[Array | None, Array | None]:
    """Return the gradients of sum(g * (a @ b)), in the operands' shapes and dtypes."""
    xp, before = ctx.xp, len(layout.batch)
    g = layout.view(xp, g, 2)
    grad_a = grad_b = None
    if requested[0]:
        grad_a = ctx.empty(shape_of(a), a.dtype)
        turned = xp.moveaxis(layout.view(xp, b, 1), before, -1)
        groups = replace(layout, cols=layout.inner, inner=layout.cols)
        _contract(ctx, groups, g, turned, layout.view(xp, grad_a, 0), budget)
    if requested[1]:
        grad_b = ctx.empty(shape_of(b), b.dtype)
        turned = xp.moveaxis(layout.view(xp, a, 0), -1, before)
        groups = replace(layout, rows=layout.inner, inner=layout.rows)
        _contract(ctx, groups, turned, g, layout.view(xp, grad_b, 1), budget)
    return grad_a, grad_b


def _contract(ctx: Context, groups: Fold, a: Array, b: Array, out: Array, budget: int) -> None:
    """Write the contraction of a and b over the axes `inner` into `out`.

    The operands are a [*batch, *rows, *inner] and b [*batch, *inner, *cols], the result is
    [*batch, *rows, *cols], and `groups` has the sizes of these groups of axes. Operands that cannot
    be multiplied in place are copied in tiles, whose temporaries fit the budget.
    """
    axes = groups.batch, groups.rows, groups.cols, groups.inner
    batch, rows, cols, inner = map(math.prod, axes)
    sizes = batch, rows, cols, inner
    if 0 in sizes:
        out[...] = 0
        return
    xp, item, dtype = ctx.xp, ctx.precision.itemsize, ctx.dtype(ctx.precision)
    nb, nr, nc, ni = map(len, axes)
    in_place = _is_ready(out, (nb, nr, nc), dtype)
    if in_place and _is_ready(a, (nb, nr, ni), dtype) and _is_ready(b, (nb, ni, nc), dtype):
        shapes = (batch, rows, inner), (batch, inner, cols), (batch, rows, cols)
        a, b, out = (xp.reshape(x, shape) for x, shape in zip((a, b, out), shapes, strict=True))
        ctx.apply(xp.matmul, a, b, out=out)
        return
    limit = min(budget - budget // 4, _COPIED_BLOCKS * ctx.block * item)
    # An operand in half precision is copied twice; a result also has partial sums and their copies.
    tiling = tile_product(sizes, limit, 2 * item, 4 * item)

    def ready(x: Array) -> Array:
        x = ctx.load(x, ctx.precision)
        if _is_ready(x, (1, 1, 1), dtype):
            return x
        copy = ctx.empty(shape_of(x), x.dtype)
        copy[...] = x
        return copy

    def tile(left: Array, right: Array, target: Array) -> None:
        ctx.apply(xp.matmul, ready(left), right, out=target)

    work = Tiles(tiling, ready, tile, [dtype], cuts_terms=True)
    run_on_views(ctx, replace(groups, sizes=sizes, copies=not in_place), a, b, [out], work)


def _is_ready(x: Array, groups: tuple[int, int, int], dtype: object) -> bool:
    """Return whether x, with axes merged in three groups, can be multiplied without a copy."""
    strides = _strides(x)
    if strides is None or x.dtype != dtype:
        return False
    merged, start = [], 0
    for count in groups:
        # Axes merge if the stride of each is the next one's length times its stride.
        axes = [(x.shape[i], strides[i]) for i in range(start, start + count) if x.shape[i] > 1]
        if any(p != n * q for (_, p), (n, q) in itertools.pairwise(axes)):
            return False
        # The stride of a single entry is arbitrary.
        merged.append((math.prod(n for n, _ in axes), axes[-1][1] if axes else 1))
        start += count
    _, (m, row), (n, col) = merged
    return (col == 1 and row >= n) or (row == 1 and col >= m)


def _strides(x: Array) -> Shape | None:
    """Return strides in elements; None if the library does not have them."""
    if hasattr(x, "stride"):
        return tuple(x.stride())
    strides = getattr(x, "strides", None)
    if strides is None or any(step % x.dtype.itemsize for step in strides):
        return None
    return tuple(step // x.dtype.itemsize for step in strides)
