"""Paths of largest weight, samples of paths, and weights of given paths."""

from __future__ import annotations

import math

import numpy as np

from arraylogchain._compiled.loops.compiling import compiled, inlined, inner, number_of
from arraylogchain._compiled.loops.numbers import INF, ROUNDER, SAFE, log_of, power_of_two, split
from arraylogchain._compiled.loops.posterior import recall
from arraylogchain._compiled.loops.recursion import (
    BATCH,
    FINAL,
    INITIAL,
    LENGTHS,
    MATRICES,
    POTENTIALS,
    matrices_of,
    place,
)
from arraylogchain._compiled.loops.steps import (
    EXPONENTS,
    LOST,
    ROWS,
    SCALE,
    SPECIAL,
    TERMS,
    WIDE,
    add_to_scale,
    as_wide,
    column_terms,
    largest_finite,
    load,
    wide_products,
)


@inner
def beats(a, b):
    """Tell whether a is larger; NaN is larger than all numbers."""
    return a > b or (math.isnan(a) and not math.isnan(b))


@inner
def log_weight_of(values, i, k, in_logs):
    return values[i, k] if in_logs else math.log(values[i, k])


@inlined
def rounded(x):
    """Return a whole number near x."""
    return (x + ROUNDER) - ROUNDER if -(2.0**50) < x < 2.0**50 else x


@inlined
def largest_sums(m, L, s, bands, out):
    """Write max_k m[k] + L[s, k] to out[0]: four rows at a time, within their bands."""
    K = len(m)
    b = s if len(bands) > 1 else 0
    for j in range(K):
        out[0, j] = -INF
    k = 0
    while k + 3 < K:
        m0, m1, m2, m3 = m[k], m[k + 1], m[k + 2], m[k + 3]
        for j in range(np.uint64(bands[b, k, 0]), np.uint64(bands[b, k, 1])):
            v0, v1 = m0 + L[s, k, j], m1 + L[s, k + 1, j]
            v2, v3 = m2 + L[s, k + 2, j], m3 + L[s, k + 3, j]
            v0 = v0 if v0 > v1 else v1
            v2 = v2 if v2 > v3 else v3
            v0 = v0 if v0 > v2 else v2
            out[0, j] = v0 if v0 > out[0, j] else out[0, j]
        k += 4
    while k < K:
        m0 = m[k]
        for j in range(np.uint64(bands[b, k, 0]), np.uint64(bands[b, k, 1])):
            v0 = m0 + L[s, k, j]
            out[0, j] = v0 if v0 > out[0, j] else out[0, j]
        k += 1


@inner
def largest_sums_with_nan(m, L, s, out):
    """Do so where there may be NaN, which is larger than all numbers."""
    for j in range(len(m)):
        out[0, j] = -INF
        for k in range(len(m)):
            if beats(m[k] + L[s, k, j], out[0, j]):
                out[0, j] = m[k] + L[s, k, j]


