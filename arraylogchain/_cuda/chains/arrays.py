"""The arrays of a chain as its kernels take them: batch axes in their order, strides, dtypes.

Batch axes along which matrices differ come first, then those along which rows share them; rows are
numbered in this order, and every array keeps its own strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from arraylogchain._context import Array
from arraylogchain._cuda import dtypes
from arraylogchain._cuda.chains.row_lengths import row_lengths
from arraylogchain._cuda.device import Device
from arraylogchain._cuda.launch import Launch, pack_axes
from arraylogchain._inputs.chain import Chain

# DType of any_dtype.cuh, in its order.
DTYPES = tuple(dtypes.C_TYPES)
# What chains are computed in: their kernels find out about the dtypes of arrays as they run.
C_TYPES = {dtype: dtypes.C_TYPES[dtype] for dtype in ("float32", "float64")}

# Numbers of a Scale and of a Total, all double.
SCALE, TOTAL = 3, 5
# Of a block of every kernel but those of the recursion, and of a warp.
THREADS, WARP = 256, 32


@dataclass(frozen=True, slots=True)
class History:
    """States of some steps, extended numbers, from the step of time `first` on.

    Attributes
    ----------
    states : array [steps, rows, 2, K]
        Mantissas and exponents; of best paths logs, [steps, rows, 1, K].
    scales : array [steps, rows, SCALE]
    first : int
    """

    states: Array
    scales: Array
    first: int = 0


class ChainArrays:
    """A chain on a device, with what follows from its shapes, strides and dtype.

    Parameters
    ----------
    device : Device
    chain : Chain
        Arrays of the device's library; no batch axis and no state axis of length 0.
    compute : str, optional
        What is computed in, if not what is usual for the arrays' dtype.

    Attributes
    ----------
    groups, rows, all_rows : int
        Groups, rows of a group, and rows of all groups.
    order : tuple of int
        The batch axes, those of groups first.
    lengths : array or None
        See `row_lengths`.
    takes_logs : bool
        Whether states and matrices are logs, for best paths.
    """

    takes_logs = False

    def __init__(self, device: Device, chain: Chain, compute: str | None = None) -> None:
        self.device, self.chain = device, chain
        self.dtype = device.dtype_name(chain.potentials)
        self.compute = compute or dtypes.compute_type(self.dtype)
        self.itemsize = dtypes.itemsize(self.compute)
        self.groups, self.rows = chain.sizes
        self.all_rows = self.groups * self.rows
        self.order = (*chain.group_axes, *chain.row_axes)
        self.lengths = row_lengths(device, chain)

    @property
    def is_one_matrix(self) -> bool:
        x = self.chain.transitions
        return x is None or self.chain.has_one_matrix or self.device.strides(x)[-3] == 0

    @property
    def state_bytes(self) -> int:
        """What the states of one step take."""
        return self.all_rows * (self.planes * self.chain.num_states * self.itemsize + 8 * SCALE)

    @property
    def planes(self) -> int:
        """How many numbers an entry of a state is."""
        return 1 if self.takes_logs else 2

    def extents(self, order: Sequence[int]) -> list[int]:
        return [self.chain.batch[axis] for axis in order]

    def strides(self, x: Array | None, trailing: int, order: Sequence[int]) -> list[int]:
        """Return an array's strides along some batch axes of the chain, 0 where it has none."""
        if x is None:
            return [0 for _ in order]
        strides, shape = self.device.strides(x), tuple(x.shape)
        skipped = len(self.chain.batch) + trailing - len(shape)
        return [
            0 if axis < skipped or shape[axis - skipped] == 1 else strides[axis - skipped]
            for axis in order
        ]

    def dense_strides(self, stride: int, order: Sequence[int]) -> list[int]:
        """Return the strides along some batch axes of an array that has these alone."""
        strides = []
        for extent in reversed(self.extents(order)):
            strides.append(stride)
            stride *= extent
        return strides[::-1]

    def of_batch(self, x: Array) -> Array:
        """Return numbers of rows, [rows, ...], as [*batch, ...]."""
        xp, rest = array_namespace(x), tuple(x.shape)[1:]
        x = xp.reshape(x, (*self.extents(self.order), *rest))
        places = (self.order.index(axis) for axis in range(len(self.order)))
        return xp.permute_dims(x, (*places, *range(len(self.order), len(x.shape))))

    def axes(self, order: Sequence[int], *operands: tuple[Array | None, int]) -> np.ndarray:
        """Return batch axes with the strides of arrays that have so many other axes."""
        strides = (self.strides(x, trailing, order) for x, trailing in operands)
        return pack_axes(self.extents(order), *strides)

    def end_weights(self, name: str | None) -> tuple[int, int, Array | None]:
        """Return the form (StartForm), stride and array of 'initial' or 'final' weights."""
        weights = None if name is None else getattr(self.chain, name)
        if weights is None:
            return 0, 0, None
        form = 2 if getattr(self.chain, f"{name}_in_logs") else 1
        return form, self.device.strides(weights)[-1], weights

    def new_history(self, steps: int) -> History:
        """Return memory for the states of some steps."""
        shape = (steps, self.all_rows, self.planes, self.chain.num_states)
        return History(
            self.device.empty(shape, self.compute),
            self.device.empty((steps, self.all_rows, SCALE), "float64"),
        )

    def new_total(self) -> Array:
        """Return memory for the sums over all paths."""
        return self.device.empty((self.all_rows, TOTAL), "float64")

    def launch(
        self, source: str, kernel: str, blocks: int, *arguments: Any, shared_memory: int = 0
    ) -> None:
        """Launch a kernel that computes in the chain's precision."""
        kernel = f"{kernel}<{C_TYPES[self.compute]}>"
        self.device.run(Launch(source, kernel, blocks, THREADS, arguments, shared_memory))
