"""Rows that are taken in packs, as lanes of vector instructions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from arraylogchain._compiled.loops.compiling import Floats
from arraylogchain._compiled.loops.numbers import LANES


def take_packs(
    block: Any, done: Iterable[range] = (), posterior: Any = None
) -> tuple[Floats, list[range]]:
    """Compute what packs can of a block of rows with all their steps.

    Parameters
    ----------
    block : tuple
    done : iterable of ranges
        Rows that are left out.
    posterior : tuple, optional
        (cotangents, by_weight, sums), if more than totals is wanted; see `loops.packs_posterior`.

    Returns
    -------
    totals : array [rows]
        Those of rows that were taken.
    left : list of ranges
        Rows that were not.
    """
    from arraylogchain._compiled.loops import packs

    (first, count, *_), (x, _), *_ = block
    _, T, K = x.shape
    totals, left = np.zeros(count), np.ones(count, np.uint8)
    for rows in done:
        left[rows.start - first : rows.stop - first] = 0
    kept, counted = 2, 0
    if posterior is not None:
        counts = posterior[-1][2]
        kept, counted = T, counts.shape[1] if len(counts) else 0
    shapes = ((T, K), (T, 1), (kept, K), (packs.KNOWN, 1), (packs.PARTS + K, K))
    lanes = tuple(np.empty((n, m * LANES)) for n, m in shapes)
    room = (*lanes, np.empty((counted, K, K)))
    if posterior is None:
        packs.log_totals(block, room, totals, left)
    else:
        from arraylogchain._compiled.loops import packs_posterior

        packs_posterior.posterior(block, room, totals, left, *posterior)
    if not left.any():
        return totals, []
    edges = np.flatnonzero(np.diff(left, prepend=0, append=0)) + first
    return totals, [range(*pair) for pair in edges.reshape(-1, 2).tolist()]
