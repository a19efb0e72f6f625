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
    INF,
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
# that span less than 2**1200, the largest being about 2**200 then.
LARGEST = 2.0**300
SPAN = 1200.0
RAISED = 200.0

# Rows of the scratch of a step, [ROWS, K].
SUMS, RESULT, TERMS, EXPONENTS, WEIGHED, WEIGHED_EXPONENTS = range(6)
ROWS = 6


@inlined
def largest_finite(x: Floats, i: int) -> tuple[float, bool]:
    """Return the largest of row i, 0 where it is not finite, and whether +inf or NaN is in it."""
    top = -INF
    special = False
    for j in range(x.shape[1]):
        top = x[i, j] if x[i, j] > top else top
        special |= not x[i, j] < INF
    return (0.0 if special or top == -INF else top), special


@inlined
def add_to_scale(scale: Floats, shift: float) -> None:
    scale[HIGH], rest = two_sum(scale[HIGH], shift)
    scale[LOW] += rest


@inner
def widen(m: Floats, e: Floats, scale: Floats) -> None:
    """Make a state wide."""
    if scale[WIDE] == 0.0:
        scale[WIDE] = 1.0
        for k in range(len(m)):
            m[k], e[k] = split(m[k])


@inner
def rescale(m: Floats, e: Floats, scale: Floats) -> None:
    """Bring weights into range; make them linear, or wide, where that serves."""
    if scale[WIDE] == 0.0:
        top = 0.0
        for k in range(len(m)):
            top = m[k] if m[k] > top else top
        if 1 / LARGEST <= top <= LARGEST:
            return
    widen(m, e, scale)
    top, least = -INF, INF
    special = False
    for k in range(len(m)):
        if m[k] != 0.0:
            special |= not m[k] < INF
            top = e[k] if e[k] > top else top
            least = e[k] if e[k] < least else least
    linear = not special and not top - least >= SPAN
    raised = top - RAISED if linear else top
    if top > -INF:
        scale[POWER] += raised
        for k in range(len(m)):
            if 0.0 < m[k] < INF:
                e[k] -= raised
                m[k] *= power_of_two(e[k]) if linear else 1.0
    scale[WIDE] = 0.0 if linear else 1.0


@inner
def load(values: Floats, i: int, in_logs: bool, m: Floats, e: Floats, scale: Floats) -> None:
    """Begin with the weights values[i], or their logarithms, as a wide state."""
    top, _ = largest_finite(values, i)
    scale[:] = 0.0
    scale[HIGH] = top if in_logs else 0.0
    scale[WIDE] = 1.0
    for k in range(len(m)):
        m[k], e[k] = wide_exp(values[i, k] - top) if in_logs else split(values[i, k])
        if math.isnan(m[k]):
            scale[NAN] = 1.0


@inlined
def step(
    m: Floats,
    e: Floats,
    scale: Floats,
    P: Floats,
    L: Floats,
    shift: float,
    flag: int,
    bands: Integers,
    s: int,
    x: Floats,
    i: int,
    backward: bool,
    scratch: Floats,
) -> bool:
    """Multiply by matrix s and by exp(x[i]): in this order, or backward in the other one.

    The matrix is P[s], or exp(L[s] - shift), the shift going to the scale. Backward, the weighed
    state before the product stays in scratch, and the caller rescales.

    Returns
    -------
    bool
        Whether the step was linear.
    """
    if scale[WIDE] == 0.0 and not flag & SPECIAL:
        if linear_step(m, e, scale, P, L, shift, flag, bands, s, x, i, backward, scratch):
            return True
    wide_step(m, e, scale, P, L, shift, flag, s, x, i, backward, scratch)
    return False


