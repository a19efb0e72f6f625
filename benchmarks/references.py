"""References: long double, or float64 for long chains in float32.

Long double has 64 bits of mantissa and a range of 1e±4932 on x86. On platforms where it is only
float64, the errors of float64 contestants mean little, and the record notes it. The error of a
value is relative beyond 1, that of a gradient relative to the largest entry of the exact gradient.
Paths are compared by their weights, recomputed in long double, so any of several best paths is
right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.registry import Check, Inputs, reference

_SAMPLES = 2000
_ROWS = 8

Floats = NDArray[Any]
Found = tuple[float | None, float]


def entries(index: Any, exact: Floats, *, is_gradient: bool = False) -> Check:
    """Compare some entries: return the largest error, and the share that is no number.

    The second value is the share of entries that are wrongly infinite or NaN, or wrongly finite.
    """

    def compare(value: Any) -> Found:
        result = np.asarray(value)[index]
        result = result.astype(np.result_type(result.dtype, exact.dtype))
        same = (result == exact) | (np.isnan(result) & np.isnan(exact))
        both = np.isfinite(result) & np.isfinite(exact)
        distance, size = np.abs(result[both] - exact[both]), np.abs(exact[both])
        unit = (size.max(initial=0) or 1) if is_gradient else np.maximum(1, size)
        return float((distance / unit).max(initial=0)), float(np.mean(~(same | both)))

    return compare


def several(*checks: Check) -> Check:
    """Compare the parts of a tuple: the largest error and the largest share of all."""

    def compare(values: Any) -> Found:
        result = [check(value) for check, value in zip(checks, values, strict=True)]
        return max(error or 0.0 for error, _ in result), max(wrong for _, wrong in result)

    return compare


def gradients(*exact: Floats) -> list[Check]:
    return [entries((), part, is_gradient=True) for part in exact]


# --- products -------------------------------------------------------------------------------------


@reference("log_product")
def log_product(inputs: Inputs) -> Check:
    index, (rows, cols) = _drawn(inputs["a"], inputs["b"])
    return entries(index, _logsumexp(rows + cols))


@reference("maxplus")
def maxplus(inputs: Inputs) -> Check:
    index, (rows, cols) = _drawn(inputs["a"], inputs["b"])
    # As the contestants add: in the precision of the operands.
    sums = rows.astype(inputs["a"].dtype) + cols.astype(inputs["b"].dtype)
    return entries(index, sums.max(axis=-1).astype(np.longdouble))


@reference("product")
def product(inputs: Inputs) -> Check:
    index, (rows, cols) = _drawn(inputs["a"], inputs["b"])
    return entries(index, (rows * cols).sum(axis=-1))


@reference("log_product_gradients")
def log_product_gradients(inputs: Inputs) -> Check:
    """Values drawn at random; the first rows of the left and columns of the right gradient."""
    a, b, g = (inputs[name].astype(np.longdouble) for name in ("a", "b", "g"))
    da, db = _gradient_rows(a, b, g), _gradient_rows(b.T, a.T, g.T).T
    rows = len(da)
    return several(
        log_product(inputs),
        entries(np.s_[:rows], da, is_gradient=True),
        entries(np.s_[:, :rows], db, is_gradient=True),
    )


def _gradient_rows(a: Floats, b: Floats, g: Floats) -> Floats:
    """Return the first rows of the left gradient: softmax weights times the cotangent."""
    rows = []
    for a_row, g_row in zip(a[:4], g[:4], strict=True):
        terms = a_row[:, None] + b
        marginals = np.exp(terms - terms.max(axis=0))
        rows.append((marginals / marginals.sum(axis=0)) @ g_row)
    return np.stack(rows)


@reference("product_gradients")
def product_gradients(inputs: Inputs) -> Check:
    a, b, g = (inputs[name].astype(np.float64) for name in ("a", "b", "g"))
    operands, out = inputs["subscripts"].split("->")
    left, right = operands.split(",")
    da = np.einsum(f"{out},{right}->{left}", g, b, optimize=True)
    # A letter that neither operand has belongs to an axis of length 1.
    known = "".join(letter for letter in right if letter in left + out)
    db = np.einsum(f"{left},{out}->{known}", a, g, optimize=True).reshape(b.shape)
    return several(product(inputs), *gradients(da, db))


@reference("einsum")
def einsum(inputs: Inputs) -> Check:
    """Normal entries are far from where long double under- or overflows."""
    equation, operands = inputs["equation"], inputs["operands"]
    if len(operands) == 2:
        return log_product(dict(zip("ab", operands, strict=True)))
    weights = (np.exp(x.astype(np.longdouble)) for x in operands)
    return entries((), np.log(np.einsum(equation, *weights, optimize=True)))


@reference("matrix_chain")
def matrix_chain(inputs: Inputs) -> Check:
    """Rows of the product of all matrices, each carried through as a vector."""
    matrices = inputs["matrices"]
    state = np.eye(matrices.shape[-1], dtype=np.longdouble)[:_ROWS]
    log_scale = np.zeros((len(state), 1), dtype=np.longdouble)
    for matrix in matrices:
        shift = np.longdouble(matrix.max())
        state = state @ np.exp(matrix - shift)
        total = state.sum(axis=-1, keepdims=True)
        state /= total
        log_scale += np.log(total) + shift
    return entries(np.s_[:_ROWS], np.log(state) + log_scale)


def _drawn(a: Floats, b: Floats) -> tuple[tuple[Any, ...], tuple[Floats, Floats]]:
    """Draw entries of a product; return their index and the rows and columns that make them."""
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    shape = (*batch, a.shape[-2], b.shape[-1])
    index = np.unravel_index(
        np.random.default_rng(0).integers(np.prod(shape), size=_SAMPLES), shape
    )
    *which, row, col = index
    a_all = np.broadcast_to(a, (*batch, *a.shape[-2:]))
    b_all = np.swapaxes(np.broadcast_to(b, (*batch, *b.shape[-2:])), -1, -2)
    rows, cols = a_all[(*which, row)], b_all[(*which, col)]
    return index, (rows.astype(np.longdouble), cols.astype(np.longdouble))


def _logsumexp(terms: Floats) -> Floats:
    top = terms.max(axis=-1)
    shift = np.where(np.isfinite(top), top, 0)
    result: Floats = np.log(np.exp(terms - shift[..., None]).sum(axis=-1)) + shift
    return result


# --- chains ---------------------------------------------------------------------------------------


def forward_backward(
    x: Floats, P: Floats, p0: Floats, end: Floats | None = None
) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Return log Z [n], marginals [n, T, K], counts, and the first and last marginals' sums.

    In the precision of the arrays; P is [K, K] or [T - 1, K, K], as the counts are.
    """
    steps = x.shape[1]
    matrices = P if P.ndim == 3 else np.broadcast_to(P, (steps - 1, *P.shape))
    top = x.max(axis=-1, keepdims=True)
    weights = np.exp(x - top)
    alpha, dx = np.empty_like(x), np.empty_like(x)
    log_z = top.sum(axis=(1, 2))
    state = p0 * weights[:, 0]
    for i in range(steps):
        if i > 0:
            state = (alpha[:, i - 1] @ matrices[i - 1]) * weights[:, i]
        total = state.sum(axis=-1, keepdims=True)
        alpha[:, i] = state / total
        log_z += np.log(total[:, 0])
    beta = np.ones_like(x[:, 0]) if end is None else np.broadcast_to(end, x[:, 0].shape)
    log_z += np.log((alpha[:, -1] * beta).sum(axis=-1))
    counts = np.zeros((steps - 1, *P.shape[-2:]), dtype=x.dtype)
    for i in reversed(range(steps)):
        joint = alpha[:, i] * beta
        dx[:, i] = joint / joint.sum(axis=-1, keepdims=True)
        if i > 0:
            message = weights[:, i] * beta
            beta = message @ matrices[i - 1].T
            total = (alpha[:, i - 1] * beta).sum(axis=-1, keepdims=True)
            counts[i - 1] = alpha[:, i - 1].T @ (message / total) * matrices[i - 1]
            beta /= beta.sum(axis=-1, keepdims=True)
    counts = counts if P.ndim == 3 else counts.sum(axis=0)
    return log_z, dx, counts, dx[:, 0].sum(axis=0), dx[:, -1].sum(axis=0)


