"""How a chain is cut into tiles and blocks of steps that fit a workspace, from sizes alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from arraylogchain._fold import chunks
from arraylogchain._inputs.chain import Chain

# Elements of potentials that are worth an array operation, and still profit from a CPU's caches.
_CACHED = 1 << 17
_MOST_TOGETHER = 32
# Bytes of the objects that hold one step of a history.
_OBJECTS = 2000


@dataclass(frozen=True, slots=True)
class Pieces:
    """Sizes of the pieces of a sweep.

    Attributes
    ----------
    groups, rows : int
        Of a tile.
    block : int
        Steps whose states are in memory at a time, where a history is wanted.
    together : int
        Steps whose potentials are exponentiated together.
    panel : int
        Elements of a step's matrices that may be copied at a time.
    workspace : int
        Bytes for products in logs.
    """

    groups: int
    rows: int
    block: int
    together: int
    panel: int
    workspace: int

    def columns(self, groups: int, size: int) -> Iterator[slice]:
        """Yield the columns of matrices [groups, size, size] that may be copied at a time."""
        return chunks(size, max(1, self.panel // (groups * size)))


def cut_chain(chain: Chain, workspace: int, history: int = 0) -> Pieces:
    """Choose tiles.

    All sizes but those of a history are counted in float64, which rows may be taken up again in.

    Parameters
    ----------
    history : int
        Where all states of a tile are wanted, from the last to the first, the bytes of a number:
        they fit in the workspace, every one of them or, if tiles would get too small for that, one
        in about sqrt(T). 0 where they are not, or not within the workspace.
    """
    (groups, rows), size, count = chain.sizes, max(chain.num_states, 1), chain.num_steps
    own = history * size + 32  # of a state: values, exponent, offset
    every = groups * rows * count * own + count * _OBJECTS
    states = min(5 * workspace // 8, every) if history else 0
    budget = (workspace - states) // 2
    # A row of a tile: states before and after, products, masks, what the log form takes; each step
    # of potentials: as given, shifted, exponentiated.
    row, step = 8 * size * 20, 8 * size * 8
    panel = max(size, (workspace - states) // 6 // (8 * 6))
    most = max(1, min(groups * rows, budget // (row + step)))
    block = count
    if states:
        fitting = (states // count - _OBJECTS) // own
        if fitting < min(most, _CACHED // 4 // size + 1):
            block = math.isqrt(count) + 1
            fitting = (states // (count // block + 1 + block) - _OBJECTS) // own
        most = max(1, min(most, fitting))
    tile_rows = min(rows, most)
    tile_groups = 1
    if tile_rows == rows:
        tile_groups = max(1, min(groups, most // max(rows, 1), panel // (size * size)))
    lanes = tile_groups * tile_rows
    left = max(0, budget // lanes - row)
    together = min(count, _MOST_TOGETHER, max(1, _CACHED // (lanes * size)), 1 + left // step // 2)
    return Pieces(tile_groups, tile_rows, block, together, panel, workspace // 4)
