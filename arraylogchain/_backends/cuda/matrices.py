"""Transition matrices in the form that kernels read, see struct Chain in chain.cuh."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from arraylogchain._backends.cuda.structs import MATRICES
from arraylogchain._backends.shards import Shard
from arraylogchain._core.context import Array
from arraylogchain._cuda.kernels import C_TYPES, Kernel, Launch, kernel_named
from arraylogchain._inputs import arrays


class InputMatrices(NamedTuple):
    """The caller's matrices of some steps.

    Attributes
    ----------
    array : array
        Which holds the memory.
    strides : tuple of int
        Of groups, matrices, and states from and to, in entries.
    order : array or None
        The places of groups.
    """

    array: Array
    strides: tuple[int, int, int, int]
    order: Array | None


class PreparedMatrices(NamedTuple):
    """Matrices [groups, count, K, K] as kernels read them.

    Attributes
    ----------
    values : array
        Factors, logs and shifts, one after another.
    factors, logs, shifts : int
        Where they are; 0 for none.
    scales : array [groups, n, 2]
        Of these and maybe of other matrices.
    first : int
        Index along axis 1 of `scales` of the first of these matrices.
    num_matrices : int
        Of each group.
    """

    values: Array
    factors: int
    logs: int
    shifts: int
    scales: Array
    first: int
    num_matrices: int


def input_matrices(shard: Shard, transitions: slice) -> InputMatrices:
    """Return the matrices of some transitions, or the one of all, in the precision or narrower."""
    ctx, view = shard.ctx, shard.views["transitions"]
    if not shard.chain.has_one_matrix:
        view = view[..., transitions, :, :]
    if dtype_name(shard) == ctx.precision.name:
        view = ctx.load(view, ctx.precision)
    size, count = int(view.shape[-1]), int(view.shape[-3])
    order = shard.order if shard.groups > 1 else None
    # A copy where several axes of groups cannot be merged.
    x = ctx.xp.reshape(view, (shard.groups, count, size, size)) if shard.shape else view[None, ...]
    return InputMatrices(x, ctx.kernels.strides(x), order)


def dtype_name(shard: Shard) -> str:
    """Return the dtype that kernels read matrices in; others are converted to the precision."""
    name = arrays.dtype_name(shard.views["transitions"].dtype)
    return name if name == shard.ctx.result_name else shard.ctx.precision.name


def kernel_of(shard: Shard) -> Kernel:
    """Return the kernel that prepares the matrices of a shard."""
    ctx, dtype = shard.ctx, dtype_name(shard)
    return kernel_named("prepare_matrices", f"{C_TYPES[ctx.precision.name]}, {C_TYPES[dtype]}")


def prepare(
    shard: Shard,
    transitions: slice,
    backward: bool,
    scales: Array,
    first: int,
    uses: tuple[bool, bool] = (True, True),
    transposes_logs: bool = False,
) -> PreparedMatrices:
    """Return matrices of some transitions, transposed if backward.

    Parameters
    ----------
    scales : array [groups, n, 2]
        Receives the scales of the matrices, from index `first` of axis 1 on.
    uses : tuple of bool
        Whether exponentials and logarithms of the matrices are computed.
    transposes_logs : bool
        Whether logs are stored as [to, from].
    """
    ctx, device = shard.ctx, shard.ctx.kernels
    x, (group, matrix, source, target), order = input_matrices(shard, transitions)
    if backward:
        source, target = target, source
    groups, count, size, _ = (int(n) for n in x.shape)
    # Few matrices are shared out among the multiprocessors.
    parts = max(1, min(-(-size // 32), 2 * device.multiprocessors // (groups * count)))
    entries, item = groups * count * size * size, ctx.precision.itemsize
    values = device.empty((entries * sum(uses) + groups * count * size * 2,), ctx.precision.name)
    start = device.pointer(values)
    factors, logs = start if uses[0] else 0, start + entries * item * uses[0] if uses[1] else 0
    shifts = start + entries * item * sum(uses)
    strides = group, matrix, source, target
    sizes = count, size, parts, "transitions" in shard.chain.logs
    place = 0 if order is None else device.pointer(order)
    packed = MATRICES.pack(device.pointer(x), place, *strides, *sizes)
    arguments = (
        packed,
        *map(np.uint64, (factors, shifts, logs)),
        np.uint64(device.pointer(scales) + 16 * first),
        np.int64(2 * scales.shape[1]),
        np.int32(transposes_logs),
    )
    device.run(Launch(kernel_of(shard), groups * count * parts, 1024, arguments))
    return PreparedMatrices(values, factors, logs, shifts, scales, first, count)
