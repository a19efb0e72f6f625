"""Packs of rows that share their matrices: a row for each lane of vector instructions.

Where chains are short and have few states, a step of one row is too little work for a processor. A
pack takes all steps of its rows at once, in linear weights that are proved as those of `steps` are.
Where one of its rows needs more than that, nothing has been written, and the pack is left to the
loops over rows.

Numbers of states are kept as [K * LANES], those of a state side by side. Rows that have ended, and
lanes without a row, keep their weights.

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
    TINY,
    exp,
    largest_finite,
    log_of,
    power_of_two,
    split,
    two_sum,
    wide_exp,
)
from arraylogchain._compiled.loops.recursion import (
    COTANGENT,
    FINAL,
    INITIAL,
    LENGTHS,
    MATRICES,
    POTENTIALS,
    TO_FINAL,
    TO_INITIAL,
    TO_POTENTIALS,
    TO_TRANSITIONS,
    matrix_of,
    place,
    row_of,
)
from arraylogchain._compiled.loops.steps import LARGEST, RAISED

# What is known of rows.
LENGTH, PLACE, HIGH, LOW, POWER, TOTAL, GRADIENT = range(7)
KNOWN = 7
# Lanes [K] each; behind them are the sums of pairs, [K, K].
FIRST, LAST, SUMS, WEIGHED, STATE, TO_FIRST, TO_LAST = range(7)
PARTS = 7
# First and last weights are made so much larger: weights mostly become smaller.
RAISE = 2.0**RAISED
LARGEST_START = LARGEST / RAISE
# Totals of less leave cotangents that are divided by them above 0.
LARGEST_TOTAL = 2.0**700
# What derivatives are made of is within these, and so is finite times weights and entries.
LEAST_SHARE, LARGEST_SHARE = 2.0**-700, 2.0**400
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
def load_ends(rows, r, end, values, in_logs, steps, known, out):
    """Write first or last weights, or exponentials of logarithms; return whether they are in range.

    Lanes without a row have weights of one.
    """
    K, zero, wrong = values.shape[2], -INF if in_logs else 0.0, 0
    for lane in range(LANES):
        own = values[place(rows, r + lane if r + lane < end else r, steps), 0]
        top = largest_finite(own)[0] if in_logs else 0.0
        for k in range(K):
            w = exp(own[k] - top) if in_logs else own[k]
            w = w if r + lane < end else 1.0
            wrong += not (1 / LARGEST <= w <= LARGEST_START or (w == 0.0 and own[k] == zero))
            out[k * LANES + lane] = w * RAISE
        high, rest = two_sum(known[HIGH, lane], top)
        known[HIGH, lane] = high
        known[LOW, lane] += rest
        known[POWER, lane] -= RAISED
    return wrong == 0


@inner
def load_pack(block, r, end, room):
    """Load what a pack has; return its number of steps, 0 where its weights are out of range."""
    rows, (x, _), _, ends, _, _ = block
    factors, tops, _, known, parts, _ = room
    maps, K, steps = rows[3], x.shape[2], 1
    known[:, :] = 0.0
    for lane in range(LANES):
        # A lane without a row is one of a step that weighs nothing.
        length = rows[4][place(rows, r + lane, maps[LENGTHS])] if r + lane < end else 1
        known[LENGTH, lane] = length
        q = place(rows, r + lane if r + lane < end else r, maps[POTENTIALS])
        known[PLACE, lane] = q * x.shape[1] * K
        steps = length if length > steps else steps
    is_proved = load_factors(x, steps, known, factors, tops)
    first, last = parts[FIRST], parts[LAST]
    is_proved &= load_ends(rows, r, end, ends[0], ends[1], maps[INITIAL], known, first)
    is_proved &= load_ends(rows, r, end, ends[2], ends[3], maps[FINAL], known, last)
    return steps if is_proved else 0


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
            fine *= where(is_lost, w < LEAST_NUMBER, w < 1.0)
    return sum_of_lanes(fine) == LANES


@inner
def sum_products(m, P, out):
    """Write m @ P to out."""
    for j in range(len(P)):
        total = load(m, 0) * P[0, j]
        for k in range(1, len(P)):
            total += load(m, k) * P[k, j]
        store(out, j, total)


@inner
def is_proved(weights, factors, m, sums, flag, is_taken):
    """Tell whether weights * factors and the sums m @ P are proved, in lanes where a step is taken.

    What `steps.are_products` and `steps.are_sums` find out, but that no sum is 0 where products may
    have vanished.
    """
    wrong, zeros, small = everywhere(0.0), everywhere(0.0), everywhere(0.0)
    least = len(sums) // LANES * SAFE
    for k in range(len(sums) // LANES):
        w, f, v, s = load(weights, k), load(factors, k), load(m, k), load(sums, k)
        wrong += (w * f < TINY) * (w > 0.0) * (f > 0.0) + (s < least) * (s > 0.0)
        zeros += 1.0 - (s > 0.0)
        small += (v > 0.0) * (v < 2.0**-900)
    if flag & SMALL:
        small = everywhere(1.0)
    return sum_of_lanes(is_taken * (wrong + zeros * small)) == 0.0


@inner
def rescale(m, powers):
    """Bring weights into range; return whether that is possible, and those of no row all zero."""
    for lane in range(LANES):
        top = 0.0
        for i in range(lane, len(m), LANES):
            top = m[i] if m[i] > top else top
        if 1 / LARGEST <= top <= LARGEST:
            continue
        if top == 0.0:
            return False
        raised = RAISED - split(top)[1]
        raised = raised if raised < 1023.0 else 1023.0
        for i in range(lane, len(m), LANES):
            w = m[i] * power_of_two(raised)
            if w < TINY and m[i] > 0.0:
                return False
            m[i] = w
        powers[lane] -= raised
    return True


@inner
def forward(row, steps, room, keeps_all):
    """Go forward through all steps; return whether they and the totals are proved.

    Weights of the last two steps are left in the history, or those of all.
    """
    factors, tops, history, known, parts, _ = room
    K = row.x.shape[1]
    m, sums = parts[FIRST], parts[FIRST]
    lengths, high, low = load(known[LENGTH], 0), load(known[HIGH], 0), load(known[LOW], 0)
    for t in range(steps):
        flag, shift = 0, 0.0
        if t > 0:
            matrix = matrix_of(row, t - 1)
            flag, shift, sums = matrix.flag, matrix.shift, parts[SUMS]
            if flag & (SPECIAL | LARGE | LOST):
                return False
            sum_products(m, matrix.P, sums)
        is_taken = t * 1.0 < lengths
        weights, result = factors[t], history[t if keeps_all else t & 1]
        odd, top = everywhere(0.0), everywhere(0.0)
        for k in range(K):
            w = where(is_taken, load(sums, k) * load(weights, k), load(m, k))
            store(result, k, w)
            odd += (w < K * SAFE) + (w > LARGEST)
            top = where(w > top, w, top)
        high, rest = two_sum(high, is_taken * load(tops[t], 0))
        low += rest
        high, rest = two_sum(high, is_taken * shift)
        low += rest
        if sum_of_lanes(odd + (top < 1 / LARGEST)) > 0.0 and not (
            is_proved(sums, weights, m, sums, flag, is_taken) and rescale(result, known[POWER])
        ):
            return False
        m = result
    store(known[HIGH], 0, high)
    store(known[LOW], 0, low)
    total = sum_pairs(m, parts[LAST])
    store(known[TOTAL], 0, total)
    return sum_of_lanes((total > K * SAFE) * (total < LARGEST_TOTAL)) == LANES


@inner
def sum_pairs(a, b):
    """Return the sum of the products of two weights of each state."""
    total = load(a, 0) * load(b, 0)
    for k in range(1, len(a) // LANES):
        total += load(a, k) * load(b, k)
    return total


@inner
def write_totals(r, end, known, totals):
    for i in range(end - r):
        power, high, low = known[POWER, i], known[HIGH, i], known[LOW, i]
        totals[r + i] = log_of(known[TOTAL, i], power, high, low)


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
        if steps > 0 and forward(row, steps, room, False):
            write_totals(r, end, room[3], totals)
            left[r:end] = 0


@inner
def load_cotangents(rows, r, end, cotangents, known):
    """Load cotangents; return whether they are in range."""
    wrong = 0
    for lane in range(LANES):
        g = cotangents[place(rows, r + lane, rows[3][COTANGENT])] if r + lane < end else 0.0
        wrong += not (g == 0.0 or 1 / LARGEST <= g <= LARGEST or 1 / LARGEST <= -g <= LARGEST)
        known[GRADIENT, lane] = g
    return wrong == 0


@inner
def share_ends(a, weights, by_weight, out):
    """Write probabilities of first or last states, a being the weights of all else.

    Or, by weight, derivatives; whether these are in range is returned.
    """
    inverse, wrong = 1.0 / sum_pairs(a, weights), everywhere(0.0)
    for k in range(len(a) // LANES):
        w = everywhere(RAISE) if by_weight else load(weights, k)
        share = load(a, k) * w * inverse
        store(out, k, share)
        wrong += (load(a, k) > 0.0) * (share < LEAST_SHARE) + (share > LARGEST_SHARE)
    return not by_weight or sum_of_lanes(wrong) == 0.0


@inner
def add_pairs(a, weighed, g, by_weight, out):
    """Add g * weighed_j * a_k to out[j, k]; return where factors are out of range."""
    wrong, K = everywhere(0.0), len(a) // LANES
    for j in range(K):
        w = load(weighed, j)
        c = w * g
        wrong += 1.0 - (c < LARGEST_SHARE) * (c > -LARGEST_SHARE)
        if by_weight:
            is_used = (g > 0.0) + (g < 0.0)
            wrong += (w > 0.0) * is_used * (c < LEAST_SHARE) * (c > -LEAST_SHARE)
        for k in range(K):
            store(out[j], k, load(out[j], k) + c * load(a, k))
    return wrong


@inner
def collect(pairs, counts):
    """Add up the lanes of sums of pairs, and begin with the next."""
    K = len(counts)
    for j in range(K):
        for k in range(K):
            counts[j, k] = sum_of_lanes(load(pairs[j], k))
            store(pairs[j], k, 0.0)


@inner
def weigh_first(m, factors, out):
    """Write m * factors to out; return whether they are proved."""
    wrong = everywhere(0.0)
    for k in range(len(m) // LANES):
        v, f = load(m, k), load(factors, k)
        store(out, k, v * f)
        wrong += (v * f < TINY) * (v > 0.0) * (f > 0.0)
    return sum_of_lanes(wrong) == 0.0


@inner
def backward(row, steps, room, by_weight):
    """Go back through all steps; return whether they are proved, and sums in range.

    The history becomes the probabilities of states. Derivatives are by weight, or by logarithms,
    as it is said of transitions, first and last states.
    """
    factors, _, history, known, parts, counts = room
    K = row.x.shape[1]
    m, sums, weighed = parts[LAST], parts[SUMS], parts[WEIGHED]
    pairs = parts[PARTS:]
    lengths, g = load(known[LENGTH], 0), load(known[GRADIENT], 0)
    pairs[:, :], counts[:, :, :] = 0.0, 0.0
    if not share_ends(history[steps - 1], m, by_weight[2], parts[TO_LAST]):
        return False
    for t in range(steps - 1, -1, -1):
        a, top, is_taken = history[t], everywhere(1.0), t + 1.0 < lengths
        if t + 1 < steps:
            matrix, weights = matrix_of(row, t), factors[t + 1]
            odd, top = everywhere(0.0), everywhere(0.0)
            for k in range(K):
                w = load(m, k) * load(weights, k)
                store(weighed, k, w)
                odd += w < TINY
            sum_products(weighed, matrix.P.T, sums)
            for k in range(K):
                odd += load(sums, k) < K * SAFE
            if sum_of_lanes(odd) > 0.0 and not is_proved(
                m, weights, weighed, sums, matrix.flag, is_taken
            ):
                return False
            for k in range(K):
                w = where(is_taken, load(sums, k), load(m, k))
                store(m, k, w)
                top = where(w > top, w, top)
        total = sum_pairs(a, m)
        wrong = 1.0 - (total > K * SAFE) * (total < LARGEST_TOTAL)
        if t + 1 < steps and len(counts) > 0:
            wrong += add_pairs(a, weighed, is_taken * g / total, by_weight[0], pairs)
            if len(counts) > 1:
                collect(pairs, counts[t])
        inverse = 1.0 / total
        for k in range(K):
            store(a, k, load(a, k) * load(m, k) * inverse)
        if sum_of_lanes(wrong) > 0.0:
            return False
        is_in_range = (top > 1 / LARGEST) * (top < LARGEST)
        if sum_of_lanes(is_in_range) < LANES and not rescale(m, known[POWER]):
            return False
    if len(counts) == 1:
        collect(pairs, counts[0])
    return weigh_first(m, factors[0], weighed) and share_ends(
        weighed, parts[FIRST], by_weight[1], parts[TO_FIRST]
    )


@inner
def write_sums(rows, r, end, row, steps, room, by_weight, sums):
    """Add what the passes through a pack have found to sums."""
    to_x, _, to_P, _, to_initial, to_final = sums
    _, _, history, known, parts, counts = room
    maps, K = rows[3], row.x.shape[1]
    first, last = parts[TO_FIRST], parts[TO_LAST]
    # What lies past the ends of all rows is not read.
    for i in range(len(counts) if len(counts) < steps else steps - 1):
        P, out = matrix_of(row, i).P, to_P[place(rows, r, maps[TO_TRANSITIONS]), i]
        for j in range(K):
            for k in range(K):
                out[j, k] += counts[i, j, k] * (1.0 if by_weight else P[k, j])
    for lane in range(end - r):
        g, length = known[GRADIENT, lane], int(known[LENGTH, lane])
        if len(to_x) > 0:
            out = to_x[place(rows, r + lane, maps[TO_POTENTIALS])]
            for t in range(length):
                for k in range(K):
                    out[t, k] += g * history[t, k * LANES + lane]
        for k in range(K):
            if len(to_initial) > 0:
                at = place(rows, r + lane, maps[TO_INITIAL])
                to_initial[at, 0, k] += g * first[k * LANES + lane]
            if len(to_final) > 0:
                at = place(rows, r + lane, maps[TO_FINAL])
                to_final[at, 0, k] += g * last[k * LANES + lane]


@compiled
def posterior(block, room, totals, left, cotangents, by_weight, sums):
    """Do for packs what `posterior.posterior` does, the pass forward included, or leave them.

    See `log_totals`. Matrices are as they are, not transposed, but for sums.
    """
    # A row number that begins as a constant would have Numba compile once more what takes it.
    rows, end = block[0], 0
    of_first = len(sums[4]) > 0 and not block[3][1]
    of_last = len(sums[5]) > 0 and not block[3][3]
    for r in range(rows[1]):
        if r < end:
            continue
        end, row = end_of_pack(rows, r), row_of(block, r)
        steps = load_pack(block, r, end, room) if left[r] else 0
        if (
            steps > 0
            and load_cotangents(rows, r, end, cotangents, room[3])
            and forward(row, steps, room, True)
        ):
            # Going back, other powers are taken out of weights.
            write_totals(r, end, room[3], totals)
            if backward(row, steps, room, (by_weight, of_first, of_last)):
                write_sums(rows, r, end, row, steps, room, by_weight, sums)
                left[r:end] = 0
