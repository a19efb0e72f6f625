"""Recursions over all pieces of a chain: log Z, and messages as they are, or normalised."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from arraylogchain import _dispatch
from arraylogchain._array.chains import pieces
from arraylogchain._array.chains.pieces import Backend, Messages, SegmentMessages, Shard
from arraylogchain._array.chains.recursion import ArrayBackend
from arraylogchain._array.chains.sums import Accumulator
from arraylogchain._context import LN2_HIGH, LN2_LOW, Array, Context, add_scale, whole_maximum
from arraylogchain._fold import chunks
from arraylogchain._inputs import Chain


@dataclass(slots=True)
class Pass:
    """A recursion over one piece, in blocks of steps.

    `checkpoints` has what its blocks begin with and `updated` the messages they leave, where these
    are kept, the latter only where it `store_messages`; `last` is the state after all of them, and
    `log_z` the logs of the sums over all paths [groups, rows]. There is memory for so many runs
    `parallel`. Those of best paths have the `max_product` of terms in the place of their sums.
    """

    shard: Shard
    backend: Backend
    blocks: list[slice]
    backward: bool = False
    store_messages: bool = False
    workspace: int = 0
    parallel: int = 1
    max_product: bool = False
    checkpoints: list[Any] = field(default_factory=list)
    updated: list[Messages | None] = field(default_factory=list)
    last: Any = None
    log_z: Array = None

    def advance(self, carry: Messages | None, steps: slice, keep: int) -> SegmentMessages:
        """Take a block of steps."""
        if self.max_product:
            return self.backend.best(carry, steps, keep)
        return self.backend.advance(carry, steps, self.backward, keep)

    def steps(self, keep: int) -> Iterator[tuple[slice, SegmentMessages]]:
        """Take all steps, block by block."""
        for steps in reversed(self.blocks) if self.backward else self.blocks:
            block = self.advance(self.last, steps, keep)
            self.last = block.carry
            yield steps, block

    def final_carry(self) -> Messages:
        """Take all steps, and return the last state alone."""
        for _ in self.steps(pieces.NOTHING):
            pass
        return self.last  # type: ignore[no-any-return]

    def run_and_store(self) -> Pass:
        """Take all steps; store checkpoints, and if it `store_messages` the updated messages."""
        for steps in self.blocks:
            self.checkpoints.append(self.last)
            keep = pieces.UPDATED if self.store_messages else pieces.NOTHING
            _, updated, self.last = self.advance(self.last, steps, keep)
            self.updated.append(updated)
        if not self.max_product:
            self.log_z = total_of(self.shard, self.last)
        return self

    def segments(self, steps: slice) -> Iterator[tuple[slice, SegmentMessages]]:
        """Take a block of steps, of whose scales only differences count.

        They begin with 0, and where sums of them are still not exact each step is taken by itself.
        """
        carry, limit = self.last, 1.0 / self.shard.ctx.widest.eps
        if carry is not None:
            zeros = self.shard.ctx.xp.zeros_like(carry.shifts)
            carry = Messages(carry.values, zeros, zeros, carry.is_log)
        block = self.backend.advance(carry, steps, self.backward, pieces.ALL)
        shifts = block.predicted.shifts, block.updated.shifts
        if steps.stop - steps.start == 1 or self.shard.ctx.are_within(limit, *shifts):
            self.last = block.carry
            yield steps, block
        else:
            each = [slice(step, step + 1) for step in range(steps.start, steps.stop)]
            for step in reversed(each) if self.backward else each:
                yield from self.segments(step)

    def messages(self, n: int) -> Messages:
        """Return what the block number n left: as it is kept, or computed again."""
        return (
            self.updated[n]
            or self.advance(self.checkpoints[n], self.blocks[n], pieces.UPDATED).updated
        )


def passes(
    operation: str,
    ctx: Context,
    chain: Chain,
    workspace: int,
    history: bool = False,
    backward: bool = False,
    arrays: int = 10,
) -> Iterator[Pass]:
    """Yield a run over every piece of a chain, which has not begun.

    With `history` the messages of all steps are wanted after the last, and fit where it
    `store_messages`. A block of steps takes so many `arrays` of their size.
    """
    if 0 in chain.batch:
        return
    backend = _dispatch.recursion(operation, ctx, chain, workspace) or ArrayBackend
    # Groups of different lengths are put in order, which copies their matrices.
    holds = backend.holds_matrices or (chain.lengths is not None and chain.sizes[0] > 1)
    sizes = *chain.sizes, chain.num_steps, chain.num_states, chain.has_one_matrix, holds
    item = 8 if backend.max_useful_rows else ctx.precision.itemsize
    groups, rows, count, store_messages, workspace, parallel = pieces.plan_shards(
        sizes, backend, item, workspace, history, arrays, 4 * ctx.block
    )
    how = (
        backward,
        store_messages,
        workspace,
        parallel,
        operation in _dispatch.MAX_PRODUCT_OPERATIONS,
    )
    for shard in pieces.shards(ctx, chain, groups, rows):
        yield Pass(shard, backend(shard, workspace), list(chunks(shard.num_steps, count)), *how)


def run_passes(
    ctx: Context,
    all_passes: Iterable[Pass],
    work: Callable[..., Any],
    accumulator: Accumulator | None = None,
) -> None:
    """Call ``work(run)``, or ``work(run, accumulator)``, for all runs; threads share them.

    What is summed over runs is added in their order, whatever threads there are.
    """
    all_passes = iter(all_passes)
    for run in all_passes:
        batch_of_passes = [run]
        if run.parallel > 1 and (accumulator is None or accumulator.has_separate_sums):
            batch_of_passes += islice(all_passes, run.parallel - 1)
        if len(batch_of_passes) == 1:
            work(run) if accumulator is None else work(run, accumulator)
        elif accumulator is None:
            ctx.run_all(work, batch_of_passes)
        else:
            parts = [(run, accumulator.zeros_like()) for run in batch_of_passes]
            ctx.run_all(lambda part: work(*part), parts)
            for _, part in parts:
                accumulator.join(part)


def total_of(shard: Shard, last: Messages) -> Array:
    """Return the logs of the sums over all paths, [groups, rows], given the last states."""
    if last.log_sums is not None and "final" not in shard.views:
        return last.log_sums
    messages = last_logs(shard, last)
    return add_scale(log_sum(shard.ctx.xp, messages.values), messages.shifts, messages.exponents)


def last_logs(shard: Shard, last: Messages) -> Messages:
    """Return the logs of the last states times the final weights."""
    values = shard.ctx.load(last.values, shard.ctx.widest)
    messages = Messages(values, last.shifts, last.exponents, last.is_log).to_log_space(shard.ctx)
    if "final" not in shard.views:
        return messages
    high, remainder = pieces.split_log(shard.ctx, *shard.boundary_weights(backward=True))
    shift = whole_maximum(shard.ctx.xp, messages.values + high)
    logs = (messages.values + (high - shift)) + remainder
    return Messages(logs, messages.shifts + shift[..., 0], messages.exponents, messages.is_log)


def log_sum(xp: Any, logs: Array) -> Array:
    """Return the logs of the sums of exponentials along the last axis."""
    top = xp.max(logs, axis=-1)
    shift = xp.where(xp.abs(top) < math.inf, top, 0.0)
    return shift + xp.log(xp.sum(xp.exp(logs - shift[..., None]), axis=-1))


def log_partition(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the logs of the sums over all paths, [*batch]."""
    out = ctx.empty(chain.batch, ctx.result_dtype)

    all_passes = passes("log_partition", ctx, chain, workspace, arrays=3)
    run_passes(
        ctx, all_passes, lambda run: run.shard.write(out, total_of(run.shard, run.final_carry()))
    )
    return out


