"""Launches of kernels as plain data, and index spaces packed for kernels to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

MAX_AXES = 8
MAX_OPERANDS = 3
MAX_GRID = 2**31 - 1  # along the first axis


def struct(*fields: tuple[Any, str]) -> np.dtype:
    """Return a struct of the kernels: types, and names of fields; with the padding of C++."""
    return np.dtype([(name, kind) for kind, names in fields for name in names.split()], align=True)


# struct Axes of axes.cuh.
AXES = np.dtype(
    [
        ("count", np.int32),
        ("extent", np.int64, (MAX_AXES,)),
        ("stride", np.int64, (MAX_OPERANDS, MAX_AXES)),
    ],
    align=True,
)


class Kernel(NamedTuple):
    """A kernel: the file that has it, and its name with its template arguments."""

    source: str
    name: str


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of one kernel.

    Attributes
    ----------
    source : str
        The file that has the kernel, e.g. "products/logmatmulexp.cu", relative to this folder.
    kernel : str
        The kernel with its template arguments, e.g. "logmatmulexp<float, float, 128, 128>".
    grid : int
        Blocks, along one axis: the two others of CUDA's grids end at 65535.
    block : int
        Threads in a block, along one axis.
    arguments : tuple
        What the kernel is called with. NumPy scalars, of exactly the parameter's type, and
        structured NumPy arrays of one entry are passed by value, None as a null pointer.
        Arrays of the device's library are passed as pointers to their first entry, whatever
        their strides.
    shared_memory : int
        Bytes of dynamic shared memory for each block.
    """

    source: str
    kernel: str
    grid: int
    block: int
    arguments: tuple[Any, ...]
    shared_memory: int = 0

    def with_arguments(self, arguments: tuple[Any, ...]) -> Launch:
        """Return the same launch of other arguments."""
        sizes = (self.source, self.kernel, self.grid, self.block)
        return Launch(*sizes, arguments, self.shared_memory)


def ceil_div(n: int, size: int) -> int:
    """Return how many blocks of `size` cover n."""
    return -(-n // size)


def is_struct(argument: Any) -> bool:
    """Tell whether an argument is a struct, passed by value."""
    return isinstance(argument, np.ndarray) and argument.dtype.names is not None


def pack(struct: np.dtype, **fields: Any) -> np.ndarray:
    """Return a struct as kernels take it; fields that are not given are 0."""
    packed = np.zeros((), struct)
    for name, value in fields.items():
        packed[name] = value
    return packed


def are_packable(extents: Sequence[int]) -> bool:
    """Tell whether `pack_axes` takes axes of these lengths, whatever their strides."""
    return sum(n != 1 for n in extents) <= MAX_AXES


def pack_axes(extents: Sequence[int], *strides: Sequence[int]) -> np.ndarray:
    """Return the index space of several operands as the kernels' struct `Axes`.

    Axes of length 1 are dropped. Neighbours that every operand steps through as through one
    axis become one: a kernel spends a division on each.

    Parameters
    ----------
    extents : sequence of int
        Lengths of the axes, the slowest first.
    *strides : sequence of int
        For each operand, its strides in elements; 0 along an axis that it does not have.

    Raises
    ------
    ValueError
        If more than `MAX_AXES` axes remain.
    """
    merged: list[tuple[int, tuple[int, ...]]] = []
    for extent, *steps in zip(extents, *strides, strict=True):
        if extent == 1:
            continue
        if merged and merged[-1][1] == tuple(extent * step for step in steps):
            extent *= merged.pop()[0]
        merged.append((extent, tuple(steps)))
    if len(merged) > MAX_AXES:
        raise ValueError(f"{len(merged)} axes that cannot be merged; kernels take {MAX_AXES}")
    axes = np.zeros((), AXES)
    axes["count"] = len(merged)
    axes["extent"] = 1
    for axis, (length, step) in enumerate(merged):
        axes["extent"][axis] = length
        axes["stride"][: len(step), axis] = step
    return axes
