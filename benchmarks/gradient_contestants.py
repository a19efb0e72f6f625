"""The formulations of a value with all its gradients; each returns (value, gradient, gradient, …).

The last argument of each is the cotangent, an input like the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import arraylogchain as alc
from benchmarks.contestants import Array, bare_products, row_by_row
from benchmarks.gradient_references import forward_backward

# --- the two ways to a gradient -------------------------------------------------------------------


def by_pullback(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """Make a contestant of a function that returns a value and its pullback."""

    def call(*given: Any) -> tuple[Any, ...]:
        *inputs, cotangent = given
        value, pullback = function(*inputs)
        return (value, *(x for x in pullback(cotangent) if x is not None))

    return call


def by_autograd(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """Make a contestant of a function of tensors, with respect to all of them.

    As ``backward()``, which besides adds to what earlier calls have left.
    """

    def call(*given: Any) -> tuple[Any, ...]:
        import torch

        *inputs, cotangent = given
        leaves = [x.detach().requires_grad_() for x in inputs]
        value = function(*leaves)
        return (value.detach(), *torch.autograd.grad(value, leaves, cotangent))

    return call


# --- this library ---------------------------------------------------------------------------------


def chain(x: Any, transitions: Any, initial: Any) -> Any:
    return alc.vjp.log_partition(alc.LogChain(x, transitions=transitions, initial=initial))


def marginals(x: Any, transitions: Any, initial: Any) -> Any:
    return alc.LogChain(x, transitions=transitions, initial=initial).marginals()


# --- products -------------------------------------------------------------------------------------


def three_products(a: Array, b: Array, g: Array) -> tuple[Array, Array, Array]:
    """The matrix products of a value and two gradients, and nothing else."""
    return a @ b, g @ b.T, a.T @ g


def torch_exp_matmul_log(a: Any, b: Any) -> Any:
    """Subtract row and column maxima, exponentiate, multiply; the maxima cancel in gradients."""
    a_max = a.detach().amax(-1, keepdim=True)
    b_max = b.detach().amax(-2, keepdim=True)
    return ((a - a_max).exp() @ (b - b_max).exp()).log() + a_max + b_max


def torch_logsumexp(a: Any, b: Any) -> Any:
    """The definition, with all terms in memory."""
    import torch

    return torch.logsumexp(a[:, :, None] + b[None, :, :], dim=1)


# --- chains ---------------------------------------------------------------------------------------


def bare_forward_products(x: Array, bulk: Array, p0: Array, g: Array) -> Array:
    """The matrix products of the value alone."""
    return bare_products(x, bulk)


def numpy_chain(x: Array, transitions: Array, initial: Array, g: Array) -> tuple[Array, ...]:
    """Forward and backward on weights, which are normalised at every step; `g` is all ones."""
    rows = x.reshape(-1, *x.shape[-2:])
    value, dx, dtransitions, dinitial = forward_backward(rows, transitions, initial)
    return value.reshape(x.shape[:-2]), dx.reshape(x.shape), dtransitions, dinitial


@row_by_row
def hmmlearn_posteriors_log(x: Array, transitions: Array, initial: Array) -> Array:
    from hmmlearn import _hmmc
    from hmmlearn.utils import log_normalize

    _, forward = _hmmc.forward_log(initial, transitions[0], x)
    log_posterior = forward + _hmmc.backward_log(initial, transitions[0], x)
    log_normalize(log_posterior, axis=1)
    return np.exp(log_posterior)


@row_by_row
def hmmlearn_posteriors_scaling(x: Array, transitions: Array, initial: Array) -> Array:
    """Its scaled recursions, which take weights: each step's largest is made 1."""
    from hmmlearn import _hmmc
    from hmmlearn.utils import normalize

    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    _, forward, scales = _hmmc.forward_scaling(initial, transitions[0], weights)
    posterior = forward * _hmmc.backward_scaling(initial, transitions[0], weights, scales)
    normalize(posterior, axis=1)
    return posterior


def hmmlearn_log(x: Array, transitions: Array, initial: Array, g: Array) -> tuple[Array, ...]:
    """Its expectation step: posteriors, and counts of transitions; `g` is all ones."""
    from hmmlearn import _hmmc

    P = transitions[0]

    def expect(row: Array) -> tuple[Array, ...]:
        value, forward = _hmmc.forward_log(initial, P, row)
        backward = _hmmc.backward_log(initial, P, row)
        posterior = np.exp(forward + backward - value)
        return value, posterior, np.exp(_hmmc.compute_log_xi_sum(forward, P, backward, row))

    return _gradients_of_counts(expect, x, transitions, initial)


def hmmlearn_scaling(x: Array, transitions: Array, initial: Array, g: Array) -> tuple[Array, ...]:
    """The same on weights: each step's largest is made 1."""
    from hmmlearn import _hmmc

    P = transitions[0]

    def expect(row: Array) -> tuple[Array, ...]:
        top = row.max(axis=-1, keepdims=True)
        weights = np.exp(row - top)
        value, forward, scales = _hmmc.forward_scaling(initial, P, weights)
        backward = _hmmc.backward_scaling(initial, P, weights, scales)
        counts = _hmmc.compute_scaling_xi_sum(forward, P, backward, weights)
        return value + top.sum(), forward * backward / scales[:, None], counts

    return _gradients_of_counts(expect, x, transitions, initial)


def _gradients_of_counts(
    expect: Callable[[Array], tuple[Array, ...]], x: Array, transitions: Array, initial: Array
) -> tuple[Array, ...]:
    """Return log Z and its gradients from log Z, posteriors and counts of each row."""
    rows = x.reshape(-1, *x.shape[-2:])
    values, posteriors, counts = map(np.stack, zip(*map(expect, rows), strict=True))
    dtransitions = counts.sum(axis=0) / transitions
    dinitial = posteriors[:, 0].sum(axis=0) / initial
    return values.reshape(x.shape[:-2]), posteriors.reshape(x.shape), dtransitions, dinitial
