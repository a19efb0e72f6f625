"""Steps of the recursion on the weights of a row's states, each of them proved or taken again.

A state is `m`, `e` [K] and `scale`. As long as it serves, the state is *linear*: weights are m, and
e has no part. Every weight is a normal number, or exactly zero, and so is every factor; so a step
errs by the rounding of its products and sums alone. A sum of K products may lose 2**-1075 to
underflow for each of them, which is less than its rounding if the sum is at least K * TINY: below,
and where something overflows, the step is taken again in *wide* numbers m * 2**e, which have no
range to leave. As soon as they fit, weights are linear again.

What all weights have in common is in `scale`: a logarithm in two parts, whose sum is exact, and a
power of two.
"""

from __future__ import annotations

import math

import numpy as np

from arraylogchain._compiled.compiling import Floats, Integers, inlined, inner
from arraylogchain._compiled.numbers import (
    TINY,
    exp,
    log_of,
    power_of_two,
    split,
    two_sum,
    wide_exp,
)

# What is where in a scale: logarithm, power of two, whether weights are wide, whether a NaN was
# among what they were made of.
HIGH, LOW, POWER, WIDE, NAN = range(5)
SCALE = 5

# What is known of a matrix.
SPECIAL = 1  # some entries are NaN, infinite or negative
LOST = 2  # exponentials of some entries are taken for 0, and only their logarithms tell
SMALL = 4  # some entries, but not zeros, are below 2**-52
LARGE = 8  # some entries are above 2**200
LOGS = 16  # the matrix was given as logarithms

# The largest linear weight is kept between 2**-300 and 2**300. Linear weights are made of wide ones
# that span less than 2**900, the largest being about 2**200 then.
LARGEST = 2.0**300
SPAN = 900.0
RAISED = 200.0


@inlined
def largest_finite(x: Floats, i: int) -> tuple[float, bool]:
    """Return the largest of row i, 0 where it is not finite, and whether +inf or NaN is in it."""
    top = -math.inf
    special = False
    for j in range(x.shape[1]):
        top = x[i, j] if x[i, j] > top else top
        special |= not x[i, j] < math.inf
    return (0.0 if special or top == -math.inf else top), special


@inlined
def add_to_scale(scale: Floats, shift: float) -> None:
    scale[HIGH], rest = two_sum(scale[HIGH], shift)
    scale[LOW] += rest


@inlined
def copy(source: Floats, i: int, target: Floats) -> None:
    """Copy row i."""
    for j in range(len(target)):
        target[j] = source[i, j]


@inner
def widen(m: Floats, e: Floats, scale: Floats) -> None:
    """Make a state wide."""
    if scale[WIDE] == 0.0:
        for k in range(len(m)):
            m[k], e[k] = split(m[k])
        scale[WIDE] = 1.0


@inlined
def rescale(m: Floats, e: Floats, scale: Floats) -> None:
    """Bring weights into range; make them linear, or wide, where that serves."""
    if scale[WIDE] == 0.0:
        large, some = 0, 0
        for k in range(len(m)):
            large += m[k] > LARGEST
            some += m[k] > 1 / LARGEST
        if large == 0 and some > 0:
            return
    rescale_wide(m, e, scale)


@inner
def rescale_wide(m: Floats, e: Floats, scale: Floats) -> None:
    widen(m, e, scale)
    top, least = -math.inf, math.inf
    special = False
    for k in range(len(m)):
        if m[k] != 0.0:
            special |= not m[k] < math.inf
            top, least = max(top, e[k]), min(least, e[k])
    if top == -math.inf:
        scale[WIDE] = 0.0
        return
    linear = not special and top - least < SPAN
    raised = top - RAISED if linear else top
    scale[POWER] += raised
    scale[WIDE] = 0.0 if linear else 1.0
    for k in range(len(m)):
        if m[k] != 0.0 and m[k] < math.inf:
            e[k] -= raised
            if linear:
                m[k] *= power_of_two(e[k])


@inner
def load(values: Floats, in_logs: bool, m: Floats, e: Floats, scale: Floats) -> None:
    """Begin with given weights values[0], or their logarithms, as a wide state."""
    scale[:] = 0.0
    scale[WIDE] = 1.0
    top, _ = largest_finite(values, 0)
    for k in range(len(m)):
        if in_logs:
            m[k], e[k] = wide_exp(values[0, k] - top)
        else:
            m[k], e[k] = split(values[0, k])
        if math.isnan(m[k]):
            scale[NAN] = 1.0
    if in_logs:
        scale[HIGH] = top


