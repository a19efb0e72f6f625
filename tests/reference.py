"""References, computed in other ways than the library's and in higher precision.

The workhorse is NumPy's long double (64 bits of mantissa on x86), where each sum is shifted by its
own maximum. mpmath checks the workhorse, and adds up all paths of small chains one by one.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import mpmath
import numpy as np


def wide(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.longdouble)


def logsumexp(terms: np.ndarray, axis: int) -> np.ndarray:
    """Return the log of the sum of exponentials, by the rules of scipy.special.logsumexp."""
    with np.errstate(all="ignore"):
        top = np.max(terms, axis=axis, keepdims=True, initial=-np.inf)
        shift = np.where(np.isfinite(top), top, 0)
        total = np.log(np.sum(np.exp(terms - shift), axis=axis, keepdims=True)) + shift
    return np.squeeze(total, axis=axis)


def logmatmulexp(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return log(exp(a) @ exp(b)), one row of `a` at a time so that the cube stays small."""
    left, right, finish = _as_matrices(a, b)
    with np.errstate(invalid="ignore"):
        rows = [logsumexp(left[..., i, :, None] + right, axis=-2) for i in range(left.shape[-2])]
    batch = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    empty = np.empty((*batch, 0, right.shape[-1]), np.longdouble)
    return finish(np.stack(rows, axis=-2) if rows else empty)


def matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return wide(a) @ wide(b)


def maxplus(a: np.ndarray, b: np.ndarray, dtype: str) -> np.ndarray:
    """Return max_k a[i, k] + b[k, j], the sums rounded to `dtype`."""
    left, right, finish = _as_matrices(a, b)
    with np.errstate(invalid="ignore", over="ignore"):
        terms = (left[..., :, :, None] + right[..., None, :, :]).astype(dtype)
    return finish(np.max(terms, axis=-2, initial=-np.inf))


def logchainexp(matrices: list[np.ndarray]) -> np.ndarray:
    """Return the log-space product of a list of matrices, from left to right."""
    product = wide(matrices[0])
    for matrix in matrices[1:]:
        product = logmatmulexp(product, matrix)
    return product


class Chain(NamedTuple):
    """Log weights of a chain, and their G: see error_model.chain_bound."""

    log_partition: np.ndarray
    partition_gap: np.ndarray
    messages: np.ndarray
    message_gaps: np.ndarray


def chain(
    x: np.ndarray,
    log_transitions: np.ndarray | None = None,
    log_initial: np.ndarray | None = None,
    *,
    edges_in_logs: bool = False,
    initial_in_logs: bool = False,
    log_form_beyond: float = np.inf,
) -> Chain:
    """Return the forward messages of a chain and the log of their last sum.

    The recursion works on logs relative to the largest of each step; the sum of what was taken off
    is carried in two numbers. Weights that the library was given as logs have their part in G, as
    potentials have; those that it was given in linear space are used as they are. From the step at
    which a state lies more than `log_form_beyond` below the largest of its row, that row's logs are
    rounded at every step, and so how far a state lies below the largest has its part in G.
    """
    x = wide(x)
    K = x.shape[-1]
    initial = np.zeros(K, np.longdouble) if log_initial is None else wide(log_initial)
    steps = x.shape[-2] - 1
    edges = np.zeros((1, K, K), np.longdouble) if log_transitions is None else wide(log_transitions)
    batch = np.broadcast_shapes(x.shape[:-2], edges.shape[:-3], initial.shape[:-1])
    edge_gaps = _below_largest(edges, axis=(-2, -1)) if edges_in_logs else np.zeros_like(edges)
    x_gaps = _below_largest(x, axis=-1)

    with np.errstate(invalid="ignore"):
        alpha = np.broadcast_to(initial + x[..., 0, :], (*batch, K))
    start_gaps = _below_largest(initial, axis=-1) if initial_in_logs else 0
    gap = np.broadcast_to(start_gaps + x_gaps[..., 0, :], (*batch, K))
    offset = rest = np.zeros((*batch, 1), np.longdouble)
    messages, gaps = [alpha], [gap]
    in_log_form = np.zeros((*batch, 1), bool)
    for i in range(steps):
        at = min(i, edges.shape[-3] - 1)
        with np.errstate(invalid="ignore"):
            terms = alpha[..., :, None] + edges[..., at, :, :]
            summed = logsumexp(terms, axis=-2)
            weights = np.exp(terms - summed[..., None, :])
            alpha = summed + x[..., i + 1, :]
        along = _finite(weights) * (gap[..., :, None] + edge_gaps[..., at, :, :])
        gap = np.sum(along, axis=-2) + x_gaps[..., i + 1, :]
        top = _finite(np.max(alpha, axis=-1, keepdims=True, initial=-np.inf))
        alpha = alpha - top
        depth = _finite(-alpha)
        in_log_form = in_log_form | np.any(depth > log_form_beyond, axis=-1, keepdims=True)
        gap = gap + np.where(in_log_form, depth, 0)
        offset, rest = _add_exactly(offset, top, rest)
        messages.append(offset + (rest + alpha))
        gaps.append(gap)

    summed = logsumexp(alpha, axis=-1)
    with np.errstate(invalid="ignore"):
        weights = _finite(np.exp(alpha - summed[..., None]))
    return Chain(
        offset[..., 0] + (rest[..., 0] + summed),
        np.sum(weights * gap, axis=-1),
        np.stack(messages, axis=-2),
        np.stack(gaps, axis=-2),
    )


