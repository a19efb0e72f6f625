"""The posterior of rows that are taken in packs; see `packs`, and `posterior` for its sums."""

from __future__ import annotations

from arraylogchain._compiled.loops.compiling import compiled, inner
from arraylogchain._compiled.loops.lanes import everywhere, load, store, sum_of_lanes, where
from arraylogchain._compiled.loops.numbers import LANES, SAFE
from arraylogchain._compiled.loops.packs import (
    FIRST,
    GRADIENT,
    LAST,
    LENGTH,
    PARTS,
    POWER,
    RAISE,
    SUMS,
    TO_FIRST,
    TO_LAST,
    WEIGHED,
    end_of_pack,
    forward,
    load_pack,
    sum_pairs,
    sum_products,
    weigh,
)
from arraylogchain._compiled.loops.recursion import (
    COTANGENT,
    TO_FINAL,
    TO_INITIAL,
    TO_POTENTIALS,
    TO_TRANSITIONS,
    matrix_of,
    place,
    row_of,
)
from arraylogchain._compiled.loops.steps import LARGEST

# Shares of totals are within these, and so is finite what cotangents, weights and entries make of
# them.
LEAST_SHARE, LARGEST_SHARE = 2.0**-700, 2.0**400


@inner
def load_cotangents(rows, r, end, cotangents, known):
    """Load cotangents; return whether they are in range."""
    wrong = 0
    for lane in range(end - r):
        g = cotangents[place(rows, r + lane, rows[3][COTANGENT])]
        wrong += not (g == 0.0 or 1 / LARGEST <= g <= LARGEST or 1 / LARGEST <= -g <= LARGEST)
        known[GRADIENT, lane] = g
    return wrong == 0


@inner
def is_odd(share, a):
    """Tell where the share of weights a is out of range."""
    return (share < LEAST_SHARE) * (a > 0.0) + (share > LARGEST_SHARE)


@inner
def share_ends(a, weights, by_weight, out):
    """Write probabilities of first or last states, a being the weights of all else.

    Or derivatives by weight. Return whether all are in range.
    """
    inverse, odd = 1.0 / sum_pairs(a, weights), everywhere(0.0)
    for k in range(len(a) // LANES):
        w = everywhere(RAISE) if by_weight else load(weights, k)
        share = load(a, k) * w * inverse
        store(out, k, share)
        odd += is_odd(share, load(a, k) * w)
    return sum_of_lanes(odd) == 0.0


@inner
def add_pairs(a, weighed, inverse, g, out):
    """Add g * weighed_j * a_k * inverse to out[j, k]; return where factors are out of range."""
    odd, K = everywhere(0.0), len(a) // LANES
    for j in range(K):
        w = load(weighed, j)
        share = w * inverse
        odd += is_odd(share, w)
        c = share * g
        for k in range(K):
            store(out[j], k, load(out[j], k) + c * load(a, k))
    return odd


@inner
def collect(pairs, counts):
    """Add up the lanes of sums of pairs, and begin with the next."""
    K = len(counts)
    for j in range(K):
        for k in range(K):
            counts[j, k] = sum_of_lanes(load(pairs[j], k))
            store(pairs[j], k, 0.0)


@inner
def backward(row, steps, room, of_first, of_last):
    """Go back through all steps; return whether they are proved, and sums in range.

    The history becomes the probabilities of states. Of first and last states it is said whether
    derivatives by weight are wanted.
    """
    factors, _, history, known, parts, counts = room
    m, sums, weighed, powers = parts[LAST], parts[SUMS], parts[WEIGHED], known[POWER]
    lengths, g = load(known[LENGTH], 0), load(known[GRADIENT], 0)
    K, pairs = row.x.shape[1], parts[PARTS:]
    pairs[:, :] = 0.0
    if not share_ends(history[steps - 1], m, of_last, parts[TO_LAST]):
        return False
    for t in range(steps - 1, -1, -1):
        a, is_taken = history[t], t + 1.0 < lengths
        if t + 1 < steps:
            matrix = matrix_of(row, t)
            if not weigh(m, factors[t + 1], m, is_taken, weighed, powers):
                return False
            if not sum_products(weighed, matrix.P.T, matrix.flag, sums):
                return False
            for k in range(K):
                store(m, k, where(is_taken, load(sums, k), load(m, k)))
        total = sum_pairs(a, m)
        odd, inverse = 1.0 - (total > K * SAFE), 1.0 / total
        if t + 1 < steps and len(counts) > 0:
            odd += add_pairs(a, weighed, inverse, is_taken * g, pairs)
            if len(counts) > 1:
                collect(pairs, counts[t])
        for k in range(K):
            store(a, k, load(a, k) * load(m, k) * inverse)
        if sum_of_lanes(odd) > 0.0:
            return False
    if len(counts) == 1:
        collect(pairs, counts[0])
    is_proved = weigh(m, factors[0], m, everywhere(1.0), weighed, powers)
    return is_proved and share_ends(weighed, parts[FIRST], of_first, parts[TO_FIRST])


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

    See `packs.log_totals`. Matrices are as they are, not transposed, but for sums.
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
            and forward(row, steps, room, True, totals[r:end])
            and backward(row, steps, room, of_first, of_last)
        ):
            write_sums(rows, r, end, row, steps, room, by_weight, sums)
            left[r:end] = 0