@inlined
def weigh(m: Floats, e: Floats, scale: Floats, x: Floats, i: int, scratch: Floats) -> None:
    """Multiply by exp(x[i])."""
    K = len(m)
    top, special = largest_finite(x, i)
    add_to_scale(scale, top)
    if scale[WIDE] == 0.0 and not special:
        unproved = 0
        for k in range(K):
            w = exp(x[i, k] - top) * m[k]
            scratch[0, k] = w
            # Neither normal nor zero, or by a factor that is taken for 0.
            unproved += (w < TINY) & (m[k] != 0.0) & (x[i, k] > -math.inf)
        if unproved == 0:
            copy(scratch, 0, m)
            return
    weigh_wide(m, e, scale, x, i, top)


@inner
def weigh_wide(m: Floats, e: Floats, scale: Floats, x: Floats, i: int, top: float) -> None:
    widen(m, e, scale)
    for k in range(len(m)):
        f, n = wide_exp(x[i, k] - top)
        m[k] *= f
        e[k] = e[k] + n if 0.0 < m[k] < math.inf else 0.0
        if math.isnan(x[i, k]):
            scale[NAN] = 1.0


@inlined
def multiply(
    m: Floats,
    e: Floats,
    scale: Floats,
    P: Floats,
    L: Floats,
    shift: float,
    flag: int,
    bands: Integers,
    s: int,
    scratch: Floats,
) -> None:
    """Multiply by matrix s, P[s] or exp(L[s] - shift), the shift going to the scale."""
    if flag & LOGS:
        add_to_scale(scale, shift)
    if scale[WIDE] == 0.0 and not flag & SPECIAL:
        sum_products(m, P, s, bands, min(s, len(bands) - 1), scratch)
        if prove(m, P, L, s, flag, scratch):
            copy(scratch, 0, m)
            return
    multiply_wide(m, e, scale, P, L, shift, flag, s, scratch)


@inner
def multiply_wide(
    m: Floats,
    e: Floats,
    scale: Floats,
    P: Floats,
    L: Floats,
    shift: float,
    flag: int,
    s: int,
    scratch: Floats,
) -> None:
    widen(m, e, scale)
    K = len(m)
    for j in range(K):
        top, special = column_terms(m, e, P, L, shift, flag, s, j, scratch)
        if special != 0.0:
            scratch[0, j], scratch[1, j] = special, 0.0
        else:
            scratch[0, j], scratch[1, j] = sum_terms(scratch, top)
    if flag & SPECIAL:
        for k in range(K):
            for j in range(K):
                p = L[s, k, j]
                if math.isnan(p) or (p < 0.0 and not flag & LOGS):
                    scale[NAN] = 1.0
    copy(scratch, 0, m)
    copy(scratch, 1, e)


@inlined
def step_forward(
    m: Floats,
    scale: Floats,
    P: Floats,
    shift: float,
    flag: int,
    bands: Integers,
    s: int,
    x: Floats,
    i: int,
    scratch: Floats,
) -> bool:
    """Multiply by matrix s and by exp(x[i]) in one go.

    Returns
    -------
    bool
        Whether all of it is linear, proved and in range; else nothing has been done.
    """
    if scale[WIDE] != 0.0 or flag & (SPECIAL | LOST):
        return False
    K = len(m)
    sum_products(m, P, s, bands, min(s, len(bands) - 1), scratch)
    top, special = largest_finite(x, i)
    least = 2 * K * TINY
    unproved, zeros, large, some = 0, 0, 0, 0
    for j in range(K):
        v = scratch[0, j]
        w = v * exp(x[i, j] - top)
        scratch[1, j] = w
        zeros += v == 0.0
        wrong = (v < least) | (v > 2.0**1000) | ((w < TINY) & (x[i, j] > -math.inf))
        unproved += wrong & (v != 0.0)
        large += w > LARGEST
        some += w > 1 / LARGEST
    # Products of normal weights and entries that are not small do not vanish.
    if unproved or large or special or not some or (zeros and flag & SMALL):
        return False
    copy(scratch, 1, m)
    if flag & LOGS:
        add_to_scale(scale, shift)
    add_to_scale(scale, top)
    return True


@inlined
def sum_products(m: Floats, P: Floats, s: int, bands: Integers, b: int, out: Floats) -> None:
    """Write m @ P[s] to out[0]: four rows at a time, within their bands."""
    K = len(m)
    for j in range(K):
        out[0, j] = 0.0
    k = 0
    while k + 3 < K:
        m0, m1, m2, m3 = m[k], m[k + 1], m[k + 2], m[k + 3]
        if m0 != 0.0 or m1 != 0.0 or m2 != 0.0 or m3 != 0.0:
            low = min(
                min(bands[b, k, 0], bands[b, k + 1, 0]), min(bands[b, k + 2, 0], bands[b, k + 3, 0])
            )
            high = max(
                max(bands[b, k, 1], bands[b, k + 1, 1]), max(bands[b, k + 2, 1], bands[b, k + 3, 1])
            )
            # Numba vectorises loops over unsigned numbers, which need no check of their sign.
            for j in range(np.uint64(low), np.uint64(high)):
                pair = m0 * P[s, k, j] + m1 * P[s, k + 1, j]
                out[0, j] += pair + (m2 * P[s, k + 2, j] + m3 * P[s, k + 3, j])
        k += 4
    while k < K:
        for j in range(np.uint64(bands[b, k, 0]), np.uint64(bands[b, k, 1])):
            out[0, j] += m[k] * P[s, k, j]
        k += 1


