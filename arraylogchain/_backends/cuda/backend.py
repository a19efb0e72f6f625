"""The recursions of chains as CUDA kernels: sums over paths, best paths and the backtrace.

All messages are in log space. A segment of a shard takes one launch, and one for its matrices.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from arraylogchain._backends.array import ArrayBackend
from arraylogchain._backends.cuda import matrices, operations
from arraylogchain._backends.cuda.geometry import geometry_of
from arraylogchain._backends.cuda.marginals import CudaBackwardPass
from arraylogchain._backends.cuda.matrices import PreparedMatrices
from arraylogchain._backends.cuda.structs import CHAIN, MESSAGES, ROWS, WEIGHTS
from arraylogchain._backends.interface import Keep, Messages, SegmentMessages
from arraylogchain._backends.shards import Shard
from arraylogchain._core.context import Array
from arraylogchain._cuda.kernels import Kernel, kernel_named, threshold
from arraylogchain._cuda.self_check import is_usable


class CudaBackend(ArrayBackend):
    """The recursion over a shard by kernels; see `interface.Backend`.

    It also has whole operations, which return None or False if a kernel cannot be used: array
    operations then take over.
    """

    holds_matrices = True
    # Of messages: forward, both backward ones, and the factors of pair marginals.
    segment_arrays = 5

    def __init__(self, shard: Shard, workspace: int) -> None:
        super().__init__(shard, workspace)
        self.geometry = geometry_of(shard)
        self.preparation = (matrices.kernel_of(shard),) if "transitions" in shard.views else ()
        self._prepared: dict[tuple[bool, bool], PreparedMatrices] = {}
        self._is_log = np.ones(shard.state_shape[:2], bool)
        # Of the latest message for which they were computed.
        self._log_sums: tuple[Messages | None, Array] = None, None

    @cached_property
    def lengths(self) -> Array | None:
        """The lengths of rows on the device, in the shard's order; None if all are equal."""
        lengths = self.shard.lengths
        return None if lengths is None else self.ctx.integers(lengths.reshape(-1))

    def advance(
        self, carry: Messages | None, steps: slice, backward: bool, keep: Keep
    ) -> SegmentMessages:
        """Process a segment, forward or backward."""
        if not self.can_use():
            return super().advance(carry, steps, backward, keep)
        return self.advance_with_matrices(carry, steps, backward, keep)[0]

    def max_product(self, carry: Messages | None, steps: slice, keep: Keep) -> SegmentMessages:
        """Process a segment forward, with maxima instead of sums."""
        if not self.can_use(sums=False):
            return super().max_product(carry, steps, keep)
        return self.advance_with_matrices(carry, steps, False, keep, sums=False)[0]

    def advance_with_matrices(
        self,
        carry: Messages | None,
        steps: slice,
        backward: bool,
        keep: Keep,
        sums: bool = True,
        restarts_scales: bool = False,
    ) -> tuple[SegmentMessages, PreparedMatrices]:
        """Process a segment by one kernel; return its messages, and the matrices that it used.

        With `restarts_scales`, the scale of a step is that step's part alone, not the sum since the
        first one. The caller knows that kernels can be used.
        """
        ctx, shard, count = self.ctx, self.shard, steps.stop - steps.start
        predicted = self._messages(count) if keep == Keep.ALL else None
        updated = None if keep == Keep.NOTHING else self._messages(count + (keep == Keep.ALL))
        last, prepared = self._messages(None), self.prepared(steps, backward, has_factors=sums)
        # The step that is processed first; forward, `updated` may begin with the carry.
        first, sign = (count - 1, -1) if backward else (0, 1)
        updated_first = first + (keep == Keep.ALL and not backward)
        places = (carry, 0), (predicted, first), (updated, updated_first), (last, 0)
        packed = [self.pack_messages(x, at, backward) for x, at in places]
        x = ctx.load(shard.views["potentials"][..., steps, :], ctx.precision)
        x, (group, row, step, state) = self.merged(x, 2)
        start = ctx.kernels.pointer(x) + first * step * ctx.precision.itemsize
        grid, block, width, shared = self.geometry.sizes(shard)
        fields = {"direction": sign, "threads_per_row": width, "restarts_scales": restarts_scales}
        chain = self.rows(steps, steps.start + first)
        chain += self.chain(prepared, start, group, row, sign * step, state, **fields)
        weights, _held = self.boundary(backward)
        arguments = (chain, weights, *packed)
        ctx.kernels.run(self.geometry.kernel(ctx, sums), grid, block, arguments, shared)
        return SegmentMessages(predicted, updated, last), prepared

    def final_log_partition(self, last: Messages) -> Array | None:
        """Return log Z [groups, rows], given the last messages."""
        if not self.can_use(self.kernel("log_partition")):
            return None
        log_z = self.ctx.kernels.empty(self.shard.state_shape[:2], "float64")
        self.log_sums(last, with_final=True, log_z=log_z)
        return log_z

    def log_sums(self, message: Messages, with_final: bool, log_z: Array | None = None) -> Array:
        """Return logs of the sums of a message times final weights, or initial ones.

        Final weights belong to a forward message. The logs are [groups, rows, 2], an integer and
        the remainder, without the message's scale. If given, `log_z` receives their sum with the
        scale. The logs for the latest message are kept for the next call.
        """
        (groups, rows, _), (latest, log_sums) = self.shard.state_shape, self._log_sums
        if message is not latest or log_z is not None:
            weights, _held = self.boundary(with_final)
            log_sums = self.ctx.kernels.empty((groups, rows, 2), "float64")
            arguments = self.rows(), self.pack_messages(message), weights, log_sums, log_z
            kernel = self.kernel("log_partition")
            self.ctx.kernels.run(kernel, -(-groups * rows // 4), 128, arguments)
            self._log_sums = message, log_sums
        return log_sums

    def backward_pass(self, forward_pass: Any, sums: Any, cotangent: Array | None) -> Any:
        """Return the backward pass that adds marginals, counts or gradients."""
        names = ["marginals", "boundary_gradients", "log_partition"]
        names += ["pair_marginals"] if self.preparation else []
        written = self.kernel("marginals", self.ctx.result_name)  # where marginals are not summed
        if not self.can_use(written, *map(self.kernel, names)):
            return None
        return CudaBackwardPass(self, forward_pass, sums, cotangent)

    filter_segment = operations.filter_segment
    entropies = operations.entropies
    backtrace_paths = operations.backtrace_paths
    sample_paths = operations.sample_paths

    def kernel(self, name: str, dtype: str | None = None) -> Kernel:
        """Return a kernel for the precision of the shard, or for a dtype of results."""
        dtypes = [dtype or self.ctx.precision.name]
        if name == "pair_marginals":
            dtypes.append(matrices.dtype_name(self.shard))
        return kernel_named(name, *dtypes)

    def can_use(self, *kernels: Kernel, sums: bool = True) -> bool:
        """Return whether the kernels of the recursion, and others, can be used."""
        recursion = self.geometry.kernel(self.ctx, sums)
        needed = *self.preparation, recursion, *kernels
        return all(is_usable(self.ctx, kernel, recursion) for kernel in needed)

    def prepared(
        self, steps: slice, backward: bool, has_factors: bool = True, for_backtrace: bool = False
    ) -> PreparedMatrices:
        """Return the matrices of transitions into steps.

        Backward, and for a backtrace, transitions lead from steps to the next in time.
        """
        shard, key, is_after = self.shard, (backward, for_backtrace), backward or for_backtrace
        if shard.chain.has_one_matrix:
            if key not in self._prepared:
                has_factors = not for_backtrace  # later calls may need them
                arguments = slice(0, 1), backward, has_factors, for_backtrace
                self._prepared[key] = matrices.prepare(shard, *arguments)
            return self._prepared[key]
        before = steps.start - 1
        first = steps.start if is_after else max(before, 0)
        stop = min(steps.stop, shard.num_steps - 1) if is_after else steps.stop - 1
        if first >= stop:
            return PreparedMatrices(None, None, {})
        result = matrices.prepare(shard, slice(first, stop), backward, has_factors, for_backtrace)
        result.fields["matrix"] = (steps.stop - 1 if backward else before) - first
        result.fields["matrix_step"] = -1 if backward else 1
        return result

    def chain(self, prepared: PreparedMatrices, *potentials: int, **fields: int) -> bytes:
        """Return struct Chain without its struct Rows; the caller holds the arrays."""
        limit = threshold(self.ctx.precision, self.shard.chain.num_states)
        struct = CHAIN[self.ctx.precision.name]
        return struct.pack(*potentials, **prepared.fields, **fields, threshold=limit)

    def rows(self, steps: slice = slice(0, 0), time: int | None = None) -> bytes:
        """Return struct Rows of some steps; `time` is processed first, if not the first."""
        shard, (groups, rows, states) = self.shard, self.shard.state_shape
        pointers = self.ctx.kernels.pointer(self.lengths), self.ctx.kernels.pointer(shard.order)
        first = steps.start if time is None else time
        sizes = groups, rows, steps.stop - steps.start, states, first, shard.num_steps
        return ROWS.pack(*pointers, *sizes)

    def merged(self, x: Array, num_axes: int) -> tuple[Array, tuple[int, ...]]:
        """Return an array of the shard as [groups, rows, ...], and its strides.

        Rows are in the caller's order. It is copied where batch axes cannot be merged.
        """
        x = self.shard.unsorted(x, tuple(map(int, x.shape[x.ndim - num_axes :])))
        return x, self.ctx.kernels.strides(x)

    def is_in_place(self, x: Array, num_axes: int) -> bool:
        """Return whether `merged` returns views of an array [*batch, T, ...], not copies."""
        step = self.shard.view(x, (slice(1),))
        rows, pointer = self.merged(step, num_axes)[0], self.ctx.kernels.pointer
        return bool(pointer(rows) == pointer(step))

    def copy_back(self, x: Array, out: Array) -> None:
        """Copy an array that ``merged(out)`` returned to `out`, unless it is a view of it."""
        if self.ctx.kernels.pointer(x) != self.ctx.kernels.pointer(out):
            out[...] = self.ctx.xp.reshape(x, out.shape)

    def boundary(self, is_final: bool) -> tuple[bytes, Array]:
        """Return struct Weights of the final or initial weights, and the array that it reads."""
        name, views = "final" if is_final else "initial", self.shard.views
        if name not in views:
            return WEIGHTS.pack(is_log=1), None
        x, strides = self.merged(self.ctx.load(views[name], self.ctx.precision), 1)
        is_log = name in self.shard.chain.logs
        return WEIGHTS.pack(self.ctx.kernels.pointer(x), *strides, is_log), x

    def _messages(self, steps: int | None) -> Messages:
        """Return memory for the messages of some steps, or for a carry."""
        ctx, (groups, rows, states) = self.ctx, self.shard.state_shape
        shape = (groups, rows) if steps is None else (steps, groups, rows)
        values = ctx.kernels.empty((*shape, states), ctx.precision.name)
        scales = ctx.kernels.empty((2, *shape), "float64")
        return Messages(values, scales[0, ...], scales[1, ...], self._is_log)

    def pack_messages(self, x: Messages | None, at: int = 0, backward: bool = False) -> bytes:
        """Return struct Messages: of a carry, or of the steps from number `at` on.

        Its pointers are null for None; its steps are negative backward.
        """
        if x is None:
            return MESSAGES.pack()
        groups, rows, states = self.shard.state_shape
        step, pointer = groups * rows, self.ctx.kernels.pointer
        logs = pointer(x.values) + at * step * states * self.ctx.precision.itemsize
        shifts, exponents = (pointer(y) + 8 * at * step for y in (x.shifts, x.exponents))
        return MESSAGES.pack(logs, shifts, exponents, -step if backward else step)
