"""Sums of gradients over rows and steps: the launches beside the recursion in the backward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from arraylogchain._context import Array
from arraylogchain._cuda.chains.arrays import C_TYPES, DTYPES, THREADS, ChainArrays, History
from arraylogchain._cuda.launch import ceil_div, pack, pack_axes, struct

# struct Pairs of pairs.cuh.
PAIRS = struct(
    (np.int32, "size first times dtype out_dtype in_logs with_weights start_form"),
    (np.int32, "time_splits row_splits accumulate"),
    (np.int64, "rows groups matrix_stride row_stride column_stride start_stride"),
    (np.int64, "forward_time back_time out_step out_split"),
)
# Of pairs.cu and sum.cu.
SIDE, FACTOR, SUM_WIDTH, SHORT = 64, 3, 32, 128
# Rows that are worth a block of their own.
ROWS_OF_A_SPLIT = 64
INSTANTIATIONS: dict[str, list[str]] = {
    "chains/factors.cu": [
        f"{kernel}<{t}>" for t in C_TYPES.values() for kernel in ("chain_factors", "chain_start")
    ],
    "chains/pairs.cu": [f"chain_pairs<{t}>" for t in C_TYPES.values()],
    "chains/sum.cu": [f"chain_sum<{t}>" for t in C_TYPES.values()],
}


class Reductions:
    """Sums of what the rows of a chain add to its gradients.

    Parameters
    ----------
    arrays : ChainArrays
    total : array
        Sums over all paths.
    cotangent : array [*batch] or None
        Of their logs; None for ones.
    """

    def __init__(self, arrays: ChainArrays, total: Array, cotangent: Array | None) -> None:
        self.arrays, self.total, self.cotangent = arrays, total, cotangent
        self.device, self.chain = arrays.device, arrays.chain

    def over_rows(self, rows: Array, width: int, like: Array, trailing: int, out: Array) -> None:
        """Add up numbers [rows, width] over the batch axes that an array `like` has not."""
        arrays, order = self.arrays, self.arrays.order
        skipped = len(self.chain.batch) + trailing - len(like.shape)
        strides = arrays.dense_strides(width, order)
        kept, summed = [], []
        for axis, extent, stride, of_out in zip(
            order, arrays.extents(order), strides, arrays.strides(out, trailing, order), strict=True
        ):
            if axis >= skipped and int(like.shape[axis - skipped]) > 1:
                kept.append((extent, stride, of_out))
            else:
                summed.append((extent, stride))
        self.sum(rows, width, kept, summed, out)

    def sum(
        self,
        parts: Array,
        width: int,
        kept: Sequence[tuple[int, int, int]],
        summed: Sequence[tuple[int, int]],
        out: Array,
        terms: int | None = None,
    ) -> None:
        """Add up parts, each `width` neighbouring numbers.

        Parameters
        ----------
        kept : sequence of tuple
            Axes of the sums: extent, and strides of parts and of `out`.
        summed : sequence of tuple
            Axes that are summed over: extent, and stride of parts.
        terms : int, optional
            How many terms a sum has, if not all of these.
        """
        if width == 0:
            return
        self.arrays.launch(
            "chains/sum.cu",
            "chain_sum",
            math.prod(n for n, _, _ in kept) * ceil_div(width, SUM_WIDTH),
            parts,
            pack_axes(*([axis[i] for axis in kept] for i in range(3))),
            pack_axes(*([axis[i] for axis in summed] for i in range(2))),
            np.int64(math.prod(n for n, _ in summed) if terms is None else terms),
            np.int64(width),
            np.int64(1),
            out,
            np.int32(DTYPES.index(self.device.dtype_name(out))),
        )

    def pairs(
        self, first: int, times: int, forward: History | None, backward: History, **more: int
    ) -> np.ndarray:
        """Return the struct Pairs for some steps from `first` on."""
        return pack(
            PAIRS,
            size=self.chain.num_states,
            first=first,
            times=times,
            dtype=DTYPES.index(self.arrays.dtype),
            rows=self.arrays.rows,
            groups=self.arrays.groups,
            forward_time=0 if forward is None else forward.first,
            back_time=backward.first,
            **more,
        )

    def factors(self, first: int, times: int, forward: History | None, backward: History) -> Array:
        """Return what pairs from `first` on are multiplied by, [times, rows, FACTOR]."""
        arrays = self.arrays
        factors = self.device.empty((times, arrays.all_rows, FACTOR), arrays.compute)
        arrays.launch(
            "chains/factors.cu",
            "chain_factors",
            ceil_div(times * arrays.all_rows, THREADS),
            self.pairs(first, times, forward, backward),
            arrays.axes(arrays.order, (self.cotangent, 0)),
            None if forward is None else forward.scales,
            backward.scales,
            self.total,
            arrays.lengths,
            self.cotangent,
            factors,
        )
        return factors

    def initial_gradient(self, backward: History, out: Array) -> None:
        """Write the gradient of the initial weights, from the states of the first step."""
        arrays, initial, size = self.arrays, self.chain.initial, self.chain.num_states
        factors = self.factors(-1, 1, None, backward)
        rows = self.device.empty((arrays.all_rows, size), arrays.compute)
        form, stride = 2 if self.chain.initial_in_logs else 1, self.device.strides(initial)[-1]
        arrays.launch(
            "chains/factors.cu",
            "chain_start",
            ceil_div(arrays.all_rows * size, THREADS),
            self.pairs(-1, 1, None, backward, start_form=form, start_stride=stride),
            arrays.axes(arrays.order, (initial, 1)),
            initial,
            backward.states,
            factors,
            rows,
        )
        self.over_rows(rows, size, initial, 1, out)


class TransitionGradient:
    """The gradient of the transitions, or expected counts, added up block by block of steps.

    Parameters
    ----------
    reductions : Reductions
    workspace : int
        Bytes for parts of sums.
    out : array
        Of the shape of the transitions.
    as_counts : bool
        Whether sums are multiplied by linear weights.
    """

    def __init__(
        self, reductions: Reductions, workspace: int, out: Array, *, as_counts: bool
    ) -> None:
        self.reductions, self.arrays, self.out = reductions, reductions.arrays, out
        arrays, chain = self.arrays, self.arrays.chain
        self.with_weights = as_counts or chain.transitions_in_logs
        # One matrix for all steps has one gradient; a view of one as many has as many.
        self.adds_steps = chain.has_one_matrix and chain.num_steps > 2
        self.time_splits, self.row_splits = self._splits(workspace)
        self.parts: Array | None = None
        if self.adds_steps:
            splits = self.time_splits * self.row_splits
            shape = (splits, arrays.groups, chain.num_states, chain.num_states)
            self.parts = arrays.device.empty(shape, arrays.compute)
        self.has_begun = False

    def _splits(self, workspace: int) -> tuple[int, int]:
        """Return how many blocks share a sum over steps, and over rows."""
        arrays, chain = self.arrays, self.arrays.chain
        slots = 1 if self.adds_steps else max(1, chain.num_steps - 1)
        blocks = ceil_div(chain.num_states, SIDE) ** 2 * arrays.groups * slots
        missing = ceil_div(2 * arrays.device.multiprocessors, blocks)
        each = arrays.groups * slots * chain.num_states**2 * arrays.itemsize
        missing = max(1, min(missing, workspace // each))
        times = min(missing, chain.num_steps - 1) if self.adds_steps else 1
        return times, min(max(1, missing // times), ceil_div(arrays.rows, ROWS_OF_A_SPLIT))

    def add(self, first: int, stop: int, forward: History, backward: History) -> None:
        """Add the pairs of states at t and t + 1, for t from `first` to `stop` - 1.

        Parameters
        ----------
        first, stop : int
        forward, backward : History
            States at t, and at t + 1.
        """
        arrays, chain, device = self.arrays, self.arrays.chain, self.arrays.device
        times, entries = stop - first, chain.num_states**2
        if times <= 0:
            return
        factors = self.reductions.factors(first, times, forward, backward)
        of_steps = self.out[..., first:, :, :]
        step = int(self.out.shape[-3]) * entries  # from one group to the next
        slots, time_splits, target, split = times, 0, of_steps, None
        out = {"out_step": step}
        if self.parts is not None:
            slots = time_splits = self.time_splits
            target = self.parts
        elif self.row_splits > 1:
            shape = (self.row_splits, arrays.groups, times, chain.num_states, chain.num_states)
            target = split = device.empty(shape, arrays.compute)
            out = {"out_step": times * entries, "out_split": arrays.groups * times * entries}
        stride, row_stride, column_stride = device.strides(chain.transitions)[-3:]
        # Sums of many rows take a number for each of a block's entries as well.
        is_long = ceil_div(arrays.rows, self.row_splits) > SHORT
        tiles = ceil_div(chain.num_states, SIDE) ** 2
        arrays.launch(
            "chains/pairs.cu",
            "chain_pairs",
            tiles * self.row_splits * slots * arrays.groups,
            self.reductions.pairs(
                first,
                times,
                forward,
                backward,
                out_dtype=DTYPES.index(device.dtype_name(target)),
                in_logs=chain.transitions_in_logs,
                with_weights=self.with_weights,
                time_splits=time_splits,
                row_splits=self.row_splits,
                accumulate=self.parts is not None and self.has_begun,
                matrix_stride=0 if arrays.is_one_matrix else stride,
                row_stride=row_stride,
                column_stride=column_stride,
                **out,
            ),
            arrays.axes(chain.group_axes, (chain.transitions, 3)),
            chain.transitions,
            forward.states,
            backward.states,
            factors,
            target,
            shared_memory=SIDE * SIDE * arrays.itemsize if is_long else 0,
        )
        self.has_begun = True
        if split is not None:
            width = times * entries
            summed = (self.row_splits, arrays.groups * width)
            self.reductions.sum(split, width, [(arrays.groups, width, step)], [summed], of_steps)

    def finish(self) -> None:
        """Write what is not in place yet."""
        if self.arrays.chain.num_steps == 1:
            # Zeros, as a sum of nothing.
            self.reductions.sum(self.out, math.prod(self.out.shape), [], [], self.out, terms=0)
        if self.parts is not None:
            count, width = int(self.parts.shape[0]), math.prod(self.parts.shape[1:])
            self.reductions.sum(self.parts, width, [], [(count, width)], self.out)