def _of_rows(inputs: Inputs) -> tuple[Floats, ...]:
    """Return log Z, marginals, counts and first marginals of all rows, in their shapes."""
    wide = np.float64 if inputs["x"].dtype == np.float32 else np.longdouble
    x, P, p0 = (inputs[name].astype(wide) for name in ("x", "P", "p0"))
    rows = x.reshape(-1, *x.shape[-2:])
    lengths = inputs.get("lengths", np.full(len(rows), x.shape[-2]))
    log_z, marginals = np.empty(len(rows), dtype=wide), np.zeros_like(rows)
    counts, first = np.zeros_like(P), np.zeros_like(p0)
    for length in np.unique(lengths):  # sequences of the same length together
        these = np.flatnonzero(lengths == length)
        matrices = P if P.ndim == 2 else P[: length - 1]
        result = forward_backward(rows[these, :length], matrices, p0)
        log_z[these], marginals[these, :length] = result[:2]
        counts[() if P.ndim == 2 else np.s_[: length - 1]] += result[2]
        first += result[3]
    return log_z.reshape(x.shape[:-2]), marginals.reshape(x.shape), counts, first


@reference("log_z")
def log_z(inputs: Inputs) -> Check:
    if inputs["x"].size > 1e6 and "lengths" not in inputs and inputs["x"].ndim == 3:
        inputs = {**inputs, "x": inputs["x"][:_ROWS]}
        return entries(np.s_[:_ROWS], _of_rows(inputs)[0])
    return entries((), _of_rows(inputs)[0])


