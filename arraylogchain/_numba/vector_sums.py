"""Sums of products, and maxima of sums, over vectors of a row."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from arraylogchain._numba.compiling import Function, inlined, inner
from arraylogchain._numba.elementary import INF


def _vector(context: Any, builder: Any, array_type: Any, array: Any, i: Any, kind: Any) -> Any:
    """Return the address of the entries i, i + 1, ... of a flat array, as one vector."""
    data = make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [i]), kind.as_pointer())


def _sums(vector_size: int, is_product: bool) -> Function:
    """Return what writes out[i + l] = sum_k a[a0 + k da] b[b0 + k db + l], l = 0 ... lanes - 1.

    Or the largest of the sums a + b that are no NaN. Sums stay in registers, and indices are taken
    as they are: loops in Numba's terms take 2 to 6 times as long.
    """
    vector, index = ir.VectorType(ir.DoubleType(), vector_size), ir.IntType(32)
    initial_value = vector([0.0 if is_product else -INF] * vector_size)

    @intrinsic  # type: ignore[untyped-decorator]
    def sums(
        context: Any, out: Any, i: Any, a: Any, a0: Any, da: Any, b: Any, b0: Any, db: Any, n: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            out, i, a, a0, da, b, b0, db, n = args
            kinds, start = signature.args, builder.block
            loop, end = map(builder.append_basic_block, ("sum", "summed"))
            builder.branch(loop)
            builder.position_at_end(loop)
            k, total = builder.phi(n.type), builder.phi(vector)
            a_at, b_at = (builder.add(x0, builder.mul(k, dx)) for x0, dx in ((a0, da), (b0, db)))
            x = builder.load(builder.gep(make_array(kinds[2])(context, builder, a).data, [a_at]))
            one = builder.insert_element(ir.Constant(vector, ir.Undefined), x, index(0))
            zeros = ir.Constant(ir.VectorType(index, vector_size), [0] * vector_size)
            x = builder.shuffle_vector(one, one, zeros)
            y = builder.load(_vector(context, builder, kinds[5], b, b_at, vector), align=8)
            if is_product:
                product = builder.fmul(x, y, flags=["contract"])
                new_total = builder.fadd(total, product, flags=["contract"])
            else:
                new_total = builder.fadd(x, y)
                new_total = builder.select(
                    builder.fcmp_ordered(">", new_total, total), new_total, total
                )
            following = builder.add(k, n.type(1))
            for phi, first, later in ((k, n.type(0), following), (total, initial_value, new_total)):
                phi.add_incoming(first, start)
                phi.add_incoming(later, loop)
            builder.cbranch(builder.icmp_signed("<", following, n), loop, end)
            builder.position_at_end(end)
            builder.store(new_total, _vector(context, builder, kinds[0], out, i, vector), align=8)
            return context.get_dummy_value()

        integer = types.int64
        return types.void(out, integer, a, integer, integer, b, integer, integer, integer), generate

    return sums  # type: ignore[no-any-return]


def _product(is_product: bool) -> Function:
    sums_32, sums_8, sums_4, sums_1 = (
        _sums(vector_size, is_product) for vector_size in (32, 8, 4, 1)
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
        # Some are computed again.
        if i < width and width >= 8:
            sums_8(out, o + width - 8, a, a0, da, b, b0 + width - 8, db, n)
        elif 4 <= width < 8:
            sums_4(out, o, a, a0, da, b, b0, db, n)
            sums_4(out, o + width - 4, a, a0, da, b, b0 + width - 4, db, n)
        else:
            for j in range(i, width):
                sums_1(out, o + j, a, a0, da, b, b0 + j, db, n)

    @inlined
    def product(out, m, P, base, K, R, moved):
        """Write m @ P for rows side by side, m [K, R], as many as have begun; P begins there."""
        zero = K - K  # of a constant Numba compiles another version
        if R == 1:
            sums(out, zero, m, zero, zero + 1, P, base, K, K, K)
        else:
            width = (moved + 7) // 8 * 8 if moved + 7 < R else R
            for j in range(K):
                sums(out, j * R, P, base + j, K, m, zero, R, K, width)

    return product


# Arrays are flat, and can be written to.
multiply, maximise = _product(True), _product(False)
