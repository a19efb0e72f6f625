"""The exact form of the log product: every entry with its own maximum, in bounded blocks.

Here no entry can underflow against another one, so the result is right whatever the range; it
costs one addition, one comparison and up to one exponential for each term of each sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from arraylogchain._context import Array, Context, Precision
from arraylogchain._fold import blocks, boxes, chunks

# Above this share of entries asked for, all are computed: gathering costs more than it saves.
_GATHER_BELOW = 0.25


def logsumexp_where(
    ctx: Context,
    out: Array,
    a: Array,
    b: Array,
    wanted: Array,
    precision: Precision,
    block: int,
    chunk: int,
) -> Array:
    """Return `out` with the wanted entries of `log(exp(a) @ exp(b))` computed one by one.

    Parameters
    ----------
    ctx : Context
    out : array [batch, rows, cols]
    a : array [batch, rows, K]
    b : array [batch, K, cols]
    wanted : bool array [batch, rows, cols]
        At least one entry is True.
    precision : Precision
        What to compute in.
    block : int
        Terms in memory at a time.
    chunk : int
        Terms of each sum that may be copied at a time.

    Returns
    -------
    array [batch, rows, cols]
        Changed in place, or a new one.
    """
    xp = ctx.xp
    inner = int(a.shape[-1])
    chunk = min(inner, chunk, block)
    entries = Entries(ctx, wanted, precision, max(1, block // chunk))
    parts = ((a[..., k], b[:, k, :]) for k in chunks(inner, chunk))
    tops, totals = entries.tops_and_totals(parts)
    return entries.put(xp.where(xp.isfinite(tops), tops + xp.log(totals), tops), out)


class Entries:
    """Entries of a product [batch, rows, cols], arranged as an array of some `shape`.

    Where many are wanted these are all of them, in nearly square boxes; else a list. A box holds
    few enough entries to hold all their terms.
    """

    def __init__(self, ctx: Context, wanted: Array, precision: Precision, limit: int) -> None:
        xp = ctx.xp
        self.ctx, self.wanted, self.precision = ctx, wanted, precision
        self.shape: tuple[int, ...] = tuple(int(n) for n in wanted.shape)
        self.places: tuple[Array, Array] | None = None
        if int(xp.count_nonzero(wanted)) > _GATHER_BELOW * math.prod(self.shape):
            self.boxes = list(blocks(self.shape, limit))
            return
        at, row, col = xp.nonzero(wanted)
        # Rows of `a` and columns of `b`, numbered through the batch.
        self.places = (row + at * self.shape[1], col + at * self.shape[2])
        self.shape = (int(row.shape[0]),)
        self.boxes = list(boxes(self.shape, limit))

    def reader(self, x: Array, side: int) -> Callable[[Any], Array]:
        """Return a function from a box to what its entries' terms have of x.

        `x` is like the first operand (side 0) or the second (side 1).
        """
        xp, ctx = self.ctx.xp, self.ctx
        x = ctx.transposed(x, self.precision) if side else ctx.load(x, self.precision)
        if self.places is not None:
            place, flat = self.places[side], xp.reshape(x, (-1, x.shape[-1]))
            return lambda box: xp.take(flat, place[box], axis=0)
        if side:
            return lambda box: x[box[0], box[2], :][:, None, :, :]
        return lambda box: x[box[0], box[1], :][:, :, None, :]

    def terms(self, a: Array, b: Array) -> Iterator[tuple[Any, Array]]:
        """Yield (box, the terms a[i, k] + b[k, j] of its entries)."""
        of_a, of_b = self.reader(a, 0), self.reader(b, 1)
        for box in self.boxes:
            yield box, of_a(box) + of_b(box)

    def tops_and_totals(self, parts: Iterator[tuple[Array, Array]]) -> tuple[Array, Array]:
        """Return the maxima of the entries' terms, and the sums of exp(term - maximum).

        The operands come in parts, some terms of each sum at a time.
        """
        xp, ctx = self.ctx.xp, self.ctx
        dtype = ctx.dtype(self.precision)
        tops = xp.full(self.shape, -math.inf, dtype=dtype, device=ctx.device)
        totals = xp.zeros_like(tops)
        for a, b in parts:
            for box, terms in self.terms(a, b):
                top = xp.maximum(tops[box], xp.max(terms, axis=-1))
                shift = xp.where(xp.isfinite(top), top, xp.zeros_like(top))
                ctx.apply(xp.subtract, terms, shift[..., None], out=terms)
                ctx.apply(xp.exp, terms, out=terms)
                totals[box] = totals[box] * xp.exp(tops[box] - shift) + xp.sum(terms, axis=-1)
                tops[box] = top
        return tops, totals

    def select(self, x: Array) -> Array:
        """Return x [batch, rows, cols] in this arrangement."""
        return x if self.places is None else x[self.wanted]

    def put(self, values: Array, out: Array) -> Array:
        """Return `out` [batch, rows, cols], changed in place or new, with these values."""
        if self.places is None:
            return self.ctx.xp.where(self.wanted, values, out)
        out[self.wanted] = values
        return out

    def add(self, box: Any, x: Array, side: int, target: Array) -> None:
        """Add the terms x [..., K] of a box to its rows or columns, target [batch, ..., K]."""
        xp = self.ctx.xp
        if self.places is not None:
            flat = xp.reshape(target, (-1, target.shape[-1]))
            self.ctx.add_at(flat, self.places[side][box], x)
        else:
            target[box[0], box[1 + side], :] += xp.sum(x, axis=2 - side)