@compiled
def best_weights(rows, potentials, matrices, ends, start, stop, best, special, kept, kept_begin):
    """Go forward, keeping for each state the log of the largest weight that leads to it.

    Matrices are logarithms. Whole numbers are taken off, which roundings hardly notice: weights are
    relative to about the largest of their step. `special` says which rows may have infinities or
    NaN among them.
    """
    first, count, dims, maps, lengths = rows
    x, x_begin = potentials
    initial, initial_in_logs, _, _ = ends
    K = x.shape[2]
    scratch = np.empty((1, K))
    begin = matrices[5]
    is_each = matrices[0].shape[1] > 1
    for r in range(count):
        q = first + r
        m = best[r]
        own = x[place(q, dims, maps[POTENTIALS])]
        L, _, _, flags, bands = matrices_of(matrices, place(q, dims, maps[MATRICES]))
        length = lengths[place(q, dims, maps[LENGTHS])]
        for t in range(start, stop if stop < length else length):
            s = t - 1 - begin if is_each else 0
            if t == 0:
                at, top = place(q, dims, maps[INITIAL]), -INF
                special[r] = 0
                for j in range(K):
                    v = log_weight_of(initial, at, j, initial_in_logs)
                    scratch[0, j] = v
                    special[r] |= not v < INF
                    top = v if v > top else top
                top = 0.0 if special[r] or top == -INF else rounded(top)
                for j in range(K):
                    scratch[0, j] -= top
            elif special[r] or flags[s] & SPECIAL:
                special[r] = 1
                largest_sums_with_nan(m, L, s, scratch)
            else:
                largest_sums(m, L, s, bands, scratch)
            i = t - x_begin
            shift, odd = largest_finite(own, i)
            special[r] |= odd
            shift, top = rounded(shift), -INF
            for j in range(K):
                v = scratch[0, j] + (own[i, j] - shift)
                scratch[0, j] = v
                top = v if v > top else top
            top = rounded(top) if -INF < top < INF else 0.0
            for j in range(K):
                v = scratch[0, j] - top
                m[j] = v
                kept[r, t - kept_begin, j] = v


@compiled
def trace_back(rows, matrices, ends, start, stop, kept, kept_begin, possible, out):
    """Go back along the best paths, and write their states to out [*batch, T].

    Of several states the smallest is taken. Rows that are found not to be possible stay at 0.
    """
    first, count, dims, maps, lengths = rows
    _, _, final, final_in_logs = ends
    K = kept.shape[2]
    begin = matrices[5]
    is_each = matrices[0].shape[1] > 1
    for r in range(count):
        q = first + r
        at = place(q, dims, maps[BATCH])
        L = matrices_of(matrices, place(q, dims, maps[MATRICES]))[0]
        at_final = place(q, dims, maps[FINAL])
        length = lengths[place(q, dims, maps[LENGTHS])]
        for t in range((stop if stop < length else length) - 1, start - 1, -1):
            largest, state = -INF, 0
            if t == length - 1 or possible[r]:
                s = t - begin if is_each else 0
                for k in range(K):
                    v = kept[r, t - kept_begin, k]
                    if t == length - 1:
                        v += log_weight_of(final, at_final, k, final_in_logs)
                    else:
                        v += L[s, k, out[at, t + 1]]
                    if beats(v, largest):
                        largest, state = v, k
            if t == length - 1:
                possible[r] = largest > -INF or math.isnan(largest)
            out[at, t] = state


@inner
def draw(weights, total, u):
    """Return the first k up to which weights sum up to more than u * total, or the last of any."""
    below, last = 0.0, 0
    for k in range(len(weights)):
        if weights[k] > 0.0:
            below += weights[k]
            last = k
            if below > u * total:
                break
    return last


@inner
def draw_wide(top, scratch, weights, u):
    """Draw in proportion to the wide numbers in the scratch."""
    total = 0.0
    for k in range(len(weights)):
        weights[k] = 0.0
        if scratch[TERMS, k] != 0.0:
            weights[k] = scratch[TERMS, k] * power_of_two(scratch[EXPONENTS, k] - top)
            total += weights[k]
    return draw(weights, total, u)


