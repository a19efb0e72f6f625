"""What a block of steps adds: in linear weights, where these prove it, or in logs."""

from __future__ import annotations

import math
from typing import Any

from arraylogchain._array.chains.pieces import Messages, exp_of_parts, log_parts
from arraylogchain._array.products.certified import certified_product
from arraylogchain._array.products.factors import Factor
from arraylogchain._context import LN2_HIGH, LN2_LOW, Array, is_transposed
from arraylogchain._fold import chunks


class Shares:
    """The shares of states at a block of steps, and of pairs of states.

    Attributes
    ----------
    of : Posterior
        Whose sums pairs are added to.
    a, b, d : Messages
        What left the steps forward, what arrived at them backward, and what left them and the step
        after them backward.
    moves, ends : slice
        The steps, counted from the first, between which there are pairs to add.
    dead, still : bool array [n, groups, rows] or None
        Which rows contribute nothing to states, or to pairs; None for none.
    """

    def __init__(self, of: Any, steps: slice, a: Messages, b: Messages, d: Messages) -> None:
        self.of, self.ctx, self.piece, self.steps = of, of.ctx, of.piece, steps
        self.a, self.b, self.d = a, b, d
        self.precision = of.precision
        has_pairs = "transitions" in of.sums.totals
        count = min(steps.stop, of.piece.num_steps - 1) - steps.start if has_pairs else 0
        self.moves, self.ends = slice(0, count), slice(1, count + 1)
        self.dead = self.still = of.idle
        real = self.piece.real(slice(steps.start, steps.stop + 1))
        if real is not None:
            dead = ~real if of.idle is None else ~real | of.idle
            self.dead, self.still = dead[:-1, ...], dead[self.ends, ...]

    def linear(self) -> Array | None:
        """Add pairs, and return cotangents times shares of states [n, groups, rows, K].

        Or return None, and add nothing, where linear weights do not prove them.
        """
        ctx, xp, moves, a = self.ctx, self.ctx.xp, self.moves, self.a.weights(self.ctx)
        shares = _where_not(xp, self.dead, a * self.b.weights(ctx), 0.0)
        totals = _where_not(xp, self.dead, ctx.row_sums(shares), 1.0)
        f = self.of.factors(totals)
        if f is None:
            return None
        if moves.stop:
            d = self.d.weights(ctx)[self.ends, ...]
            d *= f[moves, ..., None]  # nobody reads these again
            u = _where_not(xp, self.still, a[moves, ...], 0.0)
            self._add_linear_pairs(u, _where_not(xp, self.still, d, 0.0), self._levels())
        shares *= f[..., None]
        return shares

    def _beside(self, b: Messages, d: Messages) -> tuple[Array, Array]:
        """Return the scale of d less that of b before it: nats, and powers of two."""
        nats = d.shifts[self.ends, ...] - b.shifts[self.moves, ...]
        bits = d.powers[self.ends, ...] - b.powers[self.moves, ...]
        return nats, bits

    def _levels(self) -> Array:
        """Return the scales of matrices, [1 or n, groups, 1].

        As b_t = P_t @ d_{t+1}, they are the differences of scales, of any row: nats where matrices
        are given as logs, else powers of two.
        """
        chain = self.piece.chain
        b, d = (x.shifts if "transitions" in chain.logs else x.powers for x in (self.b, self.d))
        own = d[self.ends, ...] - b[self.moves, ...]
        return own[slice(0, 1 if chain.has_one_matrix else None), :, :1]

    def _add_linear_pairs(self, u: Array, v: Array, levels: Array) -> None:
        """Add the sums over rows of u[k] v[j], times matrices."""
        ctx, xp, chain = self.ctx, self.ctx.xp, self.piece.chain
        # Rows side by side are not laid out one after another, which takes longer than products:
        # these are made for each step, of as many steps at a time as a panel has room for.
        by_steps = chain.has_one_matrix and is_transposed(u)
        for some, j, x in self.of.panels(self.steps.start, self.moves.stop):
            if by_steps:
                steps = chunks(u.shape[0], max(1, self.of.panel // (u.shape[1] * u.shape[3] ** 2)))
                products = (ctx.multiply(u[n].mT, v[n][..., j]) for n in steps)
                pairs = sum(xp.sum(product, axis=0) for product in products)
            else:
                left = self.of.by_matrix(u[some, ...]).mT
                pairs = ctx.multiply(left, self.of.by_matrix(v[some, ...])[..., j])
            level = levels if chain.has_one_matrix else levels[some, ...]
            level = ctx.load(self.of.by_matrix(level[..., None]), self.precision)
            if not self.of.sums.by_logs:
                pairs = ctx.scaled(pairs, level)
            else:
                x = ctx.load(x, self.precision)
                x = xp.exp(x + level) if "transitions" in chain.logs else ctx.scaled(x, level)
                # Where nothing passes, weights may be infinite, or of no row.
                pairs = xp.where(pairs == 0, pairs, pairs * x)
            self._add_pairs(pairs, some, j)

    def in_logs(self) -> Array:
        """Add pairs, and return cotangents times shares of states [n, groups, rows, K]."""
        ctx, xp, moves = self.ctx, self.ctx.xp, self.moves
        a, b, d = (x.in_log_form(ctx) for x in (self.a, self.b, self.d))
        # What the likeliest state has in each direction comes off first: what is large cancels.
        at = xp.argmax(a.values + b.values, axis=-1)[..., None]
        near = [xp.take_along_axis(x.values, at, axis=-1) for x in (a, b)]
        of_a, of_b = (xp.where(xp.isfinite(x), xp.round(x), 0.0) for x in near)
        shares = a.values - of_a
        shares += b.values - of_b
        tops = xp.max(shares, axis=-1, keepdims=True)
        tops = xp.where(xp.isfinite(tops), tops, 0.0)
        shares -= tops
        ctx.exp(shares, shares)
        shares = _where_not(xp, self.dead, shares, 0.0)
        totals = _where_not(xp, self.dead, ctx.row_sums(shares), 1.0)
        shares *= (ctx.load(self.of.g, self.precision) / totals)[..., None]
        shares = _where_not(xp, self.dead, shares, 0.0)
        if moves.stop:
            # Counts need likely pairs; derivatives by weights all: their small logs are not moved.
            left = of_a if self.of.sums.by_logs else xp.zeros_like(of_a)
            right = of_b + (of_a - left)
            u = _where_not(xp, self.still, (a.values - left)[moves, ...], -math.inf)
            v = _where_not(xp, self.still, d.values[self.ends, ...] - right[moves, ...], -math.inf)
            nats, bits = self._beside(b, d)
            del a, b, d  # which may be copies
            low = bits * LN2_LOW - ctx.load(xp.log(totals) + tops[..., 0], ctx.widest)[moves, ...]
            scales = [_where_not(xp, self.still, x, 0.0) for x in (nats, bits * LN2_HIGH, low)]
            for sign in (1.0, -1.0):
                g, small = log_parts(ctx, xp.clip(self.of.g * sign, min=0.0), in_logs=False)
                if not bool(xp.all(g == -math.inf)):
                    g = _where_not(xp, self.still, xp.zeros_like(nats) + g, -math.inf)
                    self._add_log_pairs(u, v, (*scales[:2], scales[2] + small, g), sign)
        return shares

    def _add_log_pairs(self, u: Array, v: Array, scales: tuple[Array, ...], sign: float) -> None:
        """Add pairs with the logs of u and v, what these are scaled by, and those of matrices.

        The scales [n, groups, rows] are nats, which the largest entries of matrices' columns
        balance; multiples of 2**-9; rests near 0; and cotangents, as multiples of 2**-9. What is
        large is summed apart, so that it cancels before anything is rounded.
        """
        ctx, xp, precision = self.ctx, self.ctx.xp, self.precision
        for some, j, x in self.of.panels(self.steps.start, self.moves.stop):
            left, right = (self.of.by_matrix(y[some, ...]) for y in (u, v))
            nats, whole, rest, g = (self.of.by_matrix(y[some, ..., None]) for y in scales)
            logs, small = log_parts(ctx, x, "transitions" in self.piece.chain.logs)
            top, column = xp.max(g, axis=-2, keepdims=True), xp.max(logs, axis=-2, keepdims=True)
            # Columns without entries are balanced as others are.
            column = xp.where(xp.isfinite(column), column, xp.max(column, axis=-1, keepdims=True))
            top, column = (xp.where(xp.isfinite(y), y, 0.0) for y in (top, column))
            beside = (nats + column) + (whole + (g - top))
            right = right[..., j] + ctx.load(beside, precision)
            right += ctx.load(rest, precision)
            right = Factor(ctx, right, 1, precision=precision)
            left = Factor(ctx, left.mT, 0, precision=precision)
            near, least = top - column, None
            if self.of.sums.by_logs:
                near = top + (logs - column)
                # What counts for nothing may have lost anything.
                least = math.log(precision.eps) + math.log(self.of.least)
                least = ctx.load(least - (near + small), precision)
            else:
                small = xp.zeros_like(small)
            out = ctx.empty((*left.values.shape[:2], right.values.shape[2]), u.dtype)
            certified_product(ctx, left, right, out, self.of.run.workspace, least=least)
            pairs = sign * exp_of_parts(ctx, near, small + ctx.load(out, ctx.widest))
            pairs = xp.where(out == -math.inf, 0.0, pairs)
            self._add_pairs(pairs, some, j)

    def _add_pairs(self, pairs: Array, some: slice, j: slice) -> None:
        """Add pairs of all transitions, [groups, K, n], or of some, [groups * n, K, n]."""
        pairs = self.ctx.xp.reshape(pairs, (self.piece.groups, 1, -1, *pairs.shape[1:]))
        first = 0 if self.piece.chain.has_one_matrix else self.steps.start
        place = slice(first + some.start, first + some.start + int(pairs.shape[2]))
        self.of.sums.add("transitions", self.piece, (place, slice(None), j), pairs)


def _where_not(xp: Any, dead: Array | None, x: Array, value: float) -> Array:
    """Return x, with a value in the place of what is dead [n, groups, rows]."""
    if dead is None:
        return x
    return xp.where(dead[..., None] if x.ndim == 4 else dead, value, x)
