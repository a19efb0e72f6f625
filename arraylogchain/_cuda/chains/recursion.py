"""Chains on a CUDA device: which kernels run, with which arguments, in which order.

Matrices are made ready in blocks of steps that fit the workspace, and the recursion goes through a
block in one launch, its states on chip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from arraylogchain._context import Array
from arraylogchain._cuda.chains.arrays import C_TYPES, DTYPES, ChainArrays, History
from arraylogchain._cuda.chains.geometry import Geometry, SmallGeometry, choose
from arraylogchain._cuda.chains.matrices import ReadyMatrices, prepare, steps_at_once
from arraylogchain._cuda.device import Device
from arraylogchain._cuda.launch import Launch, pack, pack_axes, struct
from arraylogchain._inputs.chain import Chain

# struct Recursion of entries.cuh.
RECURSION = struct(
    (np.int32, "size count first last backward start_form end_form dtype out_dtype in_logs slices"),
    (np.int32, "column_warps matrices first_matrix"),
    (np.int64, "rows groups matrix_stride matrix_row_stride"),
    (np.int64, "logs_stride logs_row_stride logs_column_stride"),
    (np.int64, "potentials_time_stride potentials_stride start_stride end_stride"),
    (np.int64, "out_time_stride out_stride out_time history_time other_time"),
)


# Takes the first step and the one after the last, and states before and after them.
Launcher = Callable[[int, int, "History | None", "History | None"], None]


@dataclass(frozen=True, slots=True)
class Sweep:
    """A direction of time, and what the recursion is to write on the way; see chain.cu."""

    backward: bool = False
    messages: Array | None = None
    total_log: Array | None = None
    total: Array | None = None
    history: History | None = None
    marginals: Array | None = None
    by_number: bool = False  # marginals are [rows, steps, K], and not [*batch, steps, K]
    out_time: int = 0  # where marginals begin
    forward: History | None = None  # for marginals
    cotangent: Array | None = None
    with_end: bool = False  # whether the states after the last step are wanted

    @property
    def per_state(self) -> Array | None:
        """Messages or marginals, of which one at most is written."""
        return self.marginals if self.messages is None else self.messages

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The outputs as kernels take them."""
        return (
            *pointers(self.history),
            self.messages,
            self.total_log,
            self.total,
            *pointers(self.forward),
            self.cotangent,
            self.marginals,
        )

    def fields(self, device: Device) -> dict[str, int]:
        """Return what the struct Recursion says of the outputs."""
        fields = {"backward": self.backward, "out_time": self.out_time}
        if self.history is not None:
            fields["history_time"] = self.history.first
        if self.forward is not None:
            fields["other_time"] = self.forward.first
        if self.per_state is not None:
            fields["out_dtype"] = DTYPES.index(device.dtype_name(self.per_state))
            fields["out_time_stride"], fields["out_stride"] = device.strides(self.per_state)[-2:]
        return fields

    def axes(self, arrays: ChainArrays) -> np.ndarray:
        """Return the batch axes, with the strides of the outputs."""
        x, order = self.per_state, arrays.order
        if self.by_number:
            strides = arrays.dense_strides(arrays.device.strides(x)[0], order)
        else:
            strides = arrays.strides(x, 2, order)
        of_total, of_cotangent = (
            arrays.strides(x, 0, order) for x in (self.total_log, self.cotangent)
        )
        return pack_axes(arrays.extents(order), of_total, strides, of_cotangent)


def cut_steps(first: int, last: int, at_once: int) -> Iterator[tuple[int, int]]:
    """Yield blocks of steps: the first, and the first that is not in it."""
    for i in range(first, last, at_once):
        yield i, min(i + at_once, last)


