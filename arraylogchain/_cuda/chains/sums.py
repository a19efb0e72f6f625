"""Sums of gradients over rows and steps: the launches behind the recursion on the way back."""

from __future__ import annotations

import math

import numpy as np

from arraylogchain._context import Array
from arraylogchain._cuda.chains.arrays import C_TYPES, DTYPES, ChainArrays, History
from arraylogchain._cuda.launch import Launch, pack_axes

# struct Pairs of pairs.cuh.
PAIRS = np.dtype(
    [
        *((name, np.int32) for name in ("size", "first", "times", "dtype", "out_dtype")),
        *((name, np.int32) for name in ("in_logs", "with_weights", "start_form")),
        *((name, np.int32) for name in ("time_splits", "row_splits", "accumulate")),
        *((name, np.int64) for name in ("rows", "groups", "matrix_stride", "row_stride")),
        *((name, np.int64) for name in ("column_stride", "start_stride")),
        *((name, np.int64) for name in ("forward_time", "back_time", "out_step", "out_split")),
    ],
    align=True,
)
# Of pairs.cu and sum.cu.
SIDE, THREADS, FACTOR, SUM_WIDTH, SHORT = 64, 256, 3, 32, 128
INSTANTIATIONS: dict[str, list[str]] = {
    "chains/factors.cu": [
        f"{kernel}<{t}>" for t in C_TYPES.values() for kernel in ("chain_factors", "chain_start")
    ],
    "chains/pairs.cu": [f"chain_pairs<{t}>" for t in C_TYPES.values()],
    "chains/sum.cu": [f"chain_sum<{t}>" for t in C_TYPES.values()],
}


