"""Best paths and exact samples, by a forward pass and a backtrace.

The best weight up to a state is an exact bound for all paths that lead to a suffix. So the n best
paths end in the n best suffixes from any step on, and the backtrace keeps no others.

Backends may find best paths of whole chains in one call. Segments do not store predecessors: the
backtrace computes them again for the one state it needs. The last state of a sample is drawn from
the last forward message; given the next state j, the state is k with a probability in proportion to
``exp(alpha[k]) * P[k, j]``, whatever comes later.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from arraylogchain._backends.array_backtraces import below_largest, draw_states, relative, smallest
from arraylogchain._backends.interface import Suffixes
from arraylogchain._backends.shards import Shard
from arraylogchain._chains.passes import Pass, last_logs, passes, run_passes, write_steps
from arraylogchain._core.axes import chunks
from arraylogchain._core.context import Array, Context
from arraylogchain._core.scaled import add_scale
from arraylogchain._inputs.chain import Chain

# Arrays of messages that take as much memory as the numbers of K paths at a step.
_ARRAYS_OF_PATHS = 12


def viterbi(ctx: Context, chain: Chain, workspace: int) -> tuple[Array, Array]:
    """Return a path of largest weight, [*batch, T], and the log of its weight, [*batch].

    Past a row's length states are -1. All states are 0 where no path has a positive weight, and -1
    where the weight is NaN.
    """
    xp = ctx.xp
    states = ctx.empty((*chain.batch, chain.num_steps), ctx.index_dtype)
    if chain.lengths is not None:
        states[...] = -1
    weights = ctx.empty(chain.batch, ctx.result_dtype)

    def work(forward_pass: Pass) -> None:
        shard = forward_pass.shard
        if (result := forward_pass.whole_chains("best_paths")) is not None:
            shard.write(states, result.states, (slice(shard.num_steps),))
            shard.write(weights, result.log_weights)
        for one_pass in forward_pass.remaining:
            one_pass.run_and_store()
            if not one_pass.fused("backtrace_paths", one_pass, states, weights):
                backtrace(one_pass)

    def backtrace(forward_pass: Pass) -> None:
        backend, shard = forward_pass.backend, forward_pass.shard
        last = last_logs(shard, forward_pass.carry)
        after, best = xp.argmax(last.values, axis=-1), xp.max(last.values, axis=-1)
        shard.write(weights, add_scale(best, last.shifts, last.exponents))
        has_path, no_path = best > -math.inf, _states_without_path(ctx, best)
        for n, steps in reversed(list(enumerate(forward_pass.segments))):
            path = backend.backtrace(forward_pass.stored_messages(n), after, steps)
            after = path[0, ...]
            write_steps(states, shard, steps, xp.where(has_path, path, no_path), -1)

    run_passes(passes("viterbi", ctx, chain, workspace, needs_history=True), work)
    return states, weights


def best_message(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the last max-product message in log space, [*batch, K], up to a shift of each row."""
    out = ctx.empty((*chain.batch, chain.num_states), ctx.dtype(ctx.widest))

    def work(one_pass: Pass) -> None:
        one_pass.shard.write(out, one_pass.final_carry().values)

    run_passes(passes("best_message", ctx, chain, workspace), work)
    return out


