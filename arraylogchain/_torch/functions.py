"""Operations as functions that autograd differentiates.

An `Operation` says what its value, gradients, tangent and second derivatives are, on plain tensors.
Four functions, the same for all operations, make of that what torch differentiates: backward and
forward, twice, under `torch.func` and `vmap`. Their first arguments are no tensors. Inputs that are
not given are None throughout.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache, reduce
from typing import Any

import torch
from torch.autograd import Function, forward_ad

from arraylogchain import _threads
from arraylogchain._arrays import enter, is_differentiated
from arraylogchain._context import Context

Tensor = Any
Tensors = Sequence[Any]
Wanted = tuple[bool, ...]


class uncompiled:  # noqa: N801
    """Keep the compiler from looking into a function of an operation: it is to see operators only.

    It would, where gradients are computed within what is compiled. It takes more than a second to
    import, so it is not asked before it is there.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.hidden = function, False

    def __call__(self, *args: Any) -> Any:
        if not self.hidden and "torch._dynamo" in sys.modules:
            self.function, self.hidden = torch.compiler.disable(self.function), True
        with _threads.using(args[0].workers):
            return self.function(*args)


def result_dtype(*tensors: Tensor | None) -> Any:
    return reduce(torch.promote_types, (x.dtype for x in tensors if x is not None))


class Memo:
    """What a value leaves to its gradients, which the caller may not change."""

    left: Any = None

    def take(self) -> Any:
        """Return it once: then it is let go, as saved tensors are.

        Where a graph is kept for another time, it is computed again.
        """
        left, self.left = self.left, None
        return left


# Tells which hooks pack what is saved for gradients, where this release of torch can be asked.
_packing_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)


def new_memo() -> Memo | None:
    """Return a memo, but none under a transform, where gradients get inputs of other shapes.

    Nor where hooks, such as those of checkpoints, take what is saved: a memo would keep it.
    """
    if torch.compiler.is_compiling():  # It cannot look into what is asked below.
        return None
    if torch._C._are_functorch_transforms_active() or _packing_hooks(False):
        return None
    return Memo()


class Operation:
    """A function of tensors to one tensor whose axes to the left are batch axes.

    Beside it, there may be integers. Gradients have the shapes and dtypes of the inputs. Methods
    get plain tensors, unless they say otherwise, and return one result for every True of `wanted`.
    """

    name: str
    has_integers = False
    is_linear = False  # where the integers stay the same

    def __init__(self) -> None:
        # Gradients are computed later, outside of the call that asked for so many threads.
        self.workers = _threads.wanted()

    def value(self, memo: Memo | None, *inputs: Tensor) -> Any:
        """Return the tensor, or a pair of it and the integers."""
        raise NotImplementedError

    def kept(self, output: Any) -> Tensor | None:
        """Return what derivatives need of the output; they get it as `out`."""
        return None

    def gradients(
        self, memo: Memo | None, wanted: Wanted, out: Tensor, g: Tensor, *inputs: Tensor
    ) -> Tensors:
        raise NotImplementedError

    def second(
        self, wanted: Wanted, out: Tensor, g: Tensor | None, inputs: Tensors, cotangents: Tensors
    ) -> Tensors:
        """Return the gradients of `sum(cotangents * gradients)` to g and to the inputs.

        The first is the tangent of the value; g is None where no other is wanted.
        """
        raise NotImplementedError

    # What follows takes tensors as they come, and is differentiable itself.

    def apply_tangent(self, out: Tensor, inputs: Tensors, tangents: Tensors) -> Tensor:
        wanted = (True, *(False for _ in inputs))
        (tangent,) = apply(Second, self, wanted, out, None, *inputs, *tangents)
        return tangent

    def apply_second(
        self, wanted: Wanted, out: Tensor, g: Tensor, inputs: Tensors, cotangents: Tensors
    ) -> Tensors:
        return apply(Second, self, wanted, out, g, *inputs, *cotangents)  # type: ignore[no-any-return]


def apply(function: Any, *args: Any) -> Any:
    """Call one of the functions below in the way that costs least here."""
    if not is_differentiated(*args):
        return function.forward(*args)
    return record(function, *args)


def record(function: Any, *args: Any) -> Any:
    """Call one of them on tensors that are known to take part in autograd or a transform."""
    if torch.compiler.is_compiling():
        # Autograd's functions are more than the compiler can look into.
        return torch.compiler.disable(record)(function, *args)
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return _classic(function).apply(*args)


