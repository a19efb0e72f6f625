"""Lanes: up to L consecutive rows of a group, computed side by side through whole chains.

The rows of a group are sorted by decreasing length, so that the first of the lanes is the longest
and sets their number of steps. Everything is in linear space, where every step certifies itself; a
row that is not certified is declined.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from arraylogchain._backends.compiled.linear_space import FAILED, LINEAR, LOGS, Scratch, Segment
from arraylogchain._backends.compiled.log_space import write_log_sum
from arraylogchain._backends.compiled.matrices import prepare_linear
from arraylogchain._backends.compiled.recursion import (
    Bounds,
    Carry,
    Matrices,
    PreparedMatrices,
    Stored,
    advance_linear,
    enter_linear_space,
    linear_log_range,
)
from arraylogchain._core.precision import DOUBLE
from arraylogchain._numba.compiling import inner, views

MIN_NORMALIZER, MAX_NORMALIZER = DOUBLE.normalizers
MIN_COTANGENT, MAX_COTANGENT = DOUBLE.cotangents

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
    predicted: Any  # [C, 1, K * L]; C is at least 2
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


@views
def cut_memory(chains, sizes, memory):
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
    """Return the number of floats that a `Workspace` holds."""
    of_matrices = num_matrices * (3 * K * K + 4)
    return of_matrices + L * ((B + 4) * K + B + 3 + 4 * K + 7 + (2 * C + 1) * K)


@inner
def _fill_columns(columns, weights, K):
    """Write the weights of compressed columns of a matrix [K * K]."""
    for j in range(len(columns.starts) - 1):
        for p in range(columns.starts[j], columns.starts[j + 1]):
            columns.weights[p] = weights[columns.rows[p] * K + j]


@views
def prepare_matrices(chains, g, columns, work):
    """Prepare the matrices of group g in linear space, [from, to], for the forward recursion.

    Only those that its longest row uses are prepared. With sparse columns there is one matrix,
    whose nonzero weights are copied to them.
    """
    (G, count, K, _), N = chains.transitions.shape, len(chains.x)
    # K // K is 1 and count - count is 0, but not literals; see `recursion.enter_linear_space`.
    longest, one = chains.lengths[g * (N // G)], K // K
    used = min(count, max(longest - 1, 0))
    weights, scales = work.matrices[0], work.scales
    min_weight = prepare_linear(
        chains.transitions[g][:used], chains.transitions_are_log, weights, scales, work.extremes
    )
    _fill_columns(columns, weights[0], K)
    matrices = Matrices(
        weights.reshape(count * K * K), columns.logs, scales, count, one, count - count
    )
    bounds = Bounds(min_weight, 0.0, 0.0, not min_weight > 0.0)
    return PreparedMatrices(matrices, bounds, columns)


@views
def transpose_matrices(prepared, columns, work):
    """Return the matrices of the backward recursion, with the same scales."""
    _, count, _ = work.matrices.shape
    K = work.pairs.shape[1]
    for n in range(count):
        source, target = work.matrices[0, n], work.matrices[1, n]
        for k in range(K):
            for j in range(K):
                target[j * K + k] = source[k * K + j]
    weights, (_, _, scales, _, sharing, first) = work.matrices[1], prepared.matrices
    _fill_columns(columns, weights[0], K)
    matrices = Matrices(weights.reshape(count * K * K), columns.logs, scales, count, sharing, first)
    return PreparedMatrices(matrices, prepared.bounds, columns)


@views
def make_lanes(chains, start, width, work, alpha, sizes, forms):
    """Return lanes of rows start, ..., start + width - 1, with boundary weights as carries.

    The weights are as given, linear or logs; `enter_lanes` converts them.
    """
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
def enter_lanes(lanes, prepared, work):
    """Convert boundary weights to linear space; mark rows as FAILED where either does not fit.

    The converted weights and their exponents are copied to `work.boundary`: each backward pass
    begins with them, and gradients with respect to boundary weights read them.
    """
    forward, backward = lanes.forward, lanes.backward
    width, K = forward.weights.shape
    log_range = linear_log_range(prepared.bounds) if prepared.bounds.min_weight > 0.0 else 0.0
    for r in range(width):
        if forward.forms[r] != FAILED:
            enter_linear_space(forward, r, prepared.bounds, log_range)
            enter_linear_space(backward, r, prepared.bounds, log_range)
        if forward.forms[r] != LINEAR or backward.forms[r] != LINEAR:
            forward.forms[r], backward.forms[r] = FAILED, FAILED
        for k in range(K):
            work.boundary[0, r, k] = forward.weights[r, k]
            work.boundary[1, r, k] = backward.weights[r, k]
        work.boundary[0, r, K], work.boundary[1, r, K] = forward.exponents[r], backward.exponents[r]


@inner
def load_last_messages(lanes):
    """Load the last updated messages of an earlier call."""
    weights = lanes.forward.weights
    (width, K), last = weights.shape, lanes.alpha[lanes.lengths[0], 0]
    for r in range(width):
        for k in range(K):
            weights[r, k] = last[k * width + r]


@inner
def run_forward(lanes, prepared, work, log_z):
    """Run forward through all steps; mark rows as FAILED that are not certified."""
    forward, backward = lanes.forward, lanes.backward
    (width, K), T = forward.weights.shape, lanes.lengths[0]
    # T - T is 0 and T < 0 is False, but not literals; see `recursion.enter_linear_space`.
    segment = Segment(lanes.x, lanes.lengths, T - T, T - T, T, T < 0, T - T)
    advance_lanes(segment, forward, prepared, lanes.predicted[:2], lanes.alpha, work)
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
        if MIN_NORMALIZER <= total <= MAX_NORMALIZER:
            write_log_sum(terms, total == total, scales)
            log_z[lanes.first + r] = scales[2]
        else:
            forward.forms[r] = FAILED


@inner
def advance_lanes(segment, carry, prepared, predicted, updated, work):
    """Advance the linear rows of lanes; scales of stored messages are not kept."""
    width, count = len(carry.forms), len(work.scratch[1]) // len(work.normalizers)
    x_shifts = work.scratch[1][: count * width].reshape((count, width))
    no_scales = work.scratch[1][:0].reshape((2, 0, 1, width))
    stored = Stored(predicted, updated, no_scales, no_scales)
    scratch = Scratch(work.scratch[0], x_shifts)
    advance_linear(segment, carry, prepared, stored, scratch)
