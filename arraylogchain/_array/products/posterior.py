"""Posterior weights of the terms of a log product, which its derivatives are sums of.

In ``out_ij = log(sum_k exp(a_ik + b_kj))`` the term k has the posterior

    p_ikj = exp(a_ik + b_kj - out_ij),

and every derivative is a sum over p: it is never held as a whole. With the shifted factors of the
certified product, A = exp(a - r) and B = exp(b - c), and their sums S = exp(out - r - c),
``p_ikj = A_ik B_kj / S_ij``, so that for any weights h_ij

    sum_j h_ij p_ikj = A_ik sum_j (h_ij / S_ij) B_kj,

a matrix multiply. It is right to rounding under the same condition as the product itself: S above
`certificate_threshold`. Entries below that are left to float64, where it is wider, and then to
`exact_posterior`; so are those whose h / S would overflow. Entries that are infinite have no
posterior: p is 0 there.
"""

from __future__ import annotations

import math

from arraylogchain._array.products.operand import (
    Operand,
    certificate_threshold,
    factor_of,
    multiply_exponentials,
    part_of,
    shifted,
    terms_of,
)
from arraylogchain._context import Array, Context, Precision
from arraylogchain._fold import Box, boxes, chunks, within

# Where the entries of each operand span at most this, every one of K terms is at least exp(-61),
# or exp(-661), and their sum is above the threshold, 5 K tiny / eps, whatever K.
_SPAN = {"float32": 30.0, "float64": 330.0}
# A result as large as this is known to within 8 eps, and so are the sums that it is the log of.
_PRECISE = 16.0
# Multiplied by this a factor stays finite, summed over 2**25 terms.
_ROOM = 2.0**27


def posterior_operand(ctx: Context, x: Array, side: int, precision: Precision) -> Operand:
    """Return an operand of the product.

    All results that +inf or NaN take part in are infinite or NaN and have no posterior. So the
    shift of a row or column with one of them is +inf, which makes zeros of its exponentials.
    """
    xp = ctx.xp
    top, low = ctx.extremes(x)
    if top - low <= _SPAN[precision.name]:
        dtype = ctx.dtype(precision)
        shift = xp.full((1, 1, 1), float(round(top)), dtype=dtype, device=ctx.device)
        return Operand(x, shift=shift)
    operand = shifted(ctx, x, side, precision)
    if not top < math.inf:
        unusable = ~(operand.maxima < math.inf)
        operand.shift = xp.where(unusable, xp.full_like(operand.shift, math.inf), operand.shift)
        operand.clean = False
    return operand


class Sums:
    """Where the sums over a tile's posterior go: the gradient with respect to one operand.

    Parameters
    ----------
    ctx : Context
    target : array [batch, rows, K] or [batch, K, cols]
    side : int
        Which of the two: 0 or 1.
    fresh : bool
        Whether the first sums that arrive are written instead of being added.
    """

    def __init__(self, ctx: Context, target: Array, side: int, fresh: bool) -> None:
        self.ctx, self.target, self.side, self.fresh = ctx, target, side, fresh

    def part(self, box: Box) -> Sums:
        """Return the sums for a part of the tile [batch, rows, cols]."""
        return Sums(self.ctx, part_of(self.target, box, self.side), self.side, self.fresh)

    def add(self, k: slice, x: Array) -> None:
        """Add the sums of a chunk of terms."""
        xp, target = self.ctx.xp, terms_of(self.target, k, self.side)
        x = xp.astype(x, target.dtype, copy=False)
        if self.fresh:
            target[...] = x
        else:
            self.ctx.apply(xp.add, target, x, out=target)

    def add_product(self, k: slice, left: Array, right: Array, factor: Array) -> None:
        """Add factor * (left @ right), the sums of a chunk of terms."""
        xp, ctx = self.ctx.xp, self.ctx
        target = terms_of(self.target, k, self.side)
        if self.fresh and factor.dtype == target.dtype:
            ctx.apply(xp.matmul, left, right, out=target)
            ctx.in_blocks(
                lambda box: ctx.apply(xp.multiply, target[box], factor[box], out=target[box]),
                tuple(target.shape),
                ctx.block,
            )
        else:
            product = xp.matmul(left, right)
            ctx.apply(xp.multiply, product, factor, out=product)
            self.add(k, product)

    def propagate_nan(self, nan: Array) -> None:
        """Make NaN of what a NaN in the product came from: [batch, rows, 1] or [batch, 1, cols]."""
        xp = self.ctx.xp
        hit = xp.any(nan, axis=-2 if self.side else -1, keepdims=True)
        nans = xp.zeros(hit.shape, dtype=self.target.dtype, device=self.ctx.device)
        nans[hit] = math.nan
        self.target[...] += nans


