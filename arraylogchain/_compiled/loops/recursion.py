"""Forward and backward recursions of many rows, in one call.

All loops over rows take the same tuples:

rows : (first, count, dims, maps, lengths)
    `count` rows of the batch with axes `dims`, from number `first` on. `maps` has, for each kind of
    array, the steps that axes take in it and where it begins: see `place`.
potentials : (x, begin)
    [n, steps, K], the first of which is step number `begin`.
matrices : (P, L, shifts, flags, bands, begin)
    Matrices [n, steps or 1, K, K] and what is known of them; see `matrices.prepare`. The first is
    that of transition number `begin`.
ends : (initial, initial_in_logs, final, final_in_logs)
    Weights [n, K].
state : (m, e, scale)
    A state for each of the rows, which goes on from call to call.
history : (m, e, wide, begin)
    States [count, steps, K] of the steps from `begin` on. Where e has no rows, wide states cannot
    be kept.
"""

from __future__ import annotations

import numpy as np

from arraylogchain._compiled.loops.compiling import compiled, inlined, inner
from arraylogchain._compiled.loops.numbers import log_of
from arraylogchain._compiled.loops.steps import (
    HIGH,
    LOW,
    POWER,
    ROWS,
    WIDE,
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


@inlined
def place(q, dims, steps):
    """Return where an array has what belongs to row q of the batch."""
    at = steps[-1]
    for axis in range(len(dims) - 1, -1, -1):
        at += q % dims[axis] * steps[axis]
        q //= dims[axis]
    return at


@inner
def matrices_of(matrices, g):
    """Return the matrices of group g, to be unpacked once: that counts references."""
    P, L, shifts, flags, bands, _ = matrices
    return P[g], L[g], shifts[g], flags[g], bands[min(g, len(bands) - 1)]


@inner
def write_logs(m, e, scale, out, r, i):
    for k in range(len(m)):
        n = scale[POWER] + (e[k] if scale[WIDE] != 0.0 else 0.0)
        out[r, i, k] = log_of(m[k], n, scale[HIGH], scale[LOW])


@compiled
def forward(rows, potentials, matrices, ends, start, stop, states, history, messages, totals):
    """Go forward through steps start ... stop - 1 of rows.

    Messages (out, row, step) are written as logarithms, from that row and step of `out` on; and
    where rows end, the logarithms of their totals.

    Returns
    -------
    bool
        Whether a wide state could not be kept.
    """
    first, count, dims, maps, lengths = rows
    x, x_begin = potentials
    initial, initial_in_logs, final, final_in_logs = ends
    kept, kept_e, kept_wide, kept_begin = history
    out, out_row, out_step = messages
    begin = matrices[5]
    is_each = matrices[0].shape[1] > 1  # else one matrix stands for all steps
    scratch = np.empty((ROWS, x.shape[2]))
    lacks = False
    for r in range(count):
        q = first + r
        m, e, scale = states[0][r], states[1][r], states[2][r]
        own = x[place(q, dims, maps[POTENTIALS])]
        P, L, shifts, flags, bands = matrices_of(matrices, place(q, dims, maps[MATRICES]))
        length = lengths[place(q, dims, maps[LENGTHS])]
        for t in range(start, stop if stop < length else length):
            if t == 0:
                load(initial, place(q, dims, maps[INITIAL]), initial_in_logs, m, e, scale)
                weigh(m, e, scale, own, t - x_begin)
                rescale(m, e, scale)
            else:
                s, i = t - 1 - begin if is_each else 0, t - x_begin
                forward_step(m, e, scale, P, L, shifts[s], flags[s], bands, s, own, i, scratch)
            if len(out) > 0:
                write_logs(m, e, scale, out, r + out_row, t - out_step)
            if len(kept) > 0:
                is_wide, i = scale[WIDE] != 0.0, t - kept_begin
                kept_wide[r, i] = is_wide
                for k in range(len(m)):
                    kept[r, i, k] = m[k]
                if is_wide and len(kept_e) > 0:
                    for k in range(len(m)):
                        kept_e[r, i, k] = e[k]
                elif is_wide:
                    lacks = True
        if start < length <= stop and len(totals) > 0:
            at = place(q, dims, maps[FINAL])
            totals[r] = weighted_total(m, e, scale, final, at, final_in_logs, scratch)
    return lacks


@compiled
def backward(rows, potentials, matrices, ends, start, stop, states, messages):
    """Go back through steps start ... stop - 1 of rows, by transposed matrices; see `forward`."""
    first, count, dims, maps, lengths = rows
    x, x_begin = potentials
    _, _, final, final_in_logs = ends
    out, out_row, out_step = messages
    begin = matrices[5]
    is_each = matrices[0].shape[1] > 1
    weighed, scratch = np.empty(x.shape[2]), np.empty((ROWS, x.shape[2]))
    for r in range(count):
        q = first + r
        m, e, scale = states[0][r], states[1][r], states[2][r]
        own = x[place(q, dims, maps[POTENTIALS])]
        P, L, shifts, flags, bands = matrices_of(matrices, place(q, dims, maps[MATRICES]))
        length = lengths[place(q, dims, maps[LENGTHS])]
        for t in range((stop if stop < length else length) - 1, start - 1, -1):
            if t == length - 1:
                load(final, place(q, dims, maps[FINAL]), final_in_logs, m, e, scale)
            else:
                s, i = t - begin if is_each else 0, t + 1 - x_begin
                backward_step(
                    m, e, scale, P, L, shifts[s], flags[s], bands, s, own, i, weighed, scratch
                )
            write_logs(m, e, scale, out, r + out_row, t - out_step)
            bring_into_range(m, e, scale)
