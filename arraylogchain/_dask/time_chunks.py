"""Chains of Dask arrays in pieces: what workers make of each, joined.

A piece is a chunk of time, whose rows are in blocks, and a chain of its own. It begins with one
step more, the last one of the piece before: the message that comes to that step is its first
weights, and what comes back from the piece after is its last ones. So every transition lies in one
piece, and a row that has ended passes through the pieces that follow as a chain of that one step.
Messages are logs near 0, and whole numbers that are kept apart to the end, so that nothing is lost
where they are large.
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
    check_lengths,
    check_shapes,
    check_weights,
    prepare_chain,
)

# The axes behind those of rows: of parts, of what else operations take, of what they return.
AXES = {"potentials": "tk", "transitions": "skk", "initial": "k", "final": "k", "counts": "skk"}
AXES |= {"uniforms": "t", "states": "t", "path": "t", "message": "k"}
AXES |= {"following": "", "cotangent": "", "offset": "", "": "", "t": "t", "tk": "tk"}

Operation = Callable[..., Any]


class Arguments:
    """Arguments of a chain of one step, as `TimeChunks` reads those of a `LogChain`."""

    _lengths = None

    def __init__(self, given: dict[str, da.Array], workspace: int) -> None:
        self._workspace, self._arrays = workspace, given

    def _arguments(self) -> dict[str, da.Array]:
        return self._arrays


class TimeChunks:
    """The pieces of a chain: one if its time is not cut.

    Attributes
    ----------
    arguments : dict of str to array
        The arguments of `LogChain`, but for lengths, with all batch axes.
    like : dict of str to array
        What gradients, and counts, are like: the arguments as they came.
    batch : tuple of int
    dtypes : dict of str to str
        Of kinds of results; "" is that of all others.
    lengths : array
    steps : list of (int, int)
        The first step of each piece of its own, and the one behind the last.
    """

    def __init__(self, chain: Any) -> None:
        arguments, dtype = to_lazy(chain._arguments())
        self.batch = check_shapes(arguments)
        self.workspace, lengths = chain._workspace, chain._lengths
        potentials = arguments["log_potentials"]
        self.num_steps, self.num_states = potentials.shape[-2:]
        lengths = self.num_steps if lengths is None else lengths
        if is_lazy(lengths):  # their values are checked block by block
            self.lengths = with_known_shape("lengths", lengths)
            check_lengths(np.ones(lengths.shape, lengths.dtype), self.batch, self.num_steps)
        else:
            checked_lengths = check_lengths(lengths, self.batch, self.num_steps)
            self.lengths = with_known_shape(
                "lengths",
                np.asarray(self.num_steps if checked_lengths is None else checked_lengths),
            )
        self.like = {ARGUMENTS[name]: x for name, x in arguments.items()}
        self.dtypes = {part: dtype_name(x.dtype) for part, x in self.like.items()}
        self.dtypes |= {"path": "int64", "offset": "float64", "": dtype}
        self.dtypes["message"] = _without_half(dtype)
        if "transitions" in self.like:
            self.like["counts"] = self.like["transitions"]
        self.arguments = {name: self._in_batch(ARGUMENTS[name], x) for name, x in arguments.items()}
        chunks = [n for n in potentials.chunks[-2] if n]
        self.steps = list(itertools.pairwise([0, *itertools.accumulate(chunks)]))

    def _in_batch(self, kind: str, x: da.Array) -> da.Array:
        """Return an array with all batch axes, so that results have them as well."""
        return x[(None,) * (len(self.batch) + len(AXES[kind]) - x.ndim)]

    def messages(
        self, operation: Operation | None = None, backward: bool = False
    ) -> Sequence[Sequence[Any]]:
        """Return what comes to each piece from its neighbour: logs, and whole numbers.

        None comes to the first one, backward to the last one. Forward, what leaves the last one
        follows.
        """
        operation = operation or partial(_last_message, backward=backward)
        end, result = ("log_final" if backward else "log_initial"), [(None, None)]
        for i in range(len(self.steps))[:: -1 if backward else 1]:
            message, moved = result[-1]
            log, shifts = self.apply(i, operation, ["message", "offset"], **{end: message})
            result.append((log, shifts if moved is None else added([shifts, moved])))
        return tuple(zip(*(result[-2::-1] if backward else result), strict=True))

    @cached_property
    def sides(self) -> dict[str, Sequence[Any]]:
        """Messages to each piece from both sides, as arguments of `LogChain`."""
        before, after = self.messages()[0], self.messages(backward=True)[0]
        return {"log_initial": before[:-1], "log_final": after}

    def apply(
        self, i: int, operation: Operation, kinds: Sequence[str], **replacements: da.Array | None
    ) -> list[da.Array]:
        """Return what an operation makes of a piece: results of kinds that `AXES` has.

        Arguments of `LogChain` that are given, such as messages, replace those of the chain;
        operations take other arrays by their names.
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
        call = partial(_of_block, operation, dtypes, place)
        result = map_rows(call, [(self.lengths, ""), *pairs], results)
        return list(map(self._summed, kinds, result))

    def _dtype_of_blocks(self, kind: str) -> str:
        """Return the dtype of a kind of results; sums over blocks are rounded to a half once."""
        dtype = self.dtypes.get(kind, self.dtypes[""])
        return _without_half(dtype) if kind in self.like else dtype

    def _summed(self, kind: str, x: da.Array) -> da.Array:
        """Return what blocks give, added up along batch axes along which rows share a part."""
        if kind not in self.like:
            return x
        shape = self._in_batch(kind, self.like[kind]).shape[: len(self.batch)]
        return summed_blocks(x, tuple(axis for axis, n in enumerate(shape) if n == 1))

    def apply_to_all(
        self, operation: Operation, *kinds: str, **arguments: Sequence[Any]
    ) -> list[Any]:
        """Return what an operation makes of all pieces, joined; "" is a list, one for each.

        What it takes beside a piece, messages too, are lists with an entry for each.
        """
        result = [
            self.apply(i, operation, kinds, **{name: x[i] for name, x in arguments.items()})
            for i in range(len(self.steps))
        ]
        return list(map(self.joined, kinds, zip(*result, strict=True)))

    def joined(self, kind: str, result: Sequence[da.Array]) -> Any:
        """Return one result of those of all pieces."""
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
    """Return a dtype, or the one that half precision is computed in."""
    return promote([dtype, "float32"])


