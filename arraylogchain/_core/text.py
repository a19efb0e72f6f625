"""Durations and amounts of memory in readable units."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Return a time with three digits and its unit.

    Examples
    --------
    >>> duration(0.0153), duration(33.0)
    ('15.3 ms', '33 s')
    """
    return _in_units(seconds, {"s": 1.0, "ms": 1e-3, "µs": 1e-6})


def amount(size: int) -> str:
    """Return a number of bytes with three digits and its decimal unit.

    Examples
    --------
    >>> amount(512), amount(14_320_000_000)
    ('512 B', '14.3 GB')
    """
    return _in_units(size, {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0})


def _in_units(x: float, units: dict[str, float]) -> str:
    """Return a quantity in the largest unit that it is not below, or else in the smallest."""
    unit = next((name for name, size in units.items() if x >= size), [*units][-1])
    value = x / units[unit]
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
