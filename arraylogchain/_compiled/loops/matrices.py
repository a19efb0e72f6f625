"""Matrices of steps: what is found out about them before steps are taken, and sums of products."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from arraylogchain._compiled.loops.compiling import compiled, inlined, inner
from arraylogchain._compiled.loops.numbers import (
    INF,
    LEAST_EXPONENT,
    ROUNDER,
    any_wide_exp,
    exp,
    power_of_two,
    split,
)

# What is known of a matrix.
SPECIAL = 1  # some entries are NaN, infinite or negative
LOST = 2  # exponentials of some entries are taken for 0, and only their logarithms tell
SMALL = 4  # some entries, but not zeros, are below 2**-52
LARGE = 8  # some entries are above 2**200
LOGS = 16  # the matrix was given as logarithms
RELATIVE = 32  # entries are relative to the exponents of weights


class Matrix(NamedTuple):
    """The matrix P [K, K] of a step or of all, or exp(L - shift), and what is known of it."""

    P: Any
    L: Any
    shift: Any
    flag: Any
    bands: Any
    is_one: Any


@inlined
def survey(given, in_logs):
    """Return the largest entry of a matrix, and whether some are NaN, infinite or negative."""
    top, special = -INF, 0
    for k in range(len(given)):
        for j in range(len(given)):
            p = given[k, j]
            top = p if p > top else top
            special += not ((p >= 0.0 or in_logs) and p < INF)
    return top, SPECIAL if special else 0


@inner
def find_bands(given, in_logs, bands):
    """Write the first entry that is not zero, and the end of those, of four rows together."""
    K = len(given)
    zero = -INF if in_logs else 0.0
    for k in range(K):
        if k % 4 == 0:
            first, end = K, 0
        for j in range(K):
            if given[k, j] != zero:
                first = j if j < first else first
                end = j + 1 if j >= end else end
        for row in range(k // 4 * 4, k + 1):
            bands[row, 0] = first if first < end else end
            bands[row, 1] = end


@compiled
def prepare(given, in_logs, P, shifts, flags, bands, with_bands):
    """Look through matrices [groups, steps, K, K]; write exponentials to P if they are logarithms.

    These are relative to the largest of their matrix, the shift. Bands are what is not 0 of rows.
    """
    groups, steps, K, _ = given.shape
    for g in range(groups):
        for s in range(steps):
            own = given[g, s]
            top, flag = survey(own, in_logs)
            top = top if in_logs and flag == 0 and top > -INF else 0.0
            small, large, lost = 0, 0, 0
            for k in range(K):
                for j in range(K):
                    p = own[k, j]
                    if in_logs:
                        P[g, s, k, j] = exp(p - top)
                        small += (p - top < -36.0) & (p > -INF)
                        lost += (p - top < LEAST_EXPONENT) & (p > -INF)
                    else:
                        small += (p < 2.0**-52) & (p != 0.0)
                        large += p > 2.0**200
            flag |= (LOGS if in_logs else 0) | (LOST if lost else 0)
            flags[g, s] = flag | (SMALL if small else 0) | (LARGE if large else 0)
            shifts[g, s] = top
            if with_bands:
                find_bands(own, in_logs, bands[g, s])


@compiled
def prepare_logs(given, in_logs, L, flags, bands, with_bands):
    """Look through matrices [groups, steps, K, K]; write logarithms that are given to L.

    They are made relative to about the largest of their matrix: what all paths have
    in common has no part in what is best. Bands are what is not -inf of rows.
    """
    groups, steps, K, _ = given.shape
    for g in range(groups):
        for s in range(steps):
            own = given[g, s]
            top, flag = survey(own, in_logs)
            flags[g, s] = flag | (LOGS if in_logs else 0)
            shift = (top + ROUNDER) - ROUNDER if in_logs and -(2.0**50) < top < 2.0**50 else 0.0
            for k in range(K if in_logs else 0):
                for j in range(K):
                    L[g, s, k, j] = own[k, j] - shift
            if with_bands:
                find_bands(own, in_logs, bands[g, s])


@inlined
def four_from(k, K):
    """Return the three numbers after k, or k where they are not below K."""
    return k + 1 if k + 1 < K else k, k + 2 if k + 2 < K else k, k + 3 if k + 3 < K else k


@inlined
def sum_products(m, P, bands, out):
    """Write m @ P to out: four rows at a time, within their bands."""
    K = len(m)
    for j in range(K):
        out[j] = 0.0
    # A range, because Numba would compile `add_rows` once more for a k that is always 0 at first.
    for k in range(0, K - 3, 4):
        add_rows((k, k + 1, k + 2, k + 3), m[k], m[k + 1], m[k + 2], m[k + 3], P, bands, out)
    k = K - K % 4
    if k < K:
        # The first one stands for those that there are not, times nothing.
        k1, k2, k3 = four_from(k, K)
        m1, m2 = m[k1] if k1 > k else 0.0, m[k2] if k2 > k else 0.0
        add_rows((k, k1, k2, k3), m[k], m1, m2, 0.0, P, bands, out)


@inlined
def add_rows(rows, m0, m1, m2, m3, P, bands, out):
    """Add multiples of four rows of P to out, within their bands."""
    k0, k1, k2, k3 = rows
    if m0 + m1 + m2 + m3 > 0.0:
        # Loops over unsigned numbers need no check of their sign, and so are vectorised.
        for j in range(np.uint64(bands[k0, 0]), np.uint64(bands[k0, 1])):
            pair = m0 * P[k0, j] + m1 * P[k1, j]
            out[j] += pair + (m2 * P[k2, j] + m3 * P[k3, j])


@inner
def make_relative(m, e, matrix, out):
    """Write the matrix that takes numbers m times 2**e to sums that have the same exponents.

    Its entries are P[k, j] * 2**(e[k] - e[j]), which err by at most 2**-822 where a power is taken
    for 0. Return whether it serves: no entry is larger than 2**200, and all m are finite.
    """
    if matrix.flag & (SPECIAL | LARGE | LOST):
        return False
    P, wrong = matrix.P, 0
    for k in range(len(m)):
        wrong += not m[k] < INF
        for j in range(np.uint64(matrix.bands[k, 0]), np.uint64(matrix.bands[k, 1])):
            n = e[k] - e[j]
            p = P[k, j] * power_of_two(n if n < 900.0 else 900.0)
            out[k, j] = p
            wrong += (p > 2.0**200) | ((n > 900.0) & (p > 0.0))
        if wrong > 0:
            return False
    return True


@inlined
def is_open(matrix, k, j):
    """Tell whether an entry of a matrix is not 0."""
    return matrix.L[k, j] > -INF if matrix.flag & LOGS else matrix.P[k, j] != 0.0


@inlined
def wide_entry(matrix, k, j):
    """Return an entry of a matrix as a wide number."""
    if matrix.flag & LOGS:
        return any_wide_exp(matrix.L[k, j] - matrix.shift)
    return split(matrix.P[k, j])
