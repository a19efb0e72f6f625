"""Sums of products, and maxima of sums, over vectors of a row."""

from __future__ import annotations

from arraylogchain._numba.compiling import Function, inlined, inner
from arraylogchain._numba.elementary import INF
from arraylogchain._numba.intrinsics import vector_sum, view


def _product(is_product: bool) -> Function:
    sums_32, sums_8, sums_4, sums_1 = (
        vector_sum(vector_size, is_product) for vector_size in (32, 8, 4, 1)
    )

    @inner
    def sums(out, o, a, a0, da, b, b0, db, n, width):
        """Write out[o + i] = sum_k a[a0 + k da] b[b0 + k db + i], i < width, over n > 0 terms."""
        i = 0
        while i + 32 <= width:
            sums_32(out, o + i, a, a0, da, b, b0 + i, db, n)
            i += 32
        while i + 8 <= width:
            sums_8(out, o + i, a, a0, da, b, b0 + i, db, n)
            i += 8
        # The last block overlaps the previous one: their common entries are computed again.
        if i < width and width >= 8:
            sums_8(out, o + width - 8, a, a0, da, b, b0 + width - 8, db, n)
        elif 4 <= width < 8:
            sums_4(out, o, a, a0, da, b, b0, db, n)
            sums_4(out, o + width - 4, a, a0, da, b, b0 + width - 4, db, n)
        else:
            for j in range(i, width):
                sums_1(out, o + j, a, a0, da, b, b0 + j, db, n)

    @inlined
    def product(out, m, P, base, K, R, num_active):
        """Write m @ P for the first `num_active` rows of m [K, R]; P starts at `base`."""
        zero = K - K  # a literal would make Numba compile another version
        if R == 1:
            sums(out, zero, m, zero, zero + 1, P, base, K, K, K)
        else:
            width = (num_active + 7) // 8 * 8 if num_active + 7 < R else R
            for j in range(K):
                sums(out, j * R, P, base + j, K, m, zero, R, K, width)

    return product


def _sparse_product(is_product: bool) -> Function:
    initial_value = 0.0 if is_product else -INF

    @inlined
    def with_term(total, x, y):
        if is_product:
            return total + x * y
        return x + y if x + y > total else total

    @inner
    def product(out, m, columns, R, num_active):
        """Write m @ P for the first rows of m [K, R], given the sparse columns of P."""
        starts, numbers, rows = columns.starts, columns.numbers, columns.rows
        entries = columns.weights if is_product else columns.logs
        for i in range(len(out)):
            out[i] = initial_value
        for d in range(len(starts) - 1):
            for p in range(starts[d], starts[d + 1]):
                j, k, entry = numbers[p - starts[d]], rows[p], entries[p]
                if R == 1:
                    out[j] = with_term(out[j], m[k], entry)
                    continue
                target, source = view(out, j * R, (num_active,)), view(m, k * R, (num_active,))
                for r in range(num_active):
                    target[r] = with_term(target[r], source[r], entry)

    return product


# Arrays are flat and writable.
multiply, maximize = _product(True), _product(False)
multiply_sparse, maximize_sparse = _sparse_product(True), _sparse_product(False)
