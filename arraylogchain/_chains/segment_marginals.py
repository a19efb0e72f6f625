"""State and pair marginals of one segment of steps.

With ``alpha`` the forward messages, ``beta`` the backward messages, and ``beta_x`` the backward
messages times the potentials of their own step, ``beta_x_t = exp(x_t) * beta_t``,

    p(s_t = k)               =  alpha_t[k] * beta_t[k] / Z_t
    p(s_t = k, s_{t+1} = j)  =  alpha_t[k] * P_t[k, j] * beta_x_{t+1}[j] / Z_t

where ``Z_t = sum_k alpha_t[k] * beta_t[k]``. Each step is normalized by its own Z_t, so rounding
does not accumulate over steps. Everything is multiplied by the cotangent of log Z. Pair marginals
are summed over the rows that share a matrix, and over steps too if one matrix serves all of them;
without the factor P_t they are the gradient with respect to P_t.

Messages carry a scale of their own. That of alpha_t cancels in the quotient. As beta_t = P_t @
beta_x_{t+1}, the scales of beta_x_{t+1} and of beta_t differ by that of the matrix; it is the same
for all rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from arraylogchain._backends.interface import Messages
from arraylogchain._chains.accumulate import Accumulator, bounded
from arraylogchain._chains.passes import Pass, last_logs, log_sum
from arraylogchain._core.axes import chunks
from arraylogchain._core.context import Array, is_transposed
from arraylogchain._core.precision import DOUBLE, SINGLE
from arraylogchain._core.scaled import (
    LN2_HIGH,
    LN2_LOW,
    exp_of_split,
    finite_or_zero,
    split_log,
    whole_part,
)
from arraylogchain._products.certified import certified_product
from arraylogchain._products.operand import Operand


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
        log Z; where one exceeds 2**60, the log sums of the last message without its scale, through
        which log Z may overflow while the marginals are well defined.
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
        log_z, values = forward_pass.log_z, xp.ones_like(forward_pass.log_z)
        if cotangent is not None:
            values = ctx.load(shard.read(cotangent), ctx.widest)
            values = bounded(ctx, values, ctx.dtype(precision))
        if not (is_moderate := ctx.are_within(2.0**60, log_z)):
            log_z = log_sum(xp, last_logs(shard, last).values)
            values = xp.where(xp.isinf(log_z), 0.0, values + 0.0 * log_z)
        self.unscaled_log_z, self.cotangents = log_z, values
        self.is_zero, self.smallest, self.largest = None, 1.0, 1.0
        if is_moderate and cotangent is None:
            return  # all cotangents are ones
        magnitudes = xp.abs(values)
        self.smallest, self.largest = float(xp.min(magnitudes)), float(xp.max(magnitudes))
        if not self.smallest > 0:
            self.is_zero = (magnitudes == 0)[None, ...]
            self.smallest = float(xp.min(xp.where(magnitudes > 0, magnitudes, 1.0)))

    def factors(self, normalizers: Array) -> Array | None:
        """Return cotangents divided by normalizers Z_t of linear weights.

        Parameters
        ----------
        normalizers : array [n, groups, rows] or [groups, rows]

        Returns
        -------
        array or None
            None where a normalizer or a cotangent is too close to underflow or overflow to certify
        marginals.
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


class PairScale(NamedTuple):
    """Log scales [n, groups, rows] of the pair marginals of each row.

    They may be large, and are kept apart so that they cancel before anything is rounded.
    """

    nats: Array  # integers, approximately the negative column maxima of log P
    high: Array  # of the power-of-two scale, multiples of 2**-9
    log_cotangent: Array  # multiples of 2**-9
    remainder: Array  # the rest of all of these, near 0


