"""Paths of largest weight, samples of paths, and weights of given paths."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from arraylogchain._compiled.compiling import Floats, Integers, compiled, inner, number_of
from arraylogchain._compiled.numbers import TINY, log_of, power_of_two, split, two_sum
from arraylogchain._compiled.posterior import as_wide, recall
from arraylogchain._compiled.recursion import (
    BATCH,
    FINAL,
    INITIAL,
    LENGTHS,
    MATRICES,
    POTENTIALS,
    matrices_of,
    place,
)
from arraylogchain._compiled.steps import (
    LOST,
    SCALE,
    SPECIAL,
    column_terms,
    largest_finite,
    load,
    wide_products,
)


@inner
def rounded_largest(x: Floats, i: int) -> tuple[float, bool]:
    """Return the largest of row i as a whole number, and whether +inf or NaN is in it."""
    top, special = largest_finite(x, i)
    return np.rint(top), special


@inner
def beats(a: float, b: float) -> bool:
    """Tell whether a is larger; NaN is larger than all numbers."""
    return a > b or (math.isnan(a) and not math.isnan(b))


@inner
def log_weight_of(values: Floats, k: int, in_logs: bool) -> float:
    return values[0, k] if in_logs else math.log(values[0, k])


@inner
def largest_sums(m: Floats, L: Floats, s: int, bands: Integers, b: int, out: Floats) -> None:
    """Write max_k m[k] + L[s, k] to out[0]: four rows at a time, within their bands."""
    K = len(m)
    for j in range(K):
        out[0, j] = -math.inf
    k = 0
    while k + 3 < K:
        m0, m1, m2, m3 = m[k], m[k + 1], m[k + 2], m[k + 3]
        low = min(
            min(bands[b, k, 0], bands[b, k + 1, 0]), min(bands[b, k + 2, 0], bands[b, k + 3, 0])
        )
        high = max(
            max(bands[b, k, 1], bands[b, k + 1, 1]), max(bands[b, k + 2, 1], bands[b, k + 3, 1])
        )
        for j in range(np.uint64(low), np.uint64(high)):
            v0, v1 = m0 + L[s, k, j], m1 + L[s, k + 1, j]
            v2, v3 = m2 + L[s, k + 2, j], m3 + L[s, k + 3, j]
            v0 = v0 if v0 > v1 else v1
            v2 = v2 if v2 > v3 else v3
            v0 = v0 if v0 > v2 else v2
            out[0, j] = v0 if v0 > out[0, j] else out[0, j]
        k += 4
    while k < K:
        for j in range(np.uint64(bands[b, k, 0]), np.uint64(bands[b, k, 1])):
            v = m[k] + L[s, k, j]
            out[0, j] = v if v > out[0, j] else out[0, j]
        k += 1


@compiled
def best_weights(
    rows: Any,
    potentials: Any,
    matrices: Any,
    ends: Any,
    start: int,
    stop: int,
    best: Floats,
    special: Integers,
    kept: Floats,
    kept_begin: int,
) -> None:
    """Go forward, keeping for each state the log of the largest weight that leads to it.

    Matrices are logarithms. Whole numbers are taken off, which roundings hardly notice: weights are
    relative to about the largest of their step. `special` says whose weights may be infinite or NaN.
    """
    first, count, dims, maps, lengths = rows
    x, x_begin = potentials
    initial, initial_in_logs, _, _ = ends
    K = x.shape[2]
    scratch = np.empty((1, K))
    begin = matrices[5]
    step = 0 if matrices[0].shape[1] == 1 else 1
    for r in range(count):
        q = first + r
        m = best[r]
        own = x[place(q, dims, maps[POTENTIALS])]
        L, _, _, flags, bands = matrices_of(matrices, place(q, dims, maps[MATRICES]))
        given = initial[place(q, dims, maps[INITIAL])]
        for t in range(start, min(stop, lengths[place(q, dims, maps[LENGTHS])])):
            s = step * (t - 1 - begin)
            if t == 0:
                for j in range(K):
                    scratch[0, j] = log_weight_of(given, j, initial_in_logs)
                top, odd = rounded_largest(scratch, 0)
                special[r] = odd
                for j in range(K):
                    scratch[0, j] -= top
            elif special[r] or flags[s] & SPECIAL:
                special[r] = 1
                for j in range(K):
                    scratch[0, j] = -math.inf
                    for k in range(K):
                        if beats(m[k] + L[s, k, j], scratch[0, j]):
                            scratch[0, j] = m[k] + L[s, k, j]
            else:
                largest_sums(m, L, s, bands, min(s, len(bands) - 1), scratch)
            top, odd = rounded_largest(own, t - x_begin)
            special[r] |= odd
            for j in range(K):
                scratch[0, j] += own[t - x_begin, j] - top
            top, _ = rounded_largest(scratch, 0)
            for j in range(K):
                m[j] = scratch[0, j] - top
                kept[r, t - kept_begin, j] = m[j]


@compiled
def trace_back(
    rows: Any,
    matrices: Any,
    ends: Any,
    start: int,
    stop: int,
    kept: Floats,
    kept_begin: int,
    possible: Integers,
    out: Integers,
) -> None:
    """Go back along the best paths, and write their states to out [*batch, T].

    Of several states the smallest is taken. Rows that are found not to be possible stay at 0.
    """
    first, count, dims, maps, lengths = rows
    _, _, final, final_in_logs = ends
    K = kept.shape[2]
    begin = matrices[5]
    step = 0 if matrices[0].shape[1] == 1 else 1
    for r in range(count):
        q = first + r
        at = place(q, dims, maps[BATCH])
        L = matrices_of(matrices, place(q, dims, maps[MATRICES]))[0]
        given = final[place(q, dims, maps[FINAL])]
        length = lengths[place(q, dims, maps[LENGTHS])]
        for t in range(min(stop, length) - 1, start - 1, -1):
            largest, state = -math.inf, 0
            if t == length - 1 or possible[r]:
                s = step * (t - begin)
                for k in range(K):
                    v = kept[r, t - kept_begin, k]
                    if t == length - 1:
                        v += log_weight_of(given, k, final_in_logs)
                    else:
                        v += L[s, k, out[at, t + 1]]
                    if beats(v, largest):
                        largest, state = v, k
            if t == length - 1:
                possible[r] = largest > -math.inf or math.isnan(largest)
            out[at, t] = state


@inner
def draw(weights: Floats, i: int, total: float, u: float) -> int:
    """Return the first k whose sum of weights[i, :k + 1] is above u * total, at the latest the last
    one with a weight."""
    below, last = 0.0, 0
    for k in range(weights.shape[1]):
        if weights[i, k] > 0.0:
            below += weights[i, k]
            last = k
            if below > u * total:
                break
    return last


@inner
def draw_from_wide(top: float, scratch: Floats, u: float) -> int:
    """Do so with the wide numbers in scratch[2] and [3]."""
    total = 0.0
    for k in range(scratch.shape[1]):
        if scratch[2, k] != 0.0:
            scratch[2, k] *= power_of_two(scratch[3, k] - top)
            total += scratch[2, k]
    return draw(scratch, 2, total, u)


@compiled
def draw_back(
    rows: Any,
    matrices: Any,
    ends: Any,
    start: int,
    stop: int,
    history: Any,
    totals: Floats,
    out: Integers,
) -> None:
    """Draw paths backward, out [samples, *batch, T] holding uniform numbers, as bits, until then."""
    first, count, dims, maps, lengths = rows
    _, _, final, final_in_logs = ends
    kept, kept_e, kept_wide, kept_begin = history
    K = kept.shape[2]
    a, a_e, scale = np.empty(K), np.empty(K), np.empty(SCALE)
    wide_a, wide_a_e, b, b_e = np.empty(K), np.empty(K), np.empty(K), np.empty(K)
    scratch = np.empty((4, K))
    begin = matrices[5]
    step = 0 if matrices[0].shape[1] == 1 else 1
    for r in range(count):
        q = first + r
        at = place(q, dims, maps[BATCH])
        P, L, shifts, flags, _ = matrices_of(matrices, place(q, dims, maps[MATRICES]))
        length = lengths[place(q, dims, maps[LENGTHS])]
        for t in range(min(stop, length) - 1, start - 1, -1):
            if not math.isfinite(totals[r]):
                out[:, at, t] = 0
                continue
            is_wide = recall(kept, kept_e, kept_wide, r, t - kept_begin, a, a_e)
            s = step * (t - begin)
            widened = False
            lost = 0.0
            if t < length - 1 and flags[s] & LOST:
                for k in range(K):
                    lost += a[k] * 2.0**-967
            for i in range(out.shape[0]):
                u = number_of(out[i, at, t])
                if t == length - 1:
                    load(final[place(q, dims, maps[FINAL])], final_in_logs, b, b_e, scale)
                    as_wide(a, a_e, is_wide, wide_a, wide_a_e)
                    top, _ = wide_products(wide_a, wide_a_e, b, b_e, scratch)
                    out[i, at, t] = draw_from_wide(top, scratch, u)
                    continue
                j = out[i, at, t + 1]
                if not is_wide:
                    total = 0.0
                    for k in range(K):
                        scratch[0, k] = a[k] * P[s, k, j]
                        total += scratch[0, k]
                    if max(2 * K * TINY, lost) <= total <= 2.0**1000:
                        out[i, at, t] = draw(scratch, 0, total, u)
                        continue
                if not widened:
                    as_wide(a, a_e, is_wide, wide_a, wide_a_e)
                    widened = True
                top, _ = column_terms(wide_a, wide_a_e, P, L, shifts[s], flags[s], s, j, scratch)
                out[i, at, t] = draw_from_wide(top, scratch, u)


@inner
def add_factor(w: Floats, value: float, in_logs: bool) -> None:
    """Multiply a path's weight (high, low, m, e, special) by a weight, or by exp(value)."""
    if in_logs:
        if math.isfinite(value):
            w[0], rest = two_sum(w[0], value)
            w[1] += rest
        else:
            w[4] += value
        return
    p, n = split(value)
    if p == 0.0 or not p < math.inf:
        w[4] += -math.inf if p == 0.0 else p
    else:
        w[2], more = split(w[2] * p)
        w[3] += n + more


