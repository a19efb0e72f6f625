"""Gradients of the log product: sums of softmax weights times cotangents.

In ``out_ij = log(sum_k exp(a_ik + b_kj))`` the term k has the softmax weight ``p_ikj = exp(a_ik +
b_kj - out_ij)``. With the weights A and B of the certified product and its sums S, that is
``A_ik B_kj / S_ij``, so that for any cotangents g

    sum_j g_ij p_ikj = A_ik sum_j (g_ij / S_ij) B_kj,

a matrix multiply, right to rounding where the product itself is certified. Other entries, and those
whose g / S would overflow, are recomputed: in float64 if that is wider, then directly. Infinite
entries contribute 0.

Broadcast axes are summed by the fold: with operands [*batch, *rows, K] and [*batch, K, *cols], the
gradient of the first sums over columns and that of the second over rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from arraylogchain._core.axes import Box, Fold, boxes, chunks, within
from arraylogchain._core.context import Array, Context, shape_of
from arraylogchain._core.precision import threshold
from arraylogchain._products import certified
from arraylogchain._products.operand import Operand, PullbackInputs
from arraylogchain._products.tiling import panels, tile_product, with_small_blocks

# Rows and columns of a tile, if they fit: sums over tiles are updated once per tile.
_SIDE = 1024
# A result of at most this magnitude is known to within 8 eps, and so is its exponential.
_PRECISE = 16.0
# Quotients are this far below the largest number, so that sums of 2**25 terms stay finite.
_HEADROOM = 2.0**27
# Quotients up to this times exponentials of operands near 0 have finite sums in float32.
_LARGEST_WEIGHT = 1e15

Pair = tuple[Array | None, Array | None]


def logmatmulexp_gradients(
    ctx: Context,
    layout: Fold,
    arrays: PullbackInputs,
    budget: int,
    requested: tuple[bool, bool] = (True, True),
    propagates_nan: Array | bool = True,
) -> Pair:
    """Return the gradients of sum(g * logmatmulexp(a, b)), in the operands' shapes and dtypes.

    Those of half precisions are summed in float32 arrays. A NaN in an operand makes gradients of
    its line NaN; with `propagates_nan` False, or a flag of an array on a device, it contributes 0
    instead, as +inf does.
    """
    if ctx.kernels is not None:
        from arraylogchain._products import cuda

        result = cuda.gradients(ctx, layout, arrays, budget, requested, propagates_nan)
        if result is not None:
            return result
        propagates_nan = bool(propagates_nan)
    xp, precision, (batch, rows, cols, inner) = ctx.xp, ctx.precision, layout.sizes
    a, b, out, g = arrays
    small = layout.is_identity and a.ndim == b.ndim > 1
    if small and certified.is_small(ctx, layout) and (pair := _small(ctx, a, b, g)):
        return pair[0] if requested[0] else None, pair[1] if requested[1] else None
    gradient_sums = {
        side: xp.zeros(shape, dtype=ctx.dtype(precision), device=ctx.device)
        for side, shape in enumerate([(batch, rows, inner), (batch, inner, cols)])
        if requested[side]
    }
    views = layout.view(xp, a, 0), layout.view(xp, b, 1)
    out_view, g_view = (layout.view(xp, x, 2) for x in (out, g))
    ctx, scratch = with_small_blocks(ctx, budget)
    # Two operands and one product of their size; quotients, masks, and copies of entries.
    item, copied = precision.itemsize, precision.itemsize * layout.copies
    entry, tile_budget = 2 * item + 2 * copied + 2, scratch - budget // 4
    tiling = tile_product(layout.sizes, tile_budget, 2 * item + copied, entry, _SIDE, layout.copies)
    for places in panels(layout, tiling) if 0 not in layout.sizes else ():
        right = None
        for at in places:
            right = right or Operand(ctx, at.read(xp, views[1], 1), 1, finite=True)
            left = Operand(ctx, at.read(xp, views[0], 0), 0, finite=True)
            sums = {side: _part(x, at.flat, side) for side, x in gradient_sums.items()}
            tile = _Tile(ctx, (left, right), sums, tiling.inner)
            tile.add(at.read(xp, out_view, 2), at.read(xp, g_view, 2), scratch)
            if propagates_nan:
                tile.propagate_nan()
    gradients: list[Array | None] = [None, None]
    for side, x in gradient_sums.items():
        like = (a, b)[side]
        x = xp.reshape(layout.restored(xp, x, side), shape_of(like))
        gradients[side] = xp.astype(x, like.dtype, copy=False)
    return gradients[0], gradients[1]


def _small(ctx: Context, a: Array, b: Array, g: Array) -> tuple[Array, Array] | None:
    """Return both gradients of a small product without shifts; None if that is not certified."""
    if not ctx.are_within(certified.UNSHIFTED_RANGE[ctx.precision.name], a, b):
        return None
    a_logs, b_logs, g = (ctx.load(x, ctx.precision) for x in (a, b, g))
    left, right = np.exp(a_logs), np.exp(b_logs)
    weights = g / (left @ right)
    # False for infinities and NaN too.
    if not ctx.are_within(_LARGEST_WEIGHT, weights):
        return None
    # A nonzero g over a large sum must not underflow.
    if np.count_nonzero(abs(weights) >= ctx.precision.tiny) < np.count_nonzero(g):
        return None
    da, db = left * (weights @ right.mT), right * (left.mT @ weights)
    return ctx.cast(da, a.dtype), ctx.cast(db, b.dtype)


@dataclass(frozen=True, slots=True)
class _Tile:
    """A tile of a product, and views of the gradients that it adds to."""

    ctx: Context
    operands: tuple[Operand, Operand]  # [batch, rows, K] and [batch, K, cols]
    sums: dict[int, Array]  # by side, of the same shapes
    chunk: int  # terms whose weights are in memory at a time

    def add(self, out: Array, g: Array, workspace: int) -> None:
        """Add the sums of g times softmax weights; `out` is the product."""
        ctx, xp, precision = self.ctx, self.ctx.xp, self.ctx.precision
        requested, inner = xp.isfinite(out), int(self.operands[0].values.shape[-1])
        precise = out.dtype == ctx.dtype(precision) and ctx.are_within(_PRECISE, out)
        uncertified = self._add_certified(out if precise else None, g, requested)
        if uncertified is None:
            return
        for box, chunk in certified.recomputed_boxes(ctx, uncertified, inner, workspace, 40):
            left, right = (x.part(box, ctx.widest) for x in self.operands)
            sums = {side: _part(x, box, side) for side, x in self.sums.items()}
            tile = _Tile(ctx, (left, right), sums, chunk)
            uncertified_part: Array | None = uncertified[box]
            if ctx.widest is not precision:
                uncertified_part = tile._add_certified(None, g[box], uncertified_part)
            if uncertified_part is not None:
                pair = left, right
                parts = certified.gradients_where(ctx, *pair, uncertified_part, g[box], chunk)
                for k, (da, db) in parts:
                    tile._add_sums(0, k, da)
                    tile._add_sums(1, k, db.mT)

    def _add_certified(self, out: Array | None, g: Array, requested: Array) -> Array | None:
        """Add the certified entries among `requested`; return a mask of the rest, or None."""
        ctx, xp, (left, right) = self.ctx, self.ctx.xp, self.operands
        precision, inner, uncertified = left.precision, int(left.values.shape[-1]), None
        if self.chunk >= inner:
            left.cache_weights()
            right.cache_weights()
        quotients = ctx.empty(tuple(g.shape), ctx.dtype(precision))
        if out is None:
            certified.multiply_weights(ctx, left, right, quotients, self.chunk)
        limit, smallest = 2.0**precision.top / _HEADROOM, threshold(precision, inner)
        for box in boxes(quotients.shape, ctx.block):
            part, requested_part = quotients[box], requested[box]
            if out is not None:
                offsets = (x.shift[within(box, x.shift.shape)] for x in (left, right))
                part[...] = xp.exp(out[box] - sum(offsets))
            is_certified = part >= smallest
            ctx.apply(xp.divide, ctx.load(g[box], precision), part, out=part)
            # NaN in g passes this test and stays.
            is_certified = is_certified & ~(xp.abs(part) > limit)
            if bool(xp.all(is_certified & requested_part)):
                continue
            part[...] = xp.where(requested_part & is_certified, part, 0.0)
            if uncertified is None and bool(xp.any(requested_part & ~is_certified)):
                uncertified = xp.zeros(g.shape, dtype=xp.bool, device=ctx.device)
            if uncertified is not None:
                uncertified[box] = requested_part & ~is_certified
        for k in chunks(inner, self.chunk):
            a, b = left.weights(k), right.weights(k)
            if 0 in self.sums:
                self._add_sums(0, k, ctx.multiply(quotients, b.mT), a)
            if 1 in self.sums:
                self._add_sums(1, k, ctx.multiply(a.mT, quotients), b)
        return uncertified

    def _add_sums(self, side: int, k: slice, sums: Array, factor: Array | None = None) -> None:
        """Add the sums of a slice of terms, times a factor if given."""
        xp = self.ctx.xp
        if factor is not None:
            self.ctx.apply(xp.multiply, sums, factor, out=sums)
        if side in self.sums:
            total = self.sums[side]
            target = total[:, k, :] if side else total[:, :, k]
            self.ctx.apply(xp.add, target, xp.astype(sums, target.dtype, copy=False), out=target)

    def propagate_nan(self) -> None:
        """Set sums to NaN that a NaN contributed to; +inf meeting -inf does not count as one."""
        xp = self.ctx.xp
        for nan in (xp.isnan(operand.maxima) for operand in self.operands):
            for side, total in self.sums.items() if bool(xp.any(nan)) else ():
                hit = xp.any(nan, axis=-2 if side else -1, keepdims=True)
                total[...] = xp.where(hit, math.nan, total)


def _part(x: Array, box: Box, side: int) -> Array:
    """Return the part of an array shaped like an operand for a box [batch, rows, cols]."""
    return x[box[0], :, box[2]] if side else x[box[0], box[1], :]
