"""How `chain_steps` is laid out on a device."""

from __future__ import annotations

from typing import NamedTuple

from arraylogchain._backends.shards import Shard
from arraylogchain._core.context import Context
from arraylogchain._cuda.kernels import C_TYPES, Kernel

# Of a block whose groups of threads are parts of warps, and of one with four rows.
_WARPS, _FOUR_ROWS = 128, 512


class Geometry(NamedTuple):
    """How `chain_steps` is laid out: its template arguments, and a launch's sizes."""

    sums: bool
    in_warp: bool
    rows: int
    on_chip: bool

    def kernel(self, ctx: Context) -> Kernel:
        words = [str(x).lower() for x in self]
        name = f"chain_steps<{C_TYPES[ctx.precision.name]}, {', '.join(words)}>"
        return Kernel("chain_steps.cu", name)

    def sizes(self, shard: Shard) -> tuple[int, int, int, int]:
        """Return blocks, threads of a block, lanes of a row, and bytes of shared memory."""
        groups, rows, states = shard.state_shape
        item, lanes = shard.ctx.precision.itemsize, _power_of_two(states)
        if self.in_warp:
            # One warp to a block, so that few rows are spread over the device.
            has_few_rows = groups * rows * lanes <= _WARPS * shard.ctx.kernels.multiprocessors
            block = 32 if has_few_rows else _WARPS
            slots = block // lanes
            grid = -(-groups * rows // slots)
        else:
            block, slots, grid = -(-states // 32) * 32, 1, groups * -(-rows // self.rows)
        shared = (slots * 2 * states + 32) * self.rows * item
        return grid, block, lanes, shared + self.on_chip * states * states * item


def geometry_of(shard: Shard, sums: bool) -> Geometry:
    """Return how steps of a piece are laid out.

    Four rows to a block, where that leaves blocks for half of the device: what is read of a matrix
    serves all of them.
    """
    (groups, rows, states), device = shard.state_shape, shard.ctx.kernels
    in_warp = states <= 32
    fours = groups * -(-rows // 4)
    has_four = rows >= 4 and states <= _FOUR_ROWS and 2 * fours >= device.multiprocessors
    is_shared = shard.chain.has_one_matrix and (groups == 1 or not in_warp)
    geometry = Geometry(sums, in_warp, 4 if has_four and not in_warp else 1, is_shared)
    fits = geometry.sizes(shard)[3] <= device.shared_memory
    return geometry if fits else geometry._replace(on_chip=False)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
