"""The floating-point formats of computations, and the thresholds that follow from them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Precision:
    """A floating-point format of computations, float32 or float64."""

    name: str
    itemsize: int
    eps: float  # distance from 1 to the next number
    tiny: float  # smallest normal number
    top: int  # exponent of the largest power of two


SINGLE = Precision("float32", 4, 2.0**-23, 2.0**-126, 127)
DOUBLE = Precision("float64", 8, 2.0**-52, 2.0**-1022, 1023)


def threshold(precision: Precision, inner: int) -> float:
    """Return the least certified sum of `inner` terms: it is right to rounding."""
    return 5.0 * inner * precision.tiny / precision.eps
