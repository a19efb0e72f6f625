"""The recursion: rows side by side that share their matrices, through a block of steps.

    predicted_t = updated_{t-1} @ P_{t-1}      forward; at a row's first step what it begins with
    predicted_t = P_t @ updated_{t+1}          backward; at its last step what it ends with
    updated_t   = predicted_t * exp(x_t)

Weights of a state of R rows are an array [K, R], flat: there is no difference between one row and
many, but for the order of loops. They are to be multiplied by exp(shift) * 2^power, whole numbers.

A row first goes through a block in linear weights, as long as each step is proved; see `steps`. If
one is not, it goes through the block again, in logarithms.
"""

from __future__ import annotations

import math

from arraylogchain._backends.compiled import linear_space
from arraylogchain._backends.compiled.linear_space import FAILED, LINEAR, LOGS, RAISED, num_active
from arraylogchain._backends.compiled.log_space import log_product, write_log_sum
from arraylogchain._numba import elementary, vector_sums
from arraylogchain._numba.compiling import compiled, inner
from arraylogchain._numba.elementary import INF, integer_shift, max_or_nan


@compiled
def advance(x, matrices, bounds, sparse, lengths, carry, stored, scratch, first, backward):
    """Take groups of rows through the steps of a block; return how many are in logs.

    Parameters
    ----------
    x : array [G, R, S, K]
        Potentials.
    matrices : (F, L, scales, count, sharing, first_matrix)
        F [n, K, K], flat, with exp(scales[0, n]) * 2^scales[1, n]; transposed if `backward`.
        Logarithms of entries of F, or empty. `count` of them, for the steps from `first_matrix`
        on, are         the matrices of as many x[g], one after another, as are `sharing` them.
    bounds : (least, line, log_line, is_special)
        The least linear weight; the least sum that is proved if entries were left out of F, else 0;
        the least sum of a step in logarithms; whether entries are infinite or NaN.
    sparse : (rows, logs)
        Of the one matrix, if there is one and it has few entries; see `log_product`.
    lengths : array [G, R]
        Steps of rows, the longest first.
    carry : (weights [G, R, K], scales [3, G, R], forms [G, R])
        Changed. The last is LINEAR or LOGS, as rows are in all of the block. What a chain begins
        with may have any weights. Third of the scales are the logs of the sums of all weights.
    stored : (predicted [S, G, K * R], updated [S + 1, G, K * R], scales of both [2, ..., G, R])
        What is kept of each step; `updated` also has what the block began with. What is not kept is
        [2, 1, K * R], and no scales.
    scratch : arrays [B + 4, K * R], flat, and [B + 3, R]
        B steps are weighed by exponentials that are computed together.
    first : int
        The first step of the block.
    backward : bool
    """
    weights, scales, forms = carry
    log_range, num_in_logs = (RAISED - 8 - math.log2(bounds[0])) * math.log(2.0), 0
    for g in range(len(x)):
        rows = weights[g], scales[0, g], scales[1, g], forms[g]
        for r in range(len(forms[g])):
            _enter_linear_space(rows, r, bounds, log_range)
        _advance_linear(
            x[g], matrices, bounds, lengths[g], rows, stored, scratch, first, backward, g
        )
        for r in range(len(forms[g])):
            if forms[g, r] != LINEAR:
                num_in_logs += 1
                _advance_in_log_space(
                    x[g],
                    matrices,
                    bounds,
                    sparse,
                    lengths[g],
                    rows,
                    stored,
                    scratch,
                    first,
                    backward,
                    g,
                    r,
                )
            write_log_sum(weights[g, r], forms[g, r] == LINEAR, scales[:, g, r])
    return num_in_logs


@inner
def _enter_linear_space(carry, r, bounds, log_range):
    """Make a row linear, if its weights can be brought into range; else mark it, or leave logs."""
    weights, shifts, exponents, forms = carry
    m, K, is_special = weights[r], weights.shape[1], bounds[3]
    if forms[r] == LINEAR:
        zero, one = K - K, K // K  # Numba would compile another function for constants
        fits = linear_space.rescale_into_range(m, m, m, zero, K, one, bounds[0], exponents[r:])
        forms[r] = LINEAR if fits and not is_special else FAILED
        return
    top = max_or_nan(m)
    shift, num_too_small = integer_shift(top), 0
    shifts[r] += shift
    for k in range(K):
        m[k] -= shift
        num_too_small += (m[k] < -log_range) & (m[k] > -INF)
    if num_too_small == 0 and top == top and not is_special:
        elementary.exps(m, 0.0, m, K)
        for k in range(K):
            m[k] *= elementary.power_of_two(RAISED)
        exponents[r] -= RAISED
        forms[r] = LINEAR