@cache
def _classic(function: Any) -> Any:
    """Return a function for autograd alone: a call with `setup_context` costs three times more."""

    def forward(ctx: Any, *args: Any) -> Any:
        out = function.forward(*args)
        function.setup_context(ctx, args, out)
        return out

    methods = {"forward": forward, "backward": function.backward, "jvp": function.jvp}
    return type(
        function.__name__, (Function,), {name: staticmethod(f) for name, f in methods.items()}
    )


def read(ctx: Context, x: Tensor) -> Any:
    """Return a tensor of numbers or indices in the library that computes."""
    with needing_values():
        x = x.detach().resolve_neg()
        return x.numpy() if ctx.is_numpy else x


class needing_values:  # noqa: N801
    """Say what would do, where tensors are read that have no values."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, RuntimeError):
            raise NotImplementedError(
                "these tensors hold no values that can be read; is_grads_batched=True is not "
                "supported, torch.func.vmap and torch.func.jacrev are"
            ) from error


def check_tensors(**given: Any) -> None:
    """Raise where a tensor is mixed with something else, as without autograd."""
    if not all(isinstance(x, torch.Tensor) for x in given.values()):
        with torch.no_grad():
            enter(given)


def save(ctx: Any, *tensors: Tensor | None) -> None:
    ctx.save_for_backward(*tensors)
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        ctx.save_for_forward(*tensors)
    ctx.set_materialize_grads(False)


def spread(results: Sequence[Any], wanted: Sequence[bool]) -> tuple[Any, ...]:
    """Return the results in the places of the True ones, and None elsewhere."""
    left = iter(results)
    return tuple(next(left) if want else None for want in wanted)


def chosen(results: Sequence[Any], wanted: Sequence[bool]) -> tuple[Any, ...]:
    return tuple(x for x, want in zip(results, wanted, strict=True) if want)


def cast(results: Tensors, like: Tensors) -> tuple[Any, ...]:
    """Return results in the dtypes of the given; mixed dtypes are computed in the widest."""
    return tuple(
        x if x is None or x.dtype == y.dtype else x.to(y.dtype)
        for x, y in zip(results, like, strict=True)
    )


def batched(
    size: int, dims: Sequence[Any], tensors: Tensors, expand: Sequence[bool]
) -> list[Tensor]:
    """Return tensors with the axis that vmap maps in front, of length 1 where they lack it.

    What a gradient or tangent is taken of is expanded along it, so that results are per sample.
    """
    ready = []
    for x, dim, full in zip(tensors, dims, expand, strict=True):
        if x is not None:
            x = x.unsqueeze(0) if dim is None else x.movedim(dim, 0)
            x = x.expand(size, *x.shape[1:]) if full else x
        ready.append(x)
    return ready


class Value(Function):  # type: ignore[misc]
    """(op, memo, *inputs) to the operation's value."""

    @staticmethod
    @uncompiled
    def forward(op: Operation, memo: Memo | None, *inputs: Tensor) -> Tensor:
        return op.value(memo, *inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Tensors, output: Tensor) -> None:
        ctx.op, ctx.memo, *tensors = inputs
        if ctx.op.has_integers:
            ctx.mark_non_differentiable(output[1])
        save(ctx, ctx.op.kept(output), *tensors)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, *_: Any) -> Any:
        wanted = ctx.needs_input_grad[2:]
        if g is None:
            return (None, None, *(None for _ in wanted))
        # Reading these fails where one was changed in place; the memo could not notice.
        out, *inputs = ctx.saved_tensors
        grads = apply(Gradients, ctx.op, ctx.memo, wanted, out, g, *inputs)
        return (None, None, *spread(grads, wanted))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        out, *inputs = ctx.saved_tensors
        tangent = ctx.op.apply_tangent(out, inputs, tangents[2:])
        return (tangent, None) if ctx.op.has_integers else tangent

    @staticmethod
    def vmap(info: Any, in_dims: Any, op: Operation, memo: Any, *inputs: Tensor) -> Any:
        ready = batched(info.batch_size, in_dims[2:], inputs, [False] * len(inputs))
        return apply(Value, op, None, *ready), (0, 0) if op.has_integers else 0


