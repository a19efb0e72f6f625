"""Max-plus products of many states with one matrix, from few of the sums, on NumPy.

Of all sums state[k] + matrix[k, j] only the largest for each j is wanted. It is nearly always
among those with one of the largest entries of the matrix's column j or of the state. So the
matrix's columns are sorted, and for each state two kinds of *ranks* are tried, as many as it takes:
those of the columns, for every state the same, and then the state's own, from its largest entry on.
What neither has reached is no larger than the next of the column plus the next of the state: where
no sum of those is larger than what is there already, that is the maximum over all k, bit for bit,
because sums are rounded monotonically.

How many ranks it takes depends on the numbers: a few states tell, every now and then.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from arraylogchain._chain.viterbi.ranks import SORT, Ranks, SortedColumns, thresholds

# Own ranks may become this many times as many as expected before all other sums are computed.
_PATIENCE = 2
# The fewest rows and states of a chain, sums of a step, and steps that ranks are tried with.
_FEWEST, _LEAST, _SHORTEST = 16, 500_000, 8


def pays(size: int, rows: int, steps: int) -> bool:
    """Tell whether to look for few sums at all."""
    return min(rows, size) >= _FEWEST and rows * size**2 >= _LEAST and steps >= _SHORTEST


class Candidates:
    """Products of states with matrices that all rows of a group share.

    Parameters
    ----------
    size, rows : int
        States are [groups, K, rows] at the most.
    dtype : numpy.dtype
    logs : numpy.ndarray [groups, K, K] or None
        The matrices; None where every step has its own.
    """

    def __init__(self, size: int, rows: int, dtype: Any, logs: np.ndarray | None) -> None:
        self.ranks = Ranks()
        self._logs = logs
        self._sorted: dict[int, SortedColumns] = {}
        # Kept from step to step: new pages of memory take longer than what is done with them.
        self._buffers = np.empty((4, rows * size), dtype)

    def multiply(self, states: np.ndarray, out: np.ndarray, logs: Callable[[], np.ndarray]) -> bool:
        """Write max_k states[g, k, n] + logs[g, k, j] to out[g, j, n].

        Parameters
        ----------
        states, out : numpy.ndarray [groups, K, n]
        logs : callable
            Returns the matrices of this step.

        Returns
        -------
        bool
            False where all sums have to be computed.
        """
        ranks, (groups, size, rows) = self.ranks, states.shape
        if rows < _FEWEST:
            return False
        is_due = ranks.is_due()
        if not is_due and ranks.columns < 0:
            return False
        of_step = logs() if self._logs is None else self._logs
        if is_due:
            group = ranks.looks % groups
            extra = 0 if self._logs is not None else SORT * size**2
            ranks.look(self._matrix(of_step, group), states[group], groups, extra)
        for g in range(groups):
            if not self._of_group(self._matrix(of_step, g), states[g], out[g]):
                ranks.failed()
                return False
        return True

    def _matrix(self, logs: np.ndarray, group: int) -> SortedColumns:
        if self._logs is None:
            return SortedColumns(logs[group])
        if group not in self._sorted:
            self._sorted[group] = SortedColumns(logs[group])
        return self._sorted[group]

    def _of_group(self, matrix: SortedColumns, states: np.ndarray, out: np.ndarray) -> bool:
        """Write the product of states [K, n]; False, and nothing, where it takes all sums."""
        ranks, top = self.ranks, np.max(states, axis=0)
        # It may have failed for another group.
        if ranks.columns < 0 or not matrix.is_usable or not np.all(top < math.inf):
            return False
        if not ranks.columns:
            out[...] = self._own_ranks(matrix, states.T, None, matrix.values[0]).T
            return True
        best, terms, copy = (_shaped(x, states.shape) for x in self._buffers[:3])
        if not states.flags.c_contiguous:
            copy[...] = states
            states = copy
        for n in range(ranks.columns):
            to = terms if n else best
            # Without "clip" NumPy fills a buffer first.
            np.take(states, matrix.order[n], axis=0, out=to, mode="clip")
            np.add(to, matrix.values[n][:, None], out=to)
            if n:
                np.maximum(best, terms, out=best)
        out[...] = best
        rest = matrix.values[ranks.columns]
        if np.max(rest) > -math.inf:
            left = np.flatnonzero(top > thresholds(best, rest[:, None], 0, out=best))
            if 2 * len(left) > len(top):
                out[...] = self._own_ranks(matrix, states.T, out.T, rest).T
            elif len(left):
                some, found = states[:, left].T, out[:, left].T
                out[:, left] = self._own_ranks(matrix, some, found, rest).T
        return True

    def _own_ranks(
        self,
        matrix: SortedColumns,
        given: np.ndarray,
        found: np.ndarray | None,
        rest: np.ndarray,
    ) -> np.ndarray:
        """Return the largest sums of states [n, K], in a buffer.

        Parameters
        ----------
        found : numpy.ndarray [n, K] or None
            The largest of some sums; the others have no larger entries of the matrix than `rest`.
        """
        lanes = _Lanes(self._buffers, given, found)
        allowed = len(given) * (_PATIENCE * self.ranks.own + 6)
        done, look = 0, 1 + int(self.ranks.own)
        while True:
            if done == look:
                look += 1 + look // 3
                if not lanes.drop(rest):
                    return lanes.result
                if allowed < 0:
                    self.ranks.failed()
                    lanes.try_all(matrix.logs)
                    return lanes.result
            lanes.try_largest(matrix.logs, first=found is None and not done)
            allowed -= len(lanes.states)
            done += 1


def _shaped(buffer: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return buffer[: math.prod(shape)].reshape(shape)


class _Lanes:
    """States [n, K] of which one entry after the other is tried, until all are done.

    Attributes
    ----------
    states : numpy.ndarray [left, K]
        Of those that are left; entries that have been tried are -inf.
    best, terms : numpy.ndarray [left, K]
    rows : numpy.ndarray [left]
        Their numbers.
    result : numpy.ndarray [n, K]
    """

    def __init__(self, buffers: np.ndarray, given: np.ndarray, found: np.ndarray | None) -> None:
        self.buffers = buffers
        # Numbers of buffers; `given` may be in the third.
        self._result, self._terms, self._spare, self._states = 0, 1, 2, 3
        self._best = self._result
        self.result, self.terms, _, self.states = (_shaped(x, given.shape) for x in buffers)
        self.best = self.result
        self.states[...] = given
        if found is not None:
            self.best[...] = found
        self.rows = self._lines = np.arange(len(given))

    def try_largest(self, logs: np.ndarray, first: bool) -> None:
        """Bring the sums with the largest entry of each state into `best`, or start with them."""
        to = self.best if first else self.terms
        own = np.argmax(self.states, axis=1)
        lines = self._lines[: len(own)]
        top = self.states[lines, own]
        self.states[lines, own] = -math.inf
        np.take(logs, own, axis=0, out=to, mode="clip")
        np.add(to, top[:, None], out=to)
        if not first:
            np.maximum(self.best, self.terms, out=self.best)

    def drop(self, rest: np.ndarray) -> bool:
        """Finish states that no other entry can improve; tell whether any are left."""
        limits = thresholds(self.best, rest, 1, out=self.terms)
        left = np.flatnonzero(np.max(self.states, axis=1) > limits)
        if 4 * len(left) > 3 * len(limits):
            return True
        self._finish()
        if len(left):
            self._keep(left)
        return bool(len(left))

    def try_all(self, logs: np.ndarray) -> None:
        """Finish with all sums."""
        for k, row in enumerate(logs):
            np.add(self.states[:, k, None], row, out=self.terms)
            np.maximum(self.best, self.terms, out=self.best)
        self._finish()

    def _finish(self) -> None:
        if self._best != self._result:
            self.result[self.rows] = self.best

    def _keep(self, left: np.ndarray) -> None:
        """Go on with some of the states, in the buffers that are free."""
        shape = (len(left), self.states.shape[1])
        states, best = self._terms, self._states
        terms = self._spare if self._best == self._result else self._best
        into = _shaped(self.buffers[states], shape)
        self.states = np.take(self.states, left, axis=0, out=into, mode="clip")
        into = _shaped(self.buffers[best], shape)
        self.best = np.take(self.best, left, axis=0, out=into, mode="clip")
        self.terms = _shaped(self.buffers[terms], shape)
        self.rows = self.rows[left]
        self._states, self._best, self._terms = states, best, terms
