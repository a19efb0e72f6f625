"""The certified product: a matrix multiply of exponentials that proves its own entries.

With row shifts r of `a` and column shifts c of `b`, ``S = exp(a - r) @ exp(b - c)`` and
``log(exp(a) @ exp(b)) = log(S) + r + c``. All terms of S are nonnegative, so nothing cancels and
the multiply errs by rounding alone, unless something overflows or underflows.

Where all entries of both operands lie within `_NARROW` of 0, nothing can, and no shift is needed:
the result is log(S), whose error is that of the exponentials and of one logarithm.

Otherwise the shifts are the maxima, rounded to integers so that r + c is exact. Nothing overflows,
and underflow shows in S itself:

    Factors are at most exp(1/2). One below `tiny`, the smallest normal number, may be flushed: that
    loses at most tiny * exp(1/2) of its product; a product below it loses at most tiny. One term
    thus loses at most (2 exp(1/2) + 1) tiny < 5 tiny, and a sum of K terms less than 5 K tiny.

    So S_ij >= 5 K tiny / eps proves that underflow cost S_ij less than one eps.

Entries below that line are computed again: in float64 where that is wider, and where it does not
help, exactly. Sums whose terms are all -inf are told apart by a multiply of 0/1 masks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from arraylogchain._array.products import exact
from arraylogchain._array.products.factors import exponentials, provable_from
from arraylogchain._array.products.tiling import Tiling, tile_product
from arraylogchain._context import Array, Context, Precision, whole_maximum
from arraylogchain._fold import boxes, chunks, within

# exp(2 * 36) times _NARROW_TERMS, and exp(-2 * 36), are normal numbers in float32, and so are those
# of 340 in float64.
_NARROW = {"float32": 36.0, "float64": 340.0}
_NARROW_TERMS = 2**22
# One entry on the exact road costs about as much as this many on a matrix multiply.
_EXACT_COST = 64


@dataclass(slots=True)
class Panel:
    """Columns of `b` that meet many tiles of `a`, with what is computed of them on the way."""

    values: Array  # [batch, K, cols]
    narrow: bool  # whether exp(values) needs no shift
    shift: Array | None = None  # [batch, 1, cols]
    factor: Array | None = None  # exp(values - shift)


class CertifiedKernel:
    """log(exp(a) @ exp(b)) for tiles a [batch, rows, K] and panels b [batch, K, cols].

    Entries that cannot be proved are repaired while the tile's factors are let go, so the two
    stages share the workspace, except for the tile's entries.
    """

    def __init__(
        self, ctx: Context, sizes: tuple[int, int, int, int], workspace: int, copies: bool
    ) -> None:
        self.ctx = ctx
        self.precision = ctx.precision
        self.line = provable_from(ctx.precision, sizes[3])
        # Elementwise steps hold a few temporaries of a block.
        self.block = max(1, min(ctx.block, workspace // (32 * ctx.precision.itemsize)))
        item = ctx.precision.itemsize
        budget = workspace - workspace // 4 - 4 * item * self.block
        # Where axes cannot be merged in place, a tile of values is copied first.
        self.tiling = tile_product(sizes, budget, item, 3 * item + 2, copied_bytes=item * copies)
        self.dtypes = [ctx.dtype(ctx.precision)]
        self.workspace = workspace

    def panel(self, b: Array) -> Panel:
        return Panel(b, self._is_narrow(b))

    def __call__(self, a: Array, panel: Panel, out: Array) -> None:
        xp, chunk = self.ctx.xp, self.tiling.inner
        if panel.narrow and self._is_narrow(a):
            if panel.shift is not None:
                panel.shift = panel.factor = None
            self._sums(a, None, panel, self.precision, chunk, out)
            self.ctx.apply(xp.log, out, out=out)
            return
        shift = whole_maximum(self.ctx, a, -1, self.precision)
        if panel.shift is None:
            panel.shift, panel.factor = (
                whole_maximum(self.ctx, panel.values, -2, self.precision),
                None,
            )
        self._sums(a, shift, panel, self.precision, chunk, out)
        # A NaN makes this comparison False as well.
        proved = bool(xp.min(out) >= self.line)
        unproved = None if proved else ~(out >= self.line)
        self._to_logs(out, shift, panel.shift)
        if unproved is not None:
            panel.factor = None
            self._repair(out, a, panel.values, unproved)

    def _is_narrow(self, x: Array) -> bool:
        xp, limit = self.ctx.xp, _NARROW[self.precision.name]
        if x.shape[-1] > _NARROW_TERMS or x.shape[-2] > _NARROW_TERMS:
            return False
        # False for NaN.
        return bool(xp.max(x) <= limit) and bool(xp.min(x) >= -limit)

    def _to_logs(self, sums: Array, row_shift: Array, col_shift: Array) -> None:
        """Turn sums into log(sums) + row_shift + col_shift, in place, in blocks."""
        xp, ctx = self.ctx.xp, self.ctx
        for box in boxes(tuple(sums.shape), self.block):
            part = sums[box]
            ctx.apply(xp.log, part, out=part)
            # The shifts are integers, so their sum is exact: one rounding instead of two.
            total = (
                row_shift[within(box, row_shift.shape)] + col_shift[within(box, col_shift.shape)]
            )
            ctx.apply(xp.add, part, total, out=part)

    def _sums(
        self,
        a: Array,
        a_shift: Array | None,
        panel: Panel,
        precision: Precision,
        chunk: int,
        out: Array,
    ) -> None:
        """Write exp(a - a_shift) @ exp(b - b_shift) into `out`, the terms in chunks."""
        xp, ctx = self.ctx.xp, self.ctx
        inner = int(a.shape[-1])
        if chunk >= inner:
            if panel.factor is None:
                panel.factor = self._factor(panel.values, panel.shift, precision)
            ctx.apply(xp.matmul, self._factor(a, a_shift, precision), panel.factor, out=out)
            return
        for k in chunks(inner, chunk):
            part = xp.matmul(
                self._factor(a[..., k], a_shift, precision),
                self._factor(panel.values[..., k, :], panel.shift, precision),
            )
            out[...] = part if k.start == 0 else out + part

    def _factor(self, x: Array, shift: Array | None, precision: Precision) -> Array:
        return exponentials(self.ctx, x, shift, precision, self.block)

    def _repair(self, out: Array, a: Array, b: Array, unproved: Array) -> None:
        """Compute the unproved entries of `out` again, in place, in tiles of their own."""
        xp = self.ctx.xp
        a_top = xp.max(a, axis=-1, keepdims=True)
        b_top = xp.max(b, axis=-2, keepdims=True)
        # A NaN operand has made its whole row or column NaN, as it should be.
        unproved = unproved & ~(xp.isnan(a_top) | xp.isnan(b_top))
        batch, rows, cols = unproved.shape
        # Masks and factors in float64, a transposed copy; indices, sums and logs in float64.
        tiling = tile_product(
            (batch, rows, cols, int(a.shape[-1])), self.workspace // 4, 24, 64, side=128
        )
        for at, of_rows in boxes((batch, rows), tiling.batch * tiling.rows):
            for (of_cols,) in boxes((cols,), tiling.cols):
                box = (at, of_rows, of_cols)
                if not bool(xp.any(unproved[box])):
                    continue
                # -inf or NaN maxima cannot be mistaken for +inf here.
                infinite = (a_top[at, of_rows, :] == math.inf) | (b_top[at, :, of_cols] == math.inf)
                out[box] = self._repaired(
                    out[box],
                    a[at, of_rows, :],
                    b[at, :, of_cols],
                    unproved[box],
                    infinite,
                    tiling,
                )

    def _repaired(
        self, out: Array, a: Array, b: Array, unproved: Array, infinite: Array, tiling: Tiling
    ) -> Array:
        """Return one tile with its unproved entries computed again."""
        xp, ctx = self.ctx.xp, self.ctx
        many = math.prod(unproved.shape) // _EXACT_COST
        if int(xp.count_nonzero(unproved)) > many:
            have_terms = infinite | self._have_terms(a, b, tiling.inner)
            out = xp.where(unproved & ~have_terms, xp.full_like(out, -math.inf), out)
            unproved = unproved & have_terms
        if ctx.widest is not self.precision and int(xp.count_nonzero(unproved)) > many:
            wide = ctx.widest
            panel = Panel(b, False, whole_maximum(ctx, b, -2, wide))
            shift = whole_maximum(ctx, a, -1, wide)
            sums = ctx.empty(tuple(out.shape), ctx.dtype(wide))
            self._sums(a, shift, panel, wide, tiling.inner, sums)
            still = unproved & ~(sums >= provable_from(wide, int(a.shape[-1])))
            self._to_logs(sums, shift, panel.shift)
            out = xp.where(unproved, xp.astype(sums, out.dtype), out)
            unproved = still
        if not bool(xp.any(unproved)):
            return out
        block = max(1, min(2 * ctx.block, self.workspace // 128))
        return exact.logsumexp_where(ctx, out, a, b, unproved, self.precision, block, tiling.inner)

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
