"""Where the sums over a tile's posterior go."""

from __future__ import annotations

import math

from arraylogchain._context import Array, Context
from arraylogchain._fold import Box


class Sums:
    """The gradient with respect to one operand of a tile.

    Parameters
    ----------
    ctx : Context
    target : array [batch, rows, K] or [batch, K, cols]
    of_a : bool
        Which of the two.
    fresh : bool
        Whether the first sums that arrive are written instead of being added.
    """

    def __init__(self, ctx: Context, target: Array, of_a: bool, fresh: bool) -> None:
        self.ctx, self.target, self.of_a, self.fresh = ctx, target, of_a, fresh

    def part(self, box: Box) -> Sums:
        """Return the sums for a part of the tile [batch, rows, cols]."""
        at, rows, cols = box
        inner = slice(None)
        where = (at, rows, inner) if self.of_a else (at, inner, cols)
        return Sums(self.ctx, self.target[where], self.of_a, self.fresh)

    def _chunk(self, k: slice) -> Array:
        return self.target[..., k] if self.of_a else self.target[..., k, :]

    def add(self, k: slice, x: Array) -> None:
        """Add the sums of a chunk of terms."""
        target = self._chunk(k)
        if x.dtype != target.dtype:
            x = self.ctx.xp.astype(x, target.dtype)
        if self.fresh:
            target[...] = x
        else:
            self.ctx.apply(self.ctx.xp.add, target, x, out=target)

    def add_product(self, k: slice, left: Array, right: Array, factor: Array) -> None:
        """Add factor * (left @ right), the sums of a chunk of terms."""
        xp, ctx = self.ctx.xp, self.ctx
        target = self._chunk(k)
        if self.fresh and factor.dtype == target.dtype:
            ctx.apply(xp.matmul, left, right, out=target)
            ctx.apply(xp.multiply, target, factor, out=target)
        else:
            product = xp.matmul(left, right)
            ctx.apply(xp.multiply, product, factor, out=product)
            self.add(k, product)

    def spoil(self, nan: Array) -> None:
        """Make NaN of what a NaN in the product [batch, rows, cols] came from."""
        xp = self.ctx.xp
        hit = xp.any(nan, axis=-1 if self.of_a else -2, keepdims=True)
        spoilt = xp.zeros(hit.shape, dtype=self.target.dtype, device=self.ctx.device)
        spoilt[hit] = math.nan
        self.target[...] += spoilt
