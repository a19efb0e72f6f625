"""An operand of a log product and its exponentials: what the value and the gradients share."""

from __future__ import annotations

from dataclasses import dataclass

from arraylogchain._context import Array, Context, Precision, is_transposed, whole_part
from arraylogchain._fold import Box, Fold, chunks, within

_LOST_PER_TERM = 5.0
_EVERY = slice(None)
# exp(2 * 36) times NARROW_TERMS, and exp(-2 * 36), are normal numbers in float32, and so are those
# of 340 in float64.
NARROW = {"float32": 36.0, "float64": 340.0}
NARROW_TERMS = 2**22
# Products of so few numbers are not cut into tiles.
_SMALL = 1 << 12


def is_small(ctx: Context, layout: Fold) -> bool:
    """Tell whether a product can be multiplied as it is given: what that copies does not count."""
    batch, rows, cols, inner = layout.sizes
    return ctx.is_numpy and batch * (rows * cols + (rows + cols) * inner) <= _SMALL


def certificate_threshold(precision: Precision, inner: int) -> float:
    """Return from where on a sum of `inner` terms is proved right to rounding; see `certified`."""
    return _LOST_PER_TERM * inner * precision.tiny / precision.eps


@dataclass(slots=True)
class Operand:
    """A factor's logarithms [batch, m, n], and what exp needs of them."""

    values: Array
    maxima: Array = None  # along the axis of the terms; None if not needed
    shift: Array = None  # integers, along that axis or one for all; None is 0
    clean: bool = True  # whether there is no +inf or NaN; unknown where gradients need not know
    factor: Array | None = None  # exp(values - shift), where it is kept

    def part(self, box: Box, side: int) -> Operand:
        """Return what a box [batch, rows, cols] of the product needs of the operand on a side."""
        box = (*box[:2], _EVERY) if side == 0 else (box[0], _EVERY, box[2])

        def along(x: Array | None) -> Array | None:
            return None if x is None else x[within(box, x.shape)]

        return Operand(self.values[box], along(self.maxima), along(self.shift))


def terms_of(x: Array, k: slice, side: int) -> Array:
    """Return some terms of an array like the first operand (side 0) or the second (side 1)."""
    return x[..., k, :] if side else x[..., k]


def part_of(x: Array, box: Box, side: int) -> Array:
    """Return what a box [batch, rows, cols] of the product needs of an array like an operand."""
    batch, rows, cols = box
    return x[batch, :, cols] if side else x[batch, rows, :]


def shifted(ctx: Context, x: Array, side: int, precision: Precision) -> Operand:
    """Return an operand shifted by its maxima over the terms."""
    maxima = ctx.xp.max(x, axis=-2 if side else -1, keepdims=True)
    return Operand(x, maxima, whole_part(ctx, maxima, precision))


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

    def fill(box: Box) -> None:
        part = factor[box]
        values = ctx.load(x[box], precision)
        if shift is not None:
            ctx.apply(xp.subtract, values, shift[within(box, shift.shape)], out=part)
            values = part
        ctx.apply(xp.exp, values, out=part)

    ctx.in_blocks(fill, tuple(x.shape), block)
    return factor


def factor_of(
    ctx: Context,
    x: Operand,
    side: int,
    k: slice,
    precision: Precision,
    block: int,
    keep: bool = False,
) -> Array:
    """Return the exponentials of some terms of an operand; with `keep`, those of all are kept."""
    if x.factor is not None:
        return x.factor
    values = terms_of(x.values, k, side)
    factor = exponentials(ctx, values, x.shift, precision, block)
    if not x.clean:
        # What is infinite or NaN itself.
        factor[ctx.xp.isnan(factor)] = 0.0
    if keep and factor.shape == x.values.shape:
        x.factor = factor
    return factor


def multiply_exponentials(
    ctx: Context,
    left: Operand,
    right: Operand,
    out: Array,
    precision: Precision,
    chunk: int,
    block: int,
    keep: bool = False,
) -> None:
    """Write the product of the exponentials into `out`, `chunk` terms at a time."""
    for k in chunks(int(left.values.shape[-1]), chunk):
        of_a, of_b = (
            factor_of(ctx, x, side, k, precision, block, keep)
            for side, x in enumerate((left, right))
        )
        if k.start == 0:
            ctx.apply(ctx.xp.matmul, of_a, of_b, out=out)
        else:
            ctx.apply(ctx.xp.add, out, ctx.xp.matmul(of_a, of_b), out=out)