@compiled
def draw_back(rows, matrices, ends, start, stop, history, totals, out):
    """Draw paths backward into out [samples, *batch, T], which holds uniform numbers, as bits."""
    first, count, dims, maps, lengths = rows
    _, _, final, final_in_logs = ends
    kept, kept_e, kept_wide, kept_begin = history
    K = kept.shape[2]
    a, a_e, weights = np.empty(K), np.empty(K), np.empty(K)
    b, b_e, b_scale, scratch = np.empty(K), np.empty(K), np.empty(SCALE), np.empty((ROWS, K))
    begin = matrices[5]
    is_each = matrices[0].shape[1] > 1
    for r in range(count):
        q = first + r
        at = place(q, dims, maps[BATCH])
        P, L, shifts, flags, _ = matrices_of(matrices, place(q, dims, maps[MATRICES]))
        length = lengths[place(q, dims, maps[LENGTHS])]
        for t in range((stop if stop < length else length) - 1, start - 1, -1):
            if not math.isfinite(totals[r]):
                out[:, at, t] = 0
                continue
            is_wide = recall(kept, kept_e, kept_wide, r, t - kept_begin, a, a_e)
            s = t - begin if is_each else 0
            least, top = K * SAFE, -INF
            if t == length - 1:
                load(final, place(q, dims, maps[FINAL]), final_in_logs, b, b_e, b_scale)
                top, _ = wide_products(a, a_e, is_wide, b, b_e, b_scale[WIDE] != 0.0, scratch)
            elif flags[s] & LOST:
                # See `steps.linear_step`.
                for k in range(K):
                    least += a[k] * 2.0**-967
            for i in range(out.shape[0]):
                u = number_of(out[i, at, t])
                if t == length - 1:
                    out[i, at, t] = draw_wide(top, scratch, weights, u)
                    continue
                j = out[i, at, t + 1]
                total = 0.0
                if not is_wide:
                    for k in range(K):
                        weights[k] = a[k] * P[s, k, j]
                        total += weights[k]
                if least <= total <= 2.0**1000:
                    out[i, at, t] = draw(weights, total, u)
                else:
                    as_wide(a, a_e, is_wide, scratch)
                    top, _ = column_terms(scratch, P, L, shifts[s], flags[s], s, j)
                    out[i, at, t] = draw_wide(top, scratch, weights, u)


@inner
def add_factor(w, special, value, in_logs):
    """Multiply a path's weight (high, low, m, e) by a weight, or by exp(value).

    Infinities and NaN are summed up as logarithms apart from that; the sum is returned.
    """
    if in_logs:
        if not math.isfinite(value):
            return special + value
        add_to_scale(w, value)
        return special
    p, n = split(value)
    if not 0.0 < p < INF:
        return special + (-INF if p == 0.0 else p)
    w[2], more = split(w[2] * p)
    w[3] += n + more
    return special


@compiled
def weights_of_paths(
    rows, potentials, matrices, in_logs, ends, start, stop, states, states_begin, weights, out
):
    """Multiply what steps start ... stop - 1 give to the weights [rows, paths, 5] of paths.

    States are [rows, paths, steps]; matrices are as given, logarithms or not. Where a row ends, the
    logarithms of weights are written.
    """
    first, count, dims, maps, lengths = rows
    x, x_begin = potentials
    initial, initial_in_logs, final, final_in_logs = ends
    given, begin = matrices[1], matrices[5]
    is_each = given.shape[1] > 1
    for r in range(count):
        q = first + r
        own = x[place(q, dims, maps[POTENTIALS])]
        P = given[place(q, dims, maps[MATRICES])]
        at_initial, at_final = place(q, dims, maps[INITIAL]), place(q, dims, maps[FINAL])
        length = lengths[place(q, dims, maps[LENGTHS])]
        for i in range(states.shape[1]):
            w = weights[r, i]
            special = w[4]
            for t in range(start, stop if stop < length else length):
                k = states[r, i, t - states_begin]
                if t == 0:
                    w[:] = 0.0
                    w[2] = 1.0
                    special = add_factor(w, 0.0, initial[at_initial, k], initial_in_logs)
                else:
                    before = states[r, i, t - 1 - states_begin]
                    s = t - 1 - begin if is_each else 0
                    special = add_factor(w, special, P[s, before, k], in_logs)
                value = own[t - x_begin, k]
                if math.isfinite(value):
                    add_to_scale(w, value)
                else:
                    special += value
                if t == length - 1:
                    special = add_factor(w, special, final[at_final, k], final_in_logs)
                    out[r, i] = log_of(w[2], w[3], w[0], w[1]) if special == 0.0 else special
            w[4] = special