@compiled
def weights_of_paths(
    rows: Any,
    potentials: Any,
    matrices: Any,
    in_logs: bool,
    ends: Any,
    start: int,
    stop: int,
    states: Integers,
    states_begin: int,
    weights: Floats,
    out: Floats,
) -> None:
    """Multiply what steps start ... stop - 1 give to the weights [rows, paths, 5] of paths.

    States are [rows, paths, steps]; matrices are as given, logarithms or not. Where a row ends, the
    logarithms of weights are written.
    """
    first, count, dims, maps, lengths = rows
    x, x_begin = potentials
    initial, initial_in_logs, final, final_in_logs = ends
    given, begin = matrices[1], matrices[5]
    step = 0 if given.shape[1] == 1 else 1
    for r in range(count):
        q = first + r
        own = x[place(q, dims, maps[POTENTIALS])]
        P = given[place(q, dims, maps[MATRICES])]
        length = lengths[place(q, dims, maps[LENGTHS])]
        for i in range(states.shape[1]):
            w = weights[r, i]
            for t in range(start, min(stop, length)):
                k = states[r, i, t - states_begin]
                if t == 0:
                    w[:] = 0.0
                    w[2] = 1.0
                    value = initial[place(q, dims, maps[INITIAL]), 0, k]
                    add_factor(w, value, initial_in_logs)
                else:
                    before = states[r, i, t - 1 - states_begin]
                    add_factor(w, P[step * (t - 1 - begin), before, k], in_logs)
                add_factor(w, own[t - x_begin, k], True)
                if t == length - 1:
                    value = final[place(q, dims, maps[FINAL]), 0, k]
                    add_factor(w, value, final_in_logs)
                    out[r, i] = w[4] if w[4] != 0.0 else log_of(w[2], w[3], w[0], w[1])
