"""Exponentials, sums with their rounding errors, and numbers with an exponent of their own.

A *wide* number is m * 2**e with m in [0.5, 1) and e a whole number, both of them float64: it has no
range to leave. Zero is m = 0, infinity and NaN are m, all three with e = 0.

Functions are written with few operations and without min, max and the like: each costs Numba some
milliseconds where it occurs, and first calls wait for that.
"""

from __future__ import annotations

import math

from arraylogchain._compiled.loops.compiling import bits_of, inlined, inner, number_of

# Numbers that vector instructions take side by side: 512 bits, in one register or several.
LANES = 8
INF = math.inf
TINY = 2.0**-1022
# Sums of at least this for each term round off what their terms lose to underflow, TINY each where
# the processor flushes it to zero.
SAFE = TINY * 2.0**54
LOG2_E = 1.4426950408889634
# The logarithm of 2 in two parts; whole numbers below 2**21 times the first are exact.
LN2_HIGH = 6.93147180369123816490e-01
LN2_LOW = 1.90821492927058770002e-10
# Added to a number below 2**51 in size, it leaves the nearest whole number in the lowest bits.
ROUNDER = 1.5 * 2.0**52
# Below, exp is no normal number any more.
LEAST_EXPONENT = -708.0


@inlined
def wide_exp(y):
    """Return exp(y) as a wide number, m being in [0.7, 1.5), for abs(y) < 2**50.

    The rest of y, at most log(2) / 2, is taken by a Taylor series that is added up in pairs.
    """
    n = (y * LOG2_E + ROUNDER) - ROUNDER
    r = (y - n * LN2_HIGH) - n * LN2_LOW
    r2 = r * r
    r4 = r2 * r2
    low = (1 / 2 + r * (1 / 6)) + (1 / 24 + r * (1 / 120)) * r2
    middle = (1 / 720 + r * (1 / 5040)) + (1 / 40320 + r * (1 / 362880)) * r2
    high = (1 / 3628800 + r * (1 / 39916800)) + (1 / 479001600 + r * (1 / 6227020800)) * r2
    return 1.0 + (r + r2 * (low + r4 * (middle + r4 * high))), n


@inlined
def exp(y):
    """Return exp(y) for y <= 0, and 0 below `LEAST_EXPONENT`; loops over it are vectorised."""
    m, n = wide_exp(y)
    return m * number_of((bits_of(n + ROUNDER) + 1023) << 52) if y >= LEAST_EXPONENT else 0.0


@inner
def any_wide_exp(y):
    """Return exp(y) as a wide number, whatever y is."""
    if -(2.0**50) < y < 2.0**50:
        return wide_exp(y)
    if -INF < y < INF:  # it is rounded to more than the rest
        return 1.0, y * LOG2_E
    return (0.0 if y == -INF else y), 0.0


@inlined
def power_of_two(n):
    """Return 2**n of a whole number n <= 1023, and 0 where that is no normal number."""
    return number_of((bits_of(n + ROUNDER) + 1023) << 52) if n >= -1022.0 else 0.0


@inner
def split(x):
    """Return x as a wide number; a negative x, which has no logarithm, as NaN."""
    if TINY <= x < INF:
        bits = bits_of(x)
        exponent = (bits >> 52) - 1022
        return number_of(bits - (exponent << 52)), float(exponent)
    if 0.0 < x < TINY:
        bits = bits_of(x * 2.0**60)
        exponent = (bits >> 52) - 1022
        return number_of(bits - (exponent << 52)), float(exponent - 60)
    return (x if x >= 0.0 else math.nan), 0.0


@inner
def join(m, e):
    """Return a wide number m * 2**e as a float64, rounded, or infinite where it is too large."""
    if m == 0.0 or e < -1100.0:
        return 0.0
    if e > 1100.0:
        return INF
    half = int(e) // 2
    return math.ldexp(math.ldexp(m, half), int(e) - half)


@inlined
def two_sum(a, b):
    """Return a + b, and what its rounding left out (Knuth)."""
    s = a + b
    v = s - a
    return s, (a - (s - v)) + (b - v)


@inner
def log_of(m, e, high, low):
    """Return log(m * 2**e) + high + low, rounded about once, however much of it cancels."""
    m, n = split(m)
    if not 0.0 < m < INF:
        return -INF if m == 0.0 else m
    if m < 0.7071067811865476:
        m, n = 2 * m, n - 1
    n += e
    # In two parts, so that products with the higher part of log(2) are exact.
    large = ((n * 2.0**-20 + ROUNDER) - ROUNDER) * 2.0**20
    s, rest = two_sum(high, large * LN2_HIGH)
    s, more = two_sum(s, (n - large) * LN2_HIGH)
    return s + (rest + more + low + n * LN2_LOW + math.log(m))


@inlined
def largest_finite(x):
    """Return the largest of x, 0 where it is not finite, and whether +inf or NaN is in it."""
    top = -INF
    special = False
    for j in range(len(x)):
        top = x[j] if x[j] > top else top
        special |= not x[j] < INF
    return (0.0 if special or top == -INF else top), special


@inner
def exponentials(x, start, stop, factors, tops):
    """Write exp(x[t] - top) for t = start ... stop - 1, top being the largest of x[t].

    It is NaN if +inf or NaN is among them. The exponentials of many short rows in one loop make the
    best of vector instructions.
    """
    n = 0
    for t in range(start, stop):
        top, special = largest_finite(x[t])
        tops[t - start] = math.nan if special else top
        for k in range(x.shape[1]):
            factors[n + k] = x[t, k] - top
        n += x.shape[1]
    for i in range(n):
        factors[i] = exp(factors[i])
