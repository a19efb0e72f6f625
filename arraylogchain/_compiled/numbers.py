"""Exponentials, sums with their rounding errors, and numbers with an exponent of their own.

A *wide* number is m * 2**e with m in [0.5, 1) and e a whole number, both of them float64: it has no
range to leave. Zero is m = 0, infinity and NaN are m, all three with e = 0.
"""

from __future__ import annotations

import math

import numpy as np

import numpy as np

from arraylogchain._compiled.compiling import bits_of, inner, number_of

TINY = 2.0**-1022
LOG2_E = 1.4426950408889634
# The logarithm of 2 in two parts; whole numbers below 2**21 times the first are exact.
LN2_HIGH = 6.93147180369123816490e-01
LN2_LOW = 1.90821492927058770002e-10
# Added to a number below 2**51 in size, it leaves the nearest whole number in the lowest bits.
ROUNDER = 1.5 * 2.0**52
# Below, exp is no normal number any more.
LEAST_EXPONENT = -708.0


@inner
def exp_near_zero(r: float) -> float:
    """Return exp(r) for abs(r) <= log(2) / 2, to an ulp: a Taylor series, added up in pairs."""
    r2 = r * r
    r4 = r2 * r2
    low = (1 / 2 + r * (1 / 6)) + (1 / 24 + r * (1 / 120)) * r2
    middle = (1 / 720 + r * (1 / 5040)) + (1 / 40320 + r * (1 / 362880)) * r2
    high = (1 / 3628800 + r * (1 / 39916800)) + (1 / 479001600 + r * (1 / 6227020800)) * r2
    return 1.0 + (r + r2 * (low + r4 * (middle + r4 * high)))


@inner
def exp(y: float) -> float:
    """Return exp(y) for y <= 0, and 0 below `LEAST_EXPONENT`; loops over it are vectorised."""
    shifted = y * LOG2_E + ROUNDER
    n = shifted - ROUNDER
    r = (y - n * LN2_HIGH) - n * LN2_LOW
    power = number_of((bits_of(shifted) + 1023) << 52)
    return exp_near_zero(r) * power if y >= LEAST_EXPONENT else 0.0


@inner
def wide_exp(y: float) -> tuple[float, float]:
    """Return exp(y) as a wide number, m being in [0.7, 1.5); y may be any number."""
    if not math.isfinite(y):
        return (0.0 if y == -math.inf else y), 0.0
    n = np.floor(y * LOG2_E + 0.5)
    if abs(y) > 2.0**50:  # y itself is rounded to more than the rest
        return 1.0, n
    return exp_near_zero((y - n * LN2_HIGH) - n * LN2_LOW), n


@inner
def power_of_two(n: float) -> float:
    """Return 2**n of a whole number n <= 1023, and 0 where that is no normal number."""
    return number_of((int(n) + 1023) << 52) if n >= -1022 else 0.0


@inner
def split(x: float) -> tuple[float, float]:
    """Return x as a wide number; a negative x, which has no logarithm, as NaN."""
    if not x > 0.0:
        return (0.0 if x == 0.0 else math.nan), 0.0
    if x == math.inf:
        return x, 0.0
    shift = 0
    if x < TINY:
        x *= 2.0**60
        shift = 60
    bits = bits_of(x)
    exponent = (bits >> 52) - 1022
    return number_of(bits - (exponent << 52)), float(exponent - shift)


@inner
def join(m: float, e: float) -> float:
    """Return a wide number m * 2**e as a float64, rounded, or infinite where it is too large."""
    if m == 0.0 or not math.isfinite(m):
        return m
    e = min(max(e, -2200.0), 2200.0)
    half = np.floor(e / 2)
    return math.ldexp(math.ldexp(m, int(half)), int(e - half))


@inner
def two_sum(a: float, b: float) -> tuple[float, float]:
    """Return a + b, and what its rounding left out (Knuth)."""
    s = a + b
    v = s - a
    return s, (a - (s - v)) + (b - v)


@inner
def log_of(m: float, e: float, high: float, low: float) -> float:
    """Return log(m * 2**e) + high + low, rounded about once, however much of it cancels."""
    m, n = split(m)
    if m == 0.0:
        return -math.inf
    if not math.isfinite(m):
        return m
    if m < 0.7071067811865476:
        m, n = 2 * m, n - 1
    n += e
    # In two parts, so that products with the higher part of log(2) are exact.
    large = np.floor(n * 2.0**-20) * 2.0**20
    s, rest = two_sum(high, large * LN2_HIGH)
    s, more = two_sum(s, (n - large) * LN2_HIGH)
    return s + (rest + more + low + n * LN2_LOW + math.log(m))
