"""LLVM instructions that Numba does not generate efficiently.

    bits_of(x)      the bits of a float64 as an int64
    number_of(b)    the float64 of these bits

    view(x, start, shape)
        the entries of a contiguous array from entry `start` on, in a shape

    vector_sum(V, is_product=True)(out, i, a, a0, da, b, b0, db, n)
        total[0:V] = 0                      in registers
        for k in range(n):
            total[0:V] += a[a0 + k da] * b[b0 + k db : b0 + k db + V]
        out[i : i + V] = total

    vector_sum(V, is_product=False)         the largest a[...] + b[...] that are no NaN, or -inf

    max_product_steps(V)(x, at, count, K, m, P, came_from, to)
        for s in range(count):              with the state m[0:V] in registers
            m[j] = max_k m[k] + P[k * V + j] + x[at + s K + j], less an integer
            came_from[to + s V + j] = k     the smallest k of that maximum
        return the sum of the integers

K of the V states exist; the others have -inf in m and P, and V entries of x are read at each step.
Nothing there may be NaN or +inf. Except for `view`, arrays are flat and writable; n, count > 0.
Indices are neither wrapped nor checked, nor is it checked that an array is contiguous.

On two cores of an AMD EPYC, with Numba 0.68, CPU time of log Z of one chain of 1,000 steps and 32
states is 0.18 ms instead of 0.87, of 300 chains of 100 steps and 5 states 0.5 ms instead of 1.2,
and of compiling everything 10.7 s instead of 13.9. A slice takes 200 lines of LLVM IR and a view
35: on a slower processor, compiling the first log Z takes 5.9 s instead of 6.9, and everything
15.9 s instead of 20.3.

Numba documents `numba.extending.intrinsic` and `cgutils`; llvmlite documents its instructions. If
a release changes them so that this module cannot be imported, array operations replace all loops.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


def _bitcast(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.bitcast(args[0], context.get_value_type(signature.return_type))


@intrinsic  # type: ignore[untyped-decorator]
def bits_of(context: Any, x: Any) -> Any:
    return types.int64(types.float64), _bitcast


@intrinsic  # type: ignore[untyped-decorator]
def number_of(context: Any, bits: Any) -> Any:
    return types.float64(types.int64), _bitcast


@intrinsic  # type: ignore[untyped-decorator]
def view(context: Any, x: Any, start: Any, shape: Any) -> Any:
    num_axes = len(shape)
    kind = x.copy(ndim=num_axes, layout="C")

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = cgutils.create_struct_proxy(x)(context, builder, value=args[0])
        # Its owner stays null, as compiled loops do not count references.
        result = cgutils.create_struct_proxy(kind)(context, builder)
        lengths, size = cgutils.unpack_tuple(builder, args[2], num_axes), args[1].type(1)
        strides: list[Any] = []
        for length in reversed(lengths):
            strides.insert(0, builder.mul(size, source.itemsize))
            size = builder.mul(size, length)
        result.data, result.nitems = builder.gep(source.data, [args[1]]), size
        result.shape, result.strides = (cgutils.pack_array(builder, n) for n in (lengths, strides))
        result.itemsize = source.itemsize
        return result._getvalue()

    return kind(x, types.int64, types.UniTuple(types.int64, num_axes)), generate


def _addresses(context: Any, builder: Any, signature: Any, args: Any) -> list[Any]:
    """Return the arguments of a call, with the address of its first number for each array."""
    return [
        cgutils.create_struct_proxy(kind)(context, builder, value=arg).data
        if isinstance(kind, types.Array)
        else arg
        for kind, arg in zip(signature.args, args, strict=True)
    ]


class _Vectors:
    """Instructions on vectors of float64 numbers in registers."""

    def __init__(self, builder: Any, size: int) -> None:
        self.builder, self.size = builder, size
        self.floats = ir.VectorType(ir.DoubleType(), size)

    def constant(self, kind: Any, x: float) -> Any:
        return ir.Constant(ir.VectorType(kind, self.size), [x] * self.size)

    def load(self, address: Any) -> Any:
        address = self.builder.bitcast(address, self.floats.as_pointer())
        return self.builder.load(address, align=8)

    def store(self, v: Any, address: Any, align: int = 8) -> None:
        self.builder.store(v, self.builder.bitcast(address, v.type.as_pointer()), align=align)

    def pick(self, v: Any, numbers: list[int]) -> Any:
        """Return a vector of the entries with these numbers."""
        kind = ir.VectorType(ir.IntType(32), len(numbers))
        return self.builder.shuffle_vector(v, v, ir.Constant(kind, numbers))

    def broadcast(self, scalar: Any) -> Any:
        undefined = ir.Constant(ir.VectorType(scalar.type, self.size), ir.Undefined)
        v = self.builder.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
        return self.pick(v, [0] * self.size)

    def where_greater(self, a: Any, b: Any, x: Any, y: Any) -> Any:
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), x, y)

    def integer_shift(self, v: Any) -> Any:
        """Return the least integer not below the largest entry, 0 if that is -inf."""
        width, double = self.size, ir.DoubleType()
        while width > 1:
            width //= 2
            low, high = (self.pick(v, [*range(i, i + width)]) for i in (0, width))
            v = self.where_greater(low, high, low, high)
        largest = self.builder.extract_element(v, ir.Constant(ir.IntType(32), 0))
        ceil = self.builder.module.declare_intrinsic("llvm.ceil", [double])
        shift = self.builder.call(ceil, [largest])
        return self.where_greater(largest, double(-math.inf), shift, double(0.0))

    def rounding_error(self, x: Any, y: Any, total: Any) -> Any:
        """Return the rounding error x + y - total of a sum, 0 where it is not finite."""
        b = self.builder
        from_y = b.fsub(total, x)
        lost = b.fadd(b.fsub(x, b.fsub(total, from_y)), b.fsub(y, from_y))
        zeros = self.constant(ir.DoubleType(), 0.0)
        return b.select(b.fcmp_ordered("ord", lost, lost), lost, zeros)


def vector_sum(vector_size: int, is_product: bool) -> Any:
    """Return a function that writes V sums of products, or V maxima of sums, as defined above."""

    @intrinsic  # type: ignore[untyped-decorator]
    def sums(
        context: Any, out: Any, i: Any, a: Any, a0: Any, da: Any, b: Any, b0: Any, db: Any, n: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            v = _Vectors(builder, vector_size)
            out, i, a, a0, da, b, b0, db, n = _addresses(context, builder, signature, args)
            initial_value = v.constant(ir.DoubleType(), 0.0 if is_product else -math.inf)
            total = cgutils.alloca_once_value(builder, initial_value)
            with cgutils.for_range(builder, n) as loop:
                old_total = builder.load(total)
                a_at, b_at = (
                    builder.gep(x, [builder.add(x0, builder.mul(loop.index, dx))])
                    for x, x0, dx in ((a, a0, da), (b, b0, db))
                )
                x, y = v.broadcast(builder.load(a_at)), v.load(b_at)
                if is_product:
                    product = builder.fmul(x, y, flags=["contract"])
                    new_total = builder.fadd(old_total, product, flags=["contract"])
                else:
                    term = builder.fadd(x, y)
                    new_total = v.where_greater(term, old_total, term, old_total)
                builder.store(new_total, total)
            v.store(builder.load(total), builder.gep(out, [i]))
            return context.get_dummy_value()

        integer = types.int64
        return types.void(out, integer, a, integer, integer, b, integer, integer, integer), generate

    return sums


def max_product_steps(size: int) -> Any:
    """Return the function `steps` of max-product recursions, described above."""

    @intrinsic  # type: ignore[untyped-decorator]
    def steps(
        context: Any, x: Any, at: Any, count: Any, K: Any, m: Any, P: Any, came_from: Any, to: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            addresses = _addresses(context, builder, signature, args)
            return _generate_steps(_Vectors(builder, size), *addresses)

        i = types.int64
        return types.float64(x, i, i, i, m, P, came_from, i), generate

    return steps


def _generate_steps(
    v: _Vectors, x: Any, at: Any, count: Any, K: Any, m: Any, P: Any, came_from: Any, to: Any
) -> Any:
    b, size, integer, double = v.builder, v.size, at.type, ir.DoubleType()
    state_numbers = ir.Constant(ir.VectorType(integer, size), list(range(size)))
    is_state = b.icmp_signed("<", state_numbers, v.broadcast(K))
    rows = [v.load(b.gep(P, [integer(k * size)])) for k in range(size)]
    no_weights = v.constant(double, -math.inf)
    state = cgutils.alloca_once_value(b, v.load(m))
    scale = cgutils.alloca_once_value(b, double(0.0))
    with cgutils.for_range(b, count) as loop:
        s, old_state = loop.index, b.load(state)
        f = b.select(is_state, v.load(b.gep(x, [b.add(at, b.mul(s, K))])), no_weights)
        f_shift = v.integer_shift(f)
        f = b.fsub(f, v.broadcast(f_shift))
        best, argmax = no_weights, v.constant(integer, 0)
        for k in range(size):
            term = b.fadd(v.pick(old_state, [k] * size), rows[k])
            is_greater = b.fcmp_ordered(">", term, best)
            best = b.select(is_greater, term, best)
            argmax = b.select(is_greater, v.constant(integer, k), argmax)
        total = b.fadd(best, f)
        # A shift that lags by a step would be faster, and rounds terms at twice their size.
        shift = v.integer_shift(total)
        shifted = b.fsub(total, v.broadcast(shift))
        b.store(b.fadd(shifted, v.rounding_error(best, f, total)), state)
        b.store(b.fadd(b.load(scale), b.fadd(f_shift, shift)), scale)
        numbers = b.trunc(argmax, ir.VectorType(ir.IntType(8), size))
        v.store(numbers, b.gep(came_from, [b.add(to, b.mul(s, integer(size)))]), align=1)
    v.store(b.load(state), m)
    return b.load(scale)
