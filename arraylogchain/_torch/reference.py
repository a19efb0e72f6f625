"""Differentiable reference of the operations on a chain, in float64 and linear space.

Autograd takes all derivatives of it, except the first ones of `log_partition`. Weights are divided
by the largest of each step. Underflow is not detected here: callers compare the results with
certified ones.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from arraylogchain._inputs.chain import Chain

Tensor = Any
# Axes along which the weights of a part are divided by their maximum.
OWN_AXES = {"potentials": (-1,), "transitions": (-2, -1), "initial": (-1,), "final": (-1,)}


def log_partition(chain: Chain) -> Tensor:
    """Return log Z, [*batch], of a chain of float64 tensors.

    Rows that share a matrix are multiplied by it together, without a K x K array for each row.
    """
    states, shifts = _forward(chain, valid_steps(chain))
    last, shift = _times(chain, "final", states[-1])
    return logs_of(last.sum(-1)) + (shifts.sum(-1) + shift[..., 0])


def marginals(chain: Chain) -> Tensor:
    """Return the derivatives of log Z with respect to each row's potentials, [*batch, T, K]."""
    x = chain.parts["potentials"].expand(*chain.batch, chain.num_steps, chain.num_states)
    return _derivative(replace(chain, parts=chain.parts | {"potentials": x}), x)


def expected_transitions(chain: Chain) -> Tensor:
    """Return the derivatives of the sum of log Z with respect to log transitions."""
    x = chain.parts["transitions"]
    gradients = _derivative(chain, x)
    # Matrices that no row uses may hold NaN, but have gradient 0.
    return (
        gradients if "transitions" in chain.logs else gradients * torch.where(torch.isnan(x), 0, x)
    )


def _derivative(chain: Chain, x: Tensor) -> Tensor:
    total = log_partition(chain).sum()
    (gradients,) = torch.autograd.grad(total, x, create_graph=True, materialize_grads=True)
    return gradients


def filtered(chain: Chain) -> Tensor:
    """Return state probabilities given the steps so far, and log normalizers, [..., T, K + 1]."""
    is_valid = valid_steps(chain)
    states, shifts = _forward(chain, is_valid)
    weights = torch.stack(states, -2)
    total = weights.sum(-1)
    has_path = total != 0
    total = torch.where(has_path, total, 1)
    steps = torch.diff(total.log(), dim=-1, prepend=torch.zeros_like(total[..., :1]))
    normalizers = torch.where(has_path, shifts + steps, -math.inf)
    probabilities = torch.where(has_path[..., None], weights / total[..., None], 0)
    columns = torch.cat([probabilities, normalizers[..., None]], -1)
    return torch.where(is_valid[..., None], columns, 0)


def forward_messages(chain: Chain) -> Tensor:
    """Return the log forward messages, [..., T, K]."""
    is_valid = valid_steps(chain)
    states, shifts = _forward(chain, is_valid)
    return _messages(torch.stack(states, -2), shifts.cumsum(-1), is_valid)


def backward_messages(chain: Chain) -> Tensor:
    """Return the log backward messages, [..., T, K], from derivatives with respect to states."""
    is_valid = valid_steps(chain)
    states, shifts = _forward(chain, is_valid)
    # Derivatives with respect to states of weight 0 are needed too.
    last, shift = _times(chain, "final", states[-1])
    following = torch.autograd.grad(last.sum(), states, create_graph=True, materialize_grads=True)
    later = shifts.flip(-1).cumsum(-1).flip(-1) - shifts + shift
    return _messages(torch.stack(following, -2), later, is_valid)


def entropy(chain: Chain) -> Tensor:
    """Return entropies, [*batch]: log Z minus its derivative by a common power of all weights."""
    log_z = log_partition(chain)
    weights = torch.ones_like(log_z).requires_grad_()
    arguments = list(chain.parts.values())
    gradients = torch.autograd.grad(
        log_z, arguments, weights, create_graph=True, materialize_grads=True
    )
    change: Any = 0.0
    for (name, x), gradient in zip(chain.parts.items(), gradients, strict=True):
        # The derivative of x by the power; zero weights do not change.
        logs = torch.where(torch.isfinite(x), x, 0)
        logs = logs if name in chain.logs else x * torch.where(x > 0, x, 1).log()
        change = change + (gradient * logs).sum()
    (expected,) = torch.autograd.grad(change, weights, create_graph=True)
    return torch.where(torch.isneginf(log_z), 0, log_z - expected)