def forward_messages(ctx: Context, chain: Chain, workspace: int, whole: Array = None) -> Array:
    """Return the logs of the weights after every step, [*batch, T, K], each one right.

    Whole numbers [*batch] are added to them, before anything is rounded.
    """
    return _messages("forward_messages", ctx, chain, workspace, whole, backward=False)


def backward_messages(ctx: Context, chain: Chain, workspace: int, whole: Array = None) -> Array:
    """Return the logs of the weights that follow each step, [*batch, T, K], each one right.

    Whole numbers [*batch] are added to them, before anything is rounded.
    """
    return _messages("backward_messages", ctx, chain, workspace, whole, backward=True)


def _messages(
    operation: str, ctx: Context, chain: Chain, workspace: int, whole: Array, backward: bool
) -> Array:
    out = ctx.empty((*chain.batch, chain.num_steps, chain.num_states), ctx.result_dtype)
    if chain.lengths is not None:
        out[...] = -math.inf

    def work(run: Pass) -> None:
        for steps, block in run.steps(pieces.ALL if backward else pieces.UPDATED):
            messages = block.predicted if backward else block.updated
            if whole is not None:
                messages.shifts = messages.shifts + run.shard.read(ctx.xp.asarray(whole))
            write_steps(out, run.shard, steps, messages.logs(ctx), -math.inf)

    run_passes(ctx, passes(operation, ctx, chain, workspace, backward=backward), work)
    return out


