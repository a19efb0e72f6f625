"""What torch.compile sees: each computation is one operator, with the shapes of its results.

Only the compiler sees operators: they cannot be differentiated in forward mode, nor under
`torch.func`; `functions` does all of that, and the compiler does not see into it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.library import custom_op

from arraylogchain._torch.functions import Operation, Tensor, Tensors, result_dtype, spread
from arraylogchain._torch.operations import LogMatmulExp, Matmul, MaxPlus
from arraylogchain._torch.partition import Filtered, Partition, chain_batch


def define(
    make: type[Operation],
    inputs: Sequence[str],
    options: str,
    fake: Callable[..., Any],
) -> tuple[Any, Any]:
    """Define operators for an operation, its gradients, and their gradients.

    Parameters
    ----------
    make : type of Operation
        Made from its options.
    inputs : sequence of str
        Their declarations, such as ``"Tensor a"``.
    options : str
        The declarations of what follows the inputs.
    fake : callable
        Makes an empty result from the inputs.

    Returns
    -------
    value : operator
        Of (*inputs, *options).
    gradients : operator
        Of (*inputs, out, g, wanted, *options); see `Operation.gradients`.
    """
    n, name = len(inputs), make.name
    of_inputs = ", ".join(inputs)
    of_gradients = f"{of_inputs}, Tensor? out, Tensor g, bool[] wanted"
    of_second = ", ".join((of_gradients, *(f"Tensor? cotangent{i}" for i in range(n))))

    def compute_value(*args: Any) -> Any:
        out = make(*args[n:]).value(None, *args[:n])
        return tuple(_contiguous(out)) if make.has_integers else out.contiguous()

    def compute_gradients(*args: Any) -> list[Tensor]:
        given, out, g, wanted, *rest = args[:n], *args[n:]
        return _contiguous(make(*rest).gradients(None, tuple(wanted), out, g, *given))

    def compute_second(*args: Any) -> list[Tensor]:
        given, out, g, wanted, *rest = args[:n], *args[n:]
        return _contiguous(make(*rest[n:]).apply_second(tuple(wanted), out, g, given, rest[:n]))

    def empty_value(*args: Any) -> Any:
        return fake(*args[:n])

    def empty_gradients(*args: Any) -> list[Tensor]:
        return _like(args[:n], args[n + 2])

    def empty_second(*args: Any) -> list[Tensor]:
        return _like((args[n + 1], *args[:n]), args[n + 2])

    def schema(arguments: str, returns: str) -> str:
        return f"({arguments}, {options}) -> {returns}"

    returns = "(Tensor, Tensor)" if make.has_integers else "Tensor"
    value = _operator(name, schema(of_inputs, returns), compute_value, empty_value)
    gradients = _operator(
        f"{name}_gradients", schema(of_gradients, "Tensor[]"), compute_gradients, empty_gradients
    )
    second = _operator(
        f"{name}_second", schema(of_second, "Tensor[]"), compute_second, empty_second
    )
    _register_autograd(make, n, value, gradients, second)
    return value, gradients


def _register_autograd(
    make: type[Operation], n: int, value: Any, gradients: Any, second: Any
) -> None:
    """Say what the derivatives of an operator of n inputs and of its gradients are."""

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.options = inputs[n:]
        if make.has_integers:
            ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(make(*ctx.options).kept(output), *inputs[:n])

    def backward(ctx: Any, g: Tensor, *_: Any) -> Any:
        out, *given = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:n])
        grads = gradients(*given, out, g, wanted, *ctx.options)
        return (*spread(grads, wanted), *(None for _ in ctx.options))

    def save_gradients(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.wanted, *ctx.options = inputs[n + 2 :]
        ctx.save_for_backward(*inputs[: n + 2])

    def backward_of_gradients(ctx: Any, cotangents: Any) -> Any:
        *given, out, g = ctx.saved_tensors
        needs = [ctx.needs_input_grad[n + 1], *ctx.needs_input_grad[:n]]
        cotangents = spread(cotangents, ctx.wanted)
        grads = second(*given, out, g, needs, *cotangents, *ctx.options)
        of_g, *of_inputs = spread(grads, needs)
        return (*of_inputs, None, of_g, None, *(None for _ in ctx.options))

    value.register_autograd(backward, setup_context=save)
    gradients.register_autograd(backward_of_gradients, setup_context=save_gradients)


def _operator(
    name: str, schema: str, compute: Callable[..., Any], empty: Callable[..., Any]
) -> Any:
    """Define one operator: what it computes, and what the compiler knows of its results."""
    op = custom_op(f"arraylogchain::{name}", compute, mutates_args=(), schema=schema)
    op.register_fake(empty)
    return op


def _contiguous(tensors: Tensors) -> list[Tensor]:
    """Return tensors laid out as the compiler was told."""
    return [x.contiguous() for x in tensors]


def _like(tensors: Tensors, wanted: Sequence[bool]) -> list[Tensor]:
    pairs = zip(tensors, wanted, strict=True)
    return [x.new_empty(x.shape) for x, want in pairs if want]


def _product_shape(a: Tensor, b: Tensor) -> tuple[Any, ...]:
    return (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])


def _empty_product(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(_product_shape(a, b), dtype=result_dtype(a, b))


def _empty_maxplus(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    values = _empty_product(a, b)
    return values, values.new_empty(values.shape, dtype=torch.int64)


_OPERANDS = ("Tensor a", "Tensor b")
matmul, _ = define(Matmul, _OPERANDS, "int budget", _empty_product)
logmatmulexp, _ = define(LogMatmulExp, _OPERANDS, "int budget", _empty_product)
maxplus_matmul, _ = define(MaxPlus, _OPERANDS, "int budget", _empty_maxplus)


_CHAIN_INPUTS = (
    "Tensor log_potentials",
    "Tensor? transitions",
    "Tensor? initial",
    "Tensor? final",
)
_CHAIN_OPTIONS = "bool[] in_logs, int? budget, Tensor? lengths"


def _empty_partition(*inputs: Tensor) -> Tensor:
    return inputs[0].new_empty(chain_batch(*inputs), dtype=result_dtype(*inputs))


def _empty_per_state(*inputs: Tensor, more: int = 0) -> Tensor:
    values, (steps, states) = _empty_partition(*inputs), inputs[0].shape[-2:]
    return values.new_empty((*values.shape, steps, states + more))


log_partition, log_partition_gradients = define(
    Partition, _CHAIN_INPUTS, _CHAIN_OPTIONS, _empty_partition
)
filtered, _ = define(Filtered, _CHAIN_INPUTS, _CHAIN_OPTIONS, partial(_empty_per_state, more=1))


def _define_messages(name: str) -> Any:
    """Return an operator for a method of `LogChain` that is not differentiable."""
    schema = f"({', '.join(_CHAIN_INPUTS)}, {_CHAIN_OPTIONS}) -> Tensor"

    def compute(*args: Any) -> Tensor:
        return Partition(*args[4:]).compute(name, *args[:4]).contiguous()

    return _operator(name, schema, compute, lambda *args: _empty_per_state(*args[:4]))


forward_messages = _define_messages("forward_messages")
backward_messages = _define_messages("backward_messages")
