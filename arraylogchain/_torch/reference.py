"""The log partition of a chain written out for autograd, which differentiates it as often as asked.

All derivatives are taken of it but the first ones of `log_partition`. Weights are float64, without
logarithms, and scaled by their largest at each step. What underflows is lost, and nothing here
notices: callers compare the values of each row and step with certified ones.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from arraylogchain._inputs.chain import Chain

Tensor = Any
# Axes along which the weights of a part have a largest one, which they are scaled by.
OWN_AXES = {"potentials": (-1,), "transitions": (-2, -1), "initial": (-1,), "final": (-1,)}


def log_partition(chain: Chain) -> Tensor:
    """Return the logs of the sums over all paths, [*batch], of a chain of float64 tensors.

    Rows that share a matrix are multiplied by it together: nothing of size K * K is made for each.
    """
    states, shifts = _forward(chain, real_steps(chain))
    last, shift = _times(chain, "final", states[-1])
    return logs_of(last.sum(-1)) + (shifts.sum(-1) + shift[..., 0])


def marginals(chain: Chain) -> Tensor:
    """Return the derivatives of the logs by each row's own potentials, [*batch, T, K]."""
    x = chain.parts["potentials"].expand(*chain.batch, chain.num_steps, chain.num_states)
    return _derivative(replace(chain, parts=chain.parts | {"potentials": x}), x)


def expected_transitions(chain: Chain) -> Tensor:
    """Return the derivatives of the sum of the logs by log transitions."""
    x = chain.parts["transitions"]
    gradients = _derivative(chain, x)
    # Matrices that no row reaches are not read.
    return (
        gradients if "transitions" in chain.logs else gradients * torch.where(torch.isnan(x), 0, x)
    )


def _derivative(chain: Chain, x: Tensor) -> Tensor:
    total = log_partition(chain).sum()
    (gradients,) = torch.autograd.grad(total, x, create_graph=True, materialize_grads=True)
    return gradients


def filtered(chain: Chain) -> Tensor:
    """Return state probabilities given the steps so far, and log normalisers, [..., T, K + 1]."""
    is_valid = real_steps(chain)
    states, shifts = _forward(chain, is_valid)
    weights = torch.stack(states, -2)
    total = weights.sum(-1)
    has_path = total != 0
    total = torch.where(has_path, total, 1)
    steps = torch.diff(total.log(), dim=-1, prepend=torch.zeros_like(total[..., :1]))
    normalizers = torch.where(has_path, shifts + steps, -math.inf)
    probabilities = torch.where(has_path[..., None], weights / total[..., None], 0)
    gradients = torch.cat([probabilities, normalizers[..., None]], -1)
    return torch.where(is_valid[..., None], gradients, 0)


def forward_messages(chain: Chain) -> Tensor:
    """Return the logs of the states after each step, [..., T, K]."""
    is_valid = real_steps(chain)
    states, shifts = _forward(chain, is_valid)
    return _messages(torch.stack(states, -2), shifts.cumsum(-1), is_valid)


def backward_messages(chain: Chain) -> Tensor:
    """Return the logs of what follows each state, [..., T, K]: the derivatives of the sum by it."""
    is_valid = real_steps(chain)
    states, shifts = _forward(chain, is_valid)
    # Where a state is 0 its derivative counts as well.
    last, shift = _times(chain, "final", states[-1])
    following = torch.autograd.grad(last.sum(), states, create_graph=True, materialize_grads=True)
    later = shifts.flip(-1).cumsum(-1).flip(-1) - shifts + shift
    return _messages(torch.stack(following, -2), later, is_valid)


def entropy(chain: Chain) -> Tensor:
    """Return entropies, [*batch]: log Z less its change as all weights are raised to a power."""
    log_z = log_partition(chain)
    weights = torch.ones_like(log_z).requires_grad_()
    arguments = list(chain.parts.values())
    gradients = torch.autograd.grad(
        log_z, arguments, weights, create_graph=True, materialize_grads=True
    )
    change: Any = 0.0
    for (name, x), gradient in zip(chain.parts.items(), gradients, strict=True):
        # How x changes; a weight of zero does not.
        logs = torch.where(torch.isfinite(x), x, 0)
        logs = logs if name in chain.logs else x * torch.where(x > 0, x, 1).log()
        change = change + (gradient * logs).sum()
    (expected,) = torch.autograd.grad(change, weights, create_graph=True)
    return torch.where(torch.isneginf(log_z), 0, log_z - expected)


