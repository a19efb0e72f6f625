"""Derivatives of the max-plus product: each entry hangs on the one term that was reported."""

from __future__ import annotations

from collections.abc import Iterator

from arraylogchain._array.products.tiling import DEFAULT_WORKSPACE
from arraylogchain._context import Array, Context, shape_of
from arraylogchain._fold import Box, Fold, Shape, boxes, fold


def maxplus_gradients(
    ctx: Context,
    a_shape: Shape,
    b_shape: Shape,
    indices: Array,
    g: Array,
    values: Array | None = None,
    budget: int = DEFAULT_WORKSPACE,
) -> tuple[Array, Array]:
    """Return the gradients of sum(g * values), in the precision of the computation.

    Parameters
    ----------
    ctx : Context
    a_shape, b_shape : tuple of int
        Of the operands.
    indices : array
        As the product reported them; there is no gradient through a negative one.
    g : array
        Of the product's shape.
    values : array, optional
        The product; where it is infinite or NaN, there is no gradient.
    budget : int
        Bytes that temporaries may take.
    """
    xp = ctx.xp
    layout = fold(a_shape, b_shape)
    if ctx.takes_kernels(layout):
        from arraylogchain._cuda.products import maxplus

        if values is not None:
            values = xp.reshape(ctx.to_result(values), (-1,))
        g = ctx.to_result(g)
        indices = xp.reshape(indices, (-1,))
        return maxplus.maxplus_gradients(
            ctx.kernels, layout, a_shape, b_shape, values, indices, g, ctx.result_name
        )
    dtype = ctx.dtype(ctx.precision)
    totals = [xp.zeros(shape, dtype=dtype, device=ctx.device) for shape in (a_shape, b_shape)]
    flat = [xp.reshape(total, (-1,)) for total in totals]
    g = xp.reshape(g, layout.full_shape)
    if values is not None:
        values = xp.reshape(values, layout.full_shape)
    for box, at, of_a, of_b in _pieces(ctx, layout, indices, budget):
        weights = ctx.load(g[box], ctx.precision)
        if values is not None:
            weights = xp.where(xp.isfinite(values[box]), weights, xp.zeros_like(weights))
        weights = xp.where(at < 0, xp.zeros_like(weights), weights)
        at = xp.where(at < 0, xp.zeros_like(at), at)
        weights = xp.reshape(weights, (-1,))
        for total, first, step in ((flat[0], of_a, 1), (flat[1], of_b, layout.b_shape[-1])):
            ctx.add_at(total, xp.reshape(first + at * step, (-1,)), weights)
    return totals[0], totals[1]


def maxplus_tangent(
    ctx: Context, indices: Array, da: Array, db: Array, budget: int = DEFAULT_WORKSPACE
) -> Array:
    """Return da[i, k] + db[k, j] at the reported k: how the values change with the operands.

    It is 0 where the index is negative.
    """
    xp = ctx.xp
    layout = fold(shape_of(da), shape_of(db))
    result = xp.zeros(layout.full_shape, dtype=ctx.result_dtype, device=ctx.device)
    flat = [xp.reshape(da, (-1,)), xp.reshape(db, (-1,))]
    for box, at, of_a, of_b in _pieces(ctx, layout, indices, budget):
        steps = (1, layout.b_shape[-1])
        known = at >= 0
        at = xp.where(known, at, xp.zeros_like(at))
        total = xp.zeros(at.shape, dtype=ctx.dtype(ctx.precision), device=ctx.device)
        for x, first, step in zip(flat, (of_a, of_b), steps, strict=True):
            taken = xp.take(x, xp.reshape(first + at * step, (-1,)))
            total += xp.reshape(ctx.load(taken, ctx.precision), at.shape)
        # Not multiplied by 0: a tangent may be infinite.
        total = xp.where(known, total, xp.zeros_like(total))
        result[box] = total if total.dtype == result.dtype else xp.astype(total, result.dtype)
    return xp.reshape(result, layout.out_shape)


def _pieces(
    ctx: Context, layout: Fold, indices: Array, budget: int
) -> Iterator[tuple[Box, Array, Array, Array]]:
    """Yield boxes of the product: its indices there, and where terms of sums begin.

    The last two are the places, in the operands as one axis, of a[..., i, 0] and b[..., 0, j].
    """
    if 0 in layout.sizes:
        return
    xp = ctx.xp
    shape = layout.full_shape
    indices = xp.reshape(indices, shape)
    # Three arrays of indices and two of numbers, and what adding at indices holds.
    for box in boxes(shape, max(1, min(ctx.block // 2, budget // 128))):
        starts = []
        for operand, own in ((layout.a_shape, len(shape) - 2), (layout.b_shape, len(shape) - 1)):
            steps = _steps(operand)
            start = xp.zeros((1,) * len(shape), dtype=indices.dtype, device=ctx.device)
            for axis in (*range(len(shape) - 2), own):
                if operand[axis] > 1:
                    along = [1] * len(shape)
                    along[axis] = -1
                    number = xp.arange(
                        box[axis].start, box[axis].stop, dtype=indices.dtype, device=ctx.device
                    )
                    start = start + xp.reshape(number * steps[axis], tuple(along))
            starts.append(start)
        yield box, indices[box], starts[0], starts[1]


def _steps(shape: Shape) -> list[int]:
    """Return how far neighbours along each axis lie apart in a contiguous array."""
    steps = [1]
    for n in reversed(shape[1:]):
        steps.append(steps[-1] * n)
    return steps[::-1]
