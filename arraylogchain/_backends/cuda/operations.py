"""Whole operations on a shard by kernels: filtered results, entropies, best paths and samples.

They are methods of `CudaBackend`, and return None or False if a kernel cannot be used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from arraylogchain._backends.cuda import matrices
from arraylogchain._backends.cuda.geometry import row_strides
from arraylogchain._backends.cuda.structs import ROWS, STRIDES
from arraylogchain._backends.interface import Keep, Messages
from arraylogchain._core.context import Array
from arraylogchain._cuda.kernels import contiguous


def filter_segment(
    self: Any, carry: Messages | None, steps: slice, probabilities: Array, log_normalizers: Array
) -> Messages | None:
    """Write a segment of filtered results; return its carry."""
    (groups, rows, _), kernel = (
        self.shard.state_shape,
        self.kernel("filtered", self.ctx.result_name),
    )
    views = [self.shard.view(x, (steps,)) for x in (probabilities, log_normalizers)]
    strides: list[Any] = [row_strides(self.shard, x) for x in views]
    if None in strides or not self.can_follow(kernel):
        return None
    segment, _ = self.advance_with_scales(carry, steps, False, Keep.ALL, restarts_scales=True)
    outputs = (y for x, z in zip(views, strides, strict=True) for y in (x, STRIDES.pack(*z)))
    arguments = (ROWS.pack(*self.rows(steps)), self.pack(segment.updated), *outputs)
    self.run(kernel, -(-groups * rows * (steps.stop - steps.start) // 8), 256, arguments)
    return segment.carry  # type: ignore[no-any-return]


def entropies(self: Any, forward_pass: Any) -> Array | None:
    """Return the entropies [groups, rows] after a pass forward."""
    (groups, rows, states), kernel = self.shard.state_shape, self.kernel("entropies")
    if not self.can_follow(kernel, self.kernel("log_partition")):
        return None
    log_sums, carry, total = self.final_log_sums(forward_pass.carry), None, None
    size = groups * rows * states * self.ctx.precision.itemsize
    for n in reversed(range(len(forward_pass.segments))):
        steps, forward = (
            forward_pass.segments[n],
            forward_pass.stored_messages(n).values,
        )  # held while kernels read it
        segment, _ = self.advance_with_scales(carry, steps, True, Keep.ALL)
        carry, before, beta = (
            segment.carry,
            forward_pass.checkpoints[n],
            self.pointer(segment.predicted.values),
        )
        count, alpha = steps.stop - steps.start, self.pointer(forward)
        out = self.ctx.kernels.empty((count, groups, rows), "float64")
        for part in self.parts(steps, False, 1):
            at, scales = part.start - steps.start, (self.scales(part), part.start)
            prepared, matrix = self.prepared(part, False, scales, (False, True))
            chain = self.chain(part, prepared, matrix=matrix)
            previous = alpha + (at - 1) * size if at else self.pointer(before and before.values)
            messages = map(np.uint64, (alpha + at * size, previous, beta + at * size))
            grid, block = groups * rows * (part.stop - part.start), -(-states // 32) * 32
            self.run(kernel, grid, block, (chain, *messages, log_sums, out[at:, ...]))
        sums = self.ctx.xp.sum(out, axis=0)
        total = sums if total is None else total + sums
    return total


def backtrace(self: Any, updated: Messages, after: Array, steps: slice) -> Array | None:
    """Return the states of best paths, integers [n, groups, rows]."""
    if not (self.has(self.kernel("chain_trace")) and self.has(self.preparation)):
        return None
    groups, rows, _ = self.shard.state_shape
    path = self.ctx.kernels.empty((steps.stop - steps.start, groups, rows), "int64")
    after = contiguous(self.ctx, self.ctx.xp.asarray(after, copy=True))
    for chain, logs, at in _launches_backward(self, updated.values, steps, order=0):
        strides = STRIDES.pack(rows, 1, groups * rows)
        arguments = (chain, logs, after, path[at:, ...], strides, np.int32(0))
        self.run(self.kernel("chain_trace"), -(-groups * rows // 4), 128, arguments)
    return path


def backtrace_paths(self: Any, forward_pass: Any, states: Array, weights: Array) -> bool:
    """Write best paths [*batch, T] and the logs of their weights after a pass."""
    shard, kernels = self.shard, (self.kernel("chain_trace"), self.kernel("best_last_states"))
    strides = row_strides(shard, shard.view(states))
    if strides is None or not self.can_follow(*kernels, sums=False):
        return False
    groups, rows, _ = shard.state_shape
    final, _held = self.boundary(True)
    after, best = (self.ctx.kernels.empty((groups, rows), x) for x in ("int64", "float64"))
    arguments: tuple[Any, ...] = (
        ROWS.pack(*self.rows()),
        self.pack(forward_pass.carry),
        final,
        after,
        best,
    )
    self.run(kernels[1], -(-groups * rows // 4), 128, arguments)
    shard.write(weights, best)
    for n in reversed(range(len(forward_pass.segments))):
        start, steps = forward_pass.segments[n].start, forward_pass.segments[n]
        for chain, logs, at in _launches_backward(
            self, forward_pass.stored_messages(n).values, steps
        ):
            out = shard.view(states, (slice(start + at, None),))
            arguments = (chain, logs, after, out, STRIDES.pack(*strides), np.int32(1))
            self.run(kernels[0], -(-groups * rows // 4), 128, arguments)
    return True


def sample_paths(self: Any, forward_pass: Any, paths: Array, uniforms: Array) -> bool:
    """Write samples [*batch, T, samples] after a pass; their numbers may share their memory."""
    shard, kernel, count = self.shard, self.kernel("sample_paths"), int(paths.shape[-1])
    strides: list[Any] = [row_strides(shard, shard.view(x)) for x in (paths, uniforms)]
    if None in strides or not self.can_follow(kernel):
        return False
    (groups, rows, _), (final, _held) = shard.state_shape, self.boundary(True)
    after = self.ctx.kernels.empty((groups, rows, count), "int64")
    for n in reversed(range(len(forward_pass.segments))) if count else ():
        steps = forward_pass.segments[n]
        for chain, logs, at in _launches_backward(
            self, forward_pass.stored_messages(n).values, steps
        ):
            place = (slice(steps.start + at, None),)
            pairs = zip((paths, uniforms), strides, strict=True)
            outputs = (y for x, z in pairs for y in (shard.view(x, place), STRIDES.pack(*z)))
            arguments = (chain, final, logs, after, *outputs, np.int64(count))
            self.run(kernel, -(-groups * rows * count // 4), 128, arguments)
    return True


def _launches_backward(
    self: Any, updated: Array, steps: slice, **fields: int
) -> Iterator[tuple[bytes, np.uint64, int]]:
    """Yield for each launch back in time struct Chain, where messages are, and its first step.

    Steps count from the segment's first; logs of matrices are transposed.
    """
    shard, (groups, rows, states) = self.shard, self.shard.state_shape
    held, scales = contiguous(self.ctx, updated), self.scales(steps)
    size = groups * rows * states * self.ctx.precision.itemsize
    for part in self.parts(steps, True, 1):
        transitions = slice(part.start, min(part.stop, shard.num_steps - 1))
        prepared, at = None, part.start - steps.start
        if "transitions" in shard.views and transitions.start < transitions.stop:
            uses = False, True
            prepared = matrices.prepare(shard, transitions, False, scales, 0, uses, True)
        yield self.chain(part, prepared, **fields), np.uint64(self.pointer(held) + at * size), at
