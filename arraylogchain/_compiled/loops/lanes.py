"""Numbers of several rows side by side, as the vector instructions of a processor take them.

LLVM finds such instructions by itself where loops are long. A sum over a few states is too short
for that, and which arrays share memory is unknown to it; so a type says what is meant.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model
from numba.np.arrayobj import make_array

from arraylogchain._compiled.loops.numbers import LANES, ROUNDER

_VECTOR = ir.VectorType(ir.DoubleType(), LANES)
_ZEROS, _ONES = (ir.Constant(_VECTOR, [x] * LANES) for x in (0.0, 1.0))
_INTEGERS = ir.VectorType(ir.IntType(64), LANES)
_INDEX = ir.IntType(32)


class Lanes(types.Type):  # type: ignore[misc]
    """Numba's type of `LANES` float64 numbers."""


LANES_TYPE = Lanes("Lanes")


@register_model(Lanes)
class _Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, lanes: Lanes) -> None:
        super().__init__(manager, lanes, _VECTOR)


def _spread(builder: Any, x: Any) -> Any:
    """Return lanes as they are, and a number in all of them."""
    if x.type == _VECTOR:
        return x
    one = builder.insert_element(_ZEROS, x, ir.Constant(_INDEX, 0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_INDEX, LANES), [0] * LANES))


def _define(function: Callable[..., Any], build: Callable[..., Any]) -> None:
    """Define an operator for lanes, and lanes and a number."""

    @infer_global(function)
    class Typing(AbstractTemplate):  # type: ignore[misc]
        def generic(self, args: Any, kws: Any) -> Any:
            if LANES_TYPE in args and {*args} <= {LANES_TYPE, types.float64}:
                return signature(LANES_TYPE, *args)
            return None

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return build(builder, *(_spread(builder, x) for x in args))

    for pair in ((Lanes, Lanes), (Lanes, types.Float), (types.Float, Lanes)):
        lower_builtin(function, *pair)(lower)


def _less(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered("<", a, b), _ONES, _ZEROS)


_define(operator.add, ir.IRBuilder.fadd)
_define(operator.iadd, ir.IRBuilder.fadd)
_define(operator.sub, ir.IRBuilder.fsub)
_define(operator.mul, ir.IRBuilder.fmul)
_define(operator.truediv, ir.IRBuilder.fdiv)
# 1.0 where it is so, else 0.0.
_define(operator.lt, _less)
_define(operator.gt, lambda builder, a, b: _less(builder, b, a))


def _place(context: Any, builder: Any, array_type: Any, array: Any, i: Any) -> Any:
    data = make_array(array_type)(context, builder, array).data
    first = builder.mul(i, ir.Constant(i.type, LANES))
    return builder.bitcast(builder.gep(data, [first]), _VECTOR.as_pointer())


@intrinsic  # type: ignore[untyped-decorator]
def load(context: Any, array: Any, i: Any) -> Any:
    """Return the i-th lanes of an array [n * LANES]."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load(_place(context, builder, array, *args), align=8)

    return LANES_TYPE(array, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def gather(context: Any, array: Any, places: Any, i: Any) -> Any:
    """Return of each lane the number that is i numbers behind its place in an array."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        found, (_, places, i) = _ZEROS, args
        data = make_array(array)(context, builder, args[0]).data
        for lane in (ir.Constant(_INDEX, n) for n in range(LANES)):
            place = builder.fptosi(builder.extract_element(places, lane), i.type)
            x = builder.load(builder.gep(data, [builder.add(place, i)]))
            found = builder.insert_element(found, x, lane)
        return found

    return LANES_TYPE(array, LANES_TYPE, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def store(context: Any, array: Any, i: Any, x: Any) -> Any:
    """Write the i-th lanes of an array, or a number to all of them."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = _place(context, builder, array, *args[:2])
        builder.store(_spread(builder, args[2]), at, align=8)
        return context.get_dummy_value()

    return types.void(array, types.int64, x), generate


@intrinsic  # type: ignore[untyped-decorator]
def everywhere(context: Any, x: Any) -> Any:
    """Return a number in all lanes."""
    return LANES_TYPE(x), lambda context, builder, sig, args: _spread(builder, *args)


@intrinsic  # type: ignore[untyped-decorator]
def powers_of_two(context: Any, n: Any) -> Any:
    """Return 2**n of whole numbers from -1022 to 1023."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        # The whole number is in the lowest bits of this sum.
        rounded = builder.fadd(*args, ir.Constant(_VECTOR, [ROUNDER + 1023.0] * LANES))
        bits = builder.bitcast(rounded, _INTEGERS)
        bits = builder.shl(bits, ir.Constant(_INTEGERS, [52] * LANES))
        return builder.bitcast(bits, _VECTOR)

    return LANES_TYPE(n), generate


@intrinsic  # type: ignore[untyped-decorator]
def where(context: Any, condition: Any, a: Any, b: Any) -> Any:
    """Return lanes of a where those of a condition are not 0, else those of b."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        condition, a, b = args
        return builder.select(builder.fcmp_unordered("!=", condition, _ZEROS), a, b)

    return LANES_TYPE(LANES_TYPE, LANES_TYPE, LANES_TYPE), generate


@intrinsic  # type: ignore[untyped-decorator]
def sum_of_lanes(context: Any, x: Any) -> Any:
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        numbers = [builder.extract_element(*args, ir.Constant(_INDEX, i)) for i in range(LANES)]
        while len(numbers) > 1:
            pairs = zip(numbers[::2], numbers[1::2], strict=True)
            numbers = [builder.fadd(a, b) for a, b in pairs]
        return numbers[0]

    return types.float64(x), generate