def _times(chain: Chain, part: str, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return states times initial or final weights, rescaled, and their log scale, [*batch, 1]."""
    shift: Any = 0.0
    if part in chain.parts:
        weights, shift = _weights(chain.parts[part], OWN_AXES[part], part in chain.logs)
        state = state * weights
    state, top = _weights(state, (-1,), is_log=False)
    return state, top + shift


def _messages(weights: Tensor, shifts: Tensor, is_valid: Tensor) -> Tensor:
    """Return log messages from weights [*batch, T, K] and their log scales [*batch, T]."""
    return torch.where(is_valid[..., None], logs_of(weights) + shifts[..., None], -math.inf)


def _forward(chain: Chain, is_valid: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return states [*batch, K] after each step, and the log scale of each step, [*batch, T].

    Past the end of a row states stay the same, and log scales are 0.
    """
    # Potentials past the ends may be NaN, which must not enter gradients either.
    x = torch.where(is_valid[..., None], chain.parts["potentials"], 0)
    weights, shifts = _weights(x, OWN_AXES["potentials"], True)
    log_scale = shifts[..., 0]
    if chain.num_steps > 1:
        matrices, shifts = _matrices(chain, is_valid)
        matrix_shifts = torch.where(is_valid[..., 1:], shifts, 0)
        log_scale = log_scale + torch.nn.functional.pad(matrix_shifts, (1, 0))
    # With indexing, the gradient of each step would be as large as the whole array.
    state, *step_weights = weights.unbind(-2)
    state, top = _times(chain, "initial", state)
    states, shifts = [state], [top]
    for step, weight in enumerate(step_weights, 1):
        # einsum folds batch axes that only one operand has, and expands neither.
        matrix = matrices[min(step, len(matrices)) - 1]
        predicted = torch.einsum("...k,...kj->...j", state, matrix) * weight
        if chain.lengths is not None:
            predicted = torch.where(is_valid[..., step, None], predicted, state)
        state, top = _weights(predicted, (-1,), is_log=False)
        states.append(state)
        shifts.append(top)
    return states, log_scale + torch.cat(shifts, -1)


def logs_of(weights: Tensor) -> Tensor:
    """Return logs of weights; their derivatives with respect to weights of 0 are 0."""
    is_zero = weights == 0
    weights = weights.masked_fill(is_zero, 1)
    scale = weights.detach()  # else second derivatives would contain its square
    return ((weights / scale).log() + scale.log()).masked_fill(is_zero, -math.inf)


def valid_steps(chain: Chain) -> Tensor:
    """Return a mask of the steps that rows have, [*batch, T]."""
    device = chain.parts["potentials"].device
    lengths = chain.num_steps if chain.lengths is None else chain.lengths
    row_lengths = torch.as_tensor(lengths, device=device).expand(chain.batch)
    return row_lengths[..., None] > torch.arange(chain.num_steps, device=device)


def _matrices(chain: Chain, is_valid: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return scaled matrices [..., K, K] of each step, or one for all, and their log scales."""
    matrices: Tensor = chain.parts["transitions"]
    if chain.lengths is not None:
        is_used = is_valid[..., 1:].long().sum_to_size(matrices.shape[:-2]) > 0
        matrices = torch.where(is_used[..., None, None], matrices, 0)
    matrices, shifts = _weights(matrices, OWN_AXES["transitions"], "transitions" in chain.logs)
    return matrices.unbind(-3), shifts[..., 0, 0]


def _weights(x: Tensor, axes: tuple[int, ...], is_log: bool) -> tuple[Tensor, Tensor]:
    """Return weights divided by their maximum along the axes, and the log of that."""
    if not is_log:
        scale = scale_of(x, axes)
        return x / scale, scale.log()
    top = finite_max(x, axes)
    # masked_fill stops derivatives with respect to weights of zero.
    return (x.masked_fill(torch.isneginf(x), -math.inf) - top).exp(), top


def finite_max(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return maxima along the axes, or 0 where they are not finite."""
    top = x.detach().amax(axes, keepdim=True)
    return torch.where(torch.isfinite(top), top, 0)


def scale_of(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return maxima along the axes, or 1 where they are not positive or not finite."""
    top = finite_max(x, axes)
    return torch.where(top > 0, top, 1)
