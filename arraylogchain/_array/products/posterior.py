"""Posterior weights of the terms of a log product, which its derivatives are sums of.

In ``out_ij = log(sum_k exp(a_ik + b_kj))`` the term k has the posterior

    p_ikj = exp(a_ik + b_kj - out_ij),

and every derivative is a sum over p: it is never held as a whole. With the shifted factors of the
certified product, A = exp(a - r) and B = exp(b - c), and their sums S = exp(out - r - c),
``p_ikj = A_ik B_kj / S_ij``, so that for any weights h_ij

    sum_j h_ij p_ikj = A_ik sum_j (h_ij / S_ij) B_kj,

a matrix multiply. It is right to rounding under the same condition as the product itself: S above
`provable_from`. Entries below that line are left to float64, where it is wider, and to `exact`; so
are those whose h / S would overflow. Entries that are infinite have no posterior: p is 0 there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from arraylogchain._array.products.factors import exponentials, provable_from
from arraylogchain._array.products.sums import Sums
from arraylogchain._context import Array, Context, Precision, whole_maximum
from arraylogchain._fold import boxes, chunks, within

# Where the entries of each operand span at most this, every one of K terms is at least exp(-61),
# or exp(-661), and their sum is above the line, 5 K tiny / eps, whatever K.
_SPAN = {"float32": 30.0, "float64": 330.0}
# A result as large as this is known to within 8 eps, and so are the sums that it is the log of.
_PRECISE = 16.0
# Multiplied by this a factor stays finite, summed over 2**25 terms.
_ROOM = 2.0**27


@dataclass(slots=True)
class Operand:
    """A factor's logarithms [batch, m, n], and what exp needs of them.

    All results that +inf or NaN take part in are infinite or NaN and have no posterior. So the
    shift of a row or column with one of them is +inf, which makes zeros of its exponentials.
    """

    values: Array
    shift: Array  # along its axis, or a single number
    narrow: bool = False  # whether all entries are finite and within _SPAN of each other
    clean: bool = True  # whether there is no +inf or NaN
    nan: Array | None = None  # along its axis: where there is a NaN, if anywhere
    factor: Array | None = None


def operand(ctx: Context, x: Array, axis: int, precision: Precision) -> Operand:
    """Prepare an operand whose terms lie along `axis`."""
    xp = ctx.xp
    top, low = float(xp.max(x)), float(xp.min(x))
    if top - low <= _SPAN[precision.name]:
        dtype = ctx.dtype(precision)
        shift = xp.full((1, 1, 1), float(round(top)), dtype=dtype, device=ctx.device)
        return Operand(x, shift, narrow=True)
    shift = whole_maximum(ctx, x, axis, precision)
    if top < math.inf:
        return Operand(x, shift)
    tops = xp.max(x, axis=axis, keepdims=True)
    nan = xp.isnan(tops)
    shift = xp.where((tops == math.inf) | nan, xp.full_like(shift, math.inf), shift)
    return Operand(x, shift, clean=False, nan=nan if math.isnan(top) else None)


@dataclass(frozen=True, slots=True)
class Moments:
    """What a sum over p is weighted by beside h: ``u_ik + v_kj - q_ij``."""

    u: Array
    v: Array
    q: Array


class Scaled:
    """The posterior of one tile in factors, where that is proved right."""

    def __init__(
        self, ctx: Context, a: Operand, b: Operand, precision: Precision, chunk: int, block: int
    ) -> None:
        self.ctx, self.a, self.b, self.precision = ctx, a, b, precision
        self.inner = int(a.values.shape[-1])
        self.chunk, self.block = min(chunk, self.inner), block
        self.shape = (a.values.shape[0], a.values.shape[1], b.values.shape[2])

    def weights(
        self, out: Array, h: Array | None, among: Array | None, scale: float = 1.0
    ) -> tuple[Array, Array | None]:
        """Return h / S (1 / S without h) where that is proved, else 0, and what is left to prove.

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
        weights : array [batch, rows, cols]
        left : bool array [batch, rows, cols] or None
            Finite entries that are asked for and not proved, where there are any.
        """
        weights = self.ctx.empty(self.shape, self.ctx.dtype(self.precision))
        limit = 2.0**self.precision.top / _ROOM / max(scale, 1.0)
        precise = self._is_precise(out)
        if not precise:
            self._sums(weights)
        whole = precise and self.a.narrow and self.b.narrow and among is None
        if whole and self._divide_all(weights, out, h, limit):
            return weights, None
        return weights, self._divide(weights, out, h, among, limit, summed=not precise)

    def _is_precise(self, out: Array) -> bool:
        """Tell whether S can be read off the product: finite entries round to within 8 eps."""
        xp = self.ctx.xp
        if self.precision is not self.ctx.precision or out.dtype != self.ctx.dtype(self.precision):
            return False
        for box in boxes(self.shape, self.block):
            size = xp.abs(out[box])
            # -inf is an exact zero, and NaN is not looked at.
            if not bool(xp.max(size) <= _PRECISE) and bool(
                xp.any((size > _PRECISE) & (size < math.inf))
            ):
                return False
        return True

    def _invert(self, box: tuple[slice, ...], out: Array, part: Array) -> None:
        """Write 1 / S, read off the product, into `part`."""
        xp = self.ctx.xp
        total = self.a.shift[within(box, self.a.shift.shape)]
        total = total + self.b.shift[within(box, self.b.shift.shape)]
        self.ctx.apply(xp.subtract, total, out[box], out=part)
        self.ctx.apply(xp.exp, part, out=part)

    def _divide_all(self, weights: Array, out: Array, h: Array | None, limit: float) -> bool:
        """Write h / S everywhere; return False where that overflows, or `out` is not finite."""
        xp, ctx = self.ctx.xp, self.ctx
        for box in boxes(self.shape, self.block):
            part = weights[box]
            self._invert(box, out, part)
            if h is not None:
                ctx.apply(xp.multiply, part, ctx.load(h[box], self.precision), out=part)
            if not (float(xp.max(part)) <= limit and float(xp.min(part)) >= -limit):
                return False
        return True

    def _divide(
        self,
        weights: Array,
        out: Array,
        h: Array | None,
        among: Array | None,
        limit: float,
        summed: bool,
    ) -> Array | None:
        """Turn sums in `weights` into h / S where proved, else into 0."""
        xp, ctx = self.ctx.xp, self.ctx
        largest = 1.0 / provable_from(self.precision, self.inner)
        left = ctx.empty(self.shape, xp.bool)
        found = False
        for box in boxes(self.shape, self.block):
            part = weights[box]
            if summed:
                ctx.apply(xp.divide, xp.ones_like(part), part, out=part)
            else:
                self._invert(box, out, part)
            asked = xp.isfinite(out[box])
            if among is not None:
                asked = asked & among[box]
            proved = asked & (part <= largest)
            if h is not None:
                part = part * ctx.load(h[box], self.precision)
                # A NaN in h stays.
                proved = proved & ~(xp.abs(part) > limit)
            weights[box] = xp.where(proved, part, xp.zeros_like(part))
            left[box] = asked & ~proved
            found = found or bool(xp.any(left[box]))
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

    def _sums(self, out: Array) -> None:
        for k in chunks(self.inner, self.chunk):
            self._add_product(out, *self._factors(k), first=k.start == 0)

    def _add_product(self, out: Array, left: Array, right: Array, first: bool) -> None:
        xp = self.ctx.xp
        if first:
            self.ctx.apply(xp.matmul, left, right, out=out)
        else:
            self.ctx.apply(xp.add, out, xp.matmul(left, right), out=out)

    def terms(self, inverse: Array, u: Array | None, v: Array | None) -> Array:
        """Return sum_k p_ikj (u_ik + v_kj), with `inverse` = 1 / S; 0 where that is."""
        xp, ctx = self.ctx.xp, self.ctx
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

    def push(
        self,
        weights: Array,
        moments: Moments | None,
        to_a: Sums | None,
        to_b: Sums | None,
    ) -> None:
        """Hand over the sums of h p (u + v - q) over columns, and over rows, chunk by chunk."""
        xp, ctx = self.ctx.xp, self.ctx
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
            less = weights * ctx.load(moments.q, self.precision)
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
