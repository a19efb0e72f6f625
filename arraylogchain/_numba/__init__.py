"""Compilation of loops by Numba, and functions that they share; imported only where used."""

from __future__ import annotations

import importlib
import os
from functools import cache

# The first release that works with NumPy 2.1.
OLDEST = (0, 61)


@cache
def why_not() -> str | None:
    """Return None if Numba can be used, else the reason why it cannot, in one line."""
    try:
        version = str(importlib.import_module("numba").__version__)
    except Exception as error:  # its libraries may be broken in any way
        if isinstance(error, ModuleNotFoundError) and error.name == "numba":
            return "Numba is not installed; pip install numba"
        return f"Numba cannot be imported: {_line(error)}"
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return "NUMBA_DISABLE_JIT is set"
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers < OLDEST:
        return f"Numba {version} is too old; {'.'.join(map(str, OLDEST))} or newer is needed"
    try:
        importlib.import_module("arraylogchain._numba.intrinsics")
    except Exception as error:  # names that it imports may have changed
        return f"the intrinsics of compiled loops do not fit Numba {version}: {_line(error)}"
    return None


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
