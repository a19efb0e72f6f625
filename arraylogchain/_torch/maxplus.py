"""The max-plus product: it takes one term of each sum, and is linear in the operands there."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from arraylogchain import _dispatch
from arraylogchain._arrays import enter
from arraylogchain._context import shape_of
from arraylogchain._fold import Shape, fold
from arraylogchain._torch.functions import (
    Tensor,
    apply,
    batched,
    on_arrays,
    save,
    uncompiled,
)


class Value(Function):  # type: ignore[misc]
    """(budget, a, b) to (values, indices)."""

    @staticmethod
    @uncompiled
    def forward(budget: int, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        def compute(ctx: Any, a: Any, b: Any) -> Any:
            layout = fold(shape_of(a), shape_of(b))
            return _dispatch.product("maxplus_matmul", ctx, layout, a, b, budget)

        values, indices = on_arrays(compute, a=a, b=b)
        return values, indices

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.budget, a, b = inputs
        ctx.like = [(tuple(x.shape), x.dtype) for x in (a, b)]
        ctx.mark_non_differentiable(output[1])
        save(ctx, differentiable(*output))

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, _: Tensor | None) -> Any:
        if g is None:
            return None, None, None
        (indices,) = ctx.saved_tensors
        (a_shape, a_dtype), (b_shape, b_dtype) = ctx.like
        of_a, of_b = apply(Gradients, ctx.budget, a_shape, b_shape, indices, g)
        needs = ctx.needs_input_grad
        return None, of_a.to(a_dtype) if needs[1] else None, of_b.to(b_dtype) if needs[2] else None

    @staticmethod
    def jvp(ctx: Any, _: None, da: Tensor | None, db: Tensor | None) -> Any:
        (indices,) = ctx.saved_tensors
        tangents = _filled((da, db), [shape for shape, _ in ctx.like])
        dtype = torch.promote_types(*(dtype for _, dtype in ctx.like))
        return apply(Tangent, ctx.budget, indices, *(x.to(dtype) for x in tangents)), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, budget: int, a: Tensor, b: Tensor) -> Any:
        ready = batched(info.batch_size, in_dims[1:], (a, b), (False, False))
        return apply(Value, budget, *ready), (0, 0)


class Gradients(Function):  # type: ignore[misc]
    """(budget, a_shape, b_shape, indices, g) to the gradients of both operands."""

    @staticmethod
    @uncompiled
    def forward(budget: int, a_shape: Shape, b_shape: Shape, indices: Tensor, g: Tensor) -> Any:
        def both(ctx: Any, indices: Tensor, g: Tensor) -> Any:
            shapes = (a_shape, b_shape)
            return _dispatch.product(
                "maxplus_gradients", ctx, fold(*shapes), shapes, indices, g, None, budget
            )

        return _with_indices(both, indices, g=g)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.budget, *ctx.shapes, indices, g = inputs
        ctx.dtype = g.dtype
        save(ctx, indices)

    @staticmethod
    def backward(ctx: Any, u: Tensor | None, v: Tensor | None) -> Any:
        if u is None and v is None:
            return None, None, None, None, None
        (indices,) = ctx.saved_tensors
        of_g = apply(Tangent, ctx.budget, indices, *_filled((u, v), ctx.shapes))
        return None, None, None, None, of_g.to(ctx.dtype)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        (indices,) = ctx.saved_tensors
        return apply(Gradients, ctx.budget, *ctx.shapes, indices, tangents[4])

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, budget: int, a_shape: Shape, b_shape: Shape, *tensors: Tensor
    ) -> Any:
        size = info.batch_size
        ready = batched(size, in_dims[3:], tensors, (True, True))
        return apply(Gradients, budget, (size, *a_shape), (size, *b_shape), *ready), (0, 0)


class Tangent(Function):  # type: ignore[misc]
    """(budget, indices, da, db) to the sums of their entries at the indices."""

    @staticmethod
    @uncompiled
    def forward(budget: int, indices: Tensor, da: Tensor, db: Tensor) -> Tensor:
        def tangent(ctx: Any, indices: Any, da: Any, db: Any) -> Any:
            layout = fold(shape_of(da), shape_of(db))
            return _dispatch.product("maxplus_tangent", ctx, layout, da, db, indices, budget)

        return _with_indices(tangent, indices, da=da, db=db)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.budget, indices, da, db = inputs
        ctx.shapes = tuple(da.shape), tuple(db.shape)
        save(ctx, indices)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:
        if g is None:
            return None, None, None, None
        (indices,) = ctx.saved_tensors
        return (None, None, *apply(Gradients, ctx.budget, *ctx.shapes, indices, g))

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, u: Tensor | None, v: Tensor | None) -> Tensor:
        (indices,) = ctx.saved_tensors
        return apply(Tangent, ctx.budget, indices, *_filled((u, v), ctx.shapes))

    @staticmethod
    def vmap(info: Any, in_dims: Any, budget: int, *tensors: Tensor) -> Any:
        ready = batched(info.batch_size, in_dims[1:], tensors, (True, True, True))
        return apply(Tangent, budget, *ready), 0


def differentiable(values: Tensor, indices: Tensor) -> Tensor:
    """Return the indices to differentiate by: -1 where a value is infinite or NaN.

    They are what is kept, not the values, which a caller may go on to change in place.
    """
    return torch.where(torch.isfinite(values.detach()), indices, -1)


def _with_indices(function: Any, indices: Tensor, **tensors: Tensor) -> Any:
    ctx, ready = enter(tensors)
    given = list(ready.values())
    # `enter` takes floating-point numbers alone; indices follow where it has put those.
    at = indices if isinstance(given[0], torch.Tensor) else indices.numpy()
    with ctx.computing():
        result = function(ctx, at, *given)
    if isinstance(result, tuple):
        return tuple(ctx.hand_back(x) for x in result)
    return ctx.hand_back(result)


def _filled(tensors: Any, shapes: Any) -> list[Tensor]:
    """Return zeros in the place of what is None."""
    like = next(x for x in tensors if x is not None)
    return [
        like.new_zeros(()).expand(shape) if x is None else x
        for x, shape in zip(tensors, shapes, strict=True)
    ]
