"""Steps of the recursion on the weights of a row's states, each of them proved or taken again.

A state is `m`, `e` [K] and `scale`. As long as it serves, the state is *linear*: weights are m, and
e has no part. Every weight is a normal number, or exactly zero, and so is every factor; so a step
errs by the rounding of its products and sums alone. A sum of K products may lose TINY to underflow
for each of them (a processor that is told to flush takes all of a subnormal number), which is less
than its rounding if the sum is at least K * SAFE: below, and where something overflows, the step is
taken again in *wide* numbers m * 2**e, which have no range to leave. As soon as they fit, weights
are linear again.

Until then, steps keep the exponents as long as they can: m is multiplied by the matrix that
`matrices.make_relative` writes, in the same loops and with the same proofs as linear weights.

What all weights have in common is in `scale`: a logarithm in two parts, whose sum is exact, and a
power of two.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from arraylogchain._compiled.loops.compiling import inlined, inner
from arraylogchain._compiled.loops.matrices import (
    LARGE,
    LOST,
    RELATIVE,
    SMALL,
    SPECIAL,
    is_open,
    make_relative,
    sum_products,
    wide_entry,
)
from arraylogchain._compiled.loops.numbers import (
    INF,
    SAFE,
    TINY,
    any_wide_exp,
    largest_finite,
    log_of,
    power_of_two,
    split,
    two_sum,
)

# What is where in a scale: logarithm, power of two, whether weights are wide.
HIGH, LOW, POWER, WIDE = range(4)
SCALE = 4
# Weights are wide, and the matrix that keeps their exponents is in the scratch.
STEADY = 2.0

# The largest linear weight is kept between 2**-300 and 2**300. Linear weights are made of wide ones
# that span less than 2**1200, the largest being about 2**200 then.
LARGEST = 2.0**300
SPAN = 1200.0
RAISED = 200.0
# Wide weights keep their exponents as long as they are at least
LEAST_WIDE = 2.0**-400
# No sum of products is to be larger.
LARGEST_SUM = 2.0**1000

# Rows of the scratch of a step, [ROWS, K].
SUMS, RESULT, TERMS, EXPONENTS, WEIGHED, WEIGHED_EXPONENTS, OTHERS, OTHERS_EXPONENTS, SAVED = range(
    9
)
ROWS = 9


class State(NamedTuple):
    """Weights m of a row's states, or m * 2**e, and their scale."""

    m: Any
    e: Any
    scale: Any


class Weights(NamedTuple):
    """Weights m, or m * 2**e if they are wide."""

    m: Any
    e: Any
    is_wide: Any


@inlined
def weights_of(state):
    return Weights(state.m, state.e, state.scale[WIDE] != 0.0)


@inlined
def add_to_scale(scale, shift):
    scale[HIGH], rest = two_sum(scale[HIGH], shift)
    scale[LOW] += rest


@inner
def rescale(state):
    """Bring weights into range; make them linear, or wide, where that serves."""
    m, e, scale = state
    top, least = -INF, INF
    special = False
    for k in range(len(m)):
        m[k], e[k] = wide_weight(weights_of(state), k)
        if m[k] != 0.0:
            special |= not m[k] < INF
            top = e[k] if e[k] > top else top
            least = e[k] if e[k] < least else least
    linear = not special and not top - least >= SPAN
    raised = top - RAISED if linear else top
    if top > -INF:
        scale[POWER] += raised
        for k in range(len(m)):
            # Zeros have the exponent that they would have, or the least one.
            e[k] = (e[k] if e[k] > least else least) - raised if m[k] < INF else 0.0
            if linear and m[k] != 0.0:
                m[k] *= power_of_two(e[k])
    scale[WIDE] = 0.0 if linear else 1.0


@inlined
def bring_into_range(state):
    """Rescale weights if they need it."""
    top = 0.0
    for w in state.m:
        top = w if w > top else top
    if state.scale[WIDE] == 1.0 or not 1 / LARGEST <= top <= LARGEST:
        rescale(state)


@inner
def load_wide(values, in_logs, m, e):
    """Write weights, or exponentials of logarithms less a shift, as wide numbers; return it."""
    shift = largest_finite(values)[0] if in_logs else 0.0
    for k in range(len(m)):
        m[k], e[k] = any_wide_exp(values[k] - shift) if in_logs else split(values[k])
    return shift


@inner
def load(values, in_logs, state):
    """Begin with weights, or with their logarithms, as a wide state."""
    state.scale[:] = 0.0
    state.scale[HIGH] = load_wide(values, in_logs, state.m, state.e)
    state.scale[WIDE] = 1.0


@inlined
def matrix_for(state, matrix, room):
    """Return the matrix that takes the numbers m of a state to sums, and what is known of it."""
    scale = state.scale
    if scale[WIDE] == 0.0:
        return matrix.P, matrix.flag
    if scale[WIDE] == STEADY and matrix.is_one:
        return room[3], matrix.flag | RELATIVE
    is_made = make_relative(state.m, state.e, matrix, room[0][ROWS:])
    scale[WIDE] = STEADY if is_made else 1.0
    return room[3], matrix.flag | (RELATIVE if is_made else SPECIAL)


