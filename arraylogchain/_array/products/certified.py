"""The certified product: a matrix multiply of exponentials that proves its own entries.

With row shifts r of `a` and column shifts c of `b`, ``S = exp(a - r) @ exp(b - c)`` and
``log(exp(a) @ exp(b)) = log(S) + r + c``. All terms of S are nonnegative, so nothing cancels and
the multiply errs by rounding alone, unless something overflows or underflows.

Where all entries of both operands lie within `operand.NARROW` of 0, nothing can, and no shift is
needed: the result is log(S), whose error is that of the exponentials and of one logarithm.

Otherwise the shifts are the maxima, rounded to integers so that r + c is exact. Nothing overflows,
and underflow shows in S itself:

    Factors are at most exp(1/2). One below `tiny`, the smallest normal number, may be flushed: that
    loses at most tiny * exp(1/2) of its product; a product below it loses at most tiny. One term
    thus loses at most (2 exp(1/2) + 1) tiny < 5 tiny, and a sum of K terms less than 5 K tiny.

    So S_ij >= 5 K tiny / eps proves that underflow cost S_ij less than one eps.

Entries below that threshold are computed again: in float64 where that is wider, and where it does
not help, exactly. Sums whose terms are all -inf are told apart by a multiply of 0/1 masks.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import replace

from arraylogchain import _dispatch, _threads
from arraylogchain._array.products import tiled
from arraylogchain._array.products.operand import (
    NARROW,
    NARROW_TERMS,
    Operand,
    certificate_threshold,
    factor_of,
    is_small,
    multiply_exponentials,
    shifted,
)
from arraylogchain._array.products.tiling import Tiling, elementwise_block, tile_product
from arraylogchain._context import Array, Context
from arraylogchain._fold import Box, Fold, boxes, chunks, within

# One entry in the exact form costs about as much as this many on a matrix multiply.
EXACT_COST = 64
# With this many terms or columns at the most, a multiply costs no more than its exponentials: tiles
# are then so small that BLAS leaves them to one thread (OpenBLAS adds one for each 2**18
# multiplications), and threads share them.
_FEW = 16
_ONE_THREAD = (1 << 19) - 1


def logmatmulexp(ctx: Context, layout: Fold, a: Array, b: Array, budget: int) -> Array:
    """Return log(exp(a) @ exp(b))."""
    if 0 in layout.sizes:
        return ctx.xp.full(layout.out_shape, -math.inf, dtype=ctx.result_dtype, device=ctx.device)
    narrow = layout.sizes[3] <= NARROW_TERMS and ctx.are_within(NARROW[ctx.precision.name], a, b)
    if narrow and is_small(ctx, layout):
        of_a, of_b = (ctx.xp.exp(ctx.load(x, ctx.precision)) for x in (a, b))
        # Of vectors it is a number that NumPy multiplies to, not an array.
        return ctx.xp.asarray(ctx.xp.log(ctx.xp.matmul(of_a, of_b)), dtype=ctx.result_dtype)
    kernel = CertifiedKernel(ctx, layout.sizes, budget, layout.copies, narrow)
    return tiled.run(ctx, layout, a, b, kernel, [ctx.result_dtype])[0]


class CertifiedKernel:
    """log(exp(a) @ exp(b)) for tiles a [batch, rows, K] and panels b [batch, K, cols].

    Entries that cannot be proved are repaired while the tile's factors are let go, so the two
    stages share the workspace, except for the tile's entries. With `narrow`, which says that all
    entries of both are within `NARROW` of 0, nothing needs a shift or a proof.
    """

    def __init__(
        self,
        ctx: Context,
        sizes: tuple[int, int, int, int],
        workspace: int,
        copies: bool,
        narrow: bool = False,
    ) -> None:
        self.ctx, self.narrow = ctx, narrow
        self.precision = ctx.precision
        self.workspace = workspace
        self.dtypes = [ctx.dtype(ctx.precision)]
        self.block, reserved = elementwise_block(ctx, workspace)
        item = ctx.precision.itemsize
        budget = workspace - workspace // 4 - reserved
        batch, rows, cols, inner = sizes
        # Masks of a tile; results that are converted, and what multiplies return.
        direct = ctx.is_numpy and not copies and ctx.result_dtype == self.dtypes[0]
        entry = 5 if direct else 3 * item + 5
        # Where axes cannot be merged in place, a tile of values is copied first.
        self.tiling = tile_product(sizes, budget, item, entry, copied_bytes=item * copies)
        fitting = _ONE_THREAD // (cols * inner)
        self.shares_tiles = (
            ctx.is_numpy and batch == 1 and min(cols, inner) <= _FEW and 0 < 4 * fitting < rows
        )
        if self.shares_tiles:
            self.workspace = workspace // _threads.workers_here()
            half = self.workspace // 2
            small = tile_product(sizes, half, item, entry, copied_bytes=item * copies)
            self.tiling = replace(small, rows=min(small.rows, fitting))

    def panel(self, b: Array) -> Operand:
        """Return columns of `b`, which meet many tiles of `a`, with their exponentials."""
        panel = self._operand(b, 1)
        if self.tiling.inner >= b.shape[-2]:
            factor_of(self.ctx, panel, 1, slice(None), self.precision, self.block, keep=True)
        return panel

    def __call__(self, a: Array, panel: Operand, out: Array) -> None:
        left = self._operand(a, 0)
        self._sums(left, panel, out, self.tiling.inner)
        if self.narrow:
            self.ctx.in_blocks(lambda box: self._log(out[box]), tuple(out.shape), self.block)
            return
        unproved = self._to_logs(out, left, panel)
        if unproved is not None:
            self._repair(out, left, panel, unproved)

    def _operand(self, x: Array, side: int) -> Operand:
        return Operand(x) if self.narrow else shifted(self.ctx, x, side, self.precision)

    def _log(self, part: Array) -> None:
        self.ctx.apply(self.ctx.xp.log, part, out=part)

    def _to_logs(self, sums: Array, left: Operand, right: Operand) -> Array | None:
        """Turn sums into log(sums) + shifts in place; return which are not proved, if any."""
        xp, ctx = self.ctx.xp, self.ctx
        threshold = certificate_threshold(self.precision, int(left.values.shape[-1]))
        failed: list[tuple[Box, Array]] = []

        def convert(box: Box) -> None:
            part = sums[box]
            # A NaN makes this comparison False as well.
            if not xp.min(part) >= threshold:
                failed.append((box, ~(part >= threshold)))
            self._log(part)
            # The shifts are integers, so their sum is exact: one rounding instead of two.
            shift = left.shift[within(box, left.shift.shape)]
            shift = shift + right.shift[within(box, right.shift.shape)]
            ctx.apply(xp.add, part, shift, out=part)

        ctx.in_blocks(convert, tuple(sums.shape), self.block)
        if not failed:
            return None
        unproved = xp.zeros(sums.shape, dtype=xp.bool, device=ctx.device)
        for box, mask in failed:
            unproved[box] = mask
        return unproved

    def _sums(self, left: Operand, right: Operand, out: Array, chunk: int) -> None:
        multiply_exponentials(self.ctx, left, right, out, self.precision, chunk, self.block)

    def _repair(self, out: Array, left: Operand, right: Operand, unproved: Array) -> None:
        """Compute the unproved entries of `out` again, in place, in tiles of their own."""
        xp = self.ctx.xp
        # A NaN operand has made its whole row or column NaN, as it should be.
        unproved = unproved & ~(xp.isnan(left.maxima) | xp.isnan(right.maxima))
        batch, rows, cols = unproved.shape
        # Masks and factors in float64, a transposed copy; indices, sums and logs in float64.
        sizes = (batch, rows, cols, int(left.values.shape[-1]))
        tiling = tile_product(sizes, self.workspace // 4, 24, 64, side=128)
        for at, of_rows in boxes((batch, rows), tiling.batch * tiling.rows):
            for (of_cols,) in boxes((cols,), tiling.cols):
                box = (at, of_rows, of_cols)
                if bool(xp.any(unproved[box])):
                    a, b = left.part(box, 0), right.part(box, 1)
                    out[box] = self._repaired(out[box], a, b, unproved[box], tiling)

    def _repaired(
        self, out: Array, left: Operand, right: Operand, unproved: Array, tiling: Tiling
    ) -> Array:
        """Return one tile with its unproved entries computed again."""
        xp, ctx = self.ctx.xp, self.ctx
        a, b = left.values, right.values
        many = math.prod(unproved.shape) // EXACT_COST
        if int(xp.count_nonzero(unproved)) > many:
            # -inf maxima cannot be mistaken for +inf here.
            infinite = (left.maxima == math.inf) | (right.maxima == math.inf)
            have_terms = infinite | self._have_terms(a, b, tiling.inner)
            out = xp.where(unproved & ~have_terms, xp.full_like(out, -math.inf), out)
            unproved = unproved & have_terms
        if ctx.widest is not self.precision and int(xp.count_nonzero(unproved)) > many:
            wide = copy(self)
            wide.precision = ctx.widest
            sums = ctx.empty(out.shape, ctx.dtype(ctx.widest))
            operands = shifted(ctx, a, 0, ctx.widest), shifted(ctx, b, 1, ctx.widest)
            wide._sums(*operands, sums, tiling.inner)
            still = wide._to_logs(sums, *operands)
            out = xp.where(unproved, xp.astype(sums, out.dtype), out)
            if still is None:
                return out
            unproved = unproved & still
        if not bool(xp.any(unproved)):
            return out
        block = max(1, min(2 * ctx.block, self.workspace // 128))
        return _dispatch.logsumexp_where(
            ctx, out, a, b, unproved, self.precision, block, tiling.inner
        )

    def _have_terms(self, a: Array, b: Array, chunk: int) -> Array:
        """Tell which sums have a term other than -inf, as a product of 0/1 matrices."""
        xp = self.ctx.xp
        dtype = xp.float32
        inner = int(a.shape[-1])
        found: Array | None = None
        for k in chunks(inner, chunk):
            finite_a = xp.astype(a[..., k] > -math.inf, dtype)
            finite_b = xp.astype(b[..., k, :] > -math.inf, dtype)
            hit = xp.matmul(finite_a, finite_b) > 0
            found = hit if found is None else found | hit
        assert found is not None
        return found