@reference("marginals")
def marginals(inputs: Inputs) -> Check:
    return entries((), _of_rows(inputs)[1])


@reference("posterior")
def posterior(inputs: Inputs) -> Check:
    value, states, counts, _ = _of_rows(inputs)
    return several(entries((), value), *gradients(states, counts))


@reference("gradients")
def chain_gradients(inputs: Inputs) -> Check:
    value, states, counts, first = _of_rows(inputs)
    by_P, by_p0 = counts / inputs["P"], first / inputs["p0"]
    return several(entries((), value), *gradients(states, by_P, by_p0))


def _forum(inputs: Inputs) -> Inputs:
    """One set of parameters, t = 1, as a chain."""
    return {"x": inputs["x"][:, 0], "P": inputs["bulk"][0, 0], "p0": inputs["p0"][0, 0]}


@reference("forum")
def forum(inputs: Inputs) -> Check:
    exact = _of_rows({**_forum(inputs), "x": inputs["x"][:_ROWS, 0]})[0]
    return entries(np.s_[:_ROWS, 0], exact)


@reference("forum_gradients", "forum_gradients_bounded")
def forum_gradients(inputs: Inputs) -> Check:
    chain = _forum(inputs)
    value, states, counts, first = _of_rows(chain)
    by_bulk, by_p0 = (counts / chain["P"])[None, None], (first / chain["p0"])[None, None]
    exact = gradients(states[:, None], by_bulk, by_p0)
    return several(entries((), value[:, None]), *exact)


@reference("entropy")
def entropy(inputs: Inputs) -> Check:
    """Log Z less the expected log weight, of the first rows."""
    inputs = {**inputs, "x": inputs["x"][:_ROWS] if inputs["x"].ndim == 3 else inputs["x"]}
    x, P, p0 = (inputs[name].astype(np.longdouble) for name in ("x", "P", "p0"))
    exact = []
    for row in x.reshape(-1, *x.shape[-2:]):
        value, states, counts, first, _ = forward_backward(row[None], P, p0)
        expected = (states * row).sum() + (counts * np.log(P)).sum() + (first * np.log(p0)).sum()
        exact.append(value[0] - expected)
    return entries(np.s_[:_ROWS] if x.ndim == 3 else (), np.reshape(exact, x.shape[:-2]))


# --- paths ----------------------------------------------------------------------------------------