@inner
def _advance_linear(x, matrices, bounds, lengths, carry, stored, scratch, first, backward, g):
    """Take rows of a group through a block, those that are linear; mark what fails."""
    F, L, matrix_scales, per_group, sharing, first_matrix = matrices
    forms = carry[3]
    predicted, updated, predicted_scales, updated_scales = stored
    R, S, K = x.shape
    B = len(scratch[1]) - 3
    factors, x_shifts, row_scratch = scratch[0], scratch[1], scratch[1][B:]
    shift, exponent, row_max = row_scratch[0], row_scratch[1], row_scratch[2]
    # What is not kept is written over: of that there are two steps, one after another.
    num_predicted, num_updated, ga, gl = (
        len(predicted),
        len(updated),
        g % predicted.shape[1],
        g % updated.shape[1],
    )
    next_batch = low = S - S  # of a constant Numba compiles another version
    m = updated[S % num_updated if backward else 0, gl]
    num_linear = _copy_linear_rows(m, shift, exponent, carry, next_batch)
    linear_space.raise_weights(m, row_max, exponent)
    _store_scales(updated_scales, g, S if backward else 0, shift, exponent)
    for s in range(S if num_linear else 0):
        i = S - 1 - s if backward else s
        t = first + i
        if s == next_batch:
            count = S - s if S - s < B else B
            next_batch += count
            low = i - count + 1 if backward else i
            num_linear -= linear_space.write_factors(
                x, low, count, lengths, first, factors, x_shifts, forms, m
            )
        active, f = num_active(lengths, t), factors[(i - low) * K * R : (i - low + 1) * K * R]
        moved = num_active(lengths, t + 1) if backward else (active if t > 0 else 0)
        v, w = predicted[i % num_predicted, ga], updated[(i + (not backward)) % num_updated, gl]
        n = linear_space.matrix_index(per_group, g // sharing, t, first_matrix, backward)
        if moved > 0:
            vector_sums.multiply(v, m, F, n * K * K, K, R, moved)
        for r in range(moved):
            shift[r] += matrix_scales[0, n]
            exponent[r] += matrix_scales[1, n]
        linear_space.copy_rows(v, m, R, moved)
        _store_scales(predicted_scales, g, i, shift, exponent)
        if linear_space.apply_potentials(v, f, w, bounds[0], bounds[1]) > 0:
            num_linear -= linear_space.certify_rows(
                v, f, w, m, L, n * K * K, bounds, exponent, forms, moved, active
            )
            if num_linear == 0:
                return
        if s % linear_space.PERIOD == 0:
            linear_space.raise_weights(w, row_max, exponent)
        for r in range(R):
            shift[r] += x_shifts[i - low, r]
        _store_scales(updated_scales, g, i + (not backward), shift, exponent)
        m = w
    _copy_linear_rows(m, shift, exponent, carry, next_batch)


@inner
def _copy_linear_rows(m, shift, exponent, carry, is_after):
    """Copy a state's rows that are linear, back once steps are taken; return how many these are."""
    weights, shifts, exponents, forms = carry
    R, K = weights.shape
    count = 0
    for r in range(R):
        is_linear = forms[r] == LINEAR
        count += is_linear
        if is_after == 0:
            shift[r], exponent[r] = shifts[r], exponents[r]
        elif is_linear:
            shifts[r], exponents[r] = shift[r], exponent[r]
        for k in range(K):
            if is_after == 0:
                m[k * R + r] = weights[r, k] if is_linear else 0.0
            elif is_linear:
                weights[r, k] = m[k * R + r]
    return count


@inner
def _store_scales(scales, g, i, shift, exponent):
    if scales.shape[1] > 0:
        for r in range(len(shift)):
            scales[0, i, g, r], scales[1, i, g, r] = shift[r], exponent[r]


@inner
def _advance_in_log_space(
    x, matrices, bounds, sparse, lengths, carry, stored, scratch, first, backward, g, r
):
    """Take a row through a block in logarithms; factors in `scratch` are not needed any more."""
    F, L, matrix_scales, per_group, sharing, first_matrix = matrices
    weights, shifts, exponents, forms = carry
    predicted, updated, predicted_scales, updated_scales = stored
    S, K, buffer = x.shape[1], x.shape[2], scratch[0]
    a, c, sums, u = buffer[:K], buffer[K : 2 * K], buffer[2 * K : 3 * K], buffer[3 * K : 4 * K]
    if forms[r] == FAILED:
        exponents[r] += elementary.write_logs(weights[r])
    for k in range(K):
        a[k] = weights[r, k]
    _store_row(a, updated, updated_scales, g, S if backward else 0, r, shifts, exponents)
    for s in range(S):
        i = S - 1 - s if backward else s
        t = first + i
        moved = t < lengths[r] - 1 if backward else 0 < t < lengths[r]
        if moved:
            n = linear_space.matrix_index(per_group, g // sharing, t, first_matrix, backward)
            log_product(a, F, L, n * K * K, bounds[2], bounds[3], sparse, c, sums, u)
            shifts[r] += matrix_scales[0, n]
            exponents[r] += matrix_scales[1, n]
            for k in range(K):
                a[k] = c[k]
        _store_row(a, predicted, predicted_scales, g, i, r, shifts, exponents)
        if t < lengths[r]:
            for k in range(K):
                c[k] = x[r, i, k]
            shift = integer_shift(max_or_nan(c))
            for k in range(K):
                u[k] = a[k] + (c[k] - shift)
            top = integer_shift(max_or_nan(u))
            for k in range(K):
                a[k] = (a[k] - top) + (c[k] - shift)  # what is large cancels first, exactly
            shifts[r] = (shifts[r] + shift) + top
        _store_row(a, updated, updated_scales, g, i + (not backward), r, shifts, exponents)
    forms[r] = LOGS
    for k in range(K):
        weights[r, k] = a[k]


@inner
def _store_row(a, out, scales, g, i, r, shifts, exponents):
    if scales.shape[1] > 0:
        for k in range(len(a)):
            out[i, g, k * len(shifts) + r] = a[k]
        scales[0, i, g, r], scales[1, i, g, r] = shifts[r], exponents[r]
