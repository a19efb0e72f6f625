"""The recursion in array operations, in linear space where that is certified, else in log space.

A segment is computed in linear space if all its weights are at least 2**-60. Otherwise it is
computed again from its start in log space, where each step is a certified product.

*Proof for linear space.* Weights of messages lie in [MIN_WEIGHT, MAX_WEIGHT], factors exp(x) are at
most MAX_FACTOR, and entries of a matrix at most 2. Underflow in a sum of K terms, in entries of the
matrix and in products, costs less than 5 K tiny MAX_WEIGHT. The sum is at least MIN_WEIGHT /
MAX_FACTOR, as it is at least MIN_WEIGHT after it is multiplied by its factor. In float32,
5 K tiny MAX_WEIGHT < eps MIN_WEIGHT / MAX_FACTOR for K up to 2**14. A sum that is rescaled before
it is in range is compared with 5 K tiny MAX_WEIGHT / eps itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from arraylogchain._backends.array_backtraces import ArrayBacktraces, RowIndex
from arraylogchain._backends.interface import Keep, Messages, SegmentMessages
from arraylogchain._backends.shards import Shard
from arraylogchain._core import scaled
from arraylogchain._core.axes import chunks
from arraylogchain._core.context import Array
from arraylogchain._core.scaled import whole_maximum
from arraylogchain._products.certified import certified_product
from arraylogchain._products.operand import Operand

MIN_WEIGHT, MAX_WEIGHT, MAX_FACTOR = 2.0**-60, 2.0**10, 2.0**16
_MAX_STATES = 1 << 14

# ``predict(before, time, active, out)`` multiplies messages by the matrices of a transition,
# ``update(predicted, i, out)`` by exponentials of potentials. They return False if the segment is
# to be computed in log space: if matrices do not fit the workspace, or messages are not certified.
Predict = Callable[[Array, int, RowIndex, Array], bool]
Update = Callable[[Array, int, Array], bool]


class ArrayBackend(ArrayBacktraces):
    """The recursion over a shard in array operations; see `interface.Backend`."""

    max_useful_rows: int | None = None
    holds_matrices = False

    def __init__(self, shard: Shard, workspace: int) -> None:
        super().__init__(shard, workspace)
        # Whether all steps have the same matrices, for the same groups.
        self._is_same = shard.chain.has_one_matrix and (shard.axis == 1 or shard.lengths is None)
        self._cached: dict[tuple[bool, bool], tuple[Operand, Array | None]] = {}

    def advance(
        self, carry: Messages | None, steps: slice, backward: bool, keep: Keep
    ) -> SegmentMessages:
        """Return the messages of one segment, forward or backward."""
        start = self._initial_carry(backward) if carry is None else carry
        x, stepper = self._potentials(steps), _SegmentStepper(self, steps, backward, keep)
        messages = stepper.in_linear_space(start, x)
        return messages or stepper.in_log_space(start, x)

    def matrix(
        self, time: int, backward: bool, as_logs: bool = False
    ) -> tuple[Operand, Array | None]:
        """Return the matrices from a step to the next as an operand, and their entries.

        Only active groups have one; backward they are transposed. Entries are weights or, if
        `as_logs`, logarithms, without the operand's scale. They are None if they exceed the
        workspace, or are logarithms that are used at one step only.
        """
        shard, ctx, key = self.shard, self.ctx, (backward, as_logs)
        if key in self._cached:
            return self._cached[key]
        x = self.input_matrix(time)
        x = x if shard.axis else x[: shard.num_active(time + 1), :, :]
        x = x.mT if backward else x
        operand, entries = Operand(ctx, x, 1, is_log=self.has_logs, common=True), None
        is_view = ctx.is_numpy and operand.shift is None and x.dtype == ctx.dtype(ctx.precision)
        if as_logs:
            # An entry takes at most 128 bytes, with temporaries.
            if self._is_same and math.prod(x.shape) <= self.workspace // 128:
                entries = operand.logs()
        elif is_view or math.prod(x.shape) * 3 * ctx.precision.itemsize <= self.workspace // 2:
            entries = operand.cache_weights().with_common_scale()
        if self._is_same:
            self._cached[key] = operand, entries
        return operand, entries

    def max_product(self, carry: Messages | None, steps: slice, keep: Keep) -> SegmentMessages:
        """Return the messages of one segment forward, with maxima instead of sums."""
        start = self._initial_carry(False) if carry is None else carry
        stepper = _SegmentStepper(self, steps, False, keep)
        return stepper.in_log_space(start, self._potentials(steps), max_product=True)

    def _potentials(self, steps: slice) -> Array:
        """Return potentials [n, groups, rows, K] in the precision, 0 past rows' ends."""
        ctx, xp, is_valid = self.ctx, self.ctx.xp, self.shard.valid_steps(steps)
        x = xp.permute_dims(self.shard.potentials(steps), (2, 0, 1, 3))
        if is_valid is not None:
            x = xp.where(is_valid[..., None], x, 0.0)
        return ctx.load(x, ctx.precision)

    def _initial_carry(self, backward: bool) -> Messages:
        """Return the carry at the start of a recursion."""
        ctx, xp, (groups, rows, _) = self.ctx, self.ctx.xp, self.shard.state_shape
        x, is_log = self.shard.boundary_weights(backward)
        zeros = xp.zeros((groups, rows), dtype=ctx.dtype(ctx.widest), device=ctx.device)

        x, shifts, exponents = ctx.load(x, ctx.widest), zeros, zeros
        if is_log:
            shift = whole_maximum(xp, x)
            x, shifts = x - shift, shift[..., 0]
        else:
            x = xp.where(x < 0, math.nan, x)
            if not ctx.are_between(x, MIN_WEIGHT, MAX_WEIGHT):
                is_log, (x, exponents) = True, scaled.scaled_logs(ctx, x)
        form = np.ones((groups, rows), bool) if is_log else None
        return Messages(ctx.load(x, ctx.precision), shifts, exponents, form)


