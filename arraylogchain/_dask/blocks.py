"""Functions of blocks of Dask arrays, which workers compute in memory; nothing is computed here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import dask.array as da
import numpy as np
from dask.array.core import unify_chunks
from dask.array.utils import meta_from_array

from arraylogchain._core.axes import Shape
from arraylogchain._inputs.arrays import prepare_inputs


def to_lazy(arguments: Mapping[str, Any]) -> tuple[dict[str, da.Array], str]:
    """Return arrays as Dask arrays, others in a single block, and the dtype of what is computed.

    Raises
    ------
    TypeError
        For dtypes that are not real floating, and for blocks of different libraries.
    ValueError
        For chunks of unknown sizes.
    """
    # Arrays without entries stand for Dask's.
    ctx, _ = prepare_inputs(
        {name: x._meta if isinstance(x, da.Array) else x for name, x in arguments.items()}
    )
    return {name: with_known_shape(name, x) for name, x in arguments.items()}, ctx.result_name


def with_known_shape(name: str, x: Any) -> da.Array:
    """Return an array as a Dask array; raise ValueError if sizes of its chunks are unknown."""
    if not isinstance(x, da.Array):
        return da.from_array(x, chunks=-1)
    if math.isnan(sum(x.shape)):
        raise ValueError(
            f"{name} has chunks of unknown sizes; {name}.compute_chunk_sizes() finds them out"
        )
    # Empty chunks beside others fit no axis of another array.
    return x.rechunk(tuple(tuple(filter(None, sizes)) or (0,) for sizes in x.chunks))


def map_rows(
    function: Callable[..., Any],
    arrays: Sequence[tuple[da.Array, str]],
    results: Sequence[tuple[str, Any]],
) -> list[da.Array]:
    """Return the arrays that a function makes of blocks of rows, in a tuple if they are several.

    Parameters
    ----------
    function : callable
        It should use one thread, as schedulers have threads of their own.
    arrays : sequence of (array, str)
        What it takes, with a letter for each of its last axes, which are put in one chunk. The axes
        before them are batch axes, which broadcast.
    results : sequence of (str, dtype)
        What it returns, with the letters of its last axes.
    """
    batch = np.broadcast_shapes(*(x.shape[: x.ndim - len(axes)] for x, axes in arrays))
    if 0 in batch:
        # There is nothing to compute, and Dask refuses an empty axis beside one of length 1.
        lengths = (zip(axes[::-1], x.shape[::-1], strict=False) for x, axes in arrays)
        sizes = dict(itertools.chain(*lengths))
        shapes = [((*batch, *map(sizes.get, axes)), dtype) for axes, dtype in results]
        return [da.zeros_like(arrays[0][0], dtype, shape=shape) for shape, dtype in shapes]
    rows, pairs = len(batch), []
    for i, (x, axes) in enumerate(arrays):
        lead, last = x.ndim - len(axes), range(x.ndim - len(axes), x.ndim)
        indices = *range(rows - lead, rows), *((i, axis) for axis in last)
        pairs += [x.rechunk(dict.fromkeys(last, -1)), indices]
    _, aligned = unify_chunks(*pairs)
    takes = ",".join(f"({','.join(axes)})" for _, axes in arrays)
    gives = ",".join(f"({','.join(axes)})" for axes, _ in results)
    metas = tuple(meta_from_array(aligned[0]._meta, dtype=dtype) for _, dtype in results)
    result = da.apply_gufunc(function, f"{takes}->{gives}", *aligned, meta=metas)
    return list(result) if len(metas) > 1 else [result]


def added(parts: Sequence[da.Array], dtype: str = "float64") -> da.Array:
    """Return the sum of arrays in float64, rounded to a dtype."""
    return map_rows(partial(_sum_of_blocks, dtype), [(x, "") for x in parts], [("", dtype)])[0]


def _sum_of_blocks(dtype: str, *blocks: Any) -> Any:
    # Infinities are values here, of which NumPy would warn.
    with np.errstate(all="ignore"):
        return sum(x.astype("float64") for x in blocks).astype(dtype)


def summed_blocks(x: da.Array, axes: Shape) -> da.Array:
    """Return what blocks give along axes, each of length 1 there, added up."""
    if not axes:
        return x
    chunks = tuple((1,) * len(sizes) if k in axes else sizes for k, sizes in enumerate(x.chunks))
    return finite_sum(da.Array(x.dask, x.name, chunks, meta=x._meta), axes)


def finite_sum(x: da.Array, axes: Shape) -> da.Array:
    """Return sums along axes, which stay; beyond all numbers it is the largest one."""
    # Parts may be the largest numbers, of either sign.
    scale = 0.5 ** math.prod(x.shape[axis] for axis in axes).bit_length()
    limit = scale * float(np.finfo(x.dtype).max)
    total = (x.astype("float64") * scale).sum(axis=axes, keepdims=True)
    return (total.clip(-limit, limit) / scale).astype(x.dtype)


def bounded(x: da.Array, dtype: str) -> da.Array:
    """Return an array in a dtype, finite where numbers are beyond its range."""
    if x.dtype == dtype:
        return x
    limit = float(np.finfo(dtype).max)
    return x.clip(-limit, limit).astype(dtype)
