"""Recursions over all pieces of a chain: log Z, and messages as they are, or normalised."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from arraylogchain import _dispatch
from arraylogchain._array.chains.pieces import (
    BOTH,
    LEFT,
    LN2_HIGH,
    LN2_LOW,
    NOTHING,
    THREADS,
    Backend,
    Block,
    Messages,
    Piece,
    add_scale,
    arrange,
    cut,
    log_parts,
    pieces,
)
from arraylogchain._array.chains.recursion import ArrayRecursion
from arraylogchain._array.chains.sums import Sums
from arraylogchain._context import Array, Context, whole_maximum
from arraylogchain._fold import chunks
from arraylogchain._inputs import Chain


@dataclass(slots=True)
class Run:
    """A recursion over one piece, in blocks of steps.

    `starts` has what its blocks begin with and `left` the messages they leave, where these are
    kept, for which there is memory where it `keeps`; `last` is the state after all of them.
    """

    piece: Piece
    backend: Backend
    blocks: list[slice]
    backward: bool = False
    keeps: bool = False
    workspace: int = 0
    starts: list[Any] = field(default_factory=list)
    left: list[Messages | None] = field(default_factory=list)
    last: Any = None

    def steps(self, keep: int) -> Iterator[tuple[slice, Block]]:
        """Take all steps, block by block."""
        for steps in reversed(self.blocks) if self.backward else self.blocks:
            block = self.backend.advance(self.last, steps, self.backward, keep)
            self.last = block.state
            yield steps, block

    def run(self) -> Run:
        """Take all steps, and keep nothing."""
        for _ in self.steps(NOTHING):
            pass
        return self

    def keep(self, everything: bool = False) -> Run:
        """Take all steps, and keep what they leave where that fits, or what blocks begin with."""
        state = None
        for _, block in self.steps(LEFT if everything or self.keeps else NOTHING):
            self.starts.append(state)
            self.left.append(block.left)
            state = block.state
        return self

    def messages(self, n: int) -> Messages:
        """Return what the block number n left: as it is kept, or computed again."""
        found = self.left[n]
        if found is None:
            found = self.backend.advance(self.starts[n], self.blocks[n], self.backward, LEFT).left
        assert found is not None
        return found


def runs(
    operation: str,
    ctx: Context,
    chain: Chain,
    workspace: int,
    history: bool = False,
    backward: bool = False,
    arrays: int = 8,
) -> Iterator[Run]:
    """Yield a run over every piece of a chain, which has not begun.

    With `history` the messages of all steps are wanted after the last, and fit where it `keeps`.
    A block of steps takes so many `arrays` of their size.
    """
    if 0 in chain.batch:
        return
    backend = _dispatch.recursion(operation, ctx, chain, workspace) or ArrayRecursion
    item = ctx.precision.itemsize if backend.rows_together >= 1 << 62 else 8
    sizes = cut(chain, backend, workspace, item, history, arrays)
    for piece in pieces(ctx, chain, sizes.groups, sizes.rows):
        own = list(chunks(piece.num_steps, sizes.steps))
        yield Run(
            piece, backend(piece, sizes.workspace), own, backward, sizes.keeps, sizes.workspace
        )


def each(
    ctx: Context, found: Iterable[Run], work: Callable[..., Any], sums: Sums | None = None
) -> None:
    """Call ``work(run)``, or ``work(run, sums)``, for all runs; threads share them.

    What is summed over runs is added in their order, whatever threads there are.
    """
    found = iter(found)
    following = next(found, None)
    while following is not None:
        some, following = [following], next(found, None)
        together = THREADS if following is not None and some[0].backend.shares_pieces else 1
        if sums is not None and together > 1 and not sums.has_parts:
            together = 1
        while following is not None and len(some) < together:
            some.append(following)
            following = next(found, None)
        if len(some) == 1:
            work(*some) if sums is None else work(*some, sums)
        elif sums is None:
            ctx.share(work, some)
        else:
            parts = [(run, sums.part()) for run in some]
            ctx.share(lambda part: work(*part), parts)
            for _, part in parts:
                sums.join(part)


def total_of(piece: Piece, last: Messages) -> Messages:
    """Return the sums over all paths, given the last states, as logs [groups, rows, 1]."""
    ctx = piece.ctx
    if last.in_logs.any() or "final" in piece.views:
        logs = last_logs(piece, last)
        logs.values = log_sum(ctx.xp, logs.values)[..., None]
        return logs
    total = ctx.xp.sum(ctx.load(last.values, ctx.widest), axis=-1, keepdims=True)
    return Messages(total, last.shifts, last.powers, last.in_logs).in_log_form(ctx)


def last_logs(piece: Piece, last: Messages) -> Messages:
    """Return the logs of the last states times the final weights."""
    ctx = piece.ctx
    wide = Messages(ctx.load(last.values, ctx.widest), last.shifts, last.powers, last.in_logs)
    wide = wide.in_log_form(ctx)
    final, in_logs = piece.end(backward=True)
    if final is None:
        return wide
    whole, rest = log_parts(ctx, final, in_logs)
    shift = whole_maximum(ctx, wide.values + whole, -1, ctx.widest)
    logs = (wide.values + (whole - shift)) + rest
    return Messages(logs, wide.shifts + shift[..., 0], wide.powers, wide.in_logs)


def log_sum(xp: Any, logs: Array) -> Array:
    """Return the logs of the sums of exponentials along the last axis."""
    top = xp.max(logs, axis=-1)
    shift = xp.where(xp.isfinite(top), top, 0.0)
    total = xp.sum(xp.exp(logs - shift[..., None]), axis=-1)
    return xp.where(xp.isfinite(top), shift + xp.log(total), top)


def log_partition(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the logs of the sums over all paths, [*batch]."""
    out = ctx.empty(chain.batch, ctx.result_dtype)
    view = arrange(ctx.xp, chain, out, trailing=0)

    def work(run: Run) -> None:
        total = total_of(run.piece, run.run().last).logs(ctx)
        run.piece.put(view[(*run.piece.box, ...)], total[..., 0])

    each(ctx, runs("log_partition", ctx, chain, workspace, arrays=3), work)
    return out


