"""Steps of the recursion on the weights of a row's states, each of them proved or taken again.

A state is `m`, `e` [K] and `scale`. As long as it serves, the state is *linear*: weights are m, and
e has no part. Every weight is a normal number, or exactly zero, and so is every factor; so a step
errs by the rounding of its products and sums alone. A sum of K products may lose TINY to underflow
for each of them (a processor that is told to flush takes all of a subnormal number), which is less
than its rounding if the sum is at least K * SAFE: below, and where something overflows, the step is
taken again in *wide* numbers m * 2**e, which have no range to leave. As soon as they fit, weights
are linear again.

What all weights have in common is in `scale`: a logarithm in two parts, whose sum is exact, and a
power of two.
"""

from __future__ import annotations

import numpy as np

from arraylogchain._compiled.loops.compiling import inlined, inner
from arraylogchain._compiled.loops.numbers import (
    INF,
    SAFE,
    TINY,
    any_wide_exp,
    exp,
    log_of,
    power_of_two,
    split,
    two_sum,
)

# What is where in a scale: logarithm, power of two, whether weights are wide.
HIGH, LOW, POWER, WIDE = range(4)
SCALE = 4

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
def largest_finite(x, i):
    """Return the largest of row i, 0 where it is not finite, and whether +inf or NaN is in it."""
    top = -INF
    special = False
    for j in range(x.shape[1]):
        top = x[i, j] if x[i, j] > top else top
        special |= not x[i, j] < INF
    return (0.0 if special or top == -INF else top), special


@inlined
def add_to_scale(scale, shift):
    scale[HIGH], rest = two_sum(scale[HIGH], shift)
    scale[LOW] += rest


@inner
def rescale(m, e, scale):
    """Bring weights into range; make them linear, or wide, where that serves."""
    top, least = -INF, INF
    special = False
    for k in range(len(m)):
        if scale[WIDE] == 0.0:
            m[k], e[k] = split(m[k])
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


@inlined
def bring_into_range(m, e, scale):
    """Rescale weights if they need it."""
    top = 0.0
    for k in range(len(m)):
        top = m[k] if m[k] > top else top
    if scale[WIDE] != 0.0 or not 1 / LARGEST <= top <= LARGEST:
        rescale(m, e, scale)


@inner
def load(values, i, in_logs, m, e, scale):
    """Begin with the weights values[i], or their logarithms, as a wide state."""
    top, _ = largest_finite(values, i)
    scale[:] = 0.0
    scale[HIGH] = top if in_logs else 0.0
    scale[WIDE] = 1.0
    for k in range(len(m)):
        m[k], e[k] = any_wide_exp(values[i, k] - top) if in_logs else split(values[i, k])


@inlined
def forward_step(m, e, scale, P, L, shift, flag, bands, s, x, i, scratch):
    """Multiply by matrix s, P[s] or exp(L[s] - shift), and by exp(x[i]). Shifts go to the scale.

    Returns
    -------
    bool
        Whether the step was linear.
    """
    K = len(m)
    unproved = scale[WIDE] != 0.0 or flag & SPECIAL != 0
    if not unproved:
        least = least_sum(m, flag)
        sum_products(m, P, s, bands, scratch)
        top, unproved = largest_finite(x, i)
        wrong, zeros, large, some = 0, 0, 0, 0
        for j in range(K):
            v = scratch[SUMS, j]
            w = v * exp(x[i, j] - top)
            scratch[RESULT, j] = w
            zeros += v == 0.0
            # A sum that is too small or too large, or a weight that is neither normal nor zero.
            out = (v < least) | (v > 2.0**1000) | ((w < TINY) & (x[i, j] > -INF))
            wrong += out & (v != 0.0)
            large += w > LARGEST
            some += w > 1 / LARGEST
        unproved |= wrong > 0
        if zeros > 0 and not unproved and (flag & (LOST | SMALL) or has_small(m)):
            unproved = not are_zeros(m, P, L, s, flag, scratch)
    if unproved:
        wide_product(m, e, scale, P, L, shift, flag, bands, s, scratch)
        weigh(m, e, scale, x, i)
        rescale(m, e, scale)
        return False
    for k in range(K):
        m[k] = scratch[RESULT, k]
    add_to_scale(scale, top)
    add_to_scale(scale, shift)
    if large > 0 or some == 0:
        rescale(m, e, scale)
    return True


