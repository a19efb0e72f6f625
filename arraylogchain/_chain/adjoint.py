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
lambda and w: at most (2 K + 1) tiny in an entry, which weighs at most sum(a_i) <= K 2**ceiling; the
ceiling is chosen such that this is below eps / 8 at each step, for |g| of at least 2**-_SMALLEST.

Entries of lambda stay in range: where a_i is positive and proved, lambda_i <= g / a_i, and
otherwise they lie within the ratio that the path sums were proved with. Only where a_i is exactly
zero can lambda overflow; it is then kept at a bound, which shows in nothing but derivatives by
zeros of linear transitions into states that no path reaches: those stay below 2**(top - 16) / K.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from arraylogchain._arrays import Array, Precision
from arraylogchain._chain.gradient_sums import GradientSums
from arraylogchain._chain.scaled_form import ScaledForm
from arraylogchain._chain.states import State, scale_by_powers
from arraylogchain._chain.steps import Steps
from arraylogchain._fold import Box

# Cotangents within 2**-_SMALLEST and 2**_LARGEST become part of lambda.
_SMALLEST = 16
_LARGEST = 8


def adjoint_ceiling(precision: Precision, size: int) -> int:
    """Return the power of two below which states have to stay for the proof above."""
    bits = -math.log2(precision.eps) + 3 + _SMALLEST + 2 * math.log2(size) + 2
    return int(precision.top - 1 - bits)


@dataclass(slots=True)
class ScaledAdjoint:
    """The backward pass for one tile, or some rows of it, block of steps by block of steps.

    Attributes
    ----------
    form : ScaledForm
        What the forward pass was computed with.
    steps : Steps
    box : tuple of slice
        The tile's place in the batch.
    sums : GradientSums
        Where gradients are added.
    adjoint : array [groups, rows, 1 or K]
        lambda of the last state that was not yet passed.
    late : array [groups, rows, 1] or None
        Cotangents that are too large or too small to be part of lambda.
    stored : array [groups, rows, count, K] or None
        The factors of all steps, if they have been kept.
    failed : bool array [groups, rows, 1] or None
        Rows that the forward pass did not prove. Their adjoints are 0, their factors may be NaN.
    """

    form: ScaledForm
    steps: Steps
    box: Box
    sums: GradientSums
    adjoint: Array
    late: Array | None
    stored: Array | None = None
    failed: Array | None = None

    def run(self, block: slice, before: State | None, history: Sequence[State]) -> None:
        """Go back through a block of steps, given its states and the one before it."""
        ctx, xp = self.form.ctx, self.form.ctx.xp
        limit = 2.0 ** (self.form.precision.top - 16) / self.steps.chain.size
        ahead_room, room = (xp.empty_like(history[0].values) for _ in range(2))
        for i in reversed(range(block.start, block.stop)):
            state = history[i - block.start]
            previous = history[i - block.start - 1] if i > block.start else before
            # Powers first: lambda_i 2**p_i is g over the state before it was rescaled, at most.
            ahead = self.adjoint
            if state.power is not None:
                ahead = scale_by_powers(ctx, ahead, state.power, self.form.precision)
            # Before gradients are added: their place may be where the factors lie.
            weights = self._factors(i, state)
            if weights is not None:
                if state.alive is not None:
                    ahead = xp.clip(ahead, -limit, limit)
                # The same memory at each step: fresh memory costs time.
                ctx.apply(xp.multiply, ahead, weights, out=ahead_room)
                ahead = ahead_room
            if state.alive is not None:
                ahead = xp.clip(ahead, -limit, limit)
            if self.failed is not None:
                ahead = xp.where(self.failed, xp.zeros_like(ahead), ahead)
            self.sums.add_potentials(
                self.steps, self.box, i, state.values, self._weighted(self.adjoint)
            )
            if previous is None:
                self._start(state, ahead)
                return
            assert state.matrix is not None
            size = int(state.values.shape[-1])
            if int(ahead.shape[-1]) < size:
                ahead = xp.broadcast_to(ahead, (*ahead.shape[:-1], size))
            values = ctx.load(previous.values, self.form.precision)
            self.sums.add_pairs(
                self.steps,
                self.box,
                i - 1,
                state.matrix,
                values,
                self._weighted(ahead),
                bounded=state.alive is None,
            )
            self.adjoint = state.matrix.multiply_transposed(ahead, room)

    def _factors(self, i: int, state: State) -> Array | None:
        if self.stored is not None:
            return self.stored[:, :, i, :]
        return self.form.exponentials.again(self.steps, i, state)

    def _weighted(self, x: Array) -> Array:
        return x if self.late is None else x * self.late

    def _start(self, state: State, ahead: Array) -> None:
        """Add derivatives by the start, given w of the first step."""
        ctx, chain = self.form.ctx, self.steps.chain
        if self.sums.start is None:
            return
        if chain.start_in_logs:
            self.sums.add_start(self.steps, self.box, state.values, self._weighted(self.adjoint))
            return
        # The start was scaled by 2**-(exponent + power).
        power = -state.exponent
        if state.power is not None:
            power = power - ctx.load(state.power, ctx.widest)
        ones = ctx.xp.ones_like(state.values)
        scaled = scale_by_powers(ctx, self._weighted(ahead) * ones, power, self.form.precision)
        self.sums.add_start(self.steps, self.box, scaled, ctx.xp.ones_like(scaled))


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
