"""Layouts: of `chain_steps` on a device, and of a shard's arrays in memory."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from arraylogchain._backends.shards import Shard
from arraylogchain._core.context import Array, Context
from arraylogchain._cuda.kernels import Kernel, kernel_named

# Of a block whose groups of threads are parts of warps, and of one with four rows.
_WARPS, _FOUR_ROWS = 128, 512


class LaunchSizes(NamedTuple):
    """Sizes of a launch: blocks, threads of a block and of a row, bytes of shared memory."""

    blocks: int
    threads: int
    threads_per_row: int
    shared_memory: int


class Geometry(NamedTuple):
    """Template arguments of `chain_steps`, and the sizes of its launches."""

    sums: bool
    in_warp: bool
    rows: int
    on_chip: bool

    def kernel(self, ctx: Context) -> Kernel:
        return kernel_named("chain_steps", ctx.precision.name, *[str(x).lower() for x in self])

    def sizes(self, shard: Shard) -> LaunchSizes:
        """Return the sizes of a launch for a shard."""
        groups, rows, states = shard.state_shape
        item, width = shard.ctx.precision.itemsize, power_of_two(states)
        if self.in_warp:
            # One warp to a block, so that few rows are spread over the device.
            has_few_rows = groups * rows * width <= _WARPS * shard.ctx.kernels.multiprocessors
            block = 32 if has_few_rows else _WARPS
            slots = block // width
            grid = -(-groups * rows // slots)
        else:
            block, slots, grid = -(-states // 32) * 32, 1, groups * -(-rows // self.rows)
        shared = (slots * 2 * states + 32) * self.rows * item
        return LaunchSizes(grid, block, width, shared + self.on_chip * states * states * item)


def geometry_of(shard: Shard, sums: bool) -> Geometry:
    """Return the layout of a shard's steps.

    Four rows to a block, where that leaves blocks for half of the device: entries that are read
    serve all of them.
    """
    (groups, rows, states), device = shard.state_shape, shard.ctx.kernels
    in_warp = states <= 32
    fours = groups * -(-rows // 4)
    has_four = rows >= 4 and states <= _FOUR_ROWS and 2 * fours >= device.multiprocessors
    is_shared = shard.chain.has_one_matrix and (groups == 1 or not in_warp)
    geometry = Geometry(sums, in_warp, 4 if has_four and not in_warp else 1, is_shared)
    fits = geometry.sizes(shard).shared_memory <= device.shared_memory
    return geometry if fits else geometry._replace(on_chip=False)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def row_strides(shard: Shard, x: Array) -> tuple[int, ...] | None:
    """Return strides of groups, of rows and of the trailing axes of an array [*shape, ...].

    The array is a view of a shard, in the chain's order; axes of length 1 may be broadcast. None
    where several axes cannot be merged to one.
    """
    strides, num_axes = shard.ctx.kernels.strides(x), len(shard.shape)
    shape = tuple(int(n) for n in x.shape[:num_axes])
    return _merged(shard.shape, shape, strides, len(shard.chain.group_axes))


@lru_cache(maxsize=1024)
def _merged(
    full: tuple[int, ...], shape: tuple[int, ...], strides: tuple[int, ...], num_group_axes: int
) -> tuple[int, ...] | None:
    merged = []
    for axes in (range(num_group_axes), range(num_group_axes, len(full))):
        stride, expected = 0, None
        for axis in reversed(axes):
            if full[axis] == 1:
                continue
            step = strides[axis] if shape[axis] > 1 else 0
            if expected is None:
                stride = step
            elif step != expected:
                return None
            expected = step * full[axis]
        merged.append(stride)
    return (*merged, *strides[len(full) :])
