"""The entropy of the posterior over paths, by a forward recursion.

With p(k | j), the probability of a state k if the next one is j,

    H_j = sum_k p(k | j) (H_k - log p(k | j))

is the entropy of the paths up to state j, no term of which is negative. With linear weights u_k,
entries F_kj and S_j = sum_k u_k F_kj, all of them relative to the largest, it is taken from sums
that loops vectorise,

    H_j = sum_k u_k F_kj (H_k - log u_k) / S_j - sum_k u_k F_kj log(F_kj) / S_j + log S_j.
"""

from __future__ import annotations

import math

import numpy as np

from arraylogchain._compiled.loops.compiling import compiled, inner
from arraylogchain._compiled.loops.numbers import log_of, power_of_two, split
from arraylogchain._compiled.loops.recursion import (
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
    ROWS,
    SCALE,
    SUMS,
    TERMS,
    WIDE,
    as_wide,
    column_terms,
    forward_step,
    load,
    rescale,
    sum_products,
    sum_terms,
    weigh,
    wide_products,
)


@inner
def entropy_of_terms(H, top, scratch):
    """Return sum(p * (H - log p)) for p in proportion to the wide numbers in scratch."""
    total, rest = sum_terms(scratch, top)
    h = 0.0
    for k in range(len(H)):
        if scratch[TERMS, k] != 0.0:
            p = scratch[TERMS, k] / total * power_of_two(scratch[EXPONENTS, k] - rest)
            if p > 0.0:
                h += p * (H[k] - math.log(p))
    return h if h > 0.0 else 0.0


@inner
def log_ratio(a, b, c):
    """Return log(a / (b * c)), rounded about once."""
    a, a_e = split(a)
    b, b_e = split(b)
    c, c_e = split(c)
    return log_of(a / (b * c), a_e - b_e - c_e, 0.0, 0.0)


@compiled
def surprisals(P, Q, tops):
    """Write -P * log(P / top) of matrices [groups, steps, K, K], and the largest entries, tops."""
    for g in range(P.shape[0]):
        for s in range(P.shape[1]):
            top = 0.0
            for p in P[g, s].flat:
                top = p if p > top else top
            tops[g, s] = top
            for k in range(P.shape[2]):
                for j in range(P.shape[2]):
                    p = P[g, s, k, j]
                    Q[g, s, k, j] = -p * log_ratio(p, top, 1.0) if 0.0 < p < math.inf else 0.0


@inner
def linear_entropies(m, H, P, Q, largest, bands, s, scratch, work, weights):
    """Make H that of the next step, after a linear step from m by matrix s, with sums in scratch.

    Q are the products -F log(F / largest) of the matrix's entries.
    """
    top = 0.0
    for k in range(len(m)):
        top = m[k] if m[k] > top else top
    for k in range(len(m)):
        weights[k] = m[k] * (H[k] - log_ratio(m[k], top, 1.0)) if m[k] > 0.0 else 0.0
    sum_products(weights, P, s, bands, work)
    for j in range(len(H)):
        H[j] = work[SUMS, j]
    sum_products(m, Q, s, bands, work)
    for j in range(len(H)):
        sums, h = scratch[SUMS, j], 0.0
        if sums > 0.0:
            h = (H[j] + work[SUMS, j]) / sums + log_ratio(sums, top, largest)
        H[j] = h if h > 0.0 else 0.0


@inner
def wide_entropies(H, P, L, shift, flag, s, work):
    """Make H that of the next step, the state before being in work."""
    for j in range(len(H)):
        top, special = column_terms(work, P, L, shift, flag, s, j)
        is_sum = special == 0.0 and top > -math.inf
        work[SUMS, j] = entropy_of_terms(H, top, work) if is_sum else 0.0
    for j in range(len(H)):
        H[j] = work[SUMS, j]


@compiled
def entropies(rows, potentials, matrices, logs, ends, start, stop, states, out):
    """Go through steps start ... stop - 1 of rows; states (m, e, scale, H) go on from call to call.

    Where a row ends, its entropy is written: 0 if it has no path, NaN if its weights are infinite.
    """
    first, count, dims, maps, lengths = rows
    x, x_begin = potentials
    initial, initial_in_logs, final, final_in_logs = ends
    Q, tops = logs
    K = x.shape[2]
    scratch, work = np.empty((ROWS, K)), np.empty((ROWS, K))
    factors, factors_e, factors_scale = np.empty(K), np.empty(K), np.empty(SCALE)
    before, before_e, weights = np.empty(K), np.empty(K), np.empty(K)
    begin = matrices[5]
    is_each = Q.shape[1] > 1
    for r in range(count):
        q = first + r
        m, e, scale, H = states[0][r], states[1][r], states[2][r], states[3][r]
        own = x[place(q, dims, maps[POTENTIALS])]
        g = place(q, dims, maps[MATRICES])
        P, L, shifts, flags, bands = matrices_of(matrices, g)
        own_Q, own_tops = Q[g], tops[g]
        length = lengths[place(q, dims, maps[LENGTHS])]
        end = stop if stop < length else length
        for t in range(start, end):
            i = t - x_begin
            if t == 0:
                load(initial, place(q, dims, maps[INITIAL]), initial_in_logs, m, e, scale)
                weigh(m, e, scale, own, i)
                rescale(m, e, scale)
                H[:] = 0.0
                continue
            s = t - 1 - begin if is_each else 0
            for k in range(K):
                before[k], before_e[k] = m[k], e[k]
            was_wide = scale[WIDE] != 0.0
            if forward_step(m, e, scale, P, L, shifts[s], flags[s], bands, s, own, i, scratch):
                largest = own_tops[s]
                linear_entropies(before, H, P, own_Q, largest, bands, s, scratch, work, weights)
            else:
                as_wide(before, before_e, was_wide, work)
                wide_entropies(H, P, L, shifts[s], flags[s], s, work)
        if start < length <= stop:
            at = place(q, dims, maps[FINAL])
            load(final, at, final_in_logs, factors, factors_e, factors_scale)
            is_wide = scale[WIDE] != 0.0
            too = factors_scale[WIDE] != 0.0
            top, special = wide_products(m, e, is_wide, factors, factors_e, too, scratch)
            out[r] = entropy_of_terms(H, top, scratch) if top > -math.inf else 0.0
            if special != 0.0:
                out[r] = math.nan
