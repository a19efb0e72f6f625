"""The certified product: a matrix multiply of exponentials that certifies its own entries.

With row shifts r of `a` and column shifts c of `b`, ``S = exp(a - r) @ exp(b - c)`` and
``log(exp(a) @ exp(b)) = log(S) + r + c``. All terms of S are nonnegative, so nothing cancels and
the multiply errs by rounding alone, unless something overflows or underflows. The shifts are the
maxima, rounded to integers: r + c is exact, nothing overflows, and underflow shows in S itself:

    Factors are at most exp(1/2), or 2 for linear weights. One below `tiny`, the smallest normal
    number, may be flushed: that loses at most tiny * 2 of its product; a product below it loses at
    most tiny. One term thus loses less than 5 tiny, and a sum of K terms less than 5 K tiny.

    So S_ij >= 5 K tiny / eps certifies that underflow cost S_ij less than one eps.

Entries below that threshold are recomputed: in float64 if that is wider, and those that are still
not certified directly, with their own maximum. Sums whose terms are all -inf are recognized by a
product of 0/1 masks.

A direct log-sum-exp is right whatever the range; it costs one addition, one comparison and up to
one exponential for each term. Compiled loops do it for NumPy; `_Entries` serves other libraries,
and terms that are +inf or NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from arraylogchain import _select
from arraylogchain._core.axes import Box, Fold, boxes, chunks, within
from arraylogchain._core.context import Array, Context
from arraylogchain._core.precision import threshold
from arraylogchain._core.scaled import finite_or_zero
from arraylogchain._products.operand import Operand
from arraylogchain._products.tiling import Tiles, run, tile_product, with_small_blocks

# Where all entries are at most this far from 0, sums are in range and above the threshold without
# any shift, for up to 2**22 terms: exp(-2 * 34) > 5 tiny / eps.
UNSHIFTED_RANGE = {"float32": 34.0, "float64": 335.0}
_UNSHIFTED_TERMS = 2**22
# Operands and product of at most this many entries are multiplied without tiling.
_SMALL = 1 << 12
# A directly recomputed entry costs about as much as this many in a matrix multiply.
_COST = 64


def logmatmulexp(ctx: Context, layout: Fold, a: Array, b: Array, budget: int) -> Array:
    """Return log(exp(a) @ exp(b))."""
    if ctx.kernels is not None:
        from arraylogchain._products import cuda

        result = cuda.logmatmulexp(ctx, layout, a, b, budget)
        if result is not None:
            return result
    xp = ctx.xp
    if 0 in layout.sizes:
        return xp.full(layout.out_shape, -math.inf, dtype=ctx.result_dtype, device=ctx.device)
    inner = layout.sizes[3]
    is_unshifted = inner <= _UNSHIFTED_TERMS and ctx.are_within(
        UNSHIFTED_RANGE[ctx.precision.name], a, b
    )
    if is_unshifted and is_small(ctx, layout):
        a_weights, b_weights = (xp.exp(ctx.load(x, ctx.precision)) for x in (a, b))
        # NumPy's product of vectors is a scalar.
        return xp.asarray(xp.log(xp.matmul(a_weights, b_weights)), dtype=ctx.result_dtype)
    ctx, workspace = with_small_blocks(ctx, budget)
    item, precision = ctx.precision.itemsize, ctx.precision
    # Bytes of an entry: masks of a tile, converted results, and temporaries of the multiply.
    direct = ctx.is_numpy and not layout.copies and ctx.result_dtype == ctx.dtype(precision)
    entry = 5 if direct else 3 * item + 5
    scratch = workspace - workspace // 4
    tiling = tile_product(
        layout.sizes, scratch, item * (1 + layout.copies), entry, 512, layout.copies
    )

    def panel(x: Array) -> Operand:
        right = Operand(ctx, x, 1, shifts=not is_unshifted)
        return right.cache_weights() if tiling.inner == inner else right

    def tile(x: Array, right: Operand, out: Array) -> None:
        left = Operand(ctx, x, 0, shifts=not is_unshifted)
        certified_product(ctx, left, right, out, workspace, tiling.inner)

    tiles = Tiles(tiling, panel, tile, [ctx.dtype(precision)])
    return run(ctx, layout, a, b, tiles, [ctx.result_dtype])[0]


def is_small(ctx: Context, layout: Fold) -> bool:
    """Return whether a product is so small that the memory of its copies is negligible."""
    batch, rows, cols, inner = layout.sizes
    return ctx.is_numpy and batch * (rows * cols + (rows + cols) * inner) <= _SMALL


def certified_product(
    ctx: Context,
    left: Operand,
    right: Operand,
    out: Array,
    workspace: int,
    chunk: int | None = None,
    lower_limit: Array | None = None,
) -> None:
    """Write log(exp(left) @ exp(right)), less the scales of the operands, into `out`.

    Parameters
    ----------
    ctx : Context
    left, right : Operand
        Logs or weights [batch, M, K] and [batch, K, N].
    out : array [batch, M, N]
        Of the dtype of the precision; any strides.
    workspace : int
        Bytes for temporaries, besides the weights of both operands.
    chunk : int, optional
        Number of terms whose weights are in memory at a time; default: all of them.
    lower_limit : array, optional
        Lower limits, as logarithms that broadcast to `out`. Entries proved to lie below theirs are
        not recomputed: their absolute error is negligible to the caller.
    """
    multiply_weights(ctx, left, right, out, chunk)
    uncertified = _take_logs(ctx, out, left, right)
    if uncertified is None:
        return
    # A NaN has already made its whole row or column NaN.
    xp, inner = ctx.xp, int(left.values.shape[-1])
    uncertified = uncertified & ~(xp.isnan(left.maxima) | xp.isnan(right.maxima))
    if lower_limit is not None:
        offsets = (x.offset for x in (left, right) if x.offset is not None)
        largest = sum(offsets, start=math.log(threshold(left.precision, inner)))
        uncertified = uncertified & ((largest >= lower_limit) | xp.isnan(out))
    for box, num_terms in recomputed_boxes(ctx, uncertified, inner, workspace, 24):
        uncertified_part, dense_count = uncertified[box], math.prod(uncertified[box].shape) // _COST
        a, b = left.part(box), right.part(box)
        if int(xp.count_nonzero(uncertified_part)) > dense_count:
            # Maxima of +inf make terms; rows and columns with NaN are excluded above.
            have_terms = (a.maxima == math.inf) | (b.maxima == math.inf)
            for k in chunks(inner, num_terms):
                have_terms = have_terms | (xp.matmul(a.present(k), b.present(k)) > 0)
            out[box] = xp.where(uncertified_part & ~have_terms, -math.inf, out[box])
            uncertified_part = uncertified_part & have_terms
        num_uncertified = int(xp.count_nonzero(uncertified_part))
        if num_uncertified > dense_count and ctx.widest is not left.precision:
            # Entries certified in float32 are certified in float64 too.
            wide = ctx.empty(uncertified_part.shape, ctx.dtype(ctx.widest))
            a, b = left.part(box, ctx.widest), right.part(box, ctx.widest)
            certified_product(ctx, a, b, wide, workspace // 2, num_terms)
            out[box] = xp.where(uncertified_part, xp.astype(wide, out.dtype), out[box])
        elif num_uncertified:
            logsumexp_where(ctx, out[box], a, b, uncertified_part, num_terms)


def multiply_weights(
    ctx: Context, left: Operand, right: Operand, out: Array, chunk: int | None = None
) -> None:
    """Write the product of the weights into `out`, `chunk` terms at a time."""
    inner = int(left.values.shape[-1])
    for k in chunks(inner, chunk or inner):
        a, b = left.weights(k), right.weights(k)
        if k.start == 0:
            ctx.multiply(a, b, out)
        else:
            ctx.apply(ctx.xp.add, out, ctx.multiply(a, b), out=out)


def _take_logs(ctx: Context, sums: Array, left: Operand, right: Operand) -> Array | None:
    """Turn sums into log(sums) + offsets, in place; return a mask of uncertified ones, or None."""
    xp, uncertified = ctx.xp, None
    smallest = threshold(left.precision, int(left.values.shape[-1]))
    offsets = [x.offset for x in (left, right) if x.offset is not None]
    for box in boxes(sums.shape, ctx.block):
        part = sums[box]
        # A NaN makes this comparison False as well.
        if not xp.min(part) >= smallest:
            if uncertified is None:
                uncertified = xp.zeros(sums.shape, dtype=xp.bool, device=ctx.device)
            uncertified[box] = ~(part >= smallest)
        ctx.apply(xp.log, part, out=part)
        if offsets:
            # The offsets are integers, so their sum is exact: one rounding instead of two.
            total = sum(x[within(box, x.shape)] for x in offsets)
            ctx.apply(xp.add, part, total, out=part)
    return uncertified


def recomputed_boxes(
    ctx: Context, uncertified: Array, inner: int, workspace: int, item: int
) -> Iterator[tuple[Box, int]]:
    """Yield boxes that have uncertified entries, and the number of terms to use at a time.

    `item` is the number of bytes for each element of both operands.
    """
    batch, rows, cols = (int(n) for n in uncertified.shape)
    # 64 bytes for each entry: indices, sums and logs in float64.
    tiling = tile_product((batch, rows, cols, inner), workspace // 4, item, 64, side=128)
    for at, row_box in boxes((batch, rows), tiling.batch * tiling.rows):
        for (col_box,) in boxes((cols,), tiling.cols):
            box = (at, row_box, col_box)
            if bool(ctx.xp.any(uncertified[box])):
                yield box, tiling.inner


def logsumexp_where(
    ctx: Context, out: Array, left: Operand, right: Operand, requested: Array, chunk: int
) -> None:
    """Write the requested entries of `log(exp(left) @ exp(right))`, at least one, into `out`.

    Parameters
    ----------
    ctx : Context
    out : array [batch, rows, cols]
    left, right : Operand
        [batch, rows, K] and [batch, K, cols]; the computation has their precision.
    requested : bool array [batch, rows, cols]
    chunk : int
        Most terms of a sum that are copied at a time.
    """
    xp = ctx.xp
    loops = _loops(ctx, left, right, chunk)
    if loops is not None:
        loops.logsumexp_where(out, left.logs(), right.logs(), requested)
        return
    entries = _Entries((left, right), False, requested, chunk)
    maxima, term_sums = entries.maxima_and_sums()
    values = xp.where(xp.isfinite(maxima), maxima + xp.log(term_sums), maxima)
    out[requested] = xp.astype(values, out.dtype, copy=False)


def gradients_where(
    ctx: Context, left: Operand, right: Operand, requested: Array, h: Array, chunk: int
) -> Iterator[tuple[slice, tuple[Array, Array]]]:
    """Yield gradients of the sum of h times the requested entries of a log product, by terms k.

    With softmax weights ``p_ikj = exp(a_ik + b_kj - out_ij)`` they are the sums of h_ij p_ikj over
    columns, [batch, rows, k], and over rows, [batch, cols, k]. Infinite entries contribute 0.
    """
    xp = ctx.xp
    loops = _loops(ctx, left, right, chunk)
    if loops is not None:
        logs = left.shifted_logs(), right.shifted_logs()
        yield slice(None), loops.gradients_where(*logs, requested, h)
        return
    entries = _Entries((left, right), True, requested, chunk)
    maxima, term_sums = entries.maxima_and_sums()
    maxima = xp.where(xp.isfinite(maxima), maxima, math.inf)
    weights = ctx.load(h[requested], left.precision)
    for k, lines in entries.lines():
        sums = [xp.zeros_like(x) for x in lines]
        for e, terms in entries.terms(lines):
            p = xp.exp(terms - maxima[e][:, None]) / term_sums[e][:, None]
            # A softmax weight of 0 times an infinite cotangent is 0.
            softmax_weights = xp.where(p > 0, p * weights[e][:, None], 0.0)
            for x, place in zip(sums, entries.places, strict=True):
                ctx.add_at(x, place[e], softmax_weights)
        batch = requested.shape[0]
        yield k, tuple(xp.reshape(x, (batch, -1, x.shape[-1])) for x in sums)


def _loops(ctx: Context, left: Operand, right: Operand, chunk: int) -> Any:
    """Return the module of compiled loops if they can compute a product, else None."""
    if not _select.has_loops(ctx) or left.values.shape[-1] > chunk:
        return None
    if not all(ctx.xp.max(x.maxima) < math.inf for x in (left, right)):
        return None
    from arraylogchain._products import compiled

    return compiled


class _Entries:
    """A list of the requested entries of a product, and the terms of their sums.

    Attributes
    ----------
    places : (integer array, integer array)
        Row and column of each entry, numbered through the batch.
    """

    def __init__(
        self, operands: tuple[Operand, Operand], shifted: bool, requested: Array, chunk: int
    ) -> None:
        ctx, self.operands, self.shifted = operands[0].ctx, operands, shifted
        self.ctx, (at, row, col) = ctx, ctx.xp.nonzero(requested)
        self.places = row + at * requested.shape[1], col + at * requested.shape[2]
        self.inner = int(operands[0].values.shape[-1])
        self.chunk = min(self.inner, chunk, ctx.block)

    def lines(self) -> Iterator[tuple[slice, list[Array]]]:
        """Yield slices of terms k, with the terms of all rows and of all columns, [lines, k]."""
        xp = self.ctx.xp
        for k in chunks(self.inner, self.chunk):
            left, right = (x.shifted_logs(k) if self.shifted else x.logs(k) for x in self.operands)
            copies = (xp.asarray(x, copy=True) for x in (left, right.mT))
            yield k, [xp.reshape(x, (-1, x.shape[-1])) for x in copies]

    def terms(self, lines: list[Array]) -> Iterator[tuple[slice, Array]]:
        """Yield slices of entries, and their terms [entries, k]."""
        take, (rows, columns) = self.ctx.xp.take, lines
        for e in chunks(int(self.places[0].shape[0]), max(1, self.ctx.block // self.chunk)):
            row, column = (place[e] for place in self.places)
            yield e, take(rows, row, axis=0) + take(columns, column, axis=0)

    def maxima_and_sums(self) -> tuple[Array, Array]:
        """Return, for each entry, the maximum of its terms and the sum of exp(term - maximum)."""
        xp, ctx = self.ctx.xp, self.ctx
        dtype = ctx.dtype(self.operands[0].precision)
        term_sums = xp.zeros(self.places[0].shape, dtype=dtype, device=ctx.device)
        maxima = term_sums - math.inf
        for _, lines in self.lines():
            for e, terms in self.terms(lines):
                top = xp.maximum(maxima[e], xp.max(terms, axis=-1))
                shift = finite_or_zero(xp, top)
                ctx.apply(xp.subtract, terms, shift[:, None], out=terms)
                ctx.apply(xp.exp, terms, out=terms)
                term_sums[e] = term_sums[e] * xp.exp(maxima[e] - shift) + xp.sum(terms, axis=-1)
                maxima[e] = top
        return maxima, term_sums
