"""Packs of rows that share their matrices: a row for each lane of vector instructions.

Where chains are short and have few states, a step of one row is too little work for a processor. A
pack takes all steps of its rows at once, in linear weights. Those that are not 0 stay above a bound
such that nothing is lost to underflow; where a row leaves it, or needs more than linear weights,
nothing has been written, and the pack is left to the loops over rows.

Numbers of states are kept as [K * LANES], those of a state side by side. Rows that have ended keep
their weights. Lanes without a row repeat the first one, and nobody asks for their results.

room : (factors, tops, history, known, parts, counts)
    Memory: lanes [T, K], [T], [T or 2, K], [KNOWN] and [PARTS + K, K]; and numbers [T - 1, K, K],
    or as many as there are matrices to count for.
"""

from __future__ import annotations

from arraylogchain._compiled.loops.compiling import compiled, inner
from arraylogchain._compiled.loops.lanes import (
    everywhere,
    gather,
    load,
    powers_of_two,
    store,
    sum_of_lanes,
    where,
)
from arraylogchain._compiled.loops.matrices import LARGE, LOST, SMALL, SPECIAL
from arraylogchain._compiled.loops.numbers import (
    INF,
    LANES,
    LEAST_EXPONENT,
    SAFE,
    exp,
    log_of,
    two_sum,
    wide_exp,
)
from arraylogchain._compiled.loops.recursion import (
    FINAL,
    INITIAL,
    LENGTHS,
    MATRICES,
    POTENTIALS,
    matrix_of,
    place,
    row_of,
)
from arraylogchain._compiled.loops.steps import LARGEST, RAISED

# What is known of rows.
LENGTH, PLACE, HIGH, LOW, POWER, TOTAL, GRADIENT = range(7)
KNOWN = 7
# Lanes [K] each; behind them are the sums of pairs, [K, K].
FIRST, LAST, SUMS, WEIGHED, TO_FIRST, TO_LAST = range(6)
PARTS = 6
# First and last weights are made so much larger: weights mostly become smaller.
RAISE = 2.0**RAISED
# Weights are 0 or at least this: products with entries that are not `SMALL` are normal numbers.
LEAST = 2.0**-900
LEAST_NUMBER = -1.7976931348623157e308


@inner
def end_of_pack(rows, r):
    """Return the end of the pack that begins with a row."""
    steps, end = rows[3][MATRICES], r + 1
    group = place(rows, r, steps)
    while end < rows[1] and end < r + LANES and place(rows, end, steps) == group:
        end += 1
    return end


@inner
def load_pack(block, r, end, room):
    """Load what a pack has; return its number of steps, 0 where its weights are out of range."""
    rows, (x, _), _, ends, _, _ = block
    factors, tops, _, known, parts, _ = room
    maps, K, steps = rows[3], x.shape[2], 1
    known[:, :] = 0.0
    for lane in range(LANES):
        own = r + lane if r + lane < end else r
        length = rows[4][place(rows, own, maps[LENGTHS])]
        known[LENGTH, lane] = length
        known[PLACE, lane] = place(rows, own, maps[POTENTIALS]) * x.shape[1] * K
        steps = length if length > steps else steps
    is_proved = load_factors(x, steps, known, factors, tops)
    is_proved &= load_ends(rows, r, end, ends[0], ends[1], maps[INITIAL], parts[FIRST])
    is_proved &= load_ends(rows, r, end, ends[2], ends[3], maps[FINAL], parts[LAST])
    return steps if is_proved else 0


@inner
def load_ends(rows, r, end, values, in_logs, steps, out):
    """Write first or last weights, or exponentials of logarithms; return whether they are in range.

    Times `RAISE`, they are between 2**-100 and 2**300.
    """
    K, wrong = values.shape[2], 0
    zero, least, largest = (-INF, -200.0, 69.0) if in_logs else (0.0, 2.0**-300, 2.0**100)
    for lane in range(LANES):
        own = values[place(rows, r + lane if r + lane < end else r, steps), 0]
        for k in range(K):
            wrong += not (least <= own[k] <= largest or own[k] == zero)
            out[k * LANES + lane] = (exp(own[k]) if in_logs else own[k]) * RAISE
    return wrong == 0