class ScaledPosterior:
    """The posterior of one tile in factors, where that is proved right."""

    def __init__(
        self, ctx: Context, a: Operand, b: Operand, precision: Precision, chunk: int, block: int
    ) -> None:
        self.ctx, self.a, self.b, self.precision = ctx, a, b, precision
        self.inner = int(a.values.shape[-1])
        self.chunk, self.block = chunk, block
        self.shape = (a.values.shape[0], a.values.shape[1], b.values.shape[2])
        self.weights: Array = None

    def prove(self, out: Array, h: Array, among: Array | None) -> Array | None:
        """Compute the weights h / S where they are proved; 0 elsewhere.

        Parameters
        ----------
        out : array [batch, rows, cols]
            The product.
        h : array [batch, rows, cols]
        among : bool array [batch, rows, cols], optional
            Entries that are asked for; all without it.

        Returns
        -------
        bool array [batch, rows, cols] or None
            Finite entries that are asked for and not proved, where there are any.
        """
        xp, ctx = self.ctx.xp, self.ctx
        self.weights = ctx.empty(self.shape, ctx.dtype(self.precision))
        limit = 2.0**self.precision.top / _ROOM
        largest = 1.0 / certificate_threshold(self.precision, self.inner)
        precise = self._is_precise(out)
        if not precise:
            limits = (self.precision, self.chunk, self.block)
            multiply_exponentials(ctx, self.a, self.b, self.weights, *limits, keep=True)
        left = ctx.empty(self.shape, xp.bool)
        found: list[Box] = []

        def divide(box: Box) -> None:
            part = self.weights[box]
            if precise:
                total = self.a.shift[within(box, self.a.shift.shape)]
                total = total + self.b.shift[within(box, self.b.shift.shape)]
                ctx.apply(xp.subtract, total, out[box], out=part)
                ctx.apply(xp.exp, part, out=part)
            else:
                ctx.apply(xp.divide, xp.ones_like(part), part, out=part)
            proved = part <= largest
            ctx.apply(xp.multiply, part, ctx.load(h[box], self.precision), out=part)
            # A NaN in h stays.
            proved = proved & ~(xp.abs(part) > limit)
            left[box] = ~proved
            if among is None and bool(xp.all(proved)):
                return
            asked = xp.isfinite(out[box])
            if among is not None:
                asked = asked & among[box]
            part[...] = xp.where(asked & proved, part, xp.zeros_like(part))
            left[box] = asked & ~proved
            if bool(xp.any(left[box])):
                found.append(box)

        ctx.in_blocks(divide, self.shape, self.block)
        return left if found else None

    def _is_precise(self, out: Array) -> bool:
        """Tell whether S can be read off the product: finite entries round to within 8 eps."""
        xp = self.ctx.xp
        if self.precision is not self.ctx.precision or out.dtype != self.ctx.dtype(self.precision):
            return False
        if self.ctx.are_within(_PRECISE, out):
            return True
        for box in boxes(self.shape, self.block):
            size = xp.abs(out[box])
            # -inf is an exact zero, and NaN is not looked at.
            if bool(xp.any((size > _PRECISE) & (size < math.inf))):
                return False
        return True

    def accumulate(self, h: Array, sums: list[Sums]) -> None:
        """Add the sums of h p over columns and over rows; the h are those that were proved."""
        for k in chunks(self.inner, self.chunk):
            factors = [
                factor_of(self.ctx, x, side, k, self.precision, self.block, keep=True)
                for side, x in enumerate((self.a, self.b))
            ]
            for s in sums:
                other = self.ctx.xp.matrix_transpose(factors[1 - s.side])
                pair = (other, self.weights) if s.side else (self.weights, other)
                s.add_product(k, *pair, factors[s.side])
