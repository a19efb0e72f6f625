"""The forward and backward recursions over one segment of steps, compiled by Numba.

    predict    predicted_t = updated_{t-1} @ P_{t-1}   (forward)
               predicted_t = P_t @ updated_{t+1}       (backward)
    update     updated_t   = predicted_t * exp(x_t)

At the first step of a row (its last step, backward) `predicted` is the initial (final) weights.

A message of R rows that share their matrices is stored as a flat [K, R] array, so that one row and
many rows run the same code. Its true value is ``array * exp(shift) * 2**exponent``; both scales are
integers, kept per row, so that they accumulate without rounding.

Each row is first advanced in linear space, where every step certifies itself (see `linear_space`).
A row that is not certified is advanced again from the start of the segment in log space.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from arraylogchain._backends.compiled import linear_space
from arraylogchain._backends.compiled.linear_space import (
    FAILED,
    LINEAR,
    LOGS,
    RAISED,
    matrix_index,
    num_active,
)
from arraylogchain._backends.compiled.log_space import log_product, write_log_sum
from arraylogchain._backends.compiled.matrices import SparseColumns
from arraylogchain._numba import elementary, vector_sums
from arraylogchain._numba.compiling import compiled, inlined, inner
from arraylogchain._numba.elementary import INF, integer_shift, max_or_nan
from arraylogchain._numba.intrinsics import view

# `advance` takes these as plain tuples: Numba dispatches each named tuple 1 us more slowly. Inside
# compiled code, naming their fields costs nothing.


class Matrices(NamedTuple):
    """Transition matrices, scaled to a largest entry of about 1.

    The true matrix n is ``weights[n] * exp(scales[0, n]) * 2**scales[1, n]``, [from, to], or
    [to, from] for the backward recursion.
    """

    weights: Any  # [n, K, K], flat
    logs: Any  # their logarithms; empty if the logarithms of `weights` are as good
    scales: Any  # [2, n]
    place: Any  # a `MatrixPlace`


class Bounds(NamedTuple):
    """Sizes that certify a step; see `matrices.prepare`."""

    min_weight: float  # smallest nonzero weight that linear space may hold
    threshold: float  # smallest sum that dropped matrix entries cannot affect; 0 if none is dropped
    log_threshold: float  # smallest sum in log space that neither these nor underflow can affect
    is_special: bool  # some matrix entry is infinite or NaN


class PreparedMatrices(NamedTuple):
    """Matrices of one direction, bounds that certify their products, and sparse columns."""

    matrices: Any  # a `Matrices`
    bounds: Any  # a `Bounds`
    columns: Any  # a `SparseColumns`


class Carry(NamedTuple):
    """The message of the R rows of one group that enters a segment; replaced by the last one."""

    weights: Any  # [R, K], linear or logarithms
    shifts: Any  # [R]
    exponents: Any  # [R]
    forms: Any  # [R]: LINEAR or LOGS; a row keeps one form throughout the segment


class Stored(NamedTuple):
    """Messages of the segment's S steps, as far as the caller asked for them.

    Messages that are not requested are a scratch buffer of two steps, [2, 1, K * R]. Scales are
    empty if they are not requested.
    """

    predicted: Any  # [S, G, K * R]
    updated: Any  # [S + 1, G, K * R], including the carry that the segment starts from
    predicted_scales: Any  # [2, S, G, R]
    updated_scales: Any  # [2, S + 1, G, R]


@compiled
def advance(x, prepared, lengths, carry, stored, scratch, first_step, backward):
    """Advance all rows by one segment; return the number of rows that ended in log space.

    Parameters
    ----------
    x : array [G, R, S, K]
        Log potentials.
    prepared : (tuple, tuple, tuple)
        The fields of `Matrices`, where the place is a plain tuple too, `Bounds`, `SparseColumns`.
    lengths : array [G, R]
        Length of each row, in descending order.
    carry : (weights [G, R, K], scales [3, G, R], forms [G, R])
        See `Carry`. The last of the scales becomes the log of the sum of the weights.
    stored, scratch : tuple
        The fields of `Stored` and `linear_space.Scratch`.
    first_step : int
        Step number of ``x[:, :, 0]``.
    backward : bool
    """
    (F, L, matrix_scales, place), bounds, columns = prepared
    matrices = Matrices(F, L, matrix_scales, linear_space.MatrixPlace(*place))
    prepared = PreparedMatrices(matrices, Bounds(*bounds), SparseColumns(*columns))
    stored, scratch = Stored(*stored), linear_space.Scratch(*scratch)
    weights, scales, forms = carry
    log_range, num_in_logs = linear_log_range(prepared.bounds), 0
    S = x.shape[2]
    for g in range(len(x)):
        segment = linear_space.Segment(x[g], lengths[g], first_step, S - S, S, backward, g)
        rows = Carry(weights[g], scales[0, g], scales[1, g], forms[g])
        for r in range(len(rows.forms)):
            enter_linear_space(rows, r, prepared.bounds, log_range)
        advance_linear(segment, rows, prepared, stored, scratch)
        for r in range(len(rows.forms)):
            if rows.forms[r] != LINEAR:
                num_in_logs += 1
                _advance_in_logs(segment, rows, r, prepared, stored, scratch)
            write_log_sum(rows.weights[r], rows.forms[r] == LINEAR, scales[:, g, r])
    return num_in_logs


@inner
def linear_log_range(bounds):
    """Return the largest range of a row's logs, maximum less minimum, that fits linear space."""
    return (RAISED - 8 - math.log2(bounds.min_weight)) * math.log(2.0)


