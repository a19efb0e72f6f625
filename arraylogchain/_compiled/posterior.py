"""Sums over the posterior of paths: probabilities of states, and of pairs of them.

The backward recursion meets the states that were kept of the forward one. Posterior weights are
normalised at each step by their own sum, so that no scale takes part. Where products of linear
weights may leave the range they are taken in wide numbers, pair by pair.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from arraylogchain._compiled.compiling import Floats, Integers, compiled, inner
from arraylogchain._compiled.numbers import TINY, join, power_of_two, split, wide_exp
from arraylogchain._compiled.recursion import (
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
from arraylogchain._compiled.steps import (
    LARGE,
    LOGS,
    NAN,
    POWER,
    SCALE,
    WIDE,
    load,
    multiply,
    rescale,
    sum_terms,
    weigh,
    wide_products,
)

LARGEST_NUMBER = 1.7976931348623157e308


@inner
def as_wide(m: Floats, e: Floats, is_wide: bool, out: Floats, out_e: Floats) -> None:
    """Write weights as wide numbers."""
    for k in range(len(m)):
        if is_wide:
            out[k], out_e[k] = m[k], e[k]
        else:
            out[k], out_e[k] = split(m[k])


@inner
def clipped(x: float) -> float:
    return min(max(x, -LARGEST_NUMBER), LARGEST_NUMBER)


@inner
def add_states(
    a: Floats,
    a_e: Floats,
    a_wide: bool,
    b: Floats,
    b_e: Floats,
    b_wide: bool,
    g: float,
    out: Floats,
    i: int,
    step: int,
    work: Any,
) -> None:
    """Add g times the probabilities of states, in proportion to a * b, to out[i, step]."""
    K = len(a)
    if not (a_wide or b_wide):
        total = 0.0
        for k in range(K):
            total += a[k] * b[k]
        if 2 * K * TINY <= total <= 2.0**1000:
            inverse = 1 / total
            for k in range(K):
                out[i, step, k] += g * (a[k] * b[k] * inverse)
            return
    wide_a, wide_a_e, wide_b, wide_b_e, scratch = work
    as_wide(a, a_e, a_wide, wide_a, wide_a_e)
    as_wide(b, b_e, b_wide, wide_b, wide_b_e)
    top, _ = wide_products(wide_a, wide_a_e, wide_b, wide_b_e, scratch)
    total, rest = sum_terms(scratch, top)
    for k in range(K):
        if scratch[2, k] != 0.0:
            out[i, step, k] += g * (scratch[2, k] / total * power_of_two(scratch[3, k] - rest))


@inner
def add_by_weight(
    a: Floats,
    a_e: Floats,
    power: float,
    b: Floats,
    b_e: Floats,
    g: float,
    out: Floats,
    i: int,
    scratch: Floats,
) -> None:
    """Add g * b / sum(a * b) to out[i, 0], derivatives by weights a * 2**power; all are wide."""
    top, _ = wide_products(a, a_e, b, b_e, scratch)
    total, rest = sum_terms(scratch, top)
    for k in range(len(a)):
        if b[k] != 0.0:
            p = clipped(g * clipped(join(b[k] / total, b_e[k] - rest - power)))
            out[i, 0, k] = clipped(out[i, 0, k] + p)


@inner
def add_pairs(
    a: Floats,
    a_e: Floats,
    a_wide: bool,
    b: Floats,
    b_e: Floats,
    b_wide: bool,
    w: Floats,
    w_e: Floats,
    w_wide: bool,
    P: Floats,
    L: Floats,
    shift: float,
    flag: int,
    bands: Integers,
    s: int,
    by_weight: bool,
    g: float,
    out: Floats,
    i: int,
    step: int,
    work: Any,
) -> None:
    """Add g times the probabilities of pairs, in proportion to a_k P_kj b_j, to out[i, step, j, k].

    w is the product of P and b. By weight, derivatives by entries of P are added instead.
    """
    K = len(a)
    if not (a_wide or b_wide or w_wide or flag & LARGE):
        total, top, least = 0.0, 0.0, math.inf
        for k in range(K):
            total += a[k] * w[k]
            top = max(top, b[k])
            least = b[k] if 0.0 < b[k] < least else least
        # Nothing overflows, as a is at most 2**300 and P at most 2**200; nor does anything vanish
        # that a could make large again.
        size = abs(g) / total
        in_range = top * size <= 2.0**400 and (not by_weight or least * size >= 2.0**-700)
        if 2 * K * TINY <= total <= 2.0**1000 and in_range:
            band = min(s, len(bands) - 1)
            for j in range(K):
                c = g * (b[j] / total)
                if c != 0.0 and by_weight:
                    for k in range(K):
                        out[i, step, j, k] += c * a[k]
                elif c != 0.0:
                    for k in range(np.uint64(bands[band, j, 0]), np.uint64(bands[band, j, 1])):
                        out[i, step, j, k] += c * a[k] * P[s, j, k]
            return
    add_wide_pairs(
        a,
        a_e,
        a_wide,
        b,
        b_e,
        b_wide,
        w,
        w_e,
        w_wide,
        P,
        L,
        shift,
        flag,
        s,
        by_weight,
        g,
        out,
        i,
        step,
        work,
    )


@inner
def add_wide_pairs(
    a: Floats,
    a_e: Floats,
    a_wide: bool,
    b: Floats,
    b_e: Floats,
    b_wide: bool,
    w: Floats,
    w_e: Floats,
    w_wide: bool,
    P: Floats,
    L: Floats,
    shift: float,
    flag: int,
    s: int,
    by_weight: bool,
    g: float,
    out: Floats,
    i: int,
    step: int,
    work: Any,
) -> None:
    """Do what `add_pairs` does, pair by pair."""
    wide_a, wide_a_e, wide_b, wide_b_e, scratch = work
    K = len(a)
    as_wide(a, a_e, a_wide, wide_a, wide_a_e)
    as_wide(w, w_e, w_wide, wide_b, wide_b_e)
    top, _ = wide_products(wide_a, wide_a_e, wide_b, wide_b_e, scratch)
    total, rest = sum_terms(scratch, top)
    as_wide(b, b_e, b_wide, wide_b, wide_b_e)
    for j in range(K):
        for k in range(K):
            m, n = wide_a[k] * wide_b[j], wide_a_e[k] + wide_b_e[j] - rest
            if m != 0.0 and not by_weight:
                if flag & LOGS:
                    p, p_e = wide_exp(L[s, j, k] - shift)
                else:
                    p, p_e = split(P[s, j, k])
                m, n = m * p, n + p_e
            if m != 0.0:
                value = clipped(g * clipped(join(m / total, n)))
                out[i, step, j, k] = clipped(out[i, step, j, k] + value)


@inner
def recall(
    kept: Floats, kept_e: Floats, kept_wide: Any, r: int, i: int, a: Floats, a_e: Floats
) -> bool:
    """Copy a kept state; return whether it is wide."""
    is_wide = kept_wide[r, i] != 0
    for k in range(len(a)):
        a[k] = kept[r, i, k]
        if is_wide:
            a_e[k] = kept_e[r, i, k]
    return is_wide


@inner
def add_nan(sums: Any, places: Any, t: int, length: int) -> None:
    """Make NaN of the derivatives of a row at step t."""
    to_x, x_begin, to_P, P_begin, to_initial, to_final = sums
    at_x, at_P, at_initial, at_final = places
    if len(to_x) > 0:
        to_x[at_x, t - x_begin] = math.nan
    if len(to_P) > 0 and t < length - 1:
        to_P[at_P, 0 if to_P.shape[1] == 1 else t - P_begin] = math.nan
    if len(to_initial) > 0 and t == 0:
        to_initial[at_initial] = math.nan
    if len(to_final) > 0 and t == length - 1:
        to_final[at_final] = math.nan


@inner
def add_ends(
    a: Floats,
    a_e: Floats,
    a_wide: bool,
    given: Floats,
    in_logs: bool,
    g: float,
    out: Floats,
    i: int,
    work: Any,
) -> None:
    """Add derivatives by the weights of the first or the last state, the rest of paths being a."""
    K = len(a)
    b, b_e, scale = np.empty(K), np.empty(K), np.empty(SCALE)
    load(given, in_logs, b, b_e, scale)
    if in_logs:
        add_states(a, a_e, a_wide, b, b_e, True, g, out, i, 0, work)
    else:
        as_wide(a, a_e, a_wide, work[0], work[1])
        add_by_weight(b, b_e, scale[POWER], work[0], work[1], g, out, i, work[4])


@compiled
def posterior(
    rows: Any,
    potentials: Any,
    matrices: Any,
    ends: Any,
    start: int,
    stop: int,
    states: Any,
    history: Any,
    totals: Floats,
    nan: Floats,
    cotangents: Floats,
    by_weight: bool,
    sums: Any,
) -> None:
    """Go back through steps start ... stop - 1 of rows, whose forward states are in `history`.

    Matrices are transposed. Sums (potentials, step of the first, transitions, step of the first,
    initial, final) are what cotangents times derivatives of `totals` are added to, those by
    transitions transposed; empty ones are not wanted. Derivatives by transitions are by weight, or
    by logarithms. Rows whose total is infinite have none; `nan` says which are NaN for an input.
    """
    first, count, dims, maps, lengths = rows
    x, x_begin = potentials
    initial, initial_in_logs, final, final_in_logs = ends
    kept, kept_e, kept_wide, kept_begin = history
    to_x, to_x_begin, to_P, to_P_begin, to_initial, to_final = sums
    K = x.shape[2]
    scratch = np.empty((4, K))
    work = (np.empty(K), np.empty(K), np.empty(K), np.empty(K), scratch)
    a, a_e, b, b_e = np.empty(K), np.empty(K), np.empty(K), np.empty(K)
    begin = matrices[5]
    step = 0 if matrices[0].shape[1] == 1 else 1
    to_step = 0 if to_P.shape[1] == 1 else 1
    for r in range(count):
        q = first + r
        g = cotangents[place(q, dims, maps[COTANGENT])]
        if g == 0.0 or not (math.isfinite(totals[r]) or (math.isnan(totals[r]) and nan[r] != 0.0)):
            continue
        m, e, scale = states[0][r], states[1][r], states[2][r]
        own = x[place(q, dims, maps[POTENTIALS])]
        P, L, shifts, flags, bands = matrices_of(matrices, place(q, dims, maps[MATRICES]))
        length = lengths[place(q, dims, maps[LENGTHS])]
        at_x, at_P = place(q, dims, maps[TO_POTENTIALS]), place(q, dims, maps[TO_TRANSITIONS])
        at_initial, at_final = place(q, dims, maps[TO_INITIAL]), place(q, dims, maps[TO_FINAL])
        for t in range(min(stop, length) - 1, start - 1, -1):
            if math.isnan(totals[r]):
                add_nan(sums, (at_x, at_P, at_initial, at_final), t, length)
                continue
            a_wide = recall(kept, kept_e, kept_wide, r, t - kept_begin, a, a_e)
            if t == length - 1:
                given = final[place(q, dims, maps[FINAL])]
                load(given, final_in_logs, m, e, scale)
                if len(to_final) > 0:
                    add_ends(a, a_e, a_wide, given, final_in_logs, g, to_final, at_final, work)
            else:
                for k in range(K):
                    b[k], b_e[k] = m[k], e[k]
                b_wide = scale[WIDE] != 0.0
                s = step * (t - begin)
                multiply(m, e, scale, P, L, shifts[s], flags[s], bands, s, scratch)
                if len(to_P) > 0:
                    add_pairs(
                        a,
                        a_e,
                        a_wide,
                        b,
                        b_e,
                        b_wide,
                        m,
                        e,
                        scale[WIDE] != 0.0,
                        P,
                        L,
                        shifts[s],
                        flags[s],
                        bands,
                        s,
                        by_weight,
                        g,
                        to_P,
                        at_P,
                        to_step * (t - to_P_begin),
                        work,
                    )
            if len(to_x) > 0:
                add_states(
                    a, a_e, a_wide, m, e, scale[WIDE] != 0.0, g, to_x, at_x, t - to_x_begin, work
                )
            weigh(m, e, scale, own, t - x_begin, scratch)
            rescale(m, e, scale)
            if t == 0 and len(to_initial) > 0:
                given = initial[place(q, dims, maps[INITIAL])]
                is_wide = scale[WIDE] != 0.0
                add_ends(m, e, is_wide, given, initial_in_logs, g, to_initial, at_initial, work)
