"""What is found out about matrices before steps are taken with them."""

from __future__ import annotations

from arraylogchain._compiled.loops.compiling import compiled, inner
from arraylogchain._compiled.loops.numbers import INF, LEAST_EXPONENT, ROUNDER, exp
from arraylogchain._compiled.loops.steps import LARGE, LOGS, LOST, SMALL, SPECIAL


@inner
def find_bands(given, g, s, zero, bands):
    """Write the first entry that is not zero, and the end of those, of four rows together."""
    K = given.shape[2]
    for k in range(K):
        if k % 4 == 0 or k >= K // 4 * 4:
            first, end = K, 0
        for j in range(K):
            if given[g, s, k, j] != zero:
                first = j if j < first else first
                end = j + 1 if j >= end else end
        for row in range(k // 4 * 4 if k < K // 4 * 4 else k, k + 1):
            bands[g, s, row, 0] = first if first < end else end
            bands[g, s, row, 1] = end


@compiled
def prepare(given, in_logs, P, shifts, flags, bands, with_bands):
    """Look through matrices [groups, steps, K, K]; write exponentials to P if they are logarithms.

    These are relative to the largest of their matrix, the shift. Bands are what is not 0 of rows.
    """
    groups, steps, K, _ = given.shape
    for g in range(groups):
        for s in range(steps):
            top = -INF
            special, lost, small, large = 0, 0, 0, 0
            for k in range(K):
                for j in range(K):
                    p = given[g, s, k, j]
                    top = p if p > top else top
                    special += not ((p >= 0.0 or in_logs) and p < INF)
                    small += (p < 2.0**-52) & (p != 0.0)
                    large += p > 2.0**200
            flag = SPECIAL if special else 0
            if in_logs:
                top = 0.0 if special or top == -INF else top
                small, large = 0, 0
                for k in range(K):
                    for j in range(K):
                        p = given[g, s, k, j]
                        P[g, s, k, j] = exp(p - top)
                        small += (p - top < -36.0) & (p > -INF)
                        lost += (p - top < LEAST_EXPONENT) & (p > -INF)
                flag |= LOGS | (LOST if lost else 0)
            flags[g, s] = flag | (SMALL if small else 0) | (LARGE if large else 0)
            shifts[g, s] = top if in_logs else 0.0
            if with_bands:
                find_bands(given, g, s, -INF if in_logs else 0.0, bands)


@compiled
def prepare_logs(given, in_logs, L, flags, bands, with_bands):
    """Look through matrices [groups, steps, K, K]; write logarithms that are given to L.

    They are made relative to about the largest of their matrix: what all paths have
    in common has no part in what is best. Bands are what is not -inf of rows.
    """
    groups, steps, K, _ = given.shape
    for g in range(groups):
        for s in range(steps):
            top = -INF
            special = 0
            for k in range(K):
                for j in range(K):
                    p = given[g, s, k, j]
                    top = p if p > top else top
                    special += not ((p >= 0.0 or in_logs) and p < INF)
            flags[g, s] = SPECIAL if special else 0
            shift = (top + ROUNDER) - ROUNDER if in_logs and -(2.0**50) < top < 2.0**50 else 0.0
            for k in range(K if in_logs else 0):
                for j in range(K):
                    L[g, s, k, j] = given[g, s, k, j] - shift
            if with_bands:
                find_bands(given, g, s, -INF if in_logs else 0.0, bands)
