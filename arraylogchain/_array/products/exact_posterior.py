"""Posterior weights of single entries, each with its own maximum: what `posterior` cannot prove."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from arraylogchain._array.products import exact
from arraylogchain._array.products.operand import Operand
from arraylogchain._array.products.posterior import Moments, Sums
from arraylogchain._context import Array, Context, Precision
from arraylogchain._fold import chunks


class ExactPosterior:
    """The posterior of the wanted entries of one tile.

    Parameters
    ----------
    ctx : Context
    a : Operand
        Values [batch, rows, K].
    b : Operand
        Values [batch, K, cols].
    wanted : bool array [batch, rows, cols]
        Entries, at least one, whose product is finite.
    precision : Precision
        What to compute in.
    block : int
        Terms in memory at a time.
    chunk : int
        Terms of each sum that may be copied at a time.
    """

    def __init__(
        self,
        ctx: Context,
        a: Operand,
        b: Operand,
        wanted: Array,
        precision: Precision,
        block: int,
        chunk: int,
    ) -> None:
        self.ctx, self.a, self.b, self.precision = ctx, a.values, b.values, precision
        self.wanted = wanted
        self.inner = int(self.a.shape[-1])
        self.chunk = min(self.inner, chunk, block)
        # What entries have in common is taken off first: a + b would be rounded to an eps of it.
        shifts = (_bounded(ctx, a.shift, precision), _bounded(ctx, b.shift, precision))
        limit = max(1, block // self.chunk)
        self.entries = exact.choose_entries(ctx, wanted, precision, limit, shifts)
        self.tops: Array | None = None
        self.totals: Array | None = None
        if self.chunk < self.inner:
            self.tops, self.totals = exact.tops_and_totals(
                ctx, self.entries, self.a, self.b, self.chunk
            )

    def _posteriors(self, k: slice) -> Iterator[tuple[Any, Array]]:
        """Yield (index, p[..., k]) of a few entries at a time."""
        xp, ctx = self.ctx.xp, self.ctx
        for where, p in self.entries.terms(self.a[..., k], self.b[:, k, :]):
            if self.tops is None or self.totals is None:
                top = xp.max(p, axis=-1, keepdims=True)
                top = xp.where(xp.isfinite(top), top, xp.zeros_like(top))
                ctx.apply(xp.subtract, p, top, out=p)
                ctx.apply(xp.exp, p, out=p)
                total = xp.sum(p, axis=-1, keepdims=True)
            else:
                top = self.tops[where][..., None]
                total = self.totals[where][..., None]
                p = xp.exp(p - xp.where(xp.isfinite(top), top, xp.zeros_like(top)))
            # Entries that are not wanted may have no finite term, or infinite ones.
            ctx.apply(xp.divide, p, xp.where(total > 0, total, xp.ones_like(total)), out=p)
            yield where, p

    def terms(self, u: Array | None, v: Array | None) -> Array:
        """Return sum_k p_ikj (u_ik + v_kj) [batch, rows, cols]; 0 where it is not wanted."""
        xp, ctx = self.ctx.xp, self.ctx
        dtype = ctx.dtype(self.precision)
        found = xp.zeros(self.entries.shape, dtype=dtype, device=ctx.device)
        for k in chunks(self.inner, self.chunk):
            gather = self._along(k, u, v)
            for where, p in self._posteriors(k):
                found[where] += xp.sum(_product(xp, p, gather(where)), axis=-1)
        result = xp.zeros(self.wanted.shape, dtype=dtype, device=ctx.device)
        return self.entries.put(found, result)

    def accumulate(
        self, h: Array, moments: Moments | None, to_a: Sums | None, to_b: Sums | None
    ) -> None:
        """Add the sums of h p (u + v - q) over columns, and over rows, chunk by chunk."""
        xp, ctx = self.ctx.xp, self.ctx
        dtype = ctx.dtype(self.precision)
        batch, rows, cols = self.wanted.shape
        h = self.entries.select(ctx.load(h, self.precision))
        q = None
        if moments is not None:
            q = self.entries.select(ctx.load(moments.q, self.precision))
        for k in chunks(self.inner, self.chunk):
            size = k.stop - k.start
            over_cols = xp.zeros((batch, rows, size), dtype=dtype, device=ctx.device)
            over_rows = xp.zeros((batch, cols, size), dtype=dtype, device=ctx.device)
            gather = None if moments is None else self._along(k, moments.u, moments.v)
            for where, p in self._posteriors(k):
                p = _product(xp, p, h[where][..., None])
                if gather is not None and q is not None:
                    p = _product(xp, p, gather(where) - q[where][..., None])
                self.entries.scatter(
                    where,
                    p,
                    over_cols if to_a is not None else None,
                    over_rows if to_b is not None else None,
                )
            if to_a is not None:
                to_a.add(k, over_cols)
            if to_b is not None:
                to_b.add(k, xp.matrix_transpose(over_rows))

    def _along(self, k: slice, u: Array | None, v: Array | None) -> Callable[[Any], Array]:
        """Return a function that gives u_ik + v_kj of a few entries."""
        ctx = self.ctx

        def zeros(x: Array) -> Array:
            return ctx.xp.zeros(x.shape, dtype=ctx.dtype(self.precision), device=ctx.device)

        a, b = self.a[..., k], self.b[:, k, :]
        of_u = zeros(a) if u is None else u[..., k]
        of_v = zeros(b) if v is None else v[:, k, :]
        return self.entries.reader(of_u, of_v)


def _bounded(ctx: Context, shift: Array, precision: Precision) -> Array:
    """Return a shift that no finite number becomes infinite without; 0 where it might."""
    xp = ctx.xp
    shift = ctx.load(shift, precision)
    # A fourth of the distance between the largest numbers: they stay as they are.
    limit = 2.0**precision.top * precision.eps / 4
    return xp.where(xp.abs(shift) <= limit, shift, xp.zeros_like(shift))


def _product(xp: Any, p: Array, x: Array) -> Array:
    """Return p * x, where nothing weighs nothing even times infinity; NaN stays."""
    product = p * x
    if bool(xp.any(xp.isinf(x))):
        product = xp.where((p == 0) & ~xp.isnan(x), xp.zeros_like(product), product)
    return product
