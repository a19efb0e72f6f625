"""Other libraries of hidden Markov models and conditional random fields."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from benchmarks.registry import Inputs, contestant, with_parameters

Array = Any


def _has_one_matrix(inputs: Inputs) -> bool:
    return inputs["P"].ndim == 2


# --- hmmlearn: one matrix, one row after another, in float64 --------------------------------------

HMMLEARN: dict[str, Any] = {
    "library": "float64",
    "requires": ("hmmlearn",),
    "devices": ("cpu",),
    "accepts": _has_one_matrix,
}


def _row_by_row(function: Callable[..., Any], x: Array) -> Any:
    """Apply a function of one row, which returns an array or several, to one or many."""
    if x.ndim == 2:
        return function(x)
    result = [function(row) for row in x]
    return (
        tuple(map(np.stack, zip(*result, strict=True))) if len(result[0]) == 3 else np.stack(result)
    )


@contestant("log_z", "hmmlearn, log", **HMMLEARN)
def hmmlearn_log_z(x: Array, P: Array, p0: Array) -> Array:
    from hmmlearn import _hmmc

    return _row_by_row(lambda row: np.atleast_1d(_hmmc.forward_log(p0, P, row)[0]), x)[..., 0]


@contestant("log_z", "hmmlearn, scaling", **HMMLEARN)
def hmmlearn_scaled_log_z(x: Array, P: Array, p0: Array) -> Array:
    """Its scaled recursion, which takes weights: each step's largest is made 1."""
    from hmmlearn import _hmmc

    def of_row(row: Array) -> Array:
        top = row.max(axis=-1, keepdims=True)
        value = _hmmc.forward_scaling(p0, P, np.exp(row - top))[0]
        return np.atleast_1d(value + math.fsum(top[:, 0]))

    return _row_by_row(of_row, x)[..., 0]


def _expect(row: Array, P: Array, p0: Array, scaling: bool, counts: bool = True) -> Any:
    """Its expectation step: log Z, posteriors, and counts of transitions."""
    from hmmlearn import _hmmc

    if not scaling:
        value, forward = _hmmc.forward_log(p0, P, row)
        backward = _hmmc.backward_log(p0, P, row)
        posterior = np.exp(forward + backward - value)
        if not counts:
            return posterior
        return value, posterior, np.exp(_hmmc.compute_log_xi_sum(forward, P, backward, row))
    top = row.max(axis=-1, keepdims=True)
    weights = np.exp(row - top)
    value, forward, scales = _hmmc.forward_scaling(p0, P, weights)
    backward = _hmmc.backward_scaling(p0, P, weights, scales)
    posterior = forward * backward / scales[:, None]
    if not counts:
        return posterior
    pairs = _hmmc.compute_scaling_xi_sum(forward, P, backward, weights)
    return value + top.sum(), posterior, pairs


def _register_hmmlearn(label: str, scaling: bool) -> None:
    @contestant("marginals", label, **HMMLEARN)
    def marginals(x: Array, P: Array, p0: Array) -> Array:
        return _row_by_row(lambda row: _expect(row, P, p0, scaling, counts=False), x)

    @contestant("posterior", label, **HMMLEARN)
    def posterior(x: Array, P: Array, p0: Array) -> tuple[Array, ...]:
        value, states, counts = _row_by_row(lambda row: _expect(row, P, p0, scaling), x)
        return value, states, counts.sum(axis=0) if x.ndim > 2 else counts

    @contestant("gradients", label, **HMMLEARN)
    def gradients(x: Array, P: Array, p0: Array, g: Array) -> tuple[Array, ...]:
        value, states, counts = posterior(x, P, p0)
        first = states[..., 0, :]
        return value, states, counts / P, (first.sum(axis=0) if x.ndim > 2 else first) / p0


_register_hmmlearn("hmmlearn, log", scaling=False)
_register_hmmlearn("hmmlearn, scaling", scaling=True)


@contestant("viterbi", "hmmlearn", **HMMLEARN)
def hmmlearn_viterbi(x: Array, P: Array, p0: Array) -> Array:
    from hmmlearn import _hmmc

    return _row_by_row(lambda row: np.asarray(_hmmc.viterbi(p0, P, row)[1]), x)


# --- dynamax, compiled by jax: for one row, or vectorised for many --------------------------------

DYNAMAX: dict[str, Any] = {
    "library": "jax",
    "requires": ("dynamax", "jax"),
    "devices": ("cpu",),
}


def _dynamax(infer: Callable[..., Any], x: Array, *arguments: Array) -> Any:
    import jax

    # Else its own constants would make float64 of a case in float32.
    jax.config.update("jax_enable_x64", x.dtype == np.float64)
    return jax.block_until_ready(_compiled(infer)(x, *arguments))


@cache
def _compiled(infer: Callable[..., Any]) -> Any:
    import jax

    return jax.jit(infer)


def _of_rows(function: Callable[..., Any], x: Array, *others: Array) -> Any:
    import jax

    return function(x, *others) if x.ndim == 2 else jax.vmap(function)(x, *others)


def _infer_log_z(x: Array, P: Array, p0: Array) -> Array:
    from dynamax.hidden_markov_model import hmm_filter

    # The compiler omits the other results, here and below.
    return _of_rows(lambda row: hmm_filter(p0, P, row).marginal_loglik, x)


def _infer_marginals(x: Array, P: Array, p0: Array) -> Array:
    from dynamax.hidden_markov_model import hmm_smoother

    return _of_rows(lambda row: hmm_smoother(p0, P, row).smoothed_probs, x)


