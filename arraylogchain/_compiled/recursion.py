"""The recursion: rows side by side that share their matrices, through a block of steps.

    arrived_t = left_{t-1} @ P_{t-1}      forward; at a row's first step what it begins with
    arrived_t = P_t @ left_{t+1}          backward; at its last step what it ends with
    left_t    = arrived_t * exp(x_t)

Weights of a state of R rows are an array [K, R], flat: there is no difference between one row and
many, but for the order of loops. They are to be multiplied by exp(shift) * 2^power, whole numbers.

A row first goes through a block in linear weights, as long as each step is proved; see `steps`. If
one is not, it goes through the block again, in logarithms.
"""

from __future__ import annotations

import math

from arraylogchain._compiled import numbers, steps
from arraylogchain._compiled.compiling import compiled, inner
from arraylogchain._compiled.logs import add_up, log_product
from arraylogchain._compiled.numbers import INF, largest, whole_above
from arraylogchain._compiled.steps import FAILED, LINEAR, LOGS, RAISED, longer

# After so many steps weights are raised, if they have become small.
_TOGETHER = 8


@compiled
def advance(x, matrices, proof, few, lengths, state, kept, room, first, backward):
    """Take groups of rows through the steps of a block; return how many are in logs.

    Parameters
    ----------
    x : array [G, R, S, K]
        Potentials.
    matrices : (F, L, scales, count, sharing, begin)
        F [n, K, K], flat, with exp(scales[0, n]) * 2^scales[1, n]; transposed if `backward`.
        Logarithms of entries of F, or empty. `count` of them, for the steps from `begin` on, are
        the matrices of as many x[g], one after another, as are `sharing` them.
    proof : (least, line, log_line, is_special)
        The least linear weight; the least sum that is proved if entries were left out of F, else 0;
        the least sum of a step in logarithms; whether entries are infinite or NaN.
    few : (rows, logs)
        Of the one matrix, if there is one and it has few entries; see `log_product`.
    lengths : array [G, R]
        Steps of rows, the longest first.
    state : (weights [G, R, K], scales [3, G, R], forms [G, R])
        Changed. The last is LINEAR or LOGS, as rows are in all of the block. What a chain begins
        with may have any weights. Third of the scales are the logs of the sums of all weights.
    kept : (arrived [S, G, K * R], left [S + 1, G, K * R], scales [2, S, G, R], [2, S + 1, G, R])
        What is kept of each step; `left` also has what the block began with. What is not kept is
        [2, 1, K * R], and no scales.
    room : arrays [B + 4, K * R], flat, and [B + 3, R]
        B steps are weighed by exponentials that are computed together.
    first : int
        The first step of the block.
    backward : bool
    """
    weights, scales, forms = state
    span, in_logs = (RAISED - 8 - math.log2(proof[0])) * math.log(2.0), 0
    for g in range(len(x)):
        own = weights[g], scales[0, g], scales[1, g], forms[g]
        for r in range(len(forms[g])):
            _choose_form(own, r, proof, span)
        _linear(x[g], matrices, proof, lengths[g], own, kept, room, first, backward, g)
        for r in range(len(forms[g])):
            if forms[g, r] != LINEAR:
                in_logs += 1
                _in_logs(
                    x[g], matrices, proof, few, lengths[g], own, kept, room, first, backward, g, r
                )
            add_up(weights[g, r], forms[g, r] == LINEAR, scales[:, g, r])
    return in_logs


@inner
def _choose_form(state, r, proof, span):
    """Make a row linear, if its weights can be brought into range; else mark it, or leave logs."""
    weights, shifts, powers, forms = state
    m, K, is_special = weights[r], weights.shape[1], proof[3]
    if forms[r] == LINEAR:
        zero, one = K - K, K // K  # Numba would compile another function for constants
        fits = steps.bring_in_range(m, m, m, zero, K, one, proof[0], powers[r:])
        forms[r] = LINEAR if fits and not is_special else FAILED
        return
    top = largest(m)
    shift, wide = whole_above(top), 0
    shifts[r] += shift
    for k in range(K):
        m[k] -= shift
        wide += (m[k] < -span) & (m[k] > -INF)
    if wide == 0 and top == top and not is_special:
        numbers.exps(m, 0.0, m, K)
        for k in range(K):
            m[k] *= numbers.power_of_two(RAISED)
        powers[r] -= RAISED
        forms[r] = LINEAR


