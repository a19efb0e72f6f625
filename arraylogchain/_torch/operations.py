"""The products that are operations: their values and derivatives, from array-level functions."""

from __future__ import annotations

from typing import Any

import torch

from arraylogchain import products
from arraylogchain._array.products import gradients as rules
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
    on_arrays,
)


class Matmul(Operation):
    """Bilinear: its derivatives of every order are made of it and its gradients."""

    name = "matmul"

    def __init__(self, budget: int) -> None:
        self.budget = budget

    def value(self, memo: Memo | None, *inputs: Tensor) -> Tensor:
        a, b = inputs
        return on_arrays(lambda ctx, a, b: products._matmul(ctx, a, b, self.budget), a=a, b=b)

    def gradients(
        self, memo: Memo | None, wanted: Wanted, out: Tensor, g: Tensor, *inputs: Tensor
    ) -> Tensors:
        def both(ctx: Any, a: Tensor, b: Tensor, g: Tensor) -> Any:
            return rules.matmul_gradients(ctx, a, b, g, self.budget, pair)

        pair = (wanted[0], wanted[1])
        a, b = inputs
        return chosen(cast(on_arrays(both, a=a, b=b, g=g), inputs), wanted)

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


class LogMatmulExp(Operation):
    """Its gradients are sums of g times the share that a term has in its entry."""

    name = "logmatmulexp"
    keeps_value = True

    def __init__(self, budget: int) -> None:
        self.budget = budget

    def value(self, memo: Memo | None, *inputs: Tensor) -> Tensor:
        a, b = inputs
        return on_arrays(lambda ctx, a, b: products._logmatmulexp(ctx, a, b, self.budget), a=a, b=b)

    def gradients(
        self, memo: Memo | None, wanted: Wanted, out: Tensor, g: Tensor, *inputs: Tensor
    ) -> Tensors:
        def both(ctx: Any, a: Tensor, b: Tensor, out: Tensor, g: Tensor) -> Any:
            return rules.logmatmulexp_gradients(ctx, a, b, out, g, self.budget, pair)

        pair = (wanted[0], wanted[1])
        a, b = inputs
        return chosen(cast(on_arrays(both, a=a, b=b, out=out, g=g), inputs), wanted)

    def tangent(self, out: Tensor, inputs: Tensors, tangents: Tensors) -> Tensor:
        def along(ctx: Any, *arrays: Any) -> Any:
            a, b, out, da, db = arrays
            return rules.logmatmulexp_tangent(ctx, a, b, out, da, db, self.budget)

        (a, b), (da, db) = inputs, tangents
        return on_arrays(along, a=a, b=b, out=out, da=da, db=db).to(out.dtype)

    def second(
        self, wanted: Wanted, out: Tensor, g: Tensor, inputs: Tensors, cotangents: Tensors
    ) -> Tensors:
        def of_gradients(ctx: Any, *arrays: Any) -> Any:
            a, b, out, g, u, v = arrays
            return rules.logmatmulexp_second(ctx, a, b, out, g, u, v, self.budget)

        (a, b), (u, v) = inputs, cotangents
        of_a, of_b, of_g = on_arrays(of_gradients, a=a, b=b, out=out, g=g, u=u, v=v)
        return chosen(cast((of_g, of_a, of_b), (g, a, b)), wanted)
