"""Runs of the loops over a chain: in tiles of rows and blocks of steps, within a workspace.

A tile of rows goes through all steps before the next one does; tiles are shared out over threads.
Blocks are short enough for Python to notice an interruption between two of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from arraylogchain import plan
from arraylogchain._compiled.chains import packs
from arraylogchain._compiled.chains.layout import layout_of
from arraylogchain._compiled.chains.sources import Matrices, Rows, frozen, ones
from arraylogchain._compiled.loops import recursion
from arraylogchain._compiled.loops.compiling import Floats, Integers
from arraylogchain._compiled.loops.numbers import LANES
from arraylogchain._compiled.loops.recursion import FINAL, INITIAL, POTENTIALS
from arraylogchain._compiled.loops.steps import ROWS, SCALE
from arraylogchain._inputs.chain import Chain
from arraylogchain._threads import share, workers_here

# The work of one call of a loop, in products of a weight and an entry: some milliseconds as a rule,
# and tenths of a second at worst.
_WORK = 1 << 22
# What a step costs beside its products, for each state and in all.
_STATE_WORK, _STEP_WORK = 16, 64

# Rows to share matrices that are prepared for each block.
_ROWS_OF_A_BLOCK = 192

# Tiles that share the workspace.
_TILES = 16

# Potentials whose exponentials are taken together.
_AHEAD = 256

NO_STATES = np.empty((0, 0, 0))
_NO_HISTORY = (NO_STATES, NO_STATES, np.empty((0, 0), np.uint8), 0)
NO_MESSAGES = (NO_STATES, 0)
_NO_TOTALS = np.empty(0)


@lru_cache(maxsize=16)
def _same_lengths(T: int) -> Integers:
    """Return the number of steps of all rows."""
    return frozen(np.array([T]))  # type: ignore[no-any-return]


@lru_cache(maxsize=256)
def _tile(most: int, row_bytes: int, least: int, budget: int) -> tuple[int, int]:
    """Return how many rows go together, if they fit a budget, and how many tiles fit it."""
    # Room for a tile on each of four threads, if a row leaves that.
    own = max(budget // _TILES, min(least * row_bytes, budget // 4), row_bytes)
    own = min(budget, own)
    return min(most, max(1, own // row_bytes)), budget // own


def _cut(steps: range, length: int) -> list[range]:
    """Cut steps into ranges of a length, the last one shorter."""
    return [steps[start : start + length] for start in range(0, len(steps), length)]


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
    in_packs : bool
        Whether a caller takes rows in packs where that serves; see `packs`.
    """

    def __init__(
        self,
        chain: Chain,
        workspace: int,
        forward: str | None = "weights",
        backward: str | None = None,
        more: int = 0,
        in_packs: bool = False,
    ) -> None:
        self.chain = chain
        self.layout = layout = layout_of(chain)
        self.T, self.K = T, K = chain.num_steps, chain.num_states
        # A half for what belongs to tiles, less than that for copies of arrays as a whole.
        self.budget = workspace // 2
        self.potentials = Rows(chain.potentials, layout, POTENTIALS, workspace // 8)
        self.initial = self._ends(chain.initial, INITIAL, workspace // 32)
        self.final = self._ends(chain.final, FINAL, workspace // 32)
        part = workspace // 8 if forward and backward else workspace // 4
        self.matrices = {
            is_backward: Matrices(chain, layout, part, form, more)
            for is_backward, form in enumerate((forward, backward))
            if form is not None
        }
        # What is read, and prepared, a block at a time.
        self.in_parts = [m for m in self.matrices.values() if m.whole is None and not m.is_one]
        lengths = chain.lengths
        self.lengths = _same_lengths(T) if lengths is None else frozen(lengths.reshape(-1))
        self.step_work = K * K + _STATE_WORK * K + _STEP_WORK
        is_whole = all(each.whole is not None for each in self.matrices.values())
        serve = is_whole and plan.packs_serve(layout.rows_per_group, T, K, workspace)
        self.in_packs = in_packs and serve

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
        # Many rows of a group share what it takes to prepare the matrices of a block.
        least = min(_ROWS_OF_A_BLOCK, self.layout.rows_per_group) if self.in_parts else 1
        if self.in_packs:
            least, row_bytes = LANES, row_bytes + self.T * self.potentials.step_bytes
        most = min(self.layout.num_rows, max(_WORK // (self.T * self.step_work), least))
        rows, threads = _tile(most, row_bytes, least, self.budget)
        if self.in_packs and rows > LANES:
            rows -= rows % LANES
        return rows, min(workers_here(), threads)

    def window(self, rows: range, step_bytes: int) -> int:
        """Return how many steps can be kept, beside the states that as many others begin with.

        Each step of a row takes so many bytes.
        """
        fitting = self.budget // (step_bytes * len(rows))
        return self.T if fitting >= self.T else max(math.isqrt(self.T) + 1, fitting // 2)

    def windows(
        self, length: int, state: Floats, keep: Callable[[range, Floats], None]
    ) -> Iterator[range]:
        """Return windows of steps, the last one first, each of which is kept when it is met.

        `keep` takes a state through a window, and keeps what is to be known of its steps.
        """
        starts = []
        for window in (windows := _cut(range(self.T), length))[:-1]:
            starts.append((window, state.copy()))
            keep(window, state)
        keep(windows[-1], state)

        def again() -> Iterator[range]:
            yield windows[-1]
            for window, start in reversed(starts):
                keep(window, start)
                yield window

        return again()

    def blocks(self, rows: range, steps: range, step_bytes: int = 0) -> list[range]:
        """Cut steps into blocks, each step of a row taking so many bytes beside its potentials."""
        length = _WORK // (len(rows) * self.step_work)
        needed = len(rows) * (self.potentials.step_bytes + step_bytes)
        for matrices in self.in_parts:
            needed += len(self.groups(rows)) * matrices.matrix_bytes
        if needed:
            tiles = min(_TILES, -(-self.layout.num_rows // len(rows)))
            length = min(length, self.budget // 4 // tiles // needed)
        return _cut(steps, max(1, length))

    def groups(self, rows: range) -> range:
        """Return the groups of rows."""
        each = self.layout.rows_per_group
        return range(rows.start // each, -(-rows.stop // each))

    def moves(self, steps: range, backward: bool) -> range:
        """Return the transitions of a block of steps: at least one, which may be of no use."""
        last = max(self.T - 2, 0)
        if backward:
            return range(min(steps.start, last), min(steps.stop, last + 1))
        first = min(max(steps.start - 1, 0), last)
        return range(first, min(max(steps.stop - 1, first + 1), last + 1))

    def read(self, rows: range, steps: range, backward: bool = False) -> tuple[Any, ...]:
        """Return what loops read of a block of steps; see `loops.recursion`.

        Backward, potentials are those of one step more, and matrices those that lead on from steps.
        """
        maps, form = self.layout.maps.copy(), self.matrices.get(backward) or self.matrices[False]
        matrices = form.whole or form.read(self.groups(rows), self.moves(steps, backward), maps)
        potentials = self.potentials.whole or self.potentials.read(
            rows, range(steps.start, min(steps.stop + backward, self.T)), maps
        )
        initial, _ = self.initial.whole or self.initial.read(rows, range(1), maps)
        final, _ = self.final.whole or self.final.read(rows, range(1), maps)
        ends = (initial, self.chain.initial_in_logs, final, self.chain.final_in_logs)
        place = (rows.start, len(rows), self.layout.dims, maps, self.lengths)
        ahead = max(1, _AHEAD // self.K)
        scratch = np.empty((ROWS + self.K, self.K))
        room = (scratch, np.empty(ahead * self.K), np.empty(ahead), frozen(scratch[ROWS:]))
        return place, potentials, matrices, ends, (steps.start, steps.stop), room

    def state(self, rows: range) -> Floats:
        return np.empty((len(rows), 2 * self.K + SCALE))

    def take_packs(self, rows: range) -> tuple[Floats, list[range]]:
        """Return the totals of a tile, and which of its rows packs have not served."""
        if not self.in_packs:
            return np.empty(len(rows)), [rows]
        return packs.take_packs(self.read(rows, range(self.T)))

    def log_totals(self, rows: range) -> Floats:
        """Return the totals of a tile."""
        totals, left = self.take_packs(rows)
        for part in left:
            of_part = totals[part.start - rows.start : part.stop - rows.start]
            self.forward(part, range(self.T), self.state(part), totals=of_part)
        return totals

    def forward(
        self,
        rows: range,
        steps: range,
        states: Floats,
        *,
        history: Any = _NO_HISTORY,
        messages: Any = NO_MESSAGES,
        totals: Floats = _NO_TOTALS,
    ) -> bool:
        """Take a tile through some steps; return whether a wide state could not be kept."""
        for steps_of_block in self.blocks(rows, steps):
            block = self.read(rows, steps_of_block)
            if recursion.forward(block, states, history, messages, totals):
                return True
        return False
