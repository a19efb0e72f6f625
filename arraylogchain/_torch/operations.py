"""The products that are operations: their values and derivatives, from array-level functions."""

from __future__ import annotations

from typing import Any

import torch

from arraylogchain import _dispatch
from arraylogchain._arrays import enter
from arraylogchain._context import Context, shape_of
from arraylogchain._fold import fold
from arraylogchain._torch.functions import (
    Gradients,
    Memo,
    Operation,
    Tensor,
    Tensors,
    Value,
    Wanted,
    apply,
    cast,
    chosen,
    needing_values,
    read,
    result_dtype,
)

Entered = tuple[Context, Any, Any]


class Product(Operation):
    """A product of two operands, by the name of its operation."""

    def __init__(self, budget: int) -> None:
        super().__init__()
        self.budget = budget

    def value(self, memo: Memo | None, *inputs: Tensor) -> Any:
        entered = _enter(inputs)
        if memo is not None:
            memo.left = entered
        return self.compute(self.name, entered)

    def gradients(
        self, memo: Memo | None, wanted: Wanted, out: Tensor, g: Tensor, *inputs: Tensor
    ) -> Tensors:
        left = None if memo is None else memo.take()
        others = (g,) if out is None else (out, g)
        entered = _enter(inputs) if left is None else left
        found = self.compute(f"{self.name}_gradients", entered, *others, options=(wanted,))
        return chosen(found, wanted)

    def compute(
        self, operation: str, entered: Entered, *others: Tensor | None, options: Any = ()
    ) -> Any:
        """Compute an operation on the product of operands, which other tensors belong to."""
        ctx, a, b = entered
        read_too = [x if x is None else read(ctx, x) for x in others]
        layout = fold(shape_of(a), shape_of(b))
        with ctx.computing():
            found = _dispatch.product(
                operation, ctx, layout, a, b, *read_too, self.budget, *options
            )
            return ctx.handed_back(found)


def _enter(inputs: Tensors) -> Entered:
    a, b = inputs
    with needing_values():
        ctx, ready = enter({"a": a, "b": b})
    return ctx, ready["a"], ready["b"]


class Matmul(Product):
    """Bilinear: its derivatives of every order are made of it and its gradients."""

    name = "matmul"

    def apply_tangent(self, out: Tensor, inputs: Tensors, tangents: Tensors) -> Tensor:
        (a, b), (da, db) = inputs, tangents
        pairs = [(x, y) for x, y in ((da, b), (a, db)) if x is not None and y is not None]
        return sum(apply(Value, self, None, x, y) for x, y in pairs)

    def apply_second(
        self, wanted: Wanted, out: Tensor, g: Tensor, inputs: Tensors, cotangents: Tensors
    ) -> Tensors:
        (a, b), (u, v) = inputs, cotangents
        of_g = self.apply_tangent(None, inputs, cotangents) if wanted[0] else None
        of_a = of_b = None
        # Of the operand whose gradient is taken, the gradient needs no more than the shape.
        if wanted[1]:
            of_a = torch.zeros_like(a) if v is None else self._gradient((True, False), g, a, v)
        if wanted[2]:
            of_b = torch.zeros_like(b) if u is None else self._gradient((False, True), g, u, b)
        return chosen((of_g, of_a, of_b), wanted)

    def _gradient(self, wanted: Wanted, g: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return apply(Gradients, self, None, wanted, None, g, a, b)[0]


class LogMatmulExp(Product):
    """Its gradients are sums of g times the share that a term has in its entry."""

    name = "logmatmulexp"

    def kept(self, output: Tensor) -> Tensor:
        return output

    def second(
        self, wanted: Wanted, out: Tensor, g: Tensor | None, inputs: Tensors, cotangents: Tensors
    ) -> Tensors:
        entered = _enter(inputs)
        if g is None:
            tangent = self.compute("logmatmulexp_tangent", entered, out, *cotangents)
            return (tangent.to(out.dtype),)
        of_a, of_b, of_g = self.compute("logmatmulexp_second", entered, out, g, *cotangents)
        return chosen(cast((of_g, of_a, of_b), (g, *inputs)), wanted)


class MaxPlus(Product):
    """It takes one term of each sum, and is linear in the operands there."""

    name = "maxplus_matmul"
    has_integers = is_linear = True

    def kept(self, output: tuple[Tensor, Tensor]) -> Tensor:
        """Return the indices to differentiate by: -1 where a value is infinite or NaN.

        They are what is kept, not the values, which a caller may go on to change in place.
        """
        values, indices = output
        return torch.where(torch.isfinite(values.detach()), indices, -1)

    def gradients(
        self, memo: Memo | None, wanted: Wanted, out: Tensor, g: Tensor, *inputs: Tensor
    ) -> Tensors:
        ctx, *operands = _enter(inputs)
        shapes = tuple(map(shape_of, operands))
        arguments = (ctx, fold(*shapes), shapes, read(ctx, out), read(ctx, g), None, self.budget)
        with ctx.computing():
            found = ctx.handed_back(_dispatch.product("maxplus_gradients", *arguments))
        return chosen(cast(found, inputs), wanted)

    def second(
        self, wanted: Wanted, out: Tensor, g: Tensor | None, inputs: Tensors, cotangents: Tensors
    ) -> Tensors:
        tangents = (
            x.new_zeros(()).expand(x.shape) if dx is None else dx
            for x, dx in zip(inputs, cotangents, strict=True)
        )
        found = self.compute("maxplus_tangent", _enter(tuple(tangents)), out)
        return (found.to(result_dtype(*inputs)),)

    def apply_second(
        self, wanted: Wanted, out: Tensor, g: Tensor, inputs: Tensors, cotangents: Tensors
    ) -> Tensors:
        of_g = self.apply_tangent(out, inputs, cotangents).to(g.dtype) if wanted[0] else None
        return chosen((of_g, *map(torch.zeros_like, inputs)), wanted)
