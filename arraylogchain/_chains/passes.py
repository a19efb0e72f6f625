"""Passes: the recursion of a backend over all shards of a chain, and its last state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from arraylogchain import _select
from arraylogchain._backends import interface, shards
from arraylogchain._backends.array import ArrayBackend
from arraylogchain._backends.interface import Backend, Messages, SegmentMessages
from arraylogchain._backends.shards import Shard
from arraylogchain._chains import planning
from arraylogchain._chains.accumulate import Accumulator
from arraylogchain._core import scaled
from arraylogchain._core.axes import chunks
from arraylogchain._core.context import Array, Context
from arraylogchain._core.scaled import add_scale, whole_maximum
from arraylogchain._inputs.chain import Chain


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
        for _ in self.steps(interface.NOTHING):
            pass
        return self.last  # type: ignore[no-any-return]

    def run_and_store(self) -> Pass:
        """Take all steps; store checkpoints, and if it `store_messages` the updated messages."""
        for steps in self.blocks:
            self.checkpoints.append(self.last)
            keep = interface.UPDATED if self.store_messages else interface.NOTHING
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
        block = self.backend.advance(carry, steps, self.backward, interface.ALL)
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
            or self.advance(self.checkpoints[n], self.blocks[n], interface.UPDATED).updated
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
    backend = recursion(operation, ctx, chain, workspace)
    # Groups of different lengths are put in order, which copies their matrices.
    holds = backend.holds_matrices or (chain.lengths is not None and chain.sizes[0] > 1)
    sizes = *chain.sizes, chain.num_steps, chain.num_states, chain.has_one_matrix, holds
    item = 8 if backend.max_useful_rows else ctx.precision.itemsize
    groups, rows, count, store_messages, workspace, parallel = planning.plan_shards(
        sizes, backend, item, workspace, history, arrays, 4 * ctx.block
    )
    how = (
        backward,
        store_messages,
        workspace,
        parallel,
        operation in _select.MAX_PRODUCT_OPERATIONS,
    )
    for shard in shards.shards(ctx, chain, groups, rows):
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
    high, remainder = scaled.split_log(shard.ctx, *shard.boundary_weights(backward=True))
    shift = whole_maximum(shard.ctx.xp, messages.values + high)
    logs = (messages.values + (high - shift)) + remainder
    return Messages(logs, messages.shifts + shift[..., 0], messages.exponents, messages.is_log)


def log_sum(xp: Any, logs: Array) -> Array:
    """Return the logs of the sums of exponentials along the last axis."""
    top = xp.max(logs, axis=-1)
    shift = xp.where(xp.abs(top) < math.inf, top, 0.0)
    return shift + xp.log(xp.sum(xp.exp(logs - shift[..., None]), axis=-1))


def write_steps(out: Array, shard: Shard, steps: slice, values: Array, past_ends: float) -> None:
    """Write values [n, groups, rows, ...] of some steps into an array [*batch, T, ...]."""
    xp, is_valid = shard.ctx.xp, shard.valid_steps(steps)
    if is_valid is not None:
        is_valid = xp.reshape(is_valid, (*is_valid.shape, *(1,) * (values.ndim - 3)))
        values = xp.where(is_valid, values, past_ends)
    shard.write(out, xp.permute_dims(values, (1, 2, 0, *range(3, values.ndim))), (steps,))


def recursion(operation: str, ctx: Context, chain: Chain, workspace: int) -> Any:
    """Return the recursion that an operation on a chain takes: a `interface.Backend`."""
    name, _ = _select.route(operation, ctx, chain, workspace)
    if name == "loops":
        from arraylogchain._backends.compiled.backend import CompiledBackend

        return CompiledBackend
    if name == "kernels":
        from arraylogchain._backends.cuda.backend import CudaBackend

        return CudaBackend
    return ArrayBackend