@inlined
def linear_step(
    m: Floats,
    e: Floats,
    scale: Floats,
    P: Floats,
    L: Floats,
    shift: float,
    flag: int,
    bands: Integers,
    s: int,
    x: Floats,
    i: int,
    backward: bool,
    scratch: Floats,
) -> bool:
    """Take a linear step, unless it is not proved."""
    K = len(m)
    top, special = largest_finite(x, i)
    unproved, zeros, large, some = 0, 0, 0, 0
    total = 0.0
    for k in range(K):
        w = exp(x[i, k] - top) * m[k] if backward else m[k]
        scratch[WEIGHED, k] = w
        # Neither normal nor zero, or by a factor that is taken for 0.
        unproved += (w < TINY) & (m[k] != 0.0) & (x[i, k] > -INF)
    least = 2 * K * TINY
    if flag & LOST:
        # What is taken for 0 is at most 2**-1021, and has no part in a sum that rounds it off.
        for k in range(K):
            total += scratch[WEIGHED, k]
        least += total * 2.0**-967
    sum_products(scratch, P, s, bands, scratch)
    for j in range(K):
        v = scratch[SUMS, j]
        w = v if backward else v * exp(x[i, j] - top)
        scratch[RESULT, j] = w
        zeros += v == 0.0
        wrong = (v < least) | (v > 2.0**1000) | ((w < TINY) & (x[i, j] > -INF))
        unproved += wrong & (v != 0.0)
        large += w > LARGEST
        some += w > 1 / LARGEST
    if special or unproved:
        return False
    # Products of normal weights and entries that are not small do not vanish.
    if zeros and flag & (LOST | SMALL) and not are_zeros(P, L, s, flag, scratch):
        return False
    for k in range(K):
        m[k] = scratch[RESULT, k]
    add_to_scale(scale, top)
    if flag & LOGS:
        add_to_scale(scale, shift)
    if not backward and (large or not some):
        rescale(m, e, scale)
    return True


@inlined
def sum_products(source: Floats, P: Floats, s: int, bands: Integers, out: Floats) -> None:
    """Write source[WEIGHED] @ P[s] to out[SUMS]: four rows at a time, within their bands."""
    K = source.shape[1]
    b = s if len(bands) > 1 else 0
    for j in range(K):
        out[SUMS, j] = 0.0
    k = 0
    while k + 3 < K:
        m0, m1 = source[WEIGHED, k], source[WEIGHED, k + 1]
        m2, m3 = source[WEIGHED, k + 2], source[WEIGHED, k + 3]
        if m0 + m1 + m2 + m3 > 0.0:
            # Loops over unsigned numbers need no check of their sign, and so are vectorised.
            for j in range(np.uint64(bands[b, k, 0]), np.uint64(bands[b, k, 1])):
                pair = m0 * P[s, k, j] + m1 * P[s, k + 1, j]
                out[SUMS, j] += pair + (m2 * P[s, k + 2, j] + m3 * P[s, k + 3, j])
        k += 4
    while k < K:
        m0 = source[WEIGHED, k]
        for j in range(np.uint64(bands[b, k, 0]), np.uint64(bands[b, k, 1])):
            out[SUMS, j] += m0 * P[s, k, j]
        k += 1


@inner
def are_zeros(P: Floats, L: Floats, s: int, flag: int, scratch: Floats) -> bool:
    """Tell whether nothing leads to the states whose sums are 0."""
    for j in range(scratch.shape[1]):
        if scratch[SUMS, j] == 0.0:
            for k in range(scratch.shape[1]):
                is_open = L[s, k, j] > -INF if flag & LOGS else P[s, k, j] != 0.0
                if is_open and scratch[WEIGHED, k] != 0.0:
                    return False
    return True


@inner
def wide_step(
    m: Floats,
    e: Floats,
    scale: Floats,
    P: Floats,
    L: Floats,
    shift: float,
    flag: int,
    s: int,
    x: Floats,
    i: int,
    backward: bool,
    scratch: Floats,
) -> None:
    """Take a step in wide numbers."""
    K = len(m)
    widen(m, e, scale)
    if backward:
        weigh(m, e, scale, x, i)
    as_wide(m, e, True, scratch)
    if flag & LOGS:
        add_to_scale(scale, shift)
    for j in range(K):
        top, special = column_terms(scratch, P, L, shift, flag, s, j)
        m[j], e[j] = sum_terms(scratch, top)
        if special != 0.0:
            m[j], e[j] = special, 0.0
    if flag & SPECIAL:
        for k in range(K):
            for j in range(K):
                if math.isnan(L[s, k, j]) or (L[s, k, j] < 0.0 and not flag & LOGS):
                    scale[NAN] = 1.0
    if not backward:
        weigh(m, e, scale, x, i)
        rescale(m, e, scale)