@inner
def load_factors(potentials, steps, known, factors, tops):
    """Make exp(x - top) of potentials x, top being the largest of a step.

    Returns
    -------
    bool
        Whether they are normal numbers, or 0 where x is -inf; and no x is +inf or NaN, nor are all
        of a step -inf.
    """
    K, fine = potentials.shape[2], everywhere(1.0)
    rows, lengths = load(known[PLACE], 0), load(known[LENGTH], 0)
    for t in range(steps):
        x, is_taken, top = factors[t], t * 1.0 < lengths, everywhere(-INF)
        for k in range(K):
            w = where(is_taken, gather(potentials, rows, t * K + k), everywhere(0.0))
            store(x, k, w)
            top = where(w > top, w, top)
        store(tops[t], 0, top)
        for k in range(K):
            w = load(x, k) - top
            m, n = wide_exp(w)
            is_lost = w < LEAST_EXPONENT
            store(x, k, where(is_lost, everywhere(0.0), m * powers_of_two(n)))
            fine = fine * where(is_lost, w < LEAST_NUMBER, w < 1.0)
    return sum_of_lanes(fine) == LANES


@inner
def sum_products(m, P, flag, out):
    """Write m @ P to out; return whether sums are proved.

    They are if no product of what is not 0 may be lost, or if sums round off what is.
    """
    small = everywhere(0.0)
    for j in range(len(P)):
        total = load(m, 0) * P[0, j]
        for k in range(1, len(P)):
            total += load(m, k) * P[k, j]
        store(out, j, total)
        small += total < len(P) * SAFE
    return not flag & SMALL or sum_of_lanes(small) == 0.0


@inner
def weigh(v, factors, m, is_taken, out, powers):
    """Write v * factors to out, or m where no step is taken; return whether that is proved.

    The largest weights are brought into range, where they are not.
    """
    K, odd, top = len(v) // LANES, everywhere(0.0), everywhere(0.0)
    for k in range(K):
        w = where(is_taken, load(v, k) * load(factors, k), load(m, k))
        store(out, k, w)
        odd += w < LEAST
        top = where(w > top, w, top)
    is_small, is_large = top < 1 / LARGEST, top > LARGEST
    if sum_of_lanes(odd + is_small + is_large) == 0.0:
        return True
    raised, wrong = (is_small - is_large) * (2 * RAISED), everywhere(0.0)
    store(powers, 0, load(powers, 0) - raised)
    for k in range(K):
        w = load(out, k) * powers_of_two(raised)
        store(out, k, w)
        wrong += (w < LEAST) * (load(v, k) > 0.0) * (load(factors, k) > 0.0)
    return sum_of_lanes(is_taken * wrong) == 0.0


@inner
def sum_pairs(a, b):
    """Return the sum of the products of two weights of each state."""
    total = load(a, 0) * load(b, 0)
    for k in range(1, len(a) // LANES):
        total += load(a, k) * load(b, k)
    return total


@inner
def forward(row, steps, room, keeps_all, totals):
    """Go forward through all steps, and write the logarithms of totals, if that is proved.

    Weights of the last two steps are left in the history, or those of all.
    """
    factors, tops, history, known, parts, _ = room
    m, sums, lengths = parts[FIRST], parts[FIRST], load(known[LENGTH], 0)
    high, low, powers = everywhere(0.0), everywhere(0.0), known[POWER]
    for t in range(steps):
        is_taken, shift = t * 1.0 < lengths, 0.0
        if t > 0:
            matrix = matrix_of(row, t - 1)
            shift, sums = matrix.shift, parts[SUMS]
            if matrix.flag & (SPECIAL | LARGE | LOST):
                return False
            if not sum_products(m, matrix.P, matrix.flag, sums):
                return False
        result = history[t if keeps_all else t & 1]
        if not weigh(sums, factors[t], m, is_taken, result, powers):
            return False
        m = result
        high, rest = two_sum(high, is_taken * load(tops[t], 0))
        low += rest
        high, rest = two_sum(high, is_taken * shift)
        low += rest
    store(known[HIGH], 0, high)
    store(known[LOW], 0, low)
    total = sum_pairs(m, parts[LAST])
    store(known[TOTAL], 0, total)
    for i in range(len(totals)):
        power = powers[i] - 2 * RAISED
        totals[i] = log_of(known[TOTAL, i], power, known[HIGH, i], known[LOW, i])
    return sum_of_lanes(total > len(m) * SAFE) == LANES


@compiled
def log_totals(block, room, totals, left):
    """Write the logarithms of the totals of packs; take their rows from those that are left."""
    # A row number that begins as a constant would have Numba compile once more what takes it.
    rows, end = block[0], 0
    for r in range(rows[1]):
        if r < end:
            continue
        end, row = end_of_pack(rows, r), row_of(block, r)
        steps = load_pack(block, r, end, room)
        if steps > 0 and forward(row, steps, room, False, totals[r:end]):
            left[r:end] = 0
