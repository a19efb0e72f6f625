"""How many of the largest entries it takes to find the largest sums; see `best_candidates`.

The matrix's columns are sorted, and a few states tell how far down the columns, and then the
states, one has to go. Costs decide between the two, and whether all sums cost less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

# Rough costs in nanoseconds, of an element, of a state besides, and of the calls of NumPy: of a sum
# and its comparison, in rows and in long rows, of a rank of columns, of an own rank, and of a look
# at which states are done.
_DENSE, _DENSE_LONG, _LONG, _DENSE_CALLS = 0.65, 0.3, 3_000, 300
_COLUMN, _COLUMN_CALLS = 0.57, 4_000
_OWN, _OWN_STATE, _OWN_CALLS = 0.72, 25, 9_000
_DROP, _DROP_STATE, _DROP_CALLS = 0.7, 80, 18_000
# What comes once, in any case and with own ranks, and to put an element of a matrix in order.
_ONCE_CALLS, _ONCE_OWN, SORT = 40_000, 3.0, 30
# Of the cost of all sums, what ranks have to stay below.
_PAYS = 0.8
# Steps from one look at some states to the next, and how many states that are at the most.
_LOOK_AGAIN, _SAMPLE = 16, 8
# Steps without ranks, at the most, where states needed more than the sample told.
_LONGEST_REST = 1 << 10


class SortedColumns:
    """A matrix [K, K] with the largest entries of each column in order.

    Attributes
    ----------
    logs : numpy.ndarray [K, K]
    order, values : numpy.ndarray [n, K]
        Rows and values of the n largest entries, the largest first.
    depth : int
        The largest number of entries above -inf in a column, if smaller than n, else n - 1.
    is_usable : bool
        False with +inf or NaN.
    """

    def __init__(self, logs: np.ndarray) -> None:
        size = len(logs)
        self.logs = np.ascontiguousarray(logs)
        self.is_usable = bool(np.max(logs) < math.inf)
        # A copy: the order of all would stay in memory.
        self.order = np.argsort(-logs, axis=0)[: size // 2 + 1].copy()
        self.values = np.take_along_axis(self.logs, self.order, axis=0)
        self.depth = int(np.max(np.count_nonzero(self.values[:-1] > -math.inf, axis=0)))

    def ladder(self) -> list[int]:
        """Return numbers of column ranks to choose from."""
        steps = {0, self.depth}
        n = 1
        while n < self.depth:
            steps.add(n)
            n *= 2
        return sorted(steps)


def thresholds(
    best: np.ndarray, rest: np.ndarray, axis: int, out: np.ndarray | None = None
) -> np.ndarray:
    """Return for each state the largest entry that cannot improve anything.

    Parameters
    ----------
    best : numpy.ndarray
        The largest sums so far, their entries along `axis`.
    rest : numpy.ndarray
        For each of them the largest entry of the matrix's column that is left, broadcastable.
    out : numpy.ndarray, optional
        Room for differences.

    Notes
    -----
    A difference is rounded to t from no less than the number below t. An entry up to that one,
    plus `rest`, is in exact numbers not above `best`, and so not once it is rounded.
    """
    out = np.subtract(best, rest, out=out)
    dead = rest == -math.inf
    if np.any(dead):
        # Columns of which nothing is left ask for nothing; -inf less -inf is NaN.
        np.copyto(out, math.inf, where=dead)
    return np.asarray(np.nextafter(np.min(out, axis=axis), out.dtype.type(-math.inf)))


@dataclass(slots=True)
class Ranks:
    """How many ranks the states of a chain take, found from some of them from time to time.

    Attributes
    ----------
    columns : int
        Ranks of columns to begin with; -1 where all sums cost less.
    own : float
        The number of own ranks expected.
    steps_left : int
        Until the next look.
    """

    columns: int = -1
    own: float = 0.0
    steps_left: int = 0
    looks: int = 0
    rest: int = _LOOK_AGAIN

    def is_due(self) -> bool:
        """Count a step, and tell whether to look at some states again."""
        self.steps_left -= 1
        return self.steps_left < 0

    def look(self, matrix: SortedColumns, states: np.ndarray, groups: int, extra: float) -> None:
        """Choose the number of ranks by some of the states.

        Parameters
        ----------
        matrix : SortedColumns
        states : numpy.ndarray [K, n]
        groups : int
            How many matrices and states like these take part in an operation on all sums.
        extra : float
            Costs of ranks that there are anyhow.
        """
        self.looks += 1
        self.columns, self.own = -1, 0.0
        if matrix.is_usable:
            self._choose(matrix, states, groups, extra)
        # The first states are often unlike those that follow.
        self.steps_left = min(_LOOK_AGAIN, 4 ** (self.looks - 1)) - 1
        if self.columns < 0 and self.looks > 2:
            self._pause()

    def _choose(self, matrix: SortedColumns, states: np.ndarray, groups: int, extra: float) -> None:
        size, n = states.shape
        elements = n * size
        some = states[:, :: max(1, n // min(_SAMPLE, 1 + n // 16))].T.copy()
        best = np.stack([np.max(s[:, None] + matrix.logs, axis=0) for s in some])
        ladder = matrix.ladder()
        limits = thresholds(best, matrix.values[ladder][:, None], -1)
        owns = np.mean(np.count_nonzero(some > limits[..., None], axis=-1), axis=-1)
        each = _DENSE if n < _LONG else _DENSE_LONG
        lowest = _PAYS * size * (each * elements + _DENSE_CALLS / groups)
        for columns, own in zip(ladder, owns.tolist(), strict=True):
            cost = extra + _ONCE_CALLS + columns * (_COLUMN * elements + _COLUMN_CALLS)
            if own:
                looks = 1.5 + math.log1p(own)
                cost += _ONCE_OWN * elements
                cost += (1 + own) * (_OWN * elements + _OWN_STATE * n + _OWN_CALLS)
                cost += looks * (_DROP * elements + _DROP_STATE * n + _DROP_CALLS)
            if cost < lowest:
                lowest, self.columns, self.own = cost, columns, own

    def failed(self) -> None:
        """Do without ranks for a while, each time for longer."""
        if self.columns >= 0:
            self.columns = -1
            self._pause()

    def _pause(self) -> None:
        self.steps_left = self.rest
        self.rest = min(2 * self.rest, _LONGEST_REST)
