"""Tangents and second derivatives of the log product, made of its values and gradients.

With the posterior weights ``p_ikj = exp(a_ik + b_kj - out_ij)``, numbers u of the first operand
that are not negative make, with ``out' = log(exp(a + log u) @ exp(b))``,

    w_ij = sum_k p_ikj u_ik = exp(out'_ij - out_ij),

and ``sum_i g_ij p_ikj u_ik`` is the gradient of out' with respect to b for the cotangent g w. Those
of any sign are the difference of two. Arrays of the size of the operands and of the product are
held beside the workspace.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from arraylogchain import _dispatch
from arraylogchain._context import Array, Context, whole_part
from arraylogchain._fold import Fold

# Above any logarithm: infinite numbers make sums infinite, but nothing of what weighs nothing.
_INFINITE = 4096.0

Pair = tuple[Array | None, Array | None]


def logmatmulexp_tangent(
    ctx: Context,
    layout: Fold,
    a: Array,
    b: Array,
    out: Array,
    da: Array | None,
    db: Array | None,
    budget: int,
) -> Array:
    """Return q_ij = sum_k p_ikj (da_ik + db_kj), the change of `out` with those of a and b."""
    product = _Product(ctx, layout, a, b, budget)
    q: Array = product.nothing
    for *_, w in product.weighted((da, db)):
        q = q + w
    return q


def logmatmulexp_second(
    ctx: Context,
    layout: Fold,
    a: Array,
    b: Array,
    out: Array,
    g: Array,
    u: Array | None,
    v: Array | None,
    budget: int,
) -> tuple[Array, Array, Array]:
    """Return the gradients of `logmatmulexp_gradients` itself.

    With (da, db) the gradients of sum(g * out), these are the gradients of sum(u * da) +
    sum(v * db) with respect to a, b and g; u or v may be None, for zeros. With q the tangent of u
    and v, the first two are the sums of ``g_ij p_ikj (u_ik + v_kj - q_ij)``, and the last is q.
    """
    product = _Product(ctx, layout, a, b, budget)
    g = ctx.load(g, ctx.precision)
    q: Array = product.nothing
    sums: list[Array] = [0.0, 0.0]
    for side, operands, value, w in product.weighted((u, v)):
        q = q + w
        wanted = (side == 1, side == 0)
        sums[1 - side] += product.gradients(operands, value, g * w, wanted)[1 - side]
    plain = product.gradients(product.operands, product.value, g, (True, True))
    less = product.gradients(product.operands, product.value, g * q, (True, True))
    for side, x in enumerate((u, v)):
        own = 0.0 if x is None else ctx.load(x, ctx.precision) * plain[side]
        sums[side] = sums[side] + own - less[side]
    return sums[0], sums[1], q


class _Product:
    """A log product, and others that differ from it by weights of their terms."""

    def __init__(self, ctx: Context, layout: Fold, a: Array, b: Array, budget: int) -> None:
        xp = ctx.xp
        self.ctx = replace(ctx, result_name=ctx.precision.name)
        self.layout, self.budget = layout, budget
        given = [ctx.load(x, ctx.precision) for x in (a, b)]
        tops = [
            (xp.max if x.shape[axis] else xp.sum)(x, axis=axis, keepdims=True)
            for x, axis in zip(given, (-1, -2), strict=True)
        ]
        # What entries have in common is taken off: results are then small, and so are roundings.
        self.operands = [
            x - whole_part(ctx, top, ctx.precision) for x, top in zip(given, tops, strict=True)
        ]
        self.value = self._multiply(*self.operands)
        # Through NaN the derivatives are NaN, unless it is +inf that met -inf.
        is_nan = xp.isnan(tops[0]) | xp.isnan(tops[1])
        self.nothing = xp.where(is_nan, math.nan, xp.zeros_like(self.value))

    def _multiply(self, a: Array, b: Array) -> Array:
        return _dispatch.product("logmatmulexp", self.ctx, self.layout, a, b, self.budget)

    def gradients(
        self, operands: list[Array], value: Array, g: Array, wanted: tuple[bool, bool]
    ) -> tuple[Array, Array]:
        """Return the gradients of a product for the cotangent g."""
        arguments = (*operands, value, g, self.budget, wanted)
        found: tuple[Array, Array] = _dispatch.product(
            "logmatmulexp_gradients", self.ctx, self.layout, *arguments
        )
        return found

    def weighted(self, weights: Pair) -> Iterator[tuple[int, list[Array], Array, Array]]:
        """Yield side, operands, their product, and w, for both signs of weights of both sides."""
        xp = self.ctx.xp
        for side, x in enumerate(weights):
            for sign in (1.0, -1.0) if x is not None else ():
                part = sign * self.ctx.load(x, self.ctx.precision)
                # False for NaN.
                if xp.all(part <= 0):
                    continue
                logs = xp.log(xp.where(part <= 0, 0.0, part))
                operands = list(self.operands)
                operands[side] = operands[side] + xp.where(logs > _INFINITE, _INFINITE, logs)
                value = self._multiply(*operands)
                w = sign * xp.exp(value - self.value)
                yield side, operands, value, xp.where(xp.isfinite(self.value), w, 0.0)
