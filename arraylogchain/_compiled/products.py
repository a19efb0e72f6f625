"""Entries of log products one by one, as a loop: where a matrix multiply proves nothing."""

from __future__ import annotations

import math

import numpy as np

from arraylogchain import _threads
from arraylogchain._array.products import exact
from arraylogchain._compiled.loops.compiling import Floats, bits_of, compiled, inlined, number_of
from arraylogchain._context import DOUBLE, Array, Context, Precision

# Terms in a block that threads share.
_BLOCK = 1 << 18


def logsumexp_where(
    ctx: Context,
    out: Array,
    a: Array,
    b: Array,
    wanted: Array,
    precision: Precision,
    block: int,
    chunk: int,
) -> Array:
    """Return `out` with the wanted entries of `log(exp(a) @ exp(b))` computed one by one.

    The arguments are those of `_array.products.exact.logsumexp_where`, which takes over where there
    are more terms than can be copied, and where there is NaN, or +inf, which gives NaN with -inf.
    """
    inner = int(a.shape[-1])
    if inner > chunk or not (np.max(a) < math.inf and np.max(b) < math.inf):
        return exact.logsumexp_where(ctx, out, a, b, wanted, precision, block, chunk)
    # Copies of one layout, for which the loop is compiled once.
    left, right = (np.array(x, np.float64, order="C") for x in (a, np.swapaxes(b, -1, -2)))
    found, wanted = np.array(out, np.float64, order="C"), np.ascontiguousarray(wanted)
    reach = math.log(inner / DOUBLE.eps) + 1.0
    for n in range(wanted.shape[0]):

        def compute(start: int, stop: int, n: int = n) -> None:
            rows = slice(start, stop)
            _logsumexps(left[n, rows], right[n], reach, wanted[n, rows], found[n, rows])

        rows, cols = wanted.shape[1:]
        _threads.share(compute, rows, max(1, _BLOCK // (inner * cols)))
    return found


@inlined
def _in_order(bits: int) -> int:
    """Return integers that are in the order of numbers, of their bits; and the other way round."""
    return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)


@compiled
def _logsumexps(a: Floats, b: Floats, reach: float, wanted: Array, out: Floats) -> None:
    """Write the logs of the sums over k of exp(a[i, k] + b[j, k]), which are not NaN.

    All terms that are left out, more than `reach` below the largest, cannot change a sum. On wide
    ranges hardly any other one is left, so they are counted first. The largest one is found among
    integers, whose order of comparison is free, so that the loop is vectorised.
    """
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            if not wanted[i, j]:
                continue
            x, y = a[i], b[j]
            largest = _in_order(bits_of(-np.inf))
            for k in range(len(x)):
                term = _in_order(bits_of(x[k] + y[k]))
                largest = term if term > largest else largest
            top = number_of(_in_order(largest))
            least, count = top - reach, 0
            for k in range(len(x)):
                count += x[k] + y[k] >= least
            if count > 1 and top > -np.inf:
                total = 0.0
                for k in range(len(x)):
                    if x[k] + y[k] >= least:
                        total += math.exp(x[k] + y[k] - top)
                top += math.log(total)
            out[i, j] = top
