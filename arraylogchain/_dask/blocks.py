"""Functions of blocks: what operands have to be, and graphs of them.

Axes have numbers. Batch axes are numbered from the right, 0 being the last one, so that those that
broadcast against one another have the same number; others are numbered from `CORE` on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import array_api_compat
import dask.array as da
import numpy as np
from dask.array.utils import meta_from_array
from dask.highlevelgraph import HighLevelGraph

from arraylogchain import _threads
from arraylogchain._arrays import check_dtypes, check_same, dtype_name, namespace_of
from arraylogchain._context import library_name

CORE = 100

Axes = tuple[int, ...]

# Those of chains.
STEPS, STATES, PAIRS, FROM, TO, FIRST, SAMPLES = range(CORE, CORE + 7)

# Axes of a chain's arrays behind the batch axes.
AXES: dict[str, Axes] = {
    "log_potentials": (STEPS, STATES),
    "transitions": (PAIRS, FROM, TO),
    "log_transitions": (PAIRS, FROM, TO),
    "initial": (FIRST,),
    "log_initial": (FIRST,),
    "final": (FIRST,),
    "log_final": (FIRST,),
    "lengths": (),
}
# Names in `vjp.ChainGradients`.
FIELD_OF = {name: name if name == "log_potentials" else name.removeprefix("log_") for name in AXES}


def name_of(given: Collection[str], names: Sequence[str]) -> str:
    """Return which name an array was given by, "" for none."""
    return next((name for name in names if name in given), "")


def to_lazy(given: Mapping[str, Any]) -> tuple[dict[str, da.Array], str]:
    """Return arrays as Dask arrays, others in a single block, and the dtype of what is computed.

    Raises
    ------
    TypeError
        For dtypes that are not real floating, and for blocks of different libraries.
    ValueError
        For chunks of unknown sizes.
    """
    metas = {name: x._meta if isinstance(x, da.Array) else x for name, x in given.items()}
    libraries = {name: library_name(namespace_of(name, x)) for name, x in metas.items()}
    for name, library in libraries.items():
        if library not in ("numpy", "cupy"):
            raise TypeError(
                f"{name} is of {library}; beside Dask arrays, and in their blocks, there can be "
                f"arrays of NumPy or CuPy"
            )
    check_same("library", libraries)
    dtypes = {name: dtype_name(x.dtype) for name, x in metas.items()}
    result = check_dtypes(dtypes, array_api_compat.array_namespace(*metas.values()))
    return {name: known(name, x) for name, x in given.items()}, result


def known(name: str, x: Any) -> da.Array:
    """Return an array as a Dask array; raise ValueError if sizes of its chunks are unknown."""
    if not isinstance(x, da.Array):
        return da.from_array(x, chunks=-1)
    if any(math.isnan(n) for sizes in x.chunks for n in sizes):
        raise ValueError(
            f"{name} has chunks of unknown sizes; {name}.compute_chunk_sizes() finds them out"
        )
    return x


def anew(x: da.Array) -> da.Array:
    """Return an array whose blocks are not those of x, but made once more.

    As `dask.graph_manipulation.clone` does, which fails on rechunked arrays (dask/dask#12455).
    """
    try:
        from dask._task_spec import convert_legacy_graph
    except ImportError:  # it is no public function; results are the same without
        return x
    given = x.dask.to_dict()
    graph = convert_legacy_graph(given)
    names = {key: _other_name(key) for key in graph}
    tasks = {names[key]: task.substitute(names, key=names[key]) for key, task in graph.items()}
    for key in given.keys() - graph.keys():  # what a cluster holds
        tasks |= {key: given[key], _other_name(key): key}
    name = f"again-{x.name}"
    return da.Array(HighLevelGraph.from_collections(name, tasks), name, x.chunks, meta=x._meta)


def _other_name(key: Any) -> Any:
    return (f"again-{key[0]}", *key[1:]) if isinstance(key, tuple) else f"again-{key}"


def batch_axes(count: int) -> Axes:
    return tuple(reversed(range(count)))


def whole(x: da.Array, count: int) -> da.Array:
    """Return an array whose last axes are in one chunk each."""
    return x.rechunk(dict.fromkeys(range(x.ndim - count, x.ndim), -1))


def of_blocks(
    function: Callable[..., Any],
    out: Axes,
    args: Sequence[tuple[da.Array, Axes]],
    dtype: Any,
    *,
    sums: Sequence[int] = (),
    new: Mapping[int, int] | None = None,
    **options: Any,
) -> da.Array:
    """Return the lazy array of a function of blocks.

    Parameters
    ----------
    function : callable
        Of blocks, whose axes have the numbers that stand beside the arrays. What is not an axis of
        the result is in a single chunk.
    out : tuple of int
        Axes of the result.
    args : sequence of (array, axes)
    dtype : dtype
    sums : sequence of int
        Axes of which each block of the result has length 1.
    new : mapping of int to int, optional
        Lengths of axes that no argument has.
    """
    meta = args[0][0]._meta if dtype is not object else None
    return da.blockwise(
        _on_one_thread,
        out,
        *(part for pair in args for part in pair),
        function=function,
        options=options,
        new_axes=new,
        adjust_chunks=dict.fromkeys(sums, 1),
        concatenate=True,
        dtype=dtype,
        meta=meta_from_array(meta, ndim=len(out), dtype=dtype),
    )


def _on_one_thread(*blocks: Any, function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Call a function; the scheduler has threads of its own."""
    with _threads.using(1):
        return function(*blocks, **options)


def field(
    packed: da.Array,
    i: int,
    out: Axes,
    sizes: Mapping[int, Any],
    dtype: Any,
    like: da.Array,
) -> da.Array:
    """Return one of the arrays that a function of the blocks of chains returned as a tuple.

    Parameters
    ----------
    packed : array of tuples
        One for each block of the batch axes and of steps, which are all that it has.
    i : int
        Which one.
    out : tuple of int
        Its axes.
    sizes : mapping of int to int
        Lengths of axes that `packed` lacks, and of blocks where they are others than there.
    dtype : dtype
    like : array
        Of the library of the blocks.
    """
    axes = chain_axes(packed.ndim - 1)
    return da.blockwise(
        _pick,
        out,
        packed,
        axes,
        i=i,
        kind=dtype,
        new_axes={axis: sizes[axis] for axis in out if axis not in axes},
        adjust_chunks={axis: n for axis, n in sizes.items() if axis in axes},
        dtype=dtype,
        meta=meta_from_array(like._meta, ndim=len(out), dtype=dtype),
    )


def _pick(found: tuple[Any, ...], i: int, kind: Any) -> Any:
    return found[i].astype(kind, copy=False)


def finite_sum(x: da.Array, axes: Axes, dtype: Any) -> da.Array:
    """Return sums along axes, which stay; beyond all numbers of a dtype it is the largest one."""
    total = da.reduction(
        x, chunk=_finite_sum, aggregate=_finite_sum, axis=axes, keepdims=True, dtype=x.dtype
    )
    return total.map_blocks(_finite, dtype, dtype=dtype)


def _finite_sum(x: Any, axis: Any, keepdims: bool) -> Any:
    with np.errstate(over="ignore"):
        return _finite(x.sum(axis=axis, keepdims=keepdims), x.dtype)


def _finite(x: Any, kind: Any) -> Any:
    limit = float(np.finfo(kind).max)
    return x.clip(-limit, limit).astype(kind, copy=False)


def chain_axes(count: int) -> Axes:
    """Return so many batch axes, and that of steps."""
    return (*batch_axes(count), STEPS)
