"""What chains compute as operations: log Z, and messages that are normalised at every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from arraylogchain import _chain_calls
from arraylogchain._array.products.tiling import check_workspace
from arraylogchain._context import Context
from arraylogchain._inputs.chain import PARTS, Chain, enter_chain, make_chain
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
    read,
    result_dtype,
    spread,
)

# How far the recursion that gives second derivatives may be off before it is refused.
_TOLERANCE = 1e-6

# Axes of the inputs that are not batch axes.
OWN_AXES = (2, 3, 1, 1)


def chain_batch(*inputs: Tensor | None) -> Any:
    """Return the batch axes of a chain's inputs broadcast together."""
    pairs = zip(inputs, OWN_AXES, strict=True)
    return torch.broadcast_shapes(*(x.shape[: x.ndim - n] for x, n in pairs if x is not None))


class ChainOperation(Operation):
    """Of log potentials, transitions, initial and final weights; the last three may be None.

    Derivatives that are not certified are those of a recursion in float64, which autograd follows.

    Parameters
    ----------
    in_logs : sequence of bool
        Whether transitions, initial and final weights are given as logarithms.
    budget : int, optional
    lengths : array, optional
    """

    def __init__(self, in_logs: Any, budget: int | None, lengths: Any = None) -> None:
        super().__init__()
        logs = zip(PARTS, (True, *in_logs), strict=True)
        self.names = [f"log_{name}" if is_log else name for name, is_log in logs]
        # Only a bound that was asked for makes gradients keep less than every state.
        self.workspace, self.keeps_states = check_workspace(budget), budget is None
        self.lengths = lengths

    def written(self, chain: Chain) -> Tensor:
        """Return the value by the recursion that autograd follows."""
        raise NotImplementedError

    def agrees(self, inputs: Tensors, g: Tensor, out: Tensor, gradients: Tensors) -> bool:
        """Tell whether the recursion's value and gradients are those that are certified."""
        raise NotImplementedError

    def compute(self, operation: str, *inputs: Tensor) -> Any:
        """Return what has no derivatives, or whose derivatives are not of interest."""
        ctx, chain = self._enter(inputs)
        with ctx.computing():
            return ctx.handed_back(_chain_calls.compute(operation, ctx, chain, self.workspace))

    def second(
        self, wanted: Wanted, out: Tensor, g: Tensor | None, inputs: Tensors, cotangents: Tensors
    ) -> Tensors:
        """Return what every operation does.

        Raises
        ------
        FloatingPointError
            Where the recursion's value or gradients are not those that are certified.
        """
        with _recording():
            leaves, written = self._recorded(inputs)
            weights = torch.ones_like(written) if g is None else g.double()
            weights = weights.detach().requires_grad_()
            gradients = self._gradients(leaves, written, weights, create_graph=True)
            product = 0 * weights.sum()
            for x, direction in zip(gradients, cotangents, strict=True):
                if direction is not None:
                    product = product + (x * direction.detach()).sum()
            asked = chosen((weights, *leaves), wanted)
            found = torch.autograd.grad(product, asked, materialize_grads=True)
        like = written.new_empty(0, dtype=result_dtype(*inputs)) if g is None else g
        return cast(found, chosen((like, *inputs), wanted))

    def _recorded(self, inputs: Tensors) -> tuple[Tensors, Tensor]:
        """Return float64 copies of the inputs, and what the recursion makes of them."""
        leaves = [x if x is None else x.detach().double().requires_grad_() for x in inputs]
        return leaves, self.written(make_chain(self._given(leaves), self._lengths(inputs)))

    def _gradients(self, leaves: Tensors, out: Tensor, g: Tensor, **options: Any) -> Tensors:
        """Return the recursion's gradients, having checked them."""
        given = [x for x in leaves if x is not None]
        found = torch.autograd.grad(out, given, g, materialize_grads=True, **options)
        gradients = spread(found, [x is not None for x in leaves])
        if not self.agrees(leaves, g, out.detach(), gradients):
            raise FloatingPointError(
                "second derivatives and forward-mode derivatives of a chain, and all derivatives "
                "of filtered(), are computed on float64 weights without logarithms, and the "
                "weights of this chain range too widely for that (beyond 1e300 at one step); "
                "first derivatives of its other methods by backward() are right on any range"
            )
        return gradients

    def _enter(self, inputs: Tensors) -> tuple[Context, Chain]:
        return enter_chain(self._given(inputs), self._lengths(inputs))

    def _given(self, inputs: Tensors) -> dict[str, Tensor]:
        pairs = zip(self.names, inputs, strict=True)
        return {name: x for name, x in pairs if x is not None}

    def _lengths(self, inputs: Tensors) -> Any:
        if self.lengths is None:
            return None
        return check_lengths(self.lengths, tuple(chain_batch(*inputs)), inputs[0].shape[-2])


