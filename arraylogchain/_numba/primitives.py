"""The functions of `intrinsics` or, if it cannot be imported, the same in Python."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from arraylogchain._numba.compiling import inlined

try:
    from arraylogchain._numba.intrinsics import (
        bits_of,
        max_product_steps,
        number_of,
        vector_sum,
    )
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

    def max_product_steps(size: int) -> Any:
        @inlined
        def integer_shift(v, start, count):
            largest = -math.inf
            for j in range(start, start + count):
                largest = v[j] if v[j] > largest else largest
            return np.ceil(largest) if largest > -math.inf else 0.0

        @inlined
        def steps(x, at, count, K, m, P, came_from, to):
            scale, zero = 0.0, K - K
            new = m[size : 2 * size]
            for s in range(count):
                f_shift = integer_shift(x, at + s * K, K)
                for j in range(size):
                    new[j], came_from[to + s * size + j] = -math.inf, 0
                for j in range(K):
                    for k in range(K):
                        if m[k] + P[k * size + j] > new[j]:
                            new[j] = m[k] + P[k * size + j]
                            came_from[to + s * size + j] = k
                for j in range(K):
                    m[j] = new[j] + (x[at + s * K + j] - f_shift)
                shift = integer_shift(m, zero, K)
                for j in range(K):
                    f, total = x[at + s * K + j] - f_shift, m[j]
                    from_f = total - new[j]
                    lost = (new[j] - (total - from_f)) + (f - from_f)
                    m[j] = (total - shift) + (lost if lost == lost else 0.0)
                scale += f_shift + shift
            return scale

        return steps


__all__ = ["bits_of", "max_product_steps", "number_of", "vector_sum"]
