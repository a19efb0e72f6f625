"""Products of Dask arrays: of blocks, joined if the contracted axis is in several chunks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import array_api_compat.dask.array as dask_namespace
import dask.array as da
from array_api_compat import array_namespace

from arraylogchain._core.axes import fold
from arraylogchain._core.threads import using
from arraylogchain._dask.blocks import map_rows, to_lazy
from arraylogchain._inputs.arrays import promote
from arraylogchain._inputs.options import DEFAULT_WORKSPACE
from arraylogchain._products import certified, in_memory, linear, maxplus
from arraylogchain._products.chainexp import product_of_sequence, scale_of_sums, shifts
from arraylogchain._products.contraction import Multiply, evaluate
from arraylogchain._products.in_memory import compute, compute_chain, named

# Number of partial results that are joined at a time.
_FAN_IN = 8

# The arrays of a result: one, or values and indices.
Arrays = Sequence[da.Array]


def matmul(a: Any, b: Any, workspace: int) -> da.Array:
    """Return `arraylogchain.matmul` of Dask arrays."""
    return _product(partial(compute, linear.matmul), lambda *parts: sum(parts), a, b, workspace)[0]


def logmatmulexp(a: Any, b: Any, workspace: int) -> da.Array:
    """Return `arraylogchain.logmatmulexp` of Dask arrays."""
    return _product(partial(compute, certified.logmatmulexp), _logsumexp, a, b, workspace)[0]


def maxplus_matmul(a: Any, b: Any, workspace: int) -> Arrays:
    """Return `arraylogchain.maxplus_matmul` of Dask arrays."""
    return _product(partial(compute, maxplus.maxplus_matmul), _largest, a, b, workspace, "int64")


def _product(
    function: Callable[..., Any],
    join: Callable[..., Any],
    a: Any,
    b: Any,
    workspace: int,
    *index_dtypes: str,
) -> Arrays:
    """Return the values of a product and, if it has any, its indices."""
    (a, b), dtype = _widened({"a": a, "b": b})
    fold(a.shape, b.shape)  # raises if shapes do not fit
    last_axes = (slice(None) if a.ndim > 1 else 0, slice(None) if b.ndim > 1 else 0)
    left = a[..., None, :] if a.ndim > 1 else a[None, None]
    right = da.swapaxes(b, -1, -2)[..., None, :, :] if b.ndim > 1 else b[None, None]
    results, parts = [("", x) for x in (a.dtype, *index_dtypes)], []
    for start, stop in itertools.pairwise([0, *itertools.accumulate(a.chunks[-1])]):
        call = partial(_multiplied, function=function, start=start, workspace=workspace)
        pairs = [(x[..., start:stop], "t") for x in (left, right)]
        parts.append(map_rows(call, pairs, results))
    values, *indices = (x[(..., *last_axes)] for x in _joined(parts, join, "", results))
    return values.astype(dtype), *indices


def _widened(arguments: Mapping[str, Any]) -> tuple[list[da.Array], str]:
    """Return arrays in the dtype of the computation, and the dtype of the result.

    Half precisions are computed in float32, and rounded only in the end.
    """
    arrays, dtype = to_lazy(arguments)
    return [x.astype(promote([dtype, "float32"])) for x in arrays.values()], dtype


def _multiplied(a: Any, b: Any, *, function: Callable[..., Any], start: int, workspace: int) -> Any:
    """Return the product of blocks [..., M, 1, K] and [..., 1, N, K], with indices from `start`."""
    xp = array_namespace(a)
    left, right = a[..., 0, :], xp.matrix_transpose(b[..., 0, :, :])
    with using(1):
        result = function(left, right, workspace)
    if not isinstance(result, tuple):
        return result
    values, indices = result
    return values, xp.where(indices < 0, indices, indices + start)


def _joined(
    parts: Sequence[Arrays], join: Callable[..., Any], axes: str, results: Sequence[tuple[str, Any]]
) -> Arrays:
    """Return the joined partial results; groups of them are joined in a tree."""
    while len(parts) > 1:
        groups = [parts[i : i + _FAN_IN] for i in range(0, len(parts), _FAN_IN)]
        parts = [map_rows(join, [(x, axes) for y in z for x in y], results) for z in groups]
    return parts[0]


def _logsumexp(*blocks: Any) -> Any:
    xp = array_namespace(*blocks)
    x = xp.stack(blocks, axis=-1)
    with using(1):
        return compute(
            certified.logmatmulexp, x, xp.zeros(len(blocks), dtype=x.dtype), DEFAULT_WORKSPACE
        )


def _largest(*blocks: Any) -> tuple[Any, Any]:
    """Return the largest values, the first of them on ties, the first NaN if there is one."""
    xp = array_namespace(*blocks)
    values, indices = xp.stack(blocks[::2]), xp.stack(blocks[1::2])
    best = xp.argmax(values, axis=0)[None]
    return tuple(xp.take_along_axis(x, best, axis=0)[0] for x in (values, indices))


def _chained(*blocks: Any, workspace: int) -> Any:
    """Return the product of a block of matrices, or of several products."""
    matrices = blocks if len(blocks) > 1 else blocks[0]
    with using(1):
        return compute_chain(named(matrices), workspace)


def logchainexp(arguments: Mapping[str, Any], workspace: int) -> da.Array:
    """Return `arraylogchain.logchainexp` of an array [..., n, K, K], or of a sequence."""
    matrices, dtype = _widened(arguments)
    in_memory.check_shapes(arguments)
    if "matrices" not in arguments:

        def multiply(a: Any, b: Any) -> tuple[da.Array, None]:
            return logmatmulexp(a, b, workspace), None

        out, _ = product_of_sequence(dask_namespace, matrices, multiply, "float64")
        return out.astype(dtype)
    (x,), chain = matrices, partial(_chained, workspace=workspace)
    maxima = shifts(dask_namespace, x, x.shape[-3])
    x = x - maxima
    result = [("kk", x.dtype)]
    steps = itertools.pairwise([0, *itertools.accumulate(x.chunks[-3])])
    parts = [map_rows(chain, [(x[..., a:b, :, :], "tkk")], result) for a, b in steps]
    product, scale = _joined(parts, chain, "kk", result)[0], scale_of_sums(x.shape[-3])
    total = (maxima.astype("float64") * scale).sum(axis=-3)
    return ((product.astype("float64") * scale + total) / scale).astype(dtype)


def einsum(arguments: Mapping[str, Any], plan: Any, multiply: Multiply) -> da.Array:
    """Return an einsum of Dask arrays."""
    operands, dtype = _widened(arguments)
    return evaluate(dask_namespace, plan, operands, multiply)[0].astype(dtype)
