"""The products: check the arguments, choose the tiles, run."""

from __future__ import annotations

import math
from typing import NamedTuple

from arraylogchain import _tiled
from arraylogchain._arrays import Array, Context, enter, quiet, shape_of
from arraylogchain._certified import CertifiedKernel
from arraylogchain._fold import Fold, fold
from arraylogchain._kernels import LinearKernel, MaxPlusKernel
from arraylogchain._tiling import check_workspace

__all__ = ["MaxPlusProduct", "logmatmulexp", "matmul", "maxplus_matmul"]


class MaxPlusProduct(NamedTuple):
    """Values and indices of a max-plus product; see `maxplus_matmul`."""

    values: Array
    indices: Array


def matmul(a: Array, b: Array, /, *, workspace: int | None = None) -> Array:
    """Matrix product that never expands a broadcast axis.

    As ``a @ b``, but a batch axis that only one operand has is folded into its rows or columns
    instead of being copied along the other operand, in the forward computation and in gradients.

    Parameters
    ----------
    a : array [..., M, K] or [K]
        float16, bfloat16, float32 or float64; half precisions are computed in float32.
    b : array [..., K, N] or [K]
        Of the same library and device. Batch axes broadcast.
    workspace : int, optional
        Bytes that temporaries may take beyond inputs and output. Default: 64 MiB.

    Returns
    -------
    array [..., M, N]
        Axes that a 1-D operand lacks are left out, as `numpy.matmul` does.

    Raises
    ------
    TypeError
        If an operand is no array of real floating-point numbers, or their libraries differ.
    ValueError
        If shapes or devices do not fit, or the workspace is too small.

    Examples
    --------
    One weight matrix for each of 8 heads, shared by 1000 rows:

    >>> import numpy as np
    >>> x, weights = np.ones((1000, 8, 1, 64)), np.ones((8, 64, 32))
    >>> matmul(x, weights).shape
    (1000, 8, 1, 32)
    """
    budget = check_workspace(workspace)
    ctx, given = enter({"a": a, "b": b})
    a, b = given["a"], given["b"]
    layout = fold(shape_of(a), shape_of(b))
    with quiet():
        if _is_empty(layout):
            out = ctx.xp.zeros(layout.out_shape, dtype=ctx.result_dtype, device=ctx.device)
        else:
            kernel = LinearKernel(ctx, layout.sizes, budget, layout.copies)
            (out,) = _tiled.run(ctx, layout, a, b, kernel, [ctx.result_dtype])
    return ctx.hand_back(out)


def logmatmulexp(a: Array, b: Array, /, *, workspace: int | None = None) -> Array:
    """Matrix product in log space, ``log(exp(a) @ exp(b))``, exact on any range.

    Equal to ``scipy.special.logsumexp(a[..., :, :, None] + b[..., None, :, :], axis=-2)``, the
    infinities and NaN included, without that array, at nearly the speed of ``a @ b``.

    Parameters
    ----------
    a : array [..., M, K] or [K]
        Logarithms; -inf is an exact zero. float16, bfloat16, float32 or float64; half precisions
        are computed in float32.
    b : array [..., K, N] or [K]
        Of the same library and device. Batch axes broadcast and are never expanded.
    workspace : int, optional
        Bytes that temporaries may take beyond inputs and output. Default: 64 MiB.

    Returns
    -------
    array [..., M, N]
        Within ``eps * (2 * abs(exact) + G + c)`` of the exact result: c grows no faster than K
        (typically as its root), and G, the distance between the sum of the two operands' maxima
        and the result, is below 66 in float32 and 670 in float64.

    Raises
    ------
    TypeError
        If an operand is no array of real floating-point numbers, or their libraries differ.
    ValueError
        If shapes or devices do not fit, or the workspace is too small.

    Notes
    -----
    One matrix multiply of ``exp(a - shift)`` and ``exp(b - shift)`` proves most entries right: a
    sum above ``5 * K * tiny / eps`` cannot have lost anything to underflow. The others, where the
    operands' maxima do not meet, are computed again, in float64 or with their own maximum.

    Examples
    --------
    >>> import numpy as np
    >>> a = np.array([[0.0, -800.0]])
    >>> logmatmulexp(a, np.array([[-800.0], [0.0]]))  # exp(-800) is 0 in float64
    array([[-799.30685282]])
    """
    budget = check_workspace(workspace)
    ctx, given = enter({"a": a, "b": b})
    a, b = given["a"], given["b"]
    layout = fold(shape_of(a), shape_of(b))
    with quiet():
        if _is_empty(layout):
            out = ctx.xp.full(
                layout.out_shape, -math.inf, dtype=ctx.result_dtype, device=ctx.device
            )
        else:
            out = certified_product(ctx, layout, a, b, budget)
    return ctx.hand_back(out)


def certified_product(ctx: Context, layout: Fold, a: Array, b: Array, budget: int) -> Array:
    """Run `logmatmulexp` on arrays that are checked already; no axis is empty."""
    kernel = CertifiedKernel(ctx, layout.sizes, budget, layout.copies)
    (out,) = _tiled.run(ctx, layout, a, b, kernel, [ctx.result_dtype])
    return out


def maxplus_matmul(a: Array, b: Array, /, *, workspace: int | None = None) -> MaxPlusProduct:
    """Matrix product of the max-plus algebra, ``max_k a[i, k] + b[k, j]``.

    Parameters
    ----------
    a : array [..., M, K] or [K]
        float16, bfloat16, float32 or float64; half precisions are computed in float32.
    b : array [..., K, N] or [K]
        Of the same library and device. Batch axes broadcast and are never expanded.
    workspace : int, optional
        Bytes that temporaries may take beyond inputs and output. Default: 64 MiB.

    Returns
    -------
    values : array [..., M, N]
        The maxima; -inf if K is 0. NaN where a term is NaN.
    indices : int64 array [..., M, N]
        The k of each maximum, the smallest on ties; the first NaN where there is one; -1 if K is 0.

    Raises
    ------
    TypeError
        If an operand is no array of real floating-point numbers, or their libraries differ.
    ValueError
        If shapes or devices do not fit, or the workspace is too small.

    Examples
    --------
    >>> import numpy as np
    >>> values, indices = maxplus_matmul(np.array([[0.0, 3.0]]), np.array([[5.0], [1.0]]))
    >>> values, indices
    (array([[5.]]), array([[0]]))
    """
    budget = check_workspace(workspace)
    ctx, given = enter({"a": a, "b": b})
    a, b = given["a"], given["b"]
    layout = fold(shape_of(a), shape_of(b))
    xp = ctx.xp
    index_dtype = ctx.index_dtype
    with quiet():
        if _is_empty(layout):
            values = xp.full(
                layout.out_shape, -math.inf, dtype=ctx.result_dtype, device=ctx.device
            )
            indices = xp.full(layout.out_shape, -1, dtype=index_dtype, device=ctx.device)
        else:
            kernel = MaxPlusKernel(ctx, layout.sizes, budget, layout.copies)
            values, indices = _tiled.run(
                ctx, layout, a, b, kernel, [ctx.result_dtype, index_dtype]
            )
    return MaxPlusProduct(ctx.hand_back(values), ctx.hand_back(indices))


def _is_empty(layout: Fold) -> bool:
    return 0 in layout.sizes
