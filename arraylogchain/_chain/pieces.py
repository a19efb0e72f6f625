"""How a recursion over time is cut into pieces that fit its workspace, from sizes alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

# Elements of potentials that are worth an array operation, and still profit from a CPU's caches.
_CACHED = 1 << 17
_LONGEST_BLOCK = 32


@dataclass(frozen=True, slots=True)
class RecursionPlan:
    """Sizes of the pieces of a recursion.

    Attributes
    ----------
    groups, rows : int
        Of a tile.
    block : int
        Steps between which rows may change from one form of the state to another.
    together : int
        Steps whose potentials are exponentiated together.
    panel : int
        Elements of a step's matrices that may be copied at a time.
    workspace : int
        Bytes for all temporaries.
    """

    groups: int
    rows: int
    block: int
    together: int
    panel: int
    workspace: int


def plan_recursion(
    groups: int, rows: int, size: int, count: int, workspace: int, history: bool
) -> RecursionPlan:
    """Choose tiles for groups * rows chains of `count` states of `size` entries.

    All sizes are counted in float64, because that is what rows may be taken up again in.
    """
    # A row of a tile: states before and after, masks, products and factors of the log form; each
    # step of potentials: as given, shifted, exponentiated; each state of a history: as it is,
    # joined with those of other rows, its logarithms.
    state = 8 * size * 16
    step = 8 * size * 8
    kept = 8 * size * 6 if history else 0
    # Matrices: a panel as loaded, shifted, exponentiated, masks; what the log form makes of it.
    panel = max(size, workspace // 6 // (8 * 6))
    budget = workspace // 2
    row = state + step + kept
    tile_rows = max(1, min(rows, budget // row))
    tile_groups = 1
    if tile_rows == rows:
        tile_groups = max(1, min(groups, budget // (rows * row), panel // (size * size)))
    lanes = tile_groups * tile_rows
    left = max(0, budget // lanes - row)
    block = min(count, _LONGEST_BLOCK, 1 + left // kept // 2 if kept else count)
    together = min(block, max(1, _CACHED // (lanes * size)), 1 + left // step // 2)
    return RecursionPlan(tile_groups, tile_rows, block, together, panel, workspace)


def plan_posterior(
    groups: int, rows: int, size: int, count: int, workspace: int, keep: bool
) -> RecursionPlan:
    """Choose tiles for forward and backward passes.

    Parameters
    ----------
    keep : bool
        Whether states are kept besides the workspace. Else they have to fit in it, every one of
        them, or if tiles would get too small for that, one in about sqrt(count).

    Returns
    -------
    RecursionPlan
        Its block is the number of steps whose states are in memory at a time.
    """
    if keep:
        plan = plan_recursion(groups, rows, size, count, workspace, history=False)
        return replace(plan, block=count)
    plan = plan_recursion(groups, rows, size, count, 3 * workspace // 8, history=False)
    # A row's state: values, exponent, offset, shift and power. The objects of a step count as well.
    state, objects, budget = 8 * size + 64, 2000, 5 * workspace // 8
    block, lanes = count, (budget // count - objects) // state
    if lanes < min(groups * rows, _CACHED // 4 // size + 1):
        block = math.isqrt(count) + 1
        lanes = max(1, (budget // (count // block + 1 + block) - objects) // state)
    tile_rows = min(plan.rows, lanes)
    tile_groups = min(plan.groups, max(1, lanes // rows)) if tile_rows == rows else 1
    return replace(plan, rows=tile_rows, groups=tile_groups, block=block)
