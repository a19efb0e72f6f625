"""Sums over the posterior of paths: probabilities of states, and of pairs of them.

The backward recursion meets the states that were kept of the forward one. Posterior weights are
normalised at each step by their own sum, so that no scale takes part. Where products of weights may
leave the range, even if exponents are given to one factor, they are taken in wide numbers, pair by
pair.
"""

from __future__ import annotations

import math

import numpy as np

from arraylogchain._compiled.loops.compiling import bits_of, compiled, inlined, inner, number_of
from arraylogchain._compiled.loops.matrices import wide_entry
from arraylogchain._compiled.loops.numbers import INF, ROUNDER, SAFE, join, split
from arraylogchain._compiled.loops.recursion import (
    COTANGENT,
    TO_FINAL,
    TO_INITIAL,
    TO_POTENTIALS,
    TO_TRANSITIONS,
    matrix_of,
    place,
    recall,
    row_of,
    state_of,
    step_backward,
)
from arraylogchain._compiled.loops.steps import (
    LARGEST_SUM,
    SAVED,
    WEIGHED,
    WEIGHED_EXPONENTS,
    Weights,
    as_wide,
    bring_into_range,
    load,
    share_of,
    sum_terms,
    terms_with,
    weigh,
    weights_of,
    wide_products,
    wide_weight,
)

LARGEST_NUMBER = 1.7976931348623157e308


@inlined
def clipped(x):
    x = LARGEST_NUMBER if x > LARGEST_NUMBER else x
    return -LARGEST_NUMBER if x < -LARGEST_NUMBER else x


@inner
def plus_product(x, g, m, e):
    """Return x + g * m * 2**e, kept finite; no part of the product has to be in range itself."""
    size, n = split(g if g > 0.0 else -g)
    product = clipped(join(size * m, n + e))
    return clipped(x + (product if g > 0.0 else -product))


@inlined
def relative(a, b, scratch):
    """Return linear weights such that their products with b.m are in proportion to a * b.

    Where a or b are wide, the largest product is between 1 and 4, and what would not do is NaN.
    """
    if not (a.is_wide or b.is_wide):
        return a
    near, top = scratch[SAVED], 0
    for k in range(len(near)):
        n = (a.e[k] if a.is_wide else 0.0) + (b.e[k] if b.is_wide else 0.0)
        near[k] = n + ROUNDER
        size = bits_of(n + ROUNDER) + (bits_of(a.m[k]) >> 52) + (bits_of(b.m[k]) >> 52)
        top = size if size > top and a.m[k] != 0.0 and b.m[k] != 0.0 else top
    for k in range(len(near)):
        n = bits_of(near[k]) - top + 2046
        m = a.m[k] * number_of(((n if n < 1000 else 1000) + 1023) << 52) if n >= -1022 else 0.0
        fits = n <= 1000 and m <= 2.0**400 and 2.0**52 < near[k] < 2.0**53
        near[k] = (m if fits else math.nan) if a.m[k] != 0.0 and b.m[k] != 0.0 else 0.0
    return Weights(near, near, False)


@inlined
def add_states(a, b, near, g, out, scratch):
    """Add g times the probabilities of states, in proportion to a * b; see `relative`."""
    total = 0.0
    for k in range(len(out)):
        total += near.m[k] * b.m[k]
    if len(out) * SAFE <= total <= LARGEST_SUM:
        inverse = 1 / total
        for k in range(len(out)):
            out[k] += g * (near.m[k] * b.m[k] * inverse)
    else:
        add_wide_states(a, b, g, out, scratch)


@inner
def add_wide_states(a, b, g, out, scratch):
    top, _ = wide_products(a, b, scratch)
    total, rest = sum_terms(scratch, top)
    for k in range(len(out)):
        out[k] += g * share_of(k, total, rest, scratch)


@inner
def add_ends(a, values, in_logs, g, out, scratch):
    """Add g times derivatives by the weights of first or last states, the rest of paths being a."""
    top, _, _ = terms_with(a, values, in_logs, scratch)
    total, rest = sum_terms(scratch, top)
    for k in range(len(out)):
        if in_logs:
            out[k] += g * share_of(k, total, rest, scratch)
        else:
            p, n = wide_weight(a, k)
            out[k] = plus_product(out[k], g, p / total, n - rest)


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
    return 1 / total if in_range and len(a) * SAFE <= total <= LARGEST_SUM else 0.0


