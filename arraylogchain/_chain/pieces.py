"""How a recursion over time is cut into pieces that fit its workspace, from sizes alone."""

from __future__ import annotations

from dataclasses import dataclass

# Elements of a block of potentials that profit from a CPU's caches.
_CACHED = 1 << 19
_LONGEST_BLOCK = 64


@dataclass(frozen=True, slots=True)
class RecursionPlan:
    """Sizes of the pieces of a recursion.

    Attributes
    ----------
    groups, rows : int
        Of a tile.
    block : int
        Steps whose potentials are exponentiated together, and between which rows may change from
        one form of the state to another.
    panel : int
        Elements of a step's matrices that may be copied at a time.
    workspace : int
        Bytes for all temporaries.
    """

    groups: int
    rows: int
    block: int
    panel: int
    workspace: int


def plan_recursion(
    groups: int, rows: int, size: int, count: int, workspace: int, history: bool
) -> RecursionPlan:
    """Choose tiles for groups * rows chains of `count` states of `size` entries.

    All sizes are counted in float64, because that is what rows may be taken up again in.
    """
    # A row of a tile: states before and after, masks, products and factors of the log form; each
    # step of a block: potentials as given, shifted, exponentiated; twice where forms differ.
    state = 8 * size * 16
    step = 8 * size * (8 + 6 * history)
    # Matrices: a panel as loaded, shifted, exponentiated, masks; what the log form makes of it.
    panel = max(size, workspace // 6 // (8 * 6))
    budget = workspace // 2
    tile_rows = max(1, min(rows, budget // (state + step)))
    tile_groups = 1
    if tile_rows == rows:
        tile_groups = max(
            1,
            min(groups, budget // (rows * (state + step)), max(1, panel // (size * size))),
        )
    lanes = tile_groups * tile_rows
    block = min(
        count,
        _LONGEST_BLOCK,
        max(1, _CACHED // (lanes * size)),
        max(1, (budget // lanes - state) // step),
    )
    return RecursionPlan(tile_groups, tile_rows, block, panel, workspace)
