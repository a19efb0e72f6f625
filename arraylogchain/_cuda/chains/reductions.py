"""Sums of gradients over rows and steps: the launches beside the recursion in the backward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from array_api_compat import array_namespace

from arraylogchain._context import Array
from arraylogchain._cuda.chains.arrays import DTYPES, THREADS, ChainArrays, History
from arraylogchain._cuda.launch import ceil_div, pack, struct

# struct Pairs of pairs.cuh.
PAIRS = struct(
    (np.int32, "size first times dtype out_dtype in_logs with_weights start_form"),
    (np.int32, "time_splits row_splits accumulate"),
    (np.int64, "rows groups matrix_stride row_stride column_stride start_stride"),
    (np.int64, "forward_time back_time out_step out_split"),
)
# Of pairs.cu.
SIDE, FACTOR, SHORT = 64, 3, 128
# Rows that are worth a block of their own.
ROWS_OF_A_SPLIT = 64


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of states at t and t + 1, for some steps t.

    Attributes
    ----------
    first, times : int
        The first t, -1 before the first step, and how many there are.
    forward, backward : History
        States at t, and at t + 1.
    """

    first: int
    times: int
    forward: History | None
    backward: History


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

    def over_rows(self, rows: Array, like: Array, trailing: int) -> Array:
        """Add up numbers [rows, ...] over the batch axes that an array `like` has not."""
        own = tuple(like.shape)[: len(like.shape) - trailing]
        skipped = len(self.chain.batch) - len(own)
        kept = [axis for axis, n in enumerate(own, start=skipped) if n > 1]
        summed = tuple(axis for axis in range(len(self.chain.batch)) if axis not in kept)
        found = total(self.arrays.of_batch(rows), summed)
        return array_namespace(found).reshape(found, (*own, *tuple(rows.shape)[1:]))

    def packed(self, pairs: Pairs, **more: int) -> np.ndarray:
        """Return the struct Pairs."""
        return pack(
            PAIRS,
            size=self.chain.num_states,
            first=pairs.first,
            times=pairs.times,
            dtype=DTYPES.index(self.arrays.dtype),
            rows=self.arrays.rows,
            groups=self.arrays.groups,
            forward_time=0 if pairs.forward is None else pairs.forward.first,
            back_time=pairs.backward.first,
            **more,
        )

    def factors(self, pairs: Pairs) -> Array:
        """Return what pairs of states are multiplied by, [times, rows, FACTOR]."""
        arrays = self.arrays
        factors = self.device.empty((pairs.times, arrays.all_rows, FACTOR), arrays.compute)
        arrays.launch(
            "chains/factors.cu",
            "chain_factors",
            ceil_div(pairs.times * arrays.all_rows, THREADS),
            self.packed(pairs),
            arrays.axes(arrays.order, (self.cotangent, 0)),
            None if pairs.forward is None else pairs.forward.scales,
            pairs.backward.scales,
            self.total,
            arrays.lengths,
            self.cotangent,
            factors,
        )
        return factors

    def end_gradient(self, name: str, states: History) -> Array:
        """Return the gradient of weights of one end, from the states that come in to it."""
        arrays, size = self.arrays, self.chain.num_states
        pairs = Pairs(-1, 1, None, states)
        factors = self.factors(pairs)
        rows = self.device.empty((arrays.all_rows, size), arrays.compute)
        form, stride, weights = arrays.end_weights(name)
        arrays.launch(
            "chains/factors.cu",
            "chain_start",
            ceil_div(arrays.all_rows * size, THREADS),
            self.packed(pairs, start_form=form, start_stride=stride),
            arrays.axes(arrays.order, (weights, 1)),
            weights,
            states.states,
            factors,
            rows,
        )
        return self.over_rows(rows, weights, 1)


