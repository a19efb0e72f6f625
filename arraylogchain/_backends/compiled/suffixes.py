"""The backtrace of several best paths: the best suffixes of each row, from step to step."""

from __future__ import annotations

from typing import Any, NamedTuple

from arraylogchain._backends.compiled.linear_space import matrix_index, num_active
from arraylogchain._backends.compiled.matrices import SparseColumns, entry_of_column, num_entries
from arraylogchain._numba.compiling import compiled, inlined, inner
from arraylogchain._numba.elementary import INF
from arraylogchain._numba.intrinsics import view


class Candidates(NamedTuple):
    """Memory for suffixes, until the best n are selected, and for terms of one suffix."""

    losses: Any  # [2 * n]
    links: Any  # [2 * n] integers
    work: Any  # [2 * n]
    terms: Any  # [K]


@compiled
def backtrace_suffixes(updated, matrices, sparse, lengths, suffixes, links, candidates, first):
    """Write the best suffixes of rows from the first of some steps on, given those after the last.

    Parameters
    ----------
    updated : array [S, G, K * R]
        Updated messages that `paths.max_product` stored.
    matrices, sparse, lengths, first
        See `paths.backtrace`.
    suffixes : integer array and array [G, R, n]
        States and losses; see `interface.Suffixes`.
    links : integer array [S, G, R, n]
        The number of the suffix that was extended, times K, plus the state.
    candidates : tuple
        The fields of `Candidates`.
    """
    _, L, _, place = matrices
    sparse, candidates, (states, losses) = SparseColumns(*sparse), Candidates(*candidates), suffixes
    (S, G, R, n), K = links.shape, len(candidates.terms)
    for g in range(G):
        for i in range(S - 1, -1, -1):
            base = matrix_index(place, g, first + i, True) * K * K
            moved = num_active(lengths[g], first + i + 1)
            for r in range(R):
                link, state, loss = links[i, g, r], states[g, r], losses[g, r]
                if r >= moved:
                    for p in range(n):
                        link[p] = p * K + state[p]
                    continue
                message, logs = updated[i, g][r::R], view(L, base, (K * K,))
                count = _extend(message, logs, sparse, state, loss, candidates)
                for p in range(n):
                    loss[p] = candidates.losses[p] if p < count else INF
                    link[p] = candidates.links[p] if p < count else 0
                    state[p] = link[p] % K


@inner
def _extend(message, L, columns, state, loss, candidates):
    """Find the best suffixes with one more state; return how many there are, at most n."""
    n, K, count, bound = len(loss), len(message), 0, 0.0
    terms = candidates.terms
    # Extending a suffix may lose nothing, so that no more than the largest loss is needed.
    for p in range(n):
        bound = loss[p] if loss[p] > bound else bound
    for p in range(n):
        if loss[p] == INF:
            continue
        num_terms, top = num_entries(columns, state[p], K), -INF
        for q in range(num_terms):
            k, log = entry_of_column(columns, L, state[p], q, K)
            terms[q] = message[k] + log
            top = terms[q] if terms[q] > top else top
        for q in range(num_terms):
            new = loss[p] + (0.0 if terms[q] == top else top - terms[q])
            if new <= bound and new < INF:
                if count == 2 * n:
                    bound, count = _keep_best(candidates, count, n), n
                candidates.losses[count] = new
                candidates.links[count] = p * K + entry_of_column(columns, L, state[p], q, K)[0]
                count += 1
    if count > n:
        _keep_best(candidates, count, n)
    return min(count, n)


@inner
def _keep_best(candidates, count, n):
    """Keep the n candidates of smallest loss, the first of equal ones; return the largest loss."""
    losses, links, work, _ = candidates
    for c in range(count):
        work[c] = losses[c]
    largest = _nth_smallest(work, count, n)
    num_equal = n
    for c in range(count):
        num_equal -= losses[c] < largest
    num_best = 0
    for c in range(count):
        if losses[c] < largest or (losses[c] == largest and num_equal > 0):
            num_equal -= losses[c] == largest
            losses[num_best], links[num_best] = losses[c], links[c]
            num_best += 1
    return largest


@inlined
def _nth_smallest(x, count, n):
    """Return the n-th smallest of the first numbers, which are reordered (Hoare's FIND)."""
    low, high = 0, count - 1
    while low < high:
        pivot, i, j = x[n - 1], low, high
        while i <= j:
            while x[i] < pivot:
                i += 1
            while x[j] > pivot:
                j -= 1
            if i <= j:
                x[i], x[j] = x[j], x[i]
                i, j = i + 1, j - 1
        low, high = i if j < n - 1 else low, j if i > n - 1 else high
    return x[n - 1]


@compiled
def follow(links, numbers, states, K):
    """Write the states of paths, [S, G, R, n].

    Parameters
    ----------
    links : integer array [S, G, R, n]
        See `backtrace_suffixes`.
    numbers : integer array [G, R, n]
        Numbers of the suffixes at the first step; overwritten by those at the step after the last.
    states : integer array [S, G, R, n]
    """
    S, G, R, n = links.shape
    for g in range(G):
        for r in range(R):
            for i in range(S):
                for p in range(n):
                    link = links[i, g, r, numbers[g, r, p]]
                    numbers[g, r, p], states[i, g, r, p] = link // K, link % K
