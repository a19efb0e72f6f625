"""Methods of `LogChain` for Dask arrays, each on the time chunks of `TimeChunks`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import dask.array as da
import numpy as np

from arraylogchain import _chains as chains
from arraylogchain._core.context import Array, Context
from arraylogchain._dask.blocks import added, to_lazy, with_known_shape
from arraylogchain._dask.time_chunks import Operation, TimeChunks, finite_where_positive
from arraylogchain._inputs.arrays import is_lazy, on_host
from arraylogchain._inputs.chain import (
    ARGUMENTS,
    PARTS,
    Chain,
    ChainArguments,
    check_paths,
    check_states,
)
from arraylogchain._inputs.random import check_count
from arraylogchain._results import ChainGradients, check_cotangent, check_requested


def log_partition(chain: Any) -> da.Array:
    """Return log Z of each row; see `LogChain.log_partition`."""
    time_chunks = TimeChunks.of(chain)
    if len(time_chunks.steps) == 1:
        return time_chunks.apply(0, chains.messages.log_partition, [""])[0]
    (*_, logs), (*_, shifts) = time_chunks.messages()
    return added([_log_sum(time_chunks, logs), shifts], time_chunks.dtypes[""])


def _log_sum(time_chunks: TimeChunks, last: da.Array) -> da.Array:
    """Return the logs of the sums of the last message times final weights, in float64.

    They are near 0 like the message, -inf exactly where no path has a positive weight, and NaN
    where weights are NaN.
    """
    arrays = time_chunks.arguments.items()
    final = {name: x for name, x in arrays if ARGUMENTS[name] == "final"}
    return _compute_one_step(
        chains.messages.log_partition, time_chunks, last.astype("float64"), **final
    )


def _compute_one_step(
    operation: Operation, time_chunks: TimeChunks, potentials: da.Array, **final: da.Array
) -> da.Array:
    """Return the result of an operation on chains of one step with potentials [..., K]."""
    arguments = ChainArguments({"log_potentials": potentials[..., None, :], **final})
    return TimeChunks(arguments, time_chunks.workspace).apply(0, operation, [""])[0]


def forward_messages(chain: Any) -> da.Array:
    """Return the log forward messages."""
    time_chunks = TimeChunks.of(chain)
    before, shifts = time_chunks.messages()
    return time_chunks.apply_to_all(
        chains.messages.forward_messages, "tk", log_initial=before, offset=shifts
    )[0]


def backward_messages(chain: Any) -> da.Array:
    """Return the log backward messages."""
    time_chunks = TimeChunks.of(chain)
    after, shifts = time_chunks.messages(backward=True)
    return time_chunks.apply_to_all(
        chains.messages.backward_messages, "tk", log_final=after, offset=shifts
    )[0]


def marginals(chain: Any) -> da.Array:
    """Return the posterior probability of each state at each step."""
    time_chunks, compute = TimeChunks.of(chain), chains.marginals.marginals
    return time_chunks.apply_to_all(compute, "tk", **time_chunks.sides)[0]


def expected_transitions(chain: Any) -> da.Array:
    """Return the expected counts of transitions."""
    time_chunks, compute = TimeChunks.of(chain), chains.marginals.expected_transitions
    return time_chunks.apply_to_all(compute, "counts", **time_chunks.sides)[0]


def posterior(chain: Any) -> tuple[Any, ...]:
    """Return log Z, marginals and counts; see `LogChain.posterior`."""
    time_chunks = TimeChunks.of(chain)
    kinds = ["", "tk"] + ["counts"] * ("counts" in time_chunks.like)
    compute, sides = chains.marginals.posterior, time_chunks.sides
    log_zs, *results = time_chunks.apply_to_all(compute, *kinds, **sides)
    log_z = log_zs[0] if len(log_zs) == 1 else log_partition(chain)
    return log_z, *results, *[None] * (2 - len(results))


def filtered(chain: Any) -> tuple[Any, ...]:
    """Return state probabilities given the steps so far; see `LogChain.filtered`."""
    time_chunks, kinds = TimeChunks.of(chain), ("tk", "t")
    before, _ = time_chunks.messages()
    return tuple(time_chunks.apply_to_all(chains.messages.filtered, *kinds, log_initial=before))


def entropy(chain: Any) -> da.Array:
    """Return the entropy of all chunks, less that of the steps that two chunks share."""
    time_chunks, compute = TimeChunks.of(chain), chains.entropy.entropy
    (parts,) = time_chunks.apply_to_all(compute, "offset", **time_chunks.sides)
    before, after = time_chunks.sides.values()
    for x, y in zip(before[1:], after[:-1], strict=True):
        parts += (-_compute_one_step(compute, time_chunks, added([x, y])),)
    return added(parts, time_chunks.dtypes[""])


def viterbi(chain: Any) -> tuple[Any, ...]:
    """Return paths of largest weight, from the last time chunk to the first."""
    time_chunks, states, after = TimeChunks.of(chain), [], None
    if len(time_chunks.steps) == 1:
        return tuple(time_chunks.apply(0, chains.paths.viterbi, ["path", ""]))
    (*before, last), _ = time_chunks.messages(_best_message)
    for i in reversed(range(len(time_chunks.steps))):
        messages = {"log_initial": before[i], "log_final": after}
        states.append(time_chunks.apply(i, chains.paths.viterbi, ["path", ""], **messages)[0])
        is_next = states[-1][..., :1] == da.arange(time_chunks.num_states, like=states[-1]._meta)
        after = da.where(is_next, 0.0, -math.inf).astype(time_chunks.dtypes["message"])
    total = _log_sum(time_chunks, last)
    path = _possible(time_chunks.joined("path", states[::-1]), total)
    weight = log_weight(chain, da.maximum(path, 0))
    return path, da.where(da.isfinite(total), weight, total).astype(weight.dtype)


def best_paths(chain: Any, num_paths: int) -> tuple[Any, ...]:
    """Return the paths of largest weight, of chains in one time chunk."""
    time_chunks = TimeChunks.of(chain)
    if (count := len(time_chunks.steps)) > 1:
        raise ValueError(
            f"log_potentials must have one chunk along time for best_paths, got {count}; "
            "log_potentials.rechunk({-2: -1}) joins them"
        )
    check_count("num_paths", (num_paths, *time_chunks.batch, time_chunks.num_steps))
    numbers = da.arange(num_paths, chunks=-1)
    states, log_weight = time_chunks.apply(0, _best_paths, ["nt", "n"], n=numbers)
    return da.moveaxis(states, -2, 0), da.moveaxis(log_weight, -1, 0)


def _best_paths(ctx: Context, chain: Chain, workspace: int, n: Array) -> tuple[Array, Array]:
    """Return the best paths of a block, [*batch, n, T], and their log weights, [*batch, n]."""
    states, log_weight = chains.paths.best_paths(ctx, chain, workspace, len(n))
    return ctx.xp.moveaxis(states, 0, -2), ctx.xp.moveaxis(log_weight, 0, -1)


def _best_message(ctx: Context, chain: Chain, workspace: int) -> tuple[Array, Array]:
    """Return the last log max-product message, with offsets of 0, as paths need none."""
    logs = finite_where_positive(ctx, chains.paths.best_message(ctx, chain, workspace))
    return logs, ctx.xp.zeros_like(logs[..., 0])


def _possible(states: da.Array, total: da.Array) -> da.Array:
    """Return states, 0 in rows without a path and -1 in rows with NaN weights, as in memory.

    `total` is in float64: rounded to a smaller dtype it might underflow.
    """
    total = total[..., None]
    states = da.where(total == -math.inf, da.minimum(states, 0), states)
    return da.where(da.isnan(total), -1, states)


def sample(chain: Any, num_samples: int, rng: Any) -> da.Array:
    """Draw paths, from the last time chunk to the first; each block has its own seed."""
    time_chunks = TimeChunks.of(chain)
    random = da.random.default_rng(int(rng.integers(1 << 63)))
    (*before, last), _ = time_chunks.messages()
    check_count("num_samples", (num_samples, *last.shape[:-1], time_chunks.num_steps))
    result: list[Any] = [None]
    for i, (start, stop) in reversed(list(enumerate(time_chunks.steps))):
        shape = (num_samples, *last.shape[:-1], stop - start + min(start, 1))
        uniforms = random.random(shape, chunks=(num_samples, *last.chunks[:-1], -1))
        following = None if result[-1] is None else result[-1][..., 0]
        messages = {"log_initial": before[i], "following": following}
        result += time_chunks.apply(i, _draw, ["path"], uniforms=uniforms, **messages)
    states = time_chunks.joined("path", result[:0:-1])
    return states if len(time_chunks.steps) == 1 else _possible(states, _log_sum(time_chunks, last))


def _draw(
    ctx: Context, chain: Chain, workspace: int, uniforms: Array, following: Array | None = None
) -> Array:
    """Return samples of a time chunk that end in the first states of the chunk after it."""
    xp, uniforms = ctx.xp, ctx.xp.asarray(uniforms)
    out = ctx.empty(uniforms.shape, ctx.index_dtype)
    if following is not None:
        chain.parts.pop("final", None)  # applied in the last chunk
        lengths = np.asarray(chain.num_steps if chain.lengths is None else chain.lengths)
        is_last = xp.asarray(np.arange(chain.num_steps) == lengths[..., None] - 1)
        uniforms = xp.where(is_last, -1.0 - following[..., None], uniforms)
    chains.paths.sample(ctx, chain, workspace, out, uniforms)
    return out


def log_weight(chain: Any, states: Any) -> da.Array:
    """Return the log weights of given paths; see `LogChain.log_weight`."""
    time_chunks, states = _checked_paths(chain, states)
    shape, sums = (*time_chunks.batch, time_chunks.num_states), []
    ones = da.zeros_like(time_chunks.arguments["log_potentials"], shape=shape)
    compute = partial(_with_checked_states, function=chains.log_weight.log_weight_parts)
    for i, (start, stop) in enumerate(time_chunks.steps):
        arguments = {"states": states[..., max(start - 1, 0) : stop]}
        # The first chunk has the initial weights, the last one the final weights.
        arguments |= {"log_initial": ones} if start else {}
        arguments |= {"log_final": ones} if stop < time_chunks.num_steps else {}
        sums += time_chunks.apply(i, compute, ["offset", "offset"], **arguments)
    # Sums of whole nats are exact.
    return added([added(sums[::2]), added(sums[1::2])], time_chunks.dtypes[""])


def _checked_paths(chain: Any, states: Any) -> tuple[TimeChunks, da.Array]:
    """Return the time chunks of a chain, and paths as a Dask array.

    A row that has ended stays in its last state.
    """
    time_chunks = TimeChunks.of(chain)
    states = with_known_shape("states", states if is_lazy(states) else on_host("states", states))
    check_paths(states, time_chunks.batch, time_chunks.num_steps)
    times, lengths = da.arange(time_chunks.num_steps), time_chunks.lengths[..., None]
    last_states = da.where(times == lengths - 1, states, 0).sum(axis=-1, keepdims=True)
    return time_chunks, da.where(times < lengths, states, last_states)


def _with_checked_states(
    ctx: Context, chain: Chain, workspace: int, states: Array, function: Operation
) -> Any:
    """Return the result of a function of paths; raise if states are out of range."""
    return function(ctx, chain, workspace, check_states(ctx, states, chain, workspace))


def log_probability(chain: Any, states: Any) -> da.Array:
    """Return the log probabilities of given paths; see `LogChain.log_probability`."""
    time_chunks, states = _checked_paths(chain, states)
    all_states = da.arange(time_chunks.num_states)
    after, terms = time_chunks.messages(backward=True)[0], []
    compute = partial(_with_checked_states, function=chains.log_probability.log_probability)
    for i, (start, stop) in enumerate(time_chunks.steps):
        arguments = {"states": states[..., max(start - 1, 0) : stop], "log_final": after[i]}
        if start:
            # The chunk before has the term of the step that they share.
            is_first = states[..., start - 1 : start] == all_states
            arguments["log_initial"] = da.where(is_first, 0.0, -math.inf)
        terms += time_chunks.apply(i, compute, ["offset"], **arguments)
    return added(terms, time_chunks.dtypes[""])


def value_and_pullback(chain: Any) -> tuple[da.Array, Callable[..., ChainGradients]]:
    """Return log Z of Dask arrays and its pullback, which recomputes the messages."""
    value, arguments = log_partition(chain), [ARGUMENTS[name] for name in chain._arguments.arrays]

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
        time_chunks, pull = TimeChunks.of(chain), partial(_pulled_back, requested=parts)
        inputs = {"cotangent": g, **time_chunks.sides}
        result = time_chunks.apply_to_all(pull, *parts, **inputs) if parts else []
        return ChainGradients(*map(dict(zip(parts, result, strict=True)).get, PARTS))

    return value, pullback


def _pulled_back(
    ctx: Context, chain: Chain, workspace: int, cotangent: Array, requested: list[str]
) -> tuple[Array, ...]:
    _, pullback = chains.marginals.value_and_pullback(ctx, chain, workspace, False)
    result = pullback(ctx.xp.asarray(cotangent), frozenset(requested))
    return tuple(result[part] for part in requested)