@inlined
def forward_step(state, matrix, x, factors, top, room):
    """Multiply by a matrix, and by exp(x), which is factors * exp(top). Shifts go to the scale.

    Returns
    -------
    bool
        Whether exponents stayed as they were. If not, the state before it is in the scratch, wide.
    """
    m, scale = state.m, state.scale
    scratch = room[0]
    sums, result = scratch[SUMS], scratch[RESULT]
    P, flag = matrix_for(state, matrix, room)
    is_proved = not (flag & (SPECIAL | LARGE) or math.isnan(top))
    odd, some = 0, 0
    if is_proved:
        least = least_sum(len(m), flag)
        sum_products(m, P, matrix.bands, sums)
        for j in range(len(m)):
            v = sums[j]
            w = v * factors[j]
            result[j] = w
            odd += (w < least) | (w > LARGEST)
            some += w > 1 / LARGEST
        is_proved = odd == 0 or (
            are_products(result, sums, x) and are_sums(sums, least, m, matrix, flag)
        )
    if not is_proved:
        wide_product(state, matrix, scratch)
        weigh(state, x)
        rescale(state)
        return False
    for k in range(len(m)):
        m[k] = result[k]
    add_to_scale(scale, top)
    add_to_scale(scale, matrix.shift)
    if odd > 0 or some == 0:
        bring_into_range(state)
    return True


@inlined
def backward_step(state, matrix, x, factors, top, room):
    """Multiply by exp(x), which gives the weighed state, and then by a matrix.

    The weighed state is left in the scratch; what is in range is left to the caller.

    Returns
    -------
    P : array [K, K]
        The matrix that took numbers m of the weighed state to those of the new one.
    is_proved : bool
        Whether there was one, exponents being the same. If not, the weighed state is wide.
    """
    m, scale = state.m, state.scale
    scratch = room[0]
    sums, weighed = scratch[SUMS], scratch[WEIGHED]
    P, flag = matrix_for(state, matrix, room)
    is_proved = not (flag & (SPECIAL | LARGE) or math.isnan(top))
    if is_proved:
        odd = 0
        for k in range(len(m)):
            w = m[k] * factors[k]
            weighed[k] = w
            odd += w < TINY
        least = least_sum(len(m), flag)
        sum_products(weighed, P, matrix.bands, sums)
        for j in range(len(m)):
            odd += sums[j] < least
        is_proved = odd == 0 or (
            are_products(weighed, m, x) and are_sums(sums, least, weighed, matrix, flag)
        )
    if not is_proved:
        weigh(state, x)
        wide_product(state, matrix, scratch)
        return P, False
    for k in range(len(m)):
        m[k] = sums[k]
    add_to_scale(scale, top)
    add_to_scale(scale, matrix.shift)
    return P, True


@inlined
def least_sum(K, flag):
    """Return what sums of K products have to reach to be proved.

    What is taken for 0 is at most 2**-1021 times a weight, which is at most `LARGEST`, and has no
    part in a sum that rounds it off. Weights that have exponents are to stay close to them.
    """
    if flag & RELATIVE:
        return K * LEAST_WIDE
    return K * (LARGEST * 2.0**-967 if flag & LOST else SAFE)


@inner
def are_products(w, v, x):
    """Tell whether all v * exp(x) = w are normal numbers, or zeros for a reason."""
    wrong = 0
    for k in range(len(x)):
        wrong += (w[k] < TINY) & (v[k] != 0.0) & (x[k] > -INF)
    return wrong == 0


@inner
def are_sums(sums, least, m, matrix, flag):
    """Tell whether all sums of m times a matrix are proved, or 0 because nothing leads to a state.

    Of a matrix without small entries nothing else is 0, unless weights are small themselves: their
    products with entries may be flushed to zero.
    """
    wrong, zeros, small = 0, 0, 0
    for j in range(len(m)):
        wrong += (sums[j] < least) & (sums[j] != 0.0)
        zeros += sums[j] == 0.0
        small += (m[j] != 0.0) & (m[j] < 2.0**-900)
    if wrong > 0 or zeros == 0 or not (flag & (LOST | SMALL | RELATIVE) or small > 0):
        return wrong == 0
    for j in range(len(m)):
        if sums[j] == 0.0:
            for k in range(len(m)):
                if m[k] != 0.0 and is_open(matrix, k, j):
                    return False
    return True


