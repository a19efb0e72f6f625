"""What a block of steps adds: in linear weights, where these prove it, or in logs."""

from __future__ import annotations

import math
from typing import Any

from arraylogchain._backends.interface import Messages
from arraylogchain._core.axes import chunks
from arraylogchain._core.context import Array, is_transposed
from arraylogchain._core.scaled import LN2_HIGH, LN2_LOW, exp_of_split, split_log
from arraylogchain._products.certified import certified_product
from arraylogchain._products.operand import Factor


class SegmentMarginals:
    """The shares of states at a block of steps, and of pairs of states.

    Attributes
    ----------
    posterior : BackwardPass
        Whose sums pairs are added to.
    alpha, beta, beta_x : Messages
        What left the steps forward, what arrived at them backward, and what left them and the step
        after them backward.
    sources, targets : slice
        The steps, counted from the first, between which there are pairs to add.
    no_state, no_pair : bool array [n, groups, rows] or None
        Which rows contribute nothing to states, or to pairs; None for none.
    """

    def __init__(
        self, posterior: Any, steps: slice, alpha: Messages, beta: Messages, beta_x: Messages
    ) -> None:
        self.posterior, self.ctx, self.shard, self.steps = (
            posterior,
            posterior.ctx,
            posterior.shard,
            steps,
        )
        self.alpha, self.beta, self.beta_x = alpha, beta, beta_x
        self.precision = posterior.precision
        has_pairs = "transitions" in posterior.sums.arrays
        count = min(steps.stop, posterior.shard.num_steps - 1) - steps.start if has_pairs else 0
        self.sources, self.targets = slice(0, count), slice(1, count + 1)
        self.no_state = self.no_pair = posterior.zero_cotangent
        is_valid = self.shard.valid_steps(slice(steps.start, steps.stop + 1))
        if is_valid is not None:
            excluded = (
                ~is_valid
                if posterior.zero_cotangent is None
                else ~is_valid | posterior.zero_cotangent
            )
            self.no_state, self.no_pair = excluded[:-1, ...], excluded[self.targets, ...]

    def in_linear_space(self) -> Array | None:
        """Add pairs, and return cotangents times shares of states [n, groups, rows, K].

        Or return None, and add nothing, where linear weights do not prove them.
        """
        ctx, xp, sources, alpha = self.ctx, self.ctx.xp, self.sources, self.alpha.weights(self.ctx)
        marginals = _where_not(xp, self.no_state, alpha * self.beta.weights(ctx), 0.0)
        normalizers = _where_not(xp, self.no_state, ctx.row_sums(marginals), 1.0)
        factors = self.posterior.factors(normalizers)
        if factors is None:
            return None
        if sources.stop:
            beta_x = self.beta_x.weights(ctx)[self.targets, ...]
            beta_x *= factors[sources, ..., None]  # nobody reads these again
            u = _where_not(xp, self.no_pair, alpha[sources, ...], 0.0)
            self._add_linear_pairs(
                u, _where_not(xp, self.no_pair, beta_x, 0.0), self._matrix_scale()
            )
        marginals *= factors[..., None]
        return marginals

    def _scale_difference(self, beta: Array, beta_x: Array) -> Array:
        """Return scales of what left steps less those of what arrived at the steps before them."""
        return beta_x[self.targets, ...] - beta[self.sources, ...]

    def _matrix_scale(self) -> Array:
        """Return the scales of matrices, [1 or n, groups, 1].

        As b_t = P_t @ d_{t+1}, they are the differences of scales, of any row: nats where matrices
        are given as logs, else powers of two.
        """
        chain = self.shard.chain
        beta, beta_x = (
            x.shifts if "transitions" in chain.logs else x.exponents
            for x in (self.beta, self.beta_x)
        )
        return self._scale_difference(beta, beta_x)[
            slice(0, 1 if chain.has_one_matrix else None), :, :1
        ]

    def _add_linear_pairs(self, u: Array, v: Array, matrix_scales: Array) -> None:
        """Add the sums over rows of u[k] v[j], times matrices."""
        ctx, xp, chain = self.ctx, self.ctx.xp, self.shard.chain
        # Rows side by side are not laid out one after another, which takes longer than products:
        # these are made for each step, of as many steps at a time as a panel has room for.
        by_steps = chain.has_one_matrix and is_transposed(u)
        for transitions, j, x in self.posterior.panels(self.steps.start, self.sources.stop):
            if by_steps:
                steps = chunks(
                    u.shape[0], max(1, self.posterior.panel // (u.shape[1] * u.shape[3] ** 2))
                )
                products = (ctx.multiply(u[n].mT, v[n][..., j]) for n in steps)
                pairs = sum(xp.sum(product, axis=0) for product in products)
            else:
                left = self.posterior.by_matrix(u[transitions, ...]).mT
                pairs = ctx.multiply(left, self.posterior.by_matrix(v[transitions, ...])[..., j])
            matrix_scale = (
                matrix_scales if chain.has_one_matrix else matrix_scales[transitions, ...]
            )
            matrix_scale = ctx.load(
                self.posterior.by_matrix(matrix_scale[..., None]), self.precision
            )
            if not self.posterior.sums.by_logs:
                pairs = ctx.scaled(pairs, matrix_scale)
            else:
                x = ctx.load(x, self.precision)
                x = (
                    xp.exp(x + matrix_scale)
                    if "transitions" in chain.logs
                    else ctx.scaled(x, matrix_scale)
                )
                # Where nothing passes, weights may be infinite, or of no row.
                pairs = xp.where(pairs == 0, pairs, pairs * x)
            self._add_pairs(pairs, transitions, j)

    def in_log_space(self) -> Array:
        """Add pairs, and return cotangents times shares of states [n, groups, rows, K]."""
        ctx, xp, sources = self.ctx, self.ctx.xp, self.sources
        alpha, beta, beta_x = (x.to_log_space(ctx) for x in (self.alpha, self.beta, self.beta_x))
        # What the likeliest state has in each direction comes off first: what is large cancels.
        mode = xp.argmax(alpha.values + beta.values, axis=-1)[..., None]
        at_mode = [xp.take_along_axis(x.values, mode, axis=-1) for x in (alpha, beta)]
        alpha_shift, beta_shift = (xp.where(xp.isfinite(x), xp.round(x), 0.0) for x in at_mode)
        marginals = alpha.values - alpha_shift
        marginals += beta.values - beta_shift
        maxima = xp.max(marginals, axis=-1, keepdims=True)
        maxima = xp.where(xp.isfinite(maxima), maxima, 0.0)
        marginals -= maxima
        ctx.exp(marginals, marginals)
        marginals = _where_not(xp, self.no_state, marginals, 0.0)
        normalizers = _where_not(xp, self.no_state, ctx.row_sums(marginals), 1.0)
        marginals *= (ctx.load(self.posterior.g, self.precision) / normalizers)[..., None]
        marginals = _where_not(xp, self.no_state, marginals, 0.0)
        if sources.stop:
            # Counts need likely pairs; derivatives by weights all: their small logs are not moved.
            left = alpha_shift if self.posterior.sums.by_logs else xp.zeros_like(alpha_shift)
            right = beta_shift + (alpha_shift - left)
            u = _where_not(xp, self.no_pair, (alpha.values - left)[sources, ...], -math.inf)
            v = _where_not(
                xp, self.no_pair, beta_x.values[self.targets, ...] - right[sources, ...], -math.inf
            )
            nats = self._scale_difference(beta.shifts, beta_x.shifts)
            bits = self._scale_difference(beta.exponents, beta_x.exponents)
            del alpha, beta, beta_x  # which may be copies
            low = (
                bits * LN2_LOW
                - ctx.load(xp.log(normalizers) + maxima[..., 0], ctx.widest)[sources, ...]
            )
            scales = [_where_not(xp, self.no_pair, x, 0.0) for x in (nats, bits * LN2_HIGH, low)]
            for sign in (1.0, -1.0):
                g, small = split_log(ctx, xp.clip(self.posterior.g * sign, min=0.0), is_log=False)
                if not bool(xp.all(g == -math.inf)):
                    g = _where_not(xp, self.no_pair, xp.zeros_like(nats) + g, -math.inf)
                    self._add_log_pairs(u, v, (*scales[:2], scales[2] + small, g), sign)
        return marginals

    def _add_log_pairs(self, u: Array, v: Array, scales: tuple[Array, ...], sign: float) -> None:
        """Add pairs with the logs of u and v, what these are scaled by, and those of matrices.

        The scales [n, groups, rows] are nats, which the largest entries of matrices' columns
        balance; multiples of 2**-9; rests near 0; and cotangents, as multiples of 2**-9. What is
        large is summed apart, so that it cancels before anything is rounded.
        """
        ctx, xp, precision = self.ctx, self.ctx.xp, self.precision
        for transitions, j, x in self.posterior.panels(self.steps.start, self.sources.stop):
            left, right = (self.posterior.by_matrix(y[transitions, ...]) for y in (u, v))
            nats, high, remainder, g = (
                self.posterior.by_matrix(y[transitions, ..., None]) for y in scales
            )
            logs, small = split_log(ctx, x, "transitions" in self.shard.chain.logs)
            top, column = xp.max(g, axis=-2, keepdims=True), xp.max(logs, axis=-2, keepdims=True)
            # Columns without entries are balanced as others are.
            column = xp.where(xp.isfinite(column), column, xp.max(column, axis=-1, keepdims=True))
            top, column = (xp.where(xp.isfinite(y), y, 0.0) for y in (top, column))
            large_scale = (nats + column) + (high + (g - top))
            right = right[..., j] + ctx.load(large_scale, precision)
            right += ctx.load(remainder, precision)
            right = Factor(ctx, right, 1, precision=precision)
            left = Factor(ctx, left.mT, 0, precision=precision)
            shift_difference, threshold = top - column, None
            if self.posterior.sums.by_logs:
                shift_difference = top + (logs - column)
                # What counts for nothing may have lost anything.
                threshold = math.log(precision.eps) + math.log(self.posterior.min_cotangent)
                threshold = ctx.load(threshold - (shift_difference + small), precision)
            else:
                small = xp.zeros_like(small)
            out = ctx.empty((*left.values.shape[:2], right.values.shape[2]), u.dtype)
            certified_product(
                ctx, left, right, out, self.posterior.forward_pass.workspace, lower_limit=threshold
            )
            pairs = sign * exp_of_split(ctx, shift_difference, small + ctx.load(out, ctx.widest))
            pairs = xp.where(out == -math.inf, 0.0, pairs)
            self._add_pairs(pairs, transitions, j)

    def _add_pairs(self, pairs: Array, transitions: slice, j: slice) -> None:
        """Add pairs of all transitions, [groups, K, n], or of some, [groups * n, K, n]."""
        pairs = self.ctx.xp.reshape(pairs, (self.shard.groups, 1, -1, *pairs.shape[1:]))
        first = 0 if self.shard.chain.has_one_matrix else self.steps.start
        place = slice(first + transitions.start, first + transitions.start + int(pairs.shape[2]))
        self.posterior.sums.add("transitions", self.shard, (place, slice(None), j), pairs)


def _where_not(xp: Any, excluded: Array | None, x: Array, value: float) -> Array:
    """Return x, with a value in the place of what is dead [n, groups, rows]."""
    if excluded is None:
        return x
    return xp.where(excluded[..., None] if x.ndim == 4 else excluded, value, x)
