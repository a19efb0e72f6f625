"""Sums of a shard's marginals, weighted by cotangents of log Z."""

from __future__ import annotations

import math

from arraylogchain._chains.accumulate import Accumulator, bounded
from arraylogchain._chains.passes import Pass, last_logs, log_sum
from arraylogchain._core.context import Array
from arraylogchain._core.precision import DOUBLE, SINGLE


class ShardSums:
    """An accumulator of the marginals of a shard, and the cotangents that they are weighted by.

    Parameters
    ----------
    forward_pass : Pass
        Has run.
    accumulator : Accumulator
    cotangent : array [*batch] or None
        Of log Z; None for ones, if marginals and counts are computed.

    Attributes
    ----------
    shard : Shard
    workspace : int
        Bytes for temporaries.
    precision : Precision
        That of the shard's messages.
    unscaled_log_z : array [groups, rows]
        Up to the scale of the last message. log Z may overflow through its scale while the
        marginals are well defined.
    cotangents : array [groups, rows]
        Finite numbers in the widest precision; zero where log Z is infinite, NaN where it is NaN.
    is_zero : bool array [1, groups, rows] or None
        None if no cotangent is zero.
    smallest, largest : float
        Magnitudes of the nonzero cotangents.
    """

    def __init__(
        self, forward_pass: Pass, accumulator: Accumulator, cotangent: Array | None
    ) -> None:
        shard, last, self.accumulator = forward_pass.shard, forward_pass.carry, accumulator
        ctx, xp, self.shard, self.workspace = shard.ctx, shard.ctx.xp, shard, forward_pass.workspace
        self.precision = precision = DOUBLE if last.values.dtype == xp.float64 else SINGLE
        self.unscaled_log_z = log_z = log_sum(xp, last_logs(shard, last).values)
        values = xp.ones_like(log_z)
        if cotangent is not None:
            values = ctx.load(shard.read(cotangent), ctx.widest)
            values = bounded(ctx, values, ctx.dtype(precision))
        self.cotangents = xp.where(xp.isinf(log_z), 0.0, values + 0.0 * log_z)
        magnitudes, self.is_zero = xp.abs(self.cotangents), None
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
        return ctx.load(self.cotangents, self.precision) / normalizers

    def log_threshold(self) -> float:
        """Return the log of an eps of the smallest count, which need not be accurate."""
        return math.log(self.precision.eps) + math.log(self.smallest)

    @property
    def panel_size(self) -> int:
        """Largest number of matrix entries at a time; each takes ten float64 numbers."""
        return self.workspace // (8 * 10)
