"""Best paths of whole chains of few states, in one call: each step in registers.

Every step writes, in a byte for each state, the state before it on its best path. The backtrace
reads nothing else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from arraylogchain._numba import elementary
from arraylogchain._numba.compiling import compiled, inner
from arraylogchain._numba.elementary import INF, integer_shift, max_or_nan
from arraylogchain._numba.intrinsics import max_product_steps, view

MAX_STATES = 8
_four_states, _eight_states = max_product_steps(4), max_product_steps(8)


class Boundary(NamedTuple):
    """Weights of first states, overwritten by their logarithms, and logarithms of final ones."""

    initial: Any  # [R, K]
    initial_is_log: bool
    final: Any  # [2, R, K], high and remainder of `split_log`; [2, 0, K] without final weights


class Registers(NamedTuple):
    """Operands of `max_product_steps` for vectors of V states."""

    message: Any  # [2 * V]
    matrix: Any  # [V * V], logs
    identity: Any  # [V * V], its logs
    tail: Any  # [V * V + V]: potentials of the first or last steps, V numbers after which are read
    came_from: Any  # int8 [T * V]
    vector_size: int  # V


@compiled
def best_paths(x, logs, log_shifts, lengths, boundary, scratch, came_from, states, out, declined):
    """Write the best paths of whole chains, and their weights.

    Parameters
    ----------
    x : array [R, T, K]
        Log potentials.
    logs, log_shifts : array [G * K * K], array [G]
        Logarithms of one matrix for each group, less integers, and these; groups have R / G rows.
    lengths : array [R]
    boundary : tuple
        The fields of `Boundary`.
    scratch, came_from : array [4 * 8 * 8], int8 array [T * 8]
    states : integer array [R, T]
        -1 past a row's end, 0 where no path has a positive weight.
    out : array [3, R]
        Logs of their weights, less the scale; shifts and exponents.
    declined : bool array [R]
        True for rows with weights that are infinite or NaN, for which no path is written.
    """
    boundary, (R, T, K) = Boundary(*boundary), x.shape
    V = 4 if K <= 4 else 8
    matrix, identity = view(scratch, 0, (V * V,)), view(scratch, V * V, (V * V,))
    tail = view(scratch, 2 * V * V, (V * V + V,))
    message = view(scratch, 3 * V * V + V, (2 * V,))
    registers = Registers(message, matrix, identity, tail, came_from, V)
    rows_per_group, is_special = R // len(log_shifts), False
    has_final = boundary.final.shape[1] > 0
    for i in range(V * V):
        matrix[i], identity[i] = -INF, 0.0 if i % (V + 1) == 0 else -INF
    for r in range(R):
        g = r // rows_per_group
        if r % rows_per_group == 0:
            group = view(logs, g * K * K, (K * K,))
            is_special = elementary.count_special(group) > 0
            for i in range(K * K):
                matrix[i // K * V + i % K] = group[i]
        for t in range(lengths[r], T):
            states[r, t] = -1
        exponent = 0.0 if boundary.initial_is_log else elementary.write_logs(boundary.initial[r])
        potentials = view(x, r * T * K, (lengths[r] * K,))
        num_special = elementary.count_special(potentials)
        num_special += elementary.count_special(boundary.initial[r])
        if has_final:
            num_special += elementary.count_special(boundary.final[0, r])
        declined[r] = is_special or num_special > 0
        if not declined[r]:
            shift = _take_steps(potentials, boundary.initial[r], registers)
            shift += (lengths[r] - 1) * log_shifts[g]
            if has_final:
                shift += _add_final(message, boundary.final[0, r], boundary.final[1, r])
            largest, last = -INF, 0
            for k in range(K):
                last, largest = (k, message[k]) if message[k] > largest else (last, largest)
            out[0, r], out[1, r], out[2, r] = largest, shift, exponent
            _trace_back(came_from, last, largest > -INF, view(states, r * T, (lengths[r],)), V)


@inner
def _add_final(message, high, remainder):
    """Add final weights to a message as `passes.last_logs` does; return the shift."""
    top = -INF
    for k in range(len(high)):
        top = message[k] + high[k] if message[k] + high[k] > top else top
    shift = np.rint(top) if top > -INF else 0.0
    for k in range(len(high)):
        message[k] = (message[k] + (high[k] - shift)) + remainder[k]
    return shift


@inner
def _take_steps(potentials, initial, registers):
    """Take all steps of a row; return the shift of its last message."""
    message, matrix, identity, tail, _, V = registers
    K = len(initial)
    T, zero, one = len(potentials) // K, K - K, K // K
    num_tail = min(T - 1, V)
    shift = integer_shift(max_or_nan(initial))
    for k in range(V):
        message[k] = initial[k] - shift if k < K else -INF
    for k in range(K):
        tail[k] = potentials[k]
    shift += _steps(tail, zero, one, K, identity, registers, zero)
    shift += _steps(potentials, K, T - 1 - num_tail, K, matrix, registers, V)
    for i in range(num_tail * K):
        tail[i] = potentials[(T - num_tail) * K + i]
    return shift + _steps(tail, zero, num_tail, K, matrix, registers, (T - num_tail) * V)


@inner
def _steps(x, at, count, K, matrix, registers, to):
    message, came_from = registers.message, registers.came_from
    if count <= 0:
        return 0.0
    if registers.vector_size == 4:
        return _four_states(x, at, count, K, message, matrix, came_from, to)
    return _eight_states(x, at, count, K, message, matrix, came_from, to)


@inner
def _trace_back(came_from, state, has_path, out, V):
    """Write the states of a path, given the last one."""
    for t in range(len(out) - 1, -1, -1):
        out[t] = state if has_path else 0
        state = came_from[t * V + state]
