"""Chains whose time is cut into chunks, which are computed side by side from verified guesses.

Most chains forget: the message that enters a chunk is nearly known, but for a factor, from the last
steps of the chunk before. From such a guess every chunk computes the message that leaves it. Then a
small task for each chunk, one after another, compares the guess with the message that really
enters, with the proof of `_array.chains.time_parallel`: where they agree, but for a factor, to what
steps round anyway, the result stands; where they do not, the chunk is computed again. Once messages
from both sides are known, a chunk is a chain of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import dask.array as da

from arraylogchain._dask import pieces
from arraylogchain._dask.blocks import AXES, CORE, STATES, STEPS, Axes, batch_axes, of_blocks, whole

# A `LazyChain`, which imports this module.
LazyChain = Any

OPERATIONS = (
    "log_partition",
    "marginals",
    "forward_messages",
    "backward_messages",
    "expected_transitions",
)

# The numbers of a message, and of a guess with what results from it.
_NUMBERS, _PAIR = CORE + 20, CORE + 21
# Added to the axes of the steps from which a message is guessed.
_APART = 50
# The part of a chunk from which messages are guessed, and its least number of steps.
_SHARE, _LEAST = 8, 64

Args = list[tuple[da.Array, Axes]]


def log_partition(chain: LazyChain) -> da.Array:
    """Return the logs of the sums over all paths."""
    args = [_of_message(_messages(chain, backward=False)[-1])]
    axes = batch_axes(len(chain._batch))
    return of_blocks(pieces.total, axes, args, chain.dtype, kind=chain.dtype)


def forward_messages(chain: LazyChain) -> da.Array:
    """Return the logs of the sums over all paths up to each state."""
    return _within(chain, "forward_messages", before=_messages(chain, backward=False))


def backward_messages(chain: LazyChain) -> da.Array:
    """Return the logs of the sums over all paths from each state on."""
    return _within(chain, "backward_messages", after=_messages(chain, backward=True))


def marginals(chain: LazyChain) -> da.Array:
    """Return the posterior probability of each state at each step."""
    before, after = (_messages(chain, backward) for backward in (False, True))
    return _within(chain, "marginals", before, after)


def expected_transitions(chain: LazyChain) -> da.Array:
    """Return how often each transition is expected to be taken."""
    name = next(name for name in chain.given if name.endswith("transitions"))
    return gradients(chain, (name,), pieces.counts, [])[name].astype(chain.dtype)


def gradients(
    chain: LazyChain, names: Sequence[str], function: Callable[..., Any], extra: Args
) -> dict[str, da.Array]:
    """Return arrays of the shapes of the chain's, put together from what a function gives.

    Of a chunk, it gives one for each of `names` that the chunk has.
    """
    before, after = (_messages(chain, backward) for backward in (False, True))
    parts: dict[str, list[da.Array]] = {name: [] for name in names}
    for chunk in _chunks(chain):
        args, own = _with_messages(chunk, before, after)
        wanted = [name for name in names if name in chunk.names]
        packed = of_blocks(
            function,
            batch_axes(len(chain._batch)),
            [*args, *extra],
            object,
            names=own,
            wanted=wanted,
        )
        for i, name in enumerate(wanted):
            x = chunk.args[chunk.names.index(name)][0]
            parts[name].append(chain.summed(packed, i, name, x, x.dtype))
    return {name: _together(name, found, chain) for name, found in parts.items()}


def _together(name: str, parts: Sequence[da.Array], chain: LazyChain) -> da.Array:
    if len(parts) == 1:
        return parts[0]
    if name == "log_potentials" or chain.given[name].shape[-3] > 1:
        return da.concatenate(parts, axis=-len(AXES[name]))
    return da.stack(parts).sum(axis=0, dtype="float64").astype(parts[0].dtype)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk of time.

    `matrices` are those that lead into its steps, from the chunk before on, or one for all.
    """

    index: int
    args: Args
    names: tuple[str, ...]
    name: str
    matrices: da.Array
    is_shared: bool