class Gradients(Function):  # type: ignore[misc]
    """(op, memo, wanted, out, g, *inputs) to the gradients that are wanted."""

    @staticmethod
    @uncompiled
    def forward(
        op: Operation, memo: Memo | None, wanted: Wanted, out: Tensor, g: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        return tuple(op.gradients(memo, wanted, out, g, *inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: Tensors, output: Tensors) -> None:
        ctx.op, _, ctx.wanted, *tensors = inputs
        save(ctx, *tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        needs = ctx.needs_input_grad[4:]
        # `out` is a function of the inputs: what it contributes is counted there.
        if all(x is None for x in cotangents):
            return (None,) * (4 + len(needs))
        out, g, *inputs = ctx.saved_tensors
        grads = ctx.op.apply_second(needs, out, g, inputs, spread(cotangents, ctx.wanted))
        return (None, None, None, None, *spread(grads, needs))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        out, g, *inputs = ctx.saved_tensors
        g_tangent, *of_inputs = tangents[4:]
        parts = []
        if g_tangent is not None:
            parts.append(apply(Gradients, ctx.op, None, ctx.wanted, out, g_tangent, *inputs))
        if any(x is not None for x in of_inputs):
            # The matrix of second derivatives is symmetric, so that a product with it from the
            # other side is the same.
            wanted = (False, *ctx.wanted)
            parts.append(ctx.op.apply_second(wanted, out, g, inputs, of_inputs))
        return tuple(sum(terms) for terms in zip(*parts, strict=True))

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, op: Operation, memo: Any, wanted: Wanted, *rest: Tensor
    ) -> Any:
        ready = batched(info.batch_size, in_dims[3:], rest, (True, True, *wanted))
        return apply(Gradients, op, None, wanted, *ready), (0,) * sum(wanted)


class Second(Function):  # type: ignore[misc]
    """(op, wanted, out, g, *inputs, *cotangents) to the gradients of the gradients.

    That to g is the tangent of the value, where the cotangents are tangents of the inputs. Alone,
    it has derivatives.
    """

    @staticmethod
    @uncompiled
    def forward(
        op: Operation, wanted: Wanted, out: Tensor, g: Tensor, *rest: Tensor
    ) -> tuple[Tensor, ...]:
        n = len(rest) // 2
        return tuple(op.second(wanted, out, g, rest[:n], rest[n:]))

    @staticmethod
    def setup_context(ctx: Any, inputs: Tensors, output: Tensors) -> None:
        ctx.op, wanted, out, _, *rest = inputs
        ctx.is_tangent = wanted[0] and not any(wanted[1:])
        if ctx.is_tangent:
            save(ctx, out, *rest)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        if not ctx.is_tangent:
            raise NotImplementedError(
                f"third derivatives of {ctx.op.name} are not implemented; for products with second "
                "derivatives, torch.autograd.functional.vhp and torch.func need no third ones"
            )
        (g,) = cotangents
        out, *rest = ctx.saved_tensors
        n, needs = len(rest) // 2, ctx.needs_input_grad[4:]
        inputs, tangents = rest[:n], rest[n:]
        of_inputs = of_tangents = (None,) * n
        if g is not None and any(needs[n:]):
            grads = apply(Gradients, ctx.op, None, needs[n:], out, g, *inputs)
            of_tangents = spread(grads, needs[n:])
        if g is not None and any(needs[:n]):
            grads = ctx.op.apply_second((False, *needs[:n]), out, g, inputs, tangents)
            of_inputs = spread(grads, needs[:n])
        return (None, None, None, None, *of_inputs, *of_tangents)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        if not ctx.is_tangent:
            raise NotImplementedError(f"third derivatives of {ctx.op.name} are not implemented")
        if ctx.op.is_linear:
            n = len(tangents[4:]) // 2
            out, *inputs = ctx.saved_tensors[: n + 1]
            return (ctx.op.apply_tangent(out, inputs, tangents[-n:]),)
        raise NotImplementedError(
            f"{ctx.op.name} has no forward-mode derivative of its forward-mode derivative; "
            "torch.func.jacfwd(torch.func.jacrev(f)) gives second derivatives"
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, op: Operation, wanted: Wanted, *tensors: Tensor) -> Any:
        ready = batched(info.batch_size, in_dims[2:], tensors, [True] * len(tensors))
        return apply(Second, op, wanted, *ready), (0,) * sum(wanted)