@inner
def enter_linear_space(rows, r, bounds, log_range):
    """Convert row r to linear space if its weights fit there.

    A linear row that does not fit becomes FAILED; a row of logarithms stays LOGS.
    """
    weights, shifts, exponents, forms = rows
    row, K = weights[r], weights.shape[1]
    if forms[r] == LINEAR:
        # Not literals: Numba would compile another version of the callee for each constant.
        zero, one = K - K, K // K
        fits = linear_space.rescale_into_range(
            row, row, row, zero, one, bounds.min_weight, view(exponents, r, (1,))
        )
        forms[r] = LINEAR if fits and not bounds.is_special else FAILED
        return
    row_max = max_or_nan(row)
    shift, num_too_small = integer_shift(row_max), 0
    shifts[r] += shift
    for k in range(K):
        row[k] -= shift
        num_too_small += (row[k] < -log_range) & (row[k] > -INF)
    if num_too_small == 0 and row_max == row_max and not bounds.is_special:
        elementary.exps(row, 0.0, row, K)
        for k in range(K):
            row[k] *= elementary.power_of_two(RAISED)
        exponents[r] -= RAISED
        forms[r] = LINEAR


@inner
def advance_linear(segment, rows, prepared, stored, scratch):
    """Advance the linear rows of a group; mark as FAILED, and zero, rows that are not certified."""
    x, lengths, first_step, start, stop, backward, g = segment
    matrices, bounds, _ = prepared
    factors, x_shifts = scratch
    R, S, K, B = len(x), stop - start, x.shape[2], len(x_shifts) - 3
    shift, exponent, row_max = x_shifts[B], x_shifts[B + 1], x_shifts[B + 2]
    # Messages that are not stored alternate between the two steps of a scratch buffer.
    num_predicted, predicted_g = len(stored.predicted), g % stored.predicted.shape[1]
    num_updated, updated_g = len(stored.updated), g % stored.updated.shape[1]
    zero = S - S  # not a literal, see `enter_linear_space`
    message = stored.updated[S % num_updated if backward else zero, updated_g]
    num_linear = _load_linear_rows(rows, message, shift, exponent)
    linear_space.rescale_small_rows(message, row_max, exponent)
    _store_scales(stored.updated_scales, g, S if backward else zero, shift, exponent)
    batch_start, next_batch = zero, zero  # steps whose potentials are exponentiated together
    for s in range(S if num_linear else 0):
        i = S - 1 - s if backward else s
        t = first_step + start + i
        if s == next_batch:
            count = S - s if S - s < B else B
            next_batch += count
            batch_start = i - count + 1 if backward else i
            num_linear -= linear_space.write_factors(
                segment, start + batch_start, count, scratch, rows.forms, message
            )
        exp_x = view(factors, (i - batch_start) * K * R, (K * R,))
        predicted = stored.predicted[i % num_predicted, predicted_g]
        updated = stored.updated[(i + (not backward)) % num_updated, updated_g]
        active = num_active(lengths, t)
        moved = num_active(lengths, t + 1) if backward else (active if t > 0 else 0)
        n = matrix_index(matrices.place, g, t, backward)
        _predict(predicted, message, prepared, n, moved, shift, exponent)
        _store_scales(stored.predicted_scales, g, i, shift, exponent)
        step = linear_space.Step(predicted, exp_x, updated, message, moved, active)
        if linear_space.apply_potentials(step, bounds.min_weight, bounds.threshold) > 0:
            num_linear -= linear_space.certify_rows(
                step, matrices.logs, n * K * K, bounds, exponent, rows.forms
            )
            if num_linear == 0:
                return
        if s % linear_space.PERIOD == 0:
            linear_space.rescale_small_rows(updated, row_max, exponent)
        for r in range(R):
            shift[r] += x_shifts[i - batch_start, r]
        _store_scales(stored.updated_scales, g, i + (not backward), shift, exponent)
        message = updated
    _store_linear_rows(rows, message, shift, exponent)


