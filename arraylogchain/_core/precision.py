"""The floating-point formats of computations, and the thresholds that follow from them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Precision:
    """A floating-point format of computations, float32 or float64.

    Marginals are computed in linear space where normalizers and magnitudes of cotangents are within
    bounds. Weights are at most 2**400 (2**10 in float32), so that less than an eps of a normalizer
    underflows, and no sum of pair marginals over rows and steps overflows.
    """

    name: str
    itemsize: int
    eps: float  # distance from 1 to the next number
    tiny: float  # smallest normal number
    top: int  # exponent of the largest power of two
    normalizers: tuple[float, float]  # least and largest in linear space
    cotangents: tuple[float, float]  # least and largest magnitude, of those that are not 0


SINGLE = Precision("float32", 4, 2.0**-23, 2.0**-126, 127, (2.0**-55, 2.0**80), (2.0**-20, 2.0**20))
DOUBLE = Precision(
    "float64", 8, 2.0**-52, 2.0**-1022, 1023, (2.0**-116, 2.0**900), (2.0**-64, 2.0**64)
)


def threshold(precision: Precision, inner: int) -> float:
    """Return the least certified sum of `inner` terms: it is right to rounding."""
    return 5.0 * inner * precision.tiny / precision.eps
