"""What `LogChain` returns of Dask arrays: each method, on pieces of chains.

A piece is a chunk of time, whose rows are in blocks, and a chain of its own. It begins with one
step more, the last one of the piece before: the message that comes to that step is its first
weights, and what comes back from the piece after is its last ones. So every transition lies in one
piece, and a row that has ended passes through the pieces that follow as a chain of that one step.
Messages are logs near 0, and whole numbers that are kept apart to the end, so that nothing is lost
where they are large.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
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
from arraylogchain._inputs.arrays import dtype_name, is_lazy, on_host, promote
from arraylogchain._inputs.chain import (
    ARGUMENTS,
    PARTS,
    Chain,
    check_lengths,
    check_paths,
    check_shapes,
    check_states,
    check_weights,
    prepare_chain,
)
from arraylogchain._inputs.random import check_num_samples
from arraylogchain._results import ChainGradients, check_cotangent, check_requested

# The axes behind those of rows: of parts, of what else operations take, of what they return.
AXES = {"potentials": "tk", "transitions": "skk", "initial": "k", "final": "k", "counts": "skk"}
AXES |= {"uniforms": "t", "states": "t", "path": "t", "message": "k"}
AXES |= {"following": "", "cotangent": "", "whole": "", "": "", "t": "t", "tk": "tk"}

Operation = Callable[..., Any]


class _Arguments:
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
        self.dtypes |= {"path": "int64", "whole": "float64", "": dtype}
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
            log, shifts = self.apply(i, operation, ["message", "whole"], **{end: message})
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


def log_partition(chain: Any) -> da.Array:
    """Return log Z of each row; see `LogChain.log_partition`."""
    time_chunks = TimeChunks(chain)
    if len(time_chunks.steps) == 1:
        return time_chunks.apply(0, chains.messages.log_partition, [""])[0]
    (*_, logs), (*_, shifts) = time_chunks.messages()
    return added([_total_of(chain, logs), shifts], time_chunks.dtypes[""])


def _total_of(chain: Any, last: da.Array) -> da.Array:
    """Return the logs of the sums over the last states, in float64: they are near 0 as these are.

    They are -inf exactly where no path has a positive weight, and NaN where weights are.
    """
    final = {name: x for name, x in chain._arguments().items() if ARGUMENTS[name] == "final"}
    step = {"log_potentials": last[..., None, :].astype("float64"), **final}
    return log_partition(_Arguments(step, chain._workspace))


def forward_messages(chain: Any) -> da.Array:
    """Return the logs of the sums over all paths up to each state."""
    time_chunks = TimeChunks(chain)
    before, shifts = time_chunks.messages()
    return time_chunks.apply_to_all(
        chains.messages.forward_messages, "tk", log_initial=before, whole=shifts
    )[0]


def backward_messages(chain: Any) -> da.Array:
    """Return the logs of the sums over all paths from each state on."""
    time_chunks = TimeChunks(chain)
    after, shifts = time_chunks.messages(backward=True)
    return time_chunks.apply_to_all(
        chains.messages.backward_messages, "tk", log_final=after, whole=shifts
    )[0]


def marginals(chain: Any) -> da.Array:
    """Return the posterior probability of each state at each step."""
    time_chunks = TimeChunks(chain)
    return time_chunks.apply_to_all(chains.marginals.marginals, "tk", **time_chunks.sides)[0]


def expected_transitions(chain: Any) -> da.Array:
    """Return how often each transition is expected to be taken."""
    time_chunks = TimeChunks(chain)
    return time_chunks.apply_to_all(
        chains.marginals.expected_transitions, "counts", **time_chunks.sides
    )[0]


def posterior(chain: Any) -> tuple[Any, ...]:
    """Return log Z, marginals and counts; see `LogChain.posterior`."""
    time_chunks = TimeChunks(chain)
    kinds = ["", "tk"] + ["counts"] * ("counts" in time_chunks.like)
    log_zs, marginals, *counts = time_chunks.apply_to_all(
        chains.marginals.posterior, *kinds, **time_chunks.sides
    )
    log_z = log_zs[0] if len(log_zs) == 1 else log_partition(chain)
    return log_z, marginals, counts[0] if counts else None


def filtered(chain: Any) -> tuple[Any, ...]:
    """Return state probabilities given the steps so far; see `LogChain.filtered`."""
    time_chunks = TimeChunks(chain)
    return tuple(
        time_chunks.apply_to_all(
            chains.messages.filtered, "tk", "t", log_initial=time_chunks.messages()[0]
        )
    )


def entropy(chain: Any) -> da.Array:
    """Return the entropy of the posterior; that of a step in which pieces overlap counts once."""
    time_chunks = TimeChunks(chain)
    (parts,) = time_chunks.apply_to_all(chains.entropy.entropy, "whole", **time_chunks.sides)
    before, after = time_chunks.sides.values()
    for x, y in zip(before[1:], after[:-1], strict=True):
        step = added([x, y])[..., None, :]
        parts += (-entropy(_Arguments({"log_potentials": step}, chain._workspace)),)
    return added(parts, time_chunks.dtypes[""])


def viterbi(chain: Any) -> tuple[Any, ...]:
    """Return paths of largest weight, followed from the last piece to the first."""
    time_chunks, result, after = TimeChunks(chain), [], None
    if len(time_chunks.steps) == 1:
        return tuple(time_chunks.apply(0, chains.paths.viterbi, ["path", ""]))
    (*before, last), _ = time_chunks.messages(_best_message)
    for i in reversed(range(len(time_chunks.steps))):
        messages = {"log_initial": before[i], "log_final": after}
        result.append(time_chunks.apply(i, chains.paths.viterbi, ["path", ""], **messages)[0])
        is_next = result[-1][..., :1] == da.arange(time_chunks.num_states, like=result[-1]._meta)
        after = da.where(is_next, 0.0, -math.inf).astype(time_chunks.dtypes["message"])
    total = _total_of(chain, last)
    states = _possible(time_chunks.joined("path", result[::-1]), total)
    weight = log_weight(chain, da.maximum(states, 0))
    return states, da.where(da.isfinite(total), weight, total).astype(weight.dtype)


def _last_message(
    ctx: Context, chain: Chain, workspace: int, backward: bool
) -> tuple[Array, Array]:
    """Return the weights after the last step of a piece, or backward from its first step on."""
    logs, shifts = chains.messages.last_message(ctx, chain, workspace, backward)
    return _finite_where_positive(ctx, logs), shifts


def _best_message(ctx: Context, chain: Chain, workspace: int) -> tuple[Array, Array]:
    """Return the logs of the largest weights; whole numbers do not matter to paths."""
    logs = _finite_where_positive(ctx, chains.paths.best_message(ctx, chain, workspace))
    return logs, ctx.xp.zeros_like(logs[..., 0])


def _finite_where_positive(ctx: Context, logs: Array) -> Array:
    """Return logs that rounding to the precision makes infinite nowhere: those are impossible."""
    xp, limit = ctx.xp, float(ctx.xp.finfo(ctx.dtype(ctx.precision)).max)
    return xp.where(xp.isinf(logs), logs, xp.clip(logs, -limit, limit))


def _possible(states: da.Array, total: da.Array) -> da.Array:
    """Return states as in memory: 0 in rows without a path, and -1 where weights are NaN.

    What decides is a total that was not rounded: paths may weigh less than the smallest number.
    """
    total = total[..., None]
    states = da.where(total == -math.inf, da.minimum(states, 0), states)
    return da.where(da.isnan(total), -1, states)


def sample(chain: Any, num_samples: int, rng: Any) -> da.Array:
    """Draw paths, from the last piece to the first: blocks have seeds of their own."""
    time_chunks, random = TimeChunks(chain), da.random.default_rng(int(rng.integers(1 << 63)))
    (*before, last), _ = time_chunks.messages()
    check_num_samples((num_samples, *last.shape[:-1], time_chunks.num_steps))
    result: list[Any] = [None]
    for i, (start, stop) in reversed(list(enumerate(time_chunks.steps))):
        shape = (num_samples, *last.shape[:-1], stop - start + min(start, 1))
        uniforms = random.random(shape, chunks=(num_samples, *last.chunks[:-1], -1))
        following = None if result[-1] is None else result[-1][..., 0]
        messages = {"log_initial": before[i], "following": following}
        result += time_chunks.apply(i, _draw, ["path"], uniforms=uniforms, **messages)
    states = time_chunks.joined("path", result[:0:-1])
    return states if len(time_chunks.steps) == 1 else _possible(states, _total_of(chain, last))


def _draw(
    ctx: Context, chain: Chain, workspace: int, uniforms: Array, following: Array | None = None
) -> Array:
    """Return samples of a piece that end in the states with which the piece after it begins."""
    xp, uniforms = ctx.xp, ctx.xp.asarray(uniforms)
    out = ctx.empty(uniforms.shape, ctx.index_dtype)
    if following is not None:
        chain.parts.pop("final", None)  # which pieces that follow have taken
        lengths = np.asarray(chain.num_steps if chain.lengths is None else chain.lengths)
        is_last = xp.asarray(np.arange(chain.num_steps) == lengths[..., None] - 1)
        uniforms = xp.where(is_last, -1.0 - following[..., None], uniforms)
    chains.paths.sample(ctx, chain, workspace, out, uniforms)
    return out


def log_weight(chain: Any, states: Any) -> da.Array:
    """Return the log weights of given paths; see `LogChain.log_weight`."""
    time_chunks = TimeChunks(chain)
    states = with_known_shape("states", states if is_lazy(states) else on_host("states", states))
    check_paths(states, time_chunks.batch, time_chunks.num_steps)
    lengths = time_chunks.lengths[..., None]
    # A row that has ended passes through pieces in state 0, and all its weights there are one.
    states = da.where(da.arange(time_chunks.num_steps, like=states._meta) < lengths, states, 0)
    sums = []
    for i, (start, stop) in enumerate(time_chunks.steps):
        arguments = {"states": states[..., max(start - 1, 0) : stop]}
        for name, x in time_chunks.arguments.items():
            if ARGUMENTS[name] == "final":
                one = 0.0 if name == "log_final" else 1.0
                arguments[name] = da.where((start < lengths) & (lengths <= stop), x, one)
        if start:
            shape = *time_chunks.batch, time_chunks.num_states
            arguments["log_initial"] = da.zeros_like(
                time_chunks.arguments["log_potentials"], shape=shape
            )
        sums += time_chunks.apply(i, _log_weight, ["whole", "whole"], **arguments)
    # Whole numbers by themselves: they add up exactly.
    return added([added(sums[::2]), added(sums[1::2])], time_chunks.dtypes[""])


def _log_weight(ctx: Context, chain: Chain, workspace: int, states: Array) -> Any:
    states = check_states(ctx, states, chain, workspace)
    return chains.log_weight.log_weight_parts(ctx, chain, workspace, states)


def value_and_pullback(chain: Any) -> tuple[da.Array, Callable[..., ChainGradients]]:
    """Return `vjp.log_partition` of Dask arrays; the pullback computes blocks anew."""
    value, arguments = log_partition(chain), [ARGUMENTS[name] for name in chain._arguments()]

    def pullback(
        cotangent: Any, wanted: Collection[str] = ChainGradients._fields
    ) -> ChainGradients:
        check_requested(wanted)
        if isinstance(cotangent, (int, float)):
            cotangent = da.asarray(float(cotangent), like=value._meta)
        g = to_lazy({"value": value, "cotangent": cotangent})[0]["cotangent"]
        check_cotangent(g, value.shape)
        names = zip(ChainGradients._fields, PARTS, strict=True)
        parts = [part for name, part in names if name in wanted and part in arguments]
        time_chunks, pull = TimeChunks(chain), partial(_pulled_back, requested=parts)
        others = {"cotangent": [g] * len(time_chunks.steps), **time_chunks.sides}
        result = time_chunks.apply_to_all(pull, *parts, **others) if parts else []
        return ChainGradients(*map(dict(zip(parts, result, strict=True)).get, PARTS))

    return value, pullback


def _pulled_back(
    ctx: Context, chain: Chain, workspace: int, cotangent: Array, requested: list[str]
) -> tuple[Array, ...]:
    _, pullback = chains.marginals.value_and_pullback(ctx, chain, workspace, False)
    result = pullback(ctx.xp.asarray(cotangent), frozenset(requested))
    return tuple(result[part] for part in requested)