class SegmentMarginals:
    """State marginals of one segment, and sums of its pair marginals.

    Parameters
    ----------
    sums : ShardSums
        Pair marginals are added to its accumulator.
    steps : slice
        The n steps of the segment.
    alpha, beta : Messages [n, groups, rows, K]
        Forward and backward messages.
    beta_x : Messages [n + 1, groups, rows, K]
        Backward messages times potentials, of the step after the segment too.

    Attributes
    ----------
    needs_small_pairs : bool
        Whether sums of pairs need to be accurate far below one count.
    """

    needs_small_pairs = False

    def __init__(
        self, sums: ShardSums, steps: slice, alpha: Messages, beta: Messages, beta_x: Messages
    ) -> None:
        self.sums, self.shard, self.ctx = sums, sums.shard, sums.shard.ctx
        self.precision = sums.precision
        self.steps, self.alpha, self.beta, self.beta_x = steps, alpha, beta, beta_x
        num_pairs = 0
        if "transitions" in sums.accumulator.arrays:
            num_pairs = min(steps.stop, self.shard.num_steps - 1) - steps.start
        # Transition i leads from step i of the segment to step i + 1.
        self.sources, self.targets = slice(0, num_pairs), slice(1, num_pairs + 1)
        # Masks [n, groups, rows] of terms that are 0; None if there are none.
        self.no_state = self.no_pair = is_zero = sums.is_zero
        is_valid = self.shard.valid_steps(slice(steps.start, steps.stop + 1))
        if is_valid is not None:
            excluded = ~is_valid if is_zero is None else ~is_valid | is_zero
            self.no_state, self.no_pair = excluded[:-1, ...], excluded[self.targets, ...]

    def marginals(self) -> Array:
        """Return state marginals times cotangents, [n, groups, rows, K], and add pair marginals."""
        marginals = self.in_linear_space()
        return self.in_log_space() if marginals is None else marginals

    def in_linear_space(self) -> Array | None:
        """Return state marginals times cotangents, [n, groups, rows, K], and add pair marginals.

        Return None, and add nothing, if some Z_t is too close to under- or overflow to prove that
        linear weights are accurate.
        """
        ctx, alpha = self.ctx, self.alpha.weights(self.ctx)
        marginals = self.where(self.no_state, 0.0, alpha * self.beta.weights(ctx))
        normalizers = self.where(self.no_state, 1.0, ctx.row_sums(marginals))
        factors = self.sums.factors(normalizers)
        if factors is None:
            return None
        if self.sources.stop:
            right = self.beta_x.weights(ctx)[self.targets, ...]
            right *= factors[self.sources, ..., None]  # in place: beta_x is not used again
            left = self.where(self.no_pair, 0.0, alpha[self.sources, ...])
            self._add_linear_pairs(left, self.where(self.no_pair, 0.0, right))
        marginals *= factors[..., None]
        return marginals

    def _add_linear_pairs(self, left: Array, right: Array) -> None:
        """Add ``sum_rows left[k] * right[j]``, times the matrix for counts."""
        ctx, xp, shard, chain = self.ctx, self.ctx.xp, self.shard, self.shard.chain
        is_log, log_scale = "transitions" in chain.logs, self._matrix_log_scale()
        # One product per step beats making a transposed `left` contiguous for a single product.
        by_steps = chain.has_one_matrix and is_transposed(left)
        for transitions, columns, matrix in self._matrix_panels():
            if by_steps:
                num_steps, num_groups, _, K = left.shape
                step_count = max(1, self.sums.panel_size // (num_groups * K**2))
                pairs = sum(
                    xp.sum(ctx.multiply(left[t].mT, right[t][..., columns]), axis=0)
                    for t in chunks(num_steps, step_count)
                )
            else:
                u, v = (shard.by_matrix(x[transitions, ...]) for x in (left, right))
                pairs = ctx.multiply(u.mT, v[..., columns])
            scale = log_scale if chain.has_one_matrix else log_scale[transitions, ...]
            scale = ctx.load(shard.by_matrix(scale[..., None]), self.precision)
            if not self.sums.accumulator.by_logs:
                pairs = ctx.scaled(pairs, scale)
            else:
                matrix = ctx.load(matrix, self.precision)
                weights = xp.exp(matrix + scale) if is_log else ctx.scaled(matrix, scale)
                # 0 * inf is 0 here: the weight of an unused transition may be infinite.
                pairs = xp.where(pairs == 0, pairs, pairs * weights)
            self._add_pairs(pairs, transitions, columns)

    def in_log_space(self) -> Array:
        """Return state marginals times cotangents, [n, groups, rows, K], and add pair marginals."""
        ctx, xp = self.ctx, self.ctx.xp
        alpha, beta, beta_x = (x.to_log_space(ctx) for x in (self.alpha, self.beta, self.beta_x))
        # Shift both messages by their integer part at the most probable state, so that only small
        # numbers are added.
        mode = xp.argmax(alpha.values + beta.values, axis=-1)[..., None]
        at_mode = [xp.take_along_axis(x.values, mode, axis=-1) for x in (alpha, beta)]
        alpha_shift, beta_shift = (whole_part(xp, x) for x in at_mode)
        marginals = alpha.values - alpha_shift
        marginals += beta.values - beta_shift
        maxima = finite_or_zero(xp, xp.max(marginals, axis=-1, keepdims=True))
        marginals -= maxima
        ctx.exp(marginals, marginals)
        marginals = self.where(self.no_state, 0.0, marginals)
        normalizers = self.where(self.no_state, 1.0, ctx.row_sums(marginals))
        marginals *= (ctx.load(self.sums.cotangents, self.precision) / normalizers)[..., None]
        marginals = self.where(self.no_state, 0.0, marginals)
        if not self.sources.stop:
            return marginals

        # Counts are dominated by probable pairs, so alpha may be shifted to its mode. Gradients
        # with respect to linear weights need every pair: the logs of improbable ones stay as they
        # are, and beta_x takes both shifts.
        left_shift = alpha_shift if self.sums.accumulator.by_logs else xp.zeros_like(alpha_shift)
        right_shift = beta_shift + (alpha_shift - left_shift)
        left = (alpha.values - left_shift)[self.sources, ...]
        right = beta_x.values[self.targets, ...] - right_shift[self.sources, ...]
        left = self.where(self.no_pair, -math.inf, left)
        right = self.where(self.no_pair, -math.inf, right)
        nats = self._matrix_scale(beta.shifts, beta_x.shifts)
        exponent = self._matrix_scale(beta.exponents, beta_x.exponents)
        del alpha, beta, beta_x  # they may be copies
        log_normalizers = ctx.load(xp.log(normalizers) + maxima[..., 0], ctx.widest)
        remainder = exponent * LN2_LOW - log_normalizers[self.sources, ...]
        nats, high, remainder = (
            self.where(self.no_pair, 0.0, x) for x in (nats, exponent * LN2_HIGH, remainder)
        )
        # A cotangent enters as the log of its magnitude; the two signs are added separately.
        for sign in (1.0, -1.0):
            magnitude = xp.clip(self.sums.cotangents * sign, min=0.0)
            log_g, log_g_rest = split_log(ctx, magnitude, is_log=False)
            if bool(xp.all(log_g == -math.inf)):
                continue
            log_g = self.where(self.no_pair, -math.inf, xp.zeros_like(nats) + log_g)
            scale = PairScale(nats, high, log_g, remainder + log_g_rest)
            self._add_log_pairs(left, right, scale, sign)
        return marginals

    def _add_log_pairs(self, left: Array, right: Array, scale: PairScale, sign: float) -> None:
        """Add pair marginals in log space, for the cotangents of one sign.

        The log of a term is ``left[k] + log P[k, j] + right[j]`` plus the scales of its row; left
        and right are [n, groups, rows, K].
        """
        ctx, xp, shard, precision = self.ctx, self.ctx.xp, self.shard, self.precision
        is_log = "transitions" in self.shard.chain.logs
        for transitions, columns, matrix in self._matrix_panels():
            u, v = (shard.by_matrix(x[transitions, ...]) for x in (left, right))
            rows = PairScale(*(shard.by_matrix(x[transitions, ..., None]) for x in scale))
            log_P, log_P_rest = split_log(ctx, matrix, is_log)
            max_log_g = finite_or_zero(xp, xp.max(rows.log_cotangent, axis=-2, keepdims=True))
            column_max = xp.max(log_P, axis=-2, keepdims=True)
            # A column of zeros is scaled like the largest of the others.
            matrix_max = xp.max(column_max, axis=-1, keepdims=True)
            column_max = xp.where(xp.isfinite(column_max), column_max, matrix_max)
            column_max = finite_or_zero(xp, column_max)

            total = (rows.nats + column_max) + (rows.high + (rows.log_cotangent - max_log_g))
            v = v[..., columns] + ctx.load(total, precision)
            v += ctx.load(rows.remainder, precision)
            offset, offset_rest = max_log_g - column_max, xp.zeros_like(log_P_rest)
            negligible = None
            if self.sums.accumulator.by_logs:
                offset, offset_rest = max_log_g + (log_P - column_max), log_P_rest
                if not self.needs_small_pairs:
                    # Entries that contribute less than an eps of one count need not be accurate.
                    negligible = self.sums.log_threshold() - (offset + offset_rest)
                    negligible = ctx.load(negligible, precision)
            a, b = (Operand(ctx, x, i, precision=precision) for i, x in enumerate((u.mT, v)))
            out = ctx.empty((u.shape[0], u.shape[2], v.shape[2]), left.dtype)
            certified_product(ctx, a, b, out, self.sums.workspace, lower_limit=negligible)
            pairs = sign * exp_of_split(ctx, offset, offset_rest + ctx.load(out, ctx.widest))
            pairs = xp.where(out == -math.inf, 0.0, pairs)
            self._add_pairs(pairs, transitions, columns)

    def _matrix_panels(self) -> Iterator[tuple[slice, slice, Array]]:
        """Yield the matrices of the transitions of the segment, in panels that fit."""
        count, size = self.sources.stop, self.sums.panel_size
        return self.shard.matrix_panels(self.steps.start, count, size)

    def _matrix_scale(self, beta_scale: Array, beta_x_scale: Array) -> Array:
        """Return the scale that beta_x_{t+1} has beyond beta_t = P_t @ beta_x_{t+1}."""
        return beta_x_scale[self.targets, ...] - beta_scale[self.sources, ...]

    def _matrix_log_scale(self) -> Array:
        """Return the scale of each matrix, [1 or n, groups, 1], taken from the first row.

        In nats if matrices were given as logarithms, else as a power of two.
        """
        chain, beta, beta_x = self.shard.chain, self.beta, self.beta_x
        if "transitions" in chain.logs:
            scale = self._matrix_scale(beta.shifts, beta_x.shifts)
        else:
            scale = self._matrix_scale(beta.exponents, beta_x.exponents)
        return scale[: 1 if chain.has_one_matrix else None, :, :1]

    def _add_pairs(self, pairs: Array, transitions: slice, columns: slice) -> None:
        """Add pairs of all transitions, [groups, K, J], or of some, [groups * n, K, J]."""
        pairs = self.ctx.xp.reshape(pairs, (self.shard.groups, 1, -1, *pairs.shape[1:]))
        start = transitions.start
        if not self.shard.chain.has_one_matrix:
            start += self.steps.start
        where = (slice(start, start + int(pairs.shape[2])), slice(None), columns)
        self.sums.accumulator.add("transitions", self.shard, where, pairs)

    def where(self, excluded: Array | None, value: float, x: Array) -> Array:
        """Return x [n, groups, rows] or [n, groups, rows, K], with a value where it is excluded."""
        if excluded is None:
            return x
        return self.ctx.xp.where(excluded[..., None] if x.ndim == 4 else excluded, value, x)
