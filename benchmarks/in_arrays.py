"""The formulations of NumPy users, which CuPy computes as well.

Chains have log potentials x [..., T, K], transitions P [K, K] or [T - 1, K, K], initial p0 [K].
Past the length of a row marginals are 0 and states -1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.registry import contestant

# Terms in memory at a time where a formulation works in blocks.
BLOCK = 1 << 19
Array = Any

# --- products -------------------------------------------------------------------------------------


@contestant("log_product", "matrix multiply of the same shape", is_yardstick=True)
def matmul(a: Array, b: Array) -> Array:
    return a @ b


@contestant("log_product_gradients", "3 matrix multiplies of the same shapes", is_yardstick=True)
def three_products(a: Array, b: Array, g: Array) -> Array:
    a @ b, g @ b.swapaxes(-1, -2)
    return a.swapaxes(-1, -2) @ g


@contestant("log_product", "exp, matmul, log")
def exp_matmul_log(xp: Any, a: Array, b: Array) -> Array:
    """Subtract row and column maxima, exponentiate, multiply: fast, wrong on wide ranges."""
    a_max = a.max(axis=-1, keepdims=True)
    b_max = b.max(axis=-2, keepdims=True)
    return xp.log(xp.exp(a - a_max) @ xp.exp(b - b_max)) + a_max + b_max


@contestant("log_product", "logsumexp in blocks")
def logsumexp(xp: Any, a: Array, b: Array) -> Array:
    """Every entry with its own maximum."""

    def reduce(terms: Array) -> Array:
        top = terms.max(axis=-1)
        shift = xp.where(xp.isfinite(top), top, xp.zeros_like(top))
        terms -= shift[..., None]
        xp.exp(terms, out=terms)
        return xp.log(terms.sum(axis=-1)) + shift

    return _in_blocks(xp, a, b, reduce)


@contestant("log_product", "logsumexp of SciPy in blocks", requires=("scipy",), devices=("cpu",))
def scipy_logsumexp(xp: Any, a: Array, b: Array) -> Array:
    from scipy.special import logsumexp

    return _in_blocks(xp, a, b, lambda terms: logsumexp(terms, axis=-1))


@contestant("maxplus", "maximum in blocks")
def maximum(xp: Any, a: Array, b: Array) -> Array:
    """Maxima and their places; the maxima are returned."""

    def reduce(terms: Array) -> Array:
        best = terms.argmax(axis=-1)[..., None]
        return xp.take_along_axis(terms, best, axis=-1)[..., 0]

    return _in_blocks(xp, a, b, reduce)


def _in_blocks(xp: Any, a: Array, b: Array, reduce: Callable[[Array], Array]) -> Array:
    shape = (*a.shape[:-1], b.shape[-1])
    a, b = a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:])
    columns = xp.ascontiguousarray(b.swapaxes(-1, -2))
    out = xp.empty((*a.shape[:2], b.shape[-1]), dtype=a.dtype)
    for batch in range(len(a)):
        for rows, cols in _blocks(a.shape[1], b.shape[-1], a.shape[2]):
            terms = a[batch, rows, None, :] + columns[batch, None, cols, :]
            out[batch, rows, cols] = reduce(terms)
    return out.reshape(shape)


def _blocks(rows: int, cols: int, inner: int) -> Iterator[tuple[slice, slice]]:
    entries = max(1, BLOCK // inner)
    wide = min(cols, entries)
    high = max(1, entries // wide)
    for i in range(0, rows, high):
        for j in range(0, cols, wide):
            yield slice(i, i + high), slice(j, j + wide)


@contestant("product", "matmul")
def broadcast_matmul(a: Array, b: Array, subscripts: str) -> Array:
    return a @ b


@contestant("product", "einsum")
def einsum(xp: Any, a: Array, b: Array, subscripts: str) -> Array:
    return xp.einsum(subscripts, a, b, optimize=True)


@contestant("einsum", "exp, einsum, log", devices=("cpu",))
def exp_einsum_log(xp: Any, equation: str, operands: tuple[Array, ...]) -> Array:
    return xp.log(xp.einsum(equation, *map(xp.exp, operands), optimize=True))


# --- chains of matrices and the forum's -----------------------------------------------------------


@contestant("matrix_chain", "one after the other")
def fold_matrices(xp: Any, matrices: Array) -> Array:
    product = matrices[0]
    for matrix in matrices[1:]:
        product = exp_matmul_log(xp, product, matrix)
    return product


@contestant("matrix_chain", "in pairs")
def pair_matrices(xp: Any, matrices: Array) -> Array:
    """Multiply neighbours, all pairs at once, until one matrix is left."""
    while len(matrices) > 1:
        pairs = len(matrices) // 2
        products = exp_matmul_log(xp, matrices[0 : 2 * pairs : 2], matrices[1 : 2 * pairs : 2])
        matrices = xp.concatenate([products, matrices[2 * pairs :]])
    return matrices[0]


@contestant("forum", "v - 1 bare matrix multiplies", is_yardstick=True)
def bare_products(xp: Any, x: Array, bulk: Array, p0: Array) -> Array:
    state = xp.exp(x[:, 0, 0])
    for i in range(bulk.shape[-3]):
        out = state @ bulk[0, 0, i]
    return out


@contestant("forum_gradients", "v - 1 bare matrix multiplies", is_yardstick=True)
@contestant("forum_gradients_bounded", "v - 1 bare matrix multiplies", is_yardstick=True)
def bare_products_forward(xp: Any, x: Array, bulk: Array, p0: Array, g: Array) -> Array:
    return bare_products(xp, x, bulk, p0)


@contestant("forum", "vector recursion")
def recursion_of_sets(xp: Any, x: Array, bulk: Array, p0: Array) -> Array:
    """The recursion on the forum's shapes, set of parameters by set."""
    sets = [log_z(xp, x[:, t], bulk[0, t], p0[0, t]) for t in range(x.shape[1])]
    return xp.stack(sets, axis=1)


