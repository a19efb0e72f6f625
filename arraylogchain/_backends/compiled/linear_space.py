"""Parts of a step of weights [K, R], flat, of R rows side by side.

A row's weights are *linear*, each 0 or in [min_weight, MOST], or logarithms near 0.

A linear step is a product, and a product with exp(x - top). With entries of matrices 0 or above
2^-1000 / min_weight no term of a sum is subnormal, and a factor is at least exp(DEEPEST), so
nothing is lost before a weight is found to be outside of its range. Then all weights of its row
are multiplied by a power of two. If the row still is not in range, it has failed.

Where small entries of a matrix were replaced by 0, each sum must be at least the threshold, or have
no positive term.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from arraylogchain._numba import elementary
from arraylogchain._numba.compiling import inlined, inner
from arraylogchain._numba.elementary import INF, exponent_of, power_of_two
from arraylogchain._numba.intrinsics import view

TINY = 2.0**-1022
MOST = 2.0**400
# Forms of a row. The last is a linear one that could not prove a step.
LINEAR, LOGS, FAILED = range(3)
# The power of two that a row's largest weight is raised to, and weights that are to be raised.
RAISED, SMALL = 300, 2.0**200
# Number of steps after which small weights are raised, and logs brought near 0.
PERIOD = 8
# Factors below exp of this may be lost.
DEEPEST = -700.0


class Segment(NamedTuple):
    """Steps ``x[:, start:stop]`` of the R rows of one group."""

    x: Any  # [R, ..., K], log potentials
    lengths: Any  # [R], in descending order
    first_step: int  # step number of x[:, 0]
    start: int
    stop: int
    backward: bool
    g: int  # number of the group


class MatrixPlace(NamedTuple):
    """Where the matrices of a segment are in an array of matrices, group after group."""

    per_group: Any  # matrices of each group: one for every step, or one for each transition
    sharing: int  # consecutive g of a `Segment` that share the matrices of one group
    first: int  # step from which the first of them leads to the next one


class Scratch(NamedTuple):
    """Work space to exponentiate the potentials of B steps at a time."""

    factors: Any  # [(B + 4) * K * R]
    x_shifts: Any  # [B + 3, R]


class Step(NamedTuple):
    """The messages of one step of R rows, [K, R], flat."""

    predicted: Any
    factors: Any  # exp(x) up to a scale
    updated: Any
    message: Any  # the updated message of the neighboring step
    moved: int  # rows with a transition into this step, the first ones
    active: int  # rows that have this step


@inner
def num_active(lengths, t):
    """Return the number of rows that have a step t; they are sorted by decreasing length."""
    n = len(lengths)
    while n > 0 and lengths[n - 1] <= t:
        n -= 1
    return n


@inner
def copy_rows(out, m, R, moved):
    """Copy the weights of rows without a transition into the step."""
    for start in range(0, len(m) if moved < R else 0, R):
        for i in range(start + moved, start + R):
            out[i] = m[i]


@inlined
def matrix_index(place, g, t, backward):
    """Return the number of the matrix that leads to the message of step t."""
    per_group, sharing, first = place
    n = (t if backward else t - 1) - first
    return g // sharing * per_group + (n if per_group > 1 and n > 0 else 0)


@inlined
def apply_potentials(step, min_weight, threshold):
    """Write updated weights; return how many are out of range, or come of a sum too small."""
    num_out_of_range, v, f, out = 0, step.predicted, step.factors, step.updated
    for i in range(len(out)):
        w = v[i] * f[i]
        out[i] = w
        num_out_of_range += (
            ((w < min_weight) & (v[i] > 0.0) & (f[i] > 0.0)) | (w > MOST) | (v[i] < threshold)
        )
    return num_out_of_range


@inner
def certify_rows(step, logs, base, bounds, exponent, forms):
    """Rescale rows into range; mark as FAILED rows that are not certified, and return their number.

    `base` is where the step's matrix begins in `logs`.
    """
    count, R, v, w = 0, len(forms), step.predicted, step.updated
    K, min_weight = len(v) // R, bounds.min_weight
    for r in range(step.active):
        if forms[r] != LINEAR:
            continue
        is_certified = rescale_into_range(v, step.factors, w, r, R, min_weight, exponent)
        if is_certified and bounds.threshold > 0.0 and r < step.moved:
            is_certified = _are_certified(step, logs, base, bounds.threshold, r, K, R)
        if not is_certified:
            forms[r] = FAILED
            count += 1
            w[r::R] = 0.0
    return count


@inner
def _are_certified(step, L, base, threshold, r, K, R):
    """Return whether the entries left out of a matrix affect no sum of a row.

    Each sum is at least the threshold, or exactly 0: none of its terms is positive.
    """
    v, m = step.predicted, step.message
    for j in range(K):
        if v[j * R + r] >= threshold:
            continue
        if v[j * R + r] > 0.0:
            return False
        for k in range(K):
            if m[k * R + r] > 0.0 and L[base + k * K + j] > -INF:
                return False
    return True


@inner
def rescale_into_range(v, f, w, r, R, min_weight, exponent):
    """Multiply the weights w = v * f of row r of R by a power of two, if they are out of range.

    Return whether they are in range, and none has been lost.
    """
    top, low = 0.0, INF
    for i in range(r, len(w), R):
        if not 0.0 <= w[i] < INF:
            return False
        if v[i] > 0.0 and f[i] > 0.0:
            top = w[i] if w[i] > top else top
            low = w[i] if w[i] < low else low
    if low >= min_weight and top <= MOST:
        return True
    if low < TINY:
        return False
    n = RAISED - exponent_of(top)
    n = n if n < 1000 else 1000
    if low * power_of_two(n) < min_weight:
        return False
    for i in range(r, len(w), R):
        w[i] *= power_of_two(n)
    exponent[r] -= n
    return True


@inner
def split_potentials(segment, low, count, scratch):
    """Write x - top of the steps x[:, low], ..., x[:, low + count - 1] of a segment to `scratch`.

    They are laid out as weights are; `top` is an integer, at least the largest of a row's step.
    Past rows' ends both are 0.
    """
    x, (R, _, K) = segment.x, segment.x.shape
    for i in range(count):
        out = view(scratch.factors, i * K * R, (K * R,))
        for r in range(R):
            for k in range(K):
                out[k * R + r] = x[r, low + i, k]
        active = num_active(segment.lengths, segment.first_step + low + i)
        elementary.subtract_row_max(out, active, scratch.x_shifts[i])


@inner
def rescale_small_rows(w, top, exponent):
    """Multiply each row whose largest weight is below SMALL by a power of two.

    Products of forward and backward weights then do not underflow.
    """
    R = len(top)
    elementary.row_maxima(w, R, top)
    small = 0
    for r in range(R):
        small += 0.0 < top[r] < SMALL
    if small == 0:
        return
    for r in range(R):
        n = RAISED - exponent_of(top[r]) if 0.0 < top[r] < SMALL else 0
        exponent[r] -= n
        top[r] = power_of_two(n)
    for i in range(len(w)):
        w[i] *= top[i % R]


@inner
def write_factors(segment, low, count, scratch, forms, m):
    """Write exp(x - top), see `split_potentials`; return how many rows are now marked as FAILED.

    They have factors that would be lost, or are infinite, or NaN. `m` is the message [K, R].
    """
    split_potentials(segment, low, count, scratch)
    factors, n, R, wrong, marked = scratch.factors, count * len(m), len(forms), 0, 0
    for i in range(n):
        wrong += _is_wrong(factors[i])
    for i in range(n if wrong > 0 else 0):
        if _is_wrong(factors[i]) and forms[i % R] == LINEAR:
            forms[i % R] = FAILED
            marked += 1
            m[i % R :: R] = 0.0
        if not factors[i] < INF:
            factors[i] = 0.0  # weights of the row are 0, and stay so
    elementary.exps(factors, 0.0, factors, n)
    return marked


@inlined
def _is_wrong(y):
    return ((y < DEEPEST) & (y > -INF)) | (not y < INF)
