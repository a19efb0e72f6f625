"""Best paths and samples: forward with the largest of terms, and the walks back."""

from __future__ import annotations

import math

from arraylogchain._backends.compiled.linear_space import (
    LINEAR,
    Scratch,
    Segment,
    copy_rows,
    matrix_index,
    num_active,
    split_potentials,
)
from arraylogchain._backends.compiled.log_space import log_entry
from arraylogchain._backends.compiled.matrices import SparseColumns, entry_of_column, num_entries
from arraylogchain._numba import elementary
from arraylogchain._numba.compiling import compiled, inlined, inner
from arraylogchain._numba.elementary import INF, exp, integer_shift, max_or_nan, subtract_row_max
from arraylogchain._numba.intrinsics import view
from arraylogchain._numba.vector_sums import maximize, maximize_sparse


@compiled
def max_product(x, matrices, sparse, lengths, carry, updated, scratch, first):
    """Advance all rows by one segment, with maxima instead of sums.

    Parameters
    ----------
    x, lengths, carry, first
        See `recursion.advance`. The carry becomes logarithms; that of the first segment may be
        linear weights.
    matrices : (array, L, shifts, place)
        Logarithms L of weights [n, K, K], flat, less integers [n], and the fields of a
        `MatrixPlace`. The first array is not read.
    sparse : tuple
        As for `recursion.advance`, without weights.
    updated : array [S, G, K * R], or [2, 1, K * R]
        Updated messages of the steps, if they are stored. The rounding errors of adding potentials
        are added after a row's maximum is subtracted, as that may cancel most of a sum.
    scratch : arrays [B + 4, K * R], flat, and [B + 3, R]
    """
    _, L, matrix_shifts, place = matrices
    sparse, scratch = SparseColumns(*sparse), Scratch(*scratch)
    weights, scales, forms = carry
    (G, R, S, K), (factors, x_shifts) = x.shape, scratch
    B, is_special = len(x_shifts) - 3, elementary.count_special(L) > 0
    for g in range(G):
        # S - S is 0 and S < 0 is False, but not literals; see `recursion.enter_linear_space`.
        segment = Segment(x[g], lengths[g], first, S - S, S, S < 0, g)
        rows, shift, gl = weights[g], scales[0, g], g % updated.shape[1]
        m, lost = view(factors, B * K * R, (K * R,)), view(factors, (B + 1) * K * R, (K * R,))
        row_max = x_shifts[B]
        for r in range(R):
            if forms[g, r] == LINEAR:
                scales[1, g, r] += elementary.write_logs(rows[r])
            top = integer_shift(max_or_nan(rows[r]))
            shift[r] += top
            for k in range(K):
                m[k * R + r] = rows[r, k] - top
        for t in range(first, first + S):
            i = (t - first) % B
            if i == 0:
                count = B if t + B < first + S else first + S - t
                split_potentials(segment, t - first, count, scratch)
            out, f = updated[(t - first) % len(updated), gl], view(factors, i * K * R, (K * R,))
            moved = num_active(lengths[g], t) if t > 0 else 0
            n = matrix_index(place, g, t, False)
            if moved > 0:
                if len(sparse.rows) > 0:
                    maximize_sparse(out, m, sparse, R, moved)
                else:
                    maximize(out, m, L, n * K * K, K, R, moved)
                if is_special or elementary.count_special(m) > 0:
                    _write_nan(out, m, L, n * K * K, K, R, moved)
            copy_rows(out, m, R, moved)
            for j in range(K * R):
                total = out[j] + f[j]
                from_f = total - out[j]
                lost[j] = (out[j] - (total - from_f)) + (f[j] - from_f)
                out[j] = total
            subtract_row_max(out, R, row_max)
            for j in range(K * R):
                out[j] += lost[j] if -INF < lost[j] < INF else 0.0
            for r in range(R):
                shift[r] += x_shifts[i, r] + row_max[r] + (matrix_shifts[n] if r < moved else 0.0)
            m = out
        for r in range(R):
            for k in range(K):
                rows[r, k] = m[k * R + r]


