"""A row's step in logarithms: each sum proved, or computed by itself."""

from __future__ import annotations

import math

from arraylogchain._compiled.compiling import inlined, inner
from arraylogchain._compiled.numbers import INF, exp, exps, largest, log, multiply


@inlined
def _ends(offset, K):
    """Return which columns the diagonal has that is so many to the right of the main one."""
    return (offset, K) if offset > 0 else (0, K + offset)


@inner
def _product_of_diagonals(a, bands, out, top):
    """Do what `log_product` does with a matrix of few diagonals: none has to be proved."""
    offsets, logs = bands
    K = len(a)
    for j in range(K):
        top[j], out[j] = -INF, 0.0
    for d in range(len(offsets)):
        j, end = _ends(offsets[d], K)
        x, own, most = a[j - offsets[d] :], logs[d, j:end], top[j:end]
        for k in range(len(own)):
            most[k] = x[k] + own[k] if x[k] + own[k] > most[k] else most[k]
    for d in range(len(offsets)):
        j, end = _ends(offsets[d], K)
        x, own, most, total = a[j - offsets[d] :], logs[d, j:end], top[j:end], out[j:end]
        for k in range(len(own)):
            total[k] += exp(x[k] + own[k] - most[k])
    for j in range(K):
        out[j] = log(out[j]) + top[j] if top[j] > -INF else -INF


@inlined
def log_entry(F, L, at):
    """Return the logarithm of an entry: what is kept of it, if anything is."""
    if len(L) > 0:
        return L[at]
    return math.log(F[at]) if F[at] > 0.0 else -INF


@inner
def log_product(a, F, L, base, line, is_special, bands, out, sums, u):
    """Write out[j] = log sum_k exp(a[k]) F[k, j].

    Parameters
    ----------
    a : array [K]
        Logarithms.
    F, L, base : array, array, int
        A matrix [K, K] begins there, with a largest entry of about 1, and the logarithms of its
        entries; L is empty where those of F will do.
    line : float
        Sums of at least this have lost to underflow, and to entries of F that were left out, no
        more than their last digit.
    is_special : bool
        Whether entries are infinite, or NaN.
    bands : (offsets [D], logs [D, K])
        Diagonals that are not all 0, by columns; none if there are many.
    sums, u : arrays [K]
    """
    K, top = len(a), largest(a)
    sure = not is_special and -INF < top < INF
    if sure and len(bands[0]) > 0:
        _product_of_diagonals(a, bands, out, u)
        return
    if sure:
        one = min(K, 1)  # Numba would compile another function for a constant
        exps(a, top, u, K)
        multiply(sums, u, F, base, K, one, one)
        for j in range(K):
            out[j] = log(sums[j]) + top
    for j in range(K):
        if not (sure and sums[j] >= line):
            out[j] = _log_sum(a, F, L, base + j, is_special, u)


@inner
def _log_sum(a, F, L, at, is_special, u):
    """Return log sum_k exp(a[k]) F[at + k K] relative to the largest term."""
    K, top, special, total = len(a), -INF, 0.0, 0.0
    for k in range(K):
        u[k] = -INF
        if a[k] != -INF or is_special:
            u[k] = a[k] + log_entry(F, L, at + k * K)
            special += 0.0 if u[k] < INF else u[k]
            top = u[k] if u[k] > top else top
    if special != 0.0:
        return special
    if top == -INF:
        return -INF
    for k in range(K):
        total += math.exp(u[k] - top)
    return top + math.log(total)
