"""Rules of differentiation: one autograd function for all operations.

An `Operation` computes its value, gradients and second derivatives from plain tensors. Three rules,
the same for all operations, define the result of a call and the calls that compute its derivatives;
`Call` is the autograd function that applies them. Tangents and cotangents of 0 may be None.
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
Mask = Sequence[bool]


class Operation:
    """A function of tensors to one tensor, whose leading axes are batch axes.

    Gradients have the shapes and dtypes of the inputs. All methods but `call_second` take plain
    tensors. `gradients` returns one result for each input, and only requested ones are read;
    `second` and `call_second` return one result for each True in `requested`.
    """

    name: str
    keeps_value = False  # whether derivatives take the value, as `out`
    sums_rows = False  # whether the value is a sum over rows; vmap then expands all inputs
    value: Callable[..., Tensor]
    # (residuals, requested, out, g, *inputs) to gradients: residuals of the value, the value if
    # `keeps_value`, and its cotangent.
    gradients: Callable[..., Tensors]
    # (requested, out, g, *inputs, *cotangents) to the gradients of `sum(cotangents * gradients)`
    # with respect to g and the inputs. The first is the tangent of the value; g is None if no other
    # is requested.
    second: Callable[..., Tensors]

    def __init__(self) -> None:
        self.workers = threads.requested.get()

    def call_second(
        self, requested: Mask, out: Tensor, g: Tensor, *inputs_and_cotangents: Tensor
    ) -> Tensors:
        """Return the results of `second` for any tensors, differentiably."""
        return call(SecondOrder(self, requested), out, g, *inputs_and_cotangents)


class Rule:
    """The results of a call, and the calls that compute their derivatives.

    `compute` takes precomputed results, or None, and plain tensors. `pull` maps cotangents to the
    gradients that are needed, `push` maps tangents of the inputs to tangents of the results; both
    take the saved value, if the operation keeps it, and the saved inputs. `expanded` returns a mask
    of the inputs that vmap expands, so that results are per sample.
    """

    def __init__(self, operation: Operation, requested: Mask = ()) -> None:
        self.operation, self.requested = operation, requested


class Primal(Rule):
    """(*inputs) to the value; precomputed are the value and its residuals."""

    def compute(self, precomputed: Any, *inputs: Tensor) -> Tensors:
        return (self.operation.value(*inputs) if precomputed is None else precomputed[0],)

    def pull(
        self, needs: Mask, cotangents: Tensors, residuals: Any, out: Tensor, *inputs: Tensor
    ) -> Tensors:
        return call(Vjp(self.operation, needs), out, *cotangents, *inputs, precomputed=residuals)

    def push(self, tangents: Tensors, out: Tensor, *inputs: Tensor) -> Tensors:
        requested = (True, *(False for _ in tangents))
        output_tangents = self.operation.call_second(requested, out, None, *inputs, *tangents)
        return [x.contiguous() for x in output_tangents]  # torch rejects expanded zeros

    def expanded(self, count: int) -> Mask:
        return (self.operation.sums_rows,) * count


class Vjp(Rule):
    """(out, g, *inputs) to the requested gradients; precomputed are the residuals of the value."""

    def compute(self, precomputed: Any, *inputs: Tensor) -> Tensors:
        return tuple(
            compress(self.operation.gradients(precomputed, self.requested, *inputs), self.requested)
        )

    def pull(
        self, needs: Mask, cotangents: Tensors, residuals: Any, _: None, *saved: Any
    ) -> Tensors:
        # `out` is a function of the inputs, whose gradients include its contribution.
        cotangents = scatter_optional(cotangents, self.requested)
        gradients = self.operation.call_second(needs[1:], *saved, *cotangents)
        return (None, *gradients) if needs[0] else gradients

    def push(self, tangents: Tensors, _: None, out: Tensor, g: Tensor, *inputs: Any) -> Tensors:
        _, g_tangent, *input_tangents = tangents
        parts = []
        if g_tangent is not None:
            parts.append(call(self, out, g_tangent, *inputs))
        if any(x is not None for x in input_tangents):
            # The Hessian is symmetric, so its product with tangents is that with cotangents.
            parts.append(
                self.operation.call_second(
                    (False, *self.requested), out, g, *inputs, *input_tangents
                )
            )
        return tuple(sum(terms) for terms in zip(*parts, strict=True))

    def expanded(self, count: int) -> Mask:
        return (True,) * count if self.operation.sums_rows else (True, True, *self.requested)


class SecondOrder(Rule):
    """(out, g, *inputs, *cotangents) to the gradients of the gradients.

    With tangents of the inputs for cotangents, the gradient with respect to g is the tangent of the
    value. It has derivatives in reverse mode if no other gradient is requested.
    """

    def compute(self, precomputed: None, *inputs: Tensor) -> Tensors:
        return tuple(self.operation.second(self.requested, *inputs))

    def pull(
        self, needs: Mask, cotangents: Tensors, residuals: None, _: None, out: Tensor, *saved: Any
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

    def expanded(self, count: int) -> Mask:
        return (True,) * count


class Call(Function):  # type: ignore[misc]
    """(rule, precomputed results or None, *inputs) to the tuple of the rule's results."""

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
                # Saved with the tensors, residuals are freed with them, and by checkpoints.
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
        # This raises if a saved tensor was changed in place.
        token, *saved = ctx.saved_tensors
        # The limit on threads of the call itself has ended.
        with threads.using(ctx.rule.operation.workers):
            gradients = ctx.rule.pull(needs, cotangents, getattr(token, "residuals", None), *saved)
        return None, None, *scatter_optional(gradients, needs)

    @staticmethod
    def jvp(ctx: Any, _: None, precomputed: None, *tangents: Tensor | None) -> Any:
        return tuple(ctx.rule.push(tangents, *ctx.saved_tensors[1:]))

    @staticmethod
    def vmap(info: Any, dims: Any, rule: Any, precomputed: Any, *inputs: Tensor) -> Any:
        """Call the rule with the mapped axis in front, of length 1 if inputs lack it.

        Precomputed results are not used: their inputs lack this axis.
        """
        ready = list(inputs)
        for i, full in enumerate(rule.expanded(len(inputs))):
            if inputs[i] is not None:
                dim = dims[2 + i]
                x = inputs[i].unsqueeze(0) if dim is None else inputs[i].movedim(dim, 0)
                ready[i] = x.expand(info.batch_size, *x.shape[1:]) if full else x
        outputs = call(rule, *ready)
        return outputs, (0,) * len(outputs)


