"""Paths of largest weight, samples of paths, and weights of given paths."""

from __future__ import annotations

import math

import numpy as np

from arraylogchain._compiled.loops.compiling import compiled, inlined, inner, number_of
from arraylogchain._compiled.loops.matrices import LOGS, SPECIAL, four_from
from arraylogchain._compiled.loops.numbers import (
    INF,
    ROUNDER,
    largest_finite,
    log_of,
    power_of_two,
    split,
)
from arraylogchain._compiled.loops.recursion import BATCH, matrix_of, place, recall, row_of
from arraylogchain._compiled.loops.steps import (
    EXPONENTS,
    LARGEST_SUM,
    RESULT,
    SUMS,
    TERMS,
    add_to_scale,
    least_sum,
    terms_with,
)


@inner
def beats(a, b):
    """Tell whether a is larger; NaN is larger than all numbers."""
    return a > b or (math.isnan(a) and not math.isnan(b))


@inner
def log_weight_of(values, k, in_logs):
    return values[k] if in_logs else math.log(values[k])


@inlined
def rounded(x):
    """Return a whole number near x."""
    return (x + ROUNDER) - ROUNDER if -(2.0**50) < x < 2.0**50 else x


@inlined
def largest_sums(m, matrix, out):
    """Write max_k m[k] + P[k, j] to out: four rows at a time, within their bands."""
    K, P, bands = len(m), matrix.P, matrix.bands
    for j in range(K):
        out[j] = -INF
    for k in range(0, K, 4):
        k1, k2, k3 = four_from(k, K)
        m0, m1, m2, m3 = m[k], m[k1], m[k2], m[k3]
        for j in range(np.uint64(bands[k, 0]), np.uint64(bands[k, 1])):
            v0, v1 = m0 + P[k, j], m1 + P[k1, j]
            v2, v3 = m2 + P[k2, j], m3 + P[k3, j]
            v0 = v0 if v0 > v1 else v1
            v2 = v2 if v2 > v3 else v3
            v0 = v0 if v0 > v2 else v2
            out[j] = v0 if v0 > out[j] else out[j]


@inner
def largest_sums_with_nan(m, matrix, out):
    """Do so where there may be NaN, which is larger than all numbers."""
    for j in range(len(m)):
        out[j] = -INF
        for k in range(len(m)):
            if beats(m[k] + matrix.P[k, j], out[j]):
                out[j] = m[k] + matrix.P[k, j]


@inner
def begin_path(row, in_logs, out):
    """Write the logs of initial weights; return whether infinities or NaN are among them."""
    top, special = -INF, False
    for j in range(len(out)):
        v = log_weight_of(row.initial, j, in_logs)
        out[j] = v
        special |= not v < INF
        top = v if v > top else top
    top = 0.0 if special or top == -INF else rounded(top)
    for j in range(len(out)):
        out[j] -= top
    return special


@compiled
def best_weights(block, states, kept, kept_begin):
    """Go forward, keeping for each state the log of the largest weight that leads to it.

    Matrices are logarithms. Whole numbers are taken off, which roundings hardly notice: weights are
    relative to about the largest of their step. States [rows, K + 1], which go on from call to
    call, are such weights, and whether there may be infinities or NaN among them.
    """
    rows, _, _, ends, _, room = block
    sums = room[0][SUMS]
    K = len(sums)
    for r in range(rows[1]):
        row, m = row_of(block, r), states[r]
        for t in range(row.start, row.stop):
            best = kept[r, t - kept_begin]
            if t == 0:
                m[K] = begin_path(row, ends[1], sums)
            else:
                matrix = matrix_of(row, t - 1)
                if m[K] != 0.0 or matrix.flag & SPECIAL:
                    m[K] = 1.0
                    largest_sums_with_nan(m[:K], matrix, sums)
                else:
                    largest_sums(m[:K], matrix, sums)
            x = row.x[t - row.x_begin]
            shift, special = largest_finite(x)
            if special:
                m[K] = 1.0
            shift, top = rounded(shift), -INF
            for j in range(K):
                v = sums[j] + (x[j] - shift)
                sums[j] = v
                top = v if v > top else top
            top = rounded(top) if -INF < top < INF else 0.0
            for j in range(K):
                v = sums[j] - top
                m[j] = v
                best[j] = v


@inlined
def sum_of(weights):
    """Return the sum of weights, in four parts that do not wait for one another."""
    K = len(weights)
    s0, s1, s2, s3, k = 0.0, 0.0, 0.0, 0.0, 0
    while k + 3 < K:
        s0, s1 = s0 + weights[k], s1 + weights[k + 1]
        s2, s3 = s2 + weights[k + 2], s3 + weights[k + 3]
        k += 4
    while k < K:
        s0 += weights[k]
        k += 1
    return (s0 + s1) + (s2 + s3)


@inlined
def draw(weights, limit):
    """Return the first k up to which weights sum up to more than a limit, or the last of any."""
    below, last = 0.0, 0
    for k in range(len(weights)):
        if weights[k] > 0.0:
            below += weights[k]
            last = k
            if below > limit:
                break
    return last


@inner
def draw_wide(top, u, scratch):
    """Draw in proportion to the wide numbers in the scratch."""
    weights = scratch[RESULT]
    for k in range(len(weights)):
        weights[k] = 0.0
        if scratch[TERMS, k] != 0.0:
            weights[k] = scratch[TERMS, k] * power_of_two(scratch[EXPONENTS, k] - top)
    return draw(weights, u * sum_of(weights))


