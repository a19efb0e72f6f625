"""Transition matrices in the form that kernels read, see struct Chain in chain.cuh."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from arraylogchain._backends.cuda.structs import MATRICES
from arraylogchain._backends.shards import Shard
from arraylogchain._core.context import Array
from arraylogchain._cuda.kernels import Kernel, kernel_named
from arraylogchain._inputs import arrays


class PreparedMatrices(NamedTuple):
    """Matrices as kernels read them.

    Attributes
    ----------
    memory : array
        Factors, if there are any, logs and shifts, one after another: held while kernels read it.
    scales : array [groups, count, 2]
        Whole nats and powers of two.
    fields : dict of str to int
        Fields of struct Chain that describe them.
    """

    memory: Array
    scales: Array
    fields: dict[str, int]


def input_matrices(shard: Shard, transitions: slice) -> tuple[Array, tuple[int, int, int, int]]:
    """Return the matrices of some transitions, or the one of all steps, in `dtype_name`.

    Strides are of groups, matrices, and states from and to, in entries.
    """
    ctx, view = shard.ctx, shard.views["transitions"]
    if not shard.chain.has_one_matrix:
        view = view[..., transitions, :, :]
    if dtype_name(shard) == ctx.precision.name:
        view = ctx.load(view, ctx.precision)
    size, count = int(view.shape[-1]), int(view.shape[-3])
    # A copy where several axes of groups cannot be merged.
    x = ctx.xp.reshape(view, (shard.groups, count, size, size)) if shard.shape else view[None, ...]
    return x, ctx.kernels.strides(x)


def dtype_name(shard: Shard) -> str:
    """Return the dtype that kernels read matrices in; others are converted to the precision."""
    name = arrays.dtype_name(shard.views["transitions"].dtype)
    return name if name == shard.ctx.result_name else shard.ctx.precision.name


def kernel_of(shard: Shard) -> Kernel:
    """Return the kernel that prepares the matrices of a shard."""
    return kernel_named("prepare_matrices", shard.ctx.precision.name, dtype_name(shard))


def prepare(
    shard: Shard,
    transitions: slice,
    backward: bool,
    has_factors: bool,
    transposes_logs: bool,
) -> PreparedMatrices:
    """Return the matrices of a slice of transitions as kernels read them, [groups, count, K, K].

    Parameters
    ----------
    shard : Shard
    transitions : slice
    backward : bool
        Whether matrices are transposed, for the backward recursion.
    has_factors : bool
        Whether the matrices are stored in linear space, too, and not only in log space.
    transposes_logs : bool
        Whether logs are stored as [to, from].
    """
    ctx, device = shard.ctx, shard.ctx.kernels
    x, (group, matrix, source, target) = input_matrices(shard, transitions)
    if backward:
        source, target = target, source
    groups, count, size, _ = (int(n) for n in x.shape)
    # Several blocks of threads prepare a large matrix, where matrices are few for the device.
    parts = max(1, min(-(-size // 32), 2 * device.multiprocessors // (groups * count)))
    entries, item = groups * count * size * size, ctx.precision.itemsize
    num_values = entries * (1 + has_factors) + groups * count * size * 2
    values = device.empty((num_values,), ctx.precision.name)
    start = device.pointer(values)
    factors, logs = start if has_factors else 0, start + entries * item * has_factors
    shifts, scales = logs + entries * item, device.empty((groups, count, 2), "float64")
    order = 0 if shard.groups == 1 else device.pointer(shard.order)
    strides = group, matrix, source, target
    sizes = count, size, parts, "transitions" in shard.chain.logs
    arguments = (
        MATRICES.pack(device.pointer(x), order, *strides, *sizes),
        *map(np.uint64, (factors, shifts, logs)),
        scales,
        np.int32(transposes_logs),
    )
    device.run(kernel_of(shard), groups * count * parts, 1024, arguments)
    fields = {"factors": factors, "shifts": shifts, "logs": logs, "matrices": count}
    return PreparedMatrices(values, scales, fields | {"scales": device.pointer(scales)})