def forward_messages(
    ctx: Context, chain: Chain, workspace: int, whole: Array | None = None
) -> Array:
    """Return the logs of the weights after every step, [*batch, T, K], each one right.

    Whole numbers [*batch] are added to them, before anything is rounded.
    """
    return _messages(ctx, chain, workspace, whole, backward=False)


def backward_messages(
    ctx: Context, chain: Chain, workspace: int, whole: Array | None = None
) -> Array:
    """Return the logs of the weights that follow each step, [*batch, T, K], each one right.

    Whole numbers [*batch] are added to them, before anything is rounded.
    """
    return _messages(ctx, chain, workspace, whole, backward=True)


def _messages(
    ctx: Context, chain: Chain, workspace: int, whole: Array | None, backward: bool
) -> Array:
    out = ctx.empty((*chain.batch, chain.num_steps, chain.num_states), ctx.result_dtype)
    if chain.lengths is not None:
        out[...] = -math.inf
    operation = "backward_messages" if backward else "forward_messages"

    def work(run: Run) -> None:
        for steps, block in run.steps(BOTH if backward else LEFT):
            found = block.arrived if backward else block.left
            assert found is not None
            found = found.last(steps.stop - steps.start)
            if whole is not None:
                own = arrange(ctx.xp, chain, ctx.xp.asarray(whole), trailing=0)
                found.shifts = found.shifts + run.piece.expanded(own[(*run.piece.box, ...)], ())
            put_steps(out, run.piece, steps, found.logs(ctx), -math.inf)

    each(ctx, runs(operation, ctx, chain, workspace, backward=backward), work)
    return out


