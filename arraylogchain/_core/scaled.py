"""Numbers whose scale, whole nats and powers of two, is kept apart, so that it is never rounded."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from arraylogchain._core.context import Array, Context

# log(2) in two parts. The first has 9 bits: its product with an integer is exact up to 44 bits.
LN2_HIGH = 355 / 512
LN2_LOW = -2.1219444005469057e-4


def add_scale(logs: Array, shifts: Array, exponents: Array) -> Array:
    """Return logs + shifts + exponents * log(2); large parts are summed first, and may cancel."""
    return (shifts + exponents * LN2_HIGH + logs) + exponents * LN2_LOW


def whole_maximum(xp: Any, x: Array, axis: Any = -1) -> Array:
    """Return maxima rounded to integers, 0 where they are not finite; axes are kept."""
    return whole_part(xp, xp.max(x, axis=axis, keepdims=True))


def whole_part(xp: Any, x: Array) -> Array:
    """Return x rounded to integers, 0 where it is not finite."""
    return finite_or_zero(xp, xp.round(x))


def finite_or_zero(xp: Any, x: Array) -> Array:
    """Return x, 0 where it is not finite."""
    return xp.where(xp.isfinite(x), x, 0.0)


def split_log(ctx: Context, x: Array, is_log: bool) -> tuple[Array, Array]:
    """Return the logarithms of weights in two parts, high and remainder.

    The high parts are multiples of 2**-9, whose sums and differences are exact; they are infinite
    or NaN where the logarithms are. Remainders are at most about 1.
    """
    xp, x = ctx.xp, ctx.load(x, ctx.widest)
    high = xp.round(x if is_log else xp.log2(x))
    remainder = x - high if is_log else xp.log(ctx.scaled(x, -high)) + high * LN2_LOW
    remainder = xp.where(xp.isfinite(high), remainder, xp.zeros_like(remainder))
    return high if is_log else high * LN2_HIGH, remainder


def exp_of_split(ctx: Context, high: Array, remainder: Array) -> Array:
    """Return exp(high + remainder) in the widest precision, for parts as of `split_log`."""
    xp, high, remainder = ctx.xp, ctx.load(high, ctx.widest), ctx.load(remainder, ctx.widest)
    # Results beyond this are 0 or infinite.
    limit = 3.0 * ctx.widest.top
    exponents = xp.clip(xp.round((high + remainder) / math.log(2.0)), -limit, limit)
    return ctx.scaled(
        xp.exp((high - exponents * LN2_HIGH) + (remainder - exponents * LN2_LOW)), exponents
    )


def scaled_logs(ctx: Context, x: Array) -> tuple[Array, Array]:
    """Return logarithms near 0 of weights [..., K], and the exponents [...] of their maxima.

    The exponent is kept apart, as it would be rounded in a logarithm. That of each weight is split
    off too: dividing by the common one could underflow.
    """
    xp, (mantissas, exponents) = ctx.xp, split(ctx, x)
    _, top = split(ctx, xp.max(x, axis=-1, keepdims=True))
    relative_exponents = ctx.cast(exponents - top, x.dtype)
    return add_scale(xp.log(mantissas), 0.0, relative_exponents), ctx.load(top[..., 0], ctx.widest)


def split(ctx: Context, x: Array) -> tuple[Array, Array]:
    """Return mantissas near 1 of weights, and their exponents."""
    if ctx.is_numpy:
        return np.frexp(x)
    exponents = ctx.xp.floor(ctx.xp.log2(x))
    exponents = ctx.xp.where(ctx.xp.isfinite(exponents), exponents, 0.0)
    return ctx.scaled(x, -exponents), exponents