class TransitionGradient:
    """The gradient of the transitions, or expected counts, added up block by block of steps.

    Parameters
    ----------
    reductions : Reductions
    workspace : int
        Bytes for parts of sums.
    as_counts : bool
        Whether sums are multiplied by linear weights.
    """

    def __init__(self, reductions: Reductions, workspace: int, *, as_counts: bool) -> None:
        self.reductions, self.arrays = reductions, reductions.arrays
        arrays, chain = self.arrays, self.arrays.chain
        assert chain.transitions is not None
        self.with_weights = as_counts or chain.transitions_in_logs
        # One matrix for all steps has one gradient; a view of one as many has as many.
        self.adds_steps = chain.has_one_matrix and chain.num_steps > 2
        self.slots, self.row_splits = self._splits(workspace)
        # Sums over some of the steps and rows: a matrix for each slot, group and split of the rows.
        self.is_in_parts = self.adds_steps or self.row_splits > 1
        shape, dtype = tuple(chain.transitions.shape), arrays.dtype
        if self.is_in_parts:
            shape = (self.row_splits, arrays.groups, self.slots, *(2 * [chain.num_states]))
            dtype = arrays.compute
        self.sums = arrays.device.empty(shape, dtype)
        self.has_begun = False

    def _splits(self, workspace: int) -> tuple[int, int]:
        """Return how many matrices there are in a sum's parts, and splits of its rows."""
        arrays, chain = self.arrays, self.arrays.chain
        steps = max(1, chain.num_steps - 1)
        slots = 1 if self.adds_steps else steps
        blocks = ceil_div(chain.num_states, SIDE) ** 2 * arrays.groups * slots
        missing = ceil_div(2 * arrays.device.multiprocessors, blocks)
        each = arrays.groups * slots * chain.num_states**2 * arrays.itemsize
        missing = max(1, min(missing, workspace // (3 * each)))  # and for a copy in float64
        if self.adds_steps:
            slots = min(missing, steps)
            missing //= slots
        return slots, min(missing, ceil_div(arrays.rows, ROWS_OF_A_SPLIT))

    def add(self, first: int, stop: int, forward: History, backward: History) -> None:
        """Add pairs of states at t and t + 1, for t from `first` to `stop` - 1."""
        arrays, chain = self.arrays, self.arrays.chain
        pairs = Pairs(first, stop - first, forward, backward)
        if pairs.times <= 0:
            return
        step, row, column = arrays.device.strides(chain.transitions)[-3:]
        of_group = self.slots * chain.num_states**2
        target = self.sums if self.adds_steps else self.sums[..., first:, :, :]
        slots = self.slots if self.adds_steps else pairs.times
        # Sums of many rows take a number for each of a block's entries as well.
        is_long = ceil_div(arrays.rows, self.row_splits) > SHORT
        packed = self.reductions.packed(
            pairs,
            in_logs=chain.transitions_in_logs,
            with_weights=self.with_weights,
            time_splits=slots if self.adds_steps else 0,
            row_splits=self.row_splits,
            accumulate=self.adds_steps and self.has_begun,
            matrix_stride=0 if arrays.is_one_matrix else step,
            row_stride=row,
            column_stride=column,
            out_dtype=DTYPES.index(arrays.device.dtype_name(target)),
            out_step=of_group,
            out_split=arrays.groups * of_group,
        )
        arrays.launch(
            "chains/pairs.cu",
            "chain_pairs",
            ceil_div(chain.num_states, SIDE) ** 2 * self.row_splits * slots * arrays.groups,
            packed,
            arrays.axes(chain.group_axes, (chain.transitions, 3)),
            chain.transitions,
            forward.states,
            backward.states,
            self.reductions.factors(pairs),
            target,
            shared_memory=SIDE * SIDE * arrays.itemsize if is_long else 0,
        )
        self.has_begun = True

    def finish(self) -> Array:
        """Return the sums over all steps and rows, in the shape of the transitions."""
        given, xp = self.arrays.chain.transitions, array_namespace(self.sums)
        assert given is not None
        if self.arrays.chain.num_steps == 1:
            return xp.zeros_like(given)
        if not self.is_in_parts:
            return self.sums
        return xp.reshape(total(self.sums, (0, 2) if self.adds_steps else (0,)), tuple(given.shape))


def total(x: Array, axes: tuple[int, ...]) -> Array:
    """Add up along axes, in float64: many equal numbers are rounded to the same side."""
    xp = array_namespace(x)
    return xp.sum(x, axis=axes, dtype=xp.float64)
