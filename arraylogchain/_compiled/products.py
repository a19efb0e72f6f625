"""Entries of log products one by one, as a loop: where a matrix multiply proves nothing."""

from __future__ import annotations

import math

import numpy as np

from arraylogchain import _threads
from arraylogchain._array.products import exact
from arraylogchain._compiled.compiling import Floats, Integers, compiled
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
    are more terms than can be copied, or +inf, which gives NaN with -inf.
    """
    inner = int(a.shape[-1])
    if inner > chunk or bool(np.max(a) == math.inf) or bool(np.max(b) == math.inf):
        return exact.logsumexp_where(ctx, out, a, b, wanted, precision, block, chunk)
    left = np.ascontiguousarray(a, dtype=np.float64)
    right = ctx.transposed(b, DOUBLE)
    entries = np.nonzero(wanted)
    found = np.empty(len(entries[0]))
    reach = math.log(inner / DOUBLE.eps) + 1.0

    def compute(start: int, stop: int) -> None:
        at, row, col = (x[start:stop] for x in entries)
        _logsumexps(left, right, at, row, col, reach, found[start:stop])

    _threads.share(compute, len(found), max(1, _BLOCK // inner))
    out[wanted] = found
    return out


@compiled
def _logsumexps(
    a: Floats, b: Floats, at: Integers, row: Integers, col: Integers, reach: float, out: Floats
) -> None:
    """Write the logs of the sums over k of exp(a[at, row, k] + b[at, col, k]).

    All terms that are left out, more than `reach` below the largest, cannot change a sum.
    """
    inner = a.shape[-1]
    for e in range(out.shape[0]):
        x, y = a[at[e], row[e]], b[at[e], col[e]]
        top = _largest(x, y)
        if top == -np.inf:
            out[e] = top
            continue
        total = 0.0
        least = top - reach
        for k in range(inner):
            term = x[k] + y[k]
            if term >= least:
                total += math.exp(term - top)
        out[e] = top + math.log(total)


@compiled
def _largest(x: Floats, y: Floats) -> float:
    """Return the largest of x + y; four at a time, each of which waits for none of the others."""
    p = q = r = s = -np.inf
    whole = x.shape[0] // 4 * 4
    for k in range(0, whole, 4):
        t, u, v, w = x[k] + y[k], x[k + 1] + y[k + 1], x[k + 2] + y[k + 2], x[k + 3] + y[k + 3]
        p = t if t > p else p
        q = u if u > q else q
        r = v if v > r else r
        s = w if w > s else s
    for k in range(whole, x.shape[0]):
        p = max(p, x[k] + y[k])
    return max(max(p, q), max(r, s))