def _cut(part: str, x: da.Array, start: int, stop: int) -> da.Array:
    """Return a part's share in steps, and in the one in front of them."""
    if part == "potentials":
        chunk = x[..., start:stop, :]
        front = da.zeros_like(chunk[..., : min(start, 1), :])
        return da.concatenate([front, chunk], axis=-2)
    if part != "transitions":
        return x
    return x if x.shape[-3] == 1 else x[..., max(start - 1, 0) : stop - 1, :, :]


def _of_block(
    operation: Operation, dtypes: Sequence[str], place: Any, lengths: Any, *blocks: Any
) -> Any:
    """Return what an operation makes of a piece of some rows, in memory, in these dtypes.

    Its place are the names of blocks, its first step and the one behind its last, the steps of the
    chain, and a workspace.
    """
    names, (start, stop), num_steps, workspace = place
    arguments = dict(zip(names, blocks, strict=True))
    arrays = {name: arguments.pop(name) for name in names if name in ARGUMENTS}
    arrays = {
        name: x.astype(_without_half(dtype_name(x.dtype)), copy=False) for name, x in arrays.items()
    }
    check_lengths(lengths, lengths.shape, num_steps)
    lengths = np.clip(lengths - start, 0, stop - start) + min(start, 1)
    ctx, chain = prepare_chain(arrays, lengths)
    check_weights(ctx, chain)
    with using(1), ctx.computing():
        result = operation(ctx, chain, workspace, **arguments)
        # Where messages are wider than the chain, what is computed of them is as well.
        pairs = zip(result if isinstance(result, tuple) else (result,), dtypes, strict=False)
        result = ctx.to_caller(tuple(ctx.cast(x, getattr(ctx.xp, dtype)) for x, dtype in pairs))
    return result if len(result) > 1 else result[0]


def _last_message(
    ctx: Context, chain: Chain, workspace: int, backward: bool
) -> tuple[Array, Array]:
    """Return the weights after the last step of a piece, or backward from its first step on."""
    logs, shifts = chains.messages.last_message(ctx, chain, workspace, backward)
    return finite_where_positive(ctx, logs), shifts


def finite_where_positive(ctx: Context, logs: Array) -> Array:
    """Return logs that rounding to the precision makes infinite nowhere: those are impossible."""
    xp, limit = ctx.xp, float(ctx.xp.finfo(ctx.dtype(ctx.precision)).max)
    return xp.where(xp.isinf(logs), logs, xp.clip(logs, -limit, limit))
