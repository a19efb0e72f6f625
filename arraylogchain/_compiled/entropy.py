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
from typing import Any

import numpy as np

from arraylogchain._compiled.compiling import Floats, Integers, compiled, inner
from arraylogchain._compiled.numbers import power_of_two
from arraylogchain._compiled.recursion import (
    FINAL,
    INITIAL,
    LENGTHS,
    MATRICES,
    POTENTIALS,
    matrices_of,
    place,
)
from arraylogchain._compiled.steps import (
    SCALE,
    SPECIAL,
    WIDE,
    add_to_scale,
    column_terms,
    copy,
    load,
    prove,
    rescale,
    sum_products,
    sum_terms,
    weigh,
    wide_products,
    widen,
)


@inner
def entropy_of_terms(H: Floats, top: float, scratch: Floats) -> float:
    """Return sum(p * (H - log p)) for p in proportion to the wide numbers in scratch[2] and [3]."""
    total, rest = sum_terms(scratch, top)
    h = 0.0
    for k in range(len(H)):
        if scratch[2, k] != 0.0:
            p = scratch[2, k] / total * power_of_two(scratch[3, k] - rest)
            if p > 0.0:
                h += p * (H[k] - math.log(p))
    return max(h, 0.0)


@inner
def given_next(
    m: Floats,
    e: Floats,
    scale: Floats,
    H: Floats,
    P: Floats,
    L: Floats,
    shift: float,
    flag: int,
    bands: Integers,
    s: int,
    Q: Floats,
    largest: float,
    sums: Floats,
    means: Floats,
    others: Floats,
    weights: Floats,
    scratch: Floats,
) -> None:
    """Multiply the state by matrix s, and make H that of the next step.

    Q are the products -F log(F / largest) of the matrices' entries.
    """
    K, band = len(m), min(s, len(bands) - 1)
    add_to_scale(scale, shift)
    if scale[WIDE] == 0.0 and not flag & SPECIAL:
        sum_products(m, P, s, bands, band, sums)
        if prove(m, P, L, s, flag, sums):
            top = 0.0
            for k in range(K):
                top = max(top, m[k])
            for k in range(K):
                weights[k] = m[k] * (H[k] - math.log(m[k] / top)) if m[k] > 0.0 else 0.0
            sum_products(weights, P, s, bands, band, means)
            sum_products(m, Q, s, bands, band, others)
            for j in range(K):
                H[j] = 0.0
                if sums[0, j] > 0.0:
                    h = (means[0, j] + others[0, j]) / sums[0, j]
                    H[j] = max(h + math.log(sums[0, j] / top / largest), 0.0)
            copy(sums, 0, m)
            return
    widen(m, e, scale)
    for j in range(K):
        top, special = column_terms(m, e, P, L, shift, flag, s, j, scratch)
        means[0, j] = special
        others[0, j] = 0.0
        weights[j] = 0.0
        if special == 0.0 and top > -math.inf:
            means[0, j], others[0, j] = sum_terms(scratch, top)
            weights[j] = entropy_of_terms(H, top, scratch)
    copy(means, 0, m)
    copy(others, 0, e)
    H[:] = weights


@compiled
def entropies(
    rows: Any,
    potentials: Any,
    matrices: Any,
    logs: Any,
    ends: Any,
    start: int,
    stop: int,
    states: Any,
    out: Floats,
) -> None:
    """Go through steps start ... stop - 1 of rows; states (m, e, scale, H) go on from call to call.

    Where a row ends, its entropy is written: 0 if it has no path, NaN if its weights are infinite.
    """
    first, count, dims, maps, lengths = rows
    x, x_begin = potentials
    initial, initial_in_logs, final, final_in_logs = ends
    Q, tops = logs
    K = x.shape[2]
    scratch = np.empty((4, K))
    sums, means, others = np.empty((1, K)), np.empty((1, K)), np.empty((1, K))
    weights = np.empty(K)
    final_m, final_e, final_scale = np.empty(K), np.empty(K), np.empty(SCALE)
    begin = matrices[5]
    step = 0 if Q.shape[1] == 1 else 1
    for r in range(count):
        q = first + r
        m, e, scale, H = states[0][r], states[1][r], states[2][r], states[3][r]
        own = x[place(q, dims, maps[POTENTIALS])]
        g = place(q, dims, maps[MATRICES])
        P, L, shifts, flags, bands = matrices_of(matrices, g)
        own_Q, own_tops = Q[g], tops[g]
        length = lengths[place(q, dims, maps[LENGTHS])]
        for t in range(start, min(stop, length)):
            if t == 0:
                load(initial[place(q, dims, maps[INITIAL])], initial_in_logs, m, e, scale)
                H[:] = 0.0
            else:
                s = step * (t - 1 - begin)
                given_next(
                    m,
                    e,
                    scale,
                    H,
                    P,
                    L,
                    shifts[s],
                    flags[s],
                    bands,
                    s,
                    own_Q,
                    own_tops[s],
                    sums,
                    means,
                    others,
                    weights,
                    scratch,
                )
            weigh(m, e, scale, own, t - x_begin, scratch)
            rescale(m, e, scale)
        if start < length <= stop:
            load(final[place(q, dims, maps[FINAL])], final_in_logs, final_m, final_e, final_scale)
            widen(m, e, scale)
            top, special = wide_products(m, e, final_m, final_e, scratch)
            if special != 0.0:
                out[r] = math.nan
            else:
                out[r] = entropy_of_terms(H, top, scratch) if top > -math.inf else 0.0
