"""The messages of a block of steps, of lanes that are taken in one form: linear, or in logs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from arraylogchain._array.chains.messages import log_sum
from arraylogchain._array.chains.pieces import (
    LN2_HIGH,
    LN2_LOW,
    Messages,
    exp_of_parts,
    log_parts,
    scaled,
)
from arraylogchain._array.chains.recursion import even_weights
from arraylogchain._array.products.certified import certified_product
from arraylogchain._array.products.factors import Factor
from arraylogchain._context import DOUBLE, SINGLE, Array, Context, Precision, whole_maximum
from arraylogchain._fold import chunks

# Sums of a_t * b_t, and cotangents over them, lie within these bounds in linear rows. Weights are
# at most 2**400 (2**10 in float32): so what underflows in a sum is less than eps of it, and no sum
# of pairs over rows and steps is too large.
_RANGE = {"float32": (2.0**-80, 2.0**80), "float64": (2.0**-900, 2.0**900)}
_LARGEST_FACTOR = {"float32": 2.0**75, "float64": 2.0**180}


class Lanes:
    """The messages of a block of steps, of some lanes, which are taken in one form.

    Attributes
    ----------
    of : Posterior
        Whose sums they are added to.
    a, b, d : Messages
        What left the steps forward, what arrived at them backward, and what left backward the step
        after each of them.
    g : array [groups, rows] or None
        Cotangents.
    moves : slice
        The steps, counted from the first, after which there are pairs to add.
    dead, still : bool array [n, groups, rows] or None
        Which rows contribute nothing to states, or to pairs; None for none.
    """

    def __init__(
        self,
        of: Any,
        steps: slice,
        messages: tuple[Messages, Messages, Messages],
        some: np.ndarray | None,
    ) -> None:
        self.of, self.ctx, self.piece, self.sums, self.steps = of, of.ctx, of.piece, of.sums, steps
        last = min(steps.stop, self.piece.num_steps - 1) if of.wants_pairs else steps.start
        self.moves = slice(0, max(last - steps.start, 0))
        self.some, self.index, self.g = some, None, of.g
        real = self.piece.real(steps)
        after = self.piece.real(slice(steps.start + 1, steps.start + 1 + self.moves.stop))
        if some is not None:
            axis = self.piece.axis
            self.index = self.ctx.integers(some)
            a, b, d = (x.select(self.ctx, self.index, axis, some) for x in messages)
            messages = a, b, d
            self.g = self._picked(self.g, axis)
            real, after = self._picked(real, axis + 1), self._picked(after, axis + 1)
        self.a, self.b, self.d = messages
        self.dead, self.still = self._dead(real), self._dead(after)

    def _picked(self, x: Array | None, axis: int) -> Array | None:
        return None if x is None else self.ctx.pick(x, self.index, axis)

    def _dead(self, real: Array | None) -> Array | None:
        dead = None if real is None else ~real
        if self.g is not None and bool(self.ctx.xp.any(self.g == 0)):
            none = (self.g == 0)[None, ...]
            dead = none if dead is None else dead | none
        return dead

    @property
    def precision(self) -> Precision:
        return DOUBLE if self.a.values.dtype == self.ctx.xp.float64 else SINGLE

    def spread(self, x: Array, axis: int) -> Array:
        """Return an array of some lanes as one of all, with zeros for the others."""
        if self.some is None:
            return x
        xp, count = self.ctx.xp, len(self.some)
        place = np.full(self.piece.state_shape[self.piece.axis], count)
        place[self.some] = np.arange(count)
        shape = [int(n) for n in x.shape]
        shape[axis] = 1
        nothing = xp.zeros(tuple(shape), dtype=x.dtype, device=self.ctx.device)
        return xp.take(xp.concat([x, nothing], axis=axis), self.ctx.integers(place), axis=axis)

    def linear(self) -> tuple[Array | None, np.ndarray | None]:
        """Add pairs, and return cotangents times shares of states [n, groups, rows, K].

        Or return, instead, which lanes are not proved, and add nothing.
        """
        ctx, xp, a, d, moves = self.ctx, self.ctx.xp, self.a, self.d, self.moves
        (least, most), name = _RANGE[self.precision.name], self.precision.name
        m = _where_not(xp, self.dead, a.values * self.b.values, 0.0)
        total = _where_not(xp, self.dead, row_sum(ctx, m), 1.0)
        g = xp.ones_like(total) if self.g is None else ctx.load(self.g, self.precision)
        f = _where_not(xp, self.dead, g / total, 1.0)
        bad = self._outside(least, most, total, f)
        if bad is None and moves.stop:
            w, (nats, bits) = f[moves, ...], self._beside(self.b, d)
            if bool(xp.any(nats)) or bool(xp.any(bits)):
                scale = ctx.load(xp.exp(nats) * 2.0**bits, self.precision)
                w = _where_not(xp, self.still, w * scale, 1.0)
            bad = self._outside(least, _LARGEST_FACTOR[name], w)
            if bad is None:
                u = _where_not(xp, self.still, a.values[moves, ...], 0.0)
                v = _where_not(xp, self.still, d.values[moves, ...] * w[..., None], 0.0)
                self._add_linear_pairs(u, v)
        if bad is not None:
            return None, bad
        ctx.apply(xp.multiply, m, f[..., None], out=m)
        return self.spread(m, self.piece.axis + 1), None

    def _outside(self, least: float, most: float, *found: Array) -> np.ndarray | None:
        """Return in which lanes sizes [n, groups, rows] are not in between; None for none."""
        xp, odd = self.ctx.xp, None
        for x in found:
            if not (float(xp.min(x)) >= least and float(xp.max(x)) <= most):
                size = xp.abs(x)
                wrong = ~((size >= least) & (size <= most))
                odd = wrong if odd is None else odd | wrong
        if odd is None or not bool(xp.any(odd)):
            return None
        odd = xp.any(odd, axis=(0, 2 - self.piece.axis))
        return np.asarray([bool(odd[i]) for i in range(int(odd.shape[0]))])

    def _beside(self, b: Messages, d: Messages) -> tuple[Array, Array]:
        """Return the scale of d, and of matrices, less that of b: nats, and powers of two."""
        xp, moves, groups = self.ctx.xp, self.moves, int(self.a.shifts.shape[1])
        shifts, powers = (
            xp.concat([xp.reshape(x, (-1, groups, 1)) for x in parts], axis=0)
            for parts in zip(*((f.shift, f.powers) for _, f in self.factors), strict=True)
        )
        nats = (d.shifts[moves, ...] - b.shifts[moves, ...]) + shifts
        return nats, (d.powers[moves, ...] - b.powers[moves, ...]) + powers

    def _add_linear_pairs(self, u: Array, v: Array) -> None:
        """Add the sums over rows of u[k] v[j], times matrices."""
        ctx, xp = self.ctx, self.ctx.xp
        # Many rows are not laid out together, which takes longer than their products.
        apart = self.piece.chain.has_one_matrix and u.shape[2] >= u.shape[3]
        for some, factor in self.factors:
            left, right = (x if apart else self._together(x[some, ...]) for x in (u, v))
            left = xp.matrix_transpose(left)
            for j, part in self._panels(factor):
                pairs = ctx.multiply(left, right[..., j])
                pairs = xp.sum(pairs, axis=0) if apart else pairs
                if self.sums.by_logs:
                    # Where nothing passes, weights may be infinite, or of no row.
                    pairs = xp.where(pairs == 0, pairs, pairs * even_weights(ctx, part))
                elif part.taken is not None:
                    pairs = scaled(ctx, pairs, ctx.load(-part.powers, self.precision))
                self._add_pairs(pairs, some, j)

    def in_logs(self) -> Array:
        """Add pairs, and return cotangents times shares of states [n, groups, rows, K]."""
        ctx, xp, moves, nothing = self.ctx, self.ctx.xp, self.moves, -math.inf
        a, b, d = (x.in_log_form(ctx) for x in (self.a, self.b, self.d))
        near = whole_maximum(ctx, a.values + b.values, -1, self.precision)
        joint = _where_not(xp, self.dead, (a.values - near) + b.values, nothing)
        total = _where_not(xp, self.dead, log_sum(xp, joint), 0.0)
        shares = xp.exp(joint - total[..., None])
        if self.g is not None:
            shares = shares * ctx.load(self.g, self.precision)[..., None]
            shares = _where_not(xp, self.dead, shares, 0.0)
        if moves.stop:
            u = _where_not(xp, self.still, a.values[moves, ...], nothing)
            v = _where_not(xp, self.still, d.values[moves, ...], nothing)
            nats, bits = self._beside(b, d)
            whole = nats + bits * LN2_HIGH - ctx.load(near[moves, ..., 0], ctx.widest)
            rest = bits * LN2_LOW - ctx.load(total[moves, ...], ctx.widest)
            for sign in (1.0,) if self.g is None else (1.0, -1.0):
                size = xp.ones_like(whole[0, ...]) if self.g is None else self.g * sign
                size, small = log_parts(ctx, xp.clip(size, min=0.0), False)
                if not bool(xp.all(size == nothing)):
                    parts = whole, xp.zeros_like(whole) + size, rest + small
                    scales = zip(parts, (math.inf, nothing, 0.0), strict=True)
                    of_v = [_where_not(xp, self.still, x, y)[..., None] for x, y in scales]
                    self._add_log_pairs(u, v, of_v, sign)
        return self.spread(shares, self.piece.axis + 1)

    def _add_log_pairs(self, u: Array, v: Array, scales: list[Array], sign: float) -> None:
        """Add pairs with the logs of u and v, what v is scaled by, and those of matrices.

        The scales [n, groups, rows, 1] are multiples of 2**-9, of pairs and of cotangents, and
        rests. What they have in common, and columns of matrices, is left out before anything is
        rounded.
        """
        ctx, xp, precision = self.ctx, self.ctx.xp, self.precision
        for some, factor in self.factors:
            left = xp.matrix_transpose(self._together(u[some, ...]))
            left = Factor(ctx, left, 0, precision=precision)
            right, of_pairs, of_g, rest = (self._together(x[some, ...]) for x in (v, *scales))
            low, top = (
                xp.min(of_pairs, axis=-2, keepdims=True),
                xp.max(of_g, axis=-2, keepdims=True),
            )
            low, top = (xp.where(xp.isfinite(x), x, 0.0) for x in (low, top))
            beside = xp.where(of_pairs == math.inf, 0.0, of_pairs - low) + (of_g - top)
            for j, part in self._panels(factor):
                # The logs of matrices, of which those of columns go with the pairs.
                column, apart = 0.0, part.shift + part.powers * LN2_HIGH
                if part.taken is not None:
                    taken = ctx.load(part.taken, ctx.widest)
                    column = (taken if part.in_logs else taken * LN2_HIGH) - apart
                near, small = -(column + apart), -part.powers * LN2_LOW
                if self.sums.by_logs:
                    entries = log_parts(ctx, part.values, part.in_logs)
                    near, small = entries[0] + near, entries[1] + small
                near = near + (low + top)
                x = right[:, :, j] + ctx.load(beside + column, precision)
                x = Factor(ctx, x + ctx.load(rest, precision), 1, precision=precision)
                out = ctx.empty((*left.values.shape[:2], x.values.shape[2]), right.dtype)
                # What counts for nothing may have lost anything.
                least = (
                    self._least - ctx.load(near + small, precision) if self.sums.by_logs else None
                )
                certified_product(ctx, left, x, out, self.of.run.workspace, least=least)
                small = small + ctx.load(out, ctx.widest)
                pairs = (
                    xp.exp(near + small) if self.sums.as_counts else exp_of_parts(ctx, near, small)
                )
                pairs = xp.where(out == -math.inf, xp.zeros_like(pairs), sign * pairs)
                self._add_pairs(pairs, some, j)

    @cached_property
    def _least(self) -> float:
        """The log of what a pair may be off by, beside the least cotangent."""
        least = 1.0
        if self.g is not None:
            size = self.ctx.xp.abs(self.g)
            least = float(self.ctx.xp.min(self.ctx.xp.where(size > 0, size, 1.0)))
        return math.log(self.precision.eps) + math.log(least)

    @cached_property
    def factors(self) -> list[tuple[slice, Factor]]:
        """The matrices of the transitions from some of the steps, [n * groups, K, K]."""
        piece, xp = self.piece, self.ctx.xp
        of_groups = self.some is not None and not piece.axis
        if piece.chain.has_one_matrix:
            if not of_groups:
                return [(self.moves, self.of.matrix)]
            x = self.ctx.pick(piece.matrices(slice(0, 1))[:, 0, :, :], self.index, 0)
            return [(self.moves, self.of.factor(x))]
        groups, size, found = int(self.a.shifts.shape[1]), piece.chain.num_states, []
        for some in chunks(self.moves.stop, max(1, self.of.panel // (groups * size * size))):
            first = self.steps.start
            x = piece.matrices(slice(first + some.start, first + some.stop))
            x = self.ctx.pick(x, self.index, 0) if of_groups else x
            x = xp.reshape(xp.permute_dims(x, (1, 0, 2, 3)), (-1, size, size))
            found.append((some, self.of.factor(x)))
        return found

    def _together(self, x: Array) -> Array:
        """Return [n, groups, rows, K] as [groups, n * rows, K], or as [n * groups, rows, K]."""
        xp, (count, groups, rows, size) = self.ctx.xp, x.shape
        if not self.piece.chain.has_one_matrix:
            return xp.reshape(x, (count * groups, rows, size))
        return xp.reshape(xp.permute_dims(x, (1, 0, 2, 3)), (groups, count * rows, size))

    def _panels(self, factor: Factor) -> Iterator[tuple[slice, Factor]]:
        """Yield columns that may be in memory together, and their part of a factor."""
        count, size, _ = factor.values.shape
        width, every = max(1, self.of.panel // (count * size)), slice(None)
        if width >= size:
            yield every, factor
            return
        for j in chunks(size, width):
            yield j, factor.part((every, every, j))

    def _add_pairs(self, pairs: Array, some: slice, j: slice) -> None:
        """Add pairs [groups, K, n] of all steps, or [n * groups, K, n] of some of them."""
        xp, piece, place = self.ctx.xp, self.piece, (slice(0, 1), slice(None), j)
        groups, (_, size, width) = int(self.a.shifts.shape[1]), pairs.shape
        pairs = xp.permute_dims(xp.reshape(pairs, (-1, groups, size, width)), (1, 0, 2, 3))
        if not piece.chain.has_one_matrix:
            first = self.steps.start
            place = (slice(first + some.start, first + some.stop), slice(None), j)
        pairs = pairs if piece.axis else self.spread(pairs, 0)
        self.sums.add("transitions", piece, place, pairs)


def _where_not(xp: Any, dead: Array | None, x: Array, value: float) -> Array:
    """Return x, with a value in the place of what is dead [n, groups, rows]."""
    if dead is None:
        return x
    dead = dead[: min(x.shape[0], dead.shape[0]), ...]
    return xp.where(dead[..., None] if x.ndim == 4 else dead, xp.full_like(x, value), x)


def row_sum(ctx: Context, x: Array) -> Array:
    """Return sums along the last axis."""
    if ctx.is_numpy and x.flags.c_contiguous:
        # NumPy adds short rows one by one.
        size = x.shape[-1]
        return np.matmul(x.reshape(-1, size), np.ones(size, x.dtype)).reshape(x.shape[:-1])
    return ctx.xp.sum(x, axis=-1)
