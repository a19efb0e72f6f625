"""Blocks of a matrix that hold all of its nonzero weights.

A block is a panel of columns and the rows between the first and the last nonzero weight in it. Of
a band, of left-to-right or block diagonal matrices most entries lie in no block, and cost nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from arraylogchain._arrays import on_host
from arraylogchain._context import Array, is_transposed
from arraylogchain._fold import chunks

# Rows and columns of a matrix. Blocks have disjoint columns, all of them together, and no row is
# in none: a number that is not finite then spoils some entry of a product, as it does in a whole
# matrix.
Block = tuple[slice, slice]

# Smaller matrices are multiplied whole, as are those of which blocks leave out less than 2/5.
SMALLEST = 64
_MOST = 0.6
# Columns of a panel, and what blocks of several panels may be larger than those one by one.
_PANEL = 32
_MERGED = 1.125
# Rows are told from zeros so many at a time.
_TILE = 8
# Columns, and groups, that are looked at first: they tell nearly always that blocks do not pay.
_SAMPLE = 8


def find_blocks(xp: Any, given: Array, nothing: float, width: int) -> list[Block]:
    """Return blocks of the weights above `nothing`, or none if they would not pay."""
    inner, cols = (int(n) for n in given.shape[1:])
    panel = min(_PANEL, width) // _TILE * _TILE
    if panel == 0 or _sampled_area(xp, given, nothing) > _MOST:
        return []
    if is_transposed(given):
        # What is side by side in memory is reduced together: that is several times faster.
        support = _tiles(xp, xp.matrix_transpose(given), nothing).T
        unit, per_panel = 1, panel // _TILE
    else:
        support, unit, per_panel = _tiles(xp, given, nothing), _TILE, panel
    support = np.logical_or.reduceat(support, range(0, support.shape[1], per_panel), axis=1)
    low, high = _extents(support)
    low, high = low * unit, np.clip(np.maximum(high, low + 1) * unit, None, inner)
    _cover(low, high, inner)
    blocks = _merged(
        list(zip(low.tolist(), high.tolist(), strict=True)), cols, panel, width * inner
    )
    return blocks if sum(_area(block) for block in blocks) <= _MOST * inner * cols else []


def _sampled_area(xp: Any, given: Array, nothing: float) -> float:
    """Return about which part of a matrix lies between nonzero weights of the same column."""
    groups, step = min(_SAMPLE, int(given.shape[0])), int(given.shape[2]) // _SAMPLE
    some = given[:groups, :, step // 2 :: step]
    low, high = _extents(on_host("support", xp.any(some > nothing, axis=0)))
    return float(np.mean(high - low)) / int(given.shape[1])


def _tiles(xp: Any, given: Array, nothing: float) -> np.ndarray:
    """Tell which columns of each few rows have a weight above `nothing`, in any group."""
    groups, inner, cols = given.shape
    whole = inner - inner % _TILE
    tiles = xp.reshape(given[:, :whole, :], (groups, whole // _TILE, _TILE, cols))
    tops = [xp.max(tiles, axis=(0, 2))]
    if whole < inner:
        tops.append(xp.max(given[:, whole:, :], axis=(0, 1))[None, :])
    return on_host("support", xp.concat(tops, axis=0) > nothing)


def _extents(support: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first row that is True in each column, and the one after the last; or 0, 0."""
    found = support.any(axis=0)
    high = len(support) - support[::-1].argmax(axis=0)
    return support.argmax(axis=0), np.where(found, high, 0)


def _cover(low: np.ndarray, high: np.ndarray, size: int) -> None:
    """Extend ranges of rows, in place, such that every row is in one."""
    missing = np.ones(size + 2, dtype=bool)
    missing[[0, -1]] = False
    for start, stop in zip(low, high, strict=True):
        missing[start + 1 : stop + 1] = False
    edges = np.flatnonzero(missing[1:] != missing[:-1])
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        nearest = np.argmin(np.maximum(low - start, stop - high))
        low[nearest] = min(low[nearest], start)
        high[nearest] = max(high[nearest], stop)


def _merged(rows: list[tuple[int, int]], cols: int, panel: int, limit: int) -> list[Block]:
    """Return blocks of panels with these rows, joined where that leaves out as much as before."""
    blocks: list[Block] = []
    apart = 0  # the area of the last block's panels
    for (low, high), j in zip(rows, chunks(cols, panel), strict=True):
        own = slice(low, high), j
        if blocks:
            k, before = blocks[-1]
            both = slice(min(k.start, low), max(k.stop, high)), slice(before.start, j.stop)
            if _area(both) <= min(limit, _MERGED * (apart + _area(own))):
                blocks[-1], apart = both, apart + _area(own)
                continue
        blocks.append(own)
        apart = _area(own)
    return blocks


def _area(block: Block) -> int:
    k, j = block
    return int((k.stop - k.start) * (j.stop - j.start))