@inner
def wide_product(state, matrix, scratch):
    """Multiply by a matrix in wide numbers; the state before that is left in the scratch.

    Sums are taken relative to the largest exponent that leads to a state. What they lose to powers,
    and to entries that are taken for 0 where no exponent is 2**500 times as large, is at most
    2**-521 for each term. Those that this does not prove are taken relative to their largest term.
    """
    m, e, scale = state
    P, bands = matrix.P, matrix.bands
    as_wide(weights_of(state), scratch)
    weights, exponents = scratch[WEIGHED], scratch[WEIGHED_EXPONENTS]
    scale[WIDE] = 1.0
    add_to_scale(scale, matrix.shift)
    special, least = matrix.flag & (SPECIAL | LARGE), -INF
    for k in range(len(m)):
        m[k], e[k] = 0.0, -INF
        special += not weights[k] < INF
        if matrix.flag & LOST and weights[k] > 0.0 and exponents[k] - 500.0 > least:
            least = exponents[k] - 500.0
    for k in range(len(m) if special == 0 else 0):
        if weights[k] > 0.0:
            n = exponents[k]
            for j in range(np.uint64(bands[k, 0]), np.uint64(bands[k, 1])):
                e[j] = n if n > e[j] and P[k, j] != 0.0 else e[j]
    for k in range(len(m) if special == 0 else 0):
        w, n = weights[k], exponents[k]
        for j in range(np.uint64(bands[k, 0]), np.uint64(bands[k, 1])):
            m[j] += w * P[k, j] * power_of_two(n - e[j]) if n <= e[j] else 0.0
    for j in range(len(m)):
        if m[j] >= len(m) * LEAST_WIDE and e[j] >= least:
            m[j], n = split(m[j])
            e[j] += n
        elif special != 0 or e[j] > -INF or matrix.flag & LOST:
            top, infinite = column_terms(matrix, j, scratch)
            m[j], e[j] = sum_terms(scratch, top)
            if infinite != 0.0:
                m[j], e[j] = infinite, 0.0


@inner
def weigh(state, x):
    """Multiply a state by exp(x); it becomes wide."""
    m, e, scale = state
    top, _ = largest_finite(x)
    add_to_scale(scale, top)
    for k in range(len(m)):
        m[k], e[k] = wide_weight(weights_of(state), k)
        f, n = any_wide_exp(x[k] - top)
        m[k] *= f
        e[k] = e[k] + n if m[k] < INF else 0.0
    scale[WIDE] = 1.0


@inner
def as_wide(weights, scratch):
    """Write weights to the scratch as a weighed state, wide."""
    for k in range(len(weights.m)):
        scratch[WEIGHED, k], scratch[WEIGHED_EXPONENTS, k] = wide_weight(weights, k)


@inner
def wide_weight(weights, k):
    """Return a weight as a wide number."""
    m, e = split(weights.m[k])
    return m, (e + weights.e[k] if weights.is_wide else e)


@inner
def column_terms(matrix, j, scratch):
    """Write the products of the weighed state, wide, with column j of a matrix, as wide numbers.

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
        if scratch[WEIGHED, k] != 0.0 or matrix.flag & SPECIAL:
            p, n = wide_entry(matrix, k, j)
            term = scratch[WEIGHED, k] * p
            if not term < INF:
                special += term
            elif term != 0.0:
                n += scratch[WEIGHED_EXPONENTS, k]
                scratch[TERMS, k], scratch[EXPONENTS, k] = term, n
                top = n if n > top else top
    return top, special


@inner
def wide_products(a, b, scratch):
    """Write products of weights as wide numbers to the scratch; return what `column_terms` does."""
    top, special = -INF, 0.0
    for k in range(len(a.m)):
        p, n = wide_weight(a, k)
        q, more = wide_weight(b, k)
        scratch[TERMS, k] = 0.0
        if not p * q < INF:
            special += p * q
        elif p * q != 0.0:
            n += more
            scratch[TERMS, k], scratch[EXPONENTS, k] = p * q, n
            top = n if n > top else top
    return top, special


@inner
def sum_terms(scratch, top):
    """Return the sum of the wide numbers in the scratch as one."""
    total = 0.0
    for k in range(scratch.shape[1]):
        if scratch[TERMS, k] != 0.0:
            total += scratch[TERMS, k] * power_of_two(scratch[EXPONENTS, k] - top)
    total, n = split(total)
    return total, (n + top if total != 0.0 else 0.0)


@inlined
def share_of(k, total, rest, scratch):
    """Return the share of a wide number in the scratch in their sum, total * 2**rest."""
    if scratch[TERMS, k] == 0.0:
        return 0.0
    return scratch[TERMS, k] / total * power_of_two(scratch[EXPONENTS, k] - rest)


@inner
def terms_with(weights, values, in_logs, scratch):
    """Write weights times others, or times exponentials, as wide numbers to the scratch.

    Returns
    -------
    top, special : float
        What `column_terms` returns.
    shift : float
        A logarithm to be added to those of the products.
    """
    others = Weights(scratch[OTHERS], scratch[OTHERS_EXPONENTS], True)
    shift = load_wide(values, in_logs, others.m, others.e)
    top, special = wide_products(weights, others, scratch)
    return top, special, shift


@inner
def weighted_total(state, values, in_logs, scratch):
    """Return the log of the sum of all weights, each times one of `values`."""
    top, special, shift = terms_with(weights_of(state), values, in_logs, scratch)
    if special != 0.0:
        return special
    total, n = sum_terms(scratch, top)
    high, low = two_sum(state.scale[HIGH], shift)
    return log_of(total, n + state.scale[POWER], high, low + state.scale[LOW])