def put_steps(out: Array, piece: Piece, steps: slice, values: Array, past_ends: float) -> None:
    """Write values [n, groups, rows, ...] of some steps into an array [*batch, T, ...]."""
    xp, real = piece.ctx.xp, piece.real(steps)
    if real is not None:
        real = xp.reshape(real, (*real.shape, *(1,) * (values.ndim - 3)))
        values = xp.where(real, values, xp.full_like(values, past_ends))
    view = arrange(xp, piece.chain, out, trailing=values.ndim - 2)
    order = (1, 2, 0, *range(3, values.ndim))
    piece.put(view[(*piece.box, steps, ...)], xp.permute_dims(values, order))


def last_message(
    ctx: Context, chain: Chain, workspace: int, backward: bool = False
) -> tuple[Array, Array]:
    """Return the weights after the last step, or backward from the first step on.

    They are logs [*batch, K], near 0, and whole numbers [*batch] to add to them.
    """
    xp, dtype = ctx.xp, ctx.dtype(ctx.widest)
    logs, whole = ctx.empty((*chain.batch, chain.num_states), dtype), ctx.empty(chain.batch, dtype)
    views = arrange(xp, chain, logs, trailing=1), arrange(xp, chain, whole, trailing=0)

    def work(run: Run) -> None:
        last = run.run().last.in_log_form(ctx)
        values = ctx.load(last.values, ctx.widest) + (last.powers * LN2_LOW)[..., None]
        high = last.powers * LN2_HIGH
        nearest = xp.round(high)
        values = values + (high - nearest)[..., None]
        for view, x in zip(views, (values, last.shifts + nearest), strict=True):
            run.piece.put(view[(*run.piece.box, ...)], x)

    each(ctx, runs("last_message", ctx, chain, workspace, backward=backward), work)
    return logs, whole


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

    def work(run: Run) -> None:
        state = None
        for steps in run.blocks:
            state = take(run, state, steps)

    def take(run: Run, state: Any, steps: slice) -> Any:
        if state is not None:
            # Only differences count: scales that begin with 0 are exact for longer.
            nothing = xp.zeros_like(state.shifts)
            state = Messages(state.values, nothing, nothing, state.in_logs)
        block = run.backend.advance(state, steps, False, BOTH)
        assert block.left is not None
        most = float(xp.max(xp.abs(block.left.shifts[1:, ...])))
        # Beyond that sums of whole numbers are not exact.
        if steps.stop - steps.start > 1 and most >= 1.0 / ctx.widest.eps:
            for step in range(steps.start, steps.stop):
                state = take(run, state, slice(step, step + 1))
            return state
        put(run.piece, steps, block.left)
        return block.state

    def put(piece: Piece, steps: slice, left: Messages) -> None:
        values, logs = left.values[1:, ...], left.in_log_form(ctx)
        total = log_sum(xp, ctx.load(logs.values, ctx.widest))
        if not steps.start:
            # Nothing comes before the first step.
            for x in (total, logs.shifts, logs.powers):
                x[0, ...] = 0.0
        # Values are near 0: to subtract a logarithm would be another rounding.
        weights = xp.exp(logs.values[1:, ...]) if left.in_logs.any() else values
        weights = weights / xp.sum(weights, axis=-1, keepdims=True)
        weights = xp.where(xp.isinf(total)[1:, ..., None], xp.zeros_like(weights), weights)
        put_steps(probabilities, piece, steps, weights, 0.0)
        # What is large cancels first.
        ratios = add_scale(*(x[1:, ...] - x[:-1, ...] for x in (total, logs.shifts, logs.powers)))
        # After -inf or +inf it is the same at all later steps.
        ratios = xp.where(xp.isfinite(total)[1:, ...], ratios, total[1:, ...])
        put_steps(normalizers, piece, steps, ratios, 0.0)

    each(ctx, runs("filtered", ctx, chain, workspace), work)
    return probabilities, normalizers