@inner
def _write_nan(out, m, P, base, K, R, moved):
    """Write NaN where one of the terms of a maximum is NaN."""
    for i in range(K * K):
        for r in range(moved):
            w = m[i // K * R + r] + P[base + i]
            if w != w:
                out[i % K * R + r] = w


@compiled
def backtrace(updated, matrices, sparse, lengths, states, first):
    """Write the states of best paths, [S + 1, G, R, 1], given the last states.

    Parameters
    ----------
    updated : array [S, G, K * R]
        Updated messages that `max_product` stored.
    matrices, sparse : tuple
        From each step to the next; see `max_product`.
    """
    _, L, _, place = matrices
    sparse = SparseColumns(*sparse)
    (S, G, _), R = updated.shape, states.shape[2]
    K = updated.shape[2] // R
    for g in range(G):
        for i in range(S - 1, -1, -1):
            base = matrix_index(place, g, first + i, True) * K * K
            logs, moved = view(L, base, (K * K,)), num_active(lengths[g], first + i + 1)
            for r in range(R):
                j = states[i + 1, g, r, 0]
                if r < moved:
                    j = _came_from(updated[i, g], r, R, logs, sparse, j)
                states[i, g, r, 0] = j


@inlined
def _came_from(m, r, R, L, columns, j):
    """Return the first k of the largest m[k] + L[k, j]; rows with NaN have no path to trace."""
    # Without branches, which are guessed wrong.
    largest, argmax, K = -INF, 0, len(m) // R
    for n in range(num_entries(columns, j, K)):
        k, log = entry_of_column(columns, L, j, n, K)
        w = m[k * R + r] + log
        argmax, largest = k if w > largest else argmax, w if w > largest else largest
    return argmax


@compiled
def sampling_backtrace(
    updated, is_log, matrices, threshold, lengths, uniforms, states, scratch, first
):
    """Write the states of samples, [S + 1, G, R, n], given the last states.

    Parameters
    ----------
    updated : array [S, G, K * R]
        Updated messages that `recursion.advance` stored.
    is_log : array [G, R]
        Whether the messages of a row are logarithms.
    matrices : tuple
        The fields of `recursion.Matrices`, from each step to the next, [from, to].
    threshold : float
        Smallest sum of linear weights that the entries left out of F cannot affect.
    uniforms : array [S, G, R, n]
    scratch : array [K]
    """
    F, L, _, place = matrices
    (S, G, R, n), K = uniforms.shape, len(scratch)
    for g in range(G):
        for r in range(R):
            is_linear = not is_log[g, r]
            for i in range(S - 1, -1, -1):
                m, is_last = updated[i, g], first + i >= lengths[g, r] - 1
                base = matrix_index(place, g, first + i, True) * K * K
                for s in range(n):
                    j, total = states[i + 1, g, r, s], 0.0
                    if not is_last and is_linear:
                        for k in range(K):
                            scratch[k] = m[k * R + r] * F[base + k * K + j]
                        total = _sum_of(scratch)
                    if not is_last and not total >= threshold:
                        total = _relative_weights(m, F, L, base + j, r, is_linear, scratch)
                    if not is_last:
                        j = _search(scratch, uniforms[i, g, r, s] * total)
                    states[i, g, r, s] = j


@inner
def _relative_weights(m, F, L, at, r, is_linear, out):
    """Write exp(m[k] + log F[at + k K]), relative to the largest; return the sum."""
    K, R = len(out), len(m) // len(out)
    for k in range(K):
        a = m[k * R + r]
        if is_linear:
            a = math.log(a) if a > 0.0 else -INF
        out[k] = a + log_entry(F, L, at + k * K) if a > -INF else -INF
    top = max_or_nan(out)
    is_sum = -INF < top < INF
    for k in range(len(out)):
        out[k] = exp(out[k] - top) if is_sum else 0.0
    return _sum_of(out)


def _sum(x):
    total = 0.0
    for k in range(len(x)):
        total += x[k]
    return total


_sum_of = inner(_sum, fastmath={"contract", "reassoc"}, forceinline=True)


@inlined
def _search(weights, limit):
    """Return the first k up to which weights sum up to more than a limit, or the last of any."""
    below, k, K = 0.0, 0, len(weights)
    while k + 16 < K:
        part = _sum_of(view(weights, k, (16,)))
        if below + part > limit:
            break
        below, k = below + part, k + 16
    while k < K:
        below += weights[k]
        if below > limit:
            return k
        k += 1
    k = K - 1  # by rounding
    while k > 0 and not weights[k] > 0.0:
        k -= 1
    return k
