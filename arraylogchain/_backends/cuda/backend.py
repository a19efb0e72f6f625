"""Chains by kernels: the recursion, forward and backward, the best path and the way back.

Messages are in logs. What a piece has of a block of steps is taken in one launch, or in a few where
matrices of their own would not fit the workspace, or a launch would take longer than a second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from arraylogchain._backends.array import ArrayBackend
from arraylogchain._backends.cuda import hard_cases
from arraylogchain._backends.cuda.geometry import Geometry, geometry_of
from arraylogchain._backends.interface import Keep, Messages, SegmentMessages
from arraylogchain._backends.shards import Shard
from arraylogchain._core.context import Array, Context
from arraylogchain._core.scaled import LN2_HIGH, LN2_LOW, whole_maximum, whole_part
from arraylogchain._cuda.kernels import C_TYPES, Kernel, Launch, contiguous, pack, struct, threshold
from arraylogchain._cuda.self_check import is_usable
from arraylogchain._products import cuda

# Entries of states that a launch goes through at the most: less than a second's work.
_ENTRIES_OF_A_LAUNCH = 2**22

_MESSAGES = struct((np.int64, "logs shifts powers step"))
_CHAIN = {
    name: struct(
        (np.int64, "potentials x_group x_row x_step x_state factors shifts logs scales"),
        (np.int64, "matrices matrix_step matrix lengths"),
        (np.int32, "groups rows steps states lanes time direction chain_steps"),
        (np.dtype(name), "threshold"),
    )
    for name in ("float32", "float64")
}


@dataclass(frozen=True)
class _Matrices:
    """Matrices [groups, n, K, K] as the kernels take them, see struct Chain; all contiguous."""

    factors: Array
    shifts: Array
    logs: Array
    scales: Array

    @classmethod
    def prepare(cls, ctx: Context, x: Array, is_log: bool) -> _Matrices:
        xp = ctx.xp
        x = contiguous(ctx, ctx.load(x, ctx.precision))
        if not is_log:
            x = xp.where(x < 0, math.nan, x)
        maxima = xp.max(x, axis=-2, keepdims=True)
        maxima = maxima if is_log else xp.log2(maxima)
        largest, maxima = whole_maximum(xp, maxima), whole_part(xp, maxima)
        high = maxima - largest
        if is_log:
            logs, low = x - maxima, xp.zeros_like(maxima)
            factors = xp.exp(logs)
        else:
            factors, high, low = ctx.scaled(x, -maxima), high * LN2_HIGH, high * LN2_LOW
            # A log of what is no normal number is that of the weight itself, and as far from 0.
            far = xp.log(x) - maxima * math.log(2.0)
            logs = xp.where(factors >= ctx.precision.tiny, xp.log(factors), far) + low
        scales = ctx.kernels.empty((*largest.shape[:2], 2), "float64")
        scales[..., 0 if is_log else 1] = largest[..., 0, 0]
        scales[..., 1 if is_log else 0] = 0.0
        shifts = xp.stack((high[..., 0, :], low[..., 0, :]), axis=-1)
        return cls(factors, shifts, logs, scales)


class CudaBackend(ArrayBackend):
    """The recursion over a piece by kernels; see `interface.Backend`.

    Where a kernel cannot be used, and for samples, it is that of array operations.
    """

    holds_matrices = True

    def __init__(self, shard: Shard, workspace: int, geometry: Geometry | None = None) -> None:
        super().__init__(shard, workspace)
        self._geometry = geometry
        self._prepared: dict[bool, _Matrices] = {}
        self._lengths: Array | None = None
        if shard.lengths is not None:
            flat = shard.lengths.reshape(-1).astype(np.int32)
            self._lengths = self.ctx.xp.asarray(flat, device=self.ctx.device)

    def advance(
        self, carry: Messages | None, steps: slice, backward: bool, keep: Keep
    ) -> SegmentMessages:
        """Take a block of steps, forward or backward."""
        geometry = self._geometry or geometry_of(self.shard, sums=True)
        if not self._has(geometry.kernel(self.ctx)):
            return super().advance(carry, steps, backward, keep)
        start, count = self._prepare_carry(carry, backward), steps.stop - steps.start
        predicted = self._messages(count) if keep == Keep.ALL else None
        updated = None if keep == Keep.NOTHING else self._messages(count + 1)
        if updated is not None:
            first = count if backward else 0
            for name in ("values", "shifts", "exponents"):
                getattr(updated, name)[first, ...] = getattr(start, name)
        carry = start
        for part in self._parts(steps, backward):
            before, carry = carry, self._messages(None)
            t0 = part.stop - 1 if backward else part.start
            self._launch(
                geometry,
                part,
                backward,
                self._pack(before),
                self._pack(predicted, t0 - steps.start, backward),
                self._pack(updated, t0 - steps.start + (not backward), backward),
                self._pack(carry),
            )
        if updated is not None and keep == Keep.UPDATED:
            updated = updated.steps(slice(0, count) if backward else slice(1, None))
        return SegmentMessages(predicted, updated, carry)

    def best(self, carry: Messages | None, steps: slice, keep: Keep) -> SegmentMessages:
        """Take a block of steps forward, with the largest of terms in the place of their sums."""
        geometry = self._geometry or geometry_of(self.shard, sums=False)
        if not self._has(geometry.kernel(self.ctx)):
            return super().best(carry, steps, keep)
        after = self._prepare_carry(carry, backward=False)
        updated = self._messages(steps.stop - steps.start) if keep == Keep.UPDATED else None
        for part in self._parts(steps, False):
            before, after = after, self._messages(None)
            stored = self._pack(updated, part.start - steps.start)
            packed = self._pack(before), self._pack(None), stored, self._pack(after)
            self._launch(geometry, part, False, *packed)
        return SegmentMessages(None, updated, after)

    def trace(self, updated: Messages, after: Array, steps: slice) -> Array:
        """Return the states of best paths, integers [n, groups, rows]."""
        ctx, shard, (groups, rows, _) = self.ctx, self.shard, self.shard.state_shape
        kernel = Kernel("chain_trace.cu", f"chain_trace<{C_TYPES[ctx.precision.name]}>")
        if not self._has(kernel):
            return super().trace(updated, after, steps)
        logs_updated, after = contiguous(ctx, updated.values), contiguous(ctx, after)
        path = ctx.kernels.empty((steps.stop - steps.start, groups, rows), "int64")
        for part in self._parts(steps, True):
            matrices = self._matrices(slice(part.start, min(part.stop, shard.num_steps - 1)), False)
            logs = None if matrices is None else matrices.logs
            if logs is not None:
                logs = contiguous(ctx, logs.mT)
            chain = self._chain(part, part.start, logs=logs)
            at = slice(part.start - steps.start, part.stop - steps.start)
            arguments = (chain, logs_updated[at, ...], after, path[at, ...])
            ctx.kernels.run(Launch(kernel, -(-groups * rows // 4), 128, arguments))
            after = path[at.start, ...]
        return path

    def _has(self, kernel: Kernel) -> bool:
        """Tell whether a kernel can be used; with a geometry from outside this is its check."""
        return self._geometry is not None or is_usable(self.ctx, kernel, hard_case)

    def _parts(self, steps: slice, backward: bool) -> Iterator[slice]:
        """Cut a block of steps into what one launch takes, in the order in which that is."""
        ctx, (groups, _, states) = self.ctx, self.shard.state_shape
        size = _ENTRIES_OF_A_LAUNCH // max(states, 32)
        if not self.shard.chain.has_one_matrix:
            matrix = 6 * groups * states**2 * ctx.precision.itemsize
            size = min(size, max(1, self.workspace // 2 // matrix))
        parts = [
            slice(start, min(start + size, steps.stop))
            for start in range(steps.start, steps.stop, size)
        ]
        return reversed(parts) if backward else iter(parts)

    def _matrices(self, steps: slice, backward: bool) -> _Matrices | None:
        """Return matrices by the numbers of the steps that they lead from, backward transposed."""
        shard, chain = self.shard, self.shard.chain
        if chain.has_one_matrix and backward in self._prepared:
            return self._prepared[backward]
        if not (chain.has_one_matrix or steps.start < steps.stop):
            return None
        x = shard.matrices(steps)
        x = x.mT if backward else x
        matrices = _Matrices.prepare(self.ctx, x, "transitions" in chain.logs)
        if chain.has_one_matrix:
            self._prepared[backward] = matrices
        return matrices

    def _launch(
        self, geometry: Geometry, steps: slice, backward: bool, *messages: np.ndarray
    ) -> None:
        """Launch some steps: what they begin with, what is kept of them, what they end with."""
        shard, ctx = self.shard, self.ctx
        # The first step's matrix comes from the step before; the chain's first step has none.
        first = steps.start if backward else max(steps.start - 1, 0)
        stop = min(steps.stop, shard.num_steps - 1) if backward else steps.stop - 1
        matrices = self._matrices(slice(first, stop), backward)
        x = ctx.load(shard.potentials(steps), ctx.precision)
        t0, sign = (steps.stop - 1, -1) if backward else (steps.start, 1)
        x_group, x_row, x_step, x_state = ctx.kernels.strides(x)
        parts = {} if matrices is None else vars(matrices)
        chain = self._chain(
            steps,
            t0,
            sign,
            matrix=(t0 if backward else t0 - 1) - first,
            lanes=geometry.sizes(shard)[2],
            potentials=x[:, :, t0 - steps.start, :],
            x_group=x_group,
            x_row=x_row,
            x_step=sign * x_step,
            x_state=x_state,
            **parts,
        )
        grid, block, _, shared = geometry.sizes(shard)
        ctx.kernels.run(Launch(geometry.kernel(ctx), grid, block, (chain, *messages), shared))

    def _chain(self, steps: slice, time: int, direction: int = 1, **fields: Any) -> np.ndarray:
        """Return struct Chain. Arrays in `fields` become pointers; the caller holds them."""
        shard, (groups, rows, states) = self.shard, self.shard.state_shape
        if shard.chain.has_one_matrix:
            fields["matrix"], fields["matrices"] = 0, 1
        elif fields.get("logs") is not None:
            fields["matrices"], fields["matrix_step"] = fields["logs"].shape[1], direction
        fields["lengths"] = self._lengths
        for name, value in fields.items():
            if value is None or hasattr(value, "shape"):
                fields[name] = self._pointer(value)
        return pack(
            _CHAIN[self.ctx.precision.name],
            groups=groups,
            rows=rows,
            states=states,
            steps=steps.stop - steps.start,
            time=time,
            direction=direction,
            chain_steps=shard.num_steps,
            threshold=threshold(self.ctx.precision, states),
            **fields,
        )

    def _prepare_carry(self, carry: Messages | None, backward: bool) -> Messages:
        """Return what a block begins with, in logs, contiguous."""
        ctx, shape = self.ctx, self.shard.state_shape[:2]
        start = self._initial_carry(backward, logs_only=True) if carry is None else carry
        start = start.to_log_space(ctx)
        values = contiguous(ctx, ctx.load(start.values, ctx.precision))
        shifts, exponents = (
            contiguous(ctx, ctx.xp.broadcast_to(ctx.load(x, ctx.widest), shape))
            for x in (start.shifts, start.exponents)
        )
        return Messages(values, shifts, exponents, start.is_log)

    def _messages(self, steps: int | None) -> Messages:
        """Return room for messages of some steps, or for a state."""
        ctx, (groups, rows, states) = self.ctx, self.shard.state_shape
        shape = (groups, rows) if steps is None else (steps, groups, rows)
        values = ctx.kernels.empty((*shape, states), ctx.precision.name)
        shifts, exponents = (ctx.kernels.empty(shape, "float64") for _ in range(2))
        return Messages(values, shifts, exponents, np.ones((groups, rows), bool))

    def _pack(
        self, x: Messages | None, at: int | None = None, backward: bool = False
    ) -> np.ndarray:
        """Return struct Messages: those of a state, or of several steps from number `at` on."""
        if x is None:
            return pack(_MESSAGES)
        arrays = [z if at is None else z[at, ...] for z in (x.values, x.shifts, x.exponents)]
        logs, shifts, exponents = (self._pointer(z) for z in arrays)
        _, rows, _ = self.shard.state_shape
        step = (-1 if backward else 1) * self.shard.groups * rows
        return pack(_MESSAGES, logs=logs, shifts=shifts, powers=exponents, step=step)

    def _pointer(self, x: Array | None) -> int:
        return 0 if x is None else self.ctx.kernels.pointer(x)


def hard_case(ctx: Context, kernel: Kernel) -> Iterator[tuple[Array, np.ndarray, float]]:
    """Yield results of the hard case of any kernel, beside exact ones."""
    if kernel.name.startswith("chain"):
        return hard_cases.hard_case(CudaBackend, ctx, kernel)
    return cuda.hard_case(ctx, kernel)
