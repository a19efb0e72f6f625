"""Functions of blocks of Dask arrays; nothing is computed until Dask computes the result."""

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
    """Return all arrays as Dask arrays, others in one block, and the dtype of the result.

    Raises
    ------
    TypeError
        For dtypes that are not real floating, and for blocks of different libraries.
    ValueError
        For chunks of unknown sizes.
    """
    # The meta of a Dask array has no entries, but the library and dtype of its blocks.
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
    # Empty chunks between others would not align with another array's chunks.
    return x.rechunk(tuple(tuple(filter(None, sizes)) or (0,) for sizes in x.chunks))


def map_rows(
    function: Callable[..., Any],
    arrays: Sequence[tuple[da.Array, str]],
    results: Sequence[tuple[str, Any]],
) -> list[da.Array]:
    """Apply a function to blocks of rows, and return its results.

    Parameters
    ----------
    function : callable
        Takes blocks and returns an array, or a tuple for several results. It should use one thread,
        as schedulers have threads of their own.
    arrays : sequence of (array, str)
        The arguments, with a letter for each of their last axes, which are put in one chunk. The
        axes before them are batch axes, which broadcast.
    results : sequence of (str, dtype)
        The letters of the last axes of each result, and its dtype.

    Returns
    -------
    list of array
        One for each result.
    """
    batch = np.broadcast_shapes(*(x.shape[: x.ndim - len(axes)] for x, axes in arrays))
    if 0 in batch:
        # Dask does not broadcast an empty axis with one of length 1.
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
    inputs = ",".join(f"({','.join(axes)})" for _, axes in arrays)
    outputs = ",".join(f"({','.join(axes)})" for axes, _ in results)
    metas = tuple(meta_from_array(aligned[0]._meta, dtype=dtype) for _, dtype in results)
    result = da.apply_gufunc(function, f"{inputs}->{outputs}", *aligned, meta=metas)
    return list(result) if len(metas) > 1 else [result]


def added(parts: Sequence[da.Array], dtype: str = "float64") -> da.Array:
    """Return the sum of arrays in float64, rounded to a dtype."""
    return map_rows(partial(_sum_of_blocks, dtype), [(x, "") for x in parts], [("", dtype)])[0]


def _sum_of_blocks(dtype: str, *blocks: Any) -> Any:
    # NumPy would warn of infinities, which are ordinary values here.
    with np.errstate(all="ignore"):
        return sum(x.astype("float64") for x in blocks).astype(dtype)


def summed_blocks(x: da.Array, axes: Shape) -> da.Array:
    """Return the sum over blocks along axes, where blocks have length 1 and not their chunk's."""
    if not axes:
        return x
    chunks = tuple((1,) * len(sizes) if k in axes else sizes for k, sizes in enumerate(x.chunks))
    return finite_sum(da.Array(x.dask, x.name, chunks, meta=x._meta), axes)


def finite_sum(x: da.Array, axes: Shape) -> da.Array:
    """Return sums along axes, which are kept, clipped to the range of the dtype."""
    # Terms may be as large as the largest number; scaled, their sum does not overflow.
    scale = 0.5 ** math.prod(x.shape[axis] for axis in axes).bit_length()
    limit = scale * float(np.finfo(x.dtype).max)
    total = (x.astype("float64") * scale).sum(axis=axes, keepdims=True)
    return (total.clip(-limit, limit) / scale).astype(x.dtype)


def bounded(x: da.Array, dtype: str) -> da.Array:
    """Return an array in a dtype, clipped to its range if that is another dtype."""
    if x.dtype == dtype:
        return x
    limit = float(np.finfo(dtype).max)
    return x.clip(-limit, limit).astype(dtype)