@inlined
def add_pairs(a, w, near, matrix, P, is_proved, g, by_weight, out, scratch):
    """Add g times the probabilities of pairs, in proportion to a_k P_jk b_j, to out[j, k].

    b is the weighed state, in the scratch, and w the product of P and b; see `relative` and
    `backward_step`. By weight, derivatives by entries of P are added instead.
    """
    weighed = scratch[WEIGHED]
    inverse = 0.0
    if is_proved and not (by_weight and (a.is_wide or w.is_wide)):
        inverse = inverse_total(near.m, w.m, weighed, g, by_weight)
    if inverse == 0.0:
        if is_proved:
            as_wide(Weights(weighed, w.e, w.is_wide), scratch)
        add_wide_pairs(a, w, matrix, g, by_weight, out, scratch)
        return
    for j in range(len(out)):
        c = g * (weighed[j] * inverse)
        if c != 0.0 and by_weight:
            for k in range(len(out)):
                out[j, k] += c * near.m[k]
        elif c != 0.0:
            for k in range(np.uint64(matrix.bands[j, 0]), np.uint64(matrix.bands[j, 1])):
                out[j, k] += c * near.m[k] * P[j, k]


@inner
def add_wide_pairs(a, w, matrix, g, by_weight, out, scratch):
    """Do what `add_pairs` does, pair by pair; the weighed state is wide."""
    top, _ = wide_products(a, w, scratch)
    total, rest = sum_terms(scratch, top)
    for j in range(len(out)):
        b, b_e = scratch[WEIGHED, j], scratch[WEIGHED_EXPONENTS, j]
        for k in range(len(out)):
            m, n = wide_weight(a, k)
            m, n = m * b, n + b_e - rest
            if not by_weight:
                p, p_e = wide_entry(matrix, j, k)
                m, n = m * p, n + p_e
            if m != 0.0:
                out[j, k] = plus_product(out[j, k], g, m / total, n)


@inner
def add_nan(sums, places, row):
    """Make NaN of the derivatives of a row at some steps."""
    to_x, x_begin, to_P, P_begin, to_initial, to_final = sums
    at_x, at_P, at_initial, at_final = places
    for t in range(row.start, row.stop):
        if len(to_x) > 0:
            to_x[at_x, t - x_begin] = math.nan
        if len(to_P) > 0 and t < row.length - 1:
            to_P[at_P, t - P_begin if to_P.shape[1] > 1 else 0] = math.nan
        if len(to_initial) > 0 and t == 0:
            to_initial[at_initial] = math.nan
        if len(to_final) > 0 and t == row.length - 1:
            to_final[at_final] = math.nan


@compiled
def posterior(block, states, history, totals, cotangents, by_weight, sums):
    """Go back through the steps of a block of rows, whose forward states are in `history`.

    Matrices are transposed. Sums (potentials, step of the first, transitions, step of the first,
    initial, final) are what cotangents times derivatives of `totals` are added to, those by
    transitions transposed; empty ones are not wanted. Derivatives by transitions are by weight, or
    by logarithms. Rows whose total is infinite have no derivatives; where it is NaN, so are they.
    """
    rows, _, _, (_, initial_in_logs, _, final_in_logs), _, room = block
    to_x, x_begin, to_P, P_begin, to_initial, to_final = sums
    maps, scratch = rows[3], room[0]
    for r in range(rows[1]):
        g = cotangents[place(rows, r, maps[COTANGENT])]
        row = row_of(block, r)
        at_x, at_P = place(rows, r, maps[TO_POTENTIALS]), place(rows, r, maps[TO_TRANSITIONS])
        at_initial, at_final = place(rows, r, maps[TO_INITIAL]), place(rows, r, maps[TO_FINAL])
        if g == 0.0 or not math.isfinite(totals[r]):
            if math.isnan(totals[r]):
                add_nan(sums, (at_x, at_P, at_initial, at_final), row)
            continue
        state, first = state_of(states, r), row.stop + 1
        for t in range(row.stop - 1, row.start - 1, -1):
            a = recall(history, r, t)
            if t == row.length - 1:
                load(row.final, final_in_logs, state)
                if len(to_final) > 0:
                    add_ends(a, row.final, final_in_logs, g, to_final[at_final, 0], scratch)
            else:
                first, P, is_proved = step_backward(row, t, state, first, room)
            b = weights_of(state)
            near = relative(a, b, scratch)
            if t < row.length - 1 and len(to_P) > 0:
                out = to_P[at_P, t - P_begin if to_P.shape[1] > 1 else 0]
                matrix = matrix_of(row, t)
                add_pairs(a, b, near, matrix, P, is_proved, g, by_weight, out, scratch)
            if len(to_x) > 0:
                add_states(a, b, near, g, to_x[at_x, t - x_begin], scratch)
            bring_into_range(state)
            if t == 0 and len(to_initial) > 0:
                weigh(state, row.x[0])
                b = weights_of(state)
                add_ends(b, row.initial, initial_in_logs, g, to_initial[at_initial, 0], scratch)
