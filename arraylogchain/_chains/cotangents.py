"""Cotangents of log Z: factors of the gradients of a shard's rows."""

from __future__ import annotations

import math

from arraylogchain._backends.shards import Shard
from arraylogchain._chains.accumulate import bounded
from arraylogchain._core.context import Array
from arraylogchain._core.precision import Precision


class Cotangents:
    """Cotangents of the rows of a shard, as finite numbers; zero where log Z is infinite.

    Parameters
    ----------
    shard : Shard
    precision : Precision
        That of the shard's messages.
    cotangent : array [*batch] or None
        None for ones, if marginals and counts are computed.
    log_z : array [groups, rows]
        Of the shard, up to its scale; where it is NaN the cotangent becomes NaN.

    Attributes
    ----------
    values : array [groups, rows]
        In the widest precision.
    is_zero : bool array [1, groups, rows] or None
        None if no cotangent is zero.
    smallest, largest : float
        Magnitudes of the nonzero ones.
    """

    def __init__(
        self, shard: Shard, precision: Precision, cotangent: Array | None, log_z: Array
    ) -> None:
        ctx, xp, self.shard, self.precision = shard.ctx, shard.ctx.xp, shard, precision
        values = xp.ones_like(log_z)
        if cotangent is not None:
            values = ctx.load(shard.read(cotangent), ctx.widest)
            values = bounded(ctx, values, ctx.dtype(precision))
        self.values = xp.where(xp.isinf(log_z), 0.0, values + 0.0 * log_z)
        magnitudes, self.is_zero = xp.abs(self.values), None
        self.smallest, self.largest = float(xp.min(magnitudes)), float(xp.max(magnitudes))
        if not self.smallest > 0:
            self.is_zero = (magnitudes == 0)[None, ...]
            self.smallest = float(xp.min(xp.where(magnitudes > 0, magnitudes, 1.0)))

    def over(self, normalizers: Array) -> Array | None:
        """Return cotangents over normalizers of linear weights, if these certify the quotients.

        Parameters
        ----------
        normalizers : array [n, groups, rows] or [groups, rows]

        Returns
        -------
        array or None
            None where a normalizer or a cotangent is too close to underflow or overflow.
        """
        ctx, (lowest, highest) = self.shard.ctx, self.precision.cotangents
        if not (self.smallest >= lowest and self.largest <= highest):
            return None
        if not ctx.are_between(normalizers, *self.precision.normalizers):
            return None
        return ctx.load(self.values, self.precision) / normalizers

    def log_threshold(self) -> float:
        """Return the log of an eps of the smallest count, which need not be accurate."""
        return math.log(self.precision.eps) + math.log(self.smallest)
