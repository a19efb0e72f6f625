"""Marginals, expected counts and gradients by kernels: nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from arraylogchain._backends.cuda.geometry import power_of_two
from arraylogchain._backends.cuda.matrices import input_matrices
from arraylogchain._backends.cuda.structs import PAIR_MARGINALS, SEGMENT, STRIDES
from arraylogchain._backends.interface import Keep, Messages
from arraylogchain._backends.shards import arrange
from arraylogchain._core.axes import Box, Shape, within
from arraylogchain._core.context import Array
from arraylogchain._cuda.kernels import contiguous
from arraylogchain._inputs.arrays import dtype_name

_THREADS = 256


class _Terms(NamedTuple):
    """Inputs and results of the kernel `marginals` that pair marginals need.

    A term is a step of a row; a set is the terms that share a matrix.

    Attributes
    ----------
    segment : bytes
        Struct Segment.
    alpha, beta_x : array
        Logs of the updated messages, forward and backward.
    u, v : array [sets, terms, K]
        Linear factors: ``u.mT @ v`` sums pair marginals without transition weights over the terms.
        They are 0 for terms that are not certified in linear space.
    is_flagged : array [terms of all sets]
        Terms that are not certified, which `pair_marginals` adds from logs.
    log_normalizers : array [terms of all sets, 2]
        In two parts: that of the shifts, and the remainder.
    has_flags : array
        Whether a block of terms has a flagged one.
    """

    segment: bytes
    alpha: Array
    beta_x: Array
    u: Array
    v: Array
    is_flagged: Array
    log_normalizers: Array
    has_flags: Array


class CudaBackwardPass:
    """The marginals, counts or gradients that a shard adds to sums, after a pass forward.

    Parameters
    ----------
    backend : CudaBackend
    forward_pass : Pass
        Forward, with its messages or checkpoints.
    accumulator : Accumulator
    cotangent : array [*batch] or None
        Of log Z; None for ones.
    """

    def __init__(
        self, backend: Any, forward_pass: Any, accumulator: Any, cotangent: Array | None
    ) -> None:
        self.backend, self.forward_pass, self.accumulator = backend, forward_pass, accumulator
        self.shard = forward_pass.shard
        self.ctx, self.device = self.shard.ctx, self.shard.ctx.kernels
        self.log_sums = backend.log_sums(forward_pass.carry, with_final=True)
        self.g = cotangent
        if cotangent is not None:
            x = self.shard.unsorted(self.shard.view(cotangent), ())
            self.g = contiguous(self.ctx, self.ctx.load(x, self.ctx.widest))

    def add(self) -> None:
        """Add gradients, or marginals and counts, in one pass backward through the steps."""
        forward_pass, requested = self.forward_pass, set(self.accumulator.arrays)
        carry: Any = None
        for n in reversed(range(len(forward_pass.segments))) if requested != {"final"} else ():
            carry = self._add_segment(n, carry)
        for name, message in (("initial", carry), ("final", forward_pass.carry)):
            if name in requested:
                self._add_boundary(name, message)

    def _add_segment(self, n: int, carry: Messages | None) -> Messages:
        """Add the contributions of a segment; return the carry for the one before it."""
        steps, requested = self.forward_pass.segments[n], self.accumulator.arrays
        if not {"potentials", "transitions"} & set(requested):
            return self.backend.advance(carry, steps, True, Keep.NOTHING).carry  # type: ignore[no-any-return]
        segment, prepared = self.backend.advance_with_matrices(carry, steps, True, Keep.ALL)
        forward = self.forward_pass.stored_messages(n)
        terms = self._add_marginals(steps, forward.values, segment)
        if terms is not None:
            self._add_pairs(steps, terms, prepared.scales)
        return segment.carry  # type: ignore[no-any-return]

    def _add_marginals(self, steps: slice, alpha: Array, segment: Any) -> _Terms | None:
        """Add state marginals, and return the terms of pair marginals, each if requested."""
        shard, device, (groups, rows, size) = self.shard, self.device, self.shard.state_shape
        count, has_one = steps.stop - steps.start, shard.chain.has_one_matrix
        has_pairs = "transitions" in self.accumulator.arrays
        pairs = max(0, min(steps.stop, shard.num_steps - 1) - steps.start) if has_pairs else 0
        width = min(32, power_of_two(size))
        sets, set_size = (groups, count * rows) if has_one else (groups * count, rows)
        blocks = -(-set_size // (_THREADS // width))
        output: Any = nullcontext()
        if "potentials" in self.accumulator.arrays:
            output = self._output("potentials", (steps, slice(None)), (rows, count, size))
        counts = SEGMENT.pack(pairs, width, has_one, blocks)
        packed = self.backend.rows(steps) + counts
        result: tuple[Any, ...] = (None,) * 5
        if pairs:
            shape = (groups, pairs * rows) if has_one else (groups * pairs, rows)
            u, v = (device.empty((*shape, size), self.ctx.precision.name) for _ in range(2))
            num_terms = groups * pairs * rows
            flags = device.empty((num_terms + sets * blocks,), "uint8")
            normalizers = device.empty((num_terms, 2), "float64")
            result = u, v, flags[:num_terms], normalizers, flags[num_terms:]
        beta, beta_x = segment.predicted.values, segment.updated.values
        inputs = alpha, beta, beta_x, self.g, self.log_sums
        with output as out:
            strides, dtype = (), None
            if out is not None:
                strides, dtype = device.strides(out), dtype_name(out.dtype)
            arguments = (packed, STRIDES.pack(*strides), *inputs, out, *result)
            kernel = self.backend.kernel("marginals", dtype)
            device.run(kernel, sets * blocks, _THREADS, arguments)
        return _Terms(packed, alpha, beta_x, *result) if pairs else None

    @contextmanager
    def _output(self, name: str, place: Box, shape: Shape) -> Iterator[Array]:
        """Yield memory [groups, *shape] for a part of a result, with rows in the caller's order.

        It is the part itself where nothing else contributes to it and its axes can be merged;
        otherwise a buffer, which is added or copied to the part at the end. `place` is the index
        of the part along the axes beyond the batch axes.
        """
        ctx, shard = self.ctx, self.shard
        dtype, num_segments = ctx.precision.name, len(self.forward_pass.segments)
        total = self.accumulator.written_once(name, shard, num_segments)
        if total is None or dtype_name(total.dtype) not in (ctx.result_name, dtype):
            yield (out := self.device.empty((shard.groups, *shape), dtype))
            self.accumulator.add(name, shard, place, out, is_sorted=False)
            return
        view = arrange(ctx.xp, shard.chain, total, len(place))
        part = view[(*within(shard.box, view.shape), ..., *place)]
        if name == "transitions":
            out = ctx.xp.reshape(part, (shard.groups, *shape))
        else:
            out = shard.unsorted(part, shape[1:])
        yield out
        self.backend.copy_back(out, part)

    def _add_pairs(self, steps: slice, terms: _Terms, matrix_scales: Array) -> None:
        """Add pair marginals, of transitions from steps to the next."""
        shard, device, (groups, _, size) = self.shard, self.device, self.shard.state_shape
        one, kernel = shard.chain.has_one_matrix, self.backend.kernel("pair_marginals")
        first, count = (0, 1) if one else (steps.start, int(terms.u.shape[0]) // groups)
        entries = min(_THREADS, power_of_two(size * size))
        is_log, by_logs = "transitions" in shard.chain.logs, self.accumulator.by_logs
        sums = device.multiply(terms.u.mT, terms.v)
        place = slice(first, first + count), slice(None), slice(None)
        x, strides = input_matrices(shard, place[0])
        with self._output("transitions", place, (1, count, size, size)) as out:
            out_group, _, out_matrix, *_ = device.strides(out)
            pointers = (device.pointer(y) for y in (x, matrix_scales, out))
            places = *pointers, *strides, out_group, out_matrix
            packed = PAIR_MARGINALS.pack(*places, is_log, by_logs)
            flags = terms.is_flagged, terms.log_normalizers, terms.has_flags
            messages = terms.alpha, terms.beta_x
            arguments = (terms.segment, packed, sums, np.int32(entries), *messages, self.g, *flags)
            grid = count * groups * -(-size * size // entries)
            device.run(kernel, grid, _THREADS, arguments)

    def _add_boundary(self, name: str, message: Messages) -> None:
        """Add the gradient with respect to initial or final weights, or to their logarithms."""
        groups, rows, size = self.shard.state_shape
        weights, _held = self.backend.boundary(is_final=name == "final")
        log_sums = self.log_sums
        if name == "initial":
            log_sums = self.backend.log_sums(message, with_final=False)
        inputs = weights, message.values, log_sums, self.log_sums, self.g, self.backend.rows()
        with self._output(name, (slice(None),), (rows, size)) as out:
            strides, shape = self.device.strides(out), (groups, rows)
            # Where weights serve all rows, so does the memory.
            has_one_row = all(n == 1 or step == 0 for n, step in zip(shape, strides, strict=False))
            is_sum = has_one_row and groups * rows > 1
            arguments = (*inputs, out, STRIDES.pack(*strides), np.int32(is_sum))
            grid = -(-size // 32) * (1 if is_sum else -(-groups * rows // 8))
            self.device.run(self.backend.kernel("boundary_gradients"), grid, _THREADS, arguments)