@inlined
def backward_step(m, e, scale, P, L, shift, flag, bands, s, x, i, weighed, scratch):
    """Multiply by exp(x[i]), which gives the weighed state, and then by matrix s.

    The weighed state is left in `weighed` if the step is linear, else wide in the scratch. What is
    in range is left to the caller.
    """
    K = len(m)
    unproved = scale[WIDE] != 0.0 or flag & SPECIAL != 0
    if not unproved:
        top, unproved = largest_finite(x, i)
        wrong, zeros = 0, 0
        for k in range(K):
            w = exp(x[i, k] - top) * m[k]
            weighed[k] = w
            wrong += (w < TINY) & (m[k] != 0.0) & (x[i, k] > -INF)
        least = least_sum(weighed, flag)
        sum_products(weighed, P, s, bands, scratch)
        for j in range(K):
            v = scratch[SUMS, j]
            zeros += v == 0.0
            wrong += ((v < least) | (v > 2.0**1000)) & (v != 0.0)
        unproved |= wrong > 0
        if zeros > 0 and not unproved and (flag & (LOST | SMALL) or has_small(weighed)):
            unproved = not are_zeros(weighed, P, L, s, flag, scratch)
    if unproved:
        weigh(m, e, scale, x, i)
        wide_product(m, e, scale, P, L, shift, flag, bands, s, scratch)
        return
    for k in range(K):
        m[k] = scratch[SUMS, k]
    add_to_scale(scale, top)
    add_to_scale(scale, shift)


@inlined
def least_sum(m, flag):
    """Return what sums of products with m have to reach to be proved."""
    least = len(m) * SAFE
    if flag & LOST:
        # What is taken for 0 is at most 2**-1021, and has no part in a sum that rounds it off.
        for k in range(len(m)):
            least += m[k] * 2.0**-967
    return least


@inlined
def sum_products(m, P, s, bands, out):
    """Write m @ P[s] to out[SUMS]: four rows at a time, within their bands."""
    K = len(m)
    b = s if len(bands) > 1 else 0
    for j in range(K):
        out[SUMS, j] = 0.0
    k = 0
    while k + 3 < K:
        m0, m1, m2, m3 = m[k], m[k + 1], m[k + 2], m[k + 3]
        if m0 + m1 + m2 + m3 > 0.0:
            # Loops over unsigned numbers need no check of their sign, and so are vectorised.
            for j in range(np.uint64(bands[b, k, 0]), np.uint64(bands[b, k, 1])):
                pair = m0 * P[s, k, j] + m1 * P[s, k + 1, j]
                out[SUMS, j] += pair + (m2 * P[s, k + 2, j] + m3 * P[s, k + 3, j])
        k += 4
    while k < K:
        for j in range(np.uint64(bands[b, k, 0]), np.uint64(bands[b, k, 1])):
            out[SUMS, j] += m[k] * P[s, k, j]
        k += 1


@inner
def has_small(m):
    """Tell whether a weight is so small that its products with entries may be flushed to zero."""
    small = 0
    for k in range(len(m)):
        small += 0.0 < m[k] < 2.0**-900
    return small > 0


@inner
def are_zeros(m, P, L, s, flag, scratch):
    """Tell whether nothing leads to the states whose sums are 0.

    Of a matrix without small entries nothing else is 0, unless weights are small themselves.
    """
    for j in range(len(m)):
        if scratch[SUMS, j] == 0.0:
            for k in range(len(m)):
                is_open = L[s, k, j] > -INF if flag & LOGS else P[s, k, j] != 0.0
                if is_open and m[k] != 0.0:
                    return False
    return True


