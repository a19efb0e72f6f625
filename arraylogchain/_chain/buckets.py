"""Chains of different lengths, sorted into buckets that are computed together.

A bucket costs as many steps as its longest chain has, so that few buckets compute much that is
thrown away, and many take many small steps. The best compromise is found from the lengths alone.
"""

from __future__ import annotations

import numpy as np

from arraylogchain.plan import state_seconds

# Seconds of a step's array operations on little data, those of chains that are held among them.
_STEP = 1e-4

# Candidates for the ends of buckets.
_CANDIDATES = 128


def buckets(lengths: np.ndarray, each: int, size: int) -> list[np.ndarray]:
    """Sort units into buckets that together cost least.

    Parameters
    ----------
    lengths : numpy.ndarray [units]
        Of the longest chain of each unit.
    each : int
        Chains of a unit.
    size : int
        Number of states, K.

    Returns
    -------
    list of numpy.ndarray
        The units of each bucket, in ascending order.

    Examples
    --------
    >>> [units.tolist() for units in buckets(np.array([5, 1000, 6, 1000]), 100, 50)]
    [[0, 2], [1, 3]]
    """
    distinct = np.unique(lengths)
    ends = distinct[np.linspace(0, len(distinct) - 1, _CANDIDATES).astype(int)]
    ends = distinct if len(distinct) <= _CANDIDATES else np.unique(ends)
    # How many units are no longer than each end.
    below = np.searchsorted(np.sort(lengths), ends, side="right")
    chain = each * state_seconds(size)
    # least[j]: the cost of all units up to ends[j], the last bucket of them starting after
    # ends[cut[j] - 1].
    least, cut = np.zeros(len(ends)), np.zeros(len(ends), dtype=int)
    for j, end in enumerate(ends):
        before = np.concatenate([[0.0], least[:j]])
        units = below[j] - np.concatenate([[0], below[:j]])
        costs = before + end * (_STEP + units * chain)
        cut[j] = np.argmin(costs)
        least[j] = costs[cut[j]]
    found, j = [], len(ends) - 1
    while j >= 0:
        low = 0 if cut[j] == 0 else ends[cut[j] - 1]
        found.append(np.flatnonzero((lengths > low) & (lengths <= ends[j])))
        j = int(cut[j]) - 1
    return found[::-1]
