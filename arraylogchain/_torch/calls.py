"""Calls that torch differentiates: one autograd function for all operations.

An `Operation` says what its value, gradients and second derivatives are, of plain tensors. Three
rules, the same for all operations, say what a call computes and which calls its derivatives are;
`Call` hands that to torch. Inputs that are not given are None throughout.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple, NoReturn

import torch
from torch.autograd import Function

from arraylogchain import _threads
from arraylogchain._arrays import eager, has_values, is_differentiated
from arraylogchain._context import Context

Tensor = Any
Tensors = Sequence[Any]
Wanted = Sequence[bool]


class Operation:
    """A function of tensors to one tensor whose axes to the left are batch axes.

    Gradients have the shapes and dtypes of the inputs. Methods get plain tensors, unless they say
    otherwise, and return one result for every True of `wanted`.
    """

    name: str
    keeps_value = False  # for derivatives, which get it as `out`
    sums_rows = False  # in its value, unless vmap expands all inputs
    value: Callable[..., Tensor]
    # (left, wanted, out, g, *inputs): what `value_and_left` left, the value if it is kept, and the
    # cotangent.
    gradients: Callable[..., Tensors]
    # (wanted, out, g, *inputs, *cotangents) to the gradients of `sum(cotangents * gradients)` to g
    # and to the inputs. The first is the tangent of the value; g is None where no other is wanted.
    second: Callable[..., Tensors]

    def __init__(self) -> None:
        # Gradients are computed later, outside of the call that asked for so many threads.
        self.workers = _threads.wanted()

    def value_and_left(self, *inputs: Tensor) -> tuple[Tensor, Any]:
        """Return the value and what it leaves to gradients, which nobody changes."""
        return self.value(*inputs), None

    def call_second(self, wanted: Wanted, out: Tensor, g: Tensor, *rest: Tensor) -> Tensors:
        """Return what `second` does of tensors as they come, differentiably."""
        return call(Second(self, wanted), out, g, *rest)


class Saved(NamedTuple):
    """What derivatives get of a call: its inputs, its value if that is kept, and what it left."""

    inputs: Tensors
    out: Tensor | None
    left: Any = None


class Rule:
    """What a call computes, and which calls its derivatives are.

    `compute` takes plain tensors, `pull` cotangents to the gradients that are needed, `push`
    tangents of the inputs to those of the results, and `expanded` tells which inputs vmap expands,
    so that results are per sample.
    """

    def __init__(self, operation: Operation, wanted: Wanted = (), left: Any = None) -> None:
        self.operation, self.wanted, self.left = operation, wanted, left


class Value(Rule):
    """(*inputs) to what the operation computes, which may be known already."""

    known: Tensor | None = None

    def compute(self, *inputs: Tensor) -> Tensors:
        known, self.known = self.known, None
        return (self.operation.value(*inputs) if known is None else known,)

    def pull(self, needs: Wanted, saved: Saved, cotangents: Tensors) -> Tensors:
        rule = Gradients(self.operation, needs, saved.left)
        return call(rule, saved.out, *cotangents, *saved.inputs)

    def push(self, saved: Saved, tangents: Tensors) -> Tensors:
        wanted = (True, *(False for _ in tangents))
        return self.operation.call_second(wanted, saved.out, None, *saved.inputs, *tangents)

    def expanded(self, count: int) -> Wanted:
        return (self.operation.sums_rows,) * count


class Gradients(Rule):
    """(out, g, *inputs) to the gradients that are wanted."""

    def compute(self, *inputs: Tensor) -> Tensors:
        left, self.left = self.left, None
        return tuple(self.operation.gradients(left, self.wanted, *inputs))

    def pull(self, needs: Wanted, saved: Saved, cotangents: Tensors) -> Tensors:
        # `out` is a function of the inputs: what it contributes is counted there.
        cotangents = spread(cotangents, self.wanted)
        found = self.operation.call_second(needs[1:], *saved.inputs, *cotangents)
        return (None, *found) if needs[0] else found

    def push(self, saved: Saved, tangents: Tensors) -> Tensors:
        (out, g, *inputs), (_, g_tangent, *others) = saved.inputs, tangents
        parts = []
        if g_tangent is not None:
            rule = Gradients(self.operation, self.wanted)
            parts.append(call(rule, out, g_tangent, *inputs))
        if any(x is not None for x in others):
            # The matrix of second derivatives is symmetric, so that a product with it from the
            # other side is the same.
            wanted = (False, *self.wanted)
            parts.append(self.operation.call_second(wanted, out, g, *inputs, *others))
        return tuple(sum(terms) for terms in zip(*parts, strict=True))

    def expanded(self, count: int) -> Wanted:
        return (True,) * count if self.operation.sums_rows else (True, True, *self.wanted)


class Second(Rule):
    """(out, g, *inputs, *cotangents) to the gradients of the gradients.

    That to g is the tangent of the value, where the cotangents are tangents of the inputs. Alone,
    it has derivatives.
    """

    def compute(self, *inputs: Tensor) -> Tensors:
        return tuple(self.operation.second(self.wanted, *inputs))

    def pull(self, needs: Wanted, saved: Saved, cotangents: Tensors) -> Tensors:
        if any(self.wanted[1:]):
            self._refuse()
        (out, _, *rest), n = saved.inputs, len(self.wanted) - 1
        of_inputs, of_tangents = needs[2 : 2 + n], needs[2 + n :]
        found = [None for need in needs[:2] if need]
        if any(of_inputs):
            found += self.operation.call_second((False, *of_inputs), out, *cotangents, *rest)
        if any(of_tangents):
            found += call(Gradients(self.operation, of_tangents), out, *cotangents, *rest[:n])
        return found

    def push(self, saved: Saved, tangents: Tensors) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotImplementedError(
            f"third derivatives of {self.operation.name}, and forward-mode derivatives of "
            "forward-mode derivatives, are not implemented; torch.func.vhp and "
            "torch.func.jacfwd(torch.func.jacrev(f)) need neither"
        )

    def expanded(self, count: int) -> Wanted:
        return (True,) * count


class Call(Function):  # type: ignore[misc]
    """(rule, *inputs) to the tuple of the rule's results."""

    @staticmethod
    def forward(rule: Any, *inputs: Tensor) -> Tensors:
        with _threads.using(rule.operation.workers):
            return rule.compute(*inputs)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, args: Tensors, found: Tensors) -> None:
        ctx.rule, *inputs = args
        keeps_value = isinstance(ctx.rule, Value) and ctx.rule.operation.keeps_value
        token = None
        if ctx.rule.left is not None:
            # Goes with the saved tensors: let go with them, and dropped by checkpoints.
            token = torch.empty(0)
            token.left, ctx.rule.left = ctx.rule.left, None
        saved = (found[0] if keeps_value else None, *inputs)
        ctx.save_for_backward(token, *saved)
        ctx.save_for_forward(None, *saved)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        needs = ctx.needs_input_grad[1:]
        if all(g is None for g in cotangents):
            return (None,) * (1 + len(needs))
        # Reading these fails where one was changed in place.
        token, out, *inputs = ctx.saved_tensors
        saved = Saved(inputs, out, getattr(token, "left", None))
        return None, *spread(ctx.rule.pull(needs, saved, cotangents), needs)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Any:
        _, out, *inputs = ctx.saved_tensors
        return tuple(ctx.rule.push(Saved(inputs, out), tangents))

    @staticmethod
    def vmap(info: Any, dims: Any, rule: Any, *inputs: Tensor) -> Any:
        """Call with the axis that vmap maps in front, of length 1 where inputs lack it."""
        ready, rule.left = list(inputs), None  # that was left of inputs without the axis
        for i, full in enumerate(rule.expanded(len(inputs))):
            if inputs[i] is not None:
                dim = dims[1 + i]
                x = inputs[i].unsqueeze(0) if dim is None else inputs[i].movedim(dim, 0)
                ready[i] = x.expand(info.batch_size, *x.shape[1:]) if full else x
        found = call(rule, *ready)
        return found, (0,) * len(found)