class ChainRun(ChainArrays):
    """Launches of one chain, over all steps or some, in either direction of time.

    Parameters
    ----------
    device, chain, compute
        As for `ChainArrays`.
    workspace : int
        Bytes for matrices that are made ready, and for states between launches.
    geometry : Geometry or SmallGeometry, optional
    for_best : bool
        Whether it is best paths that are wanted.
    """

    def __init__(
        self,
        device: Device,
        chain: Chain,
        workspace: int,
        geometry: Geometry | SmallGeometry | None = None,
        for_best: bool = False,
        compute: str | None = None,
    ) -> None:
        super().__init__(device, chain, compute)
        self.workspace = workspace
        sizes = (chain.num_states, self.groups, self.rows, self.itemsize)
        limits = (device.multiprocessors, device.shared_memory)
        chosen = geometry or choose(*sizes, *limits, for_best)
        assert chosen is not None, "chains that fit no block have no kernels"
        self.geometry, self.takes_logs = chosen, chosen.takes_logs
        time_stride, stride = device.strides(chain.potentials)[-2:]
        self.fields: dict[str, int] = {
            "size": chain.num_states,
            "count": chain.num_steps,
            "rows": self.rows,
            "groups": self.groups,
            "dtype": DTYPES.index(self.dtype),
            "in_logs": chain.transitions_in_logs,
            "column_warps": chosen.column_warps,
            "potentials_time_stride": time_stride,
            "potentials_stride": stride,
        }

    def log_partition(self) -> Array:
        """Return the logs of the sums over all paths, [*batch]."""
        out = self.device.empty(self.chain.batch, self.dtype)
        sweep = Sweep(total_log=out, total=self.new_total())
        self.advance(0, self.chain.num_steps, sweep, None, self.workspace)
        return out

    def messages(self, *, backward: bool) -> Array:
        """Return forward or backward messages, [*batch, T, K]."""
        out = self.new_per_state()
        self.advance(0, self.chain.num_steps, Sweep(backward, out), None, self.workspace)
        return out

    def new_per_state(self) -> Array:
        """Return memory for a number for each state, [*batch, T, K]."""
        chain = self.chain
        return self.device.empty((*chain.batch, chain.num_steps, chain.num_states), self.dtype)

    def advance(
        self,
        first: int,
        last: int,
        sweep: Sweep,
        state: History | None,
        workspace: int,
    ) -> History | None:
        """Take states through some steps; return new ones if there is more to come."""
        for at, stop in cut_steps(first, last, steps_at_once(self, workspace)):
            state = self._advance_block(at, stop, sweep, state)
        return state

    def _advance_block(
        self, first: int, last: int, sweep: Sweep, state: History | None
    ) -> History | None:
        """Take states through steps whose matrices are ready together, and then given back."""
        ready = prepare(self, first, last, sweep.backward, self.takes_logs)
        if self.geometry.slices == 1:
            is_wanted = last < self.chain.num_steps or sweep.with_end
            after = self.new_history(1) if is_wanted else None
            self._launcher(ready, sweep, 1)(first, last, state, after)
            return after
        # Blocks that share a row meet only between launches, and none may write what one reads.
        pair = [self.new_history(1), self.new_history(1)]
        launch = self._launcher(ready, sweep, self.geometry.slices)
        for i in range(first, last):
            after = pair[(i - first) % 2]
            launch(i, i + 1, state, after)
            state = after
        if last == self.chain.num_steps and sweep.total is not None and not sweep.backward:
            self._launcher(ready, sweep, 1)(last, last, state, None)
        return state

    def _launcher(self, ready: ReadyMatrices, sweep: Sweep, slices: int) -> Launcher:
        """Return what launches the kernel `chain`, `chain_small` or `viterbi` for some steps.

        The host works out once what these do not change.
        """
        chain, geometry = self.chain, self.geometry
        fields = self.fields | ready.fields | sweep.fields(self.device)
        ends = ("final", None) if sweep.backward else ("initial", "final")
        (start_form, start_stride, start), (end_form, end_stride, end) = map(self.end_weights, ends)
        fields |= {"start_form": start_form, "start_stride": start_stride}
        fields |= {"end_form": end_form, "end_stride": end_stride}
        packed = pack(RECURSION, **fields, slices=slices)
        arguments = (
            self.axes(self.order, (chain.potentials, 2), (start, 1), (end, 1)),
            sweep.axes(self),
            ready.axes,
            *ready.arguments,
            chain.potentials,
            start,
            end,
            *((None, None) if self.lengths is None else (self.lengths[0], self.lengths[1])),
        )
        kernel = Launch(
            geometry.source,
            geometry.kernel(C_TYPES[self.compute]),
            geometry.blocks(self.groups, self.rows) * slices,
            geometry.threads,
            arguments,
            geometry.shared_memory(chain.num_states, self.itemsize),
        )
        outputs = sweep.arguments

        def launch(first: int, last: int, state: History | None, after: History | None) -> None:
            # A launch takes a copy of the struct, which may then be changed.
            packed["first"], packed["last"] = first, last
            states = (*pointers(state), *pointers(after))
            self.device.run(kernel.with_arguments((packed, *arguments, *states, *outputs)))

        return launch


def pointers(history: History | None) -> tuple[Any, Any]:
    """Return states as kernels take them."""
    return (None, None) if history is None else (history.states, history.scales)