@inlined
def _predict(predicted, message, prepared, n, moved, shift, exponent):
    """Write the predicted message; rows without a transition into the step keep theirs."""
    matrices, sparse, R = prepared.matrices, prepared.columns, len(shift)
    K = len(message) // R
    if moved > 0 and len(sparse.rows) > 0:
        vector_sums.multiply_sparse(predicted, message, sparse, R, moved)
    elif moved > 0:
        vector_sums.multiply(predicted, message, matrices.weights, n * K * K, K, R, moved)
    for r in range(moved):
        shift[r] += matrices.scales[0, n]
        exponent[r] += matrices.scales[1, n]
    linear_space.copy_rows(predicted, message, R, moved)


@inner
def _load_linear_rows(rows, message, shift, exponent):
    """Copy the linear rows of a carry into a message, 0 for the others; return their number."""
    weights, shifts, exponents, forms = rows
    R, K = weights.shape
    count = 0
    for r in range(R):
        is_linear = forms[r] == LINEAR
        count += is_linear
        shift[r], exponent[r] = shifts[r], exponents[r]
        for k in range(K):
            message[k * R + r] = weights[r, k] if is_linear else 0.0
    return count


@inner
def _store_linear_rows(rows, message, shift, exponent):
    """Copy the rows that are linear still from a message back into the carry."""
    weights, shifts, exponents, forms = rows
    R, K = weights.shape
    for r in range(R):
        if forms[r] == LINEAR:
            shifts[r], exponents[r] = shift[r], exponent[r]
            for k in range(K):
                weights[r, k] = message[k * R + r]


@inner
def _store_scales(scales, g, i, shift, exponent):
    if scales.shape[1] > 0:
        for r in range(len(shift)):
            scales[0, i, g, r], scales[1, i, g, r] = shift[r], exponent[r]


@inner
def _advance_in_logs(segment, rows, r, prepared, stored, scratch):
    """Advance row r of a group in log space; overwrites the exponentials in `scratch`."""
    x, lengths, first_step, _, _, backward, g = segment
    weights, shifts, exponents, forms = rows
    matrices = prepared.matrices
    S, K = x.shape[1:]
    work = view(scratch.factors, 0, (4, K))
    message, new, sums, terms = work[0], work[1], work[2], work[3]
    if forms[r] == FAILED:
        exponents[r] += elementary.write_logs(weights[r])
    for k in range(K):
        message[k] = weights[r, k]
    at = S if backward else 0
    _store_row(message, stored.updated, stored.updated_scales, g, at, r, rows)
    for s in range(S):
        i = S - 1 - s if backward else s
        t = first_step + i
        if t < lengths[r] - 1 if backward else 0 < t < lengths[r]:
            n = matrix_index(matrices.place, g, t, backward)
            log_product(message, prepared, n, new, sums, terms)
            shifts[r] += matrices.scales[0, n]
            exponents[r] += matrices.scales[1, n]
        _store_row(message, stored.predicted, stored.predicted_scales, g, i, r, rows)
        if t < lengths[r]:
            shifts[r] = _add_potentials(message, x[r, i], shifts[r], new, terms)
        at = i + (not backward)
        _store_row(message, stored.updated, stored.updated_scales, g, at, r, rows)
    forms[r] = LOGS
    for k in range(K):
        weights[r, k] = message[k]


@inner
def _add_potentials(message, x, message_shift, potentials, joint):
    """Add potentials to a message in log space, and bring it near 0; return its new shift."""
    K = len(message)
    for k in range(K):
        potentials[k] = x[k]
    potential_shift = integer_shift(max_or_nan(potentials))
    for k in range(K):
        joint[k] = message[k] + (potentials[k] - potential_shift)
    shift = integer_shift(max_or_nan(joint))
    for k in range(K):
        # Subtract the large parts first: they cancel exactly.
        message[k] = (message[k] - shift) + (potentials[k] - potential_shift)
    return (message_shift + potential_shift) + shift


@inner
def _store_row(message, out, scales, g, i, r, rows):
    if scales.shape[1] > 0:
        for k in range(len(message)):
            out[i, g, k * len(rows.forms) + r] = message[k]
        scales[0, i, g, r], scales[1, i, g, r] = rows.shifts[r], rows.exponents[r]
