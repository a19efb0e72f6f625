"""The backward pass over states in scaled form: posterior weights and gradients.

The forward pass made ``a_i = 2**p_i ((a_{i-1} @ F_i) * E_i)``, where the true weights are a_i times
a scale of each row. With Z the sum of a row's last state, the *adjoint*

    lambda_last = g / Z,    lambda_{i-1} = F_i @ w_i,    w_i = 2**p_i E_i * lambda_i

is the derivative of g log Z by a_i in the same scale, so no scale has to be carried along, and
a_i * lambda_i sums to g in every row and at every step. From it come the gradients:

    by log potentials       a_i * lambda_i, posterior probabilities times g
    by the factors F_i      a_{i-1} w_i, which is finite at F = 0; times F, by their logarithms

*Proof.* Factors F and E that underflow were lost in the forward pass as well, which proved that
the paths through them have at most a few eps of Z. New is only what underflows in products with
lambda and w: at most (2 K + 1) tiny in an entry. It weighs at most the sum of a_i, or of
a_{i-1} @ F_i, both below K 2**(ceiling + 4); the ceiling is chosen such that this is below eps / 8
at each step, for |g| of at least 2**-_SMALLEST. Other cotangents are left out of lambda, g = 1 in
all of this, and come in where lambda has met a_i.

Entries of lambda stay in range: where a_i is positive and proved, lambda_i <= g / a_i, and
otherwise they lie within the ratio that the path sums were proved with. Only where a_i is exactly
zero can lambda overflow; it is then kept at a bound. Products a_k w_j can overflow where no
transition leads from k to j, or no path to j; they are kept finite, whatever that makes of them.
Both show in nothing but derivatives by zeros of linear weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from arraylogchain._chain.forms.scaled import ScaledForm
from arraylogchain._chain.forms.states import State, scale_by_powers
from arraylogchain._chain.posterior.sums import PosteriorSums, bounded
from arraylogchain._chain.steps import Steps, first_of, of_units
from arraylogchain._context import Array, Precision
from arraylogchain._fold import Box

# Cotangents within 2**-_SMALLEST and 2**_LARGEST become part of lambda.
_SMALLEST = 16
_LARGEST = 8


def adjoint_ceiling(precision: Precision, size: int) -> int:
    """Return the power of two below which states have to stay for the proof above."""
    bits = -math.log2(precision.eps) + 3 + _SMALLEST + 2 * math.log2(size) + 6
    return int(precision.top - 1 - bits)


class ScaledAdjoint:
    """The backward pass for one tile, or some rows of it, block of steps by block of steps.

    Chains that end earlier come in on the way: at every step, `here` is the place of those that
    have, among `everyone`, and the other attributes are theirs.

    Parameters
    ----------
    form : ScaledForm
        What the forward pass was computed with.
    everyone : Steps
    box : tuple of slice
        The tile's place in the batch.
    sums : PosteriorSums
        Where gradients are added.
    first : array [groups, rows, 1 or K]
        lambda of the last state.
    late : array [groups, rows, 1] or None
        Cotangents that are too large or too small to be part of lambda.
    stored : array [groups, rows, count, K] or None
        The factors of all steps, if they have been kept.
    failed : bool array [groups, rows, 1] or None
        Rows that the forward pass did not prove. Their adjoints are 0, their factors may be NaN.
    """

    def __init__(
        self,
        form: ScaledForm,
        everyone: Steps,
        box: Box,
        sums: PosteriorSums,
        first: Array,
        late: Array | None,
        stored: Array | None,
        failed: Array | None,
    ) -> None:
        self.form, self.everyone, self.box, self.sums = form, everyone, box, sums
        self.first, self.all_late, self.stored, self.all_failed = first, late, stored, failed
        self.steps, self.late, self.failed = everyone, late, failed
        # Memory for w and for lambda; fresh memory at each step costs time.
        shape = (*first.shape[:2], everyone.chain.size)
        self.rooms = [form.ctx.empty(shape, first.dtype) for _ in range(2)]
        # lambda of the last state that was not yet passed.
        self.adjoint = first[first_of(0, everyone.select_axis)]
        self.here = first_of(0, everyone.select_axis)

    def run(self, block: slice, before: State | None, history: Sequence[State]) -> None:
        """Go back through a block of steps, given its states and the one before it."""
        xp = self.form.ctx.xp
        limit = 2.0 ** (self.form.precision.top - 16) / self.everyone.chain.size
        axis = self.everyone.select_axis
        for i in reversed(range(block.start, block.stop)):
            state = history[i - block.start]
            previous = history[i - block.start - 1] if i > block.start else before
            units = int(state.values.shape[axis])
            if units == 0:
                continue
            self._let_in(units)
            ahead_room, room = (x[self.here] for x in self.rooms)
            weights = self._factors(i, state)
            ahead = self._ahead(state, weights, ahead_room, limit)
            advancing = self.steps.advancing(i)
            adjoint = self._only(advancing, self.adjoint)
            if self.late is None:
                self.sums.add_potentials(self.steps, self.box, i, state.values, adjoint)
            else:
                # Their product is at most 1, whatever they are themselves.
                posterior = state.values * adjoint
                self.sums.add_potentials(self.steps, self.box, i, posterior, self.late)
            if previous is None:
                self._start(state, ahead)
                return
            assert state.matrix is not None
            previous = previous.units(slice(0, units), axis)
            size = int(state.values.shape[-1])
            if int(ahead.shape[-1]) < size:
                ahead = xp.broadcast_to(ahead, (*ahead.shape[:-1], size))
            self._pairs(i - 1, state, previous, self._only(advancing, ahead))
            self.adjoint = state.matrix.multiply_transposed(ahead, room)
            if self.failed is not None:
                room[...] = self._kept(room)
            if advancing is not None:
                room[...] = xp.where(advancing, room, ahead)

    def _let_in(self, units: int) -> None:
        """Go on with the first rows, or groups, which are more and more of them."""
        axis = self.everyone.select_axis
        here = first_of(units, axis)
        if self.here == here:
            return
        known = int(self.adjoint.shape[axis])
        self.here, self.adjoint, self.steps = here, self.first, self.everyone.first(units)
        if units < self.everyone.units or known:
            entering = of_units(slice(known, units), axis)
            self.rooms[1][entering] = self.first[entering]
            self.adjoint = self.rooms[1][here]
        self.late = None if self.all_late is None else self.all_late[here]
        self.failed = None if self.all_failed is None else self.all_failed[here]

    def _only(self, advancing: Array | None, x: Array) -> Array:
        """Return x with zeros for chains that have ended."""
        xp = self.form.ctx.xp
        return x if advancing is None else xp.where(advancing, x, xp.zeros_like(x))

    def _ahead(self, state: State, weights: Array | None, room: Array, limit: float) -> Array:
        """Return w of a step, given its factors; `room` is memory for it."""
        ctx, xp, precision = self.form.ctx, self.form.ctx.xp, self.form.precision
        ahead, power = self.adjoint, state.power
        if power is not None:
            # Growing first, shrinking last: in between, nothing underflows that would not at last.
            ahead = scale_by_powers(ctx, ahead, xp.clip(power, min=0.0), precision)
        if weights is not None:
            if state.alive is not None:
                ahead = xp.clip(ahead, -limit, limit)
            # The same memory at each step: fresh memory costs time.
            ctx.apply(xp.multiply, ahead, weights, out=room)
            ahead = room
        if power is not None:
            ahead = scale_by_powers(ctx, ahead, xp.clip(power, max=0.0), precision)
        if state.alive is not None:
            ahead = xp.clip(ahead, -limit, limit)
        return self._kept(ahead)

    def _kept(self, x: Array) -> Array:
        """Return x, but for zeros in rows that were not proved: factors there may be infinite."""
        xp = self.form.ctx.xp
        return x if self.failed is None else xp.where(self.failed, xp.zeros_like(x), x)

    def _pairs(self, i: int, state: State, previous: State, ahead: Array) -> None:
        """Add derivatives by the matrices of step i."""
        ctx, matrix = self.form.ctx, state.matrix
        assert matrix is not None
        values = ctx.load(previous.values, self.form.precision)
        if self.late is not None:
            # a_k w_j times g is in range, though neither has to be when it is multiplied by g.
            values = ctx.load(values, ctx.widest)
            ahead = ctx.load(ahead, ctx.widest) * ctx.load(self.late, ctx.widest)
        # Where no transition leads, or no path, nothing bounds a_k w_j.
        in_range = matrix.positive and state.alive is None and self.failed is None
        self.sums.add_pairs(self.steps, self.box, i, matrix, values, ahead, in_range)

    def _factors(self, i: int, state: State) -> Array | None:
        if self.stored is not None:
            return self.stored[:, :, i, :]
        return self.form.exponentials.again(self.steps, i, state)

    def _start(self, state: State, ahead: Array) -> None:
        """Add derivatives by the start, given w of the first step."""
        ctx, xp, precision = self.form.ctx, self.form.ctx.xp, self.form.precision
        if self.sums.start is None:
            return
        if self.steps.chain.start_in_logs:
            derivative = state.values * self.adjoint
        else:
            # The start was scaled by 2**-(exponent + power).
            power = -state.exponent
            if state.power is not None:
                power = power - ctx.load(state.power, ctx.widest)
            full = ahead * xp.ones_like(state.values)
            derivative = bounded(xp, scale_by_powers(ctx, full, power, precision), precision)
        if self.late is not None:
            derivative = bounded(xp, derivative * self.late, precision)
        self.sums.add_start(self.steps, self.box, derivative, xp.ones_like(derivative[..., :1]))


def first_adjoint(
    form: ScaledForm, steps: Steps, last: State, cotangent: Array
) -> tuple[Array, Array | None]:
    """Return lambda of the last state, and what it leaves out.

    Parameters
    ----------
    cotangent : array [groups, rows, 1]
        0 for rows that the forward pass did not prove.

    Returns
    -------
    first : array [groups, rows, 1 or K]
    late : array [groups, rows, 1] or None
        Cotangents that are too large or too small to be part of it.
    """
    ctx, xp, precision = form.ctx, form.ctx.xp, form.precision
    values, ends = ctx.load(last.values, precision), form.ends_of(steps)
    total = xp.sum(values if ends is None else values * ends, axis=-1, keepdims=True)
    g = ctx.load(cotangent, precision)
    nothing = (total == 0) | (g == 0)
    size = xp.where(nothing, xp.ones_like(g), xp.abs(g))
    moderate = bool(xp.all((size >= 2.0**-_SMALLEST) & (size <= 2.0**_LARGEST)))
    top = xp.where(nothing, xp.zeros_like(g), g if moderate else xp.ones_like(g))
    first = top / xp.where(nothing, xp.ones_like(g), total)
    late = None if moderate else xp.where(nothing, xp.zeros_like(g), g)
    return first if ends is None else first * ends, late
