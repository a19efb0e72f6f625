"""How a chain's kernel is laid out over blocks, warps and lanes: arithmetic on shapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from arraylogchain._cuda.launch import ceil_div

# R and C of chain.cu that there are, by the size of a number. Few of both for a few rows, or
# states; many for what is limited by the multiplier, and by how often matrices are read.
TILES = {
    4: ((1, 1), (4, 1), (8, 7), (16, 4)),
    8: ((1, 1), (4, 1), (8, 4)),
}
# Likewise of viterbi.cu, whose largest sums take no less registers.
BEST_TILES = {
    4: ((1, 1), (4, 1), (8, 4)),
    8: ((1, 1), (4, 1), (8, 2)),
}
# G of small.cu: lanes that have a state each. It is for all chains of so few states.
LANES = (4, 8, 16, 32)
MAX_WARPS = 8  # kMaxThreads of chain.cu and small.cu
# Numbers that one load from shared memory takes, by the size of a number.
PACK = {4: 4, 8: 2}
# sizeof(ChainBlock<T>) of step.cuh, up to where rows begin; sizeof(Row<T>) of rows.cuh.
BLOCK_BYTES = 320
ROW_BYTES = {4: 104, 8: 128}
# sizeof(BestRow) of viterbi.cu.
BEST_ROW_BYTES = 24

# One multiprocessor in a clock cycle: numbers multiplied and added, bytes from the L2 cache; and
# bytes that the cache gives to all of them.
FMA = {4: 128, 8: 64}
L2_BYTES, L2_BYTES_IN_ALL = 64, 3100
# Cycles of a step that are not its product: barriers and latencies, and what a warp needs for each
# entry of a state.
STEP, PER_ENTRY = 1200, 6
# Estimates, as nobody has measured them: cycles in a second, and bytes that memory gives in one;
# seconds of a step of small.cu, of a launch, and of the array operations of a step; cycles of a
# multiprocessor that a warp takes in a step of small.cu.
CLOCK, MEMORY_BYTES = 1.7e9, 2500
SMALL_STEP, LAUNCH, ARRAY_STEP = 3e-6, 8e-6, 2e-4
SMALL_CYCLES = 340
# Rows that a matrix multiply takes at least the time of.
GEMM_ROWS = 32
# From this many states on, blocks may share the columns of the same rows.
SLICED_FROM = 512


@dataclass(frozen=True, slots=True)
class Geometry:
    """How the kernel `chain` is launched.

    Attributes
    ----------
    takes_logs : bool
        Whether matrices and states are logs.
    rows, columns : int
        The kernel's R and C.
    column_warps : int
        Warps of a block that lie side by side.
    parts : int
        How many of those there are, each for a part of the terms of a sum.
    slices : int
        Blocks that share the columns of the same rows; with several, a launch is one step.
    """

    rows: int
    columns: int
    column_warps: int
    parts: int
    slices: int = 1

    source: ClassVar[str] = "chains/chain.cu"
    takes_logs: ClassVar[bool] = False

    def kernel(self, number: str) -> str:
        """Return the kernel's name, for numbers of a type of C."""
        return f"chain<{number}, {self.rows}, {self.columns}>"

    @property
    def threads(self) -> int:
        return 32 * self.column_warps * self.parts

    def blocks(self, groups: int, rows: int) -> int:
        """Return how many blocks there are for so many rows of each group, but for slices."""
        return groups * ceil_div(rows, self.rows)

    def columns_of(self, size: int) -> int:
        """Return how many columns a block adds up, those beyond the last one included."""
        tiles = ceil_div(size, 32 * self.columns)
        return ceil_div(tiles, self.slices) * 32 * self.columns

    def shared_memory(self, size: int, item: int) -> int:
        """Return the bytes of shared memory of a block."""
        padded = ceil_div(size, PACK[item]) * PACK[item]
        numbers = 5 * self.rows * padded + self.parts * self.rows * self.columns_of(size)
        return BLOCK_BYTES + ceil_div(self.rows * ROW_BYTES[item], 16) * 16 + item * numbers


@dataclass(frozen=True, slots=True)
class BestGeometry(Geometry):
    """How the kernel `viterbi` is launched, which has no slices."""

    source: ClassVar[str] = "chains/viterbi.cu"
    takes_logs: ClassVar[bool] = True

    def kernel(self, number: str) -> str:
        """Return the kernel's name, for numbers of a type of C."""
        return f"viterbi<{number}, {self.rows}, {self.columns}>"

    def shared_memory(self, size: int, item: int) -> int:
        """Return the bytes of shared memory of a block."""
        padded = ceil_div(size, PACK[item]) * PACK[item]
        numbers = self.rows * (padded + self.parts * self.columns_of(size))
        return ceil_div(self.rows * BEST_ROW_BYTES, 16) * 16 + item * numbers


