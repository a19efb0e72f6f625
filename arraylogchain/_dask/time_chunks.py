"""Time chunks of chains of Dask arrays, and operations on them.

A time chunk, with its rows in blocks, is a chain of its own. It starts with the last step of the
chunk before: the forward message of that step becomes its initial weights, and the backward message
of the chunk after becomes its final weights. So every transition lies in one chunk, and a row that
has ended is a chain of that one step in later chunks. Messages are logs near 0, and offsets in
whole nats that are added at the end, so that large numbers are not rounded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import dask.array as da
import numpy as np

from arraylogchain import _chains as chains
from arraylogchain._core.context import Array, Context
from arraylogchain._core.threads import using
from arraylogchain._dask.blocks import (
    added,
    bounded,
    finite_sum,
    map_rows,
    summed_blocks,
    to_lazy,
    with_known_shape,
)
from arraylogchain._inputs.arrays import dtype_name, is_lazy, promote
from arraylogchain._inputs.chain import (
    ARGUMENTS,
    Chain,
    ChainArguments,
    check_lengths,
    check_shapes,
    check_weights,
)

# Axes beyond the batch axes: of parts of a chain, of other inputs, and of results.
AXES = {"potentials": "tk", "transitions": "skk", "initial": "k", "final": "k", "counts": "skk"}
AXES |= {"uniforms": "t", "states": "t", "path": "t", "message": "k"}
AXES |= {"following": "", "cotangent": "", "offset": "", "": "", "t": "t", "tk": "tk"}
AXES |= {"n": "n", "nt": "nt"}

Operation = Callable[..., Any]


class TimeChunks:
    """A chain in time chunks: one if its time axis is not chunked.

    Parameters
    ----------
    chain_arguments : ChainArguments
    workspace : int
        Bytes for temporaries of a block.

    Attributes
    ----------
    arguments : dict of str to array
        The arguments of `LogChain` without lengths, with all batch axes.
    like : dict of str to array
        Arrays in the shapes and dtypes of gradients and counts, by part.
    batch : tuple of int
    dtypes : dict of str to str
        Of kinds of results; "" stands for all others.
    lengths : array
    steps : list of (int, int)
        Start and stop of each chunk, without the step that it shares with the chunk before.
    """

    def __init__(self, chain_arguments: ChainArguments, workspace: int) -> None:
        arguments, dtype = to_lazy(chain_arguments.floating())
        self.batch = check_shapes(arguments)
        self.workspace, lengths = workspace, chain_arguments.lengths
        potentials = arguments["log_potentials"]
        self.num_steps, self.num_states = potentials.shape[-2:]
        lengths = np.asarray(self.num_steps) if lengths is None else lengths
        # The values of lazy lengths are checked block by block.
        values = np.ones(lengths.shape, lengths.dtype) if is_lazy(lengths) else lengths
        check_lengths(values, self.batch, self.num_steps)
        self.lengths = with_known_shape("lengths", lengths)
        self.like = {ARGUMENTS[name]: x for name, x in arguments.items()}
        self.dtypes = {part: dtype_name(x.dtype) for part, x in self.like.items()}
        self.dtypes |= {"path": "int64", "nt": "int64", "offset": "float64", "": dtype}
        self.dtypes["message"] = _without_half(dtype)
        if "transitions" in self.like:
            self.like["counts"] = self.like["transitions"]
        self.arguments = {name: self._in_batch(ARGUMENTS[name], x) for name, x in arguments.items()}
        chunks = [n for n in potentials.chunks[-2] if n]
        self.steps = list(itertools.pairwise([0, *itertools.accumulate(chunks)]))

    @classmethod
    def of(cls, chain: Any) -> TimeChunks:
        """Return the time chunks of a `LogChain`."""
        return cls(chain._arguments, chain._workspace)

    def _in_batch(self, kind: str, x: da.Array) -> da.Array:
        """Return an array with all batch axes, so that results have them too."""
        return x[(None,) * (len(self.batch) + len(AXES[kind]) - x.ndim)]

    def messages(
        self, operation: Operation | None = None, backward: bool = False
    ) -> Sequence[Sequence[Any]]:
        """Return the carries between chunks: log messages, and offsets in whole nats.

        Entry i is the carry into chunk i, None for the first (backward: last) one. Forward, the
        last message follows.
        """
        operation = operation or partial(_last_message, backward=backward)
        end, result = ("log_final" if backward else "log_initial"), [(None, None)]
        for i in range(len(self.steps))[:: -1 if backward else 1]:
            message, offset = result[-1]
            log, shifts = self.apply(i, operation, ["message", "offset"], **{end: message})
            result.append((log, shifts if offset is None else added([shifts, offset])))
        return tuple(zip(*(result[-2::-1] if backward else result), strict=True))

    @cached_property
    def sides(self) -> dict[str, Sequence[Any]]:
        """Carries into each chunk from both sides, as arguments of `LogChain`."""
        before, after = self.messages()[0], self.messages(backward=True)[0]
        return {"log_initial": before[:-1], "log_final": after}

    def apply(
        self, i: int, operation: Operation, kinds: Sequence[str], **replacements: da.Array | None
    ) -> list[da.Array]:
        """Return the results of an operation on chunk i, of the kinds that `AXES` lists.

        Replacements that are arguments of `LogChain`, such as messages, replace the chain's arrays;
        other arrays are passed to the operation by name.
        """
        arrays = {name: x for name, x in replacements.items() if x is not None}
        replaced = {ARGUMENTS.get(name) for name in arrays}
        own_arrays = {
            name: x for name, x in self.arguments.items() if ARGUMENTS[name] not in replaced
        }
        arrays |= {name: _cut(ARGUMENTS[name], x, *self.steps[i]) for name, x in own_arrays.items()}
        pairs = [(x, AXES[ARGUMENTS.get(name, name)]) for name, x in arrays.items()]
        dtypes = [self._dtype_of_blocks(kind) for kind in kinds]
        results = [(AXES[kind], dtype) for kind, dtype in zip(kinds, dtypes, strict=True)]
        place = tuple(arrays), self.steps[i], self.num_steps, self.workspace
        call = partial(_compute_block, operation, dtypes, place)
        result = map_rows(call, [(self.lengths, ""), *pairs], results)
        return list(map(self._summed, kinds, result))

    def _dtype_of_blocks(self, kind: str) -> str:
        """Return the dtype of results in blocks, whose sums are rounded to half precision once."""
        dtype = self.dtypes.get(kind, self.dtypes[""])
        return _without_half(dtype) if kind in self.like else dtype

    def _summed(self, kind: str, x: da.Array) -> da.Array:
        """Return results of blocks, summed over batch axes along which rows share a part."""
        if kind not in self.like:
            return x
        shape = self._in_batch(kind, self.like[kind]).shape[: len(self.batch)]
        return summed_blocks(x, tuple(axis for axis, n in enumerate(shape) if n == 1))

    def apply_to_all(self, operation: Operation, *kinds: str, **arguments: Any) -> list[Any]:
        """Return the joined results of an operation on all chunks; of kind "" a list of results.

        Arguments are arrays or, such as messages, sequences with an entry for each chunk.
        """
        result = []
        for i in range(len(self.steps)):
            pairs = arguments.items()
            entries = {name: x[i] if isinstance(x, Sequence) else x for name, x in pairs}
            result.append(self.apply(i, operation, kinds, **entries))
        return list(map(self.joined, kinds, zip(*result, strict=True)))

    def joined(self, kind: str, result: Sequence[da.Array]) -> Any:
        """Return one result, joined from the results of all chunks."""
        axes, x = AXES[kind], result[-1 if kind == "final" else 0]
        if "t" in axes:
            behind = (slice(1, None), slice(None))[: len(axes)]
            x = da.concatenate([x, *(y[(..., *behind)] for y in result[1:])], -len(axes))
        elif "s" in axes and self.like[kind].shape[-3:-2] in ((), (1,)) and len(result) > 1:
            x = finite_sum(da.stack(result), (0,))[0]
        elif "s" in axes:
            x = da.concatenate(result, axis=-3)
        if kind in self.like:
            x = x[(0,) * (x.ndim - self.like[kind].ndim)]
            x = bounded(x, self.dtypes.get(kind, self.dtypes[""]))
        return x if axes else result


def _without_half(dtype: str) -> str:
    """Return float32 for half precisions, and any other dtype unchanged."""
    return promote([dtype, "float32"])


def _cut(part: str, x: da.Array, start: int, stop: int) -> da.Array:
    """Return a part of the chain for a chunk and the step before it."""
    if part == "potentials":
        chunk = x[..., start:stop, :]
        front = da.zeros_like(chunk[..., : min(start, 1), :])
        return da.concatenate([front, chunk], axis=-2)
    if part != "transitions":
        return x
    return x if x.shape[-3] == 1 else x[..., max(start - 1, 0) : stop - 1, :, :]


def _compute_block(
    operation: Operation, dtypes: Sequence[str], place: Any, lengths: Any, *blocks: Any
) -> Any:
    """Return the results of an operation on one block of rows of a chunk, in memory.

    Parameters
    ----------
    operation : callable
    dtypes : sequence of str
        Of the results.
    place : (names, (start, stop), num_steps, workspace)
        Names of the blocks, start and stop of the chunk, T, and bytes for temporaries.
    lengths : numpy.ndarray
    *blocks : array
    """
    names, (start, stop), num_steps, workspace = place
    arguments = dict(zip(names, blocks, strict=True))
    arrays = {name: arguments.pop(name) for name in names if name in ARGUMENTS}
    arrays = {
        name: x.astype(_without_half(dtype_name(x.dtype)), copy=False) for name, x in arrays.items()
    }
    check_lengths(lengths, lengths.shape, num_steps)
    # In int64, as differences of unsigned integers would wrap.
    lengths = np.clip(lengths.astype(np.int64) - start, 0, stop - start) + min(start, 1)
    ctx, chain = ChainArguments(arrays, lengths).prepare()
    check_weights(ctx, chain)
    with using(1), ctx.computing():
        result = operation(ctx, chain, workspace, **arguments)
        # Messages may be wider than the chain, and so are results computed from them.
        pairs = zip(result if isinstance(result, tuple) else (result,), dtypes, strict=False)
        result = ctx.to_caller(tuple(ctx.cast(x, getattr(ctx.xp, dtype)) for x, dtype in pairs))
    return result if len(result) > 1 else result[0]


def _last_message(
    ctx: Context, chain: Chain, workspace: int, backward: bool
) -> tuple[Array, Array]:
    """Return the last forward message of a chunk, or its first backward message."""
    logs, shifts = chains.messages.last_message(ctx, chain, workspace, backward)
    return finite_where_positive(ctx, logs), shifts


def finite_where_positive(ctx: Context, logs: Array) -> Array:
    """Return logs clipped to the finite range of the precision; infinities stay."""
    xp, limit = ctx.xp, float(ctx.xp.finfo(ctx.dtype(ctx.precision)).max)
    return xp.where(xp.isinf(logs), logs, xp.clip(logs, -limit, limit))
