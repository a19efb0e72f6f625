"""Posterior weights of the terms of a log product, which its derivatives are sums of.

In ``out_ij = log(sum_k exp(a_ik + b_kj))`` the term k has the posterior

    p_ikj = exp(a_ik + b_kj - out_ij),

and every derivative is a sum over p: it is never held as a whole. With the shifted factors of the
certified product, A = exp(a - r) and B = exp(b - c), and their sums S = exp(out - r - c),
``p_ikj = A_ik B_kj / S_ij``, so that for any weights h_ij

    sum_j h_ij p_ikj = A_ik sum_j (h_ij / S_ij) B_kj,

a matrix multiply. It is right to rounding under the same condition as the product itself: S above
`certificate_threshold`. Entries below that are left to float64, where it is wider, and to `exact`;
so are those whose h / S would overflow. Entries that are infinite have no posterior: p is 0 there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from arraylogchain._array.products.operand import (
    Operand,
    certificate_threshold,
    exponentials,
    shifted,
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


def posterior_operand(ctx: Context, x: Array, axis: int, precision: Precision) -> Operand:
    """Return an operand whose terms lie along `axis`; `narrow` if its entries span `_SPAN` at most.

    All results that +inf or NaN take part in are infinite or NaN and have no posterior. So the
    shift of a row or column with one of them is +inf, which makes zeros of its exponentials.
    """
    xp = ctx.xp
    top, low = ctx.extremes(x)
    if top - low <= _SPAN[precision.name]:
        dtype = ctx.dtype(precision)
        shift = xp.full((1, 1, 1), float(round(top)), dtype=dtype, device=ctx.device)
        return Operand(x, shift=shift, narrow=True)
    operand = shifted(ctx, x, axis, precision)
    if not top < math.inf:
        unusable = ~(operand.maxima < math.inf)
        operand.shift = xp.where(unusable, xp.full_like(operand.shift, math.inf), operand.shift)
        operand.clean = False
    return operand


@dataclass(frozen=True, slots=True)
class Moments:
    """What a sum over p is weighted by beside h: ``u_ik + v_kj - q_ij``."""

    u: Array
    v: Array
    q: Array

    def part(self, box: Box) -> Moments:
        at, rows, cols = box
        return Moments(self.u[at, rows, :], self.v[at, :, cols], self.q[box])

    def magnitude(self, ctx: Context) -> float:
        """Return the largest magnitude of all; NaN counts for nothing."""
        return max(abs(x) for array in (self.u, self.v, self.q) for x in ctx.extremes(array))


class Sums:
    """Where the sums over a tile's posterior go: the gradient with respect to one operand.

    Parameters
    ----------
    ctx : Context
    target : array [batch, rows, K] or [batch, K, cols]
    of_a : bool
        Which of the two.
    fresh : bool
        Whether the first sums that arrive are written instead of being added.
    """

    def __init__(self, ctx: Context, target: Array, of_a: bool, fresh: bool) -> None:
        self.ctx, self.target, self.of_a, self.fresh = ctx, target, of_a, fresh

    def part(self, box: Box) -> Sums:
        """Return the sums for a part of the tile [batch, rows, cols]."""
        at, rows, cols = box
        inner = slice(None)
        where = (at, rows, inner) if self.of_a else (at, inner, cols)
        return Sums(self.ctx, self.target[where], self.of_a, self.fresh)

    def _chunk(self, k: slice) -> Array:
        return self.target[..., k] if self.of_a else self.target[..., k, :]

    def add(self, k: slice, x: Array) -> None:
        """Add the sums of a chunk of terms."""
        target = self._chunk(k)
        if x.dtype != target.dtype:
            x = self.ctx.xp.astype(x, target.dtype)
        if self.fresh:
            target[...] = x
        else:
            self.ctx.apply(self.ctx.xp.add, target, x, out=target)

    def add_product(self, k: slice, left: Array, right: Array, factor: Array) -> None:
        """Add factor * (left @ right), the sums of a chunk of terms."""
        xp, ctx = self.ctx.xp, self.ctx
        target = self._chunk(k)
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
        """Make NaN of what a NaN in the product [batch, rows, cols] came from."""
        xp = self.ctx.xp
        hit = xp.any(nan, axis=-1 if self.of_a else -2, keepdims=True)
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
        self.chunk, self.block = min(chunk, self.inner), block
        self.shape = (a.values.shape[0], a.values.shape[1], b.values.shape[2])
        self.weights: Array = None

    def prove(self, out: Array, h: Array | None, among: Array | None, scale: float) -> Array | None:
        """Compute the weights h / S (1 / S without h) where they are proved; 0 elsewhere.

        Parameters
        ----------
        out : array [batch, rows, cols]
            The product.
        h : array [batch, rows, cols], optional
        among : bool array [batch, rows, cols], optional
            Entries that are asked for; all without it.
        scale : float
            The largest number that the weights will be multiplied by.

        Returns
        -------
        bool array [batch, rows, cols] or None
            Finite entries that are asked for and not proved, where there are any.
        """
        self.weights = self.ctx.empty(self.shape, self.ctx.dtype(self.precision))
        limit = 2.0**self.precision.top / _ROOM / max(scale, 1.0)
        precise = self._is_precise(out)
        if not precise:
            for k in chunks(self.inner, self.chunk):
                self._add_product(self.weights, *self._factors(k), first=k.start == 0)
        everywhere = precise and self.a.narrow and self.b.narrow and among is None
        if everywhere and self._divide_all(out, h, limit):
            return None
        return self._divide(out, h, among, limit, summed=not precise)

    def _is_precise(self, out: Array) -> bool:
        """Tell whether S can be read off the product: finite entries round to within 8 eps."""
        xp = self.ctx.xp
        if self.precision is not self.ctx.precision or out.dtype != self.ctx.dtype(self.precision):
            return False
        top, low = self.ctx.extremes(out)
        if top <= _PRECISE and low >= -_PRECISE:
            return True
        for box in boxes(self.shape, self.block):
            size = xp.abs(out[box])
            # -inf is an exact zero, and NaN is not looked at.
            if bool(xp.any((size > _PRECISE) & (size < math.inf))):
                return False
        return True

    def _invert(self, box: tuple[slice, ...], out: Array, part: Array) -> None:
        """Write 1 / S, read off the product, into `part`."""
        xp = self.ctx.xp
        total = self.a.shift[within(box, self.a.shift.shape)]
        total = total + self.b.shift[within(box, self.b.shift.shape)]
        self.ctx.apply(xp.subtract, total, out[box], out=part)
        self.ctx.apply(xp.exp, part, out=part)

    def _divide_all(self, out: Array, h: Array | None, limit: float) -> bool:
        """Compute h / S everywhere; return False where that overflows, or `out` is not finite."""
        xp, ctx = self.ctx.xp, self.ctx
        failed: list[Box] = []

        def divide(box: Box) -> None:
            part = self.weights[box]
            self._invert(box, out, part)
            if h is not None:
                ctx.apply(xp.multiply, part, ctx.load(h[box], self.precision), out=part)
            if not (float(xp.max(part)) <= limit and float(xp.min(part)) >= -limit):
                failed.append(box)

        ctx.in_blocks(divide, self.shape, self.block)
        return not failed

    def _divide(
        self, out: Array, h: Array | None, among: Array | None, limit: float, summed: bool
    ) -> Array | None:
        """Turn sums in the weights into h / S where proved, else into 0."""
        xp, ctx = self.ctx.xp, self.ctx
        largest = 1.0 / certificate_threshold(self.precision, self.inner)
        left = ctx.empty(self.shape, xp.bool)
        found: list[Box] = []

        def divide(box: Box) -> None:
            part = self.weights[box]
            if summed:
                ctx.apply(xp.divide, xp.ones_like(part), part, out=part)
            else:
                self._invert(box, out, part)
            asked = xp.isfinite(out[box])
            if among is not None:
                asked = asked & among[box]
            proved = asked & (part <= largest)
            if h is not None:
                ctx.apply(xp.multiply, part, ctx.load(h[box], self.precision), out=part)
                # A NaN in h stays.
                proved = proved & ~(xp.abs(part) > limit)
            part[...] = xp.where(proved, part, xp.zeros_like(part))
            left[box] = asked & ~proved
            if bool(xp.any(left[box])):
                found.append(box)

        ctx.in_blocks(divide, self.shape, self.block)
        return left if found else None

    def _factors(self, k: slice) -> tuple[Array, Array]:
        """Return the chunk k of both factors; whole ones are kept."""
        if self.chunk < self.inner:
            left, right = self.a.values[..., k], self.b.values[..., k, :]
            return self._factor(self.a, left), self._factor(self.b, right)
        pair = []
        for x in (self.a, self.b):
            if x.factor is None:
                x.factor = self._factor(x, x.values)
            pair.append(x.factor)
        return pair[0], pair[1]

    def _factor(self, x: Operand, values: Array) -> Array:
        xp = self.ctx.xp
        factor = exponentials(self.ctx, values, x.shift, self.precision, self.block)
        if not x.clean:
            # What is infinite or NaN itself.
            factor[xp.isnan(factor)] = 0.0
        return factor

    def _add_product(self, out: Array, left: Array, right: Array, first: bool) -> None:
        xp = self.ctx.xp
        if first:
            self.ctx.apply(xp.matmul, left, right, out=out)
        else:
            self.ctx.apply(xp.add, out, xp.matmul(left, right), out=out)

    def terms(self, u: Array | None, v: Array | None) -> Array:
        """Return sum_k p_ikj (u_ik + v_kj), where the weights are 1 / S; 0 where those are."""
        xp, ctx, inverse = self.ctx.xp, self.ctx, self.weights
        total = xp.zeros_like(inverse)
        for k in chunks(self.inner, self.chunk):
            left, right = self._factors(k)
            if u is not None:
                u_k = ctx.load(u[..., k], self.precision)
                self._add_product(total, left * u_k, right, first=False)
            if v is not None:
                v_k = ctx.load(v[..., k, :], self.precision)
                self._add_product(total, left, right * v_k, first=False)
        return xp.where(inverse == 0, inverse, inverse * total)

    def accumulate(
        self, h: Array, moments: Moments | None, to_a: Sums | None, to_b: Sums | None
    ) -> None:
        """Add the sums of h p (u + v - q) over columns, and over rows, chunk by chunk."""
        xp, ctx, weights = self.ctx.xp, self.ctx, self.weights
        less = None
        if moments is not None:
            less = weights * ctx.load(moments.q, self.precision)
        for k in chunks(self.inner, self.chunk):
            left, right = self._factors(k)
            right_t, left_t = xp.matrix_transpose(right), xp.matrix_transpose(left)
            if moments is None:
                if to_a is not None:
                    to_a.add_product(k, weights, right_t, left)
                if to_b is not None:
                    to_b.add_product(k, left_t, weights, right)
                continue
            u = ctx.load(moments.u[..., k], self.precision)
            v = ctx.load(moments.v[..., k, :], self.precision)
            if to_a is not None:
                part = u * xp.matmul(weights, right_t)
                part += xp.matmul(weights, xp.matrix_transpose(right * v))
                part -= xp.matmul(less, right_t)
                to_a.add(k, self._scaled(part, left))
            if to_b is not None:
                part = v * xp.matmul(left_t, weights)
                part += xp.matmul(xp.matrix_transpose(left * u), weights)
                part -= xp.matmul(left_t, less)
                to_b.add(k, self._scaled(part, right))

    def _scaled(self, sums: Array, factor: Array) -> Array:
        self.ctx.apply(self.ctx.xp.multiply, sums, factor, out=sums)
        return sums
