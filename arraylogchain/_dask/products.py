"""Products of Dask arrays: of blocks, joined where the summed axis is in several chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import array_api_compat.dask.array as dask_namespace
import dask.array as da
import numpy as np
from array_api_compat import array_namespace
from dask.array.utils import meta_from_array

from arraylogchain import products
from arraylogchain._context import shape_of
from arraylogchain._dask.blocks import CORE, batch_axes, of_blocks, to_lazy, whole
from arraylogchain._einsum.equations import Contractions
from arraylogchain._einsum.evaluation import Multiply, evaluate
from arraylogchain._fold import fold

_TERMS, _ROWS, _COLUMNS, _FIELDS = range(CORE, CORE + 4)

# Partial results that are joined at a time.
_SPLIT = 8


def matmul(a: Any, b: Any, workspace: int) -> da.Array:
    """Return `arraylogchain.matmul` of Dask arrays."""
    given, dtype = to_lazy({"a": a, "b": b})
    return _joined(_partial(products.matmul, given, dtype, workspace), _sum, dtype)


def logmatmulexp(a: Any, b: Any, workspace: int) -> da.Array:
    """Return `arraylogchain.logmatmulexp` of Dask arrays."""
    given, dtype = to_lazy({"a": a, "b": b})
    return _joined(_partial(products.logmatmulexp, given, dtype, workspace), _logsumexp, dtype)


def maxplus_matmul(a: Any, b: Any, workspace: int) -> tuple[da.Array, da.Array]:
    """Return `arraylogchain.maxplus_matmul` of Dask arrays."""
    given, dtype = to_lazy({"a": a, "b": b})
    pairs = _joined(_partial(_largest, given, "float64", workspace, index=True), _argmax, "float64")
    return pairs[..., 0].astype(dtype), pairs[..., 1].astype(np.int64)


def _partial(
    product: Callable[..., Any],
    given: Mapping[str, da.Array],
    dtype: str,
    workspace: int,
    index: bool = False,
) -> da.Array:
    """Return products over single chunks of the terms, which are on axis -1, or -2 with `index`."""
    a, b = given["a"], given["b"]
    fold(shape_of(a), shape_of(b))  # refuses what does not fit
    batch = batch_axes(max(a.ndim, b.ndim, 2) - 2)
    rows, columns = (_ROWS,) * (a.ndim > 1), (_COLUMNS,) * (b.ndim > 1)
    of_a = (*batch_axes(max(a.ndim - 2, 0)), *rows, _TERMS)
    of_b = (*batch_axes(max(b.ndim - 2, 0)), _TERMS, *columns)
    args = [(a, of_a), (b, of_b)]
    if index:
        args.append((da.arange(a.shape[-1], chunks=-1), (_TERMS,)))
    fields = (_FIELDS,) * index
    # Halves are only rounded in the end.
    wide = "float32" if "16" in dtype and a.numblocks[-1] > 1 else dtype
    return of_blocks(
        _product,
        (*batch, *rows, *columns, _TERMS, *fields),
        args,
        wide,
        sums=[_TERMS],
        new={_FIELDS: 2} if index else None,
        product=product,
        workspace=workspace,
        kind=wide,
    )


def _product(*blocks: Any, product: Callable[..., Any], workspace: int, kind: str) -> Any:
    a, b, *first = blocks
    if a.dtype != kind and not first:
        a = a.astype(kind)
    out = product(a, b, *first, workspace=workspace)
    return out[..., None, :] if first else out[..., None]


def _largest(a: Any, b: Any, indices: Any, *, workspace: int) -> Any:
    """Return values and indices of a max-plus product, as pairs of numbers in float64."""
    xp = array_namespace(a)
    values, found = products.maxplus_matmul(a, b, workspace=workspace)
    first = int(indices[0]) if indices.size else 0
    found = xp.where(found < 0, found, found + first)
    return xp.stack([xp.asarray(x, dtype=xp.float64) for x in (values, found)], axis=-1)


def _joined(partial: da.Array, join: Callable[..., Any], dtype: str) -> da.Array:
    axis = partial.ndim - 1 - (join is _argmax)
    if partial.numblocks[axis] == 1:
        return partial[(slice(None),) * axis + (0,)].astype(dtype)
    joined = da.reduction(
        partial,
        chunk=_same,
        aggregate=join,
        axis=axis,
        dtype=partial.dtype,
        split_every=_SPLIT,
        meta=partial._meta,
    )
    return joined.astype(dtype)


def _same(x: Any, axis: Any, keepdims: bool) -> Any:
    return x


def _sum(x: Any, axis: Any, keepdims: bool) -> Any:
    return x.sum(axis=axis, keepdims=keepdims)


def _logsumexp(x: Any, axis: Any, keepdims: bool) -> Any:
    from arraylogchain.einsum import logeinsumexp

    out = logeinsumexp("...k->...", x, workers=1)
    return out[..., None] if keepdims else out


def _argmax(x: Any, axis: Any, keepdims: bool) -> Any:
    """Return the pairs of the largest values, the first ones on ties; the first NaN, if any."""
    xp = array_namespace(x)
    best = xp.argmax(x[..., 0], axis=-1)[..., None, None]
    out = xp.take_along_axis(x, xp.broadcast_to(best, (*best.shape[:-1], 2)), axis=-2)
    return out if keepdims else out[..., 0, :]


def logchainexp_stack(matrices: da.Array, workspace: int) -> da.Array:
    """Return `arraylogchain.logchainexp` of an array [..., n, K, K]."""
    given, dtype = to_lazy({"matrices": matrices})
    products.check_stack(shape_of(matrices))

    def multiply(x: Any, axis: Any, keepdims: bool) -> Any:
        wide = x.astype("float32") if x.dtype.itemsize == 2 else x
        out = products.logchainexp(wide, workspace=workspace, workers=1)
        return out[..., None, :, :] if keepdims else out

    x = whole(given["matrices"], 2)
    wide = "float32" if "16" in dtype else dtype
    product = da.reduction(
        x,
        chunk=multiply,
        aggregate=multiply,
        axis=x.ndim - 3,
        dtype=wide,
        split_every=_SPLIT,
        meta=meta_from_array(x._meta, ndim=x.ndim - 1, dtype=wide),
    )
    return product.astype(dtype)


def logchainexp_sequence(given: Mapping[str, Any], workspace: int) -> da.Array:
    """Return `arraylogchain.logchainexp` of a sequence: the halves' products multiplied."""
    matrices, _ = to_lazy(given)
    products.check_sequence({name: shape_of(x) for name, x in matrices.items()})
    left = list(matrices.values())
    while len(left) > 1:
        pairs = zip(left[::2], left[1::2], strict=False)
        left = [logmatmulexp(a, b, workspace) for a, b in pairs] + left[len(left) & ~1 :]
    return left[0]


def einsum(given: Mapping[str, Any], plan: Contractions, multiply: Multiply) -> da.Array:
    """Return an einsum of Dask arrays."""
    operands, _ = to_lazy(given)
    return evaluate(dask_namespace, plan, list(operands.values()), multiply)[0]