class Filtered(NamedTuple):
    """Shares of forward messages in their sums, logs of the sums' ratios, and their G."""

    probabilities: np.ndarray
    log_normalizers: np.ndarray
    gaps: np.ndarray
    gap_of_sum: np.ndarray


def filtered(messages: np.ndarray, gaps: np.ndarray) -> Filtered:
    """Return what the forward messages [..., T, K] of `chain` say of each step."""
    totals = logsumexp(messages, axis=-1)
    shares = _shares(messages)
    with np.errstate(invalid="ignore"):
        logs = np.diff(totals, axis=-1, prepend=0)
    logs = np.where(np.isfinite(totals), logs, totals)
    return Filtered(shares, logs, gaps, np.sum(shares * gaps, axis=-1))


def long_filtered(x: np.ndarray, transitions: np.ndarray, initial: np.ndarray) -> Filtered:
    """Return the same of a long chain of moderate range with one linear matrix [K, K]."""
    x, transitions = wide(x), wide(transitions)
    top = np.max(x, axis=-1, keepdims=True)
    emissions = np.exp(x - top)
    shares, logs, state = np.empty_like(x), np.empty_like(x[:, 0]), None
    for i in range(len(x)):
        state = (wide(initial) if state is None else state @ transitions) * emissions[i]
        total = state.sum()
        state = state / total
        shares[i], logs[i] = state, np.log(total) + top[i, 0]
    # Errors of steps that are not forgotten: the G of a few steps, whatever state they were in.
    gaps = np.broadcast_to(np.max(top - np.min(x, axis=-1, keepdims=True)), x.shape)
    return Filtered(shares, logs, gaps, gaps[:, 0])


def long_chain(x: np.ndarray, transitions: np.ndarray, initial: np.ndarray) -> np.longdouble:
    """Return log_partition of one long chain of moderate range, with linear transitions.

    Linear mantissas and a power of two, which long double can keep for many steps between two
    rescalings: much faster than logs. `transitions` is [T-1, K, K] or [1, K, K].
    """
    x, transitions = wide(x), wide(transitions)
    top = np.max(x, axis=-1, keepdims=True)
    emissions = np.exp(x - top)
    alpha = wide(initial) * emissions[0]
    exponent = 0
    for i in range(1, len(x)):
        alpha = (alpha @ transitions[min(i, len(transitions)) - 1]) * emissions[i]
        if i % 50 == 0:
            # In long double this spans 4900 decades; 50 moderate steps need a few hundred.
            shift = int(np.frexp(np.max(alpha))[1])
            alpha = np.ldexp(alpha, -shift)
            exponent += shift
    return np.log(np.sum(alpha)) + exponent * np.log(wide(2)) + np.sum(top)


