"""Best paths and samples: forward with the largest of terms, and the walks back."""

from __future__ import annotations

import math

from arraylogchain._compiled import numbers
from arraylogchain._compiled.compiling import compiled, inlined, inner
from arraylogchain._compiled.logs import log_entry
from arraylogchain._compiled.numbers import INF, bring_near_0, exp, largest, maximise, whole_above
from arraylogchain._compiled.steps import LINEAR, copy_rows, longer, number, take_tops


@compiled
def best(x, matrices, lengths, state, left, room, first):
    """Take groups of rows through a block of steps, with the largest of terms for their sums.

    Parameters
    ----------
    x, lengths, state, first
        See `recursion.advance`. The state becomes logarithms; what a chain begins with may be
        weights.
    matrices : (L, tops, count, sharing, begin)
        Logarithms of weights [n, K, K], flat, less whole numbers [n]; see `recursion.advance`.
    left : array [S, G, K * R], or [2, 1, K * R]
        Those after each step, if they are kept.
    room : arrays [B + 4, K * R], flat, and [B + 3, R]
    """
    L, matrix_tops, per_group, sharing, begin = matrices
    weights, scales, forms = state
    G, R, S, K = x.shape
    B = len(room[1]) - 3
    factors, tops, is_special = room[0], room[1], numbers.count_special(L) > 0
    for g in range(G):
        own, shift, gl = weights[g], scales[0, g], g % left.shape[1]
        m, near = factors[B * K * R :][: K * R], tops[B]
        for r in range(R):
            if forms[g, r] == LINEAR:
                scales[1, g, r] += numbers.write_logs(own[r])
            top = whole_above(largest(own[r]))
            shift[r] += top
            for k in range(K):
                m[k * R + r] = own[r, k] - top
        for t in range(first, first + S):
            i = (t - first) % B
            if i == 0:
                count = B if t + B < first + S else first + S - t
                take_tops(x[g], t - first, count, lengths[g], first, factors, tops)
            out, f = left[(t - first) % len(left), gl], factors[i * K * R : (i + 1) * K * R]
            begun = longer(lengths[g], t) if t > 0 else 0
            n = number(per_group, g // sharing, t, begin, False)
            if begun > 0:
                maximise(out, m, L, n * K * K, K, R, begun)
                if is_special or numbers.count_special(m) > 0:
                    _write_nan(out, m, L, n * K * K, K, R, begun)
            copy_rows(out, m, R, begun)
            for j in range(K * R):
                out[j] += f[j]
            bring_near_0(out, R, near)
            for r in range(R):
                shift[r] += tops[i, r] + near[r] + (matrix_tops[n] if r < begun else 0.0)
            m = out
        for r in range(R):
            for k in range(K):
                own[r, k] = m[k * R + r]


@inner
def _write_nan(out, m, P, base, K, R, begun):
    """Write NaN where one of the terms of a maximum is NaN."""
    for i in range(K * K):
        for r in range(begun):
            w = m[i // K * R + r] + P[base + i]
            if w != w:
                out[i % K * R + r] = w


@compiled
def trace(left, matrices, lengths, states, first):
    """Write the states of best paths, [S + 1, G, R, 1], of which the last are known.

    Parameters
    ----------
    left : array [S, G, K * R]
        What `best` kept.
    matrices : tuple
        Those from each step to the next; see `best`.
    """
    L, _, per_group, sharing, begin = matrices
    (S, G, _), R = left.shape, states.shape[2]
    K = left.shape[2] // R
    for g in range(G):
        for i in range(S - 1, -1, -1):
            base = number(per_group, g // sharing, first + i, begin, True) * K * K
            moves = longer(lengths[g], first + i + 1)
            for r in range(R):
                j = states[i + 1, g, r, 0]
                if r < moves:
                    j = _came_from(left[i, g], r, R, L, base + j, K)
                states[i, g, r, 0] = j


@inlined
def _came_from(m, r, R, P, at, K):
    """Return the first k of the largest m[k] + P[k, j], or of NaN, if there is one."""
    # Without branches, which are guessed wrong.
    most, found = -INF, 0
    for k in range(K):
        w = m[k * R + r] + P[at + k * K]
        is_first = (not w <= most) & (most == most)
        found, most = k if is_first else found, w if is_first else most
    return found


@compiled
def draw(left, in_logs, matrices, line, lengths, uniforms, states, scratch, first):
    """Write the states of samples, [S + 1, G, R, n], of which the last are known.

    Parameters
    ----------
    left : array [S, G, K * R]
        What `advance` kept.
    in_logs : array [G, R]
    matrices : (F, logs, count, sharing, begin)
        Transposed ones from each step to the next; see `recursion.advance`.
    line : float
        The least sum of linear weights to which entries that were left out of F are nothing.
    uniforms : array [S, G, R, n]
    scratch : array [K]
    """
    F, L, per_group, sharing, begin = matrices
    (S, G, R, n), K = uniforms.shape, len(scratch)
    for g in range(G):
        for r in range(R):
            is_linear = not in_logs[g, r]
            for i in range(S - 1, -1, -1):
                m, is_last = left[i, g], first + i >= lengths[g, r] - 1
                base = number(per_group, g // sharing, first + i, begin, True) * K * K
                for s in range(n):
                    j, total = states[i + 1, g, r, s], 0.0
                    if not is_last and is_linear:
                        for k in range(K):
                            scratch[k] = m[k * R + r] * F[base + j * K + k]
                        total = _sum_of(scratch)
                    if not is_last and not total >= line:
                        total = _shares(m, F, L, base + j * K, r, R, is_linear, scratch)
                    if not is_last:
                        j = _search(scratch, uniforms[i, g, r, s] * total)
                    states[i, g, r, s] = j


@inner
def _shares(m, F, L, at, r, R, is_linear, out):
    """Write exp(m + log F), relative to the largest; return the sum."""
    for k in range(len(out)):
        a = m[k * R + r]
        if is_linear:
            a = math.log(a) if a > 0.0 else -INF
        out[k] = a + log_entry(F, L, at + k) if a > -INF else -INF
    top = largest(out)
    is_sum = -INF < top < INF
    for k in range(len(out)):
        out[k] = exp(out[k] - top) if is_sum else 0.0
    return _sum_of(out)


def _add_up(x):
    total = 0.0
    for k in range(len(x)):
        total += x[k]
    return total


_sum_of = inner(_add_up, fastmath={"contract", "reassoc"}, forceinline=True)


@inlined
def _search(weights, limit):
    """Return the first k up to which weights sum up to more than a limit, or the last of any."""
    below, k, K = 0.0, 0, len(weights)
    while k + 16 < K:
        part = _sum_of(weights[k : k + 16])
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
