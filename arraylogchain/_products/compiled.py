"""Directly recomputed entries of log products, in compiled loops."""

from __future__ import annotations

import math

import numpy as np

from arraylogchain._core import threads
from arraylogchain._core.context import Array
from arraylogchain._core.precision import DOUBLE
from arraylogchain._numba.compiling import Floats, compiled, inlined
from arraylogchain._numba.intrinsics import bits_of, number_of

_EPS = DOUBLE.eps
# Terms in a block of work for one thread.
_BLOCK = 1 << 18


def logsumexp_where(out: Array, a: Array, b: Array, requested: Array) -> None:
    """Write the requested entries of `log(exp(a) @ exp(b))` into `out`.

    Parameters
    ----------
    out : array [batch, rows, cols]
    a, b : array [batch, rows, K], [batch, K, cols]
        Without NaN and +inf.
    requested : bool array [batch, rows, cols]
    """
    # Copies of one dtype and layout, for which the loop is compiled once.
    left, right = (np.array(x, np.float64, order="C") for x in (a, np.swapaxes(b, -1, -2)))
    result, requested = np.array(out, np.float64, order="C"), np.ascontiguousarray(requested)
    batch, rows, cols = requested.shape

    def compute(start: int, stop: int) -> None:
        _logsumexps(left, right, requested, result, start, stop)

    threads.run_blocks(compute, batch * rows, max(1, _BLOCK // (left.shape[-1] * cols)))
    out[...] = result


def gradients_where(a: Array, b: Array, requested: Array, h: Array) -> tuple[Array, Array]:
    """Return gradients of the sum of h times the requested entries of `log(exp(a) @ exp(b))`.

    The arguments are as for `logsumexp_where`, and h [batch, rows, cols]; the results are
    [batch, rows, K] and [batch, cols, K]. Entries without a finite term contribute 0.
    """
    left, right = (np.array(x, np.float64, order="C") for x in (a, np.swapaxes(b, -1, -2)))
    weights, requested = np.array(h, np.float64, order="C"), np.ascontiguousarray(requested)
    da, db = np.zeros_like(left), np.zeros_like(right)
    for n in range(requested.shape[0]):
        _gradients(left[n], right[n], requested[n], weights[n], da[n], db[n])
    return da, db


@inlined
def _threshold(top: float, K: int) -> float:
    """Return the least of K terms that can change a sum whose largest term is `top`."""
    return top - (math.log(K / _EPS) + 1.0)


@inlined
def _in_order(bits: int) -> int:
    """Return integers whose order is that of the numbers with these bits, and back."""
    return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)


@inlined
def _largest(x: Floats, y: Floats) -> float:
    """Return the largest x[k] + y[k], given that none is NaN.

    Integers are compared, so that the compiler may reorder comparisons and vectorize the loop.
    """
    largest = _in_order(bits_of(-np.inf))
    for k in range(len(x)):
        term = _in_order(bits_of(x[k] + y[k]))
        largest = term if term > largest else largest
    return number_of(_in_order(largest))  # type: ignore[no-any-return]


@inlined
def _sum(x: Floats, y: Floats, threshold: float, top: float) -> float:
    """Return the sum of exp(x[k] + y[k] - top) over terms not below a threshold."""
    total = 0.0
    for k in range(len(x)):
        if x[k] + y[k] >= threshold:
            total += math.exp(x[k] + y[k] - top)
    return total


@compiled
def _logsumexps(a: Floats, b: Floats, requested: Array, out: Floats, start: int, stop: int) -> None:
    """Write the logs of the sums over k of exp(a[n, i, k] + b[n, j, k]), if none is NaN.

    Rows i are numbered through the batch, from `start` to `stop`. Terms that cannot change a sum
    are skipped. On wide ranges a single term often remains, so terms are counted first.
    """
    for row in range(start, stop):
        n, i = divmod(row, out.shape[1])
        for j in range(out.shape[2]):
            if not requested[n, i, j]:
                continue
            x, y = a[n, i], b[n, j]
            top = _largest(x, y)
            threshold, count = _threshold(top, len(x)), 0
            for k in range(len(x)):
                count += x[k] + y[k] >= threshold
            if count > 1 and top > -np.inf:
                top += math.log(_sum(x, y, threshold, top))
            out[n, i, j] = top


@compiled
def _gradients(a: Floats, b: Floats, requested: Array, h: Floats, da: Floats, db: Floats) -> None:
    """Add h[i, j] times the softmax weight of a[i, k] + b[j, k] to da[i, k] and db[j, k].

    Softmax weights below eps / K are skipped.
    """
    for i in range(h.shape[0]):
        for j in range(h.shape[1]):
            if not requested[i, j]:
                continue
            x, y = a[i], b[j]
            top = _largest(x, y)
            if not top > -np.inf:
                continue
            threshold = _threshold(top, len(x))
            total = _sum(x, y, threshold, top)
            for k in range(len(x)):
                if x[k] + y[k] >= threshold:
                    p = math.exp(x[k] + y[k] - top) / total
                    da[i, k] += h[i, j] * p
                    db[j, k] += h[i, j] * p
