"""Calls that torch differentiates: one autograd function for all operations.

An `Operation` says what its value, gradients and second derivatives are, of plain tensors. Three
rules, the same for all operations, say what a call computes and which calls its derivatives are;
`Call` hands that to torch. Inputs that are not given are None throughout.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import compress
from typing import Any, NoReturn

import torch
from torch.autograd import Function

from arraylogchain._core import threads
from arraylogchain._core.context import Context
from arraylogchain._inputs.tensors import are_plain, dynamo_disabled, is_differentiated

Tensor = Any
Tensors = Sequence[Any]
Wanted = Sequence[bool]


class Operation:
    """A function of tensors to one tensor whose axes to the left are batch axes.

    Gradients have the shapes and dtypes of the inputs. Methods get plain tensors, unless they say
    otherwise, and return one result for every True of `requested`; `gradients` one for every input,
    of which others are not read.
    """

    name: str
    keeps_value = False  # for derivatives, which get it as `out`
    sums_rows = False  # in its value, unless vmap expands all inputs
    value: Callable[..., Tensor]
    # (left, wanted, out, g, *inputs): what the value left, the value if it is kept, and the
    # cotangent.
    gradients: Callable[..., Tensors]
    # (wanted, out, g, *inputs, *cotangents) to the gradients of `sum(cotangents * gradients)` to g
    # and to the inputs. The first is the tangent of the value; g is None where no other is wanted.
    second: Callable[..., Tensors]

    def __init__(self) -> None:
        self.workers = threads.requested.get()

    def call_second(
        self, requested: Wanted, out: Tensor, g: Tensor, *inputs_and_cotangents: Tensor
    ) -> Tensors:
        """Return what `second` does of tensors as they come, differentiably."""
        return call(SecondOrder(self, requested), out, g, *inputs_and_cotangents)


class Rule:
    """What a call computes, and which calls its derivatives are.

    `compute` takes what is known already, and plain tensors. `pull` takes cotangents to the
    gradients that are needed, `push` tangents of the inputs to those of the results: both get what
    was saved, the value if the operation keeps it, and the inputs. `expanded` tells which inputs
    vmap expands, so that results are per sample.
    """

    def __init__(self, operation: Operation, requested: Wanted = ()) -> None:
        self.operation, self.requested = operation, requested


class Primal(Rule):
    """(*inputs) to what the operation computes; known are that, and what it leaves."""

    def compute(self, precomputed: Any, *inputs: Tensor) -> Tensors:
        return (self.operation.value(*inputs) if precomputed is None else precomputed[0],)

    def pull(
        self, needs: Wanted, cotangents: Tensors, residuals: Any, out: Tensor, *inputs: Tensor
    ) -> Tensors:
        return call(Vjp(self.operation, needs), out, *cotangents, *inputs, precomputed=residuals)

    def push(self, tangents: Tensors, out: Tensor, *inputs: Tensor) -> Tensors:
        requested = (True, *(False for _ in tangents))
        output_tangents = self.operation.call_second(requested, out, None, *inputs, *tangents)
        return [x.contiguous() for x in output_tangents]  # torch refuses zeros that are expanded

    def expanded(self, count: int) -> Wanted:
        return (self.operation.sums_rows,) * count


class Vjp(Rule):
    """(out, g, *inputs) to the gradients that are wanted; known is what the value left."""

    def compute(self, precomputed: Any, *inputs: Tensor) -> Tensors:
        return tuple(
            compress(self.operation.gradients(precomputed, self.requested, *inputs), self.requested)
        )

    def pull(
        self, needs: Wanted, cotangents: Tensors, residuals: Any, _: None, *saved: Any
    ) -> Tensors:
        # `out` is a function of the inputs: what it contributes is counted there.
        cotangents = scatter_optional(cotangents, self.requested)
        gradients = self.operation.call_second(needs[1:], *saved, *cotangents)
        return (None, *gradients) if needs[0] else gradients

    def push(self, tangents: Tensors, _: None, out: Tensor, g: Tensor, *inputs: Any) -> Tensors:
        _, g_tangent, *input_tangents = tangents
        parts = []
        if g_tangent is not None:
            parts.append(call(self, out, g_tangent, *inputs))
        if any(x is not None for x in input_tangents):
            # The matrix of second derivatives is symmetric, so that a product with it from the
            # other side is the same.
            parts.append(
                self.operation.call_second(
                    (False, *self.requested), out, g, *inputs, *input_tangents
                )
            )
        return tuple(sum(terms) for terms in zip(*parts, strict=True))

    def expanded(self, count: int) -> Wanted:
        return (True,) * count if self.operation.sums_rows else (True, True, *self.requested)


class SecondOrder(Rule):
    """(out, g, *inputs, *cotangents) to the gradients of the gradients.

    That to g is the tangent of the value, where the cotangents are tangents of the inputs. Alone,
    it has derivatives.
    """

    def compute(self, precomputed: None, *inputs: Tensor) -> Tensors:
        return tuple(self.operation.second(self.requested, *inputs))

    def pull(
        self, needs: Wanted, cotangents: Tensors, residuals: None, _: None, out: Tensor, *saved: Any
    ) -> Tensors:
        if any(self.requested[1:]):
            self.push()
        n = len(self.requested) - 1
        (_, *saved_inputs), need_inputs, need_tangents = saved, needs[2 : 2 + n], needs[2 + n :]
        gradients = [None for need in needs[:2] if need]
        if any(need_inputs):
            gradients += self.operation.call_second(
                (False, *need_inputs), out, *cotangents, *saved_inputs
            )
        if any(need_tangents):
            gradients += call(
                Vjp(self.operation, need_tangents), out, *cotangents, *saved_inputs[:n]
            )
        return gradients

    def push(self, *_: Any) -> NoReturn:
        raise NotImplementedError(
            f"third derivatives of {self.operation.name}, and forward-mode derivatives of "
            "forward-mode derivatives, are not implemented; torch.autograd.functional.vhp "
            "and torch.func.jacfwd(torch.func.jacrev(f)) need neither"
        )

    def expanded(self, count: int) -> Wanted:
        return (True,) * count


class Call(Function):  # type: ignore[misc]
    """(rule, what is known of the results, *inputs) to the tuple of the rule's results."""

    @staticmethod
    def forward(*args: Any) -> Tensors:
        return args[0].compute(*args[1:])  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, args: Tensors, outputs: Tensors) -> None:
        ctx.rule, precomputed, *inputs = args
        token = out = None
        if isinstance(ctx.rule, Primal):
            out = outputs[0] if ctx.rule.operation.keeps_value else None
            if precomputed is not None:
                # Goes with the saved tensors: let go with them, and dropped by checkpoints.
                token = torch.empty(0)
                token.residuals = precomputed[1]
        ctx.save_for_backward(token, out, *inputs)
        ctx.save_for_forward(token, out, *inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        needs = ctx.needs_input_grad[2:]
        if all(g is None for g in cotangents):
            return (None,) * (2 + len(needs))
        # Reading these fails where one was changed in place.
        token, *saved = ctx.saved_tensors
        # This is outside of the call that asked for so many threads.
        with threads.using(ctx.rule.operation.workers):
            gradients = ctx.rule.pull(needs, cotangents, getattr(token, "residuals", None), *saved)
        return None, None, *scatter_optional(gradients, needs)

    @staticmethod
    def jvp(ctx: Any, _: None, precomputed: None, *tangents: Tensor | None) -> Any:
        return tuple(ctx.rule.push(tangents, *ctx.saved_tensors[1:]))

    @staticmethod
    def vmap(info: Any, dims: Any, rule: Any, precomputed: Any, *inputs: Tensor) -> Any:
        """Call with the axis that vmap maps in front, of length 1 where inputs lack it.

        What is known is of inputs without the axis.
        """
        ready = list(inputs)
        for i, full in enumerate(rule.expanded(len(inputs))):
            if inputs[i] is not None:
                dim = dims[2 + i]
                x = inputs[i].unsqueeze(0) if dim is None else inputs[i].movedim(dim, 0)
                ready[i] = x.expand(info.batch_size, *x.shape[1:]) if full else x
        outputs = call(rule, *ready)
        return outputs, (0,) * len(outputs)


# torch asks for it at every call; finding it out takes as long as a small product.
Call.forward.__signature__ = inspect.signature(Call.forward)  # type: ignore[attr-defined]


@dynamo_disabled
def call(rule: Rule, *inputs: Tensor, precomputed: Any = None) -> Tensors:
    """Return what a rule makes of tensors as they come."""
    if is_differentiated(*inputs):
        return Call.apply(rule, precomputed, *inputs)  # type: ignore[no-any-return]
    return Call.forward(rule, precomputed, *inputs)


def result_dtype(*tensors: Tensor | None) -> Any:
    return reduce(torch.promote_types, (x.dtype for x in tensors if x is not None))


def read(ctx: Context, *tensors: Tensor) -> Sequence[Any]:
    """Return tensors of numbers in the library that computes."""
    if not are_plain(*tensors):
        raise NotImplementedError(
            "these tensors hold no values that can be read; is_grads_batched=True is not "
            "supported, torch.func.vmap and torch.func.jacrev are"
        )
    return [x.numpy(force=True) if ctx.is_numpy else x.detach().resolve_neg() for x in tensors]


def scatter_optional(results: Sequence[Any], requested: Wanted) -> tuple[Any, ...]:
    """Return the results in the places of the True ones, and None elsewhere."""
    remaining = iter(results)
    return tuple(next(remaining) if want else None for want in requested)


def cast(results: Tensors, like: Tensors) -> tuple[Any, ...]:
    """Return results in the dtypes of the given; mixed dtypes are computed in the widest."""
    return tuple(None if x is None else x.to(y.dtype) for x, y in zip(results, like, strict=True))