# torch asks for it at every call; finding it out takes as long as a small product.
Call.forward.__signature__ = inspect.signature(Call.forward)  # type: ignore[attr-defined]


@eager
def call(rule: Rule, *inputs: Tensor) -> Tensors:
    """Return what a rule makes of tensors as they come."""
    if is_differentiated(*inputs):
        return Call.apply(rule, *inputs)  # type: ignore[no-any-return]
    return Call.forward(rule, *inputs)


def call_value(operation: Operation, *inputs: Tensor, known: Tensor | None = None) -> Tensor:
    """Return an operation's value, which leaves something to gradients where these can take it."""
    rule = Value(operation)
    rule.known = known
    if known is None and torch.is_grad_enabled() and has_values(*inputs):
        with _threads.using(operation.workers):
            rule.known, rule.left = operation.value_and_left(*inputs)
    return call(rule, *inputs)[0]


def result_dtype(*tensors: Tensor | None) -> Any:
    return reduce(torch.promote_types, (x.dtype for x in tensors if x is not None))


def read(ctx: Context, x: Tensor | None) -> Any:
    """Return a tensor of numbers in the library that computes."""
    if x is None:
        return None
    if not has_values(x):
        raise NotImplementedError(
            "these tensors hold no values that can be read; is_grads_batched=True is not "
            "supported, torch.func.vmap and torch.func.jacrev are"
        )
    x = x.detach().resolve_neg()
    return x.numpy() if ctx.is_numpy else x


def spread(results: Sequence[Any], wanted: Wanted) -> tuple[Any, ...]:
    """Return the results in the places of the True ones, and None elsewhere."""
    left = iter(results)
    return tuple(next(left) if want else None for want in wanted)


def chosen(results: Sequence[Any], wanted: Wanted) -> tuple[Any, ...]:
    return tuple(x for x, want in zip(results, wanted, strict=True) if want)


def cast(results: Tensors, like: Tensors) -> tuple[Any, ...]:
    """Return results in the dtypes of the given; mixed dtypes are computed in the widest."""
    return tuple(None if x is None else x.to(y.dtype) for x, y in zip(results, like, strict=True))
