"""Passes: the recursion of a backend over all segments of a shard, and its last carry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from typing import Any

import numpy as np

from arraylogchain import _select
from arraylogchain._backends import shards
from arraylogchain._backends.array import ArrayBackend
from arraylogchain._backends.interface import Backend, Keep, Messages, SegmentMessages, WholeChains
from arraylogchain._backends.shards import Shard
from arraylogchain._chains.accumulate import Accumulator
from arraylogchain._chains.planning import ChainSizes, plan_shards
from arraylogchain._core import scaled
from arraylogchain._core.axes import chunks
from arraylogchain._core.context import Array, Context
from arraylogchain._core.scaled import add_scale, whole_maximum
from arraylogchain._inputs.chain import Chain


@dataclass(slots=True)
class Pass:
    """A recursion over one shard, segment by segment.

    Attributes
    ----------
    shard : Shard
    backend : Backend
    segments : list of slice
        Steps of each segment, in the order of time.
    backward : bool
    store_messages : bool
        Whether `run_and_store` stores the updated messages, not only checkpoints.
    workspace : int
        Bytes for temporaries besides messages.
    parallel : int
        Passes that fit the workspace at a time.
    max_product : bool
        Whether terms are maximized instead of summed, as for best paths.
    checkpoints : list of Messages or None
        The carry at the start of each segment that has run.
    stored : list of Messages or None
        The updated messages of each segment; None where they are recomputed.
    carry : Messages or None
        After the last segment that has run.
    log_z : array [groups, rows]
        After a forward pass.
    stored_chains : WholeChains or None
        Result of `log_partition` for whole chains, with stored messages.
    declined : iterable of Pass or None
        One pass for each row that a call for whole chains declined; None without such a result.
    """

    shard: Shard
    backend: Backend
    segments: list[slice]
    backward: bool = False
    store_messages: bool = False
    workspace: int = 0
    parallel: int = 1
    max_product: bool = False
    checkpoints: list[Messages | None] = field(default_factory=list)
    stored: list[Messages | None] = field(default_factory=list)
    carry: Any = None
    log_z: Array = None
    stored_chains: WholeChains | None = None
    declined: Iterable[Pass] | None = None

    def whole_chains(self, method: str, *args: Any) -> Any:
        """Call a backend's method for whole chains; return its result, or None without one.

        A result with more than 1/8 of the rows declined is dropped, as one pass over all rows by
        segments is then faster than a pass for each declined row. Afterwards `remaining` has the
        passes that are still to be run.
        """
        function = getattr(self.backend, method, None) if _select.FUSED else None
        if function is None or (result := function(*args)) is None:
            return None
        num_declined = np.count_nonzero(result.declined)
        if num_declined > result.declined.size // 8:
            return None
        self.declined = self.row_passes(result.declined) if num_declined else ()
        return result

    def fused(self, method: str, *args: Any) -> Any:
        """Return the result of an optional method of the backend; None if it has none."""
        function = getattr(self.backend, method, None) if _select.FUSED else None
        return None if function is None else function(*args)

    @property
    def remaining(self) -> Iterable[Pass]:
        """Passes that remain to be run by segments, to be read once."""
        return (self,) if self.declined is None else self.declined

    def again(self) -> Pass:
        """Return a pass over the same shard that has not run, with a backend of its own."""
        new = self.with_new_backend()
        return replace(new, checkpoints=[], stored=[], stored_chains=None, declined=None)

    def with_new_backend(self) -> Pass:
        """Return this pass with a backend of its own, which has prepared no matrices.

        Prepared matrices belong to one call, and to one shard at a time.
        """
        return replace(self, backend=type(self.backend)(self.shard, self.workspace))

    def row_passes(self, declined: np.ndarray) -> Iterator[Pass]:
        """Yield passes over single rows, those that a mask [groups, rows] selects."""
        size = self.segments[0].stop - self.segments[0].start
        for shard in self.shard.single_rows(declined):
            segments = list(chunks(shard.num_steps, size))
            yield replace(self, shard=shard, segments=segments).again()

    def advance(self, carry: Messages | None, steps: slice, keep: Keep) -> SegmentMessages:
        """Return the messages of one segment."""
        if self.max_product:
            return self.backend.max_product(carry, steps, keep)
        return self.backend.advance(carry, steps, self.backward, keep)

    def run(self, keep: Keep) -> Iterator[tuple[slice, SegmentMessages]]:
        """Yield the messages of all segments, in the order of the recursion."""
        for steps in reversed(self.segments) if self.backward else self.segments:
            messages = self.advance(self.carry, steps, keep)
            self.carry = messages.carry
            yield steps, messages

    def final_carry(self) -> Messages:
        """Run over all segments, and return the last carry."""
        for _ in self.run(Keep.NOTHING):
            pass
        return self.carry  # type: ignore[no-any-return]

    def run_and_store(self) -> Pass:
        """Run forward over all segments; store checkpoints and, if asked for, updated messages."""
        keep = Keep.UPDATED if self.store_messages else Keep.NOTHING
        for steps in self.segments:
            self.checkpoints.append(self.carry)
            _, updated, self.carry = self.advance(self.carry, steps, keep)
            self.stored.append(updated)
        if not self.max_product:
            self.log_z = self.log_partition()
        return self

    def log_partition(self) -> Array:
        """Return log Z, [groups, rows], after the last segment."""
        log_z = self.fused("final_log_partition", self.carry)
        if log_z is None and "final" not in self.shard.views:
            log_z = self.carry.log_sums
        if log_z is not None:
            return log_z
        last = last_logs(self.shard, self.carry)
        return add_scale(log_sum(self.shard.ctx.xp, last.values), last.shifts, last.exponents)

    def stored_messages(self, n: int) -> Messages:
        """Return the updated messages of segment n, recomputed if they were not stored."""
        stored = self.stored[n]
        if stored is None:
            stored = self.advance(self.checkpoints[n], self.segments[n], Keep.UPDATED).updated
        return stored

    def relative_messages(self, steps: slice) -> Iterator[tuple[slice, SegmentMessages]]:
        """Yield predicted and updated messages of a segment, whose scales start from 0.

        Scales are relative to the start of the segment. Where these are too large to be exact, the
        segment is split into single steps.
        """
        carry, max_exact = self.carry, 1.0 / self.shard.ctx.widest.eps
        if carry is not None:
            zeros = self.shard.ctx.xp.zeros_like(carry.shifts)
            carry = Messages(carry.values, zeros, zeros, carry.is_log)
        messages = self.backend.advance(carry, steps, self.backward, Keep.ALL)
        shifts = messages.predicted.shifts, messages.updated.shifts
        if steps.stop - steps.start == 1 or self.shard.ctx.are_within(max_exact, *shifts):
            self.carry = messages.carry
            yield steps, messages
        else:
            single_steps = [slice(step, step + 1) for step in range(steps.start, steps.stop)]
            for step in reversed(single_steps) if self.backward else single_steps:
                yield from self.relative_messages(step)


def passes(
    operation: str,
    ctx: Context,
    chain: Chain,
    workspace: int,
    needs_history: bool = False,
    backward: bool = False,
    num_arrays: int = 10,
) -> Iterator[Pass]:
    """Yield one pass per shard, before its first segment.

    Parameters
    ----------
    operation : str
        The name of the method, by which the backend is selected.
    ctx : Context
    chain : Chain
    workspace : int
        Bytes for temporaries.
    needs_history : bool
        Whether the messages of all steps are read after the last of them is known.
    backward : bool
    num_arrays : int
        Arrays of the size of a segment's messages that are in memory at a time.
    """
    if 0 in chain.batch:
        return
    backend = backend_of(operation, ctx, chain, workspace)
    # Array operations finish these from messages of kernels, in as much memory as they ever take.
    if operation not in ("best_paths", "forward_messages", "backward_messages"):
        num_arrays = min(num_arrays, getattr(backend, "segment_arrays", num_arrays))
    # Groups of different lengths are sorted, which copies their matrices.
    holds_matrices = backend.holds_matrices or (chain.lengths is not None and chain.sizes[0] > 1)
    T, K = chain.num_steps, chain.num_states
    sizes = ChainSizes(*chain.sizes, T, K, chain.has_one_matrix, holds_matrices)
    item = 8 if backend.max_useful_rows else ctx.precision.itemsize
    plan = plan_shards(sizes, backend, item, workspace, needs_history, num_arrays, 4 * ctx.block)
    max_product = operation in _select.MAX_PRODUCT_OPERATIONS
    for shard in shards.shards(ctx, chain, plan.groups, plan.rows):
        steps = slice(0, shard.num_steps)
        segments = [steps] if steps.stop <= plan.steps else list(chunks(steps.stop, plan.steps))
        limits = plan.store_messages, plan.workspace, plan.parallel
        yield Pass(shard, backend(shard, plan.workspace), segments, backward, *limits, max_product)


def run_passes(
    all_passes: Iterable[Pass], work: Callable[..., Any], accumulator: Accumulator | None = None
) -> None:
    """Call ``work(one_pass)``, or ``work(one_pass, accumulator)``, for all passes.

    Threads share the passes. Sums are added in the order of the passes, whatever threads there are.
    """
    all_passes = iter(all_passes)
    for first in all_passes:
        group = [first]
        if first.parallel > 1 and (accumulator is None or accumulator.has_separate_sums):
            group += islice(all_passes, first.parallel - 1)
        if len(group) == 1:
            work(first) if accumulator is None else work(first, accumulator)
        elif accumulator is None:
            first.shard.ctx.run_all(work, group)
        else:
            parts = [accumulator.zeros_like() for _ in group]
            first.shard.ctx.run_all(lambda pair: work(*pair), list(zip(group, parts, strict=True)))
            for part in parts:
                accumulator.join(part)
        del first, group  # frees messages before the next shards are made


def last_logs(shard: Shard, last: Messages) -> Messages:
    """Return the last forward message times the final weights, in log space."""
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
    shift = scaled.finite_or_zero(xp, top)
    return shift + xp.log(xp.sum(xp.exp(logs - shift[..., None]), axis=-1))


def write_steps(out: Array, shard: Shard, steps: slice, values: Array, past_ends: float) -> None:
    """Write values [n, groups, rows, ...] of a segment into an array [*batch, T, ...]."""
    xp, is_valid = shard.ctx.xp, shard.valid_steps(steps)
    if is_valid is not None:
        is_valid = xp.reshape(is_valid, (*is_valid.shape, *(1,) * (values.ndim - 3)))
        values = xp.where(is_valid, values, past_ends)
    shard.write(out, xp.permute_dims(values, (1, 2, 0, *range(3, values.ndim))), (steps,))


def backend_of(operation: str, ctx: Context, chain: Chain, workspace: int) -> Any:
    """Return the backend of an operation on a chain: a class with the methods of `Backend`."""
    return _backend_class(_select.route(operation, ctx, chain, workspace)[0])


@cache  # an import statement takes as long as ten calls
def _backend_class(route: str) -> Any:
    if route == "loops":
        from arraylogchain._backends.compiled.backend import CompiledBackend

        return CompiledBackend
    if route == "kernels":
        from arraylogchain._backends.cuda.backend import CudaBackend

        return CudaBackend
    return ArrayBackend
