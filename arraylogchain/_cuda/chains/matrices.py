"""Matrices of a chain made ready for the recursion, in blocks of steps that fit the workspace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from arraylogchain._cuda.chains.arrays import DTYPES, ChainArrays
from arraylogchain._cuda.launch import ceil_div, pack_axes

SOURCE = "chains/prepare.cu"
# A launch with so many steps takes some tenths of a second; a device that has a screen ends those
# that take longer than about two.
MAX_STEPS = 100_000


@dataclass(frozen=True, slots=True)
class ReadyMatrices:
    """Matrices of some steps as the recursion's kernels take them.

    Attributes
    ----------
    fields : dict of str to int
        Of the struct Recursion.
    axes : numpy.ndarray
        The group axes, with the strides of the matrices and of their logs.
    arguments : tuple
        Matrices, then what prepare.cu says of them, then their logs.
    """

    fields: dict[str, int]
    axes: np.ndarray
    arguments: tuple[Any, ...]


NO_MATRICES = ReadyMatrices({}, pack_axes((), (), ()), (None,) * 5)


def steps_at_once(arrays: ChainArrays, workspace: int, as_logs: bool = False) -> int:
    """Return how many steps a launch goes through: those whose matrices the workspace holds."""
    chain = arrays.chain
    if arrays.is_one_matrix or chain.num_steps == 1:
        return min(chain.num_steps, MAX_STEPS)
    each = 3 * arrays.groups * chain.num_states * arrays.itemsize
    if as_logs or arrays.takes_logs or _copies(arrays, False) or _copies(arrays, True):
        each += arrays.groups * chain.num_states**2 * arrays.itemsize
    return max(1, min((workspace - 2 * arrays.state_bytes) // each, MAX_STEPS))


def _copies(arrays: ChainArrays, backward: bool) -> bool:
    """Tell whether the weights that are multiplied are not the given ones as they lie."""
    strides = arrays.device.strides(arrays.chain.transitions)
    column = strides[-2] if backward else strides[-1]
    return (
        arrays.chain.transitions_in_logs
        or arrays.dtype != arrays.compute
        or (column != 1 and arrays.chain.num_states > 1)
    )


def prepare(
    arrays: ChainArrays, first: int, last: int, backward: bool, as_logs: bool = False
) -> ReadyMatrices:
    """Make the matrices of steps ready, in the order of computation; `as_logs` for largest sums."""
    chain, device, size = arrays.chain, arrays.device, arrays.chain.num_states
    first = max(first, 1)
    if chain.transitions is None or chain.num_steps == 1 or last <= first:
        return NO_MATRICES
    time = chain.num_steps - 1 - first if backward else first - 1
    step, row, column = device.strides(chain.transitions)[-3:]
    if backward:
        step, row, column = -step, column, row
    count = last - first
    if arrays.is_one_matrix:
        time, step, count = 0, 0, 1
    given = chain.transitions[..., time, :, :]
    shape = (arrays.groups, count, size)
    needed = (not as_logs, not as_logs, chain.transitions_in_logs)
    line, least, shift = (device.empty(shape, arrays.compute) if x else None for x in needed)
    copies = as_logs or _copies(arrays, backward)
    copy = device.empty((*shape, size), arrays.compute) if copies else None
    arrays.launch(
        SOURCE,
        "chain_prepare",
        arrays.groups * count * ceil_div(size, 32),
        given,
        np.int32(DTYPES.index(arrays.dtype)),
        arrays.axes(chain.group_axes, (given, 2)),
        *map(np.int64, (step, row, column)),
        *map(np.int32, (count, size, chain.transitions_in_logs)),
        copy,
        line,
        least,
        shift,
    )
    fields = {"matrices": count, "first_matrix": first}
    fields |= {"matrix_stride": step, "matrix_row_stride": row}
    strides, log_strides, logs = arrays.strides(given, 2, chain.group_axes), None, None
    if chain.transitions_in_logs:
        fields |= {"logs_stride": step, "logs_row_stride": row, "logs_column_stride": column}
        log_strides, logs = strides, given
    if copy is not None:
        dense = 0 if arrays.is_one_matrix else size * size
        fields |= {"matrix_stride": dense, "matrix_row_stride": size}
        strides = arrays.dense_strides(count * size * size, chain.group_axes)
    axes = pack_axes(arrays.extents(chain.group_axes), strides, log_strides or [0] * len(strides))
    matrix = given if copy is None else copy
    return ReadyMatrices(fields, axes, (matrix, line, least, shift, logs))
