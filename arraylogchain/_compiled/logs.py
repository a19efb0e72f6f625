"""A row's step in logarithms: each sum proved, or computed by itself."""

from __future__ import annotations

import math

import numpy as np

from arraylogchain._compiled.compiling import inlined, inner
from arraylogchain._compiled.numbers import INF, exps, largest, log, multiply, whole_above
from arraylogchain._context import LN2_HIGH, LN2_LOW


@inner
def _product_of_few(a, few, out, tops, u):
    """Do what `log_product` does with a matrix of few entries: none has to be proved."""
    rows, logs = few
    K, D = len(a), len(rows)
    for j in range(K):
        tops[j], out[j] = -INF, 0.0
    for d in range(D):
        for j in range(K):
            term = a[rows[d, j]] + logs[d, j]
            tops[j] = term if term > tops[j] else tops[j]
    for d in range(D):
        for j in range(K):
            u[j] = a[rows[d, j]] + logs[d, j] - tops[j]
        exps(u, 0.0, u, K)
        for j in range(K):
            out[j] += u[j]
    for j in range(K):
        out[j] = log(out[j]) + tops[j] if tops[j] > -INF else -INF


@inlined
def log_entry(F, L, at):
    """Return the logarithm of an entry: what is kept of it, if anything is."""
    if len(L) > 0:
        return L[at]
    return math.log(F[at]) if F[at] > 0.0 else -INF


@inner
def log_product(a, F, L, base, line, is_special, few, out, sums, u):
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
    few : (rows [D, K], logs [D, K])
        Each column's largest entries, all others being 0; none if that takes many.
    sums, u : arrays [K]
    """
    K, top = len(a), largest(a)
    sure = not is_special and -INF < top < INF
    if sure and len(few[0]) > 0:
        _product_of_few(a, few, out, sums, u)
        return
    if sure:
        one = K // K  # Numba would compile another function for a constant
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


@inner
def add_up(x, is_linear, scales):
    """Write the log of the sum of a row's weights, given its shift and power of two."""
    total, top = 0.0, 0.0 if is_linear else whole_above(largest(x))
    for k in range(len(x)):
        total += x[k] if is_linear else math.exp(x[k] - top)
    near, own = math.frexp(total)
    power = scales[1] + own
    scales[2] = (scales[0] + power * LN2_HIGH + (top + np.log(near))) + power * LN2_LOW