def _times(chain: Chain, part: str, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return states times initial or final weights, and the logs left out, [*batch, 1]."""
    shift: Any = 0.0
    if part in chain.parts:
        weights, shift = _weights(chain.parts[part], OWN_AXES[part], part in chain.logs)
        state = state * weights
    state, top = _weights(state, (-1,), is_log=False)
    return state, top + shift


def _messages(weights: Tensor, shifts: Tensor, is_valid: Tensor) -> Tensor:
    """Return logs of weights [*batch, T, K] and of their scales as [*batch, T, K]."""
    return torch.where(is_valid[..., None], logs_of(weights) + shifts[..., None], -math.inf)


def _forward(chain: Chain, is_valid: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return states [*batch, K] after each step, and the logs left out at it, [*batch, T].

    Past the ends of rows states stay the same, and nothing is left out.
    """
    # What lies past the ends may be NaN, and must have no part in gradients either.
    x = torch.where(is_valid[..., None], chain.parts["potentials"], 0)
    weights, shifts = _weights(x, OWN_AXES["potentials"], True)
    log_scale = shifts[..., 0]
    if chain.num_steps > 1:
        matrices, shifts = _matrices(chain, is_valid)
        matrix_shifts = torch.where(is_valid[..., 1:], shifts, 0)
        log_scale = log_scale + torch.nn.functional.pad(matrix_shifts, (1, 0))
    # Indexing would make the gradient of every step as large as the whole.
    state, *step_weights = weights.unbind(-2)
    state, top = _times(chain, "initial", state)
    states, shifts = [state], [top]
    for step, weight in enumerate(step_weights, 1):
        # This folds axes that only one of the two has, and expands neither.
        matrix = matrices[min(step, len(matrices)) - 1]
        predicted = torch.einsum("...k,...kj->...j", state, matrix) * weight
        if chain.lengths is not None:
            predicted = torch.where(is_valid[..., step, None], predicted, state)
        state, top = _weights(predicted, (-1,), is_log=False)
        states.append(state)
        shifts.append(top)
    return states, log_scale + torch.cat(shifts, -1)


def logs_of(weights: Tensor) -> Tensor:
    """Return logarithms; that of a weight of 0 has no derivative."""
    is_zero = weights == 0
    weights = weights.masked_fill(is_zero, 1)
    scale = weights.detach()  # else second derivatives would have its square
    return ((weights / scale).log() + scale.log()).masked_fill(is_zero, -math.inf)


def real_steps(chain: Chain) -> Tensor:
    """Return which steps rows have, [*batch, T]."""
    device = chain.parts["potentials"].device
    lengths = chain.num_steps if chain.lengths is None else chain.lengths
    row_lengths = torch.as_tensor(lengths, device=device).expand(chain.batch)
    return row_lengths[..., None] > torch.arange(chain.num_steps, device=device)


def _matrices(chain: Chain, is_valid: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return [..., K, K] for each step, or one for all, and the logs left out of them."""
    matrices: Tensor = chain.parts["transitions"]
    if chain.lengths is not None:
        is_used = is_valid[..., 1:].long().sum_to_size(matrices.shape[:-2]) > 0
        matrices = torch.where(is_used[..., None, None], matrices, 0)
    matrices, shifts = _weights(matrices, OWN_AXES["transitions"], "transitions" in chain.logs)
    return matrices.unbind(-3), shifts[..., 0, 0]


def _weights(x: Tensor, axes: tuple[int, ...], is_log: bool) -> tuple[Tensor, Tensor]:
    """Return weights divided by their largest along the axes, and the log of that."""
    top = finite_max(x, axes)
    if not is_log:
        top = torch.where(top > 0, top, 1)
        return x / top, top.log()
    # A weight of zero has no derivative, whatever the direction.
    return (x.masked_fill(torch.isneginf(x), -math.inf) - top).exp(), top


def finite_max(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return the largest along the axes, or 0 where that is not finite."""
    top = x.detach().amax(axes, keepdim=True)
    return torch.where(torch.isfinite(top), top, 0)
