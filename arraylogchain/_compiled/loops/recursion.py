"""Forward and backward recursions of many rows, in one call.

All loops over rows take what they read as one block:

rows : (first, count, dims, maps, lengths)
    `count` rows of the batch with axes `dims`, from number `first` on. `maps` has, for each kind of
    array, the steps that axes take in it and where it begins: see `place`.
potentials : (x, begin)
    [n, steps, K], the first of which is step number `begin`.
matrices : (P, L, shifts, flags, bands, begin)
    Matrices [n, steps or 1, K, K] and what is known of them; see `matrices.prepare`. The first is
    that of transition number `begin`.
ends : (initial, initial_in_logs, final, final_in_logs)
    Weights [n, 1, K].
span : (start, stop)
    The steps that are taken, start ... stop - 1.
room : (scratch, factors, tops, relative)
    Memory [ROWS + K, K]: see `steps.ROWS`, and what `matrices.make_relative` writes, which
    `relative` is a view of; and what `numbers.exponentials` writes of some steps.

And what goes on from call to call, or is written:

states : array [rows, 2 * K + SCALE]
    m, e and scale of each row.
history : (m, e, wide, begin)
    States [rows, steps, K] of the steps from `begin` on. Where e has no rows, wide states cannot be
    kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from arraylogchain._compiled.loops.compiling import compiled, inlined, inner
from arraylogchain._compiled.loops.matrices import Matrix
from arraylogchain._compiled.loops.numbers import exponentials, log_of
from arraylogchain._compiled.loops.steps import (
    HIGH,
    LOW,
    POWER,
    SCALE,
    STEADY,
    WIDE,
    State,
    Weights,
    backward_step,
    bring_into_range,
    forward_step,
    load,
    rescale,
    weigh,
    weighted_total,
)

# Which map is that of which array.
POTENTIALS, MATRICES, INITIAL, FINAL, LENGTHS = range(5)
# And of sums over the posterior, and of what they are weighed with.
BATCH, COTANGENT, TO_POTENTIALS, TO_TRANSITIONS, TO_INITIAL, TO_FINAL = range(5, 11)
NUM_MAPS = 11


class Row(NamedTuple):
    """What a block has of a row, and the steps that it takes."""

    start: Any
    stop: Any
    length: Any
    x: Any
    x_begin: Any
    matrices: Any
    initial: Any
    final: Any


@inner
def place(rows, r, steps):
    """Return where an array has what belongs to a row of a block, by the array's map."""
    q, dims = rows[0] + r, rows[2]
    at = steps[-1]
    for axis in range(len(dims) - 1, -1, -1):
        at += q % dims[axis] * steps[axis]
        q //= dims[axis]
    return at


@inner
def row_of(block, r):
    """Return what a block has of a row."""
    rows, (x, x_begin), (P, L, shifts, flags, bands, begin), ends, (start, stop), _ = block
    _, _, _, maps, lengths = rows
    length = lengths[place(rows, r, maps[LENGTHS])]
    g = place(rows, r, maps[MATRICES])
    matrices = (P[g], L[g], shifts[g], flags[g], bands[g if len(bands) > 1 else 0], begin)
    return Row(
        start,
        stop if stop < length else length,
        length,
        x[place(rows, r, maps[POTENTIALS])],
        x_begin,
        matrices,
        ends[0][place(rows, r, maps[INITIAL]), 0],
        ends[2][place(rows, r, maps[FINAL]), 0],
    )


@inlined
def matrix_of(row, i):
    """Return the matrix of a row's transition number i."""
    P, L, shifts, flags, bands, begin = row.matrices
    s = i - begin if len(flags) > 1 else 0  # else one matrix stands for all steps
    band = bands[s if len(bands) > 1 else 0]
    return Matrix(P[s], L[s], shifts[s], flags[s], band, len(flags) == 1)


@inlined
def state_of(states, r):
    """Return the state of a row, which loops change in place."""
    K = (states.shape[1] - SCALE) // 2
    if states[r, 2 * K + WIDE] == STEADY:  # another row has the scratch
        states[r, 2 * K + WIDE] = 1.0
    return State(states[r, :K], states[r, K : 2 * K], states[r, 2 * K : 2 * K + SCALE])


