"""The operations of `intrinsics` or, where it cannot be imported, the same in Python."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from arraylogchain._numba.compiling import inlined

try:
    from arraylogchain._numba.intrinsics import bits_of, number_of, vector_sum
except ImportError:

    @inlined
    def bits_of(x):
        return np.float64(x).view(np.int64)

    @inlined
    def number_of(bits):
        return np.int64(bits).view(np.float64)

    def vector_sum(vector_size: int, is_product: bool) -> Any:
        initial_value = 0.0 if is_product else -math.inf

        @inlined
        def sums(out, i, a, a0, da, b, b0, db, n):
            for v in range(vector_size):
                total = initial_value
                for k in range(n):
                    x, y = a[a0 + k * da], b[b0 + k * db + v]
                    if is_product:
                        total += x * y
                    else:
                        total = x + y if x + y > total else total
                out[i + v] = total

        return sums


__all__ = ["bits_of", "number_of", "vector_sum"]
