"""The slow road of the products: every output entry with its own maximum, in bounded blocks.

Here no entry can underflow against another one, so the result is right whatever the range; it
costs one addition, one comparison and up to one exponential for each term of each sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

from arraylogchain._arrays import Array, Context, Precision
from arraylogchain._fold import blocks, boxes, chunks

# Above this share of entries asked for, all are computed: gathering costs more than it saves.
_GATHER_BELOW = 0.25
# Above this share of terms near the maximum, all exponentials are taken.
_SPARSE_BELOW = 0.125


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
    count = int(xp.count_nonzero(wanted))
    entries: _Entries
    if count > _GATHER_BELOW * math.prod(wanted.shape):
        entries = _AllEntries(ctx, tuple(wanted.shape), precision, max(1, block // chunk))
    else:
        entries = _SomeEntries(ctx, wanted, precision, max(1, block // chunk))
    values = ctx.empty(entries.shape, ctx.dtype(precision))
    if chunk == inner:
        for where, terms in entries.terms(a, b):
            values[where] = logsumexp(ctx, terms, precision)
    else:
        top = xp.full_like(values, -math.inf)
        for k in chunks(inner, chunk):
            for where, terms in entries.terms(a[..., k], b[:, k, :]):
                top[where] = xp.maximum(top[where], xp.max(terms, axis=-1))
        shift = xp.where(xp.isfinite(top), top, xp.zeros_like(top))
        total = xp.zeros_like(top)
        for k in chunks(inner, chunk):
            for where, terms in entries.terms(a[..., k], b[:, k, :]):
                total[where] += xp.sum(xp.exp(terms - shift[where][..., None]), axis=-1)
        values = xp.where(xp.isfinite(top), shift + xp.log(total), top)
    if isinstance(entries, _AllEntries):
        return xp.where(wanted, values, out)
    out[wanted] = values
    return out


class _Entries(Protocol):
    """Output entries, arranged as an array of some shape."""

    shape: tuple[int, ...]

    def terms(self, a: Array, b: Array) -> Iterator[tuple[Any, Array]]:
        """Yield (index into an array of that shape, the terms a[i, k] + b[k, j] there)."""


class _AllEntries:
    """All entries of a tile, in nearly square blocks."""

    def __init__(
        self, ctx: Context, shape: tuple[int, ...], precision: Precision, limit: int
    ) -> None:
        self.ctx, self.shape, self.precision, self.limit = ctx, shape, precision, limit

    def terms(self, a: Array, b: Array) -> Iterator[tuple[Any, Array]]:
        transposed = self.ctx.transposed(b, self.precision)
        for box in blocks(self.shape, self.limit):
            batch, rows, cols = box
            of_a = self.ctx.load(a[batch, rows, :], self.precision)
            yield box, of_a[:, :, None, :] + transposed[batch, cols, :][:, None, :, :]


class _SomeEntries:
    """Entries picked by a mask, as a list."""

    def __init__(self, ctx: Context, wanted: Array, precision: Precision, limit: int) -> None:
        at, row, col = ctx.xp.nonzero(wanted)
        # Rows of `a` and columns of `b`, numbered through the batch.
        self.row, self.col = row + at * wanted.shape[1], col + at * wanted.shape[2]
        self.ctx, self.precision, self.limit = ctx, precision, limit
        self.shape: tuple[int, ...] = (int(row.shape[0]),)

    def terms(self, a: Array, b: Array) -> Iterator[tuple[Any, Array]]:
        xp, ctx = self.ctx.xp, self.ctx
        of_a = xp.reshape(a, (-1, a.shape[-1]))
        of_b = xp.reshape(ctx.transposed(b, self.precision), (-1, a.shape[-1]))
        for (piece,) in boxes(self.shape, self.limit):
            part = ctx.load(xp.take(of_a, self.row[piece], axis=0), self.precision)
            yield piece, part + xp.take(of_b, self.col[piece], axis=0)


def logsumexp(ctx: Context, terms: Array, precision: Precision) -> Array:
    """Return the log of the sum of exp(terms) over the last axis, with each sum's own maximum.

    Terms more than log(K / eps) + 1 below their maximum cannot change the sum by eps / 2, all K of
    them together. On wide ranges hardly any other term is left beside the maximum, and then the
    exponentials, the costliest step, are taken only of the rows that need them.
    """
    xp = ctx.xp
    top = maximum(ctx, terms)[0]
    inner = int(terms.shape[-1])
    # A NaN threshold selects nothing: infinite and NaN maxima are their own answer.
    finite = xp.isfinite(top)
    reach = math.log(inner / precision.eps) + 1.0
    threshold = xp.where(finite, top - reach, xp.full_like(top, math.nan))
    near = terms >= threshold[..., None]
    count = int(xp.count_nonzero(near))
    if count == int(xp.count_nonzero(finite)):
        return top
    if count > _SPARSE_BELOW * math.prod(terms.shape):
        shift = xp.where(finite, top, xp.zeros_like(top))
        total = xp.sum(xp.exp(terms - shift[..., None]), axis=-1)
        return xp.where(finite, top + xp.log(total), top)
    owner = xp.nonzero(xp.reshape(near, (-1,)))[0] // inner
    result = xp.asarray(xp.reshape(top, (-1,)), copy=True)
    ends = xp.searchsorted(owner, xp.arange(result.shape[0] + 1, device=ctx.device))
    is_crowded = ends[1:] - ends[:-1] > 1
    crowded = xp.nonzero(is_crowded)[0]
    tops = xp.take(result, crowded)
    rows = xp.take(xp.reshape(terms, (-1, inner)), crowded, axis=0)
    result[is_crowded] = tops + xp.log(xp.sum(xp.exp(rows - tops[:, None]), axis=-1))
    return xp.reshape(result, top.shape)


def maximum(ctx: Context, terms: Array) -> tuple[Array, Array]:
    """Return the maxima over the last axis and where they are, the smallest index on ties."""
    index = ctx.xp.argmax(terms, axis=-1, keepdims=True)
    return ctx.xp.take_along_axis(terms, index, axis=-1)[..., 0], index[..., 0]