def _log_weights(inputs: Inputs) -> Callable[[Any], Floats]:
    """Return a function that gives the log weights of the first rows' paths; NaN if it is none."""
    x, log_P, log_p0 = _first_rows(inputs)
    rows, steps, size = x.shape
    lengths = inputs.get("lengths", np.full(rows, steps))[:rows]
    matrices = np.broadcast_to(log_P, (steps - 1, size, size))

    def log_weights(states: Any) -> Floats:
        result = np.asarray(states).reshape(-1, steps)[:rows]
        real = np.arange(steps) < lengths[:, None]
        within = (result >= 0) & (result < size)
        is_path = np.all(np.where(real, within, result == -1), axis=-1)
        path = np.where(real & within, result, 0)
        along = np.take_along_axis(x, path[..., None], axis=-1)[..., 0]
        edges = matrices[np.arange(steps - 1), path[:, :-1], path[:, 1:]]
        total = log_p0[path[:, 0]] + np.where(real, along, 0).sum(axis=-1)
        total += np.where(real[:, 1:], edges, 0).sum(axis=-1)
        return np.where(is_path, total, np.nan)

    return log_weights


def _first_rows(inputs: Inputs) -> tuple[Floats, Floats, Floats]:
    x, P, p0 = (inputs[name].astype(np.longdouble) for name in ("x", "P", "p0"))
    with np.errstate(divide="ignore"):
        return x.reshape(-1, *x.shape[-2:])[:_ROWS], np.log(P), np.log(p0)


@reference("viterbi")
def viterbi(inputs: Inputs) -> Check:
    """How far paths lie below the best ones."""
    x, log_P, log_p0 = _first_rows(inputs)
    lengths = inputs.get("lengths", np.full(len(x), x.shape[1]))[: len(x)]
    score = log_p0 + x[:, 0]
    for i in range(1, x.shape[1]):
        edges = log_P if log_P.ndim == 2 else log_P[i - 1]
        following = (score[:, :, None] + edges).max(axis=1) + x[:, i]
        score = np.where((lengths > i)[:, None], following, score)
    check, log_weights = entries((), score.max(axis=-1)), _log_weights(inputs)
    return lambda states: check(log_weights(states))


@reference("best_paths")
def best_paths(inputs: Inputs) -> Check:
    """How far the first paths lie below the best ones."""
    (x,), log_P, log_p0 = _first_rows(inputs)
    score = np.where(np.arange(10)[:, None] == 0, log_p0 + x[0], -np.inf)
    for row in x[1:]:
        terms = (score[:, :, None] + log_P).reshape(-1, len(row))
        score = np.sort(terms, axis=0)[-10:] + row
    check = entries((), np.sort(score, axis=None)[: -1 - _ROWS : -1])
    log_weights = _log_weights({**inputs, "x": np.stack([inputs["x"]] * _ROWS)})
    return lambda states: check(log_weights(states))


@reference("sample")
def sample(inputs: Inputs) -> Check:
    """Nothing but that paths have a positive weight."""
    log_weights = _log_weights(inputs)
    return lambda states: (None, float(np.mean(~np.isfinite(log_weights(states)))))


# --- conditional random fields --------------------------------------------------------------------


def _as_chain(inputs: Inputs, dtype: Any) -> dict[str, Floats]:
    log_parts = {"P": "log_P", "p0": "start", "end": "end"}
    chain = {name: np.exp(inputs[part].astype(dtype)) for name, part in log_parts.items()}
    return {"x": inputs["emissions"].astype(dtype), **chain}


@reference("crf_loss")
def crf_loss(inputs: Inputs) -> Check:
    """Expected less observed counts are the gradients."""
    chain, tags = _as_chain(inputs, np.float64), inputs["tags"]
    x = chain["x"]
    value, states, counts, first, last = forward_backward(**chain)
    observed = np.eye(x.shape[-1])[tags]
    pairs = np.einsum("nti,ntj->ij", observed[:, :-1], observed[:, 1:])
    at_ends = observed[:, 0].sum(axis=0), observed[:, -1].sum(axis=0)
    parts = (("log_P", pairs), ("start", at_ends[0]), ("end", at_ends[1]))
    gold = (observed * x).sum() + sum((n * inputs[name]).sum() for name, n in parts)
    exact = gradients(states - observed, counts - pairs, first - at_ends[0], last - at_ends[1])
    return several(entries((), value.sum() - gold), *exact)


@reference("crf_decode")
def crf_decode(inputs: Inputs) -> Check:
    chain = _as_chain(inputs, np.longdouble)
    x = chain["x"].copy()
    x[:, -1] += np.log(chain["end"])
    return viterbi({"x": x, "P": chain["P"], "p0": chain["p0"]})