@inner
def _linear(x, matrices, proof, lengths, state, kept, room, first, backward, g):
    """Take rows of a group through a block, those that are linear; mark what fails."""
    F, L, matrix_scales, per_group, sharing, begin = matrices
    forms = state[3]
    arrived, left, arrived_scales, left_scales = kept
    R, S, K = x.shape
    B = len(room[1]) - 3
    factors, tops, more = room[0], room[1], room[1][B:]
    shift, power, raised = more[0], more[1], more[2]
    # What is not kept is written over: of that there are two steps, one after another.
    n_arrived, n_left, ga, gl = len(arrived), len(left), g % arrived.shape[1], g % left.shape[1]
    following = low = S - S  # of a constant Numba compiles another version
    m = left[S % n_left if backward else 0, gl]
    good = _copy(m, shift, power, state, following)
    steps.raise_weights(m, raised, power)
    _keep(left_scales, g, S if backward else 0, shift, power)
    for s in range(S if good else 0):
        i = S - 1 - s if backward else s
        t = first + i
        if s == following:
            count = S - s if S - s < B else B
            following += count
            low = i - count + 1 if backward else i
            good -= steps.write_factors(x, low, count, lengths, first, factors, tops, forms, m)
        active, f = longer(lengths, t), factors[(i - low) * K * R : (i - low + 1) * K * R]
        begun = longer(lengths, t + 1) if backward else (active if t > 0 else 0)
        v, w = arrived[i % n_arrived, ga], left[(i + (not backward)) % n_left, gl]
        n = steps.number(per_group, g // sharing, t, begin, backward)
        if begun > 0:
            numbers.multiply(v, m, F, n * K * K, K, R, begun)
        for r in range(begun):
            shift[r] += matrix_scales[0, n]
            power[r] += matrix_scales[1, n]
        steps.copy_rows(v, m, R, begun)
        _keep(arrived_scales, g, i, shift, power)
        if steps.weigh(v, f, w, proof[0], proof[1]) > 0:
            good -= steps.judge(v, f, w, m, L, n * K * K, proof, power, forms, begun, active)
            if good == 0:
                return
        if s % _TOGETHER == 0:
            steps.raise_weights(w, raised, power)
        for r in range(R):
            shift[r] += tops[i - low, r]
        _keep(left_scales, g, i + (not backward), shift, power)
        m = w
    _copy(m, shift, power, state, following)


@inner
def _copy(m, shift, power, state, taken):
    """Copy a state's rows that are linear, back once steps are taken; return how many these are."""
    weights, shifts, powers, forms = state
    R, K = weights.shape
    count = 0
    for r in range(R):
        is_linear = forms[r] == LINEAR
        count += is_linear
        if taken == 0:
            shift[r], power[r] = shifts[r], powers[r]
        elif is_linear:
            shifts[r], powers[r] = shift[r], power[r]
        for k in range(K):
            if taken == 0:
                m[k * R + r] = weights[r, k] if is_linear else 0.0
            elif is_linear:
                weights[r, k] = m[k * R + r]
    return count


@inner
def _keep(scales, g, i, shift, power):
    if scales.shape[1] > 0:
        for r in range(len(shift)):
            scales[0, i, g, r], scales[1, i, g, r] = shift[r], power[r]


@inner
def _in_logs(x, matrices, proof, few, lengths, state, kept, room, first, backward, g, r):
    """Take a row through a block in logarithms; factors in `room` are not needed any more."""
    F, L, matrix_scales, per_group, sharing, begin = matrices
    weights, shifts, powers, forms = state
    arrived, left, arrived_scales, left_scales = kept
    S, K, own = x.shape[1], x.shape[2], room[0]
    a, c, sums, u = own[:K], own[K : 2 * K], own[2 * K : 3 * K], own[3 * K : 4 * K]
    if forms[r] == FAILED:
        powers[r] += numbers.write_logs(weights[r])
    for k in range(K):
        a[k] = weights[r, k]
    _keep_row(a, left, left_scales, g, S if backward else 0, r, shifts, powers)
    for s in range(S):
        i = S - 1 - s if backward else s
        t = first + i
        begun = t < lengths[r] - 1 if backward else 0 < t < lengths[r]
        if begun:
            n = steps.number(per_group, g // sharing, t, begin, backward)
            log_product(a, F, L, n * K * K, proof[2], proof[3], few, c, sums, u)
            shifts[r] += matrix_scales[0, n]
            powers[r] += matrix_scales[1, n]
            for k in range(K):
                a[k] = c[k]
        _keep_row(a, arrived, arrived_scales, g, i, r, shifts, powers)
        if t < lengths[r]:
            for k in range(K):
                c[k] = x[r, i, k]
            shift = whole_above(largest(c))
            for k in range(K):
                u[k] = a[k] + (c[k] - shift)
            top = whole_above(largest(u))
            for k in range(K):
                a[k] = (a[k] - top) + (c[k] - shift)  # what is large cancels first, exactly
            shifts[r] = (shifts[r] + shift) + top
        _keep_row(a, left, left_scales, g, i + (not backward), r, shifts, powers)
    forms[r] = LOGS
    for k in range(K):
        weights[r, k] = a[k]


@inner
def _keep_row(a, out, scales, g, i, r, shifts, powers):
    if scales.shape[1] > 0:
        for k in range(len(a)):
            out[i, g, k * len(shifts) + r] = a[k]
        scales[0, i, g, r], scales[1, i, g, r] = shifts[r], powers[r]