@inner
def weigh(m: Floats, e: Floats, scale: Floats, x: Floats, i: int) -> None:
    """Multiply a wide state by exp(x[i])."""
    top, _ = largest_finite(x, i)
    add_to_scale(scale, top)
    for k in range(len(m)):
        f, n = wide_exp(x[i, k] - top)
        m[k] *= f
        e[k] = e[k] + n if 0.0 < m[k] < INF else 0.0
        if math.isnan(x[i, k]):
            scale[NAN] = 1.0


@inner
def column_terms(
    scratch: Floats, P: Floats, L: Floats, shift: float, flag: int, s: int, j: int
) -> tuple[float, float]:
    """Write the products of the weighed state, wide, with column j of matrix s, as wide numbers.

    Returns
    -------
    top : float
        The largest exponent, -inf where all terms are zero.
    special : float
        The sum of the terms that are infinite or NaN, else 0.
    """
    top, special = -INF, 0.0
    for k in range(scratch.shape[1]):
        scratch[TERMS, k] = 0.0
        if scratch[WEIGHED, k] != 0.0 or flag & SPECIAL:
            p, n = wide_exp(L[s, k, j] - shift) if flag & LOGS else split(P[s, k, j])
            term = scratch[WEIGHED, k] * p
            if not term < INF:
                special += term
            elif term != 0.0:
                scratch[TERMS, k] = term
                n += scratch[WEIGHED_EXPONENTS, k]
                scratch[EXPONENTS, k] = n
                top = n if n > top else top
    return top, special


@inner
def as_wide(m: Floats, e: Floats, is_wide: bool, scratch: Floats) -> None:
    """Write weights to the scratch as a weighed state, wide."""
    for k in range(len(m)):
        if is_wide:
            scratch[WEIGHED, k], scratch[WEIGHED_EXPONENTS, k] = m[k], e[k]
        else:
            scratch[WEIGHED, k], scratch[WEIGHED_EXPONENTS, k] = split(m[k])


@inner
def sum_terms(scratch: Floats, top: float) -> tuple[float, float]:
    """Return the sum of the wide numbers in the scratch as one."""
    total = 0.0
    for k in range(scratch.shape[1]):
        if scratch[TERMS, k] != 0.0:
            total += scratch[TERMS, k] * power_of_two(scratch[EXPONENTS, k] - top)
    total, n = split(total)
    return total, (n + top if total != 0.0 else 0.0)


@inner
def wide_products(
    a: Floats, a_e: Floats, a_wide: bool, b: Floats, b_e: Floats, b_wide: bool, scratch: Floats
) -> tuple[float, float]:
    """Write products of weights as wide numbers to the scratch; return what `column_terms` does."""
    top, special = -INF, 0.0
    for k in range(len(a)):
        p, n = (a[k], a_e[k]) if a_wide else split(a[k])
        q, more = (b[k], b_e[k]) if b_wide else split(b[k])
        scratch[TERMS, k] = 0.0
        if not p * q < INF:
            special += p * q
        elif p * q != 0.0:
            n += more
            scratch[TERMS, k], scratch[EXPONENTS, k] = p * q, n
            top = n if n > top else top
    return top, special


@inner
def weighted_total(
    m: Floats,
    e: Floats,
    scale: Floats,
    values: Floats,
    i: int,
    in_logs: bool,
    scratch: Floats,
) -> float:
    """Return the log of the sum of all weights, each times values[i]."""
    factors, factors_e, own = np.empty(len(m)), np.empty(len(m)), np.empty(SCALE)
    load(values, i, in_logs, factors, factors_e, own)
    is_wide = scale[WIDE] != 0.0
    top, special = wide_products(m, e, is_wide, factors, factors_e, True, scratch)
    scale[NAN] += own[NAN]
    if special != 0.0:
        return special
    total, n = sum_terms(scratch, top)
    high, low = two_sum(scale[HIGH], own[HIGH])
    return log_of(total, n + scale[POWER] + own[POWER], high, low + scale[LOW])
