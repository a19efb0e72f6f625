"""Posterior weights of single entries, each with its own maximum: what factors cannot prove."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from arraylogchain._array.products.exact import Entries
from arraylogchain._array.products.operand import Operand, terms_of
from arraylogchain._array.products.posterior import Sums
from arraylogchain._context import Array, Context
from arraylogchain._fold import chunks


class ExactPosterior:
    """The posterior of the wanted entries of one tile, in the widest precision.

    Parameters
    ----------
    ctx : Context
    a : Operand
        Values [batch, rows, K].
    b : Operand
        Values [batch, K, cols].
    wanted : bool array [batch, rows, cols]
        Entries, at least one, whose product is finite.
    block : int
        Terms in memory at a time.
    chunk : int
        Terms of each sum that may be copied at a time.
    """

    def __init__(
        self, ctx: Context, a: Operand, b: Operand, wanted: Array, block: int, chunk: int
    ) -> None:
        self.ctx, self.operands, self.precision = ctx, (a, b), ctx.widest
        inner = int(a.values.shape[-1])
        chunk = min(inner, chunk, block)
        self.entries = Entries(ctx, wanted, self.precision, max(1, block // chunk))
        self.chunks = list(chunks(inner, chunk))
        self.tops: Array | None = None
        if len(self.chunks) > 1:
            parts = (self._logs(k) for k in self.chunks)
            self.tops, self.totals = self.entries.tops_and_totals(parts)

    def _logs(self, k: slice) -> tuple[Array, Array]:
        """Return the chunk k of both operands.

        What entries have in common is taken off first: a + b would be rounded to an eps of it.
        """
        xp, ctx = self.ctx.xp, self.ctx
        # A fourth of the distance between the largest numbers: they stay as they are.
        limit = 2.0**self.precision.top * self.precision.eps / 4
        found = []
        for side, x in enumerate(self.operands):
            shift = ctx.load(x.shift, self.precision)
            shift = xp.where(xp.abs(shift) <= limit, shift, xp.zeros_like(shift))
            found.append(ctx.load(terms_of(x.values, k, side), self.precision) - shift)
        return found[0], found[1]

    def _posteriors(self, k: slice) -> Iterator[tuple[Any, Array]]:
        """Yield (box, p[..., k]) of a few entries at a time."""
        xp, ctx = self.ctx.xp, self.ctx
        for box, p in self.entries.terms(*self._logs(k)):
            if self.tops is None:
                top, total = xp.max(p, axis=-1, keepdims=True), None
            else:
                top, total = self.tops[box][..., None], self.totals[box][..., None]
            ctx.apply(xp.subtract, p, xp.where(xp.isfinite(top), top, xp.zeros_like(top)), out=p)
            ctx.apply(xp.exp, p, out=p)
            total = xp.sum(p, axis=-1, keepdims=True) if total is None else total
            # Entries that are not wanted may have no finite term, or infinite ones.
            ctx.apply(xp.divide, p, xp.where(total > 0, total, xp.ones_like(total)), out=p)
            yield box, p

    def accumulate(self, h: Array, sums: list[Sums]) -> None:
        """Add the sums of h p over columns and over rows, chunk by chunk."""
        xp, ctx, entries = self.ctx.xp, self.ctx, self.entries
        # To what is not wanted nothing is added, not even NaN.
        h = entries.select(xp.where(entries.wanted, ctx.load(h, self.precision), 0.0))
        for k in self.chunks:
            targets = []
            for s in sums:
                size = (entries.wanted.shape[0], entries.wanted.shape[1 + s.side], k.stop - k.start)
                targets.append(xp.zeros(size, dtype=ctx.dtype(self.precision), device=ctx.device))
            for box, p in self._posteriors(k):
                of_h = h[box][..., None]
                # Of entries that are not wanted p may be NaN.
                product = xp.where(of_h == 0, 0.0, p * of_h)
                if bool(xp.any(xp.isinf(of_h))):
                    # Nothing weighs nothing, even infinitely often; NaN stays.
                    product = xp.where((p == 0) & ~xp.isnan(of_h), 0.0, product)
                for s, target in zip(sums, targets, strict=True):
                    entries.add(box, product, s.side, target)
            for s, x in zip(sums, targets, strict=True):
                s.add(k, xp.matrix_transpose(x) if s.side else x)