@dataclass(frozen=True, slots=True)
class SmallGeometry:
    """How the kernel `chain_small` is launched.

    Attributes
    ----------
    lanes : int
        The kernel's G, at least as many as there are states.
    warps : int
        Warps of a block.
    """

    lanes: int
    warps: int

    source: ClassVar[str] = "chains/small.cu"
    takes_logs: ClassVar[bool] = False
    slices: ClassVar[int] = 1
    column_warps: ClassVar[int] = 1

    def kernel(self, number: str) -> str:
        """Return the kernel's name, for numbers of a type of C."""
        return f"chain_small<{number}, {self.lanes}>"

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def blocks(self, groups: int, rows: int) -> int:
        """Return how many blocks there are for so many rows of each group."""
        return ceil_div(groups * rows * self.lanes, self.threads)

    def shared_memory(self, size: int, item: int) -> int:
        """Return the bytes of shared memory of a block."""
        return item * self.threads


@lru_cache(maxsize=1024)
def choose(
    size: int,
    groups: int,
    rows: int,
    item: int,
    multiprocessors: int,
    shared_memory: int,
    for_best: bool = False,
) -> Geometry | SmallGeometry | None:
    """Return the geometry that should take the least time; None if no row fits shared memory.

    Parameters
    ----------
    size : int
        K.
    groups, rows : int
        Groups, and rows that share the matrices of one.
    item : int
        Bytes of a number.
    multiprocessors, shared_memory : int
        What the device has.
    for_best : bool
        Whether it is best paths that are wanted; there is a geometry for them wherever there is
        one for sums.
    """
    if size <= LANES[-1] and not for_best:
        lanes = next(n for n in LANES if n >= size)
        # Few rows are spread over all multiprocessors: warps need nothing of each other.
        warps = ceil_div(groups * rows * lanes, 32) // multiprocessors
        return SmallGeometry(lanes, max(1, min(MAX_WARPS, warps)))
    kind, tiles = (BestGeometry, BEST_TILES) if for_best else (Geometry, TILES)
    found = [_with_tile(kind, x, size, groups, rows, item, multiprocessors) for x in tiles[item]]
    fitting = [g for g in found if g.shared_memory(size, item) <= shared_memory]
    return min(
        fitting,
        key=lambda g: cycles(g, size, groups, rows, item, multiprocessors),
        default=None,
    )


def kernel_seconds(
    size: int, groups: int, rows: int, item: int, multiprocessors: int, shared_memory: int
) -> float:
    """Return what a step takes by a kernel, roughly; see `choose`."""
    sizes = (size, groups, rows, item, multiprocessors)
    geometry = choose(*sizes, shared_memory)
    assert geometry is not None, "chains that fit no block have no kernels"
    if isinstance(geometry, SmallGeometry):
        warps = ceil_div(groups * rows * geometry.lanes, 32)
        return max(SMALL_STEP, warps * SMALL_CYCLES / multiprocessors / CLOCK)
    return cycles(geometry, *sizes) / CLOCK + (LAUNCH if geometry.slices > 1 else 0)


def array_seconds(size: int, groups: int, rows: int, item: int, multiprocessors: int) -> float:
    """Return what a step takes by array operations, a matrix multiply among them, roughly."""
    multiplying = max(rows, GEMM_ROWS) / (FMA[item] * multiprocessors)
    return groups * size**2 * max(multiplying, item / MEMORY_BYTES) / CLOCK + ARRAY_STEP


def _with_tile(
    kind: type[Geometry],
    tile: tuple[int, int],
    size: int,
    groups: int,
    rows: int,
    item: int,
    multiprocessors: int,
) -> Geometry:
    n, columns = tile
    tiles = ceil_div(size, 32 * columns)
    slices = 1
    if size >= SLICED_FROM and kind is Geometry:
        slices = max(1, min(tiles, multiprocessors // (groups * ceil_div(rows, n))))
    column_warps = min(ceil_div(tiles, slices), MAX_WARPS)
    packs = ceil_div(size, PACK[item])
    # Warps beyond one for two packs, or for two rows, would have nothing to do.
    limit = max(1, min(MAX_WARPS // column_warps, max(packs // 2, n // 2)))
    parts = min(range(1, limit + 1), key=lambda p: (ceil_div(packs, p), p))
    return kind(n, columns, column_warps, max(parts, min(limit, n // 2)), slices)


def cycles(
    geometry: Geometry, size: int, groups: int, rows: int, item: int, multiprocessors: int
) -> float:
    """Return the clock cycles of one step, roughly.

    What limits the product is multiplying, reading the matrix into one multiprocessor, or reading
    it into all of them: more rows a block mean fewer blocks that read it.
    """
    blocks = groups * ceil_div(rows, geometry.rows) * geometry.slices
    columns = geometry.columns_of(size)
    warps = geometry.threads // 32
    # Warps that lie side by side take turns if there are more tiles than warps.
    turns = ceil_div(columns // (32 * geometry.columns), geometry.column_warps)
    terms = ceil_div(ceil_div(size, PACK[item]), geometry.parts) * PACK[item]
    at_once = min(blocks, multiprocessors)
    read = min(columns, size) * size * item
    product = max(
        # A warp by itself does not fill the multipliers of its multiprocessor.
        max(warps, 4) * geometry.rows * turns * 32 * geometry.columns * terms / FMA[item],
        read / L2_BYTES,
        at_once * read / L2_BYTES_IN_ALL,
    )
    rows_each = ceil_div(geometry.rows, warps)
    other = STEP + PER_ENTRY * rows_each * min(columns, size)
    return ceil_div(blocks, multiprocessors) * (product + other)
