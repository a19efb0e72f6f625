"""Chains whose time is cut into chunks, which are computed side by side from verified guesses.

Most chains forget: what enters a chunk is nearly known from the last steps of the chunk before,
whatever those began with. So a message that enters is guessed, and every chunk computes what leaves
it after that guess. Then a small task for each chunk, one after another, compares the guess with
what really enters, and where it does not hold the chunk is computed again.

That is the same for sums over paths, forward and backward, for the largest weights, and for paths
themselves, best ones and samples, which are followed backward: what enters a chunk is the state
that follows it. Once it is known what enters from both sides, a chunk is a chain of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import dask.array as da
import numpy as np
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from arraylogchain._context import DOUBLE
from arraylogchain._dask import pieces
from arraylogchain._dask.blocks import Axes, chain_axes

# A `LazyChain`, which imports this module.
LazyChain = Any
# Arrays by name, with the numbers of their axes.
Extra = Mapping[str, tuple[da.Array, Axes]]


def messages(chain: LazyChain, function: Callable[..., Any], backward: bool = False) -> da.Array:
    """Return the messages that leave each chunk in a direction, one object for each block."""
    eps = DOUBLE.eps if function is pieces.largest else chain.eps
    return leaving(chain, {}, backward, function=function, eps=eps)


def leaving(chain: LazyChain, extra: Extra, backward: bool, **options: Any) -> da.Array:
    """Return what leaves each chunk in a direction."""
    options["backward"] = backward
    if not chain.cuts_time:
        return chain.blocks(pieces.leave, {**chain.given, **extra}, **options)
    # What is read for one direction is made anew for the other, rather than held meanwhile.
    arrays = {**(chain.given if backward else chain.again), **extra}
    step = -1 if backward else 1
    guess = chain.blocks(pieces.guess, arrays, **options)
    result = chain.blocks(pieces.leave, {**arrays, "entering": entering(guess, step)}, **options)
    options["workspace"] = chain.workspace_of_blocks
    verify = partial(pieces.verified, names=tuple(arrays), options=options)
    name = f"verified-{tokenize(result.name)}"
    tasks: dict[Any, Any] = {}
    for index in np.ndindex(*result.numblocks):
        before = (*index[:-1], index[-1] - step)
        if not 0 <= before[-1] < result.numblocks[-1]:
            tasks[(name, *index)] = (_same, (result.name, *index))
            continue
        numbers = dict(zip(chain_axes(len(index) - 1), index, strict=True))
        blocks = [_block(x, axes, numbers) for x, axes in arrays.values()]
        keys = [(name, *before), (guess.name, *before), (result.name, *index)]
        tasks[(name, *index)] = (verify, *keys, blocks)
    return _of_tasks(name, tasks, result, guess, *(x for x, _ in arrays.values()))


def entering(leaving: da.Array, step: int) -> tuple[da.Array, Axes]:
    """Return what enters chunks, which has left those before in a direction; None at the ends."""
    name, tasks = f"entering-{tokenize(leaving.name, step)}", {}
    for index in np.ndindex(*leaving.numblocks):
        before = (*index[:-1], index[-1] - step)
        is_inside = 0 <= before[-1] < leaving.numblocks[-1]
        tasks[(name, *index)] = (_same, (leaving.name, *before) if is_inside else None)
    return _of_tasks(name, tasks, leaving), chain_axes(leaving.ndim - 1)


def _block(x: da.Array, axes: Axes, numbers: Mapping[int, int]) -> tuple[Any, ...]:
    """Return the key of an array's block."""
    own = zip(axes, x.numblocks, strict=True)
    return (x.name, *(numbers.get(axis, 0) if count > 1 else 0 for axis, count in own))


def _of_tasks(name: str, tasks: dict[Any, Any], like: da.Array, *others: da.Array) -> da.Array:
    graph = HighLevelGraph.from_collections(name, tasks, dependencies=[like, *others])
    return da.Array(graph, name, like.chunks, meta=like._meta)


def _same(x: Any) -> Any:
    return x


def between(chain: LazyChain) -> Extra:
    """Return the messages that enter blocks from both sides."""
    if not chain.cuts_time:
        return {}
    before, after = messages(chain, pieces.sums), messages(chain, pieces.sums, backward=True)
    axes = chain_axes(after.ndim - 1)
    return {
        "before": entering(before, 1),
        "after": entering(after, -1),
        "leaving": (after, axes),
    }
