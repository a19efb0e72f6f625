"""Sums over the posterior of paths: probabilities of states, and of pairs of them.

The backward recursion meets the states that were kept of the forward one. Posterior weights are
normalised at each step by their own sum, so that no scale takes part. Where products of linear
weights may leave the range they are taken in wide numbers, pair by pair.
"""

from __future__ import annotations

import math

import numpy as np

from arraylogchain._compiled.loops.compiling import compiled, inlined, inner
from arraylogchain._compiled.loops.numbers import INF, SAFE, any_wide_exp, join, power_of_two, split
from arraylogchain._compiled.loops.recursion import (
    COTANGENT,
    FINAL,
    INITIAL,
    LENGTHS,
    MATRICES,
    POTENTIALS,
    TO_FINAL,
    TO_INITIAL,
    TO_POTENTIALS,
    TO_TRANSITIONS,
    matrices_of,
    place,
)
from arraylogchain._compiled.loops.steps import (
    EXPONENTS,
    LARGE,
    LOGS,
    ROWS,
    SCALE,
    TERMS,
    WEIGHED,
    WEIGHED_EXPONENTS,
    WIDE,
    as_wide,
    backward_step,
    bring_into_range,
    load,
    sum_terms,
    weigh,
    wide_products,
)

LARGEST_NUMBER = 1.7976931348623157e308


@inlined
def clipped(x):
    x = LARGEST_NUMBER if x > LARGEST_NUMBER else x
    return -LARGEST_NUMBER if x < -LARGEST_NUMBER else x


@inlined
def recall(kept, kept_e, kept_wide, r, i, a, a_e):
    """Copy a kept state; return whether it is wide."""
    is_wide = kept_wide[r, i] != 0
    for k in range(len(a)):
        a[k] = kept[r, i, k]
    if is_wide:
        for k in range(len(a)):
            a_e[k] = kept_e[r, i, k]
    return is_wide


@inlined
def add_states(a, a_e, a_wide, b, b_e, b_wide, g, out, i, t, scratch):
    """Add g times the probabilities of states, in proportion to a * b, to out[i, t]."""
    K = len(a)
    total = 0.0
    if not (a_wide or b_wide):
        for k in range(K):
            total += a[k] * b[k]
    if K * SAFE <= total <= 2.0**1000:
        inverse = 1 / total
        for k in range(K):
            out[i, t, k] += g * (a[k] * b[k] * inverse)
    else:
        add_wide_states(a, a_e, a_wide, b, b_e, b_wide, g, out, i, t, scratch)


@inner
def add_wide_states(a, a_e, a_wide, b, b_e, b_wide, g, out, i, t, scratch):
    top, _ = wide_products(a, a_e, a_wide, b, b_e, b_wide, scratch)
    total, rest = sum_terms(scratch, top)
    for k in range(len(a)):
        if scratch[TERMS, k] != 0.0:
            p = scratch[TERMS, k] / total * power_of_two(scratch[EXPONENTS, k] - rest)
            out[i, t, k] += g * p


@inner
def add_ends(a, a_e, a_wide, given, out, scratch, numbers):
    """Add g times derivatives by the weights of first or last states, the rest of paths being a."""
    if len(out) == 0:
        return
    at, in_logs, g, i = numbers
    b, b_e, scale = np.empty(len(a)), np.empty(len(a)), np.empty(SCALE)
    load(given, at, in_logs, b, b_e, scale)
    top, _ = wide_products(a, a_e, a_wide, b, b_e, scale[WIDE] != 0.0, scratch)
    total, rest = sum_terms(scratch, top)
    for k in range(len(a)):
        if in_logs and scratch[TERMS, k] != 0.0:
            p = scratch[TERMS, k] / total * power_of_two(scratch[EXPONENTS, k] - rest)
            out[i, 0, k] += g * p
        elif not in_logs:
            p, n = (a[k], a_e[k]) if a_wide else split(a[k])
            out[i, 0, k] = clipped(out[i, 0, k] + clipped(g * clipped(join(p / total, n - rest))))


@inlined
def inverse_total(a, w, weighed, g, by_weight):
    """Return 1 / sum(a * w), w being what the weighed state became; 0 where that may not do.

    Nothing overflows, as a is at most 2**300 and P at most 2**200; nor does anything vanish that a
    could make large again.
    """
    total, top, least = 0.0, 0.0, INF
    for k in range(len(a)):
        b = weighed[k]
        total += a[k] * w[k]
        top = b if b > top else top
        least = b if 0.0 < b < least else least
    g = g if g > 0.0 else -g
    size = g / total
    all_count = by_weight or g < 2.0**-300
    in_range = top * size <= 2.0**400 and (not all_count or least * size >= 2.0**-700)
    return 1 / total if in_range and len(a) * SAFE <= total <= 2.0**1000 else 0.0


@inlined
def add_pairs(a, a_e, a_wide, w, w_e, w_wide, weighed, P, L, bands, out, scratch, numbers):
    """Add g times the probabilities of pairs, in proportion to a_k P_kj b_j, to out[i, t, j, k].

    b is the weighed state, and w the product of P and b. By weight, derivatives by entries of P are
    added instead.
    """
    _, flag, s, by_weight, g, i, t = numbers
    inverse = 0.0
    if not (a_wide or w_wide or flag & LARGE):
        inverse = inverse_total(a, w, weighed, g, by_weight)
    if inverse == 0.0:
        if not w_wide:
            as_wide(weighed, weighed, w_wide, scratch)
        add_wide_pairs(a, a_e, a_wide, w, w_e, w_wide, P, L, out, scratch, numbers)
        return
    band = s if len(bands) > 1 else 0
    for j in range(len(a)):
        c = g * (weighed[j] * inverse)
        if c != 0.0 and by_weight:
            for k in range(len(a)):
                out[i, t, j, k] += c * a[k]
        elif c != 0.0:
            for k in range(np.uint64(bands[band, j, 0]), np.uint64(bands[band, j, 1])):
                out[i, t, j, k] += c * a[k] * P[s, j, k]