@inner
def begin_row(row, in_logs, state):
    """Make the state of a row's first step."""
    load(row.initial, in_logs, state)
    weigh(state, row.x[0])
    rescale(state)


@inlined
def step_forward(row, t, state, first, room):
    """Take a row to step t; return the first step in `room`, and what `forward_step` does.

    `first` is what the step before returned; where there was none, so that none is in `room`.
    """
    _, factors, tops, _ = room
    if t >= first + len(tops):
        first, stop = t, t + len(tops)
        stop = stop if stop < row.stop else row.stop
        exponentials(row.x, t - row.x_begin, stop - row.x_begin, factors, tops)
    x, i, K = row.x[t - row.x_begin], t - first, len(state.m)
    own = factors[i * K : (i + 1) * K]
    return first, forward_step(state, matrix_of(row, t - 1), x, own, tops[i], room)


@inlined
def step_backward(row, t, state, first, room):
    """Take a row back to step t; return the first step in `room`, and what `backward_step` does."""
    _, factors, tops, _ = room
    if t + 1 < first:
        first = t + 2 - len(tops)
        first = first if first > row.start + 1 else row.start + 1
        exponentials(row.x, first - row.x_begin, t + 2 - row.x_begin, factors, tops)
    x, i, K = row.x[t + 1 - row.x_begin], t + 1 - first, len(state.m)
    own = factors[i * K : (i + 1) * K]
    return first, *backward_step(state, matrix_of(row, t), x, own, tops[i], room)


@inner
def write_logs(state, out):
    m, e, scale = state
    for k in range(len(m)):
        n = scale[POWER] + (e[k] if scale[WIDE] != 0.0 else 0.0)
        out[k] = log_of(m[k], n, scale[HIGH], scale[LOW])


@inlined
def recall(history, r, t):
    """Return the weights of a state that was kept."""
    kept, kept_e, kept_wide, begin = history
    at = r if len(kept_e) > 0 else 0
    return Weights(kept[r, t - begin], kept_e[at, t - begin], kept_wide[r, t - begin] != 0)


@compiled
def forward(block, states, history, messages, totals):
    """Go forward through the steps of a block.

    Messages (out, begin) are written as logarithms to out [rows, steps, K], the first of which is
    step number `begin`; and where rows end, the logarithms of their totals.

    Returns
    -------
    bool
        Whether a wide state could not be kept.
    """
    rows, _, _, ends, _, room = block
    kept, kept_e, kept_wide, kept_begin = history
    out, out_begin = messages
    lacks = False
    for r in range(rows[1]):
        row, state = row_of(block, r), state_of(states, r)
        first = row.start - len(room[2])
        for t in range(row.start, row.stop):
            if t == 0:
                begin_row(row, ends[1], state)
            else:
                first, _ = step_forward(row, t, state, first, room)
            if len(out) > 0:
                write_logs(state, out[r, t - out_begin])
            if len(kept) > 0:
                is_wide, i = state.scale[WIDE] != 0.0, t - kept_begin
                kept_wide[r, i] = is_wide
                for k in range(len(state.m)):
                    kept[r, i, k] = state.m[k]
                if is_wide and len(kept_e) > 0:
                    for k in range(len(state.m)):
                        kept_e[r, i, k] = state.e[k]
                elif is_wide:
                    lacks = True
        if row.start < row.length == row.stop and len(totals) > 0:
            totals[r] = weighted_total(state, row.final, ends[3], room[0])
    return lacks


@compiled
def backward(block, states, messages):
    """Go back through the steps of a block, by transposed matrices; see `forward`."""
    rows, _, _, ends, _, room = block
    out, out_begin = messages
    for r in range(rows[1]):
        row, state = row_of(block, r), state_of(states, r)
        first = row.stop + 1
        for t in range(row.stop - 1, row.start - 1, -1):
            if t == row.length - 1:
                load(row.final, ends[3], state)
            else:
                first, _, _ = step_backward(row, t, state, first, room)
            if len(out) > 0:
                write_logs(state, out[r, t - out_begin])
            bring_into_range(state)
