"""The loop of messages that are normalised at every step."""

from __future__ import annotations

from arraylogchain._compiled.loops.compiling import compiled, inner
from arraylogchain._compiled.loops.numbers import INF, log_of, power_of_two
from arraylogchain._compiled.loops.recursion import (
    INITIAL,
    LENGTHS,
    MATRICES,
    POTENTIALS,
    matrices_of,
    place,
)
from arraylogchain._compiled.loops.steps import (
    HIGH,
    LOW,
    POWER,
    WIDE,
    forward_step,
    load,
    rescale,
    weigh,
)


@inner
def sum_of(m, e, scale):
    """Return the sum of a state's weights as number and exponent, but for its scale."""
    total, top = 0.0, 0.0
    if scale[WIDE] == 0.0:
        for k in range(len(m)):
            total += m[k]
        return total, top
    top = -INF
    for k in range(len(m)):
        top = e[k] if m[k] != 0.0 and e[k] > top else top
    for k in range(len(m)):
        total += m[k] * power_of_two(e[k] - top) if m[k] != 0.0 else 0.0
    return total, top


@compiled
def filter_steps(rows, potentials, matrices, ends, start, stop, states, shares, logs, scratch):
    """Go forward through steps start ... stop - 1 of rows; see `recursion.forward`.

    Of each step, the shares of weights in their sum are written, and the log of the sum over that
    of the step before.
    """
    first, count, dims, maps, lengths = rows
    x, x_begin = potentials
    initial, initial_in_logs = ends[0], ends[1]
    begin = matrices[5]
    is_each = matrices[0].shape[1] > 1  # else one matrix stands for all steps
    for r in range(count):
        q = first + r
        m, e, scale = states[0][r], states[1][r], states[2][r]
        own = x[place(q, dims, maps[POTENTIALS])]
        P, L, shifts, flags, bands = matrices_of(matrices, place(q, dims, maps[MATRICES]))
        length = lengths[place(q, dims, maps[LENGTHS])]
        for t in range(start, stop if stop < length else length):
            before, n, high, low = 1.0, 0.0, 0.0, 0.0
            if t == 0:
                load(initial, place(q, dims, maps[INITIAL]), initial_in_logs, m, e, scale)
                weigh(m, e, scale, own, t - x_begin)
                rescale(m, e, scale)
            else:
                before, n = sum_of(m, e, scale)
                n, high, low = n + scale[POWER], scale[HIGH], scale[LOW]
                s, i = t - 1 - begin if is_each else 0, t - x_begin
                forward_step(m, e, scale, P, L, shifts[s], flags[s], bands, s, own, i, scratch)
            total, more = sum_of(m, e, scale)
            nothing = total if total != total else 0.0  # NaN stays
            for k in range(len(m)):
                w = m[k]
                if scale[WIDE] != 0.0 and w != 0.0:
                    w *= power_of_two(e[k] - more)
                shares[r, t - start, k] = w / total if 0.0 < total < INF else nothing
            if 0.0 < total < INF:
                more += scale[POWER] - n
                high, low = scale[HIGH] - high, scale[LOW] - low
                logs[r, t - start] = log_of(total / before, more, high, low)
            else:  # after 0 or infinity it is the same at all later steps
                logs[r, t - start] = -INF if total == 0.0 else total