class GradientSums:
    """Sums of what the rows of a chain add to its gradients.

    Parameters
    ----------
    of : ChainArrays
    total : array
        Sums over all paths.
    cotangent : array [*batch] or None
        Of their logs; None for ones.
    """

    def __init__(self, of: ChainArrays, total: Array, cotangent: Array | None) -> None:
        self.of, self.total, self.cotangent = of, total, cotangent
        self.device, self.chain = of.device, of.chain

    def over_rows(self, rows: Array, width: int, like: Array, trailing: int, out: Array) -> None:
        """Add up numbers [rows, width] over the batch axes that an array `like` has not."""
        batch, order = self.chain.batch, self.of.order
        skipped = len(batch) + trailing - len(like.shape)
        own = [axis >= skipped and int(like.shape[axis - skipped]) > 1 for axis in order]
        strides = self.of.number_strides(width)
        of_out = self.of.batch_strides(out, trailing, order)
        kept = [
            (batch[a], s, o)
            for a, s, o, is_own in zip(order, strides, of_out, own, strict=True)
            if is_own
        ]
        summed = [
            (batch[a], s) for a, s, is_own in zip(order, strides, own, strict=True) if not is_own
        ]
        self._sum(
            rows,
            width,
            pack_axes(*([each[i] for each in kept] for i in range(3))),
            pack_axes(*([each[i] for each in summed] for i in range(2))),
            math.prod(n for n, _ in summed),
            out,
            math.prod(n for n, _, _ in kept),
        )

    def zeros(self, out: Array) -> None:
        """Write zeros, as a sum of nothing."""
        self._sum(
            out, math.prod(out.shape), pack_axes((1,), (0,), (0,)), pack_axes((1,), (0,)), 0, out
        )

    def over_parts(self, parts: Array, out: Array) -> None:
        """Add up parts of the sums over all steps, along the first axis."""
        count, width = int(parts.shape[0]), math.prod(parts.shape[1:])
        one = pack_axes((1,), (0,), (0,))
        self._sum(parts, width, one, pack_axes((count,), (width,)), count, out)

    def _sum(
        self,
        parts: Array,
        width: int,
        kept: np.ndarray,
        summed: np.ndarray,
        terms: int,
        out: Array,
        count: int = 1,
    ) -> None:
        """Launch `chain_sum`."""
        if width == 0:
            return
        self.device.run(
            Launch(
                "chains/sum.cu",
                f"chain_sum<{C_TYPES[self.of.compute]}>",
                count * -(-width // SUM_WIDTH),
                THREADS,
                0,
                (
                    parts,
                    kept,
                    summed,
                    np.int64(terms),
                    np.int64(width),
                    np.int64(1),
                    out,
                    np.int32(DTYPES.index(self.device.dtype_name(out))),
                ),
            )
        )

    def _numbers(
        self, first: int, times: int, forward: History | None, back: History
    ) -> np.ndarray:
        c = np.zeros((), PAIRS)
        c["size"], c["first"], c["times"] = self.chain.size, first, times
        c["dtype"] = DTYPES.index(self.of.dtype)
        c["rows"], c["groups"] = self.of.rows, self.of.groups
        c["forward_time"] = 0 if forward is None else forward.first
        c["back_time"] = back.first
        return c

    def _factors(self, first: int, times: int, forward: History | None, back: History) -> Array:
        """Return what pairs from `first` on are multiplied by, [times, rows, 3]."""
        factors = self.device.empty((times, self.of.number, FACTOR), self.of.compute)
        run = self.of
        self.device.run(
            Launch(
                "chains/factors.cu",
                f"chain_factors<{C_TYPES[self.of.compute]}>",
                -(-times * self.of.number // THREADS),
                THREADS,
                0,
                (
                    self._numbers(first, times, forward, back),
                    run.axes(run.order, (self.cotangent, 0)),
                    None if forward is None else forward.scales,
                    back.scales,
                    self.total,
                    run.lengths,
                    self.cotangent,
                    factors,
                ),
            )
        )
        return factors

    def over_pairs(
        self,
        times: tuple[int, int],
        forward: History,
        back: History,
        splits: tuple[int, int],
        edges: Array,
        parts: Array | None,
        with_weights: bool,
        again: bool,
    ) -> None:
        """Sum over the rows of pairs of states at t and t + 1, for some steps t.

        Parameters
        ----------
        times : tuple of int
            From which t on, and up to which.
        forward, back : History
            States at t, and at t + 1.
        splits : tuple of int
            How many blocks share a sum over steps, and over rows.
        edges : array
            Where the sums of each step go.
        parts : array or None
            Where the parts of sums over steps go instead.
        with_weights : bool
            Whether sums are multiplied by the matrices' weights.
        again : bool
            Whether to add to `parts`.
        """
        chain, device, run = self.chain, self.device, self.of
        given = chain.transitions
        first, count = times[0], times[1] - times[0]
        factors = self._factors(first, count, forward, back)
        time_splits, row_splits = splits
        size, tiles = chain.size**2, -(-chain.size // SIDE)
        target: Array = edges[..., first:, :, :] if parts is None else parts
        c = self._numbers(first, count, forward, back)
        c["out_step"] = int(edges.shape[-3]) * size
        split: Array | None = None
        if parts is None and row_splits > 1:
            split = device.empty(
                (row_splits, run.groups, count, chain.size, chain.size), self.of.compute
            )
            target = split
            c["out_step"], c["out_split"] = count * size, run.groups * count * size
        c["time_splits"] = 0 if parts is None else time_splits
        c["row_splits"], c["accumulate"] = row_splits, again
        c["out_dtype"] = DTYPES.index(device.dtype_name(target))
        c["in_logs"], c["with_weights"] = chain.transitions_in_logs, with_weights
        stride, c["row_stride"], c["column_stride"] = device.strides(given)[-3:]
        c["matrix_stride"] = 0 if run.is_one_matrix else stride
        slots = count if parts is None else time_splits
        # Sums of many rows take a number for each of a block's entries as well.
        is_long = -(-run.rows // row_splits) > SHORT
        own = SIDE * SIDE * run.item if is_long else 0
        device.run(
            Launch(
                "chains/pairs.cu",
                f"chain_pairs<{C_TYPES[self.of.compute]}>",
                tiles * tiles * row_splits * slots * run.groups,
                THREADS,
                own,
                (
                    c,
                    run.axes(chain.group_axes, (given, 3)),
                    given,
                    forward.states,
                    back.states,
                    factors,
                    target,
                ),
            )
        )
        if split is not None:
            width = count * size
            out_step = int(edges.shape[-3]) * size
            self._sum(
                split,
                width,
                pack_axes((run.groups,), (width,), (out_step,)),
                pack_axes((row_splits,), (run.groups * width,)),
                row_splits,
                edges[..., first:, :, :],
                run.groups,
            )

    def of_start(self, back: History, out: Array) -> None:
        """Write the gradient of the initial weights, from the states of the first step."""
        chain, device, run = self.chain, self.device, self.of
        factors = self._factors(-1, 1, None, back)
        rows = device.empty((self.of.number, chain.size), self.of.compute)
        c = self._numbers(-1, 1, None, back)
        c["start_form"] = 2 if chain.start_in_logs else 1
        c["start_stride"] = device.strides(chain.start)[-1]
        device.run(
            Launch(
                "chains/factors.cu",
                f"chain_start<{C_TYPES[self.of.compute]}>",
                -(-self.of.number * chain.size // THREADS),
                THREADS,
                0,
                (
                    c,
                    run.axes(run.order, (chain.start, 1)),
                    chain.start,
                    back.states,
                    factors,
                    rows,
                ),
            )
        )
        self.over_rows(rows, chain.size, chain.start, 1, out)
