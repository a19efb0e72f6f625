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

from arraylogchain._compiled.loops.compiling import compiled, inner
from arraylogchain._compiled.loops.matrices import sum_products
from arraylogchain._compiled.loops.numbers import log_of, split
from arraylogchain._compiled.loops.recursion import (
    MATRICES,
    begin_row,
    matrix_of,
    place,
    row_of,
    state_of,
    step_forward,
)
from arraylogchain._compiled.loops.steps import (
    RESULT,
    SAVED,
    SUMS,
    WEIGHED,
    as_wide,
    column_terms,
    share_of,
    sum_terms,
    terms_with,
    weights_of,
)


@inner
def entropy_of_terms(H, top, scratch):
    """Return sum(p * (H - log p)) for p in proportion to the wide numbers in scratch."""
    total, rest = sum_terms(scratch, top)
    h = 0.0
    for k in range(len(H)):
        p = share_of(k, total, rest, scratch)
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
            for k in range(P.shape[2]):
                for j in range(P.shape[2]):
                    top = P[g, s, k, j] if P[g, s, k, j] > top else top
            tops[g, s] = top
            for k in range(P.shape[2]):
                for j in range(P.shape[2]):
                    p = P[g, s, k, j]
                    Q[g, s, k, j] = -p * log_ratio(p, top, 1.0) if 0.0 < p < math.inf else 0.0


@inner
def linear_entropies(H, matrix, Q, largest, scratch):
    """Make H that of the next step, after a linear step from the weights that were saved.

    Q are the products -F log(F / largest) of the matrix's entries.
    """
    m, sums, weighted, more = scratch[SAVED], scratch[SUMS], scratch[WEIGHED], scratch[RESULT]
    top = 0.0
    for k in range(len(H)):
        top = m[k] if m[k] > top else top
    for k in range(len(H)):
        weighted[k] = m[k] * (H[k] - log_ratio(m[k], top, 1.0)) if m[k] > 0.0 else 0.0
    sum_products(weighted, matrix.P, matrix.bands, H)
    sum_products(m, Q, matrix.bands, more)
    for j in range(len(H)):
        h = 0.0
        if sums[j] > 0.0:
            h = (H[j] + more[j]) / sums[j] + log_ratio(sums[j], top, largest)
        H[j] = h if h > 0.0 else 0.0


@inner
def wide_entropies(H, matrix, scratch):
    """Make H that of the next step, the state before being in the scratch, wide."""
    new = scratch[RESULT]
    for j in range(len(H)):
        top, special = column_terms(matrix, j, scratch)
        is_sum = special == 0.0 and top > -math.inf
        new[j] = entropy_of_terms(H, top, scratch) if is_sum else 0.0
    for j in range(len(H)):
        H[j] = new[j]


@compiled
def entropies(block, logs, states, entropies_of_states, out):
    """Go through the steps of a block; entropies of states [rows, K] go on from call to call.

    `logs` is what `surprisals` writes. Where a row ends, its entropy is written: 0 if it has no
    path, NaN if its weights are infinite.
    """
    rows, _, matrices, ends, _, room = block
    Q, tops = logs
    scratch, begin = room[0], matrices[5]
    for r in range(rows[1]):
        row, state = row_of(block, r), state_of(states, r)
        first = row.start - len(room[2])
        H, g = entropies_of_states[r], place(rows, r, rows[3][MATRICES])
        for t in range(row.start, row.stop):
            if t == 0:
                begin_row(row, ends[1], state)
                H[:] = 0.0
                continue
            for k in range(len(H)):
                scratch[SAVED, k] = state.m[k]
            before = weights_of(state)
            if before.is_wide:
                as_wide(before, scratch)
            matrix = matrix_of(row, t - 1)
            first, is_steady = step_forward(row, t, state, first, room)
            if is_steady and not before.is_wide:
                s = t - 1 - begin if tops.shape[1] > 1 else 0
                linear_entropies(H, matrix, Q[g, s], tops[g, s], scratch)
            else:
                wide_entropies(H, matrix, scratch)
        if row.start < row.length == row.stop:
            top, special, _ = terms_with(weights_of(state), row.final, ends[3], scratch)
            out[r] = entropy_of_terms(H, top, scratch) if top > -math.inf else 0.0
            if special != 0.0:
                out[r] = math.nan
