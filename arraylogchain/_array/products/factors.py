"""Exponentials of shifted operands: what the certified product and its gradients share."""

from __future__ import annotations

from arraylogchain._context import Array, Context, Precision, is_transposed
from arraylogchain._fold import boxes, within

_LOST_PER_TERM = 5.0


def provable_from(precision: Precision, inner: int) -> float:
    """Return the line from which a sum of `inner` terms is proved right to rounding.

    Why it is there is shown in `certified`.
    """
    return _LOST_PER_TERM * inner * precision.tiny / precision.eps


def exponentials(
    ctx: Context, x: Array, shift: Array | None, precision: Precision, block: int
) -> Array:
    """Return exp(x - shift) for x [batch, m, n], in blocks that stay in cache."""
    xp = ctx.xp
    if is_transposed(x):
        # Keep the memory order: strided access would cost more than the exponentials.
        turned = None if shift is None else xp.matrix_transpose(shift)
        return xp.matrix_transpose(
            exponentials(ctx, xp.matrix_transpose(x), turned, precision, block)
        )
    factor = ctx.empty(tuple(x.shape), ctx.dtype(precision))
    for box in boxes(tuple(x.shape), block):
        part = factor[box]
        values = ctx.load(x[box], precision)
        if shift is not None:
            ctx.apply(xp.subtract, values, shift[within(box, shift.shape)], out=part)
            values = part
        ctx.apply(xp.exp, values, out=part)
    return factor