def _infer_posterior(x: Array, P: Array, p0: Array) -> tuple[Array, ...]:
    from dynamax.hidden_markov_model import hmm_smoother

    def of_row(row: Array) -> tuple[Array, ...]:
        result = hmm_smoother(p0, P, row)
        return result.marginal_loglik, result.smoothed_probs, result.trans_probs

    value, states, counts = _of_rows(of_row, x)
    return value, states, counts.sum(axis=0) if x.ndim > 2 and P.ndim == 2 else counts


def _infer_gradients(x: Array, P: Array, p0: Array, g: Array) -> tuple[Array, ...]:
    import jax

    value, pullback = jax.vjp(_infer_log_z, x, P, p0)
    return (value, *pullback(g))


def _infer_viterbi(x: Array, P: Array, p0: Array) -> Array:
    from dynamax.hidden_markov_model import hmm_posterior_mode

    return _of_rows(lambda row: hmm_posterior_mode(p0, P, row), x)


def _infer_sample(x: Array, P: Array, p0: Array, seed: int) -> Array:
    import jax
    from dynamax.hidden_markov_model import hmm_posterior_sample

    key = jax.random.key(seed)
    keys = key if x.ndim == 2 else jax.random.split(key, len(x))
    return _of_rows(lambda row, key: hmm_posterior_sample(key, p0, P, row)[1], x, keys)


def _register_dynamax(
    operation: str, infer: Callable[..., Any], *more: str, **options: Any
) -> None:
    @contestant(operation, "dynamax, compiled", **DYNAMAX, **options)
    @with_parameters("x", "P", "p0", *more)
    def run(*arguments: Any) -> Any:
        return _dynamax(infer, *arguments)


_register_dynamax("log_z", _infer_log_z)
_register_dynamax("marginals", _infer_marginals)
_register_dynamax("posterior", _infer_posterior, accepts=_has_one_matrix)
_register_dynamax("gradients", _infer_gradients, "g")
_register_dynamax("viterbi", _infer_viterbi)
_register_dynamax("sample", _infer_sample, "seed")


# --- conditional random fields in torch -----------------------------------------------------------

PYTORCH_CRF: dict[str, Any] = {"library": "torch", "requires": ("torch", "torchcrf")}
TORCH_STRUCT: dict[str, Any] = {"library": "torch", "requires": ("torch", "torch_struct")}


@cache
def _crf(tags: int, device: Any) -> Any:
    """Return a module of pytorch-crf, made once, as a model has it."""
    import torchcrf

    return torchcrf.CRF(tags, batch_first=True).to(device)


def _filled_crf(log_P: Any, start: Any, end: Any) -> Any:
    crf = _crf(len(log_P), log_P.device)
    crf.transitions.data, crf.start_transitions.data, crf.end_transitions.data = log_P, start, end
    return crf


def _all_real(x: Any) -> Any:
    """Return a mask of bools; its own, of bytes, makes torch warn."""
    return x.new_ones(x.shape[:2]).bool()


@contestant("crf_loss", "pytorch-crf", **PYTORCH_CRF)
def crf_loss(emissions: Any, log_P: Any, start: Any, end: Any, tags: Any) -> tuple[Any, ...]:
    import torch

    crf = _filled_crf(log_P, start, end)
    x = emissions.detach().requires_grad_()
    loss = -crf(x, tags, mask=_all_real(x))
    leaves = (x, crf.transitions, crf.start_transitions, crf.end_transitions)
    return (loss.detach(), *torch.autograd.grad(loss, leaves))


@contestant("crf_decode", "pytorch-crf", **PYTORCH_CRF)
def crf_decode(emissions: Any, log_P: Any, start: Any, end: Any) -> Any:
    import torch

    with torch.no_grad():
        result = _filled_crf(log_P, start, end).decode(emissions, mask=_all_real(emissions))
        return torch.as_tensor(result)


def _struct(emissions: Any, log_P: Any, start: Any, end: Any) -> Any:
    """Return torch-struct's distribution of potentials [n, T - 1, to, from]: all are edges'."""
    import torch
    from torch_struct import LinearChainCRF

    edges = log_P.T + emissions[:, 1:, :, None]
    rest = torch.zeros_like(edges[:, 1:])
    first = (start + emissions[:, 0])[:, None, None, :].expand_as(edges[:, :1])
    last = end[:, None].expand_as(edges[:, :1])
    at_ends = torch.cat([first, rest], 1) + torch.cat([rest, last], 1)
    LinearChainCRF.arg_constraints = {}  # else torch warns that there are none
    return LinearChainCRF((edges + at_ends).contiguous())


@contestant("crf_loss", "torch-struct", **TORCH_STRUCT)
def struct_loss(emissions: Any, log_P: Any, start: Any, end: Any, tags: Any) -> tuple[Any, ...]:
    import torch

    leaves = [p.detach().requires_grad_() for p in (emissions, log_P, start, end)]
    chain = _struct(*leaves)
    parts = chain.struct.to_parts(tags, len(log_P)).type_as(emissions)
    loss = -chain.log_prob(parts).sum()
    return (loss.detach(), *torch.autograd.grad(loss, leaves))


@contestant("crf_decode", "torch-struct", **TORCH_STRUCT)
def struct_decode(emissions: Any, log_P: Any, start: Any, end: Any) -> Any:
    chain = _struct(emissions, log_P, start, end)
    return chain.struct.from_parts(chain.argmax)[0]
