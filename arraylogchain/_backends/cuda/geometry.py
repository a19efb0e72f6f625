"""Layouts of `chain_steps` on a device."""

from __future__ import annotations

from typing import NamedTuple

from arraylogchain._backends.shards import Shard
from arraylogchain._core.context import Context
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

    in_warp: bool
    rows: int
    on_chip: bool

    def kernel(self, ctx: Context, sums: bool) -> Kernel:
        """Return the kernel for sums, or for maxima."""
        arguments = [str(x).lower() for x in (sums, *self)]
        return kernel_named("chain_steps", ctx.precision.name, *arguments)

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


def geometry_of(shard: Shard) -> Geometry:
    """Return the layout of a shard's steps.

    Four rows to a block, where that leaves blocks for half of the device: entries that are read
    serve all of them.
    """
    (groups, rows, states), device = shard.state_shape, shard.ctx.kernels
    in_warp = states <= 32
    fours = groups * -(-rows // 4)
    has_four = rows >= 4 and states <= _FOUR_ROWS and 2 * fours >= device.multiprocessors
    is_shared = shard.chain.has_one_matrix and (groups == 1 or not in_warp)
    geometry = Geometry(in_warp, 4 if has_four and not in_warp else 1, is_shared)
    fits = geometry.sizes(shard).shared_memory <= device.shared_memory
    return geometry if fits else geometry._replace(on_chip=False)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
