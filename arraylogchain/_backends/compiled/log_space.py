"""A row's step in logarithms: each sum proved, or computed by itself."""

from __future__ import annotations

import math

import numpy as np

from arraylogchain._core.scaled import LN2_HIGH, LN2_LOW
from arraylogchain._numba.compiling import inlined, inner
from arraylogchain._numba.elementary import INF, exp, exps, integer_shift, log, max_or_nan
from arraylogchain._numba.intrinsics import view
from arraylogchain._numba.vector_sums import multiply


@inner
def _sparse_log_product(a, sparse, maxima, sums):
    """Replace a[j] by log sum_k exp(a[k]) F[k, j], given the sparse columns of F.

    Each sum is relative to its own largest term, so that none has to be certified.
    """
    (starts, numbers, _, rows, _, logs, terms), K = sparse, len(a)
    for c in range(K):
        maxima[c], sums[c] = -INF, 0.0
    for p in range(len(terms)):
        terms[p] = a[rows[p]] + logs[p]
    for d in range(len(starts) - 1):
        layer = view(terms, starts[d], (starts[d + 1] - starts[d],))
        for c in range(len(layer)):
            maxima[c] = layer[c] if layer[c] > maxima[c] else maxima[c]
    for d in range(len(starts) - 1):
        layer = view(terms, starts[d], (starts[d + 1] - starts[d],))
        for c in range(len(layer)):
            # -inf less -inf is NaN, of which `exp` returns 0.
            sums[c] += exp(layer[c] - maxima[c])
    for c in range(K):
        sums[c] = log(sums[c]) + maxima[c] if maxima[c] > -INF else -INF
    for c in range(K):
        a[numbers[c]] = sums[c]


@inlined
def log_entry(F, L, at):
    """Return the logarithm of an entry of F: that of L, if logarithms are stored."""
    if len(L) > 0:
        return L[at]
    return math.log(F[at]) if F[at] > 0.0 else -INF


@inner
def log_product(a, prepared, n, new, sums, u):
    """Replace a[j] by log sum_k exp(a[k]) F[k, j], where F is the matrix n.

    Parameters
    ----------
    a : array [K]
        Logarithms.
    prepared : recursion.PreparedMatrices
    n : int
    new, sums, u : arrays [K]
        Scratch.
    """
    F, L = prepared.matrices.weights, prepared.matrices.logs
    threshold, is_special = prepared.bounds.log_threshold, prepared.bounds.is_special
    K, top = len(a), max_or_nan(a)
    base, is_certified = n * K * K, not is_special and -INF < top < INF
    if is_certified and len(prepared.columns.rows) > 0:
        _sparse_log_product(a, prepared.columns, sums, u)
        return
    if is_certified:
        one = K // K  # Numba would compile another function for a constant
        exps(a, top, u, K)
        multiply(sums, u, F, base, K, one, one)
        for j in range(K):
            new[j] = log(sums[j]) + top
    for j in range(K):
        if not (is_certified and sums[j] >= threshold):
            new[j] = _log_sum(a, F, L, base + j, is_special, u)
    for j in range(K):
        a[j] = new[j]


@inner
def _log_sum(a, F, L, at, is_special, u):
    """Return log sum_k exp(a[k]) F[at + k K], computed relative to the largest term."""
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
def write_log_sum(x, is_linear, scales):
    """Write the log of the sum of a row's weights, given its shift and power of two."""
    total, top = 0.0, 0.0 if is_linear else integer_shift(max_or_nan(x))
    for k in range(len(x)):
        total += x[k] if is_linear else math.exp(x[k] - top)
    mantissa, binary_exponent = math.frexp(total)
    exponent = scales[1] + binary_exponent
    scales[2] = (scales[0] + exponent * LN2_HIGH + (top + np.log(mantissa))) + exponent * LN2_LOW