class _SegmentStepper:
    """The steps of one segment.

    Attributes
    ----------
    shifts, exponents : array [groups, rows]
        The scale of the current message.
    """

    def __init__(self, backend: ArrayBackend, steps: slice, backward: bool, keep: Keep) -> None:
        self.backend, self.shard, self.ctx = backend, backend.shard, backend.ctx
        self.steps, self.backward, self.keep = steps, backward, keep
        self.shifts: Array = None
        self.exponents: Array = None

    def in_linear_space(self, carry: Messages, x: Array) -> SegmentMessages | None:
        """Return the messages, computed in linear space; None if that is not certified."""
        ctx, xp = self.ctx, self.ctx.xp
        values = carry.values if carry.is_log is None else xp.exp(carry.values)
        if int(x.shape[-1]) > _MAX_STATES or not ctx.are_between(values, MIN_WEIGHT, MAX_WEIGHT):
            return None
        # Contiguous by steps, which are read one by one.
        weights, maxima = ctx.empty(tuple(x.shape), x.dtype), None
        ctx.apply(xp.exp, x, out=weights)
        if not ctx.are_between(weights, 1.0 / MAX_FACTOR, MAX_FACTOR):
            maxima = whole_maximum(xp, x)
            ctx.apply(xp.exp, x - maxima, out=weights)
            if not ctx.are_between(weights, MIN_WEIGHT, MAX_FACTOR):
                return None
            maxima = ctx.load(maxima[..., 0], ctx.widest)
        precision = ctx.precision
        lowest = 5.0 * int(x.shape[-1]) * precision.tiny * MAX_WEIGHT / precision.eps

        def predict(before: Array, time: int, active: RowIndex, out: Array) -> bool:
            operand, matrix = self.backend.matrix(time, self.backward)
            if matrix is None:
                return False
            ctx.multiply(before, matrix, out)
            self._add_scale(operand.scale, active)
            return True

        def update(predicted: Array, i: int, out: Array) -> bool:
            ctx.apply(xp.multiply, predicted, weights[i, ...], out=out)
            if not ctx.are_between(out, MIN_WEIGHT, MAX_WEIGHT):
                # `predicted` may be `out`.
                is_certified = ctx.are_between(out / weights[i, ...], lowest, math.inf)
                exponent = -xp.floor(xp.log2(xp.max(out, axis=-1)))
                out[...] = ctx.scaled(out, exponent[..., None])
                # NaN fails these tests too.
                if not is_certified or not ctx.are_between(out, MIN_WEIGHT, MAX_WEIGHT):
                    return False
                self.exponents = self.exponents - ctx.load(exponent, ctx.widest)
            if maxima is not None:
                self.shifts = self.shifts + maxima[i, ...]
            return True

        return self._advance(values, carry, False, predict, update)

    def in_log_space(self, carry: Messages, x: Array, max_product: bool = False) -> SegmentMessages:
        """Return the messages, computed in log space, of sums or of maxima instead of sums."""
        ctx, xp, carry = self.ctx, self.ctx.xp, carry.to_log_space(self.ctx)
        # Shifted first, so that large potentials do not absorb small differences.
        maxima = whole_maximum(xp, x)
        x = x - maxima

        def update(predicted: Array, i: int, out: Array) -> bool:
            ctx.apply(xp.add, predicted, x[i, ...], out=out)
            top = whole_maximum(xp, out)
            if max_product:
                # Large terms cancel before the potential is added, and are not rounded with it.
                ctx.apply(xp.subtract, predicted, top, out=out)
                ctx.apply(xp.add, out, x[i, ...], out=out)
            else:
                ctx.apply(xp.subtract, out, top, out=out)
            for rounded in (maxima[i, ...], top):  # widened first, to be added exactly
                self.shifts = self.shifts + ctx.load(rounded[..., 0], ctx.widest)
            return True

        predict = self.maxplus_product if max_product else self.log_product
        messages = self._advance(carry.values, carry, True, predict, update)
        assert messages is not None
        return messages

    def log_product(self, before: Array, time: int, active: RowIndex, out: Array) -> bool:
        """Write the certified product of a message and the matrices from a step to the next."""
        ctx, workspace = self.ctx, self.backend.workspace
        (operand, weights), chunk = self.backend.matrix(time, self.backward), None
        if weights is None:
            size = math.prod(operand.values.shape) // int(operand.values.shape[-2])
            chunk = max(1, workspace // 6 // (ctx.precision.itemsize * size))
        left = Operand(ctx, before, 0, shifts=False)
        certified_product(ctx, left, operand, out, workspace // 2, chunk)
        self._add_scale(operand.scale, active)
        return True

    def maxplus_product(self, before: Array, time: int, active: RowIndex, out: Array) -> bool:
        """Write max_k before[k] + log P[k, :], some k at a time."""
        ctx, xp, backend = self.ctx, self.ctx.xp, self.backend
        (matrix, logs), out[...] = backend.matrix(time, False, as_logs=True), -math.inf
        scratch_size = min(ctx.block, backend.workspace // (4 * ctx.precision.itemsize))
        for k in chunks(int(before.shape[-1]), max(1, scratch_size // math.prod(before.shape))):
            log_row = matrix.logs(k) if logs is None else logs[:, k, :]
            terms = before[:, :, k, None] + log_row[:, None, :, :]
            out[...] = xp.maximum(out, xp.max(terms, axis=-2))
        self._add_scale(matrix.scale, active)
        return True

    def _add_scale(self, scale: tuple[Array, Array] | None, active: RowIndex) -> None:
        """Add the scale of a matrix to that of the active rows."""
        if scale is not None:
            xp, (shift, exponent) = self.ctx.xp, scale
            shifts, exponents = (xp.asarray(x, copy=True) for x in (self.shifts, self.exponents))
            shifts[active] = shifts[active] + shift[..., 0]
            exponents[active] = exponents[active] + exponent[..., 0]
            self.shifts, self.exponents = shifts, exponents

    def _advance(
        self, values: Array, carry: Messages, is_log: bool, predict: Predict, update: Update
    ) -> SegmentMessages | None:
        """Return the messages; None where a step is not certified."""
        ctx, xp, shard, backward = self.ctx, self.ctx.xp, self.shard, self.backward
        start, stop = self.steps.start, self.steps.stop
        count, has_both, shape = stop - start, self.keep == Keep.ALL, shard.state_shape
        dtype = ctx.dtype(ctx.precision)
        # Messages that are not kept are overwritten.
        predicted = ctx.empty((count if has_both else 1, *shape), dtype)
        num_updated = {Keep.NOTHING: 2, Keep.UPDATED: count, Keep.ALL: count + 1}[self.keep]
        updated = ctx.empty((num_updated, *shape), dtype)
        predicted_scales: list[Any] = []
        updated_scales: list[Any] = []
        before, self.shifts, self.exponents = values, carry.shifts, carry.exponents
        if has_both:
            updated[count if backward else 0, ...] = before
            updated_scales.append((self.shifts, self.exponents))
        for i in reversed(range(count)) if backward else range(count):
            time = start + i
            after = updated[(i + (has_both and not backward)) % int(updated.shape[0]), ...]
            into = predicted[i if has_both else 0, ...]
            # Only the active rows make a transition into this step; the others keep their message.
            num_active = (
                shard.num_active(time + 1) if backward else shard.num_active(time) * (time > 0)
            )
            if num_active < before.shape[shard.axis]:
                inactive = shard.row_index(num_active, None)
                into[inactive] = before[inactive]
            if num_active:
                active, last = shard.row_index(None, num_active), time if backward else time - 1
                if not predict(before[active], last, active, into[active]):
                    return None
            predicted_scales.append((self.shifts, self.exponents))
            if not update(into, i, after):
                return None
            updated_scales.append((self.shifts, self.exponents))
            before = after
        form = np.ones(shape[:2], bool) if is_log else None

        def messages(values: Array, scales: list[Any]) -> Messages:
            in_order = scales[::-1] if backward else scales
            shifts, exponents = (xp.stack(x) for x in zip(*in_order, strict=True))
            return Messages(values, shifts, exponents, form)

        if self.keep == Keep.NOTHING:
            before = xp.asarray(before, copy=True)
        return SegmentMessages(
            messages(predicted, predicted_scales) if has_both else None,
            messages(updated, updated_scales) if self.keep != Keep.NOTHING else None,
            Messages(before, self.shifts, self.exponents, form),
        )
