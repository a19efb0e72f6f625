"""Exponentials, logarithms, maxima and shifts, as loops that are vectorized."""

from __future__ import annotations

import math

import numpy as np

from arraylogchain._numba.compiling import Floats, inlined, inner
from arraylogchain._numba.intrinsics import bits_of, number_of, view

INF = math.inf
_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
# Adding it rounds to the nearest integer, in the lowest bits of the sum.
_ROUNDER = 1.5 * 2.0**52


@inlined
def exp(y):
    """Return exp(y) for y <= 1, and 0 below -708, by a Taylor series about the nearest log of 2^n.

    Numba's own functions are not vectorized, and take five times as long.
    """
    n = y * _LOG2_E + _ROUNDER
    power = number_of((bits_of(n) + 1023) << 52)
    n -= _ROUNDER
    r = (y - n * _LN2_HIGH) - n * _LN2_LOW
    r2 = r * r
    r4 = r2 * r2
    low = (1 / 2 + r * (1 / 6)) + (1 / 24 + r * (1 / 120)) * r2
    middle = (1 / 720 + r * (1 / 5040)) + (1 / 40320 + r * (1 / 362880)) * r2
    high = (1 / 3628800 + r * (1 / 39916800)) + (1 / 479001600 + r * (1 / 6227020800)) * r2
    return (1.0 + (r + r2 * (low + r4 * (middle + r4 * high)))) * power if y >= -708.0 else 0.0


@inner
def exps(x: Floats, shift: float, out: Floats, n: int) -> None:
    """Write exp(x - shift) of the first n entries."""
    for i in range(n):
        out[i] = exp(x[i] - shift)


@inlined
def log(x):
    """Return log(x) of a normal number, as fdlibm does."""
    bits = bits_of(x)
    n = (bits - 0x3FE6A09E667F3BCD) >> 52
    f = number_of(bits - (n << 52)) - 1.0
    s = f / (2.0 + f)
    z, half = s * s, 0.5 * f * f
    w = z * z
    odd_terms = w * (
        0.3999999999940941908 + w * (0.2222219843214978396 + w * 0.1531383769920937332)
    )
    even_terms = 0.2857142874366239149 + w * (0.1818357216161805012 + w * 0.1479819860510658591)
    even_terms = z * (0.6666666666666735130 + w * even_terms)
    return n * _LN2_HIGH - ((half - (s * (half + odd_terms + even_terms) + n * _LN2_LOW)) - f)


@inlined
def power_of_two(n):
    """Return 2**n, -1022 <= n <= 1023."""
    return number_of((n + 1023) << 52)


@inlined
def exponent_of(x):
    """Return n with 2**n <= x < 2**(n + 1), of a normal number."""
    return (bits_of(x) >> 52) - 1023


@inner
def count_special(x: Floats) -> int:
    """Return the number of entries that are +inf or NaN."""
    special = 0
    for k in range(len(x)):
        special += not x[k] < INF
    return special


@inner
def max_or_nan(x: Floats) -> float:
    """Return the largest entry, or NaN if an entry is +inf or NaN."""
    top = -INF
    for k in range(len(x)):
        top = x[k] if x[k] > top else top
    return math.nan if count_special(x) > 0 else top


@inner
def write_logs(x: Floats) -> float:
    """Write the logs of weights over a power of two near the largest; return its exponent.

    So the rounding error of each log depends only on its weight relative to the largest.
    """
    max_exponent = math.frexp(max_or_nan(x))[1]
    for k in range(len(x)):
        mantissa, row = math.frexp(x[k])
        x[k] = (
            math.log(mantissa) + (row - max_exponent) * _LN2_HIGH + (row - max_exponent) * _LN2_LOW
        )
    return max_exponent


@inner
def row_maxima(x: Floats, n: int, out: Floats) -> None:
    """Write the maxima, ignoring NaN, of the first n rows of [K, R], flat."""
    R = len(out)
    for r in range(n):
        out[r] = -INF
    for start in range(0, len(x), R):
        row = view(x, start, (n,))
        for r in range(n):
            out[r] = row[r] if row[r] > out[r] else out[r]


@inlined
def integer_shift(x: float) -> float:
    """Return x rounded up to an integer, or 0 if x is not finite."""
    return np.ceil(x) if -INF < x < INF else 0.0


@inner
def subtract_row_max(x: Floats, n: int, maxima: Floats) -> None:
    """Subtract the maxima, rounded up to integers, from the first n rows of [K, R], flat.

    Write these integers to `maxima`, 0 if a maximum is not finite; write 0 to the other rows and
    their maxima.
    """
    R, top = len(maxima), -INF
    if R == 1 and n == 1:
        for k in range(len(x)):
            top = x[k] if x[k] > top else top
        maxima[0] = top = integer_shift(top)
        for k in range(len(x)):
            x[k] -= top
        return
    row_maxima(x, n, maxima)
    for r in range(R):
        maxima[r] = integer_shift(maxima[r]) if r < n else 0.0
    for start in range(0, len(x), R):
        row = view(x, start, (R,))
        for r in range(R):
            row[r] = row[r] - maxima[r] if r < n else 0.0
