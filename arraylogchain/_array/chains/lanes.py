"""The messages of a block of steps, of lanes that are taken in one form: linear, or in logs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from arraylogchain._array.chains.messages import log_sum
from arraylogchain._array.chains.pieces import LN2_HIGH, LN2_LOW, Messages, scaled
from arraylogchain._array.products.certified import certified_product
from arraylogchain._array.products.factors import Factor
from arraylogchain._context import DOUBLE, SINGLE, Array, Context, Precision
from arraylogchain._fold import chunks

# Sums of a_t * b_t, and cotangents over them, lie within these bounds in linear rows. Weights are
# at most 2**400 (2**10 in float32), so that what underflows in a sum is less than eps of it.
_RANGE = {"float32": (2.0**-90, 2.0**90), "float64": (2.0**-900, 2.0**900)}

# Powers of two of room for sums over rows and steps.
_SPARE = 24


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
        self.moves = slice(0, 0)
        if of.wants_pairs:
            self.moves = slice(0, min(steps.stop, self.piece.num_steps - 1) - steps.start)
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
        m = _where_not(xp, self.dead, a.values * self.b.values, 0.0)
        total = _where_not(xp, self.dead, row_sum(self.ctx, m), 1.0)
        f = 1.0 / total if self.g is None else self.ctx.load(self.g, self.precision) / total
        f = _where_not(xp, self.dead, f, 0.0)
        shown = None if self.g is None else _where_not(xp, self.dead, f, 1.0)
        bad = self._out_of_range(total) if shown is None else self._out_of_range(total, shown)
        scale = None
        if bad is None and moves.stop:
            scale, bad = self._scale_beside()
        if bad is not None:
            return None, bad
        if moves.stop:
            u = _where_not(xp, self.still, a.values[moves, ...], 0.0)
            w = f[moves, ...] if scale is None else f[moves, ...] * scale
            v = _where_not(xp, self.still, d.values[moves, ...] * w[..., None], 0.0)
            bad = self._too_large(u, v)
            if bad is not None:
                return None, bad
            self.add_linear_pairs(u, v)
        ctx.apply(xp.multiply, m, f[..., None], out=m)
        return self.spread(m, self.piece.axis + 1), None

    def add_linear_pairs(self, u: Array, v: Array) -> None:
        """Add the sums over rows of u[k] v[j], times matrices."""
        ctx, xp = self.ctx, self.ctx.xp
        # Many rows are not laid out together, which takes longer than their products.
        apart = self.piece.chain.has_one_matrix and u.shape[2] >= u.shape[3]
        for some, factor in self.factors:
            left, right = (x if apart else self.together(x[some, ...]) for x in (u, v))
            left = xp.matrix_transpose(left)
            for j, part in self.panels(factor):
                pairs = ctx.multiply(left, right[..., j])
                pairs = xp.sum(pairs, axis=0) if apart else pairs
                if self.sums.by_logs:
                    # Where nothing passes, weights may be infinite, or of no row.
                    weights = even_weights(ctx, part)
                    pairs = xp.where(pairs == 0, pairs, pairs * weights)
                elif part.taken is not None:
                    pairs = scaled(ctx, pairs, ctx.load(-part.powers, self.precision))
                self._add_pairs(pairs, some, j)

    def in_logs(self) -> Array:
        """Add pairs, and return cotangents times shares of states [n, groups, rows, K]."""
        ctx, xp, moves, nothing = self.ctx, self.ctx.xp, self.moves, -math.inf
        a, b, d = (x.in_log_form(ctx) for x in (self.a, self.b, self.d))
        joint = _where_not(xp, self.dead, a.values + b.values, nothing)
        total = _where_not(xp, self.dead, log_sum(xp, joint), 0.0)
        shares = xp.exp(joint - total[..., None])
        if self.g is not None:
            shares = _where_not(
                xp, self.dead, shares * ctx.load(self.g, self.precision)[..., None], 0.0
            )
        if moves.stop:
            off = self._logs_beside(b, d) - ctx.load(total[moves, ...], ctx.widest)
            u = _where_not(xp, self.still, a.values[moves, ...], nothing)
            large = xp.abs(d.shifts[moves, ...]) >= 1.0 / ctx.widest.eps
            if bool(xp.any(large)):
                # Scales as large as that are not exact.
                v = _where_not(xp, self.still, d.values[moves, ...], nothing)
                off = xp.where(large, -self._own_logs(u, v), off)
            off = ctx.load(off, self.precision)
            v = _where_not(xp, self.still, d.values[moves, ...] + off[..., None], nothing)
            for sign in (1.0, -1.0):
                w = v
                if self.g is not None:
                    size = xp.log(xp.clip(ctx.load(self.g, self.precision) * sign, min=0.0))
                    w = v + size[..., None]
                if self.g is not None or sign > 0:
                    self.add_log_pairs(u, w, sign)
        return self.spread(shares, self.piece.axis + 1)

    def _own_logs(self, u: Array, v: Array) -> Array:
        """Return the logs of the sums of pairs, [n, groups, rows]; 0 where there are none."""
        ctx, xp, precision, found = self.ctx, self.ctx.xp, self.precision, []
        for some, factor in self.factors:
            left = Factor(ctx, self.together(u[some, ...]), 0, precision=precision)
            right, sums = self.together(v[some, ...]), []
            for j, part in self.panels(factor):
                out = ctx.empty(right[:, :, j].shape, right.dtype)
                certified_product(ctx, left, part, out, self.of.run.workspace)
                sums.append(log_sum(xp, out + right[:, :, j]))
            total = log_sum(xp, xp.stack(sums, axis=-1))
            groups, rows = (int(n) for n in u.shape[1:3])
            if self.piece.chain.has_one_matrix:
                found.append(xp.permute_dims(xp.reshape(total, (groups, -1, rows)), (1, 0, 2)))
            else:
                found.append(xp.reshape(total, (-1, groups, rows)))
        total = ctx.load(xp.concat(found, axis=0), ctx.widest)
        return xp.where(total == -math.inf, xp.zeros_like(total), total)

    def add_log_pairs(self, u: Array, v: Array, sign: float) -> None:
        """Add pairs of which the logs are those of u and v summed over rows, and of matrices."""
        ctx, xp = self.ctx, self.ctx.xp
        if bool(xp.all(v == -math.inf)):
            return
        largest, precision = float(xp.max(v)), self.precision
        for some, factor in self.factors:
            left = xp.matrix_transpose(self.together(u[some, ...]))
            left = Factor(ctx, left, 0, precision=precision)
            right = self.together(v[some, ...])
            for j, part in self.panels(factor):
                out = ctx.empty(
                    (left.values.shape[0], left.values.shape[1], right[:, :, j].shape[2]),
                    right.dtype,
                )
                of_v, logs, least = Factor(ctx, right[:, :, j], 1, precision=precision), None, None
                if self.sums.by_logs:
                    logs = part.logs()
                    # What counts for nothing may have lost anything.
                    least = math.log(precision.eps) + min(0.0, largest) - logs
                certified_product(ctx, left, of_v, out, self.of.run.workspace, least=least)
                if logs is None:
                    out = out - ctx.load(part.powers, precision) * math.log(2.0)
                else:
                    out = xp.where((logs == -math.inf) | (out == -math.inf), -math.inf, out + logs)
                self._add_pairs(sign * finite_exp(ctx, out), some, j)

    def _scale_beside(self) -> tuple[Array | None, np.ndarray | None]:
        """Return what d is to be scaled by beside b and matrices, [n, groups, rows]; None for 1.

        With the lanes in which that is not well in range, or not exact.
        """
        # Beyond the second, sums of whole numbers are not exact.
        xp, limit, exact = self.ctx.xp, 40.0, 1.0 / self.ctx.widest.eps
        nats, bits = self._beside(self.b, self.d)
        is_exact = float(xp.max(xp.abs(self.d.shifts))) < exact
        if is_exact and not (bool(xp.any(nats)) or bool(xp.any(bits))):
            return None, None
        size = xp.abs(nats) + xp.abs(bits)
        if is_exact and float(xp.max(size)) <= limit:
            return self.ctx.load(xp.exp(nats) * 2.0**bits, self.precision), None
        odd = ~(size <= limit) | (xp.abs(self.d.shifts[self.moves, ...]) >= exact)
        odd = odd if self.still is None else odd & ~self.still
        if not bool(xp.any(odd)):
            size = xp.where(size <= limit, xp.exp(nats) * 2.0**bits, xp.ones_like(size))
            return self.ctx.load(size, self.precision), None
        return None, self._lanes_of(odd)

    def _beside(self, b: Messages, d: Messages) -> tuple[Array, Array]:
        """Return the scale of d, and of matrices, less that of b: nats, and powers of two."""
        xp, moves, groups = self.ctx.xp, self.moves, int(self.a.shifts.shape[1])
        scales = []
        for name in ("shift", "powers"):
            parts = [xp.reshape(getattr(f, name), (-1, groups, 1)) for _, f in self.factors]
            scales.append(parts[0] if len(parts) == 1 else xp.concat(parts, axis=0))
        nats = (d.shifts[moves, ...] - b.shifts[moves, ...]) + scales[0]
        return nats, (d.powers[moves, ...] - b.powers[moves, ...]) + scales[1]

    def _logs_beside(self, b: Messages, d: Messages) -> Array:
        nats, bits = self._beside(b, d)
        return (nats + bits * LN2_HIGH) + bits * LN2_LOW

    @cached_property
    def factors(self) -> list[tuple[slice, Factor]]:
        """The matrices of the transitions from some of the steps, [n * groups, K, K]."""
        piece, xp, of_groups = (
            self.piece,
            self.ctx.xp,
            self.some is not None and not self.piece.axis,
        )
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

    def together(self, x: Array) -> Array:
        """Return [n, groups, rows, K] as [groups, n * rows, K], or as [n * groups, rows, K]."""
        xp, (count, groups, rows, size) = self.ctx.xp, x.shape
        if not self.piece.chain.has_one_matrix:
            return xp.reshape(x, (count * groups, rows, size))
        return xp.reshape(xp.permute_dims(x, (1, 0, 2, 3)), (groups, count * rows, size))

    def panels(self, factor: Factor) -> Iterator[tuple[slice, Factor]]:
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

    @property
    def precision(self) -> Precision:
        return DOUBLE if self.a.values.dtype == self.ctx.xp.float64 else SINGLE

    def _out_of_range(self, *found: Array) -> np.ndarray | None:
        """Return in which lanes numbers [n, groups, rows] are not well in range; None for none."""
        xp, (least, most), odd = self.ctx.xp, _RANGE[self.precision.name], None
        for x in found:
            if not (float(xp.min(x)) >= least and float(xp.max(x)) <= most):
                size = xp.abs(x)
                wrong = ~((size >= least) & (size <= most))
                odd = wrong if odd is None else odd | wrong
        return None if odd is None or not bool(xp.any(odd)) else self._lanes_of(odd)

    def _too_large(self, u: Array, v: Array) -> np.ndarray | None:
        """Return in which lanes products u[k] v[j], or sums of these, may leave the range."""
        xp, limit = self.ctx.xp, 2.0 ** (self.precision.top - _SPARE)
        if float(xp.max(xp.abs(v))) * float(xp.max(u)) <= limit:
            return None
        odd = ~(xp.max(u, axis=-1) <= limit / xp.max(xp.abs(v), axis=-1))
        return self._lanes_of(odd) if bool(xp.any(odd)) else None

    def _lanes_of(self, odd: Array) -> np.ndarray:
        """Return which lanes have an odd number, on the host."""
        odd = self.ctx.xp.any(odd, axis=(0, 2 - self.piece.axis))
        return np.asarray([bool(odd[i]) for i in range(int(odd.shape[0]))])


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


def even_weights(ctx: Context, factor: Factor) -> Array:
    """Return the weights of a factor with one scale for all columns."""
    weights = factor.weights()
    return weights if factor.taken is None else weights * ctx.xp.exp(factor.offset)


def finite_exp(ctx: Context, logs: Array) -> Array:
    """Return exponentials, about the largest number where they would exceed it."""
    precision = DOUBLE if logs.dtype == ctx.xp.float64 else SINGLE
    limit = math.log(2.0) * (precision.top + 1) * (1.0 - 4.0 * precision.eps)
    return ctx.xp.exp(ctx.xp.clip(logs, max=limit))
