"""How loops are compiled: once, for arrays of one kind, and kept in Numba's cache.

No fastmath, which would change what is proved of rounding, infinities and NaN; and not Numba's
parallel runtime, which aborts when two threads enter it or a process that uses it is forked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
from numba import njit, types
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., Any])
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


def compiled(function: F) -> F:
    """Compile a function when it is first called, letting go of the GIL."""
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return cast(F, njit(cache=True, **options)(function))
    except RuntimeError:  # there is no folder to keep it in
        return cast(F, njit(**options)(function))


@intrinsic  # type: ignore[untyped-decorator]
def bits_of(context: Any, x: Any) -> Any:
    """Return the 64 bits of a number as an integer."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.int64))

    return types.int64(types.float64), generate


@intrinsic  # type: ignore[untyped-decorator]
def number_of(context: Any, bits: Any) -> Any:
    """Return the number that 64 bits stand for."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.float64))

    return types.float64(types.int64), generate
