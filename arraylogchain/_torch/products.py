"""The products of tensors that take part in autograd, transforms or compilation."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch

from arraylogchain import products
from arraylogchain._array.products.sequence import multiplication_order
from arraylogchain._context import shape_of
from arraylogchain._fold import Shape, fold
from arraylogchain._torch import maxplus
from arraylogchain._torch.functions import (
    Tensor,
    Value,
    apply,
    check_tensors,
)
from arraylogchain._torch.operations import LogMatmulExp, Matmul
from arraylogchain._torch.tracing import is_compiling, operators


def matmul(a: Tensor, b: Tensor, budget: int) -> Tensor:
    """Return `arraylogchain.matmul` of tensors, differentiable."""
    return _product(Matmul, a, b, budget)


def logmatmulexp(a: Tensor, b: Tensor, budget: int) -> Tensor:
    """Return `arraylogchain.logmatmulexp` of tensors, differentiable."""
    return _product(LogMatmulExp, a, b, budget)


def maxplus_matmul(a: Tensor, b: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """Return `arraylogchain.maxplus_matmul` of tensors, differentiable."""
    a, b, lacking = matrices(a, b)
    if is_compiling():
        values, indices = operators().maxplus_matmul(a, b, budget)
    else:
        values, indices = apply(maxplus.Value, budget, a, b)
    return drop(values, lacking), drop(indices, lacking)


def _product(operation: type[Matmul | LogMatmulExp], a: Tensor, b: Tensor, budget: int) -> Tensor:
    a, b, lacking = matrices(a, b)
    if is_compiling():
        out = getattr(operators(), operation.name)(a, b, budget)
    else:
        out = apply(Value, operation(budget), None, a, b)
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
    *batch, count, size, _ = stack.shape
    if count == 0:
        identity = torch.eye(size, dtype=stack.dtype, device=stack.device).log()
        return identity.expand(*batch, size, size).clone()
    if stack.numel() == 0:
        return stack[..., 0, :, :].clone()
    product = _Shifted(stack)
    while product.rest.shape[-3] > 1:
        product = product.in_pairs(budget)
    return product.whole(stack.dtype)[..., 0, :, :]


def logchainexp_sequence(given: Mapping[str, Tensor], budget: int) -> Tensor:
    """Multiply [..., K_i, K_{i+1}] in the cheapest order, differentiably."""
    check_tensors(**given)
    if not is_compiling():
        products.check_sequence({name: shape_of(x) for name, x in given.items()})
    matrices = list(given.values())
    dtype = reduce(torch.promote_types, (x.dtype for x in matrices))
    held = [_Shifted(x) for x in matrices]
    sizes = [int(matrices[0].shape[-2]), *(int(x.shape[-1]) for x in matrices)]
    for i, j in multiplication_order(sizes):
        held[i] = held[i].times(held[j], budget)
    return held[0].whole(dtype)


class _Shifted:
    """Matrices of logarithms without the whole part of their maxima, which are added up apart.

    The rounding of a product then depends on the range of its entries, not on how large they are.
    """

    def __init__(self, x: Tensor, shift: Tensor | None = None) -> None:
        x = x.float() if x.element_size() < 4 else x
        if x.numel():
            # A shift is a constant to the derivative: it is taken off, and added again.
            top = x.detach().amax((-2, -1), keepdim=True).round()
            top = torch.where(torch.isfinite(top), top, 0)
        else:
            top = x.new_zeros((*x.shape[:-2], 1, 1))
        self.rest = x - top
        top = top if x.device.type == "mps" else top.double()
        self.shift = top if shift is None else top + shift

    def times(self, other: _Shifted, budget: int) -> _Shifted:
        return _Shifted(logmatmulexp(self.rest, other.rest, budget), self.shift + other.shift)

    def in_pairs(self, budget: int) -> _Shifted:
        even = self.rest.shape[-3] // 2 * 2
        left, right = (self._every(slice(i, even, 2)) for i in (0, 1))
        pairs = left.times(right, budget)
        odd = self._every(slice(even, None))
        pairs.rest = torch.cat((pairs.rest, odd.rest), -3)
        pairs.shift = torch.cat((pairs.shift, odd.shift), -3)
        return pairs

    def _every(self, which: slice) -> _Shifted:
        part = object.__new__(_Shifted)
        part.rest, part.shift = self.rest[..., which, :, :], self.shift[..., which, :, :]
        return part

    def whole(self, dtype: Any) -> Tensor:
        # Of products this is so already; a single matrix is an operand.
        rest = torch.where(torch.isinf(self.rest), self.rest.detach(), self.rest)
        return (rest + self.shift).to(dtype)
