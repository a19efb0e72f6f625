"""The exact form of the products: every output entry with its own maximum, in bounded blocks.

Here no entry can underflow against another one, so the result is right whatever the range; it
costs one addition, one comparison and up to one exponential for each term of each sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from arraylogchain._context import Array, Context, Precision
from arraylogchain._fold import blocks, boxes, chunks, within

# Above this share of entries asked for, all are computed: gathering costs more than it saves.
_GATHER_BELOW = 0.25

Shifts = tuple[Array, Array] | None  # of `a` and of `b`


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
    entries = choose_entries(ctx, wanted, precision, max(1, block // chunk))
    if chunk < inner:
        top, total = tops_and_totals(ctx, entries, a, b, chunk)
        return entries.put(xp.where(xp.isfinite(top), top + xp.log(total), top), out)
    values = ctx.empty(entries.shape, ctx.dtype(precision))
    for where, terms in entries.terms(a, b):
        top = xp.max(terms, axis=-1)
        values[where] = xp.where(xp.isfinite(top), top + xp.log(_total(ctx, terms, top)), top)
    return entries.put(values, out)


def tops_and_totals(
    ctx: Context, entries: Entries, a: Array, b: Array, chunk: int
) -> tuple[Array, Array]:
    """Return the maxima of the entries' terms, and the sums of exp(term - maximum).

    The terms are computed twice, `chunk` of each sum at a time.
    """
    xp = ctx.xp
    inner = int(a.shape[-1])
    top = xp.full(entries.shape, -math.inf, dtype=ctx.dtype(entries.precision), device=ctx.device)
    for k in chunks(inner, chunk):
        for where, terms in entries.terms(a[..., k], b[:, k, :]):
            top[where] = xp.maximum(top[where], xp.max(terms, axis=-1))
    total = xp.zeros_like(top)
    for k in chunks(inner, chunk):
        for where, terms in entries.terms(a[..., k], b[:, k, :]):
            total[where] += _total(ctx, terms, top[where])
    return top, total


def _total(ctx: Context, terms: Array, top: Array) -> Array:
    """Return the sums of exp(terms - top), which write over the terms; an infinite top is 0."""
    xp = ctx.xp
    shift = xp.where(xp.isfinite(top), top, xp.zeros_like(top))
    ctx.apply(xp.subtract, terms, shift[..., None], out=terms)
    ctx.apply(xp.exp, terms, out=terms)
    return xp.sum(terms, axis=-1)


class Entries(Protocol):
    """Output entries, arranged as an array of some shape.

    An `index` is one into an array of that shape, and stands for few enough entries to hold all
    their terms.
    """

    shape: tuple[int, ...]
    precision: Precision

    def terms(self, a: Array, b: Array) -> Iterator[tuple[Any, Array]]:
        """Yield (index, the terms a[i, k] + b[k, j] there, less the shifts)."""

    def reader(self, a: Array, b: Array) -> Callable[[Any], Array]:
        """Return a function from an index to the sums a[i, k] + b[k, j] there, as they are."""

    def select(self, x: Array) -> Array:
        """Return x [batch, rows, cols] in this arrangement."""

    def put(self, values: Array, out: Array) -> Array:
        """Return `out` [batch, rows, cols], changed in place or new, with these values."""

    def scatter(self, index: Any, x: Array, rows: Array | None, cols: Array | None) -> None:
        """Add x[..., K] at an index to its rows [batch, rows, K] and columns [batch, cols, K]."""


def choose_entries(
    ctx: Context,
    wanted: Array,
    precision: Precision,
    limit: int,
    shifts: Shifts = None,
) -> Entries:
    """Arrange the wanted entries, `limit` of them to an index.

    `shifts` are taken off `a` and `b` before these are added up: [batch, rows, 1] and
    [batch, 1, cols], or of length 1 where they are the same for all.
    """
    if int(ctx.xp.count_nonzero(wanted)) > _GATHER_BELOW * math.prod(wanted.shape):
        return _AllEntries(ctx, wanted, precision, limit, shifts)
    return _SomeEntries(ctx, wanted, precision, limit, shifts)


class _AllEntries:
    """All entries of a tile, in nearly square blocks."""

    def __init__(
        self, ctx: Context, wanted: Array, precision: Precision, limit: int, shifts: Shifts
    ) -> None:
        self.ctx, self.wanted, self.precision, self.limit = ctx, wanted, precision, limit
        self.shape, self.shifts = tuple(wanted.shape), shifts

    def terms(self, a: Array, b: Array) -> Iterator[tuple[Any, Array]]:
        read = self._reader(a, b, self.shifts)
        for box in blocks(self.shape, self.limit):
            yield box, read(box)

    def reader(self, a: Array, b: Array) -> Callable[[Any], Array]:
        return self._reader(a, b, None)

    def _reader(self, a: Array, b: Array, shifts: Shifts) -> Callable[[Any], Array]:
        transposed = _transposed(self.ctx, b, self.precision, shifts)

        def read(box: Any) -> Array:
            batch, rows, cols = box
            of_a = self.ctx.load(a[batch, rows, :], self.precision)
            if shifts is not None:
                of_a = of_a - shifts[0][within((batch, rows, slice(0, 1)), shifts[0].shape)]
            return of_a[:, :, None, :] + transposed[batch, cols, :][:, None, :, :]

        return read

    def select(self, x: Array) -> Array:
        return x

    def put(self, values: Array, out: Array) -> Array:
        return self.ctx.xp.where(self.wanted, values, out)

    def scatter(self, index: Any, x: Array, rows: Array | None, cols: Array | None) -> None:
        xp = self.ctx.xp
        batch, of_rows, of_cols = index
        wanted = self.wanted[index]
        if not bool(xp.all(wanted)):
            x = xp.where(wanted[..., None], x, xp.zeros_like(x))
        if rows is not None:
            rows[batch, of_rows, :] += xp.sum(x, axis=2)
        if cols is not None:
            cols[batch, of_cols, :] += xp.sum(x, axis=1)


class _SomeEntries:
    """Entries selected by a mask, as a list."""

    def __init__(
        self, ctx: Context, wanted: Array, precision: Precision, limit: int, shifts: Shifts
    ) -> None:
        at, row, col = ctx.xp.nonzero(wanted)
        # Rows of `a` and columns of `b`, numbered through the batch.
        self.row, self.col = row + at * wanted.shape[1], col + at * wanted.shape[2]
        self.ctx, self.wanted, self.precision, self.limit = ctx, wanted, precision, limit
        self.shape: tuple[int, ...] = (int(row.shape[0]),)
        self.shifts = shifts

    def terms(self, a: Array, b: Array) -> Iterator[tuple[Any, Array]]:
        read = self._reader(a, b, self.shifts)
        for (piece,) in boxes(self.shape, self.limit):
            yield piece, read(piece)

    def reader(self, a: Array, b: Array) -> Callable[[Any], Array]:
        return self._reader(a, b, None)

    def _reader(self, a: Array, b: Array, shifts: Shifts) -> Callable[[Any], Array]:
        xp, ctx = self.ctx.xp, self.ctx
        of_a = xp.reshape(a, (-1, a.shape[-1]))
        of_b = xp.reshape(_transposed(ctx, b, self.precision, shifts), (-1, a.shape[-1]))
        shift = None
        if shifts is not None:
            shift = xp.reshape(xp.broadcast_to(shifts[0], (*a.shape[:2], 1)), (-1, 1))

        def read(piece: Any) -> Array:
            part = ctx.load(xp.take(of_a, self.row[piece], axis=0), self.precision)
            if shift is not None:
                part = part - xp.take(shift, self.row[piece], axis=0)
            return part + xp.take(of_b, self.col[piece], axis=0)

        return read

    def select(self, x: Array) -> Array:
        return x[self.wanted]

    def put(self, values: Array, out: Array) -> Array:
        out[self.wanted] = values
        return out

    def scatter(self, index: Any, x: Array, rows: Array | None, cols: Array | None) -> None:
        xp, ctx = self.ctx.xp, self.ctx
        for target, at in ((rows, self.row), (cols, self.col)):
            if target is not None:
                flat = xp.reshape(target, (-1, target.shape[-1]))
                ctx.add_at(flat, at[index], x)


def _transposed(ctx: Context, b: Array, precision: Precision, shifts: Shifts) -> Array:
    """Return a copy of b [batch, K, cols] less its shift as [batch, cols, K]."""
    copy = ctx.transposed(b, precision)
    if shifts is not None:
        ctx.apply(ctx.xp.subtract, copy, ctx.xp.matrix_transpose(shifts[1]), out=copy)
    return copy


def maximum(ctx: Context, terms: Array) -> tuple[Array, Array]:
    """Return the maxima over the last axis and where they are, the smallest index on ties."""
    index = ctx.xp.argmax(terms, axis=-1, keepdims=True)
    return ctx.xp.take_along_axis(terms, index, axis=-1)[..., 0], index[..., 0]
