"""Products of tensors that take part in autograd, transforms or compilation."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import array_api_compat.torch as torch_namespace
import torch

from arraylogchain._core.axes import Fold, fold
from arraylogchain._core.context import Context, shape_of
from arraylogchain._core.precision import SINGLE
from arraylogchain._inputs.arrays import are_readable, check_dtypes, prepare_inputs
from arraylogchain._inputs.tensors import check_tensors
from arraylogchain._products import certified, linear, maxplus
from arraylogchain._products.chainexp import (
    product_of_sequence,
    product_of_stack,
    sums_overflow,
    whole_maxima,
)
from arraylogchain._products.contraction import Multiply, evaluate
from arraylogchain._products.gradients import logmatmulexp_gradients
from arraylogchain._products.operand import PullbackInputs
from arraylogchain._torch import rules
from arraylogchain._torch.rules import Mask, Primal, Tensor, Tensors, call

# Above the logarithm of any finite number.
_INFINITE = 4096.0


class Product(rules.Operation):
    """A product of two operands, computed by functions of `_products`."""

    def __init__(self, budget: int) -> None:
        super().__init__()
        self.budget = budget

    def compute(self, function: Any, inputs: Tensors, *arrays: Tensor, options: Any = ()) -> Any:
        """Return the result of a function for operands, other tensors, the budget and options."""
        ctx, ready = prepare_inputs({"a": inputs[0], "b": inputs[1]})
        layout = fold(*map(shape_of, ready.values()))
        args = (*ready.values(), *rules.read(ctx, *arrays), self.budget, *options)
        with ctx.computing():
            return ctx.to_caller(function(ctx, layout, *args))


class Matmul(Product):
    """The matrix product, bilinear: all its derivatives are products and their gradients."""

    name = "matmul"

    def value(self, *inputs: Tensor) -> Tensor:
        return self.compute(linear.matmul, inputs)

    def gradients(
        self, residuals: Any, requested: Mask, out: Tensor, g: Tensor, *inputs: Any
    ) -> Any:
        return self.compute(linear.matmul_gradients, inputs, g, options=(requested,))

    def call_second(
        self, requested: Mask, out: Tensor, g: Tensor, *inputs_and_cotangents: Tensor
    ) -> Tensors:
        a, b, u, v = inputs_and_cotangents
        a_gradient, b_gradient = torch.zeros_like(a), torch.zeros_like(b)
        pairs = [(x, y) for x, y in ((u, b), (a, v)) if x is not None and y is not None]
        g_gradient = sum(call(Primal(self), *pair)[0] for pair in pairs) if requested[0] else None
        # The gradient with respect to an operand depends on its shape only, not on its values.
        if requested[1] and v is not None:
            (a_gradient,) = call(rules.Vjp(self, (True, False)), None, g, a, v)
        if requested[2] and u is not None:
            (b_gradient,) = call(rules.Vjp(self, (False, True)), None, g, u, b)
        return tuple(itertools.compress((g_gradient, a_gradient, b_gradient), requested))


def _log_gradients(
    ctx: Context, layout: Fold, a: Tensor, b: Tensor, out: Tensor, g: Tensor, *options: Any
) -> Any:
    return logmatmulexp_gradients(ctx, layout, PullbackInputs(a, b, out, g), *options)


class LogMatmulExp(Product):
    """The product in log space; its gradients are sums of g times softmax weights."""

    name = "logmatmulexp"
    keeps_value = True

    def value(self, *inputs: Tensor) -> Tensor:
        return self.compute(certified.logmatmulexp, inputs)

    def gradients(
        self, residuals: Any, requested: Mask, out: Tensor, g: Tensor, *inputs: Any
    ) -> Any:
        return self.compute(_log_gradients, inputs, out, g, options=(requested,))

    def second(
        self, requested: Mask, out: Tensor, g: Tensor, *inputs_and_cotangents: Tensor
    ) -> Tensors:
        """Return second derivatives, computed from products of weighted operands.

        Let ``p_ikj = exp(a_ik + b_kj - out_ij)`` be the softmax weights, u a nonnegative tangent of
        a, and ``out' = log(exp(a + log u) @ exp(b))``. Then the tangent of out is ``w_ij = sum_k
        p_ikj u_ik = exp(out'_ij - out_ij)``, and ``sum_i g_ij p_ikj u_ik`` is the gradient of out'
        with respect to b for the cotangent g w. A tangent of any sign is the difference of two
        nonnegative ones. With q the tangent of out for the tangents u and v of both operands, the
        gradients of the gradients are sums of ``g_ij p_ikj (u_ik + v_kj - q_ij)``.
        """
        dtype = torch.promote_types(out.dtype, torch.float32)
        arguments, g = (
            [x.to(dtype) for x in inputs_and_cotangents[:2]],
            g if g is None else g.to(dtype),
        )
        weights = [None if x is None else x.to(dtype) for x in inputs_and_cotangents[2:]]
        # Without the maxima of rows and columns, results and their rounding errors are small.
        maxima = [whole_maxima(torch_namespace, arguments[side], -1 - side) for side in (0, 1)]
        operands = [x - top for x, top in zip(arguments, maxima, strict=True)]
        plain = self.value(*operands)
        # The tangent is NaN for NaN in an operand, but not where +inf meets -inf.
        is_nan = arguments[0].isnan().any(-1, keepdim=True) | arguments[1].isnan().any(
            -2, keepdim=True
        )
        q = torch.where(is_nan, torch.nan, torch.zeros_like(plain))
        sums = [torch.zeros_like(x) for x in operands]
        for side, sign in itertools.product((0, 1), (1, -1)):
            x = weights[side]
            # NaN fails this test, and is not skipped.
            if x is None or (sign * x <= 0).all():
                continue
            shifted = list(operands)
            # Infinite tangents exceed all others, but add no NaN to terms that are -inf.
            logs = (sign * x).clamp(min=0).log().clamp(max=_INFINITE)
            shifted[side] = shifted[side] + logs
            value = self.value(*shifted)
            w = torch.where(torch.isfinite(plain), sign * torch.exp(value - plain), 0)
            q = q + w
            if g is not None:
                results = self.gradients(None, (side == 1, side == 0), value, g * w, *shifted)
                sums[1 - side] += results[1 - side]
        if g is None:
            return rules.cast([q], [out])
        gradients = [self.gradients(None, (True, True), plain, x, *operands) for x in (g, g * q)]
        for side, (x, by_g, by_gq) in enumerate(zip(weights, *gradients, strict=True)):
            sums[side] += (0 if x is None else x * by_g) - by_gq
        return tuple(
            itertools.compress(rules.cast((q, *sums), (g, *inputs_and_cotangents[:2])), requested)
        )


class LargestTerm(Product):
    """Indices of a max-plus product; integers have no derivatives."""

    name = "maxplus_matmul"

    def value(self, *inputs: Tensor) -> Tensor:
        return self.compute(maxplus.maxplus_matmul, inputs)[1]


def matmul(a: Tensor, b: Tensor, budget: int) -> Tensor:
    """Return `arraylogchain.matmul` of tensors, differentiable."""
    a, b, restore = _matrices(a, b)
    return restore(call(Primal(Matmul(budget)), a, b)[0])


def logmatmulexp(a: Tensor, b: Tensor, budget: int) -> Tensor:
    """Return `arraylogchain.logmatmulexp` of tensors, differentiable."""
    a, b, restore = _matrices(a, b)
    return restore(call(Primal(LogMatmulExp(budget)), a, b)[0])


def maxplus_matmul(a: Tensor, b: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """Return `arraylogchain.maxplus_matmul` of tensors; values are the terms at its indices."""
    a, b, restore = _matrices(a, b)
    (indices,) = call(Primal(LargestTerm(budget)), a.detach(), b.detach())
    rows, cols = (torch.arange(n, device=a.device) for n in indices.shape[-2:])
    if a.shape[-1] == 0:
        values = a.sum(-1, keepdim=True) + b.sum(-2, keepdim=True) - torch.inf
    else:
        values = entries(a, rows[:, None], indices, axes=2) + entries(b, indices, cols, axes=2)
    values = torch.where(torch.isfinite(values), values, values.detach())
    return restore(values), restore(indices)


def entries(x: Tensor, *trailing: Tensor, axes: int) -> Tensor:
    """Return x[..., *trailing] for indices that have `axes` axes after x's leading axes."""
    lead = x.shape[: x.ndim - len(trailing)]
    along = [
        torch.arange(n, device=x.device).reshape(-1, *(1,) * (len(lead) - 1 - axis + axes))
        for axis, n in enumerate(lead)
    ]
    return x[(*along, *trailing)]


def _matrices(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Any]:
    """Return operands with equal numbers of axes, and a function that drops added axes of a result.

    A vector becomes a matrix of one row or column, and results lose its axis. Missing batch axes
    are added with length one, so that a batch axis of vmap is one more axis in front.
    """
    _check_tensors({"a": a, "b": b})
    if a.ndim == b.ndim > 1:
        return a, b, lambda x: x
    fold(shape_of(a), shape_of(b))  # its error messages name the original shapes
    restore = (..., *(0 if x.ndim == 1 else slice(None) for x in (a, b)))
    a, b = a[None] if a.ndim == 1 else a, b[:, None] if b.ndim == 1 else b
    return a[(None,) * (b.ndim - a.ndim)], b[(None,) * (a.ndim - b.ndim)], lambda x: x[restore]


def logchainexp(arguments: Mapping[str, Tensor], budget: int) -> Tensor:
    """Return `arraylogchain.logchainexp` of tensors, differentiable.

    The tensors are by name, see `in_memory.named`.
    """
    _check_tensors(arguments)
    dtype, is_stack = rules.result_dtype(*arguments.values()), "matrices" in arguments
    wide = [x.to(torch.promote_types(dtype, torch.float32)) for x in arguments.values()]
    count = wide[0].shape[-3] if is_stack else len(wide)
    if are_readable(*wide) and sums_overflow(torch_namespace, wide, count, SINGLE):
        wide = [x.to(torch.float64) for x in wide]

    def multiply(a: Tensor, b: Tensor) -> tuple[Tensor, None]:
        return logmatmulexp(a, b, budget), None

    product: Any = product_of_stack if is_stack else product_of_sequence
    out, _ = product(torch_namespace, wide[0] if is_stack else wide, multiply, torch.float64)
    return through_finite(out.to(dtype))


def einsum(arguments: Mapping[str, Tensor], plan: Any, multiply: Multiply) -> Tensor:
    """Return an einsum of tensors, differentiable as products are."""
    _check_tensors(arguments)
    return through_finite(evaluate(torch_namespace, plan, list(arguments.values()), multiply)[0])


def through_finite(out: Tensor) -> Tensor:
    """Return a result without gradients where it is infinite."""
    return torch.where(torch.isinf(out), out.detach(), out)


def _check_tensors(arguments: Mapping[str, Any]) -> None:
    """Raise unless all arguments are dense tensors of real floating dtypes, as without autograd."""
    if not all(isinstance(x, torch.Tensor) for x in arguments.values()):
        prepare_inputs(arguments)  # raises
    check_tensors(arguments)
    check_dtypes(tuple([(name, x.dtype) for name, x in arguments.items()]), torch)
