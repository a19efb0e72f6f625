"""The log partition of a chain as an operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from arraylogchain._array.products.tiling import check_workspace
from arraylogchain._chain_calls import compute, value_and_pullback
from arraylogchain._context import Context
from arraylogchain._inputs.chain import Chain, enter_chain, make_chain
from arraylogchain._inputs.lengths import check_lengths
from arraylogchain._torch import recursion
from arraylogchain._torch.functions import (
    Memo,
    Operation,
    Tensor,
    Tensors,
    Wanted,
    cast,
    chosen,
    needing_values,
    result_dtype,
    spread,
)

# How far the recursion that gives second derivatives may be off before it is refused.
_TOLERANCE = 1e-6

_FIELDS = ("potentials", "transitions", "initial")


def chain_batch(potentials: Tensor, transitions: Tensor | None, initial: Tensor | None) -> Any:
    """Return the batch axes of a chain's inputs broadcast together."""
    given = ((potentials, 2), (transitions, 3), (initial, 1))
    return torch.broadcast_shapes(*(x.shape[: x.ndim - n] for x, n in given if x is not None))


class Partition(Operation):
    """Of log potentials, transitions and initial weights; the last two may be None."""

    name = "log_partition"

    def __init__(
        self,
        transitions_in_logs: bool,
        initial_in_logs: bool,
        budget: int | None,
        lengths: Any = None,
    ) -> None:
        self.names = (
            "log_potentials",
            "log_transitions" if transitions_in_logs else "transitions",
            "log_initial" if initial_in_logs else "initial",
        )
        # Only a bound that was asked for makes gradients keep less than every state.
        self.workspace, self.keeps_states = check_workspace(budget), budget is None
        self.lengths = lengths

    def value(self, memo: Memo | None, *inputs: Tensor) -> Tensor:
        if memo is None:
            return self.compute("log_partition", *inputs)
        value, memo.pullback = self._value_and_pullback(inputs)
        return value

    def compute(self, operation: str, *inputs: Tensor) -> Tensor:
        """Return what has no derivatives, or whose derivatives are not of interest."""
        ctx, chain = self._enter(inputs)
        with ctx.computing():
            return ctx.hand_back(compute(operation, ctx, chain, self.workspace))

    def gradients(
        self, memo: Memo | None, wanted: Wanted, out: Tensor, g: Tensor, *inputs: Tensor
    ) -> Tensors:
        pullback = None
        if memo is not None:
            # Used once: the states that it keeps are let go, as saved tensors are. Where a graph
            # is kept for another time, they are computed again.
            pullback, memo.pullback = memo.pullback, None
        if pullback is None:
            _, pullback = self._value_and_pullback(inputs)
        return chosen(pullback(g, wanted), wanted)

    def tangent(self, out: Tensor, inputs: Tensors, tangents: Tensors) -> Tensor:
        g = torch.ones(chain_batch(*inputs), dtype=torch.float64, device=inputs[0].device)
        # The product with the Jacobian is the derivative of that with its transpose.
        (tangent,) = self._second((True, False, False, False), g, inputs, tangents)
        return tangent.to(result_dtype(*inputs))

    def second(
        self, wanted: Wanted, out: Tensor, g: Tensor, inputs: Tensors, cotangents: Tensors
    ) -> Tensors:
        found = self._second(wanted, g, inputs, cotangents)
        return cast(found, chosen((g, *inputs), wanted))

    def _second(self, wanted: Wanted, g: Tensor, inputs: Tensors, cotangents: Tensors) -> Tensors:
        """Return what `second` does, in float64.

        Raises
        ------
        FloatingPointError
            Where the recursion's value or gradients are not those that are certified.
        """
        lengths = self._lengths(inputs)
        # Within operators that the compiler sees, autograd is left out unless asked for.
        autograd = torch._C.DispatchKey.AutogradFunctionality
        with torch.enable_grad(), torch._C._SetExcludeDispatchKeyGuard(autograd, False):
            g = g.detach().double().requires_grad_()
            leaves = [x if x is None else x.detach().double().requires_grad_() for x in inputs]
            given = self._given(leaves)
            out = recursion.log_partition(make_chain(given, lengths))
            found = torch.autograd.grad(
                out, tuple(given.values()), g, create_graph=True, materialize_grads=True
            )
            gradients = spread(found, [x is not None for x in leaves])
            self._check(leaves, g, out, gradients)
            product = 0 * g.sum()
            for x, direction in zip(gradients, cotangents, strict=True):
                if direction is not None:
                    product = product + (x * direction.detach()).sum()
            asked = chosen((g, *leaves), wanted)
            return torch.autograd.grad(product, asked, materialize_grads=True)  # type: ignore[no-any-return]

    def _check(self, inputs: Tensors, g: Tensor, out: Tensor, gradients: Tensors) -> None:
        value, pullback = self._value_and_pullback(inputs)
        known = pullback(g, tuple(x is not None for x in inputs))
        agree = _agree(value, out.detach(), 1.0) and all(
            x is None or _agree(x, y.detach()) for x, y in zip(known, gradients, strict=True)
        )
        if not agree:
            raise FloatingPointError(
                "second derivatives and forward-mode derivatives of a chain are computed on "
                "float64 weights without logarithms, and the weights of this chain range too "
                "widely for that (beyond 1e300 at one step); first derivatives by backward() are "
                "right on any range"
            )

    def _value_and_pullback(self, inputs: Tensors) -> tuple[Tensor, Callable[..., Any]]:
        """Return the value and what makes gradients of a cotangent, None for those not wanted."""
        ctx, chain = self._enter(inputs)
        with ctx.computing():
            value, raw = value_and_pullback(ctx, chain, self.workspace, self.keeps_states)
            value = ctx.hand_back(value)

        def pullback(g: Tensor, wanted: Wanted) -> list[Tensor | None]:
            with needing_values():
                g = ctx.xp.asarray(g.detach().resolve_neg())
            ctx.uses(g)
            names = frozenset(chosen(_FIELDS, wanted))
            with ctx.computing():
                found = raw(g, names)
                return [ctx.hand_back(found[x]) if x in names else None for x in _FIELDS]

        return value, pullback

    def _enter(self, inputs: Tensors) -> tuple[Context, Chain]:
        return enter_chain(self._given(inputs), self._lengths(inputs))

    def _given(self, inputs: Tensors) -> dict[str, Tensor]:
        pairs = zip(self.names, inputs, strict=True)
        return {name: x for name, x in pairs if x is not None}

    def _lengths(self, inputs: Tensors) -> Any:
        if self.lengths is None:
            return None
        return check_lengths(self.lengths, tuple(chain_batch(*inputs)), inputs[0].shape[-2])


def _agree(known: Tensor, found: Tensor, least: float = 0.0) -> bool:
    """Tell whether results agree where they are numbers, relative to the largest of them."""
    if not known.numel():
        return True
    numbers = torch.isfinite(known)
    known, found = (torch.where(numbers, x, 0) for x in (known, found))
    allowed = _TOLERANCE * (known.abs() + 1e-3 * known.abs().max().clamp(min=least))
    return bool(((found - known).abs() <= allowed).all())