def _chunks(chain: LazyChain) -> list[_Chunk]:
    potentials = chain.given["log_potentials"]
    name = next(name for name in chain.given if name.endswith("transitions"))
    matrices = chain.given[name]
    is_shared = matrices.shape[-3] == 1
    found, first = [], 0
    for index, count in enumerate(potentials.chunks[-2]):
        x = potentials[..., first : first + count, :]
        own = matrices if is_shared else matrices[..., max(first - 1, 0) : first + count - 1, :, :]
        own = whole(own, 3)
        given = {"log_potentials": x, name: own}
        for key, y in chain.given.items():
            if key.endswith("initial"):
                # Beyond the first step its batch axes still count.
                given["batch" if index else key] = y
        args = [(y, _axes(y, AXES[key])) for key, y in given.items()]
        found.append(_Chunk(index, args, tuple(given), name, own, is_shared))
        first += count
    return found


def _axes(x: da.Array, core: Axes) -> Axes:
    return (*batch_axes(x.ndim - len(core)), *core)


def _messages(chain: LazyChain, backward: bool) -> list[da.Array]:
    """Return the messages that leave each chunk, in the order in which they are computed."""
    chunks = _chunks(chain)
    if backward:
        chunks = chunks[:0:-1]  # nothing is in front of the first one
    size = chain.num_states + pieces.MORE

    def messages(function: Callable[..., Any], args: Args, count: int, **options: Any) -> Any:
        axes, new = (*batch_axes(len(chain._batch)), _NUMBERS), {_NUMBERS: count * size}
        return of_blocks(function, axes, args, "float64", new=new, backward=backward, **options)

    out = [messages(pieces.leaving, chunks[0].args, 1, names=chunks[0].names)]
    for before, chunk in itertools.pairwise(chunks):
        names = (*chunk.names, "message")
        beginning, names_before = _beginning(before, backward)
        args = [*chunk.args, *beginning]
        guessed = messages(pieces.guessed, args, 2, names=names, names_before=names_before)
        args = [*chunk.args, _of_message(out[-1]), (guessed, _axes(guessed, (_PAIR,)))]
        eps = pieces.eps_of(chain.dtype)
        out.append(messages(pieces.verified, args, 1, names=names, eps=eps))
    return out


def _of_message(x: da.Array) -> tuple[da.Array, Axes]:
    return x, _axes(x, (_NUMBERS,))


def _beginning(chunk: _Chunk, backward: bool) -> tuple[Args, tuple[str, ...]]:
    """Return the steps from which the message that leaves a chunk is guessed."""
    (x, axes), (matrices, others) = chunk.args[:2]
    count = min(x.shape[-2], max(_LEAST, x.shape[-2] // _SHARE))
    if backward:
        x = x[..., :count, :]
        matrices = matrices if chunk.is_shared else matrices[..., :count, :, :]
    else:
        first = x.shape[-2] - count
        x = x[..., first:, :]
        if not chunk.is_shared:
            matrices = matrices[..., matrices.shape[-3] - (count - 1) :, :, :]
    batch = ("batch",) * (len(chunk.names) - 2)
    args = [(x, axes), (whole(matrices, 3), others), *chunk.args[2:]]
    # Their steps are not those of the chunk whose task they are given to.
    apart = [(y, tuple(i + _APART * (i >= CORE) for i in axes)) for y, axes in args]
    return apart, (*chunk.names[:2], *batch)


def _with_messages(
    chunk: _Chunk, before: Sequence[da.Array], after: Sequence[da.Array]
) -> tuple[Args, tuple[str, ...]]:
    """Return a chunk's arrays and the messages that enter it from both sides, if it has any."""
    args, names = list(chunk.args), chunk.names
    if before and chunk.index > 0:
        args.append(_of_message(before[chunk.index - 1]))
        names = (*names, "before")
    if after and chunk.index < len(after):
        args.append(_of_message(after[len(after) - 1 - chunk.index]))
        names = (*names, "after")
    return args, names


def _within(
    chain: LazyChain,
    operation: str,
    before: Sequence[da.Array] = (),
    after: Sequence[da.Array] = (),
) -> da.Array:
    """Return an operation [..., T, K] on each chunk, put together."""
    out = []
    axes = (*batch_axes(len(chain._batch)), STEPS, STATES)
    for chunk in _chunks(chain):
        args, names = _with_messages(chunk, before, after)
        options = {"names": names, "operation": operation, "kind": chain.dtype}
        out.append(of_blocks(pieces.within, axes, args, chain.dtype, **options))
    return da.concatenate(out, axis=-2)
