"""The log partition of a chain written out for autograd, which differentiates it as often as asked.

Second derivatives and forward mode are taken of it. Weights are float64, without logarithms, and
scaled by their largest at each step. What underflows is lost, and nothing here notices: results are
to be compared with certified ones.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from arraylogchain._inputs.chain import Chain

Tensor = Any


def log_partition(chain: Chain) -> Tensor:
    """Return the logs of the sums over all paths, [*batch], of a chain of float64 tensors.

    Rows that share a matrix are multiplied by it together: nothing of size K * K is made for each.
    """
    if 0 in (*chain.batch, chain.num_states):
        return chain.potentials.sum() - chain.potentials.new_full(chain.batch, math.inf)
    states, shifts = _forward(chain, _real_steps(chain))
    last, log_scale = states[-1], shifts.sum(-1)
    if chain.final is not None:
        final, shift = _weights(_by_group(chain, chain.final, 1), (-1,), chain.final_in_logs)
        last, log_scale = last * final, log_scale + shift[..., 0]
    has_path, logs = _logs(last.sum(-1))
    return _to_batch(chain, torch.where(has_path, logs + log_scale, -math.inf))


def filtered(chain: Chain) -> tuple[Tensor, Tensor]:
    """Return state probabilities given the steps so far, and log normalisers [*batch, T, 1]."""
    shape = (*chain.batch, chain.num_steps)
    if 0 in (*chain.batch, chain.num_states):
        nothing = chain.potentials.sum()
        return nothing.expand(*shape, chain.num_states), nothing - nothing.new_full(
            (*shape, 1), math.inf
        )
    real = _real_steps(chain)
    states, shifts = _forward(chain, real)
    weights = torch.stack(states, -2)
    total = weights.sum(-1)
    has_path, logs = _logs(total)
    shares = weights / torch.where(has_path, total, 1)[..., None]
    normalizers = shifts + torch.diff(logs, dim=-1, prepend=torch.zeros_like(logs[..., :1]))
    normalizers = torch.where(has_path, normalizers, -math.inf)
    found = (torch.where(real[..., None], x, 0) for x in (shares, normalizers[..., None]))
    shares, normalizers = (_to_batch(chain, x) for x in found)
    return shares, normalizers


def _forward(chain: Chain, real: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return states [groups, rows, K] after each step, and the logs left out at it [..., T].

    Past the ends of rows states stay the same, and nothing is left out.
    """
    # What lies past the ends may be NaN, and must have no part in gradients either.
    potentials = torch.where(real[..., None], _by_group(chain, chain.potentials, 2), 0)
    weights, tops = _weights(potentials, (-1,), in_logs=True)
    log_scale = tops[..., 0]
    matrices: Any = ()
    if chain.num_steps > 1:
        matrices, tops = _matrices(chain, real)
        more = torch.where(real[..., 1:], tops[:, None], 0)
        log_scale = log_scale + torch.nn.functional.pad(more, (1, 0))
    # Indexing would make the gradient of every step as large as the whole.
    state, *others = weights.unbind(-2)
    first: Any = 0.0
    if chain.initial is not None:
        initial = _by_group(chain, chain.initial, 1)
        initial, first = _weights(initial, (-1,), chain.initial_in_logs)
        state = state * initial
    state, top = _weights(state, (-1,), in_logs=False)
    states, tops = [state], [top + first]
    for step, weight in enumerate(others, 1):
        arrived = state @ matrices[min(step, len(matrices)) - 1] * weight
        if chain.lengths is not None:
            arrived = torch.where(real[..., step, None], arrived, state)
        state, top = _weights(arrived, (-1,), in_logs=False)
        states.append(state)
        tops.append(top)
    return states, log_scale + torch.cat(tops, -1)


def _logs(total: Tensor) -> tuple[Tensor, Tensor]:
    """Return which totals are not 0, and their logarithms; 0 for the others."""
    has_path = total != 0
    return has_path, torch.where(has_path, total, 1).log()


def _real_steps(chain: Chain) -> Tensor:
    """Return which steps rows have, [groups, rows, T]."""
    device = chain.potentials.device
    lengths = chain.num_steps if chain.lengths is None else chain.lengths
    ends = _by_group(chain, torch.as_tensor(lengths, device=device), 0)
    return ends[..., None] > torch.arange(chain.num_steps, device=device)


def _matrices(chain: Chain, real: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return [groups, K, K] for each step, or one for all, and the logs left out of them."""
    matrices = _by_group(chain, chain.transitions, 3, expand=False)[:, 0]
    if chain.lengths is not None:
        is_used = real.any(1)[:, 1 : 1 + matrices.shape[1]]
        matrices = torch.where(is_used[..., None, None], matrices, 0)
    matrices, shifts = _weights(matrices, (-2, -1), chain.transitions_in_logs)
    return matrices.unbind(1), shifts[..., 0, 0]


def _weights(x: Tensor, axes: tuple[int, ...], in_logs: bool) -> tuple[Tensor, Tensor]:
    """Return weights divided by their largest along the axes, and the log of that."""
    top = x.detach().amax(axes, keepdim=True)
    if not in_logs:
        top = torch.where((top > 0) & torch.isfinite(top), top, 1)
        return x / top, top.log()
    top = torch.where(torch.isfinite(top), top, 0)
    # A weight of zero has no derivative, whatever the direction.
    return (x.masked_fill(torch.isneginf(x), -math.inf) - top).exp(), top


def _by_group(chain: Chain, x: Tensor, trailing: int, expand: bool = True) -> Tensor:
    """Return an array [..., *trailing axes] of the chain as [groups, rows, *trailing axes].

    Matrices, which rows share, are not expanded along them.
    """
    batch = len(chain.batch)
    x = x[(None,) * (batch + trailing - x.ndim)]
    own = x.shape[batch:]
    x = x.expand((*chain.batch, *own)) if expand else x
    x = x.permute((*chain.group_axes, *chain.row_axes, *range(batch, batch + trailing)))
    return x.reshape(chain.sizes[0], -1, *own)


def _to_batch(chain: Chain, x: Tensor) -> Tensor:
    """Return [groups, rows, ...] as [*batch, ...]."""
    order = (*chain.group_axes, *chain.row_axes)
    own = x.shape[2:]
    x = x.reshape([chain.batch[axis] for axis in order] + list(own))
    count = len(order)
    return x.permute([*(order.index(axis) for axis in range(count)), *range(count, x.ndim)])
