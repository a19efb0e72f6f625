"""The formulations of what is inferred about paths: the best one, marginals, samples, entropy.

All take log potentials x [..., T, K], transitions [T - 1, K, K] or [1, K, K], initial [K], and
then a seed or lengths where the case has them. Past a row's length marginals are 0, states -1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import arraylogchain as alc
from benchmarks.contestants import BLOCK, Array, row_by_row

# --- this library ---------------------------------------------------------------------------------


def chain(x: Any, transitions: Any, initial: Any, lengths: Any = None) -> alc.LogChain:
    return alc.LogChain(x, transitions=transitions, initial=initial, lengths=lengths)


def log_partition(*given: Any) -> Any:
    return chain(*given).log_partition()


def marginals(*given: Any) -> Any:
    return chain(*given).marginals()


def viterbi(*given: Any) -> Any:
    return chain(*given).viterbi().states


def entropy(*given: Any) -> Any:
    return chain(*given).entropy()


def sample(x: Any, transitions: Any, initial: Any, seed: Array) -> Any:
    return chain(x, transitions, initial).sample(1, np.random.default_rng(int(seed)))[0]


def sample_in_torch(x: Any, transitions: Any, initial: Any, seed: Any) -> Any:
    import torch

    return chain(x, transitions, initial).sample(1, torch.Generator().manual_seed(int(seed)))[0]


# --- recursions in NumPy --------------------------------------------------------------------------


def numpy_log_partition(x: Array, transitions: Array, initial: Array, lengths: Array) -> Array:
    """A vector of logarithms per row, which stays as it is past the row's end."""
    log_alpha = np.log(initial) + x[:, 0]
    for i in range(1, x.shape[1]):
        top = log_alpha.max(axis=-1, keepdims=True)
        alpha = np.exp(log_alpha - top) @ _at(transitions, i)
        following = np.log(alpha) + top + x[:, i]
        log_alpha = np.where((lengths > i)[:, None], following, log_alpha)
    top = log_alpha.max(axis=-1)
    return np.log(np.exp(log_alpha - top[:, None]).sum(axis=-1)) + top


def numpy_marginals(
    x: Array, transitions: Array, initial: Array, lengths: Array | None = None
) -> Array:
    """Forward and backward on weights, which are normalised at every step."""
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    posterior = _numpy_filter(weights, transitions, initial)
    beta = np.ones_like(posterior[..., -1, :])
    for i in range(x.shape[-2] - 1, 0, -1):
        message = (weights[..., i, :] * beta) @ _at(transitions, i).T
        message /= message.sum(axis=-1, keepdims=True)
        beta = message if lengths is None else np.where((lengths > i)[:, None], message, beta)
        joint = posterior[..., i - 1, :] * beta
        posterior[..., i - 1, :] = joint / joint.sum(axis=-1, keepdims=True)
    if lengths is not None:
        posterior[np.arange(x.shape[-2]) >= lengths[:, None]] = 0
    return posterior


def _numpy_filter(weights: Array, transitions: Array, initial: Array) -> Array:
    """Return the distribution of each state given the potentials up to its step."""
    filtered = np.empty_like(weights)
    state = initial * weights[..., 0, :]
    filtered[..., 0, :] = state / state.sum(axis=-1, keepdims=True)
    for i in range(1, weights.shape[-2]):
        state = (filtered[..., i - 1, :] @ _at(transitions, i)) * weights[..., i, :]
        filtered[..., i, :] = state / state.sum(axis=-1, keepdims=True)
    return filtered