def logmatmulexp_mp(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return log(exp(a) @ exp(b)) of two matrices with finite or -inf entries, by mpmath."""
    out = np.empty((a.shape[0], b.shape[1]), np.longdouble)
    with mpmath.workdps(60):
        for i, j in np.ndindex(out.shape):
            terms = [
                mpmath.exp(mpmath.mpf(float(p)) + mpmath.mpf(float(q)))
                for p, q in zip(a[i], b[:, j], strict=True)
                if np.isfinite(p) and np.isfinite(q)
            ]
            out[i, j] = _log(mpmath.fsum(terms))
    return out


def all_paths(x: np.ndarray, transitions: np.ndarray, initial: np.ndarray) -> np.longdouble:
    """Return log_partition of a tiny chain: the weights of its K**T paths, added up by mpmath."""
    T, K = x.shape
    with mpmath.workdps(60):
        emissions = [[mpmath.exp(mpmath.mpf(float(v))) for v in row] for row in x]
        edges = [[[mpmath.mpf(float(p)) for p in row] for row in m] for m in transitions]
        total = mpmath.mpf(0)
        for path in itertools.product(range(K), repeat=T):
            weight = mpmath.mpf(float(initial[path[0]])) * emissions[0][path[0]]
            for i, (k, j) in enumerate(itertools.pairwise(path)):
                weight *= edges[min(i, len(edges) - 1)][k][j] * emissions[i + 1][j]
            total += weight
        return _log(total)


def forum_formula(x: np.ndarray, transitions: np.ndarray, initial: np.ndarray) -> np.ndarray:
    """Return log_partition as the forum's code does, mistakes included.

    Neighbouring matrices are multiplied in pairs; an odd one out is paired with zeros, which in
    logs is the matrix of ones and not the identity; entries are clamped from below at 1e-10.
    """
    stack = x[..., :-1, :, None] + np.log(transitions)
    while stack.shape[-3] > 1:
        if stack.shape[-3] % 2:
            stack = np.concatenate([stack, np.zeros_like(stack[..., :1, :, :])], axis=-3)
        left, right = stack[..., 0::2, :, :], stack[..., 1::2, :, :]
        rows = left.max(axis=-1, keepdims=True)
        columns = right.max(axis=-2, keepdims=True)
        factors = (np.maximum(np.exp(m), 1e-10) for m in (left - rows, right - columns))
        stack = np.log(np.matmul(*factors)) + rows + columns
    ends = np.logaddexp.reduce(stack[..., 0, :, :] + x[..., -1, None, :], axis=-1)
    return np.logaddexp.reduce(np.log(initial) + ends, axis=-1)


def _as_matrices(a: np.ndarray, b: np.ndarray):
    """Return both as matrices, and what takes the added axes off the product again."""
    a, b = wide(a), wide(b)
    left = a[None, :] if a.ndim == 1 else a
    right = b[:, None] if b.ndim == 1 else b

    def finish(out: np.ndarray) -> np.ndarray:
        out = out[..., 0] if b.ndim == 1 else out
        return out if a.ndim > 1 else out[..., 0] if b.ndim == 1 else out[..., 0, :]

    return left, right, finish


def _finite(x: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(x), x, 0)


def _below_largest(x: np.ndarray, axis: int | tuple[int, ...]) -> np.ndarray:
    """Return how far each finite entry lies below the largest finite one."""
    finite = np.isfinite(x)
    top = np.max(np.where(finite, x, -np.inf), axis=axis, keepdims=True, initial=-np.inf)
    with np.errstate(invalid="ignore"):
        return np.where(finite, top - x, 0)


def _add_exactly(total: np.ndarray, x: np.ndarray, rest: np.ndarray):
    """Return total + x and rest plus what that sum rounded off (Knuth's two-sum)."""
    s = total + x
    v = s - total
    return s, rest + ((total - (s - v)) + (x - v))


def _log(total: mpmath.mpf) -> np.longdouble:
    if not total:
        return np.longdouble(-math.inf)
    return np.longdouble(mpmath.nstr(mpmath.log(total), 25))


class Lattice(NamedTuple):
    """Log weights of a chain with all batch axes and a matrix for every step, and their G.

    Paths are compared by sums of logs: those of linear weights are rounded to eps of themselves, so
    their size has a part in G, beside how far a weight lies below the largest of its step.
    """

    x: np.ndarray
    edges: np.ndarray
    initial: np.ndarray
    x_gaps: np.ndarray
    edge_gaps: np.ndarray
    initial_gaps: np.ndarray


def lattice(
    x: np.ndarray,
    log_transitions: np.ndarray | None = None,
    log_initial: np.ndarray | None = None,
    *,
    edges_in_logs: bool = False,
    initial_in_logs: bool = False,
) -> Lattice:
    x = wide(x)
    T, K = x.shape[-2:]
    edges = np.zeros((1, K, K), np.longdouble) if log_transitions is None else wide(log_transitions)
    initial = np.zeros(K, np.longdouble) if log_initial is None else wide(log_initial)
    edges = edges[..., np.minimum(np.arange(T - 1), edges.shape[-3] - 1), :, :]
    batch = np.broadcast_shapes(x.shape[:-2], edges.shape[:-3], initial.shape[:-1])
    edge_gaps, initial_gaps = _below_largest(edges, (-2, -1)), _below_largest(initial, -1)
    if not edges_in_logs:
        edge_gaps = edge_gaps + np.abs(_finite(edges))
    if not initial_in_logs:
        initial_gaps = initial_gaps + np.abs(_finite(initial))
    parts = (x, edges, initial, _below_largest(x, -1), edge_gaps, initial_gaps)
    axes = (2, 3, 1, 2, 3, 1)
    return Lattice(
        *(
            np.broadcast_to(part, (*batch, *part.shape[part.ndim - n :]))
            for part, n in zip(parts, axes, strict=True)
        )
    )


def path_weights(states: np.ndarray, chain: Lattice) -> tuple[np.ndarray, np.ndarray]:
    """Return the log weights of paths, [..., T] with axes that broadcast, and their G."""
    weights = _along(states, chain.initial, chain.x, chain.edges)
    gaps = _along(states, chain.initial_gaps, chain.x_gaps, chain.edge_gaps)
    return weights, np.where(np.isfinite(weights), gaps, 0)


def _along(states: np.ndarray, initial: np.ndarray, x: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return the sums of what lies along paths."""
    T, K = x.shape[-2:]
    batch = np.broadcast_shapes(states.shape[:-1], x.shape[:-2])
    states = np.broadcast_to(states, (*batch, T)).astype(np.int64)
    total = np.zeros(batch, np.longdouble)
    parts = (
        (initial, states[..., :1]),
        (x, states[..., None]),
        (
            edges.reshape(*edges.shape[:-2], K * K),
            (states[..., :-1] * K + states[..., 1:])[..., None],
        ),
    )
    for part, at in parts:
        part = np.broadcast_to(part, (*batch, *part.shape[x.ndim - 2 :]))
        taken = np.take_along_axis(part, at, axis=-1)
        total = total + np.sum(taken, axis=tuple(range(len(batch), taken.ndim)))
    return total


def enumerate_paths(chain: Lattice) -> tuple[np.ndarray, np.ndarray]:
    """Return all K**T paths in the order of their states, and their log weights [..., K**T]."""
    T, K = chain.x.shape[-2:]
    paths = np.array(list(itertools.product(range(K), repeat=T)), np.int64).reshape(K**T, T)
    added = paths.reshape(K**T, *(1,) * (chain.x.ndim - 2), T)
    return paths, np.moveaxis(path_weights(added, chain)[0], 0, -1)


class BestPath(NamedTuple):
    """A path of largest weight, and how far every state lies below the best of its step.

    The recursion's numbers are relative to the best state of a step, and are rounded to eps of what
    they are: so a path's G in it counts how far the path lies below the best one at each step.
    """

    states: np.ndarray
    log_weight: np.ndarray
    depths: np.ndarray


def best_path(chain: Lattice) -> BestPath:
    """Return the path that the recursion finds, ties going to the smallest state."""
    T, batch = chain.x.shape[-2], chain.x.shape[:-2]
    score = chain.initial + chain.x[..., 0, :]
    depths, origins = [_below_largest(score, -1)], []
    for i in range(T - 1):
        terms = score[..., :, None] + chain.edges[..., i, :, :]
        origins.append(np.argmax(terms, axis=-2))
        score = np.max(terms, axis=-2) + chain.x[..., i + 1, :]
        top = np.max(score, axis=-1, keepdims=True)
        score = score - np.where(np.isfinite(top), top, 0)
        depths.append(_below_largest(score, -1))
    possible = np.max(score, axis=-1) > -np.inf
    states = [np.argmax(score, axis=-1)]
    for origin in reversed(origins):
        states.append(np.take_along_axis(origin, states[-1][..., None], axis=-1)[..., 0])
    path = np.where(possible[..., None], np.stack(states[::-1], axis=-1), 0)
    weight = np.where(possible, path_weights(path, chain)[0], -np.inf).reshape(batch)
    return BestPath(path, weight, np.stack(depths, axis=-2))


class Entropy(NamedTuple):
    """Entropies of the posteriors over paths, with their G and depths: see `entropy_bound`."""

    entropy: np.ndarray
    gap: np.ndarray
    depth: np.ndarray


def entropy(
    x: np.ndarray,
    log_transitions: np.ndarray | None = None,
    log_initial: np.ndarray | None = None,
    **options: object,
) -> Entropy:
    """Return the entropy of a chain's paths; the arguments are those of `chain`.

    It is that of the last state, and of each state given the next one, averaged over the posterior
    of that. So it is a sum of nonnegative terms, none larger than log K.
    """
    x = wide(x)
    T, K = x.shape[-2:]
    # What all paths have in common changes no probability.
    x = x - _finite(np.max(x, axis=-1, keepdims=True, initial=-np.inf))
    forward = chain(x, log_transitions, log_initial, **options)
    if log_transitions is None:
        turned = np.zeros((1, K, K), np.longdouble)
    else:
        turned = np.swapaxes(np.flip(wide(log_transitions), axis=-3), -1, -2)
    options = {**options, "initial_in_logs": False}
    backward = chain(np.flip(x, axis=-2), turned, **options)
    onward, onward_gaps = (np.flip(m, -2) for m in (backward.messages, backward.message_gaps))
    given = lattice(x, log_transitions, log_initial, edges_in_logs=True)
    batch = given.x.shape[:-2]
    edge_gaps = given.edge_gaps if options.get("edges_in_logs") else np.zeros_like(given.edge_gaps)

    p = _shares(forward.messages[..., -1, :])
    total = _entropy(p)
    gap = np.sum(p * np.abs(_log_of(p) + total[..., None]) * forward.message_gaps[..., -1, :], -1)
    total, gap = np.broadcast_to(total, batch), np.broadcast_to(gap, batch)
    depth = np.zeros(batch, np.longdouble)
    for i in range(T - 1):
        terms = forward.messages[..., i, :, None] + given.edges[..., i, :, :]  # from, to
        q = np.swapaxes(_shares(np.swapaxes(terms, -1, -2)), -1, -2)
        inner = _entropy(np.swapaxes(q, -1, -2))
        through = logsumexp(terms, axis=-2) + onward[..., i + 1, :]
        p = _shares(through)
        q_gaps = forward.message_gaps[..., i, :, None] + edge_gaps[..., i, :, :]
        inner_gap = np.sum(q * np.abs(_log_of(q) + inner[..., None, :]) * q_gaps, axis=-2)
        p_gaps = np.sum(q * q_gaps, axis=-2) + onward_gaps[..., i + 1, :]
        p_gaps = p_gaps + np.sum(p * p_gaps, axis=-1, keepdims=True)
        total = total + np.sum(p * inner, axis=-1)
        gap = gap + np.sum(p * (inner_gap + inner * p_gaps), axis=-1)
        below = _below_top(forward.messages[..., i, :], (-1,))[..., None]
        below = below + _below_top(given.edges[..., i, :, :], (-2, -1))
        depth = depth + np.sum(p * np.sum(q * below, axis=-2), axis=-1)
    return Entropy(total, gap, depth)


def entropy_mp(log_weights: np.ndarray) -> np.longdouble:
    """Return the entropy of paths with these log weights, by mpmath."""
    with mpmath.workdps(60):
        finite = [mpmath.mpf(float(w)) for w in log_weights if np.isfinite(w)]
        top = max(finite, default=mpmath.mpf(0))
        weights = [mpmath.exp(w - top) for w in finite]
        total = mpmath.fsum(weights)
        terms = (w / total * mpmath.log(total / w) for w in weights)
        return np.longdouble(mpmath.nstr(mpmath.fsum(terms), 25))


def _shares(logs: np.ndarray) -> np.ndarray:
    """Return exp(logs) over their sum along the last axis, 0 where that is 0."""
    top = _finite(np.max(logs, axis=-1, keepdims=True, initial=-np.inf))
    weights = np.exp(logs - top)
    total = np.sum(weights, axis=-1, keepdims=True)
    return weights / np.where(total > 0, total, 1)


def _below_top(logs: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Return how far finite logs lie below the largest along some axes, and 0 for others."""
    top = _finite(np.max(logs, axis=axes, keepdims=True, initial=-np.inf))
    return _finite(top - logs)


def _log_of(p: np.ndarray) -> np.ndarray:
    return np.log(np.where(p > 0, p, 1))


def _entropy(p: np.ndarray) -> np.ndarray:
    return -np.sum(p * _log_of(p), axis=-1)