def write_steps(out: Array, shard: Shard, steps: slice, values: Array, past_ends: float) -> None:
    """Write values [n, groups, rows, ...] of some steps into an array [*batch, T, ...]."""
    xp, is_valid = shard.ctx.xp, shard.valid_steps(steps)
    if is_valid is not None:
        is_valid = xp.reshape(is_valid, (*is_valid.shape, *(1,) * (values.ndim - 3)))
        values = xp.where(is_valid, values, past_ends)
    shard.write(out, xp.permute_dims(values, (1, 2, 0, *range(3, values.ndim))), (steps,))


def last_message(
    ctx: Context, chain: Chain, workspace: int, backward: bool = False
) -> tuple[Array, Array]:
    """Return the weights after the last step, or backward from the first step on.

    They are logs [*batch, K], near 0, and whole numbers [*batch] to add to them.
    """
    xp, dtype = ctx.xp, ctx.dtype(ctx.widest)
    logs, shifts = ctx.empty((*chain.batch, chain.num_states), dtype), ctx.empty(chain.batch, dtype)

    def work(run: Pass) -> None:
        last = run.final_carry().to_log_space(ctx)
        values = ctx.load(last.values, ctx.widest) + (last.exponents * LN2_LOW)[..., None]
        high = last.exponents * LN2_HIGH
        nearest = xp.round(high)
        run.shard.write(logs, values + (high - nearest)[..., None])
        run.shard.write(shifts, last.shifts + nearest)

    run_passes(ctx, passes("last_message", ctx, chain, workspace, backward=backward), work)
    return logs, shifts


def filtered(ctx: Context, chain: Chain, workspace: int) -> tuple[Array, Array]:
    """Return state probabilities given the steps so far, and the logs of what normalises them.

    Returns
    -------
    probabilities : array [*batch, T, K]
    log_normalizers : array [*batch, T]
    """
    xp, shape = ctx.xp, (*chain.batch, chain.num_steps)
    probabilities = ctx.empty((*shape, chain.num_states), ctx.result_dtype)
    normalizers = ctx.empty(shape, ctx.result_dtype)
    if chain.lengths is not None:
        probabilities[...], normalizers[...] = 0.0, 0.0

    def work(run: Pass) -> None:
        for block in run.blocks:
            for steps, segment in run.segments(block):
                put(run.shard, steps, segment.updated)

    def put(shard: Shard, steps: slice, updated: Messages) -> None:
        # In the widest precision: `Messages.weights` may lose what is a normal number as a share.
        weights, maxima = ctx.load(updated.values, ctx.widest), 0.0
        if updated.is_log is not None:
            mask = xp.asarray(updated.is_log, device=ctx.device)[..., None]
            maxima = xp.where(mask, whole_maximum(xp, weights), 0.0)
            weights = xp.where(mask, xp.exp(weights - maxima), weights)
            maxima = maxima[..., 0]
        sums = ctx.row_sums(weights)
        mantissas, exponents = pieces.split(ctx, sums)
        parts = total, *_ = (
            xp.log(mantissas) + maxima,
            updated.shifts,
            updated.exponents + exponents,
        )
        if not steps.start:
            # Nothing comes before the first step.
            for x in parts:
                x[0, ...] = 0.0
        marginals = weights[1:, ...] / sums[1:, ..., None]
        marginals = xp.where(xp.isinf(total)[1:, ..., None], 0.0, marginals)
        write_steps(probabilities, shard, steps, marginals, 0.0)
        # What is large cancels first.
        ratios = add_scale(*(x[1:, ...] - x[:-1, ...] for x in parts))
        # After -inf or +inf it is the same at all later steps.
        ratios = xp.where(xp.isfinite(total)[1:, ...], ratios, total[1:, ...])
        write_steps(normalizers, shard, steps, ratios, 0.0)

    run_passes(ctx, passes("filtered", ctx, chain, workspace), work)
    return probabilities, normalizers