def best_paths(ctx: Context, chain: Chain, workspace: int, num_paths: int) -> tuple[Array, Array]:
    """Return the paths of largest weight, [num_paths, *batch, T], and the logs of their weights.

    Past a row's length states are -1. Where there are fewer paths, states are 0 and weights -inf;
    where weights are NaN, states are -1.
    """
    xp = ctx.xp
    states = ctx.empty((num_paths, *chain.batch, chain.num_steps), ctx.index_dtype)
    weights = ctx.empty((num_paths, *chain.batch), ctx.result_dtype)
    paths, log_weights = (xp.permute_dims(x, (*range(1, x.ndim), 0)) for x in (states, weights))

    def work(forward_pass: Pass) -> None:
        forward_pass.run_and_store()
        shard, last = forward_pass.shard, last_logs(forward_pass.shard, forward_pass.carry)
        suffixes = _last_states(ctx, last.values, num_paths)
        for n, steps in reversed(list(enumerate(forward_pass.segments))):
            updated = forward_pass.stored_messages(n)
            links, suffixes = forward_pass.backend.backtrace_suffixes(updated, suffixes, steps)
            write_steps(paths, shard, steps, links, 0)
        numbers = xp.argsort(suffixes.losses, axis=-1, stable=True)
        losses = xp.take_along_axis(suffixes.losses, numbers, axis=-1)
        total = add_scale(xp.max(last.values, axis=-1), last.shifts, last.exponents)[..., None]
        has_path, no_path = losses < math.inf, _states_without_path(ctx, total)
        no_weight = xp.where(xp.isnan(total), total, -math.inf)
        shard.write(log_weights, xp.where(has_path, total - losses, no_weight))
        for steps in forward_pass.segments:
            links = xp.permute_dims(shard.read(paths, (steps,)), (2, 0, 1, 3))
            path, numbers = forward_pass.backend.follow(links, numbers)
            write_steps(paths, shard, steps, xp.where(has_path, path, no_path), -1)
        shard.view(paths, (slice(shard.num_steps, None),))[...] = -1

    # Links, states and their copies.
    num_arrays = 10 + -(-_ARRAYS_OF_PATHS * num_paths // chain.num_states)
    all_passes = passes(
        "best_paths", ctx, chain, workspace, needs_history=True, num_arrays=num_arrays
    )
    run_passes(all_passes, work)
    return states, weights


def _last_states(ctx: Context, last: Array, num_paths: int) -> Suffixes:
    """Return the best last states, given the logs of their weights [groups, rows, K]."""
    xp, K = ctx.xp, int(last.shape[-1])
    shape = (*last.shape[:-1], max(0, num_paths - K))
    padding = xp.full(shape, -math.inf, dtype=last.dtype, device=ctx.device)
    losses, states = smallest(xp, below_largest(xp, xp.concat([last, padding], axis=-1)), num_paths)
    return Suffixes(states % K, losses)


def sample(ctx: Context, chain: Chain, workspace: int, out: Array, uniforms: Array) -> None:
    """Write paths into `out`, [num_samples, *batch, T]; -1 past the end.

    States are 0 where no path has a positive weight, and -1 where the sum of weights is NaN.
    `uniforms` are numbers in [0, 1) of the same shape, which may share the memory of `out`: the
    numbers of a step are read before its states are written. At a row's last step, -1 - k stands
    for state k.
    """
    xp, order = ctx.xp, (*range(1, out.ndim), 0)
    paths, numbers = (xp.permute_dims(x, order) for x in (out, uniforms))

    def work(forward_pass: Pass) -> None:
        forward_pass.run_and_store()
        if not forward_pass.fused("sample_paths", forward_pass, paths, numbers):
            sampling_backtrace(forward_pass)
        shard = forward_pass.shard
        if shard.num_steps < chain.num_steps:
            shard.view(paths, (slice(shard.num_steps, None),))[...] = -1

    def sampling_backtrace(forward_pass: Pass) -> None:
        shard, last = forward_pass.shard, forward_pass.carry
        groups, rows, size = shard.state_shape
        # Cumulative sums of the last message times final weights, up to a scale.
        last_weights = ctx.load(last.values, ctx.widest)
        if "final" in shard.views or last.is_log is not None:
            last_weights = relative(xp, last_logs(shard, last).values)
        last_weights = xp.cumulative_sum(last_weights, axis=-1)
        total = last_weights[..., -1:]
        has_path, no_path = total > 0, _states_without_path(ctx, total)
        longest = max(steps.stop - steps.start for steps in forward_pass.segments)
        bytes_per_sample = 8 * groups * rows * max(6 * size, 4 * longest)
        num_samples = max(1, forward_pass.workspace // bytes_per_sample)
        for n, steps in reversed(list(enumerate(forward_pass.segments))):
            updated = forward_pass.stored_messages(n)
            for samples in chunks(int(out.shape[0]), num_samples):
                after = _states_after(shard, steps, last_weights, paths, numbers, samples)
                u = xp.permute_dims(shard.read(numbers, (steps, samples)), (2, 0, 1, 3))
                path = forward_pass.backend.sampling_backtrace(updated, after, steps, u)
                path = xp.where(has_path, path, no_path)
                write_steps(paths[..., samples], shard, steps, path, -1)

    run_passes(passes("sample", ctx, chain, workspace // 2, needs_history=True), work)


def _states_without_path(ctx: Context, weights: Array) -> Array:
    """Return the states of rows without a path: -1 where weights are NaN, else 0."""
    return -ctx.xp.astype(ctx.xp.isnan(weights), ctx.index_dtype)


def _states_after(
    shard: Shard, steps: slice, last_weights: Array, paths: Array, numbers: Array, samples: slice
) -> Array:
    """Return the states after a segment, [groups, rows, samples].

    Rows that end in the segment get their last state, drawn by the cumulative sums `last_weights`
    [groups, rows, K]. `paths` and `numbers` are [*batch, T, samples]; paths after the segment have
    been written.
    """
    ctx, xp = shard.ctx, shard.ctx.xp

    def last_states(rows: tuple[Any, ...], length: int) -> Array:
        u = ctx.load(shard.read(numbers, (length - 1, samples))[rows], ctx.widest)
        drawn = draw_states(xp, last_weights[rows][:, :, None, :], u)
        # -1 - k stands for state k; see `sample`.
        return xp.where(u < 0, xp.astype(-1 - u, drawn.dtype), drawn)

    if steps.stop < shard.num_steps:
        # Rows that have ended, or have no path, may have -1, which is no index.
        states = xp.clip(shard.read(paths, (steps.stop, samples)), 0, None)
    elif shard.lengths is None:
        return last_states((...,), shard.num_steps)
    else:
        shape = (*shard.state_shape[:2], samples.stop - samples.start)
        states = xp.zeros(shape, dtype=ctx.index_dtype, device=ctx.device)
    for length in map(int, () if shard.lengths is None else np.unique(shard.lengths)):
        if steps.start < length <= steps.stop:
            rows = shard.row_index(shard.num_active(length), shard.num_active(length - 1))
            states[rows] = last_states(rows, length)
    return states