@inner
def draw_before(a, matrix, least, j, u, scratch):
    """Draw the state before state j, the weights of paths up to it being a; P is transposed."""
    weights, total = scratch[RESULT], 0.0
    if not a.is_wide:
        for k in range(len(weights)):
            weights[k] = a.m[k] * matrix.P[j, k]
        total = sum_of(weights)
    if least <= total <= LARGEST_SUM:
        return draw(weights, u * total)
    top, _, _ = terms_with(a, matrix.L[j], matrix.flag & LOGS != 0, scratch)
    return draw_wide(top, u, scratch)


@compiled
def draw_back(block, history, totals, out):
    """Draw paths backward into out [samples, *batch, T], which holds uniform numbers, as bits.

    Matrices are transposed. At a row's last step, -1 - k stands for state k.
    """
    rows, _, _, ends, _, (scratch, _, _, _) = block
    for r in range(rows[1]):
        row, at = row_of(block, r), place(rows, r, rows[3][BATCH])
        for t in range(row.stop - 1, row.start - 1, -1):
            if not math.isfinite(totals[r]):
                out[:, at, t] = 0
                continue
            a = recall(history, r, t)
            if t == row.length - 1:
                top, _, _ = terms_with(a, row.final, ends[3], scratch)
                for i in range(out.shape[0]):
                    u = number_of(out[i, at, t])
                    out[i, at, t] = draw_wide(top, u, scratch) if u >= 0.0 else int(-1.0 - u)
            else:
                matrix = matrix_of(row, t)
                least = least_sum(len(a.m), matrix.flag)
                for i in range(out.shape[0]):
                    j, u = out[i, at, t + 1], number_of(out[i, at, t])
                    out[i, at, t] = draw_before(a, matrix, least, j, u, scratch)


@inner
def begin_weight(w):
    """Make a path's weight 1: a logarithm in two parts, a number with an exponent of its own.

    Behind them, infinities and NaN are summed up as logarithms.
    """
    w[:] = 0.0
    w[2] = 1.0


@inner
def add_log(w, value):
    """Multiply a path's weight by exp(value)."""
    if math.isfinite(value):
        add_to_scale(w, value)
    else:
        w[4] += value


@inner
def add_factor(w, value, in_logs):
    """Multiply a path's weight by a weight, or by its exponential."""
    p, n = split(value)
    if in_logs:
        add_log(w, value)
    elif 0.0 < p < INF:
        w[2], more = split(w[2] * p)
        w[3] += n + more
    else:
        w[4] += -INF if p == 0.0 else p


@inner
def log_of_weight(w):
    return log_of(w[2], w[3], w[0], w[1]) if w[4] == 0.0 else w[4]


@compiled
def trace_back(block, kept, kept_begin, weights, out, logs):
    """Go back along the best paths; write their states to out [*batch, T], and their log weights.

    Of several states the smallest is taken; 0 where no path is possible. What goes on from call to
    call is weights [rows, 6]: see `begin_weight`, and whether there is a path.
    """
    rows, _, _, ends, _, _ = block
    for r in range(rows[1]):
        row, w = row_of(block, r), weights[r]
        path = out[place(rows, r, rows[3][BATCH])]
        for t in range(row.stop - 1, row.start - 1, -1):
            best = kept[r, t - kept_begin]
            largest, state = -INF, 0
            if t == row.length - 1:
                for k in range(len(best)):
                    v = best[k] + log_weight_of(row.final, k, ends[3])
                    if not v <= largest and beats(v, largest):
                        largest, state = v, k
                begin_weight(w)
                w[5] = largest > -INF or math.isnan(largest)
                add_factor(w, row.final[state], ends[3])
            elif w[5] != 0.0:
                matrix, j = matrix_of(row, t), path[t + 1]
                for k in range(len(best)):
                    v = best[k] + matrix.P[k, j]
                    if not v <= largest and beats(v, largest):
                        largest, state = v, k
                add_factor(w, matrix.L[state, j], matrix.flag & LOGS != 0)
            path[t] = state
            add_log(w, row.x[t - row.x_begin, state])
            if t == 0:
                add_factor(w, row.initial[state], ends[1])
                logs[r] = log_of_weight(w) if w[5] != 0.0 else -INF


@compiled
def weights_of_paths(block, states, states_begin, weights, out):
    """Multiply what the steps of a block give to the weights [rows, 5] of paths, one of each row.

    Paths are states [rows, steps]; matrices are as given, logarithms or not. Where a row ends, the
    logarithm of its weight is written.
    """
    rows, _, _, ends, _, _ = block
    for r in range(rows[1]):
        row, path, w = row_of(block, r), states[r], weights[r]
        for t in range(row.start, row.stop):
            k = path[t - states_begin]
            if t == 0:
                begin_weight(w)
                add_factor(w, row.initial[k], ends[1])
            else:
                matrix, before = matrix_of(row, t - 1), path[t - 1 - states_begin]
                add_factor(w, matrix.L[before, k], matrix.flag & LOGS != 0)
            add_log(w, row.x[t - row.x_begin, k])
            if t == row.length - 1:
                add_factor(w, row.final[k], ends[3])
                out[r] = log_of_weight(w)
