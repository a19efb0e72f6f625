"""What is found out about matrices before steps are taken with them."""

from __future__ import annotations

import math

import numpy as np
from arraylogchain._compiled.compiling import Floats, Integers, compiled, inner
from arraylogchain._compiled.numbers import LEAST_EXPONENT, exp
from arraylogchain._compiled.steps import LARGE, LOGS, LOST, SMALL, SPECIAL


@compiled
def prepare(
    given: Floats,
    in_logs: bool,
    P: Floats,
    shifts: Floats,
    flags: Integers,
    bands: Integers,
    with_bands: bool,
) -> None:
    """Look through matrices [groups, steps, K, K]; write exponentials to P if they are logarithms.

    These are relative to the largest of their matrix, the shift. Bands are the first entry of a row
    that is not 0, and the end of what is not.
    """
    groups, steps, K, _ = given.shape
    for g in range(groups):
        for s in range(steps):
            if in_logs:
                flag, shifts[g, s] = exponentials(given[g, s], P[g, s])
                flags[g, s] = flag | properties(P[g, s])
                if with_bands:
                    find_bands(P[g, s], bands[g, s])
            else:
                shifts[g, s], flags[g, s] = 0.0, properties(given[g, s])
                if with_bands:
                    find_bands(given[g, s], bands[g, s])


@inner
def exponentials(L: Floats, P: Floats) -> tuple[int, float]:
    K = len(L)
    top = -math.inf
    special = 0
    for k in range(K):
        for j in range(K):
            top = L[k, j] if L[k, j] > top else top
            special += not L[k, j] < math.inf
    if special > 0 or top == -math.inf:
        top = 0.0
    lost = 0
    for k in range(K):
        for j in range(K):
            P[k, j] = exp(L[k, j] - top)
            lost += (L[k, j] - top < LEAST_EXPONENT) & (L[k, j] > -math.inf)
    return LOGS | (SPECIAL if special > 0 else 0) | (LOST if lost > 0 else 0), top


@inner
def properties(P: Floats) -> int:
    special, small, large = 0, 0, 0
    K = len(P)
    for k in range(K):
        for j in range(K):
            p = P[k, j]
            special += not (0.0 <= p < math.inf)
            small += (p < 2.0**-52) & (p != 0.0)
            large += p > 2.0**200
    return (SPECIAL if special else 0) | (SMALL if small else 0) | (LARGE if large else 0)


@inner
def find_bands(P: Floats, band: Integers) -> None:
    K = len(P)
    for k in range(K):
        first = 0
        while first < K and P[k, first] == 0.0:
            first += 1
        end = K
        while end > first and P[k, end - 1] == 0.0:
            end -= 1
        band[k, 0], band[k, 1] = first, end


@compiled
def prepare_logs(
    given: Floats, in_logs: bool, L: Floats, flags: Integers, bands: Integers, with_bands: bool
) -> None:
    """Write the logarithms of matrices [groups, steps, K, K], but for what all of one have in common.

    Bands are the first entry of a row that is not -inf, and the end of what is not.
    """
    groups, steps, K, _ = given.shape
    for g in range(groups):
        for s in range(steps):
            top = -math.inf
            special = 0
            for k in range(K):
                for j in range(K):
                    p = given[g, s, k, j]
                    top = p if p > top else top
                    special += not p < math.inf or (p < 0.0 and not in_logs)
            flags[g, s] = SPECIAL if special > 0 else 0
            shift = np.rint(top) if in_logs and -math.inf < top < math.inf else 0.0
            for k in range(K):
                first, end = K, 0
                for j in range(K):
                    p = given[g, s, k, j]
                    L[g, s, k, j] = p - shift if in_logs else math.log(p)
                    if L[g, s, k, j] != -math.inf:
                        first, end = min(first, j), j + 1
                if with_bands:
                    bands[g, s, k, 0], bands[g, s, k, 1] = min(first, end), end