# torch reads the signature at every call; computing it takes as long as a small product.
Call.forward.__signature__ = inspect.signature(Call.forward)  # type: ignore[attr-defined]


@dynamo_disabled
def call(rule: Rule, *inputs: Tensor, precomputed: Any = None) -> Tensors:
    """Return the results of a rule, by the autograd function if an input takes part in autograd."""
    if is_differentiated(*inputs):
        return Call.apply(rule, precomputed, *inputs)  # type: ignore[no-any-return]
    return Call.forward(rule, precomputed, *inputs)


def result_dtype(*tensors: Tensor | None) -> Any:
    return reduce(torch.promote_types, (x.dtype for x in tensors if x is not None))


def read(ctx: Context, *tensors: Tensor) -> Sequence[Any]:
    """Return tensors as arrays of the library that computes; raise if they hold no values."""
    if not are_plain(*tensors):
        raise NotImplementedError(
            "these tensors hold no values that can be read; is_grads_batched=True is not "
            "supported, torch.func.vmap and torch.func.jacrev are"
        )
    return [x.numpy(force=True) if ctx.is_numpy else x.detach().resolve_neg() for x in tensors]


def scatter_optional(results: Sequence[Any], requested: Mask) -> tuple[Any, ...]:
    """Return a tuple of the results where `requested` is True, and None elsewhere."""
    remaining = iter(results)
    return tuple(next(remaining) if is_requested else None for is_requested in requested)


def cast(results: Tensors, like: Tensors) -> tuple[Any, ...]:
    """Return results in the dtypes of `like`; mixed dtypes are computed in the widest."""
    return tuple(x.to(y.dtype) for x, y in zip(results, like, strict=True))