def numpy_viterbi(
    x: Array, transitions: Array, initial: Array, lengths: Array | None = None
) -> Array:
    """Sums [block, to, from], their maxima and places, and back along the places."""
    *batch, steps, size = x.shape
    rows = x.reshape(-1, steps, size)
    log_p = np.log(np.ascontiguousarray(np.swapaxes(transitions, -1, -2)))
    height = max(1, BLOCK // size**2)
    sums = np.empty((height, size, size), dtype=x.dtype)
    origins = np.empty((steps, len(rows), size), dtype=np.int32)
    score = np.log(initial) + rows[:, 0]
    for i in range(1, steps):
        following = np.empty_like(score)
        for start in range(0, len(rows), height):
            block = slice(start, start + height)
            terms = sums[: len(score[block])]
            np.add(score[block, None, :], _at(log_p, i), out=terms)
            best = terms.argmax(axis=-1)
            origins[i, block] = best
            following[block] = np.take_along_axis(terms, best[..., None], axis=-1)[..., 0]
        following += rows[:, i]
        if lengths is not None:
            real = (lengths > i)[:, None]
            following = np.where(real, following, score)
            origins[i] = np.where(real, origins[i], np.arange(size))
        score = following
    states = np.empty((len(rows), steps), dtype=np.int64)
    states[:, -1] = score.argmax(axis=-1)
    every = np.arange(len(rows))
    for i in range(steps - 1, 0, -1):
        states[:, i - 1] = origins[i, every, states[:, i]]
    if lengths is not None:
        states[np.arange(steps) >= lengths[:, None]] = -1
    return states.reshape(*batch, steps)


def numpy_sample(x: Array, transitions: Array, initial: Array, seed: Array) -> Array:
    """Filter forward; draw backward, by cumulative sums."""
    rng = np.random.default_rng(int(seed))
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    filtered = _numpy_filter(weights, transitions, initial)
    states = np.empty(x.shape[:-1], dtype=np.int64)
    states[..., -1] = _draw(rng, filtered[..., -1, :])
    for i in range(x.shape[-2] - 1, 0, -1):
        towards = _at(transitions, i).T[states[..., i]]
        states[..., i - 1] = _draw(rng, filtered[..., i - 1, :] * towards)
    return states


def _draw(rng: np.random.Generator, weights: Array) -> Array:
    summed = weights.cumsum(axis=-1)
    threshold = rng.random((*weights.shape[:-1], 1)) * summed[..., -1:]
    return (summed <= threshold).sum(axis=-1)


def numpy_entropy(x: Array, transitions: Array, initial: Array) -> Array:
    """The entropy of the paths up to each state, step by step (Hernando et al. 2005)."""
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    tiny = np.finfo(x.dtype).tiny
    edges = transitions * np.log(np.maximum(transitions, tiny))
    state = initial * weights[..., 0, :]
    p = state / state.sum(axis=-1, keepdims=True)
    within = np.zeros_like(p)
    for i in range(1, x.shape[-2]):
        surprise = within - np.log(np.maximum(p, tiny))
        total = p @ _at(transitions, i)
        inner = (p * surprise) @ _at(transitions, i) - p @ _at(edges, i)
        within = np.log(total) + inner / total
        state = total * weights[..., i, :]
        p = state / state.sum(axis=-1, keepdims=True)
    return (p * (within - np.log(np.maximum(p, tiny)))).sum(axis=-1)


# --- recursions in torch --------------------------------------------------------------------------


def torch_log_partition(x: Any, transitions: Any, initial: Any, lengths: Any = None) -> Any:
    """A vector of logarithms per row, which stays as it is past the row's end."""
    import torch

    log_alpha = initial.log() + x[..., 0, :]
    for i in range(1, x.shape[-2]):
        top = log_alpha.detach().amax(-1, keepdim=True)
        alpha = (log_alpha - top).exp() @ _at(transitions, i)
        following = alpha.log() + top + x[..., i, :]
        if lengths is not None:
            following = torch.where((lengths > i)[:, None], following, log_alpha)
        log_alpha = following
    return torch.logsumexp(log_alpha, -1)


def torch_marginals(x: Any, transitions: Any, initial: Any, lengths: Any = None) -> Any:
    """Forward and backward on weights, which are normalised at every step."""
    import torch

    weights = (x - x.amax(-1, keepdim=True)).exp()
    posterior = torch.empty_like(x)
    state = initial * weights[..., 0, :]
    posterior[..., 0, :] = state / state.sum(-1, keepdim=True)
    for i in range(1, x.shape[-2]):
        state = (posterior[..., i - 1, :] @ _at(transitions, i)) * weights[..., i, :]
        posterior[..., i, :] = state / state.sum(-1, keepdim=True)
    beta = torch.ones_like(x[..., 0, :])
    for i in range(x.shape[-2] - 1, 0, -1):
        message = (weights[..., i, :] * beta) @ _at(transitions, i).T
        message = message / message.sum(-1, keepdim=True)
        beta = message if lengths is None else torch.where((lengths > i)[:, None], message, beta)
        joint = posterior[..., i - 1, :] * beta
        posterior[..., i - 1, :] = joint / joint.sum(-1, keepdim=True)
    if lengths is not None:
        posterior[torch.arange(x.shape[-2]) >= lengths[:, None]] = 0
    return posterior


def torch_viterbi(x: Any, transitions: Any, initial: Any, lengths: Any = None) -> Any:
    """Sums [block, from, to], their maxima and places, and back along the places."""
    import torch

    rows, steps, size = x.shape
    height = max(1, BLOCK // size**2)
    log_p = transitions.log()
    origins = torch.empty((steps, rows, size), dtype=torch.int64)
    score = initial.log() + x[:, 0]
    for i in range(1, steps):
        following = torch.empty_like(score)
        for start in range(0, rows, height):
            block = slice(start, start + height)
            best = (score[block, :, None] + _at(log_p, i)).max(dim=1)
            following[block], origins[i, block] = best.values, best.indices
        following += x[:, i]
        if lengths is not None:
            real = (lengths > i)[:, None]
            following = torch.where(real, following, score)
            origins[i] = torch.where(real, origins[i], torch.arange(size))
        score = following
    states = torch.empty((rows, steps), dtype=torch.int64)
    states[:, -1] = score.argmax(-1)
    for i in range(steps - 1, 0, -1):
        states[:, i - 1] = origins[i].gather(-1, states[:, i, None])[:, 0]
    if lengths is not None:
        states[torch.arange(steps) >= lengths[:, None]] = -1
    return states


def torch_entropy(x: Any, transitions: Any, initial: Any) -> Any:
    """Log Z less the expected log weight: its derivative by a power of all weights, at 1."""
    import torch

    log_p, log_initial = transitions.log(), initial.log()

    def log_z(power: Any) -> Any:
        log_alpha = power * (log_initial + x[:, 0])
        for i in range(1, x.shape[1]):
            top = log_alpha.amax(-1, keepdim=True)
            alpha = (log_alpha - top).exp() @ (power * _at(log_p, i)).exp()
            log_alpha = alpha.log() + top + power * x[:, i]
        return torch.logsumexp(log_alpha, -1)

    one = torch.ones((), dtype=x.dtype)
    value, expected = torch.func.jvp(log_z, (one,), (one,))
    return value - expected


def _at(matrices: Any, step: int) -> Any:
    """Return the matrix that leads to a step."""
    return matrices[min(step, len(matrices)) - 1]


# --- hmmlearn -------------------------------------------------------------------------------------


@row_by_row
def hmmlearn_viterbi(x: Array, transitions: Array, initial: Array) -> Array:
    from hmmlearn import _hmmc

    return np.asarray(_hmmc.viterbi(initial, transitions[0], x)[1])