@inner
def wide_product(m, e, scale, P, L, shift, flag, bands, s, scratch):
    """Multiply by matrix s in wide numbers; the state before that is left in the scratch."""
    K = len(m)
    as_wide(m, e, scale[WIDE] != 0.0, scratch)
    scale[WIDE] = 1.0
    add_to_scale(scale, shift)
    for j in range(K):
        # Sums relative to their largest exponent so far, and those of infinities and NaN.
        m[j], e[j], scratch[SUMS, j] = 0.0, -INF, 0.0
    b = s if len(bands) > 1 else 0
    for k in range(K):
        if scratch[WEIGHED, k] == 0.0 and not flag & SPECIAL:
            continue
        first, end = bands[b, k, 0], bands[b, k, 1]
        if flag & SPECIAL or not scratch[WEIGHED, k] < INF:
            first, end = 0, K  # infinity times zero is NaN
        for j in range(first, end):
            p, n = any_wide_exp(L[s, k, j] - shift) if flag & LOGS else split(P[s, k, j])
            term = scratch[WEIGHED, k] * p
            n += scratch[WEIGHED_EXPONENTS, k]
            if not term < INF:
                scratch[SUMS, j] += term
            elif term != 0.0 and n > e[j]:
                m[j], e[j] = m[j] * power_of_two(e[j] - n) + term, n
            elif term != 0.0:
                m[j] += term * power_of_two(n - e[j])
    for j in range(K):
        m[j], n = split(m[j])
        e[j] = e[j] + n if m[j] != 0.0 else 0.0
        if scratch[SUMS, j] != 0.0:
            m[j], e[j] = scratch[SUMS, j], 0.0


@inner
def weigh(m, e, scale, x, i):
    """Multiply a state by exp(x[i]); it becomes wide."""
    top, _ = largest_finite(x, i)
    add_to_scale(scale, top)
    for k in range(len(m)):
        if scale[WIDE] == 0.0:
            m[k], e[k] = split(m[k])
        f, n = any_wide_exp(x[i, k] - top)
        m[k] *= f
        e[k] = e[k] + n if 0.0 < m[k] < INF else 0.0
    scale[WIDE] = 1.0


@inner
def column_terms(scratch, P, L, shift, flag, s, j):
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
            p, n = any_wide_exp(L[s, k, j] - shift) if flag & LOGS else split(P[s, k, j])
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
def as_wide(m, e, is_wide, scratch):
    """Write weights to the scratch as a weighed state, wide."""
    for k in range(len(m)):
        if is_wide:
            scratch[WEIGHED, k], scratch[WEIGHED_EXPONENTS, k] = m[k], e[k]
        else:
            scratch[WEIGHED, k], scratch[WEIGHED_EXPONENTS, k] = split(m[k])


@inner
def sum_terms(scratch, top):
    """Return the sum of the wide numbers in the scratch as one."""
    total = 0.0
    for k in range(scratch.shape[1]):
        if scratch[TERMS, k] != 0.0:
            total += scratch[TERMS, k] * power_of_two(scratch[EXPONENTS, k] - top)
    total, n = split(total)
    return total, (n + top if total != 0.0 else 0.0)


@inner
def wide_products(a, a_e, a_wide, b, b_e, b_wide, scratch):
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
def weighted_total(m, e, scale, values, i, in_logs, scratch):
    """Return the log of the sum of all weights, each times values[i]."""
    factors, factors_e, own = np.empty(len(m)), np.empty(len(m)), np.empty(SCALE)
    load(values, i, in_logs, factors, factors_e, own)
    is_wide, too = scale[WIDE] != 0.0, own[WIDE] != 0.0
    top, special = wide_products(m, e, is_wide, factors, factors_e, too, scratch)
    if special != 0.0:
        return special
    total, n = sum_terms(scratch, top)
    high, low = two_sum(scale[HIGH], own[HIGH])
    return log_of(total, n + scale[POWER] + own[POWER], high, low + scale[LOW])