# --- chains ---------------------------------------------------------------------------------------


def _at(P: Array, step: int) -> Array:
    """Return the matrix that leads to a step."""
    return P if P.ndim == 2 else P[step - 1]


@contestant("log_z", "vector recursion")
def log_z(xp: Any, x: Array, P: Array, p0: Array, lengths: Array = None) -> Array:
    """A vector of logarithms per row, which stays as it is past the row's end."""
    log_alpha = xp.log(p0) + x[..., 0, :]
    for i in range(1, x.shape[-2]):
        top = log_alpha.max(axis=-1, keepdims=True)
        following = xp.log(xp.exp(log_alpha - top) @ _at(P, i)) + top + x[..., i, :]
        if lengths is not None:
            following = xp.where((lengths > i)[:, None], following, log_alpha)
        log_alpha = following
    top = log_alpha.max(axis=-1)
    return xp.log(xp.exp(log_alpha - top[..., None]).sum(axis=-1)) + top


@contestant("marginals", "recursion")
def marginals(xp: Any, x: Array, P: Array, p0: Array, lengths: Array = None) -> Array:
    """Forward and backward on weights, which are normalised at every step."""
    weights = xp.exp(x - x.max(axis=-1, keepdims=True))
    posterior = _filter(xp, weights, P, p0)
    beta = xp.ones_like(posterior[..., -1, :])
    for i in range(x.shape[-2] - 1, 0, -1):
        message = (weights[..., i, :] * beta) @ _at(P, i).T
        message /= message.sum(axis=-1, keepdims=True)
        beta = message if lengths is None else xp.where((lengths > i)[:, None], message, beta)
        joint = posterior[..., i - 1, :] * beta
        posterior[..., i - 1, :] = joint / joint.sum(axis=-1, keepdims=True)
    if lengths is not None:
        posterior[xp.arange(x.shape[-2]) >= lengths[:, None]] = 0
    return posterior


def _filter(xp: Any, weights: Array, P: Array, p0: Array) -> Array:
    """Return the distribution of each state given the potentials up to its step."""
    filtered = xp.empty_like(weights)
    state = p0 * weights[..., 0, :]
    filtered[..., 0, :] = state / state.sum(axis=-1, keepdims=True)
    for i in range(1, weights.shape[-2]):
        state = (filtered[..., i - 1, :] @ _at(P, i)) * weights[..., i, :]
        filtered[..., i, :] = state / state.sum(axis=-1, keepdims=True)
    return filtered


