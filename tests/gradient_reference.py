"""References for gradients and posteriors: long double, and mpmath for tiny cases.

A gradient of a log of a sum is a sum of probabilities times cotangents. Here each probability is
exp(term - largest term) over its own sum, so none underflows against another, and offsets of many
thousands cancel before they are rounded. Every gradient comes with what its bound is made of.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import mpmath
import numpy as np

from tests import reference
from tests.reference import wide


class Gradient(NamedTuple):
    """Sums of cotangents g times derivatives p, over what an entry of an input takes part in."""

    exact: np.ndarray  # sum of g * p
    mass: np.ndarray  # sum of abs(g) * p
    gap: np.ndarray  # sum of abs(g) * p * G, with G as in error_model
    scale: np.ndarray  # sum of abs(g) * the unit in which errors of p are absolute
    terms: int  # how many are summed


# ------------------------------------------------------------------------------------- products


def logmatmulexp(a: np.ndarray, b: np.ndarray, g: np.ndarray) -> tuple[Gradient, Gradient]:
    """Return the gradients of sum(g * logmatmulexp(a, b)), one row of `a` at a time.

    G is how far a term's two entries lie below the maxima of their row and column, and how far the
    result does. A sum that is infinite, or NaN for the sake of infinities alone, has no gradient.
    """
    left, right, g = _as_matrices(a, b, g)
    batch, (M, K), N = g.shape[:-2], left.shape[-2:], right.shape[-1]
    broken = np.isnan(left).any(axis=-1)[..., None] | np.isnan(right).any(axis=-2)[..., None, :]
    broken = np.broadcast_to(broken, g.shape)
    below_rows = left - _finite_max(left, axis=-1)
    below_columns = right - _finite_max(right, axis=-2)
    parts = ("exact", "mass", "gap", "scale")
    da = {part: np.zeros((*batch, M, K), np.longdouble) for part in parts}
    db = {part: np.zeros((*batch, K, N), np.longdouble) for part in parts}
    for i in range(M):
        with np.errstate(invalid="ignore"):
            terms = below_rows[..., i, :, None] + below_columns
        terms = np.broadcast_to(terms, (*batch, K, N))
        p, log_sum = _softmax(terms, axes=(-2,), broken=broken[..., i, None, :])
        weight = g[..., i, None, :]
        gap = 2 * (np.abs(_finite(terms)) + np.abs(_finite(log_sum)))
        for part, summand in _parts(p, gap, 1, weight).items():
            da[part][..., i, :] = np.sum(summand, axis=-1)
            db[part] += summand
    return (
        _summed(da, np.shape(a), left.shape, N),
        _summed(db, np.shape(b), right.shape, M),
    )


def matmul(a: np.ndarray, b: np.ndarray, g: np.ndarray) -> tuple[Gradient, Gradient]:
    """Return the gradients of sum(g * (a @ b))."""
    left, right, g = _as_matrices(a, b, g)
    M, N = g.shape[-2:]
    left_turned, right_turned = np.swapaxes(left, -1, -2), np.swapaxes(right, -1, -2)
    da = {"exact": g @ right_turned, "mass": np.abs(g) @ np.abs(right_turned)}
    db = {"exact": left_turned @ g, "mass": np.abs(left_turned) @ np.abs(g)}
    for parts in (da, db):
        parts["gap"] = parts["scale"] = np.zeros_like(parts["mass"])
    return _summed(da, np.shape(a), left.shape, N), _summed(db, np.shape(b), right.shape, M)


def maxplus(
    a: np.ndarray, b: np.ndarray, indices: np.ndarray, g: np.ndarray
) -> tuple[Gradient, Gradient]:
    """Return the gradients of sum(g * values) of a max-plus product that took these indices."""
    left, right, g = _as_matrices(a, b, g)
    K, (M, N) = left.shape[-1], g.shape[-2:]
    taken = indices.reshape(g.shape)[..., None, :] == np.arange(K)[:, None]  # [..., M, K, N]
    with np.errstate(invalid="ignore"):
        terms = left[..., :, :, None] + right[..., None, :, :]
    parts = _parts(taken & np.isfinite(terms), np.zeros(()), 1, g[..., None, :])
    da = {part: np.sum(x, axis=-1) for part, x in parts.items()}
    db = {part: np.sum(x, axis=-3) for part, x in parts.items()}
    return _summed(da, np.shape(a), left.shape, N), _summed(db, np.shape(b), right.shape, M)


def logchainexp(matrices: Sequence[np.ndarray], g: np.ndarray) -> list[Gradient]:
    """Return the gradients of sum(g * logchainexp(matrices)), by products of all to either side.

    G is left at 0: the bound takes that of the products from the entries' range.
    """
    logs = [wide(m) for m in matrices]
    before = list(
        itertools.accumulate(logs[:-1], reference.logmatmulexp, initial=_identity(logs[0], -2))
    )
    after = list(
        itertools.accumulate(
            reversed(logs[1:]),
            lambda x, y: reference.logmatmulexp(y, x),
            initial=_identity(logs[-1], -1),
        )
    )[::-1]
    batch = np.broadcast_shapes(*(m.shape[:-2] for m in logs))
    g = np.broadcast_to(wide(g), (*batch, logs[0].shape[-2], logs[-1].shape[-1]))
    gradients = []
    for left, matrix, right in zip(before, logs, after, strict=True):
        with np.errstate(invalid="ignore"):
            inner = matrix[..., :, :, None] + right[..., None, :, :]  # k, l, j
            terms = left[..., :, :, None, None] + inner[..., None, :, :, :]  # i, k, l, j
        terms = np.broadcast_to(terms, (*batch, *terms.shape[-4:]))
        p, _ = _softmax(terms, axes=(-3, -2))
        parts = _parts(p, np.zeros(()), 1, g[..., :, None, None, :])
        sums = {part: np.sum(x, axis=(-4, -1)) for part, x in parts.items()}
        gradients.append(_summed(sums, matrix.shape, matrix.shape, g.shape[-2] * g.shape[-1]))
    return gradients


# --------------------------------------------------------------------------------------- chains


class Posterior(NamedTuple):
    """What a chain's forward and backward messages say, and the gradients of sum(g * log Z)."""

    log_partition: np.ndarray
    backward: np.ndarray
    backward_gaps: np.ndarray  # as in reference.Chain
    marginals: Gradient
    counts: Gradient | None  # expected transitions
    log_potentials: Gradient
    transitions: Gradient | None  # with respect to what was given: weights or their logs
    initial: Gradient | None


