"""Entries of log products one by one, as a loop: where a matrix multiply proves nothing."""

from __future__ import annotations

import math

import numpy as np

from arraylogchain import _threads
from arraylogchain._array.products import exact
from arraylogchain._compiled.loops.compiling import Floats, compiled
from arraylogchain._context import DOUBLE, Array, Context, Precision

# Terms in a block that threads share.
_BLOCK = 1 << 18
# From this share of entries on, all are computed.
_SHARE = 0.1


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

    The arguments are those of `_array.products.exact.logsumexp_where`, which takes over where few
    entries are wanted, where there are more terms than can be copied, and where there is NaN, or
    +inf, which gives NaN with -inf.
    """
    inner = int(a.shape[-1])
    few = np.count_nonzero(wanted) < _SHARE * wanted.size
    if few or inner > chunk or not (np.max(a) < math.inf and np.max(b) < math.inf):
        return exact.logsumexp_where(ctx, out, a, b, wanted, precision, block, chunk)
    left, right = (np.ascontiguousarray(x, dtype=np.float64) for x in (a, b))
    reach = math.log(inner / DOUBLE.eps) + 1.0
    found = np.empty(wanted.shape)
    for n in range(wanted.shape[0]):

        def compute(start: int, stop: int, n: int = n) -> None:
            buffers = np.empty((2, right.shape[-1]))
            _logsumexps(left[n, start:stop], right[n], reach, buffers, found[n, start:stop])

        rows, cols = wanted.shape[1:]
        _threads.share(compute, rows, max(1, _BLOCK // (inner * cols)))
    return np.where(wanted, found, out)


@compiled
def _logsumexps(a: Floats, b: Floats, reach: float, buffers: Floats, out: Floats) -> None:
    """Write the logs of the sums over k of exp(a[i, k] + b[k, j]), which are not NaN.

    All terms that are left out, more than `reach` below the largest, cannot change a sum. On wide
    ranges hardly any other one is left, so they are counted first. The inner loops over j are those
    that the compiler makes vector instructions of.
    """
    inner, cols = b.shape
    least, count = buffers
    for i in range(out.shape[0]):
        top = out[i]
        top[:] = -np.inf
        for k in range(inner):
            x, y = a[i, k], b[k]
            for j in range(cols):
                top[j] = x + y[j] if x + y[j] > top[j] else top[j]
        for j in range(cols):
            least[j] = top[j] - reach
            count[j] = 0.0
        for k in range(inner):
            x, y = a[i, k], b[k]
            for j in range(cols):
                count[j] += 1.0 if x + y[j] >= least[j] else 0.0
        for j in range(cols):
            if count[j] > 1.0 and top[j] > -np.inf:
                total = 0.0
                for k in range(inner):
                    if a[i, k] + b[k, j] >= least[j]:
                        total += math.exp(a[i, k] + b[k, j] - top[j])
                top[j] += math.log(total)
