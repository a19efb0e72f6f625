"""Runs of the loops over a chain: in tiles of rows and blocks of steps, within a workspace.

A tile of rows goes through all steps before the next one does; tiles are shared out over threads.
Blocks are short enough for Python to notice an interruption between two of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from arraylogchain._compiled.chains.layout import layout_of
from arraylogchain._compiled.chains.sources import Matrices, Rows, frozen, ones
from arraylogchain._compiled.loops import recursion
from arraylogchain._compiled.loops.compiling import Floats
from arraylogchain._compiled.loops.recursion import FINAL, INITIAL, MATRICES, POTENTIALS
from arraylogchain._compiled.loops.steps import SCALE
from arraylogchain._inputs.chain import Chain
from arraylogchain._threads import num_workers, share

# The work of one call of a loop, in products of a weight and an entry: some milliseconds as a rule,
# and tenths of a second at worst.
_WORK = 1 << 22
# What a step costs beside its products, for each state and in all.
_STATE_WORK, _STEP_WORK = 16, 64

# Rows to share matrices that are prepared for each block.
_ROWS_OF_A_BLOCK = 192

# Tiles that share the workspace.
TILES = 16

State = tuple[Floats, Floats, Floats]
_NO_ROWS = np.empty((0, 0, 0))


@dataclass(slots=True)
class History:
    """States [rows, steps, K] of the steps from `begin` on; exponents only if some are wide."""

    m: Floats
    e: Floats
    wide: Any
    begin: int

    @classmethod
    def empty(cls, rows: range, steps: range, K: int) -> History:
        shape = (len(rows), len(steps), K)
        return cls(np.empty(shape), _NO_ROWS, np.zeros(shape[:2], np.uint8), steps.start)

    def make_wide(self) -> None:
        self.e = np.empty(self.m.shape)

    @property
    def arrays(self) -> tuple[Floats, Floats, Any, int]:
        return self.m, self.e, self.wide, self.begin


_NO_HISTORY = (_NO_ROWS, _NO_ROWS, np.empty((0, 0), np.uint8), 0)
_NO_MESSAGES = (_NO_ROWS, 0, 0)
_NO_TOTALS = np.empty(0)


class Sweep:
    """A chain, its arrays, and how it is cut.

    Parameters
    ----------
    chain : Chain
        It has states, and rows.
    workspace : int
    forward, backward : str or None
        In which form matrices are wanted; see `Matrices`.
    more : int
        Numbers that a caller makes of each entry of the matrices.
    """

    def __init__(
        self,
        chain: Chain,
        workspace: int,
        forward: str | None = "weights",
        backward: str | None = None,
        more: int = 0,
    ) -> None:
        self.chain = chain
        self.layout = layout = layout_of(chain)
        self.T, self.K = T, K = chain.num_steps, chain.num_states
        # A half for what belongs to tiles, less than that for copies of arrays as a whole.
        self.budget = workspace // 2
        self.potentials = Rows(chain.potentials, layout, POTENTIALS, workspace // 8)
        self.initial = self._ends(chain.initial, INITIAL, workspace // 32)
        self.final = self._ends(chain.final, FINAL, workspace // 32)
        part = workspace // 4 if forward is None or backward is None else workspace // 8
        given = (chain.transitions, chain.transitions_in_logs, layout, K, T, part)
        self.matrices: dict[bool, Matrices] = {}
        for is_backward, form in ((False, forward), (True, backward)):
            if form is not None:
                self.matrices[is_backward] = Matrices(*given, form, more)
        lengths = np.array([T]) if chain.lengths is None else chain.lengths
        self.lengths = np.ascontiguousarray(lengths, np.int64).reshape(-1)
        self.lengths = frozen(self.lengths)
        self.maps = layout.maps.copy()
        self.step_work = K * K + _STATE_WORK * K + _STEP_WORK

    def _ends(self, array: Any, kind: int, budget: int) -> Rows:
        if array is None:
            return ones(self.K)
        return Rows(array[..., None, :], self.layout, kind, budget)

    def share(self, work: Callable[[range], None], row_bytes: int = 0) -> None:
        """Run work on tiles of rows, each of which takes so many bytes beside a block's."""
        tile, workers = self.tile(row_bytes)
        rows = self.layout.num_rows
        share(lambda start, stop: work(range(start, stop)), rows, tile, workers)

    def tile(self, row_bytes: int) -> tuple[int, int]:
        """Return how many rows go together, and how many threads may have a tile at a time.

        How rows are cut does not depend on the number of threads.
        """
        row_bytes += 16 * self.K + 8 * SCALE + 64
        together = max(1, _WORK // (self.T * self.step_work))
        least = 1
        if any(each.whole is None and not each.is_one for each in self.matrices.values()):
            # Many rows of a group share what it takes to prepare the matrices of a block.
            least = min(_ROWS_OF_A_BLOCK, self.layout.rows_per_group)
        together = min(self.layout.num_rows, max(together, least))
        budget = min(self.budget, max(self.budget // TILES, least * row_bytes))
        rows = min(together, max(1, budget // row_bytes))
        return rows, max(1, min(num_workers(), self.budget // budget))

    def windows(self, rows: range, step_bytes: int) -> list[range]:
        """Cut all steps into windows: one can be kept, beside the states that all begin with.

        Each step of a row takes so many bytes.
        """
        T, fitting = self.T, self.budget // (step_bytes * len(rows))
        length = T if fitting >= T else max(math.isqrt(T) + 1, fitting // 2)
        return [range(start, min(start + length, T)) for start in range(0, T, length)]

    def blocks(self, rows: range, steps: range, step_bytes: int = 0) -> Iterator[range]:
        """Cut steps into blocks, each step of a row taking so many bytes beside its potentials."""
        by_work = _WORK // (len(rows) * self.step_work)
        needed = len(rows) * (self.potentials.step_bytes + step_bytes)
        for matrices in self.matrices.values():
            if matrices.whole is None and not matrices.is_one:
                needed += len(self.groups(rows)) * matrices.matrix_bytes
        tiles = min(TILES, -(-self.layout.num_rows // len(rows)))
        length = max(1, min(by_work, self.budget // 4 // tiles // max(1, needed)))
        for start in range(steps.start, steps.stop, length):
            yield range(start, min(start + length, steps.stop))

    def groups(self, rows: range) -> range:
        """Return the groups of rows."""
        if all(matrices.groups == 1 for matrices in self.matrices.values()):
            return range(1)
        each = self.layout.rows_per_group
        return range(rows.start // each, -(-rows.stop // each))

    def moves(self, steps: range, backward: bool) -> range:
        """Return the transitions of a block of steps: at least one, which may be of no use."""
        last = max(self.T - 2, 0)
        if backward:
            return range(min(steps.start, last), min(steps.stop, last + 1))
        first = min(max(steps.start - 1, 0), last)
        return range(first, min(max(steps.stop - 1, first + 1), last + 1))

    def read(
        self, rows: range, steps: range, backward: bool = False, with_potentials: bool = True
    ) -> tuple[Any, ...]:
        """Return rows, potentials, matrices and ends as loops take them, of a block of steps.

        Backward, potentials are those of one step more, and matrices are transposed.
        """
        maps, moves = self.maps.copy(), self.moves(steps, backward)
        weighed = range(steps.start, min(steps.stop + 1, self.T)) if backward else steps
        potentials = self.potentials.read(rows, weighed, maps) if with_potentials else None
        found = self.matrices[backward].read(self.groups(rows), moves, maps, MATRICES)
        initial, _ = self.initial.read(rows, range(1), maps)
        final, _ = self.final.read(rows, range(1), maps)
        chain = self.chain
        ends = (initial[:, 0], chain.initial_in_logs, final[:, 0], chain.final_in_logs)
        place = (rows.start, len(rows), self.layout.dims, maps, self.lengths)
        return place, potentials, found, ends

    def state(self, rows: range) -> State:
        n = len(rows)
        return np.empty((n, self.K)), np.empty((n, self.K)), np.zeros((n, SCALE))

    def forward(
        self,
        rows: range,
        steps: range,
        state: State,
        *,
        history: History | None = None,
        messages: Any = _NO_MESSAGES,
        totals: Floats = _NO_TOTALS,
    ) -> bool:
        """Take a tile through some steps; return whether a wide state could not be kept."""
        kept = _NO_HISTORY if history is None else history.arrays
        lacks = False
        for block in self.blocks(rows, steps):
            arrays, span = self.read(rows, block), (block.start, block.stop)
            lacks |= recursion.forward(*arrays, *span, state, kept, messages, totals)
        return lacks

    def backward(self, rows: range, steps: range, state: State, messages: Any) -> None:
        """Take a tile back through some steps."""
        for block in reversed(list(self.blocks(rows, steps))):
            arrays, span = self.read(rows, block, backward=True), (block.start, block.stop)
            recursion.backward(*arrays, *span, state, messages)