def chain(
    x: np.ndarray,
    log_transitions: np.ndarray | None = None,
    log_initial: np.ndarray | None = None,
    g: np.ndarray | float = 1.0,
    *,
    edges_in_logs: bool = False,
    initial_in_logs: bool = False,
    log_form_beyond: float = np.inf,
) -> Posterior:
    """Return the posterior of a chain; the arguments are those of reference.chain.

    Every step's probabilities are normalised by their own sum here; the library may divide by one
    Z for all steps. The G of a state, or of a pair of them, is that of its forward and its backward
    messages and, because what it is divided by has errors too, the larger of Z's own and of the
    average over all states of the step.
    """
    x = wide(x)
    T, K = x.shape[-2:]
    edges = np.zeros((1, K, K), np.longdouble) if log_transitions is None else wide(log_transitions)
    initial = np.zeros(K, np.longdouble) if log_initial is None else wide(log_initial)
    batch = np.broadcast_shapes(x.shape[:-2], edges.shape[:-3], initial.shape[:-1])
    edge_gaps = _below_largest(edges, (-2, -1)) if edges_in_logs else np.zeros_like(edges)
    initial_gaps = _below_largest(initial, (-1,)) if initial_in_logs else np.zeros_like(initial)
    per_step = [min(i, edges.shape[-3] - 1) for i in range(T - 1)]
    E, E_gaps = ([m[..., i, :, :] for i in per_step] for m in (edges, edge_gaps))

    forward = _messages(x, E, E_gaps, initial, initial_gaps, batch, log_form_beyond)
    backward = _messages(
        x[..., ::-1, :],
        [np.swapaxes(m, -1, -2) for m in reversed(E)],
        [np.swapaxes(m, -1, -2) for m in reversed(E_gaps)],
        np.zeros(K, np.longdouble),
        np.zeros(K, np.longdouble),
        batch,
        log_form_beyond,
    )
    backward = _Messages(*(np.flip(m, axis=-2) for m in backward))
    broken = np.isnan(x).any(axis=(-2, -1)) | np.isnan(edges).any(axis=(-3, -2, -1))
    broken = np.broadcast_to(broken | np.isnan(initial).any(axis=-1), batch)[..., None]

    g = np.broadcast_to(wide(g), batch)
    one = np.ones(batch, np.longdouble)
    with np.errstate(invalid="ignore"):
        through = forward.full + backward.bare
    p, log_sum = _softmax(through, axes=(-1,), broken=broken[..., None])
    z_gap = np.sum(_finite(p) * forward.full_gaps, axis=-1)[..., -1]
    gap = _with_normaliser(p, forward.full_gaps + backward.bare_gaps, z_gap[..., None], (-1,))
    log_z = log_sum[..., -1, 0] + (forward.offset + backward.offset)[..., -1, 0]

    def of_states(cotangent: np.ndarray, shape: tuple[int, ...]) -> Gradient:
        return _summed(_parts(p, gap, 1, cotangent[..., None, None]), shape, shape)

    counts, weights = [], []
    for i in range(T - 1):
        from_gaps, to_gaps = forward.full_gaps[..., i, :], backward.full_gaps[..., i + 1, :]
        with np.errstate(invalid="ignore"):
            outer = forward.full[..., i, :, None] + backward.full[..., i + 1, None, :]
            terms = outer + E[i]
        pair, log_sum = _softmax(terms, axes=(-2, -1), broken=broken[..., None])
        pair_gap = from_gaps[..., :, None] + to_gaps[..., None, :] + E_gaps[i]
        pair_gap = _with_normaliser(pair, pair_gap, z_gap, (-2, -1))
        counts.append((pair, pair_gap, np.ones_like(pair)))
        unit = _unit(E[i], axes=(-2,))
        unit = np.where(np.isfinite(unit), unit, _unit(E[i], axes=(-2, -1)))
        weights.append(
            (
                _over_sum(outer, log_sum, broken[..., None]),
                pair_gap,
                np.broadcast_to(unit, pair.shape),
            )
        )

    start_p, start_gap = p[..., 0, :], gap[..., 0, :]
    if initial_in_logs:
        start_parts = _parts(start_p, start_gap, 1, g[..., None])
    else:
        with np.errstate(invalid="ignore"):
            outer = backward.full[..., 0, :]
            _, log_sum = _softmax(outer + initial, axes=(-1,))
        derivative = _over_sum(outer, log_sum, broken)
        start_parts = _parts(derivative, start_gap, _unit(initial, axes=(-1,)), g[..., None])

    def of_edges(steps: list, cotangent: np.ndarray) -> Gradient | None:
        if log_transitions is None:
            return None
        parts = [_parts(*step, cotangent[..., None, None]) for step in steps]
        return _over_time(parts, (*batch, 0, K, K), edges.shape)

    return Posterior(
        log_z,
        backward.offset + backward.bare,
        backward.bare_gaps,
        of_states(one, (*batch, T, K)),
        of_edges(counts, one),
        of_states(g, x.shape),
        of_edges(counts if edges_in_logs else weights, g),
        None if log_initial is None else _summed(start_parts, initial.shape, initial.shape),
    )


