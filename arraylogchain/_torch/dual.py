"""How a chain's log partition and its gradients change along a direction.

Forward and backward over time on float64 states with their derivatives along the direction, each
step rescaled. By the symmetry of second derivatives, the change of the gradients along a direction
is also the gradient of what the direction makes of them. This form does not prove itself as the
values do: results are compared with the certified value and gradients, and refused where it lost
something to underflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from arraylogchain._array.products.tiling import check_workspace
from arraylogchain._torch.functions import Tensor, Tensors
from arraylogchain._torch.operations import Matmul


@dataclass(frozen=True, slots=True)
class Dual:
    """Numbers and what they change by along the direction."""

    value: Tensor
    change: Tensor

    @classmethod
    def of(cls, x: Tensor, direction: Tensor | None) -> Dual:
        x = x.detach().double()
        return cls(x, torch.zeros_like(x) if direction is None else direction.detach().double())

    def __mul__(self, other: Dual) -> Dual:
        return Dual(self.value * other.value, self.change * other.value + self.value * other.change)

    def __getitem__(self, where: Any) -> Dual:
        return Dual(self.value[where], self.change[where])

    def exp(self, axes: tuple[int, ...]) -> tuple[Dual, Tensor]:
        """Return exponentials, and the maxima along the axes that are left out of them."""
        top = self.value.amax(axes, keepdim=True)
        top = torch.where(torch.isfinite(top), top, 0)
        value = torch.exp(self.value - top)
        # A direction may do as it likes where the weight is zero.
        return Dual(value, torch.where(value == 0, 0, value * self.change)), top

    def scaled(self) -> tuple[Dual, Tensor]:
        """Return rows divided by their largest value, and the logs of that."""
        top = self.value.amax(-1, keepdim=True)
        top = torch.where((top > 0) & torch.isfinite(top), top, 1)
        return Dual(self.value / top, self.change / top), top.log().squeeze(-1)

    def sum(self) -> Dual:
        return Dual(self.value.sum(-1), self.change.sum(-1))


class DualChain:
    """A chain and a direction in the space of its inputs.

    Parameters
    ----------
    inputs, direction : sequence of tensor or None
        Log potentials, transitions and initial weights, with equally many batch axes.
    in_logs : tuple of bool
        Which inputs are logs.
    lengths : numpy.ndarray [...], optional
        How many states of each row are real.
    budget : int, optional
    """

    def __init__(
        self,
        inputs: Tensors,
        direction: Tensors,
        in_logs: tuple[bool, bool, bool],
        lengths: np.ndarray | None,
        budget: int | None,
    ) -> None:
        potentials, transitions, start = inputs
        self.in_logs = in_logs
        self.multiply = Matmul(check_workspace(budget))
        self.count = potentials.shape[-2]
        self.lengths = None
        if lengths is not None:
            self.lengths = torch.as_tensor(lengths, device=potentials.device)
        emissions = self._only_read(Dual.of(potentials, direction[0]), 0, 1)
        self.emissions, shift = emissions.exp((-1,))
        self.shifts = shift.squeeze(-1)  # [..., T], of the potentials
        self.matrices = self.start = self.matrix_shifts = None
        if transitions is not None:
            self.matrices = self._only_read(Dual.of(transitions, direction[1]), 1, 2)
            if in_logs[1]:
                self.matrices, shift = self.matrices.exp((-1, -2))
                self.matrix_shifts = shift.squeeze(-1).squeeze(-1)
        self.start_shift = torch.zeros((), dtype=torch.float64, device=potentials.device)
        if start is not None:
            self.start = Dual.of(start, direction[2])
            if in_logs[2]:
                self.start, shift = self.start.exp((-1,))
                self.start_shift = shift.squeeze(-1)
        self._forward()

    def _only_read(self, x: Dual, first: int, trailing: int) -> Dual:
        """Return x [..., steps, *trailing axes] with ones for steps that no row reaches.

        `first` is the number of the first state that needs one of them.
        """
        if self.lengths is None:
            return x
        steps = x.value.shape[-trailing - 1]
        times = torch.arange(first, first + steps, device=self.lengths.device)
        real = self.lengths[..., None] > times
        own = x.value.shape[: x.value.ndim - trailing]
        # Of rows that share x, the longest counts.
        extra = real.ndim - len(own)
        real = real.amax(tuple(range(extra))) if extra > 0 else real
        shared = [a for a in range(-real.ndim, -1) if own[a] == 1]
        real = real.amax(shared, keepdim=True) if shared else real
        real = real[(..., *(None,) * trailing)]
        return Dual(torch.where(real, x.value, 1), torch.where(real, x.change, 0))

    def _advancing(self, step: int) -> Tensor | None:
        """Tell which rows have a state of this number, [...]; None for all."""
        if self.lengths is None or step == 0:
            return None
        return (self.lengths > step).expand(self.batch)

    def _matrix(self, step: int) -> Dual:
        """Return the matrices of a step, of which there may be one for all."""
        assert self.matrices is not None
        return self.matrices[..., min(step, self.matrices.value.shape[-3] - 1), :, :]

    def _times(self, row: Dual, matrix: Dual) -> Dual:
        def product(x: Tensor, y: Tensor) -> Tensor:
            return self.multiply.value(None, x.unsqueeze(-2), y).squeeze(-2)

        changed = product(row.value, matrix.change) + product(row.change, matrix.value)
        return Dual(product(row.value, matrix.value), changed)

    def _forward(self) -> None:
        batches = [self.emissions.value.shape[:-2]]
        if self.matrices is not None:
            batches.append(self.matrices.value.shape[:-3])
        if self.start is not None:
            batches.append(self.start.value.shape[:-1])
        self.batch = torch.broadcast_shapes(*batches)
        state = self.emissions[..., 0, :]
        state = state if self.start is None else state * self.start
        shape = (*self.batch, state.value.shape[-1])
        state, scale = Dual(state.value.expand(shape), state.change.expand(shape)).scaled()
        self.states, log_scale = [state], self.start_shift + self.shifts[..., 0] + scale
        for step in range(1, self.count):
            arrived = self._times(state, self._matrix(step - 1)) * self.emissions[..., step, :]
            arrived, scale = arrived.scaled()
            scale = scale + self.shifts[..., step]
            if self.matrix_shifts is not None:
                at = min(step, self.matrix_shifts.shape[-1]) - 1
                scale = scale + self.matrix_shifts[..., at]
            advancing = self._advancing(step)
            if advancing is not None:
                arrived = _where(advancing[..., None], arrived, state)
                scale = torch.where(advancing, scale, 0)
            state = arrived
            self.states.append(state)
            log_scale = log_scale + scale
        total = state.sum()
        self.alive = total.value != 0
        divisor = torch.where(self.alive, total.value, 1)
        self.log_partition = total.value.log() + log_scale
        self.tangent = torch.where(self.alive, total.change / divisor, 0)

    def gradients(self, g: Tensor) -> list[Dual | None]:
        """Return the gradients of sum(g * log_partition) to the inputs, with their changes."""
        g = torch.where(self.alive, g.detach().double(), 0).unsqueeze(-1)
        after = Dual(torch.ones_like(self.states[0].value), torch.zeros_like(self.states[0].value))
        of_potentials = []
        of_matrices: list[Dual] = []
        everyone = g
        for step in reversed(range(self.count)):
            advancing = self._advancing(step)
            g = everyone if advancing is None else torch.where(advancing[..., None], everyone, 0)
            shares = self.states[step] * after
            shares = _normalised(shares, shares, g)
            of_potentials.append(_summed_to(shares, self.emissions.value[..., 0, :].shape))
            if step == 0:
                break
            matrix = self._matrix(step - 1)
            weighted = after * self.emissions[..., step, :]
            transposed = Dual(matrix.value.mT, matrix.change.mT)
            before = self._times(weighted, transposed)
            weighted = _normalised(weighted, self.states[step - 1] * before, g)
            of_matrices.append(self._outer(self.states[step - 1], weighted, matrix))
            before, _ = before.scaled()
            after = before if advancing is None else _where(advancing[..., None], before, after)
        results: list[Dual | None] = [_stacked(of_potentials[::-1], -2), None, None]
        if self.matrices is not None:
            if not of_matrices:
                summed = Dual(*(torch.zeros_like(self.matrices.value) for _ in range(2)))
            elif self.matrices.value.shape[-3] == 1:
                values = sum(x.value for x in of_matrices).unsqueeze(-3)
                summed = Dual(values, sum(x.change for x in of_matrices).unsqueeze(-3))
            else:
                summed = _stacked(of_matrices[::-1], -3)
            results[1] = summed * self.matrices if self.in_logs[1] else summed
        if self.start is not None:
            first = after * self.emissions[..., 0, :]
            of_start = _normalised(first, self.start * first, g)
            of_start = _summed_to(of_start, self.start.value.shape)
            results[2] = of_start * self.start if self.in_logs[2] else of_start
        return results

    def _outer(self, rows: Dual, weighted: Dual, matrix: Dual) -> Dual:
        """Return sums over the rows that share a matrix of what they make of its entries."""

        def product(x: Tensor, y: Tensor) -> Tensor:
            x, y = x.unsqueeze(-2), y.unsqueeze(-2)
            wanted = (False, True)
            (result,) = self.multiply.gradients(None, wanted, None, y, x, matrix.value)
            return result

        changed = product(rows.change, weighted.value) + product(rows.value, weighted.change)
        return Dual(product(rows.value, weighted.value), changed)


def _where(condition: Tensor, x: Dual, y: Dual) -> Dual:
    return Dual(
        torch.where(condition, x.value, y.value), torch.where(condition, x.change, y.change)
    )


def _normalised(x: Dual, terms: Dual, g: Tensor) -> Dual:
    """Return g * x / sum(terms)."""
    total = terms.sum()
    divisor = torch.where(total.value == 0, 1, total.value).unsqueeze(-1)
    value = g * x.value / divisor
    return Dual(value, g * x.change / divisor - value * (total.change.unsqueeze(-1) / divisor))


def _summed_to(x: Dual, shape: Any) -> Dual:
    return Dual(x.value.sum_to_size(shape), x.change.sum_to_size(shape))


def _stacked(parts: Sequence[Dual], axis: int) -> Dual:
    return Dual(
        torch.stack([x.value for x in parts], axis), torch.stack([x.change for x in parts], axis)
    )
