"""Whole operations on a shard by kernels: filtered results, entropies, best paths and samples.

They are methods of `CudaBackend`, and return None or False if a kernel cannot be used, or cannot
write paths in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from arraylogchain._backends.cuda.structs import STRIDES
from arraylogchain._backends.interface import Keep, Messages
from arraylogchain._core.context import Array


def filter_segment(
    self: Any, carry: Messages | None, steps: slice, probabilities: Array, log_normalizers: Array
) -> Messages | None:
    """Write the filtered probabilities and log normalizers of a segment; return its carry.

    Return None, and write nothing, if a kernel cannot be used.
    """
    groups, rows, _ = self.shard.state_shape
    kernel = self.kernel("filtered", self.ctx.result_name)
    if not self.can_use(kernel):
        return None
    views = [self.shard.view(x, (steps,)) for x in (probabilities, log_normalizers)]
    outputs = [self.merged(x, n) for x, n in zip(views, (2, 1), strict=True)]
    segment, _ = self.advance_with_matrices(carry, steps, False, Keep.ALL, restarts_scales=True)
    packed = (y for x, strides in outputs for y in (x, STRIDES.pack(*strides)))
    arguments = (self.rows(steps), self.pack_messages(segment.updated), *packed)
    num_terms = groups * rows * (steps.stop - steps.start)
    self.ctx.kernels.run(kernel, -(-num_terms // 8), 256, arguments)
    for (x, _), view in zip(outputs, views, strict=True):
        self.copy_back(x, view)
    return segment.carry  # type: ignore[no-any-return]


def entropies(self: Any, forward_pass: Any) -> Array | None:
    """Return the entropies [groups, rows] after a pass forward; None if a kernel cannot be used."""
    (groups, rows, states), kernel = self.shard.state_shape, self.kernel("entropies")
    if not self.can_use(kernel, self.kernel("log_partition")):
        return None
    log_sums, carry, total = self.log_sums(forward_pass.carry, with_final=True), None, None
    block = -(-states // 32) * 32
    for n in reversed(range(len(forward_pass.segments))):
        steps, before = forward_pass.segments[n], forward_pass.checkpoints[n]
        forward = forward_pass.stored_messages(n)
        segment, _ = self.advance_with_matrices(carry, steps, True, Keep.ALL)
        carry, prepared = segment.carry, self.prepared(steps, False, has_factors=False)
        out = self.ctx.kernels.empty((steps.stop - steps.start, groups, rows), "float64")
        chain = self.rows(steps) + self.chain(prepared)
        messages = forward.values, before and before.values, segment.predicted.values
        grid = groups * rows * (steps.stop - steps.start)
        self.ctx.kernels.run(kernel, grid, block, (chain, *messages, log_sums, out))
        sums = self.ctx.xp.sum(out, axis=0)
        total = sums if total is None else total + sums
    return total


def backtrace_paths(self: Any, forward_pass: Any, states: Array, weights: Array) -> bool:
    """Write best paths [*batch, T] and the logs of their weights after a pass."""
    shard, kernels = self.shard, (self.kernel("chain_trace"), self.kernel("best_last_states"))
    if not (self.can_use(*kernels, sums=False) and self.is_in_place(states, 1)):
        return False
    groups, rows, _ = shard.state_shape
    final, _held = self.boundary(True)
    after, best = (self.ctx.kernels.empty((groups, rows), x) for x in ("int64", "float64"))
    last = self.pack_messages(forward_pass.carry)
    arguments: tuple[Any, ...] = (self.rows(), last, final, after, best)
    self.ctx.kernels.run(kernels[1], -(-groups * rows // 4), 128, arguments)
    shard.write(weights, best)
    for chain, logs, steps in _segments_backward(self, forward_pass):
        path, strides = self.merged(shard.view(states, (steps,)), 1)
        arguments = (chain, logs, after, path, STRIDES.pack(*strides))
        self.ctx.kernels.run(kernels[0], -(-groups * rows // 4), 128, arguments)
    return True


def sample_paths(self: Any, forward_pass: Any, paths: Array, uniforms: Array) -> bool:
    """Write samples [*batch, T, samples] after a pass; uniform numbers may share their memory."""
    shard, kernel, count = self.shard, self.kernel("sample_paths"), int(paths.shape[-1])
    if not (self.can_use(kernel) and self.is_in_place(paths, 2)):
        return False
    (groups, rows, _), (final, _held) = shard.state_shape, self.boundary(True)
    after = self.ctx.kernels.empty((groups, rows, count), "int64")
    for chain, logs, steps in _segments_backward(self, forward_pass) if count else ():
        states, strides = self.merged(shard.view(paths, (steps,)), 2)
        u, u_strides = self.merged(shard.view(uniforms, (steps,)), 2)
        outputs = states, STRIDES.pack(*strides), u, STRIDES.pack(*u_strides)
        arguments = (chain, final, logs, after, *outputs, np.int64(count))
        self.ctx.kernels.run(kernel, -(-groups * rows * count // 4), 128, arguments)
    return True


def _segments_backward(self: Any, forward_pass: Any) -> Iterator[tuple[bytes, Array, slice]]:
    """Yield struct Chain, the forward messages, and the steps of each segment, the last one first.

    What a kernel reads is held until the next launch.
    """
    for n, steps in reversed(list(enumerate(forward_pass.segments))):
        messages = forward_pass.stored_messages(n)
        prepared = self.prepared(steps, False, has_factors=False, for_backtrace=True)
        yield self.rows(steps) + self.chain(prepared), messages.values, steps