class _Messages(NamedTuple):
    """Messages into each state, without its potential and with it, relative to `offset`."""

    bare: np.ndarray
    full: np.ndarray
    bare_gaps: np.ndarray
    full_gaps: np.ndarray
    offset: np.ndarray


def _messages(
    x: np.ndarray,
    edges: list[np.ndarray],
    edge_gaps: list[np.ndarray],
    start: np.ndarray,
    start_gaps: np.ndarray,
    batch: tuple[int, ...],
    log_form_beyond: float,
) -> _Messages:
    K = x.shape[-1]
    x_gaps = _below_largest(x, (-1,))
    bare = np.broadcast_to(start, (*batch, K))
    gaps = np.broadcast_to(start_gaps, (*batch, K))
    offset = rest = np.zeros((*batch, 1), np.longdouble)
    in_log_form = np.zeros((*batch, 1), bool)
    steps: list[_Messages] = []
    for i in range(x.shape[-2]):
        if i:
            with np.errstate(invalid="ignore"):
                terms = steps[-1].full[..., :, None] + edges[i - 1]
            weights, log_sum = _softmax(terms, axes=(-2,))
            along = steps[-1].full_gaps[..., :, None] + edge_gaps[i - 1]
            bare, gaps = log_sum[..., 0, :], np.sum(_finite(weights) * along, axis=-2)
        with np.errstate(invalid="ignore"):
            full = bare + x[..., i, :]
        top = _finite_max(full, axis=-1)
        offset, rest = _add_exactly(offset, top, rest)
        bare, full = bare - top, full - top
        in_log_form = in_log_form | np.any(_finite(-full) > log_form_beyond, -1, keepdims=True)
        full_gaps = gaps + x_gaps[..., i, :] + np.where(in_log_form, _finite(-full), 0)
        steps.append(_Messages(bare, full, gaps, full_gaps, offset + rest))
    return _Messages(*(np.stack(parts, axis=-2) for parts in zip(*steps, strict=True)))


