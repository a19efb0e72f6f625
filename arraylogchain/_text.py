"""Quantities as a person reads them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Return a time with three digits and a fitting unit.

    Examples
    --------
    >>> duration(0.0153), duration(33.0)
    ('15.3 ms', '33 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{_three_digits(seconds / 1e-6)} µs"


def amount(size: int) -> str:
    """Return a number of bytes with three digits and a fitting decimal unit.

    Examples
    --------
    >>> amount(512), amount(14_320_000_000)
    ('512 B', '14.3 GB')
    """
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{_three_digits(size / scale)} {unit}"
    return f"{size} B"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