@inner
def add_wide_pairs(a, a_e, a_wide, w, w_e, w_wide, P, L, out, scratch, numbers):
    """Do what `add_pairs` does, pair by pair; the weighed state is in the scratch, wide."""
    shift, flag, s, by_weight, g, i, t = numbers
    top, _ = wide_products(a, a_e, a_wide, w, w_e, w_wide, scratch)
    total, rest = sum_terms(scratch, top)
    for j in range(len(a)):
        b, b_e = scratch[WEIGHED, j], scratch[WEIGHED_EXPONENTS, j]
        for k in range(len(a)):
            m, n = (a[k], a_e[k]) if a_wide else split(a[k])
            m, n = m * b, n + b_e - rest
            if not by_weight:
                p, p_e = any_wide_exp(L[s, j, k] - shift) if flag & LOGS else split(P[s, j, k])
                m, n = m * p, n + p_e
            if m != 0.0:
                value = clipped(g * clipped(join(m / total, n)))
                out[i, t, j, k] = clipped(out[i, t, j, k] + value)


@inner
def add_nan(sums, places, start, stop, length):
    """Make NaN of the derivatives of a row at some steps."""
    to_x, x_begin, to_P, P_begin, to_initial, to_final = sums
    at_x, at_P, at_initial, at_final = places
    for t in range(start, stop if stop < length else length):
        if len(to_x) > 0:
            to_x[at_x, t - x_begin] = math.nan
        if len(to_P) > 0 and t < length - 1:
            to_P[at_P, t - P_begin if to_P.shape[1] > 1 else 0] = math.nan
        if len(to_initial) > 0 and t == 0:
            to_initial[at_initial] = math.nan
        if len(to_final) > 0 and t == length - 1:
            to_final[at_final] = math.nan


@compiled
def posterior(
    rows, potentials, matrices, ends, start, stop, states, history, of_rows, by_weight, sums
):
    """Go back through steps start ... stop - 1 of rows, whose forward states are in `history`.

    Matrices are transposed. Sums (potentials, step of the first, transitions, step of the first,
    initial, final) are what cotangents times derivatives of `totals` are added to, those by
    transitions transposed; empty ones are not wanted. Derivatives by transitions are by weight, or
    by logarithms. Of rows (totals, nan, cotangents) are given: those whose total is infinite have
    no derivatives, and `nan` says which are NaN for an input.
    """
    first, count, dims, maps, lengths = rows
    x, x_begin = potentials
    initial, initial_in_logs, final, final_in_logs = ends
    kept, kept_e, kept_wide, kept_begin = history
    totals, nan, cotangents = of_rows
    to_x, to_x_begin, to_P, to_P_begin, to_initial, to_final = sums
    K, begin = x.shape[2], matrices[5]
    scratch = np.empty((ROWS, K))
    a, a_e, weighed = np.empty(K), np.empty(K), np.empty(K)
    is_each, to_each = matrices[0].shape[1] > 1, to_P.shape[1] > 1
    for r in range(count):
        q = first + r
        g = cotangents[place(q, dims, maps[COTANGENT])]
        length = lengths[place(q, dims, maps[LENGTHS])]
        at_x, at_P = place(q, dims, maps[TO_POTENTIALS]), place(q, dims, maps[TO_TRANSITIONS])
        at_initial, at_final = place(q, dims, maps[TO_INITIAL]), place(q, dims, maps[TO_FINAL])
        if g == 0.0 or not math.isfinite(totals[r]):
            if g != 0.0 and math.isnan(totals[r]) and nan[r] != 0.0:
                add_nan(sums, (at_x, at_P, at_initial, at_final), start, stop, length)
            continue
        m, e, scale = states[0][r], states[1][r], states[2][r]
        own = x[place(q, dims, maps[POTENTIALS])]
        P, L, shifts, flags, bands = matrices_of(matrices, place(q, dims, maps[MATRICES]))
        for t in range((stop if stop < length else length) - 1, start - 1, -1):
            a_wide = recall(kept, kept_e, kept_wide, r, t - kept_begin, a, a_e)
            if t == length - 1:
                numbers = (place(q, dims, maps[FINAL]), final_in_logs, g, at_final)
                load(final, numbers[0], final_in_logs, m, e, scale)
                add_ends(a, a_e, a_wide, final, to_final, scratch, numbers)
            else:
                s, i = t - begin if is_each else 0, t + 1 - x_begin
                flag, shift = flags[s], shifts[s]
                backward_step(m, e, scale, P, L, shift, flag, bands, s, own, i, weighed, scratch)
                is_wide = scale[WIDE] != 0.0
                if len(to_P) > 0:
                    of = (shift, flag, s, by_weight, g, at_P, t - to_P_begin if to_each else 0)
                    add_pairs(
                        a, a_e, a_wide, m, e, is_wide, weighed, P, L, bands, to_P, scratch, of
                    )
            is_wide = scale[WIDE] != 0.0
            if len(to_x) > 0:
                add_states(a, a_e, a_wide, m, e, is_wide, g, to_x, at_x, t - to_x_begin, scratch)
            bring_into_range(m, e, scale)
            if t == 0 and len(to_initial) > 0:
                weigh(m, e, scale, own, t - x_begin)
                numbers = (place(q, dims, maps[INITIAL]), initial_in_logs, g, at_initial)
                add_ends(m, e, scale[WIDE] != 0.0, initial, to_initial, scratch, numbers)