def _add_exactly(total: np.ndarray, x: np.ndarray, rest: np.ndarray):
    s = total + x
    v = s - total
    return s, rest + ((total - (s - v)) + (x - v))


def _with_normaliser(
    p: np.ndarray, gap: np.ndarray, z_gap: np.ndarray, axes: tuple[int, ...]
) -> np.ndarray:
    """Return the G of a probability: that of the weight, and of what it is divided by."""
    average = np.sum(_finite(p) * gap, axis=axes, keepdims=True)
    return gap + np.maximum(average, z_gap.reshape(*z_gap.shape, *(1,) * (gap.ndim - z_gap.ndim)))


def _unit(log_weights: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Return one over the largest weight, of which an error of a probability is a multiple."""
    with np.errstate(over="ignore"):
        return np.exp(-np.max(log_weights, axis=axes, keepdims=True, initial=-np.inf))


def _over_sum(terms: np.ndarray, log_sum: np.ndarray, broken: np.ndarray) -> np.ndarray:
    """Return exp(terms - log_sum), which may exceed 1, by the rules of _softmax.

    Larger than exp(700) is not told apart: no dtype can sum such numbers.
    """
    valid = np.isfinite(log_sum)
    with np.errstate(invalid="ignore", over="ignore"):
        p = np.where(valid, np.exp(np.minimum(terms - np.where(valid, log_sum, 0), 700)), 0)
    return np.where(broken, np.nan, p)


def _over_time(
    parts: list[dict[str, np.ndarray]], empty: tuple[int, ...], shape: tuple[int, ...]
) -> Gradient:
    names = ("exact", "mass", "gap", "scale")
    stacked = {
        name: np.stack([step[name] for step in parts], axis=-3)
        if parts
        else np.zeros(empty, np.longdouble)
        for name in names
    }
    if shape[-3] == 1:
        stacked = {name: np.sum(x, axis=-3, keepdims=True) for name, x in stacked.items()}
    return _summed(stacked, shape, shape, len(parts) if shape[-3] == 1 else 1)


# --------------------------------------------------------------------------------------- shared


def _as_matrices(a: np.ndarray, b: np.ndarray, g: np.ndarray):
    """Return the operands and the cotangent as matrices, the cotangent with all batch axes."""
    left = wide(a)[None, :] if np.ndim(a) == 1 else wide(a)
    right = wide(b)[:, None] if np.ndim(b) == 1 else wide(b)
    batch = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    return left, right, wide(g).reshape(*batch, left.shape[-2], right.shape[-1])


def _softmax(
    terms: np.ndarray, axes: tuple[int, ...], broken: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return exp(terms) over their sum, and the log of the sum.

    0 where the sum is infinite, or NaN because of infinities; NaN where it is `broken`.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        top = np.max(terms, axis=axes, keepdims=True, initial=-np.inf)
        valid = np.isfinite(top)
        # A NaN term among others makes the largest NaN.
        exponentials = np.where(valid, np.exp(terms - np.where(valid, top, 0)), 0)
        total = np.sum(exponentials, axis=axes, keepdims=True)
        log_sum = np.where(valid, np.log(total), 0) + top
        p = np.where(valid, exponentials / np.where(valid, total, 1), 0)
    return (p if broken is None else np.where(broken, np.nan, p)), log_sum


def _parts(
    p: np.ndarray, gap: np.ndarray, unit: np.ndarray | float, g: np.ndarray
) -> dict[str, np.ndarray]:
    p = np.broadcast_to(wide(p), np.broadcast_shapes(p.shape, g.shape))
    size = np.abs(g)
    scale = np.where(np.isfinite(unit), unit, 0) * size
    return {
        "exact": g * p,
        "mass": size * p,
        "gap": size * p * gap,
        "scale": np.broadcast_to(scale, p.shape),
    }


def _summed(
    parts: dict[str, np.ndarray],
    shape: tuple[int, ...],
    kept: tuple[int, ...],
    terms: int = 1,
) -> Gradient:
    """Sum over the axes that were broadcast from `kept`, and give what is left `shape`."""
    sums = {name: _sum_to(x, kept).reshape(shape) for name, x in parts.items()}
    broadcast = parts["exact"].size // max(sums["exact"].size, 1)
    return Gradient(**sums, terms=max(terms * broadcast, 1))


def _sum_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    added = x.ndim - len(shape)
    ones = (i + added for i, n in enumerate(shape) if n == 1)
    return np.sum(x, axis=(*range(added), *ones), keepdims=True).reshape(shape)


def _identity(matrix: np.ndarray, axis: int) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.eye(matrix.shape[axis], dtype=np.longdouble))


def _finite(x: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(x), x, 0)


def _finite_max(x: np.ndarray, axis: int) -> np.ndarray:
    finite = np.where(np.isfinite(x), x, -np.inf)
    return _finite(np.max(finite, axis=axis, keepdims=True, initial=-np.inf))


def _below_largest(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    finite = np.isfinite(x)
    top = np.max(np.where(finite, x, -np.inf), axis=axes, keepdims=True, initial=-np.inf)
    with np.errstate(invalid="ignore"):
        return np.where(finite, top - x, 0)


# --------------------------------------------------------------------------------------- mpmath

# Arrays of mpmath numbers, and functions of a list of them.
Exact = np.ndarray
ExactFunction = Callable[[list[Exact]], list[Exact]]


def to_mpmath(x: np.ndarray) -> Exact:
    return np.vectorize(lambda v: mpmath.mpf(float(v)), otypes=[object])(np.asarray(x))


def from_mpmath(x: Exact) -> np.ndarray:
    """Round to long double, by way of the decimal digits that it has and a few more."""
    return np.vectorize(lambda v: np.longdouble(mpmath.nstr(v, 25)), otypes=[np.longdouble])(x)


def exp_mp(x: Exact) -> Exact:
    return np.vectorize(mpmath.exp, otypes=[object])(x)


def logmatmulexp_mp(g: np.ndarray) -> ExactFunction:
    """Return the gradient of sum(g * logmatmulexp(a, b)) as a function of two matrices [a, b].

    Every sum must have a term.
    """
    cotangent = to_mpmath(g)[:, None, :]

    def gradient(point: list[Exact]) -> list[Exact]:
        a, b = point
        terms = exp_mp(a[:, :, None] + b[None])
        p = cotangent * terms / np.sum(terms, axis=1, keepdims=True)
        return [np.sum(p, axis=2), np.sum(p, axis=0)]

    return gradient


def all_paths(edges_in_logs: bool, initial_in_logs: bool, g: float = 1.0) -> ExactFunction:
    """Return the gradient of g * log Z as a function of [x, transitions, initial].

    These are [T, K], [T-1, K, K] or [1, K, K], and [K]; weights or their logs, as is said. The
    function visits all K**T paths. A path adds to a weight's derivative the product of all its
    other weights, so weights may be 0.
    """

    def gradient(point: list[Exact]) -> list[Exact]:
        x, transitions, initial = point
        T, K = x.shape
        emissions = exp_mp(x)
        edges = exp_mp(transitions) if edges_in_logs else transitions
        start = exp_mp(initial) if initial_in_logs else initial
        total, sums = mpmath.mpf(0), [w * mpmath.mpf(0) for w in (emissions, edges, start)]
        for path in itertools.product(range(K), repeat=T):
            # (which array, index in it) of every weight along the path
            places = [(0, (t, k)) for t, k in enumerate(path)] + [(2, (path[0],))]
            for i, (k, j) in enumerate(itertools.pairwise(path)):
                places.append((1, (min(i, len(edges) - 1), k, j)))
            along = [(emissions, edges, start)[array][index] for array, index in places]
            total += mpmath.fprod(along)
            for at, (array, index) in enumerate(places):
                sums[array][index] += mpmath.fprod(along[:at] + along[at + 1 :])
        sums[0] = sums[0] * emissions
        sums[1] = sums[1] * edges if edges_in_logs else sums[1]
        sums[2] = sums[2] * start if initial_in_logs else sums[2]
        return [mpmath.mpf(g) * s / total for s in sums]

    return gradient


def evaluate_mp(gradient: ExactFunction, point: Sequence[np.ndarray]) -> list[np.ndarray]:
    with mpmath.workdps(60):
        return [from_mpmath(part) for part in gradient([to_mpmath(x) for x in point])]


def hessian_product(
    gradient: ExactFunction, point: Sequence[np.ndarray], direction: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Return the Hessian times `direction` at `point`: a difference quotient in 60 digits.

    A step of 1e-18 leaves an error of about 1e-36 of third derivatives, far below long double.
    """
    with mpmath.workdps(60):
        step = mpmath.mpf("1e-18")
        at = [to_mpmath(x) for x in point]
        along = [step * to_mpmath(v) for v in direction]
        ahead = gradient([x + v for x, v in zip(at, along, strict=True)])
        behind = gradient([x - v for x, v in zip(at, along, strict=True)])
        quotients = [(p - q) / (2 * step) for p, q in zip(ahead, behind, strict=True)]
        return [from_mpmath(q) for q in quotients]
