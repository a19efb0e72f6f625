"""The arrays of a chain as its kernels take them: batch axes in their order, strides, dtypes.

Rows are numbered as `Chain.arrange` arranges the batch axes, those of groups first; every array
keeps its own strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from arraylogchain._chain.steps import Chain
from arraylogchain._context import Array
from arraylogchain._cuda import dtypes
from arraylogchain._cuda.chains.lengths import row_lengths
from arraylogchain._cuda.device import Device
from arraylogchain._cuda.launch import pack_axes

# DType of any_dtype.cuh, in its order.
DTYPES = tuple(dtypes.C_TYPES)
# What chains are computed in: their kernels find out about the dtypes of arrays as they run.
C_TYPES = {dtype: dtypes.C_TYPES[dtype] for dtype in ("float32", "float64")}

# Numbers of a Scale and of a Total, all double.
SCALE, TOTAL = 3, 5


@dataclass(frozen=True, slots=True)
class History:
    """States of some steps, extended numbers, from the step of time `first` on.

    Attributes
    ----------
    states : array [steps, rows, 2, K]
        Mantissas and exponents.
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

    Attributes
    ----------
    lengths : array or None
        See `row_lengths`.
    """

    def __init__(self, device: Device, chain: Chain) -> None:
        assert chain.potentials is not None
        assert chain.lead == 0
        self.device, self.chain = device, chain
        self.dtype = device.dtype_name(chain.potentials)
        self.compute = dtypes.compute_type(self.dtype)
        self.item = dtypes.itemsize(self.compute)
        self.groups, self.rows = chain.sizes
        self.number = self.groups * self.rows
        self.order = (*chain.group_axes, *chain.row_axes)
        self.lengths = row_lengths(device, chain)

    @property
    def is_one_matrix(self) -> bool:
        x = self.chain.transitions
        return x is None or int(x.shape[-3]) == 1 or self.device.strides(x)[-3] == 0

    def batch_strides(self, x: Array | None, trailing: int, order: Sequence[int]) -> list[int]:
        """Return an array's strides along some batch axes of the chain, 0 where it has none."""
        if x is None:
            return [0 for _ in order]
        strides, shape = self.device.strides(x), tuple(x.shape)
        skipped = len(self.chain.batch) + trailing - len(shape)
        return [
            0 if axis < skipped or shape[axis - skipped] == 1 else strides[axis - skipped]
            for axis in order
        ]

    def number_strides(self, stride: int) -> list[int]:
        """Return the strides along all batch axes of what has a row's number times `stride`."""
        strides = []
        for axis in reversed(self.order):
            strides.append(stride)
            stride *= self.chain.batch[axis]
        return strides[::-1]

    def axes(self, order: Sequence[int], *operands: tuple[Array | None, int]) -> np.ndarray:
        """Return batch axes with the strides of arrays that have so many other axes."""
        extents = [self.chain.batch[axis] for axis in order]
        return pack_axes(extents, *(self.batch_strides(x, n, order) for x, n in operands))

    def new_history(self, steps: int) -> History:
        """Return memory for the states of some steps."""
        return History(
            self.device.empty((steps, self.number, 2, self.chain.size), self.compute),
            self.device.empty((steps, self.number, SCALE), "float64"),
        )

    def new_total(self) -> Array:
        """Return memory for the sums over all paths."""
        return self.device.empty((self.number, TOTAL), "float64")
