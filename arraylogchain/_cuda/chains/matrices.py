"""Matrices of a chain made ready for the recursion, in blocks of steps that fit the workspace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arraylogchain._context import Array
from arraylogchain._cuda.chains.arrays import C_TYPES, DTYPES, SCALE, ChainArrays
from arraylogchain._cuda.launch import Launch

INSTANTIATIONS: dict[str, list[str]] = {
    "chains/prepare.cu": [f"chain_prepare<{t}>" for t in C_TYPES.values()],
}


@dataclass(frozen=True, slots=True)
class Prepared:
    """Matrices made ready for some steps; see prepare.cu."""

    matrix: Array
    group_strides: tuple[int, ...]
    stride: int
    row_stride: int
    matrices: int
    given_at: int  # which of the given ones is the first
    line: Array
    least: Array
    shift: Array | None


def steps_at_once(of: ChainArrays, workspace: int) -> int:
    """Return how many steps' matrices the workspace holds."""
    if of.is_one_matrix or of.chain.count == 1:
        return of.chain.count
    states = 2 * of.number * (2 * of.chain.size * of.item + 8 * SCALE)
    each = 3 * of.groups * of.chain.size * of.item
    if _copies(of, False) or _copies(of, True):
        each += of.groups * of.chain.size**2 * of.item
    return max(1, (workspace - states) // each)


def _copies(of: ChainArrays, backward: bool) -> bool:
    """Tell whether the weights that are multiplied are not the given ones as they lie."""
    strides = of.device.strides(of.chain.transitions)
    column = strides[-2] if backward else strides[-1]
    return (
        of.chain.transitions_in_logs
        or of.dtype != of.compute
        or (column != 1 and of.chain.size > 1)
    )


def prepare(of: ChainArrays, first: int, last: int, backward: bool) -> Prepared | None:
    """Make the matrices of steps ready, in the order of computation; None if there is none."""
    chain, device, size = of.chain, of.device, of.chain.size
    given = chain.transitions
    steps = last - max(first, 1)
    if given is None or chain.count == 1 or steps <= 0:
        return None
    stride, row, column = device.strides(given)[-3:]
    one = of.is_one_matrix
    matrices = 1 if one else steps
    at = 0 if one else chain.count - 1 - max(first, 1) if backward else max(first, 1) - 1
    start = given[..., at, :, :]
    stride = 0 if one else -stride if backward else stride
    if backward:
        row, column = column, row
    shape = (of.groups, matrices, size)
    line, least = device.empty(shape, of.compute), device.empty(shape, of.compute)
    shift = device.empty(shape, of.compute) if chain.transitions_in_logs else None
    copy = device.empty((*shape, size), of.compute) if _copies(of, backward) else None
    device.run(
        Launch(
            "chains/prepare.cu",
            f"chain_prepare<{C_TYPES[of.compute]}>",
            of.groups * matrices * -(-size // 32),
            256,
            0,
            (
                start,
                np.int32(DTYPES.index(of.dtype)),
                of.axes(chain.group_axes, (start, 2)),
                np.int64(stride),
                np.int64(row),
                np.int64(column),
                np.int32(matrices),
                np.int32(size),
                np.int32(chain.transitions_in_logs),
                copy,
                line,
                least,
                shift,
            ),
        )
    )
    if copy is None:
        strides = tuple(of.batch_strides(start, 2, chain.group_axes))
        return Prepared(start, strides, stride, row, matrices, at, line, least, shift)
    whole, dense = matrices * size * size, []
    for axis in reversed(chain.group_axes):
        dense.append(whole)
        whole *= chain.batch[axis]
    stride = 0 if one else size * size
    strides = tuple(reversed(dense))
    return Prepared(copy, strides, stride, size, matrices, at, line, least, shift)
