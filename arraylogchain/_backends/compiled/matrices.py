"""Matrices as loops take them: about 1, as weights, and as logarithms where these are needed."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from arraylogchain._backends.compiled.linear_space import MOST, TINY
from arraylogchain._core.context import Array, Context
from arraylogchain._core.scaled import scaled_logs, whole_maximum
from arraylogchain._numba.compiling import Floats, Integers, compiled, inlined, inner
from arraylogchain._numba.elementary import INF, exponent_of, exps, integer_shift, power_of_two
from arraylogchain._select import SPARSE_COST

# Entries below this, relative to the largest of their matrix, are left out of F.
_LEAST_ENTRY = 2.0**-700
# Matrices whose largest entries are in between need not be scaled.
_FROM, _TO = 2.0**-8, 2.0**8
# Least certified sums, relative to terms that were left out.
_ABOVE = 2.0**54
# Least number of states whose matrix is stored sparsely if it has many zeros.
MIN_SPARSE_STATES = 8


class SparseColumns(NamedTuple):
    """Nonzero entries of one matrix [K, K] in layers; empty arrays if it is full.

    The first layer has the first entry of each column, the second layer the second entries, and so
    on (jagged diagonal storage). In each layer the fullest column comes first.
    """

    starts: Integers  # [layers + 1], where layers begin
    numbers: Integers  # [K], of columns, in the order of each layer
    ranks: Integers  # [K], the inverse of `numbers`
    rows: Integers  # in ascending order in each column
    weights: Floats  # 0 where an entry was left out of F
    logs: Floats
    terms: Floats  # scratch


# The first fields of `recursion.Matrices`, and `recursion.Bounds`.
Prepared = tuple[tuple[Floats, Floats, Floats], tuple[float, float, float, bool]]

EMPTY = np.empty(0)


def prepare(ctx: Context, values: Array, is_log: bool, transposed: bool) -> Prepared:
    """Prepare contiguous, read-only float64 matrices [g, s, K, K]."""
    K = values.shape[-1]
    values = values.reshape(-1, K, K)
    flat, (extremes, scales) = np.empty((len(values), K * K)), np.zeros((2, 2, len(values)))
    num_special, low = copy(values, transposed, is_log, flat, extremes)
    logs, threshold = EMPTY, K * _ABOVE * TINY
    if not (is_log or num_special):
        bounds = max(2.0**-600, 2.0**-1000 / low), 0.0, threshold, False
        return (flat.reshape(-1), logs, scales), bounds
    maxima, lows = extremes
    is_special = not np.all(maxima < INF)
    if is_log:
        scales[0] = np.where(np.isfinite(maxima), np.ceil(maxima), 0.0)
        logs = flat - scales[0, ..., None]
        flat = np.exp(logs)
        low = np.exp(np.min(lows - scales[0], initial=INF))
    else:
        logs, scales[1] = scaled_logs(ctx, flat)
        exponents = -scales[1].astype(int)
        flat = np.ldexp(flat, exponents[..., None])
        low = np.min(np.ldexp(lows, exponents), initial=INF)
    is_partial = low < _LEAST_ENTRY
    if not (is_log or is_partial or is_special):
        logs = EMPTY  # logarithms of F are rounded less
    if is_partial:
        flat, threshold = np.where(flat < _LEAST_ENTRY, 0.0, flat), K * _ABOVE * _LEAST_ENTRY
    min_weight = max(2.0**-600, 2.0**-1000 / max(low, _LEAST_ENTRY))
    bounds = min_weight, MOST * threshold if is_partial else 0.0, threshold, is_special
    return (flat.reshape(-1), logs.reshape(-1), scales), bounds


@compiled
def copy(values: Floats, transposed: bool, is_log: bool, out: Floats, extremes: Floats) -> Any:
    """Copy matrices by `copy_matrices`, called from Python."""
    return copy_matrices(values, transposed, is_log, out, extremes)


@inner
def copy_matrices(
    values: Floats, transposed: bool, is_log: bool, out: Floats, extremes: Floats
) -> Any:
    """Copy matrices [n, K, K]; find the largest entries of each, and the least above zero.

    The first is NaN if an entry is no weight, and -inf, in logarithms, where all are zeros. Return
    how many linear matrices are not loops' as they are, and the least of all entries above zero.
    """
    zero, num_special, min_weight, K = -INF if is_log else 0.0, 0, INF, values.shape[1]
    for n in range(len(values)):
        x, y = values[n], out[n]
        top, low, special = zero, INF, 0
        for k in range(K):
            for j in range(K):
                w = x[j, k] if transposed else x[k, j]
                y[k * K + j] = w
                top = w if w > top else top
                low = w if zero < w < low else low
                special += not zero <= w < INF
        extremes[0, n], extremes[1, n] = math.nan if special else top, low
        num_special += special > 0 or low < _LEAST_ENTRY or not (top == 0.0 or _FROM <= top <= _TO)
        min_weight = low if low < min_weight else min_weight
    return num_special, min_weight


@inner
def prepare_linear(values, is_log, out, scales, extremes):
    """Write matrices [n, K, K] with a largest entry of about 1, and their scales [2, n].

    Return the least weight that linear space may then hold, or 0 where some entry is so small,
    infinite or NaN that linear space does not certify sums.
    """
    num_special, low = copy_matrices(values, False, is_log, out, extremes)
    scales[:] = 0.0
    for n in range(len(values) if is_log or num_special > 0 else 0):
        top, lowest = extremes[0, n], extremes[1, n]
        if not top < INF or (not is_log and 0.0 < top < 2.0**-1000):
            return 0.0
        if is_log:
            scales[0, n] = shift = integer_shift(top)
            exps(out[n], shift, out[n], len(out[n]))
            lowest = math.exp(lowest - shift)
        elif top > 0.0:
            exponent = min(exponent_of(top), 1022)
            scales[1, n] = exponent
            for i in range(len(out[n])):
                out[n, i] *= power_of_two(-exponent)
            lowest *= power_of_two(-exponent)
        if lowest < _LEAST_ENTRY:
            return 0.0
        low = lowest if n == 0 or lowest < low else low
    return max(2.0**-600, 2.0**-1000 / low)


@inlined
def num_entries(columns, j, K):
    """Return the number of entries of the column j of a matrix [K, K]: K if it is full."""
    if len(columns.rows) == 0:
        return K
    starts, n, rank = columns.starts, 0, columns.ranks[j]
    while n + 1 < len(starts) and starts[n] + rank < starts[n + 1]:
        n += 1
    return n


@inlined
def entry_of_column(columns, L, j, n, K):
    """Return the row and the logarithm of entry n of column j; L [K * K] is read if it is full."""
    if len(columns.rows) == 0:
        return n, L[n * K + j]
    p = columns.starts[n] + columns.ranks[j]
    return columns.rows[p], columns.logs[p]


def logs_of(values: Array, is_log: bool) -> tuple[Floats, Floats]:
    """Return logarithms of matrices [g, s, K, K] minus shifts, and the shifts; both flattened.

    Shifts are integers, the maxima of matrices that are given as logarithms.
    """
    maxima = whole_maximum(np, values, (-2, -1)) if is_log else np.zeros(values.shape[:2])
    x = values - maxima if is_log else np.log(values)
    return x.reshape(-1), maxima.reshape(-1)


def compress(F: Array, logs: Array) -> SparseColumns:
    """Return the sparse columns of a matrix of K * K entries.

    They are empty if more than one in `SPARSE_COST` entries is nonzero, as loops over all entries
    are faster then. F has weights with a largest entry of about 1. Either F or its logarithms may
    be empty: without F, weights are undefined.
    """
    K, is_log = math.isqrt(max(F.size, logs.size)), logs.size > 0
    is_nonzero = (logs > -INF if is_log else F > 0.0).reshape(K, K)
    if SPARSE_COST * np.count_nonzero(is_nonzero) > K * K:
        return FULL
    counts = np.count_nonzero(is_nonzero, axis=0)
    numbers = np.argsort(-counts, kind="stable")
    ranks = np.argsort(numbers)
    columns, rows = np.divmod(np.flatnonzero(is_nonzero.T), K)
    layers = np.arange(len(rows)) - (np.cumsum(counts) - counts)[columns]
    order = np.lexsort((ranks[columns], layers))
    starts = np.searchsorted(layers[order], np.arange(np.max(counts) + 1))
    rows, columns, terms = rows[order], columns[order], np.empty((2, len(rows)))
    weights = F.reshape(K, K)[rows, columns] if F.size else terms[0]
    logs = logs.reshape(K, K)[rows, columns] if is_log else np.log(weights)
    return SparseColumns(starts, numbers, ranks, rows, weights, logs, terms[1])


FULL = SparseColumns(*np.empty((4, 0), np.int64), *np.empty((3, 0)))
