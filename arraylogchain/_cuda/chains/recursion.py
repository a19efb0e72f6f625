"""Chains on a CUDA device: which kernels run, with which arguments, in which order.

Matrices are made ready in blocks of steps that fit the workspace, and the recursion goes through a
block in one launch, its states on chip.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arraylogchain._chain.steps import Chain
from arraylogchain._context import Array
from arraylogchain._cuda.chains import geometry as geometries
from arraylogchain._cuda.chains import matrices
from arraylogchain._cuda.chains.arrays import C_TYPES, DTYPES, ChainArrays, History
from arraylogchain._cuda.chains.geometry import LANES, TILES, Geometry, SmallGeometry
from arraylogchain._cuda.chains.matrices import Prepared
from arraylogchain._cuda.device import Device
from arraylogchain._cuda.launch import Launch, pack_axes

# struct Recursion of entries.cuh.
RECURSION = np.dtype(
    [
        *((name, np.int32) for name in ("size", "count", "first", "last", "backward")),
        *((name, np.int32) for name in ("start_form", "dtype", "out_dtype", "in_logs", "slices")),
        *((name, np.int32) for name in ("column_warps", "matrices", "first_matrix")),
        *((name, np.int64) for name in ("rows", "groups", "matrix_stride", "matrix_row_stride")),
        *((name, np.int64) for name in ("logs_stride", "logs_row_stride", "logs_column_stride")),
        *((name, np.int64) for name in ("potentials_time_stride", "potentials_stride")),
        *((name, np.int64) for name in ("start_stride", "out_time_stride", "out_stride")),
        *((name, np.int64) for name in ("out_time", "history_time", "other_time")),
    ],
    align=True,
)
INSTANTIATIONS: dict[str, list[str]] = {
    "chains/chain.cu": [
        f"chain<{t}, {rows}, {columns}>"
        for t, item in zip(C_TYPES.values(), TILES, strict=True)
        for rows, columns in TILES[item]
    ],
    "chains/small.cu": [f"chain_small<{t}, {n}>" for t in C_TYPES.values() for n in LANES],
}
HOT = frozenset({"chain", "chain_small"})


@dataclass(frozen=True, slots=True)
class Outputs:
    """What the recursion is to write; see chain.cu. `out_time` is where marginals begin."""

    messages: Array | None = None
    total_log: Array | None = None
    total: Array | None = None
    history: History | None = None
    marginals: Array | None = None
    by_number: bool = False  # marginals are [rows, steps, K], and not [*batch, steps, K]
    out_time: int = 0
    forward: History | None = None  # for marginals
    cotangent: Array | None = None


class ChainRun(ChainArrays):
    """Launches of one chain, as a whole and in one direction of time.

    Parameters
    ----------
    device, chain
        As for `ChainArrays`.
    workspace : int
        Bytes for matrices that are made ready, and for states between launches.
    geometry : Geometry or SmallGeometry, optional
    """

    def __init__(
        self,
        device: Device,
        chain: Chain,
        workspace: int,
        geometry: Geometry | SmallGeometry | None = None,
    ) -> None:
        super().__init__(device, chain)
        self.workspace = workspace
        sizes = (chain.size, self.groups, self.rows, self.item)
        limits = (device.multiprocessors, device.shared_memory)
        chosen = geometry or geometries.choose(*sizes, *limits)
        assert chosen is not None, "chains that fit no block take another road"
        self.geometry = chosen

    def blocks(self) -> list[tuple[int, int]]:
        """Return the steps whose matrices are made ready together."""
        count, at_once = self.chain.count, matrices.steps_at_once(self, self.workspace)
        return [(i, min(i + at_once, count)) for i in range(0, count, at_once)]

    def run(self, outputs: Outputs, backward: bool = False) -> None:
        """Take all states through all steps, writing what is asked for."""
        state: History | None = None
        for first, last in self.blocks():
            state = self.steps(first, last, outputs, state, backward)

    def steps(
        self,
        first: int,
        last: int,
        outputs: Outputs,
        state: History | None,
        backward: bool = False,
        keeps_state: bool = False,
    ) -> History | None:
        """Take states through some steps; return them if there are more steps to come.

        They may take the place of the given ones, unless these are kept.
        """
        ready = matrices.prepare(self, first, last, backward)
        if self.geometry.slices == 1:
            more = last < self.chain.count
            after = state
            if keeps_state or state is None:
                after = self.new_history(1) if more else None
            self._launch((first, last), (first, ready), outputs, state, after, backward)
            return after
        # Blocks that share a row meet only between launches, and none may write what one reads.
        pair = [self.new_history(1), self.new_history(1)]
        for i in range(first, last):
            after = pair[(i - first) % 2]
            self._launch((i, i + 1), (first, ready), outputs, state, after, backward)
            state = after
        if last == self.chain.count and outputs.total is not None and not backward:
            self._launch((last, last), (first, ready), outputs, state, None, backward, slices=1)
        return state

    def _launch(
        self,
        steps: tuple[int, int],
        prepared: tuple[int, Prepared | None],
        outputs: Outputs,
        state: History | None,
        after: History | None,
        backward: bool,
        slices: int | None = None,
    ) -> None:
        """Launch the kernel `chain`; `prepared` says for which step the first matrix is."""
        chain, device, geometry = self.chain, self.device, self.geometry
        slices = slices or geometry.slices
        ready_from, ready = prepared
        x, start, logs = chain.potentials, chain.start, None
        result = outputs.messages if outputs.messages is not None else outputs.marginals
        c = np.zeros((), RECURSION)
        c["size"], c["count"], c["backward"] = chain.size, chain.count, backward
        c["first"], c["last"] = steps
        c["start_form"] = 0 if start is None else 2 if chain.start_in_logs else 1
        c["dtype"], c["in_logs"] = DTYPES.index(self.dtype), chain.transitions_in_logs
        c["slices"], c["column_warps"] = slices, geometry.column_warps
        c["rows"], c["groups"] = self.rows, self.groups
        c["potentials_time_stride"], c["potentials_stride"] = device.strides(x)[-2:]
        c["start_stride"] = 0 if start is None else device.strides(start)[-1]
        if result is not None:
            c["out_dtype"] = DTYPES.index(device.dtype_name(result))
            c["out_time_stride"], c["out_stride"] = device.strides(result)[-2:]
        c["out_time"] = outputs.out_time
        c["history_time"] = 0 if outputs.history is None else outputs.history.first
        c["other_time"] = 0 if outputs.forward is None else outputs.forward.first
        group_axes = pack_axes((1,), (0,), (0,))
        if ready is not None:
            c["matrix_stride"], c["matrix_row_stride"] = ready.stride, ready.row_stride
            c["matrices"], c["first_matrix"] = ready.matrices, max(ready_from, 1)
            extents = [chain.batch[axis] for axis in chain.group_axes]
            of_logs = [0 for _ in extents]
            if chain.transitions_in_logs:
                assert chain.transitions is not None
                logs = chain.transitions[..., ready.given_at, :, :]
                of_logs = self.batch_strides(logs, 2, chain.group_axes)
                stride, row, column = device.strides(chain.transitions)[-3:]
                row, column = (column, row) if backward else (row, column)
                c["logs_stride"] = 0 if self.is_one_matrix else -stride if backward else stride
                c["logs_row_stride"], c["logs_column_stride"] = row, column
            group_axes = pack_axes(extents, ready.group_strides, of_logs)
        total_log, history, forward = outputs.total_log, outputs.history, outputs.forward
        device.run(
            Launch(
                geometry.source,
                geometry.kernel(C_TYPES[self.compute]),
                geometry.blocks(self.groups, self.rows) * slices,
                geometry.threads,
                geometry.shared_memory(chain.size, self.item),
                (
                    c,
                    self.axes(self.order, (x, 2), (start, 1)),
                    pack_axes(
                        [chain.batch[axis] for axis in self.order],
                        self.batch_strides(total_log, 0, self.order),
                        self.number_strides(device.strides(result)[0])
                        if result is not None and outputs.by_number
                        else self.batch_strides(result, 2, self.order),
                        self.batch_strides(outputs.cotangent, 0, self.order),
                    ),
                    group_axes,
                    None if ready is None else ready.matrix,
                    None if ready is None else ready.line,
                    None if ready is None else ready.least,
                    None if ready is None else ready.shift,
                    logs,
                    x,
                    start,
                    None if self.lengths is None else self.lengths[0],
                    None if self.lengths is None else self.lengths[1],
                    None if state is None else state.states,
                    None if state is None else state.scales,
                    None if after is None else after.states,
                    None if after is None else after.scales,
                    None if history is None else history.states,
                    None if history is None else history.scales,
                    outputs.messages,
                    total_log,
                    outputs.total,
                    None if forward is None else forward.states,
                    None if forward is None else forward.scales,
                    outputs.cotangent,
                    outputs.marginals,
                ),
            )
        )


def log_partition(run: ChainRun) -> Array:
    """Return the logs of the sums over all paths, [*batch]."""
    out = run.device.empty(run.chain.batch, run.dtype)
    run.run(Outputs(total_log=out, total=run.new_total()))
    return out


def messages(run: ChainRun, *, backward: bool) -> Array:
    """Return forward or backward messages, [*batch, T, K]."""
    chain = run.chain
    out = run.device.empty((*chain.batch, chain.count, chain.size), run.dtype)
    run.run(Outputs(messages=out), backward)
    return out