@contestant("viterbi", "recursion")
def viterbi(xp: Any, x: Array, P: Array, p0: Array, lengths: Array = None) -> Array:
    """Sums [block, to, from], their maxima and places, and back along the places."""
    *batch, steps, size = x.shape
    rows = x.reshape(-1, steps, size)
    log_P = xp.log(xp.ascontiguousarray(P.swapaxes(-1, -2)))
    height = max(1, BLOCK // size**2)
    origins = xp.empty((steps, len(rows), size), dtype=xp.int32)
    score = xp.log(p0) + rows[:, 0]
    for i in range(1, steps):
        following = xp.empty_like(score)
        for start in range(0, len(rows), height):
            block = slice(start, start + height)
            terms = score[block, None, :] + _at(log_P, i)
            best = terms.argmax(axis=-1)
            origins[i, block] = best
            following[block] = xp.take_along_axis(terms, best[..., None], axis=-1)[..., 0]
        following += rows[:, i]
        if lengths is not None:
            real = (lengths > i)[:, None]
            following = xp.where(real, following, score)
            origins[i] = xp.where(real, origins[i], xp.arange(size))
        score = following
    states = xp.empty((len(rows), steps), dtype=xp.int64)
    states[:, -1] = score.argmax(axis=-1)
    every = xp.arange(len(rows))
    for i in range(steps - 1, 0, -1):
        states[:, i - 1] = origins[i, every, states[:, i]]
    if lengths is not None:
        states[xp.arange(steps) >= lengths[:, None]] = -1
    return states.reshape(*batch, steps)


@contestant("best_paths", "recursion")
def best_paths(xp: Any, x: Array, P: Array, p0: Array) -> Array:
    """Ten paths up to each state: a sort of [10 * from, to] at each step, and back."""
    (steps, size), log_P = x.shape, xp.log(P)
    origins, score = xp.empty((steps, 10, size), dtype=xp.int64), xp.full((10, size), -xp.inf)
    score[0] = xp.log(p0) + x[0]
    for i in range(1, steps):
        terms = (score[:, :, None] + log_P).reshape(-1, size)
        origins[i] = xp.argsort(-terms, axis=0)[:10]
        score = xp.take_along_axis(terms, origins[i], axis=0) + x[i]
    states, last = xp.empty((10, steps), dtype=xp.int64), xp.argsort(-score.ravel())[:10]
    for i in range(steps - 1, -1, -1):
        states[:, i] = last % size
        last = origins[i, last // size, states[:, i]]
    return states


@contestant("sample", "cumulative sums")
def sample(xp: Any, x: Array, P: Array, p0: Array, seed: int) -> Array:
    """Filter forward; draw backward, by cumulative sums."""
    rng = xp.random.default_rng(seed)

    def draw(weights: Array) -> Array:
        summed = weights.cumsum(axis=-1)
        threshold = rng.random((*weights.shape[:-1], 1)) * summed[..., -1:]
        return (summed <= threshold).sum(axis=-1)

    filtered = _filter(xp, xp.exp(x - x.max(axis=-1, keepdims=True)), P, p0)
    states = xp.empty(x.shape[:-1], dtype=xp.int64)
    states[..., -1] = draw(filtered[..., -1, :])
    for i in range(x.shape[-2] - 1, 0, -1):
        towards = _at(P, i).T[states[..., i]]
        states[..., i - 1] = draw(filtered[..., i - 1, :] * towards)
    return states


@contestant("entropy", "entropy recursion")
def entropy(xp: Any, x: Array, P: Array, p0: Array) -> Array:
    """The entropy of the paths up to each state, step by step (Hernando et al. 2005)."""
    weights = xp.exp(x - x.max(axis=-1, keepdims=True))
    tiny = xp.finfo(x.dtype).tiny
    edges = P * xp.log(xp.maximum(P, tiny))
    state = p0 * weights[..., 0, :]
    p = state / state.sum(axis=-1, keepdims=True)
    within = xp.zeros_like(p)
    for i in range(1, x.shape[-2]):
        surprise = within - xp.log(xp.maximum(p, tiny))
        total = p @ _at(P, i)
        within = xp.log(total) + ((p * surprise) @ _at(P, i) - p @ _at(edges, i)) / total
        state = total * weights[..., i, :]
        p = state / state.sum(axis=-1, keepdims=True)
    return (p * (within - xp.log(xp.maximum(p, tiny)))).sum(axis=-1)