class Partition(ChainOperation):
    """The logs of the sums over all paths."""

    name = "log_partition"

    def value(self, memo: Memo | None, *inputs: Tensor) -> Tensor:
        if memo is None:
            return self.compute("log_partition", *inputs)
        value, memo.left = self._value_and_pullback(inputs)
        return value

    def gradients(
        self, memo: Memo | None, wanted: Wanted, out: Tensor, g: Tensor, *inputs: Tensor
    ) -> Tensors:
        pullback = None if memo is None else memo.take()
        if pullback is None:
            _, pullback = self._value_and_pullback(inputs)
        return chosen(pullback(g, wanted), wanted)

    def written(self, chain: Chain) -> Tensor:
        return recursion.log_partition(chain)

    def agrees(self, inputs: Tensors, g: Tensor, out: Tensor, gradients: Tensors) -> bool:
        value, pullback = self._value_and_pullback(inputs)
        known = pullback(g, tuple(x is not None for x in inputs))
        return _agree(value, out, 1.0) and all(
            x is None or _agree(x, y.detach()) for x, y in zip(known, gradients, strict=True)
        )

    def _value_and_pullback(self, inputs: Tensors) -> tuple[Tensor, Callable[..., Any]]:
        """Return the value and what makes gradients of a cotangent, None for those not wanted."""
        ctx, chain = self._enter(inputs)
        with ctx.computing():
            value, raw = _chain_calls.value_and_pullback(
                ctx, chain, self.workspace, self.keeps_states
            )
            value = ctx.hand_back(value)

        def pullback(g: Tensor, wanted: Wanted) -> list[Tensor | None]:
            g = read(ctx, g)
            ctx.uses(g)
            names = frozenset(chosen(PARTS, wanted))
            with ctx.computing():
                found = raw(g, names)
                return [ctx.hand_back(found[x]) if x in names else None for x in PARTS]

        return value, pullback


class Filtered(ChainOperation):
    """Probabilities of states given the steps so far, and log normalisers, [..., T, K + 1]."""

    name = "filtered"

    def value(self, memo: Memo | None, *inputs: Tensor) -> Tensor:
        probabilities, normalizers = self.compute("filtered", *inputs)
        return torch.cat([probabilities, normalizers[..., None]], -1)

    def gradients(
        self, memo: Memo | None, wanted: Wanted, out: Tensor, g: Tensor, *inputs: Tensor
    ) -> Tensors:
        with _recording():
            leaves, written = self._recorded(inputs)
            found = self._gradients(leaves, written, g.double())
        return cast(chosen(found, wanted), chosen(inputs, wanted))

    def written(self, chain: Chain) -> Tensor:
        return torch.cat(recursion.filtered(chain), -1)

    def agrees(self, inputs: Tensors, g: Tensor, out: Tensor, gradients: Tensors) -> bool:
        known = self.value(None, *inputs)
        return all(_agree(x, y, 1.0) for x, y in zip(_split(known), _split(out), strict=True))


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., :-1], x[..., -1]


@contextmanager
def _recording() -> Iterator[None]:
    """Record what autograd differentiates, within its own functions and operators as well."""
    autograd = torch._C.DispatchKey.AutogradFunctionality
    with torch.enable_grad(), torch._C._SetExcludeDispatchKeyGuard(autograd, False):
        yield


def _agree(known: Tensor, found: Tensor, least: float = 0.0) -> bool:
    """Tell whether results agree where they are numbers, relative to the largest of them."""
    if not known.numel():
        return True
    numbers = torch.isfinite(known)
    known, found = (torch.where(numbers, x, 0) for x in (known, found))
    allowed = _TOLERANCE * (known.abs() + 1e-3 * known.abs().max().clamp(min=least))
    return bool(((found - known).abs() <= allowed).all())
