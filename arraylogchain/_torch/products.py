"""The products of tensors that take part in autograd, transforms or compilation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import array_api_compat.torch as torch_namespace
import torch

from arraylogchain import products
from arraylogchain._array.products.pair_tree import PairTree
from arraylogchain._context import shape_of
from arraylogchain._einsum.equations import Contractions
from arraylogchain._einsum.evaluation import Multiply, evaluate
from arraylogchain._fold import Shape, fold
from arraylogchain._torch.functions import (
    Tensor,
    Value,
    check_tensors,
    new_memo,
    record,
    result_dtype,
)
from arraylogchain._torch.operations import LogMatmulExp, Matmul, MaxPlus, Product
from arraylogchain._torch.tracing import is_compiling, operators


def matmul(a: Tensor, b: Tensor, budget: int) -> Tensor:
    """Return `arraylogchain.matmul` of tensors, differentiable."""
    return _product(Matmul, a, b, budget)


def logmatmulexp(a: Tensor, b: Tensor, budget: int) -> Tensor:
    """Return `arraylogchain.logmatmulexp` of tensors, differentiable."""
    return _product(LogMatmulExp, a, b, budget)


def maxplus_matmul(a: Tensor, b: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """Return `arraylogchain.maxplus_matmul` of tensors, differentiable."""
    values, indices = _product(MaxPlus, a, b, budget)
    return values, indices


def _product(operation: type[Product], a: Tensor, b: Tensor, budget: int) -> Any:
    a, b, lacking = matrices(a, b)
    if is_compiling():
        out = getattr(operators(), operation.name)(a, b, budget)
    else:
        out = record(Value, operation(budget), new_memo(), a, b)
    if operation.has_integers:
        return tuple(drop(x, lacking) for x in out)
    return drop(out, lacking)


def drop(out: Tensor, axes: Shape) -> Tensor:
    """Return a product without the axes that 1-D operands lack."""
    for axis in axes:
        out = out.squeeze(axis)
    return out


def matrices(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Shape]:
    """Return operands with equal numbers of axes, and which axes of the product to drop.

    With that, a batch axis of vmap is one more axis in front.
    """
    check_tensors(a=a, b=b)
    if a.ndim == b.ndim > 1:
        return a, b, ()
    if not is_compiling():
        fold(shape_of(a), shape_of(b))  # the error messages are about the shapes as given
    lacking = ((-1,) if b.ndim == 1 else ()) + ((-2 + (b.ndim == 1),) if a.ndim == 1 else ())
    a = a.unsqueeze(0) if a.ndim == 1 else a
    b = b.unsqueeze(1) if b.ndim == 1 else b
    a = a[(None,) * (b.ndim - a.ndim)] if a.ndim < b.ndim else a
    b = b[(None,) * (a.ndim - b.ndim)] if b.ndim < a.ndim else b
    return a, b, lacking


def logchainexp_stack(stack: Tensor, budget: int) -> Tensor:
    """Multiply matrices [..., n, K, K] in neighbouring pairs, differentiably."""
    products.check_stack(stack.shape)
    return _through_finite(_tree(stack.dtype, stack.device, budget).stack(stack, stack.dtype))


def logchainexp_sequence(given: Mapping[str, Tensor], budget: int) -> Tensor:
    """Multiply [..., K_i, K_{i+1}] in the cheapest order, differentiably."""
    check_tensors(**given)
    if not is_compiling():
        products.check_sequence({name: shape_of(x) for name, x in given.items()})
    matrices = list(given.values())
    dtype = result_dtype(*matrices)
    return _through_finite(_tree(dtype, matrices[0].device, budget).sequence(matrices, dtype))


def einsum(given: Mapping[str, Tensor], plan: Contractions, multiply: Multiply) -> Tensor:
    """Return an einsum of tensors, differentiable as products are."""
    check_tensors(**given)
    return _through_finite(evaluate(torch_namespace, plan, list(given.values()), multiply)[0])


def _through_finite(out: Tensor) -> Tensor:
    """Return a result without gradients where it is infinite."""
    return torch.where(torch.isinf(out), out.detach(), out)


def _tree(dtype: Any, device: Any, budget: int) -> PairTree:
    computed = torch.promote_types(dtype, torch.float32)
    widest = torch.float32 if device.type == "mps" else torch.float64

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        return logmatmulexp(a, b, budget)

    return PairTree(torch_namespace, computed, widest, multiply)
