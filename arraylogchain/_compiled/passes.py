"""What chains do to all entries of their states between matrix multiplies, in one pass each.

Array operations take several, each of which waits for memory anew: the rows of one step lie far
apart in arrays [*batch, T, K], so that processors do not foresee what is read next. These loops ask
for it some rows ahead.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from arraylogchain._array import passes
from arraylogchain._array.chains.accumulate import ChainSums
from arraylogchain._array.chains.states import State
from arraylogchain._array.chains.tiles import Tile, arrange
from arraylogchain._compiled.loops.compiling import Floats, Integers, bit_casts, compiled, inlined
from arraylogchain._context import Array, Precision
from arraylogchain._fold import within

Singles = npt.NDArray[np.float32]

# Rows whose potentials are within this of 0 need no shift.
_NARROW = np.float32(16.0)
# Bytes that are asked for ahead: what memory delivers while a row of as many is computed.
_AHEAD = 3200
_LINE = 64

# All constants are float32 or int32, which else would be widened, and take twice the time.
_INF = np.float32(math.inf)
_ZERO, _HALF, _ONE = np.float32(0.0), np.float32(0.5), np.float32(1.0)
_LOG2_E = np.float32(1.4426950408889634)
# The logarithm of 2 in two parts, negative; whole numbers below 2**9 times the first are exact.
_LN2_HIGH, _LN2_LOW = np.float32(-0.693145751953125), np.float32(-1.428606765330187e-06)
# Added to a number below 2**21 in size, it leaves the nearest whole number in the lowest bits.
_ROUNDER = np.float32(1.5 * 2.0**23)
_C3, _C4, _C5, _C6 = (np.float32(1.0 / math.factorial(n)) for n in (3, 4, 5, 6))
# Below, exp is no normal number any more.
_LEAST_EXPONENT = np.float32(-87.3365)
_BIAS, _MANTISSA, _SIGN = np.int32(127), np.int32(23), np.int32(31)
bits_of, number_of = bit_casts(types.float32, types.int32)
_NOTHING, _LARGEST_BITS = np.int32(0), np.int32(2**31 - 1)


class Weigher(passes.Weigher):
    """Multiplies states by exponentials of their steps' potentials, in float32."""

    def __init__(self, tile: Tile, precision: Precision, together: int) -> None:
        super().__init__(tile, precision, together)
        self._given = _rows_of(tile, tile.potentials)
        self._copied: tuple[int, Array] | None = None

    def weigh(self, product: State, time: int, out: Array) -> tuple[State, float, bool]:
        values, shift = _as_rows(product.values), np.empty(product.offset.shape)
        if self._given is None:
            x, place = self._copy(time)
            index = np.arange(len(x))
        else:
            (x, index), place = self._given, time
        low, high = _weigh(values, x, index, place, _as_rows(out), shift.reshape(-1))
        # Zeros of the product itself show as well.
        support, has_zeros = product.support, not low > 0.0
        if has_zeros:
            here = self.tile.part(slice(out.shape[self.tile.select_axis]))
            finite = here.potentials_of(slice(time, time + 1))[:, :, 0, :] > -math.inf
            support = finite if support is None else support & finite
        offset = product.offset + shift
        state = State(out, product.exponent, offset, support, False, low, high)
        return state, math.exp(_NARROW + 0.5), has_zeros

    def _copy(self, time: int) -> tuple[Array, int]:
        """Return potentials [rows, steps, K] that have a step in time, and its place among them."""
        number, place = divmod(time, self.together)
        if self._copied is None or self._copied[0] != number:
            stop = min(time - place + self.together, self.tile.num_steps)
            x = self.tile.potentials_of(slice(time - place, stop))
            x = np.array(x, np.float32, order="C")
            self._copied = number, x.reshape(-1, *x.shape[2:])
        return self._copied[1], place


class PosteriorWeigher(passes.PosteriorWeigher):
    """Multiplies states of both directions, for the posterior at their step, in float32."""

    def __init__(self, tile: Tile, sums: ChainSums, precision: Precision) -> None:
        super().__init__(tile, sums, precision)
        self._target = None
        if sums.potentials is not None and sums.has_own_places:
            view = arrange(self.ctx.xp, tile.chain, sums.potentials, trailing=2)
            self._target = _rows_of(tile, view[(*within(tile.box, view.shape), ...)])

    def weigh(
        self, time: int, a: Array, b: Array, g: Array, bounds: tuple[float, float], out: Array
    ) -> bool:
        if self._target is None:
            return super().weigh(time, a, b, g, bounds, out)
        target, index = self._target
        rows = map(_as_rows, (a, b, out))
        sums = np.empty(16, np.float32)
        return bool(_weigh_posterior(*rows, g.reshape(-1), bounds, target, index, time, sums))


def _rows_of(tile: Tile, x: Array) -> tuple[Array, Array] | None:
    """Return x [*shape, T, K] as [rows, T, K], and which rows the tile's are; None if it cannot."""
    shape = (*tile.shape, *x.shape[-2:])
    is_plain = x.dtype == np.float32 and x.flags.carray and x.shape == shape
    if not is_plain:
        return None
    index = np.arange(tile.groups * tile.rows).reshape(*tile.shape, 1)
    return x.reshape(-1, *x.shape[-2:]), tile.expanded(index, (1,)).reshape(-1)