@inlined
def prove(m: Floats, P: Floats, L: Floats, s: int, flag: int, out: Floats) -> bool:
    """Tell whether all of m @ P[s] are right, and set those to 0 that nothing leads to."""
    K = len(m)
    least = 2 * K * TINY
    if flag & LOST:
        # What is taken for 0 is at most 2**-1021, and has no part in a sum that rounds it off.
        total = 0.0
        for k in range(K):
            total += m[k]
        least = max(least, total * 2.0**-967)
    unproved = 0
    for j in range(K):
        unproved += not (least <= out[0, j] <= 2.0**1000)
    return unproved == 0 or are_zeros(m, P, L, s, flag, out, least)


@inner
def are_zeros(
    m: Floats, P: Floats, L: Floats, s: int, flag: int, out: Floats, least: float
) -> bool:
    """Tell whether nothing leads to the states that are not proved, and make zeros of them."""
    K = len(m)
    for j in range(K):
        if least <= out[0, j] <= 2.0**1000:
            continue
        # Products of normal weights and entries that are not small do not vanish.
        if out[0, j] != 0.0 or flag & (LOST | SMALL):
            for k in range(K):
                if m[k] != 0.0 and (L[s, k, j] > -math.inf if flag & LOGS else P[s, k, j] != 0.0):
                    return False
        out[0, j] = 0.0
    return True


@inner
def column_terms(
    m: Floats,
    e: Floats,
    P: Floats,
    L: Floats,
    shift: float,
    flag: int,
    s: int,
    j: int,
    scratch: Floats,
) -> tuple[float, float]:
    """Write the products of wide weights with column j of matrix s, wide, to scratch[2] and [3].

    Returns
    -------
    top : float
        The largest exponent, -inf where all terms are zero.
    special : float
        The sum of the terms that are infinite or NaN, else 0.
    """
    top, special = -math.inf, 0.0
    for k in range(len(m)):
        scratch[2, k] = 0.0
        if m[k] == 0.0 and not flag & SPECIAL:
            continue
        if flag & LOGS:
            p, n = wide_exp(L[s, k, j] - shift)
        else:
            p, n = split(P[s, k, j])
        term = m[k] * p
        if term == 0.0:
            continue
        if not term < math.inf:
            special += term
            continue
        scratch[2, k], rest = split(term)
        scratch[3, k] = e[k] + n + rest
        top = max(top, scratch[3, k])
    return top, special


@inner
def sum_terms(scratch: Floats, top: float) -> tuple[float, float]:
    """Return the sum of the wide numbers in scratch[2] and [3] as one."""
    total = 0.0
    for k in range(scratch.shape[1]):
        if scratch[2, k] != 0.0:
            total += scratch[2, k] * power_of_two(scratch[3, k] - top)
    total, n = split(total)
    return total, (n + top if total != 0.0 else 0.0)


@inner
def wide_products(
    a: Floats, a_e: Floats, b: Floats, b_e: Floats, scratch: Floats
) -> tuple[float, float]:
    """Write the products of wide weights; see `column_terms`."""
    top, special = -math.inf, 0.0
    for k in range(len(a)):
        term = a[k] * b[k]
        scratch[2, k] = 0.0
        if not term < math.inf:
            special += term
        elif term != 0.0:
            scratch[2, k], rest = split(term)
            scratch[3, k] = a_e[k] + b_e[k] + rest
            top = max(top, scratch[3, k])
    return top, special


@inner
def weighted_total(
    m: Floats, e: Floats, scale: Floats, values: Floats, in_logs: bool, scratch: Floats
) -> float:
    """Return the log of the sum of all weights, each times values[0]; the state becomes wide."""
    factors, factors_e, own = np.empty(len(m)), np.empty(len(m)), np.empty(SCALE)
    load(values, in_logs, factors, factors_e, own)
    widen(m, e, scale)
    top, special = wide_products(m, e, factors, factors_e, scratch)
    scale[NAN] = max(scale[NAN], own[NAN])
    if special != 0.0:
        return special
    total, n = sum_terms(scratch, top)
    high, low = two_sum(scale[HIGH], own[HIGH])
    return log_of(total, n + scale[POWER] + own[POWER], high, low + scale[LOW])
