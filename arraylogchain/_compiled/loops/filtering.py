"""The loop of messages that are normalised at every step."""

from __future__ import annotations

from arraylogchain._compiled.loops.compiling import compiled, inner
from arraylogchain._compiled.loops.numbers import INF, log_of, power_of_two
from arraylogchain._compiled.loops.recursion import (
    begin_row,
    row_of,
    state_of,
    step_forward,
)
from arraylogchain._compiled.loops.steps import HIGH, LOW, POWER, WIDE, weights_of, wide_weight


@inner
def sum_of(state):
    """Return the sum of a state's weights as number and exponent, but for its scale."""
    m, _, scale = state
    total, top = 0.0, 0.0
    if scale[WIDE] == 0.0:
        for k in range(len(m)):
            total += m[k]
        return total, top
    top = -INF
    for k in range(len(m)):
        p, n = wide_weight(weights_of(state), k)
        if p != 0.0 and n > top:
            total, top = total * power_of_two(top - n), n
        total += p * power_of_two(n - top) if p != 0.0 else 0.0
    return total, top


@compiled
def filter_steps(block, states, shares, logs):
    """Go forward through the steps of a block; see `recursion`.

    Of each step, the shares of weights in their sum are written, and the log of the sum over that
    of the step before.
    """
    rows, _, _, ends, (start, _), room = block
    for r in range(rows[1]):
        row, state = row_of(block, r), state_of(states, r)
        m, _, scale = state
        first = row.start - len(room[2])
        for t in range(row.start, row.stop):
            before, n, high, low = 1.0, 0.0, 0.0, 0.0
            if t == 0:
                begin_row(row, ends[1], state)
            else:
                before, n = sum_of(state)
                n, high, low = n + scale[POWER], scale[HIGH], scale[LOW]
                first, _ = step_forward(row, t, state, first, room)
            total, more = sum_of(state)
            nothing = total if total != total else 0.0  # NaN stays
            for k in range(len(m)):
                w = m[k]
                if scale[WIDE] != 0.0 and w != 0.0:
                    p, power = wide_weight(weights_of(state), k)
                    w = p * power_of_two(power - more)
                shares[r, t - start, k] = w / total if 0.0 < total < INF else nothing
            if 0.0 < total < INF:
                more += scale[POWER] - n
                high, low = scale[HIGH] - high, scale[LOW] - low
                logs[r, t - start] = log_of(total / before, more, high, low)
            else:  # after 0 or infinity it is the same at all later steps
                logs[r, t - start] = -INF if total == 0.0 else total
