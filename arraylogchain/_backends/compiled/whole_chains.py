"""log Z, marginals, counts and gradients of whole chains, in one call.

Rows of a group are taken in *lanes*, so many side by side, sorted by length: forward through all
steps, and backward in chunks, after each of which its marginals are added. Lanes stop at the end of
their longest row. All of it is in linear space, where every step certifies itself, and every
normalizer of marginals has to be well within the range of numbers; see `_chains.marginals`. A row
that is not certified is declined.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from arraylogchain._backends.compiled.linear_space import FAILED, LINEAR, LOGS, num_active
from arraylogchain._backends.compiled.log_space import write_log_sum
from arraylogchain._backends.compiled.matrices import SparseColumns, prepare_linear
from arraylogchain._backends.compiled.recursion import (
    Bounds,
    Carry,
    Matrices,
    Scratch,
    Segment,
    Stored,
    advance_linear,
    enter_linear_space,
    linear_log_range,
)
from arraylogchain._numba.compiling import compiled, inner, views

# Bounds on normalizers and on magnitudes of cotangents, as in `_chains.cotangents`.
_MIN_NORMALIZER, _MAX_NORMALIZER = 2.0**-116, 2.0**900
_MIN_COTANGENT, _MAX_COTANGENT = 2.0**-64, 2.0**64

# The entry points take these as plain tuples; see `recursion`.


class Chains(NamedTuple):
    """Whole chains: the rows of all groups, one group after another."""

    x: Any  # [N, T, K], log potentials
    lengths: Any  # [N], in descending order in each group
    transitions: Any  # [G, n, K, K]: one matrix for every step, or n of them
    initial: Any  # [N, K]
    final: Any  # [N, K]
    transitions_are_log: bool
    initial_is_log: bool
    final_is_log: bool


class Sizes(NamedTuple):
    """Sizes of the work space, and of the updated messages that are stored forward."""

    lanes: int  # L rows side by side
    batch: int  # B steps whose potentials are exponentiated together
    chunk: int  # C steps backward, whose messages are stored
    row_size: int  # numbers stored for each row; 0 where lanes use the same memory
    is_stored: bool  # whether the messages are those of an earlier call


class Gradients(NamedTuple):
    """Marginals, counts and gradients, times cotangents; what is not requested has length 0."""

    potentials: Any  # [N, T, K]
    transitions: Any  # [G, n, K, K]
    boundary: Any  # [2, N, K]: with respect to initial and final weights
    by_logs: bool  # whether pair marginals include the weights of their transitions


class Workspace(NamedTuple):
    """Views of one array."""

    matrices: Any  # [2, n, K * K], from step to step and transposed
    scales: Any  # [2, n]
    extremes: Any  # [2, n]
    pairs: Any  # [n, K, K], of some lanes
    scratch: Any  # two arrays, see `Scratch`
    carries: Any  # [2, L * (K + 2)]: forward and backward
    boundary: Any  # [2, L, K + 1]: weights as the recursions began with them, and exponents
    normalizers: Any  # [L]
    predicted: Any  # [max(C, 2), 1, K * L]
    updated: Any  # [C + 1, 1, K * L]


class Lanes(NamedTuple):
    """Rows that are computed side by side."""

    x: Any  # [L, T, K]
    lengths: Any  # [L]
    first: int  # number of the first row
    forward: Any  # a `Carry`
    backward: Any
    alpha: Any  # messages, see `Workspace`
    predicted: Any
    updated: Any


class Group(NamedTuple):
    """Matrices of a group of rows in one direction, and what certifies their products."""

    matrices: Any
    bounds: Any
    columns: Any  # `SparseColumns`


@compiled
def log_partition(chains, columns, sizes, memory, alpha, forms, log_z, declined):
    """Write log Z of whole chains, and which rows are declined.

    Parameters
    ----------
    chains, columns, sizes : tuple
        The fields of `Chains`, `SparseColumns` and `Sizes`. The weights of columns are undefined.
    memory : array
        For `Workspace`.
    alpha : array
        Updated messages forward, of the T + 1 steps of all rows if they are stored, else of 2 steps
        of some lanes.
    forms : int8 array [2, L]
    log_z : array [N]
    declined : bool array [N]
    """
    chains, columns, sizes = Chains(*chains), SparseColumns(*columns), Sizes(*sizes)
    R = len(chains.x) // len(chains.transitions)
    work = _cut(chains, sizes, memory)
    for g in range(len(chains.transitions)):
        group = _prepare_group(chains, g, columns, work)
        for start in range(g * R, (g + 1) * R, sizes.lanes):
            width = min(sizes.lanes, (g + 1) * R - start)
            lanes = _lanes(chains, start, width, work, alpha, sizes, forms)
            _enter_linear_space(lanes, group, work)
            _run_forward(lanes, group, work, log_z)
            _write_declined(lanes, declined)


@compiled
def posterior(
    chains,
    columns,
    back_columns,
    sizes,
    memory,
    alpha,
    forms,
    cotangents,
    gradients,
    log_z,
    declined,
):
    """Write log Z and gradients of whole chains, and which rows are declined.

    With messages of an earlier call, `declined` is that of this call, and log Z is not computed.

    Parameters
    ----------
    back_columns : tuple
        As `columns`, of the transposed matrix.
    cotangents : array [N]
    gradients : tuple
        The fields of `Gradients`; transitions are summed over rows that are not declined.
    others
        See `log_partition`.
    """
    chains, sizes, gradients = Chains(*chains), Sizes(*sizes), Gradients(*gradients)
    columns, back_columns = SparseColumns(*columns), SparseColumns(*back_columns)
    R = len(chains.x) // len(chains.transitions)
    work = _cut(chains, sizes, memory)
    for g in range(len(chains.transitions)):
        group = _prepare_group(chains, g, columns, work)
        back_group = _transpose(group, back_columns, work)
        for start in range(g * R, (g + 1) * R, sizes.lanes):
            width = min(sizes.lanes, (g + 1) * R - start)
            lanes = _lanes(chains, start, width, work, alpha, sizes, forms)
            for r in range(len(lanes.x)):
                size = abs(cotangents[start + r])
                in_range = size == 0.0 or _MIN_COTANGENT <= size <= _MAX_COTANGENT
                if not in_range or (sizes.is_stored and declined[start + r]):
                    lanes.forward.forms[r] = FAILED
            _enter_linear_space(lanes, group, work)
            if sizes.is_stored:
                _load_last(lanes)
            else:
                _run_forward(lanes, group, work, log_z)
            _run_backward(chains, lanes, back_group, cotangents, gradients, work, sizes.chunk)
            if len(gradients.transitions) > 0:
                _add(gradients.transitions[g], work.pairs)
            _write_zeros(lanes, gradients)
            _write_declined(lanes, declined)
        if len(gradients.transitions) > 0:
            _scale_pairs(gradients.transitions[g], group.matrices, gradients.by_logs)


@views
def _cut(chains, sizes, memory):
    """Return the views of the work space; see `memory_size`."""
    (_, count, K, _), L, B, C = chains.transitions.shape, sizes.lanes, sizes.batch, sizes.chunk
    i = 0
    both = memory[i : i + 2 * count * K * K].reshape((2, count, K * K))
    i += 2 * count * K * K
    pairs = memory[i : i + count * K * K].reshape((count, K, K))
    i += count * K * K
    scales, extremes = memory[i : i + 2 * count], memory[i + 2 * count : i + 4 * count]
    i += 4 * count
    factors = memory[i : i + (B + 4) * K * L]
    i += (B + 4) * K * L
    x_shifts = memory[i : i + (B + 3) * L]
    i += (B + 3) * L
    carries = memory[i : i + 2 * L * (K + 2)].reshape((2, L * (K + 2)))
    i += 2 * L * (K + 2)
    boundary = memory[i : i + 2 * L * (K + 1)].reshape((2, L, K + 1))
    i += 2 * L * (K + 1)
    normalizers = memory[i : i + L]
    i += L
    predicted = memory[i : i + C * K * L]
    i += C * K * L
    updated = memory[i : i + (C + 1) * K * L]
    return Workspace(
        both,
        scales.reshape((2, count)),
        extremes.reshape((2, count)),
        pairs,
        (factors, x_shifts),
        carries,
        boundary,
        normalizers,
        predicted,
        updated,
    )


def memory_size(K: int, num_matrices: int, L: int, B: int, C: int) -> int:
    """Return how many numbers `Workspace` takes."""
    of_matrices = num_matrices * (3 * K * K + 4)
    return of_matrices + L * ((B + 4) * K + B + 3 + 4 * K + 7 + (2 * C + 1) * K)


@views
def _prepare_group(chains, g, columns, work):
    """Return the matrices of a group, as far as its longest row reads them."""
    (G, count, K, _), N = chains.transitions.shape, len(chains.x)
    longest, one = chains.lengths[g * (N // G)], K // K
    used = min(count, max(longest - 1, 0))
    weights, scales = work.matrices[0], work.scales
    min_weight = prepare_linear(
        chains.transitions[g][:used], chains.transitions_are_log, weights, scales, work.extremes
    )
    for j in range(len(columns.starts) - 1):
        for p in range(columns.starts[j], columns.starts[j + 1]):
            columns.weights[p] = weights[0, columns.rows[p] * K + j]
    matrices = Matrices(
        weights.reshape(count * K * K), columns.logs, scales, count, one, count - count
    )
    bounds = Bounds(min_weight, 0.0, 0.0, not min_weight > 0.0)
    return Group(matrices, bounds, columns)


@views
def _transpose(group, columns, work):
    """Return the matrices of the backward recursion, with the same scales."""
    _, count, _ = work.matrices.shape
    K = work.pairs.shape[1]
    for n in range(count):
        source, target = work.matrices[0, n], work.matrices[1, n]
        for k in range(K):
            for j in range(K):
                target[j * K + k] = source[k * K + j]
    weights, (_, _, scales, _, sharing, first) = work.matrices[1], group.matrices
    for j in range(len(columns.starts) - 1):
        for p in range(columns.starts[j], columns.starts[j + 1]):
            columns.weights[p] = weights[0, columns.rows[p] * K + j]
    matrices = Matrices(weights.reshape(count * K * K), columns.logs, scales, count, sharing, first)
    return Group(matrices, group.bounds, columns)


@views
def _lanes(chains, start, width, work, alpha, sizes, forms):
    """Return lanes of the rows from `start` on, whose carries are boundary weights."""
    K = chains.x.shape[2]
    forward = _carry(work.carries[0], forms[0], width, K)
    backward = _carry(work.carries[1], forms[1], width, K)
    for r in range(width):
        for k in range(K):
            forward.weights[r, k] = chains.initial[start + r, k]
            backward.weights[r, k] = chains.final[start + r, k]
        forward.forms[r] = LOGS if chains.initial_is_log else LINEAR
        backward.forms[r] = LOGS if chains.final_is_log else LINEAR
        forward.shifts[r], forward.exponents[r] = 0.0, 0.0
        backward.shifts[r], backward.exponents[r] = 0.0, 0.0
    size = K * width
    return Lanes(
        chains.x[start : start + width],
        chains.lengths[start : start + width],
        start,
        forward,
        backward,
        _messages(alpha[start * sizes.row_size :], size),
        _messages(work.predicted, size),
        _messages(work.updated, size),
    )


@views
def _messages(memory, size):
    """Return an array [n, 1, size] of as many messages as fit."""
    n = len(memory) // size
    return memory[: n * size].reshape((n, 1, size))


@views
def _carry(memory, forms, width, K):
    """Return a carry of some rows."""
    weights = memory[: width * K].reshape((width, K))
    scales = memory[width * K :]
    return Carry(weights, scales[:width], scales[width : 2 * width], forms[:width])


@inner
def _enter_linear_space(lanes, group, work):
    """Convert boundary weights to linear space, and keep them; mark rows as FAILED without."""
    forward, backward = lanes.forward, lanes.backward
    width, K = forward.weights.shape
    log_range = linear_log_range(group.bounds) if group.bounds.min_weight > 0.0 else 0.0
    for r in range(width):
        if forward.forms[r] != FAILED:
            enter_linear_space(forward, r, group.bounds, log_range)
            enter_linear_space(backward, r, group.bounds, log_range)
        if forward.forms[r] != LINEAR or backward.forms[r] != LINEAR:
            forward.forms[r], backward.forms[r] = FAILED, FAILED
        for k in range(K):
            work.boundary[0, r, k] = forward.weights[r, k]
            work.boundary[1, r, k] = backward.weights[r, k]
        work.boundary[0, r, K], work.boundary[1, r, K] = forward.exponents[r], backward.exponents[r]


@inner
def _load_last(lanes):
    """Load the last updated messages of an earlier call."""
    weights = lanes.forward.weights
    (width, K), last = weights.shape, lanes.alpha[lanes.lengths[0], 0]
    for r in range(width):
        for k in range(K):
            weights[r, k] = last[k * width + r]


@inner
def _run_forward(lanes, group, work, log_z):
    """Run forward through all steps; mark rows as FAILED that are not certified."""
    forward, backward = lanes.forward, lanes.backward
    (width, K), T = forward.weights.shape, lanes.lengths[0]
    segment = Segment(lanes.x, lanes.lengths, T - T, T - T, T, T < 0, T - T)
    _advance(segment, forward, group, lanes.predicted[:2], lanes.alpha, work)
    terms, scales = work.scratch[0][:K], work.scratch[1][:3]
    for r in range(width):
        if forward.forms[r] != LINEAR:
            continue
        total = 0.0
        for k in range(K):
            terms[k] = forward.weights[r, k] * backward.weights[r, k]
            total += terms[k]
        scales[0] = forward.shifts[r] + backward.shifts[r]
        scales[1] = forward.exponents[r] + backward.exponents[r]
        if _MIN_NORMALIZER <= total <= _MAX_NORMALIZER:
            write_log_sum(terms, total == total, scales)
            log_z[lanes.first + r] = scales[2]
        else:
            forward.forms[r] = FAILED


@inner
def _advance(segment, carry, group, predicted, updated, work):
    """Advance the linear rows of lanes; scales of stored messages are not kept."""
    width, count = len(carry.forms), len(work.scratch[1]) // len(work.normalizers)
    x_shifts = work.scratch[1][: count * width].reshape((count, width))
    no_scales = work.scratch[1][:0].reshape((2, 0, 1, width))
    stored = Stored(predicted, updated, no_scales, no_scales)
    scratch = Scratch(work.scratch[0], x_shifts)
    advance_linear(segment, carry, group.matrices, group.bounds, group.columns, stored, scratch)


@inner
def _run_backward(chains, lanes, group, cotangents, gradients, work, chunk):
    """Run backward through all steps, and add marginals; mark rows that are not certified.

    Pair marginals of these are in the sums by then, which are added up again without them.
    """
    forward, backward, T = lanes.forward, lanes.backward, lanes.lengths[0]
    width, K = forward.weights.shape
    num_failed = 1
    while num_failed > 0:
        num_failed, num_linear = 0, 0
        for r in range(width):
            num_linear += forward.forms[r] == LINEAR
            backward.forms[r] = forward.forms[r]
            backward.shifts[r], backward.exponents[r] = 0.0, 0.0
            for k in range(K):
                backward.weights[r, k] = work.boundary[1, r, k]
        work.pairs[:] = 0.0
        stop = T if num_linear > 0 else 0
        while stop > 0:
            start = max(stop - chunk, 0)
            segment = Segment(lanes.x, lanes.lengths, T - T, start, stop, T > 0, T - T)
            _advance(segment, backward, group, lanes.predicted, lanes.updated, work)
            for r in range(width):
                if backward.forms[r] != LINEAR and forward.forms[r] == LINEAR:
                    forward.forms[r] = FAILED
                    num_failed += 1
            num_failed += _add_chunk(lanes, segment, cotangents, gradients, work)
            stop = start
        if num_linear > 0:
            num_failed += _write_boundary(chains, lanes, cotangents, gradients, work)
        if len(gradients.transitions) == 0:
            return


@inner
def _add_chunk(lanes, segment, cotangents, gradients, work):
    """Add the marginals of a chunk of steps; return how many rows are now marked as FAILED."""
    num_failed, width, matrix_step = 0, len(lanes.lengths), len(work.pairs) > 1
    with_pairs, with_states = len(gradients.transitions) > 0, len(gradients.potentials) > 0
    factors = work.normalizers[:width]
    for t in range(segment.start, segment.stop):
        alpha, i = lanes.alpha[t + 1, 0], t - segment.start
        beta, beta_x = lanes.predicted[i, 0], lanes.updated[i + 1, 0]
        active = num_active(lanes.lengths, t)
        num_failed += _write_factors(alpha, beta, lanes, cotangents, factors, active)
        if with_states:
            for r in range(active):
                out = gradients.potentials[lanes.first + r, t]
                for k in range(len(out)):
                    out[k] = (alpha[k * width + r] * beta[k * width + r]) * factors[r]
        moved = num_active(lanes.lengths, t + 1)
        if with_pairs and moved > 0:
            pairs = work.pairs[t if matrix_step else 0]
            if width == 1:
                _add_pairs_of_row(alpha, beta_x, factors[0], pairs)
            else:
                _add_pairs(alpha, beta_x, factors, width, moved, work.scratch[0], pairs)
    return num_failed


@inner
def _write_factors(alpha, beta, lanes, cotangents, factors, active):
    """Write cotangents over normalizers, 0 for failed rows; return how many rows fail by these."""
    width, num_failed, forms = len(lanes.lengths), 0, lanes.forward.forms
    for r in range(active):
        factors[r] = 0.0
    for start in range(0, len(alpha), width):
        a, b = alpha[start : start + active], beta[start : start + active]
        for r in range(active):
            factors[r] += a[r] * b[r]
    for r in range(active):
        is_certified = _MIN_NORMALIZER <= factors[r] <= _MAX_NORMALIZER
        if forms[r] == LINEAR and not is_certified:
            forms[r] = FAILED
            num_failed += 1
        factors[r] = cotangents[lanes.first + r] / factors[r] if forms[r] == LINEAR else 0.0
    return num_failed


@inner
def _add_pairs_of_row(alpha, beta_x, factor, pairs):
    K = len(alpha)
    for k in range(K if factor != 0.0 else 0):
        weight, out = alpha[k] * factor, pairs[k]
        for j in range(K):
            out[j] += weight * beta_x[j]


@inner
def _add_pairs(alpha, beta_x, factors, width, moved, weights, pairs):
    """Add the sums over rows of alpha_k beta_x_j times factors, which are 0 for failed rows."""
    K = len(pairs)
    for k in range(K):
        a = alpha[k * width : k * width + moved]
        for r in range(moved):
            weights[r] = a[r] * factors[r]
        j = 0
        while j + 4 <= K:
            _add_four_products(weights, beta_x, j * width, width, moved, pairs[k, j : j + 4])
            j += 4
        while j < K:
            pairs[k, j] += _product(weights[:moved], beta_x[j * width : j * width + moved])
            j += 1


def _scalar_product(a, b):
    total = 0.0
    for r in range(len(a)):
        total += a[r] * b[r]
    return total


def _four_scalar_products(a, b, start, width, count, out):
    b0, b1 = b[start : start + count], b[start + width : start + width + count]
    start += 2 * width
    b2, b3 = b[start : start + count], b[start + width : start + width + count]
    s0 = s1 = s2 = s3 = 0.0
    for r in range(count):
        s0 += a[r] * b0[r]
        s1 += a[r] * b1[r]
        s2 += a[r] * b2[r]
        s3 += a[r] * b3[r]
    out[0] += s0
    out[1] += s1
    out[2] += s2
    out[3] += s3


# Sums over rows may be added in any order: all terms are certified, and of one sign.
_product = inner(_scalar_product, fastmath={"contract", "reassoc"})
_add_four_products = inner(_four_scalar_products, fastmath={"contract", "reassoc"})


@inner
def _write_boundary(chains, lanes, cotangents, gradients, work):
    """Write gradients with respect to initial and final weights, or to their logarithms.

    Return how many rows are now marked as FAILED.
    """
    num_failed, (width, K) = 0, lanes.forward.weights.shape
    for r in range(width if gradients.boundary.shape[1] > 0 else 0):
        for side in range(2):
            other = lanes.forward.weights[r] if side else lanes.backward.weights[r]
            is_log = chains.final_is_log if side else chains.initial_is_log
            weights, out, total = work.boundary[side, r], gradients.boundary[side], 0.0
            for k in range(K):
                total += weights[k] * other[k]
            is_certified = _MIN_NORMALIZER <= total <= _MAX_NORMALIZER
            if lanes.forward.forms[r] == LINEAR and not is_certified:
                lanes.forward.forms[r] = FAILED
                num_failed += 1
            factor = cotangents[lanes.first + r] / total
            for k in range(K):
                gradient = other[k] * factor
                if is_log:
                    gradient *= weights[k]
                else:
                    gradient = math.ldexp(gradient, -int(weights[K]))
                out[lanes.first + r, k] = gradient
    return num_failed


@inner
def _write_zeros(lanes, gradients):
    """Write 0 for gradients of declined rows, and past the ends of the others."""
    for r in range(len(lanes.lengths)):
        is_declined = lanes.forward.forms[r] != LINEAR
        if len(gradients.potentials) > 0:
            gradients.potentials[lanes.first + r, 0 if is_declined else lanes.lengths[r] :] = 0.0
        if gradients.boundary.shape[1] > 0 and is_declined:
            gradients.boundary[:, lanes.first + r] = 0.0


@inner
def _write_declined(lanes, declined):
    """Write which rows are declined."""
    for r in range(len(lanes.lengths)):
        declined[lanes.first + r] = lanes.forward.forms[r] != LINEAR


@inner
def _add(total, pairs):
    for n in range(len(pairs)):
        for k in range(pairs.shape[1]):
            for j in range(pairs.shape[1]):
                total[n, k, j] += pairs[n, k, j]


@inner
def _scale_pairs(pairs, matrices, by_logs):
    """Multiply pairs by the weights of their transitions, or undo the scales of these."""
    K = pairs.shape[1]
    for n in range(len(pairs)):
        for i in range(K * K):
            if by_logs:
                pairs[n, i // K, i % K] *= matrices.weights[n * K * K + i]
            else:
                scale = -int(matrices.scales[1, n])
                pairs[n, i // K, i % K] = math.ldexp(pairs[n, i // K, i % K], scale)
