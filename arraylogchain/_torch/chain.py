"""The sums over all paths of a chain of tensors that take part in autograd or compilation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from arraylogchain._torch.functions import (
    Gradients,
    Memo,
    Tensor,
    Value,
    apply,
    check_tensors,
    is_compiling,
    operators,
    result_dtype,
)
from arraylogchain._torch.partition import Partition, chain_batch

Given = Mapping[str, Tensor]


def log_partition(given: Given, budget: int | None) -> Tensor:
    """Return `LogChain.log_partition`, differentiable.

    Parameters
    ----------
    given : mapping of str to tensor
        The arguments of `LogChain` by name.
    budget : int, optional
        Its workspace, if one was asked for.
    """
    inputs, options = _inputs(given, budget)
    if is_compiling():
        return operators().log_partition(*inputs, *options)
    # Under a transform the inputs of the gradients are shaped otherwise than those of the value.
    memo = None if torch._C._are_functorch_transforms_active() else Memo()
    return apply(Value, Partition(*options), memo, *inputs)


def marginals(given: Given, budget: int | None) -> Tensor:
    """Return `LogChain.marginals`, differentiable: the gradient to each row's own potentials."""
    inputs, options = _inputs(given, budget)
    potentials, transitions, start = inputs
    batch = chain_batch(*inputs)
    potentials = potentials.expand(*batch, *potentials.shape[-2:])
    return _gradient(0, (potentials, transitions, start), batch, options)


def expected_transitions(given: Given, budget: int | None) -> Tensor:
    """Return `LogChain.expected_transitions`, differentiable: the gradient to log transitions."""
    inputs, options = _inputs(given, budget)
    weights = given.get("transitions")
    gradient = _gradient(1, inputs, chain_batch(*inputs), options)
    if weights is None:
        return gradient.reshape(given["log_transitions"].shape)
    return gradient.reshape(weights.shape) * weights


def forward_messages(given: Given, budget: int | None) -> Tensor:
    """Return `LogChain.forward_messages`; for the compiler only."""
    return _messages("forward_messages", given, budget)


def backward_messages(given: Given, budget: int | None) -> Tensor:
    """Return `LogChain.backward_messages`; for the compiler only."""
    return _messages("backward_messages", given, budget)


def _messages(name: str, given: Given, budget: int | None) -> Tensor:
    if not is_compiling():
        raise NotImplementedError(
            f"{name}() has no derivatives and no vmap; call it within torch.no_grad(), or on a "
            "chain of detached tensors; log_partition(), marginals() and expected_transitions() "
            "have both"
        )
    inputs, options = _inputs(given, budget)
    return getattr(operators(), name)(*inputs, *options)


def _gradient(which: int, inputs: Any, batch: Any, options: Any) -> Tensor:
    wanted = tuple(i == which for i in range(len(inputs)))
    dtype = result_dtype(*(x for x in inputs if x is not None))
    ones = torch.ones(batch, dtype=dtype, device=inputs[0].device)
    if is_compiling():
        (result,) = operators().log_partition_gradients(*inputs, None, ones, list(wanted), *options)
    else:
        (result,) = apply(Gradients, Partition(*options), None, wanted, None, ones, *inputs)
    return result


def _inputs(given: Given, budget: int | None) -> tuple[list[Any], tuple[bool, bool, int | None]]:
    """Return the inputs, and how they are to be read.

    They get equally many batch axes, so that an axis of vmap is one more in front.
    """
    check_tensors(**given)
    inputs = [
        given["log_potentials"],
        given.get("transitions", given.get("log_transitions")),
        given.get("initial", given.get("log_initial")),
    ]
    own = (2, 3, 1)  # axes that are not batch axes
    most = max(x.ndim - n for x, n in zip(inputs, own, strict=True) if x is not None)
    for i, (x, n) in enumerate(zip(inputs, own, strict=True)):
        if x is not None and x.ndim - n < most:
            inputs[i] = x[(None,) * (most - x.ndim + n)]
    return inputs, ("log_transitions" in given, "log_initial" in given, budget)
