"""The log partition of a chain as an operation."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import torch

from arraylogchain import vjp
from arraylogchain._inputs.lengths import check_lengths
from arraylogchain._torch.dual import DualChain
from arraylogchain._torch.functions import Memo, Operation, Tensor, Tensors, Wanted, cast, chosen
from arraylogchain.chain import LogChain

# How far the form that gives second derivatives may be off before it is refused.
_TOLERANCE = 1e-6


def chain_batch(potentials: Tensor, transitions: Tensor | None, start: Tensor | None) -> Any:
    """Return the batch axes of a chain's inputs broadcast together."""
    batches = [potentials.shape[:-2]]
    batches += [] if transitions is None else [transitions.shape[:-3]]
    batches += [] if start is None else [start.shape[:-1]]
    return torch.broadcast_shapes(*batches)


class Partition(Operation):
    """Of log potentials, transitions and initial weights; the last two may be None."""

    name = "log_partition"

    def __init__(
        self,
        transitions_in_logs: bool,
        start_in_logs: bool,
        budget: int | None,
        lengths: Any = None,
    ) -> None:
        self.transitions_in_logs = transitions_in_logs
        self.start_in_logs = start_in_logs
        self.budget = budget
        self.lengths = lengths

    def chain(self, *inputs: Tensor) -> LogChain:
        """Return the chain of plain tensors."""
        potentials, transitions, start = (x if x is None else x.detach() for x in inputs)
        options = {
            "log_transitions" if self.transitions_in_logs else "transitions": transitions,
            "log_initial" if self.start_in_logs else "initial": start,
        }
        return LogChain(potentials, lengths=self.lengths, workspace=self.budget, **options)

    def value(self, memo: Memo | None, *inputs: Tensor) -> Tensor:
        chain = self.chain(*inputs)
        if memo is None:
            return chain.log_partition()
        value, memo.pullback = vjp.log_partition(chain)
        return value

    def gradients(
        self, memo: Memo | None, wanted: Wanted, out: Tensor, g: Tensor, *inputs: Tensor
    ) -> Tensors:
        pullback = None
        if memo is not None:
            # Used once: the states that it keeps are let go, as saved tensors are. Where a graph
            # is kept for another time, they are computed again.
            pullback, memo.pullback = memo.pullback, None
        if pullback is None:
            _, pullback = vjp.log_partition(self.chain(*inputs))
        names = chosen(vjp.ChainGradients._fields, wanted)
        return chosen(pullback(g.detach(), names), wanted)

    def tangent(self, out: Tensor, inputs: Tensors, tangents: Tensors) -> Tensor:
        if _is_empty(inputs):
            return torch.zeros_like(self.chain(*inputs).log_partition())
        dual = self._dual(inputs, tangents)
        gradients = self._certified(inputs, dual, torch.ones_like(dual.log_partition))
        # All directions at once: the certified gradients know the sum of the changes.
        pairs = [(x, dx) for x, dx in zip(gradients, tangents, strict=True) if dx is not None]
        known = [(x * dx).nan_to_num() for x, dx in pairs]
        scale = sum(float(x.abs().sum()) for x in known)
        error = abs(float(dual.tangent.sum()) - sum(float(x.sum()) for x in known))
        if math.isfinite(error) and error > _TOLERANCE * scale:
            _refuse()
        return dual.tangent.to(_dtype(inputs))

    def second(
        self, wanted: Wanted, out: Tensor, g: Tensor, inputs: Tensors, cotangents: Tensors
    ) -> Tensors:
        if _is_empty(inputs):
            return chosen([x if x is None else torch.zeros_like(x) for x in (g, *inputs)], wanted)
        dual = self._dual(inputs, cotangents)
        results = dual.gradients(g)
        for known, result in zip(self._certified(inputs, dual, g), results, strict=True):
            if result is not None and not _agree(known, result.value):
                _refuse()
        changes = [None if x is None else x.change for x in results]
        return chosen(cast((dual.tangent, *changes), (g, *inputs)), wanted)

    def _dual(self, inputs: Tensors, direction: Tensors) -> DualChain:
        in_logs = (True, self.transitions_in_logs, self.start_in_logs)
        lengths = check_lengths(self.lengths, tuple(chain_batch(*inputs)), inputs[0].shape[-2])
        return DualChain(inputs, direction, in_logs, lengths, self.budget)

    def _certified(self, inputs: Tensors, dual: DualChain, g: Tensor) -> Any:
        """Return gradients that are proved right, having compared the value."""
        wide = [None if x is None else x.detach().double() for x in inputs]
        value, pullback = vjp.log_partition(self.chain(*wide))
        if not _agree(value, dual.log_partition, 1.0):
            _refuse()
        return pullback(g.detach().double())


def _agree(known: Tensor, result: Tensor, least: float = 0.0) -> bool:
    """Tell whether results agree where they are numbers, relative to the largest of them."""
    if not known.numel():
        return True
    numbers = torch.isfinite(known)
    known = torch.where(numbers, known, 0)
    scale = max(least, float(known.abs().max()))
    error = torch.where(numbers, result - known, 0).abs()
    return not bool((error > _TOLERANCE * (known.abs() + 1e-3 * scale)).any())


def _refuse() -> None:
    raise FloatingPointError(
        "second derivatives and forward-mode derivatives of a chain are computed on float64 "
        "weights without logarithms, and the weights of this chain range too widely for that "
        "(beyond 1e300 at one step); first derivatives by backward() are right on any range"
    )


def _is_empty(inputs: Tensors) -> bool:
    """Tell whether there are no chains or no states; a chain of one step has no transitions."""
    potentials, transitions, start = inputs
    own = [potentials.shape, () if start is None else start.shape]
    if transitions is not None:
        own.append((*transitions.shape[:-3], *transitions.shape[-2:]))
    return any(0 in shape for shape in own)


def _dtype(inputs: Tensors) -> Any:
    return reduce(torch.promote_types, (x.dtype for x in inputs if x is not None))
