"""Blocks of up to L consecutive rows of a group, computed side by side through whole chains.

The rows of a group are sorted by decreasing length, so that the first row of a block is its longest
and sets its number of steps. Everything is in linear space, where every step certifies itself; a
row that is not certified is declined.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from arraylogchain._backends.compiled.linear_space import (
    FAILED,
    LINEAR,
    LOGS,
    MatrixPlace,
    Scratch,
    Segment,
)
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
from arraylogchain._numba.compiling import inner
from arraylogchain._numba.intrinsics import view

MIN_NORMALIZER, MAX_NORMALIZER = DOUBLE.normalizers

# Least number of rows that are computed side by side.
SIDE_BY_SIDE = 8
# Potentials that are exponentiated together, and their steps, at most.
_CHUNK, _CHUNK_STEPS = 4096, 64
# Rows of a block, at most: of about one length where lengths differ.
_MAX_ROWS, _MAX_RAGGED_ROWS = 256, 64

# The entry points take these as plain tuples; see `recursion`.


class Chains(NamedTuple):
    """Whole chains: the rows of all groups, one group after another."""

    x: Any  # [N, T, K], log potentials
    lengths: Any  # [N], in descending order in each group
    transitions: Any  # [G, n, K, K]: one matrix for every step, or n of them
    transitions_are_log: bool
    boundary: Any  # [2, N, K], initial and final weights
    boundary_is_log: Any  # (bool, bool)


class Sizes(NamedTuple):
    """Sizes of the work space, and of the updated messages that are stored forward."""

    rows: int  # L rows side by side
    batch: int  # B steps whose potentials are exponentiated together
    chunk: int  # C steps backward, whose messages are stored
    row_size: int  # numbers stored for each row; 0 where blocks use the same memory


class Gradients(NamedTuple):
    """Marginals, counts and gradients, times cotangents; arrays not requested have length 0."""

    potentials: Any  # [N, T, K]
    transitions: Any  # [G, n, K, K]
    boundary: Any  # [2, N, K]: with respect to initial and final weights
    by_logs: bool  # whether pair marginals include the weights of their transitions


class Workspace(NamedTuple):
    """Scratch memory of a call, as views of one array."""

    matrices: Any  # [2, n, K * K], from step to step and transposed
    scales: Any  # [2, n]
    extremes: Any  # [2, n]
    pairs: Any  # [n, K, K], of the rows of one block
    factors: Any  # see `Scratch`
    x_shifts: Any
    carries: Any  # [2, L * (K + 2)]: forward and backward
    boundary: Any  # [2, L, K + 1]: weights as the recursions began with them, and exponents
    normalizers: Any  # [L]
    messages: Any  # [(2 C + 1) * K * L]; C is at least 2


class RowBlock(NamedTuple):
    """Rows that are computed side by side."""

    x: Any  # [L, T, K]
    lengths: Any  # [L]
    first: int  # number of the first row
    forward: Any  # a `Carry`
    backward: Any
    alpha: Any  # forward messages, [n, 1, K * L]: n > T, or at least 2 if they are not stored
    stored: Any  # a `Stored` of C steps backward; scales are not, as they cancel in marginals
    scratch: Any  # a `Scratch`


@inner
def cut_memory(chains, sizes, memory):
    """Divide scratch memory of `block_sizes` numbers into the arrays of a `Workspace`."""
    (_, count, K, _), L, B, C = chains.transitions.shape, sizes.rows, sizes.batch, sizes.chunk
    i = count * K * K
    pairs, matrices = view(memory, 0, (count, K, K)), view(memory, i, (2, count, K * K))
    i *= 3
    scales, extremes = view(memory, i, (2, count)), view(memory, i + 2 * count, (2, count))
    i += 4 * count
    factors = view(memory, i, ((B + 4) * K * L,))
    i += len(factors)
    x_shifts = view(memory, i, ((B + 3) * L,))
    i += len(x_shifts)
    carries = view(memory, i, (2, L * (K + 2)))
    i += carries.size
    boundary = view(memory, i, (2, L, K + 1))
    i += boundary.size
    messages = view(memory, i, ((2 * C + 1) * K * L,))
    of_rows = carries, boundary, view(memory, i + len(messages), (L,)), messages
    return Workspace(matrices, scales, extremes, pairs, factors, x_shifts, *of_rows)


def batch_size(width: int) -> int:
    """Return the number of steps, each of `width` potentials, that are exponentiated together."""
    return min(_CHUNK_STEPS, max(1, _CHUNK // width))


@lru_cache(maxsize=256)
def block_sizes(
    rows: int, T: int, K: int, num_matrices: int, is_ragged: bool
) -> tuple[tuple[int, int, int], int]:
    """Return the first fields of `Sizes`, and the number of floats that a `Workspace` holds.

    The messages of one step of a block fit a cache.
    """
    max_rows = _MAX_RAGGED_ROWS if is_ragged else _MAX_ROWS
    L = min(rows, max_rows, max(SIDE_BY_SIDE, _CHUNK // K)) if rows >= SIDE_BY_SIDE else 1
    B, C = batch_size(K * L), max(2, min(T, max(4, 2 * _CHUNK // (K * L))))
    memory_size = L * ((B + 4) * K + B + 3 + 4 * K + 7 + (2 * C + 1) * K)
    return (L, B, C), memory_size + num_matrices * (3 * K * K + 4)


@inner
def _fill_columns(columns, weights, K):
    """Write the weights of sparse columns of a matrix [K * K]."""
    for d in range(len(columns.starts) - 1):
        start = columns.starts[d]
        for p in range(start, columns.starts[d + 1]):
            columns.weights[p] = weights[columns.rows[p] * K + columns.numbers[p - start]]


@inner
def prepare_matrices(chains, g, columns, work):
    """Prepare the matrices of group g in linear space, [from, to], for the forward recursion.

    Only matrices that its longest row uses are prepared. With sparse columns there is one matrix,
    whose nonzero weights are copied to them.
    """
    (G, count, K, _), N = chains.transitions.shape, len(chains.x)
    # K // K is 1 and count - count is 0, but not literals; see `recursion.enter_linear_space`.
    longest, one = chains.lengths[g * (N // G)], K // K
    used = min(count, max(longest - 1, 0))
    values = view(chains.transitions, g * count * K * K, (used, K, K))
    min_weight = prepare_linear(
        values, chains.transitions_are_log, work.matrices[0], work.scales, work.extremes
    )
    weights = view(work.matrices, 0, (count * K * K,))
    _fill_columns(columns, weights, K)
    place = MatrixPlace(count, one, count - count)
    matrices = Matrices(weights, columns.logs, work.scales, place)
    bounds = Bounds(min_weight, 0.0, 0.0, not min_weight > 0.0)
    return PreparedMatrices(matrices, bounds, columns)


@inner
def _transpose(source, target, K):
    """Write the transposes of matrices of K * K entries."""
    for base in range(0, len(source), K * K):
        for k in range(K):
            for j in range(K):
                target[base + j * K + k] = source[base + k * K + j]


@inner
def transpose_matrices(prepared, columns, work):
    """Write the transposed matrices, for the backward recursion; their scales are the same."""
    (source, _, scales, place), K = prepared.matrices, work.pairs.shape[1]
    weights = view(work.matrices, len(source), (len(source),))
    _transpose(source, weights, K)
    _fill_columns(columns, weights, K)
    matrices = Matrices(weights, columns.logs, scales, place)
    return PreparedMatrices(matrices, prepared.bounds, columns)


@inner
def block_of_rows(chains, start, width, work, alpha, sizes, forms):
    """Return the block of rows start, ..., start + width - 1, with undefined carries."""
    (_, T, K), C, memory = chains.x.shape, sizes.chunk, work.messages
    at, size = start * sizes.row_size, K * width
    predicted, updated = view(memory, 0, (C, 1, size)), view(memory, C * size, (C + 1, 1, size))
    no_scales = view(memory, 0, (2, 0, 1, width))
    return RowBlock(
        view(chains.x, start * T * K, (width, T, K)),
        view(chains.lengths, start, (width,)),
        start,
        _carry(work.carries[0], forms[0], width, K),
        _carry(work.carries[1], forms[1], width, K),
        view(alpha, at, ((len(alpha) - at) // size, 1, size)),
        Stored(predicted, updated, no_scales, no_scales),
        Scratch(work.factors, view(work.x_shifts, 0, (sizes.batch + 3, width))),
    )


@inner
def _carry(memory, forms, width, K):
    """Return a carry of some rows."""
    weights, n = view(memory, 0, (width, K)), width * K
    shifts, exponents = view(memory, n, (width,)), view(memory, n + width, (width,))
    return Carry(weights, shifts, exponents, view(forms, 0, (width,)))


@inner
def enter_block(chains, block, prepared, declined, work):
    """Convert boundary weights to linear space; mark other rows, and declined ones, as FAILED.

    The converted weights and their exponents are copied: each backward pass begins with them, and
    gradients with respect to boundary weights read them.
    """
    bounds, (width, K) = prepared.bounds, block.forward.weights.shape
    log_range = linear_log_range(bounds)
    for side in range(2):
        carry = (block.forward, block.backward)[side]
        for r in range(width):
            carry.forms[r] = LOGS if chains.boundary_is_log[side] else LINEAR
            carry.shifts[r], carry.exponents[r] = 0.0, 0.0
            for k in range(K):
                carry.weights[r, k] = chains.boundary[side, block.first + r, k]
            enter_linear_space(carry, r, bounds, log_range)
            for k in range(K):
                work.boundary[side, r, k] = carry.weights[r, k]
            work.boundary[side, r, K] = carry.exponents[r]
    for r in range(width):
        if block.backward.forms[r] != LINEAR or declined[block.first + r]:
            block.forward.forms[r] = FAILED


@inner
def run_forward(block, prepared, work, log_z):
    """Run forward through all steps, write log Z, and mark uncertified rows as FAILED.

    Return how many rows left linear space on the way.
    """
    forward, backward = block.forward, block.backward
    (width, K), T = forward.weights.shape, block.lengths[0]
    # T - T is 0, T < 0 is False and total == total True, but these are not literals; see
    # `recursion.enter_linear_space`.
    segment = Segment(block.x, block.lengths, T - T, T - T, T, T < 0, T - T)
    predicted, _, no_scales, _ = block.stored
    stored = Stored(view(predicted, 0, (2, 1, K * width)), block.alpha, no_scales, no_scales)
    num_failed = 0
    for r in range(width):
        num_failed += forward.forms[r] == LINEAR
    advance_linear(segment, forward, prepared, stored, block.scratch)
    terms, scales = view(work.factors, 0, (K,)), view(work.x_shifts, 0, (3,))
    for r in range(width):
        if forward.forms[r] != LINEAR:
            continue
        num_failed -= 1
        total = 0.0  # of the last message times final weights, which the backward carry holds
        for k in range(K):
            terms[k] = forward.weights[r, k] * backward.weights[r, k]
            total += terms[k]
        scales[0] = forward.shifts[r] + backward.shifts[r]
        scales[1] = forward.exponents[r] + backward.exponents[r]
        if MIN_NORMALIZER <= total <= MAX_NORMALIZER:
            write_log_sum(terms, total == total, scales)
            log_z[block.first + r] = scales[2]
        else:
            forward.forms[r] = FAILED
    return num_failed