def _as_rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


@intrinsic  # type: ignore[untyped-decorator]
def multiply_add(context: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once where the processor has an instruction for that."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = args[0].type
        function = builder.module.declare_intrinsic(
            "llvm.fmuladd", [kind], ir.FunctionType(kind, [kind] * 3)
        )
        return builder.call(function, args)

    return a(a, a, a), generate


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(context: Any, x: Any, place: Any) -> Any:
    """Ask for the memory of an entry of a contiguous array, which will be needed soon."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        address = builder.bitcast(builder.gep(array.data, [args[1]]), byte)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        )
        # To read; for all caches; data.
        builder.call(function, [address, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(x, types.int64), generate


@inlined
def _exp(y: Any) -> Any:
    """Return exp(y) for y <= 80, and 0 below `_LEAST_EXPONENT`; loops over it are vectorised."""
    n = multiply_add(y, _LOG2_E, _ROUNDER)
    power = number_of((bits_of(n) + _BIAS) << _MANTISSA)
    n -= _ROUNDER
    r = multiply_add(n, _LN2_LOW, multiply_add(n, _LN2_HIGH, y))
    p = multiply_add(multiply_add(multiply_add(r, _C6, _C5), r, _C4), r, _C3)
    p = multiply_add(multiply_add(multiply_add(p, r, _HALF), r, _ONE), r, _ONE)
    # NaN stays.
    return _ZERO if y < _LEAST_EXPONENT else p * power


@inlined
def _ordered(bits: Any) -> Any:
    """Return integers that are in the order of the numbers that bits stand for, and back."""
    return bits ^ ((bits >> _SIGN) & _LARGEST_BITS)


@inlined
def _shift_of(x: Singles) -> Any:
    """Return the largest entry of x, rounded, if it is finite; 0 if all entries are small.

    Maxima of integers are vectorised, those of numbers are not.
    """
    size, top = _NOTHING, ~_LARGEST_BITS
    for k in range(len(x)):
        bits = bits_of(x[k]) & _LARGEST_BITS
        size = bits if bits > size else size
    if number_of(size) <= _NARROW:
        return _ZERO
    for k in range(len(x)):
        bits = _ordered(bits_of(x[k]))
        top = bits if bits > top else top
    largest = number_of(_ordered(top))
    return np.rint(largest) if -_INF < largest < _INF else _ZERO


@inlined
def _prefetch_row(x: Singles, row: int, t: int) -> Any:
    _, steps, size = x.shape
    start = (row * steps + t) * size
    for k in range(0, size, _LINE // 4):
        prefetch(x, start + k)


@compiled
def _weigh(
    values: Singles, x: Singles, index: Integers, t: int, out: Singles, shift: Floats
) -> tuple[float, float]:
    """Write values[i] * exp(x[index[i], t] - shift[i]), and the shifts.

    Returns the smallest and the largest of what is written, one of which is NaN if any is.
    """
    rows, size = out.shape
    ahead = _AHEAD // (4 * size) + 1
    # Numbers that are not negative are ordered as their bits are; NaN comes last or first.
    low, high = _LARGEST_BITS, ~_LARGEST_BITS
    for i in range(rows):
        _prefetch_row(x, index[min(i + ahead, rows - 1)], t)
        given = x[index[i], t]
        top = _shift_of(given)
        shift[i] = top
        for k in range(size):
            out[i, k] = values[i, k] * _exp(given[k] - top)
        # In a loop of its own, or else what is left of the row would not be vectorised.
        for k in range(size):
            bits = bits_of(out[i, k])
            low = bits if bits < low else low
            high = bits if bits > high else high
    return number_of(low), number_of(high)


@compiled
def _weigh_posterior(
    a: Singles,
    b: Singles,
    out: Singles,
    g: Singles,
    bounds: tuple[float, float],
    target: Singles,
    index: Integers,
    t: int,
    sums: Singles,
) -> bool:
    """Write g a b / sum(a b) to target[index, t], and g a / sum(a b) to out, row by row.

    Returns whether all sums are within bounds; in vain if not. In `sums` there is room for some.
    """
    rows, size = a.shape
    ahead = _AHEAD // (4 * size) + 1
    whole = size - size % 16
    for i in range(rows):
        _prefetch_row(target, index[min(i + ahead, rows - 1)], t)
        total = _ZERO
        sums[:] = _ZERO
        for start in range(0, whole, 16):
            for k in range(16):
                sums[k] += a[i, start + k] * b[i, start + k]
        for k in range(16):
            total += sums[k]
        for k in range(whole, size):
            total += a[i, k] * b[i, k]
        if not bounds[0] <= total <= bounds[1]:
            return False
        scale, products = g[i] / total, target[index[i], t]
        for k in range(size):
            products[k] = a[i, k] * b[i, k] * scale
            out[i, k] = a[i, k] * scale
    return True
