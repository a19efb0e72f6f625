"""Recursions over all pieces of a chain: log Z, and messages as they are, or normalised."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from arraylogchain import _dispatch
from arraylogchain._array.chains import pieces
from arraylogchain._array.chains.pieces import Backend, Block, Messages, Piece
from arraylogchain._array.chains.recursion import ArrayRecursion
from arraylogchain._array.chains.sums import Sums
from arraylogchain._context import LN2_HIGH, LN2_LOW, Array, Context, add_scale, whole_maximum
from arraylogchain._fold import chunks
from arraylogchain._inputs import Chain


@dataclass(slots=True)
class Run:
    """A recursion over one piece, in blocks of steps.

    `starts` has what its blocks begin with and `left` the messages they leave, where these are
    kept, the latter only where it `keeps`; `last` is the state after all of them, and
    `log_z` the logs of the sums over all paths [groups, rows]. There is memory for so many runs
    `at_once`. Those of best paths have the `largest` of terms in the place of their sums.
    """

    piece: Piece
    backend: Backend
    blocks: list[slice]
    backward: bool = False
    keeps: bool = False
    workspace: int = 0
    at_once: int = 1
    largest: bool = False
    starts: list[Any] = field(default_factory=list)
    left: list[Messages | None] = field(default_factory=list)
    last: Any = None
    log_z: Array = None

    def take(self, state: Messages | None, steps: slice, keep: int) -> Block:
        """Take a block of steps."""
        if self.largest:
            return self.backend.best(state, steps, keep)
        return self.backend.advance(state, steps, self.backward, keep)

    def steps(self, keep: int) -> Iterator[tuple[slice, Block]]:
        """Take all steps, block by block."""
        for steps in reversed(self.blocks) if self.backward else self.blocks:
            block = self.take(self.last, steps, keep)
            self.last = block.state
            yield steps, block

    def run(self) -> Messages:
        """Take all steps, and return the last state alone."""
        for _ in self.steps(pieces.NOTHING):
            pass
        return self.last  # type: ignore[no-any-return]

    def keep(self) -> Run:
        """Take all steps; keep what blocks begin with, and if it `keeps` what they leave."""
        for steps in self.blocks:
            self.starts.append(self.last)
            kept = pieces.LEFT if self.keeps else pieces.NOTHING
            _, left, self.last = self.take(self.last, steps, kept)
            self.left.append(left)
        if not self.largest:
            self.log_z = total_of(self.piece, self.last)
        return self

    def both(self, steps: slice) -> Iterator[tuple[slice, Block]]:
        """Take a block of steps, of whose scales only differences count.

        They begin with 0, and where sums of them are still not exact each step is taken by itself.
        """
        state, limit = self.last, 1.0 / self.piece.ctx.widest.eps
        if state is not None:
            nothing = self.piece.ctx.xp.zeros_like(state.shifts)
            state = Messages(state.values, nothing, nothing, state.in_logs)
        block = self.backend.advance(state, steps, self.backward, pieces.BOTH)
        shifts = block.arrived.shifts, block.left.shifts
        if steps.stop - steps.start == 1 or self.piece.ctx.are_within(limit, *shifts):
            self.last = block.state
            yield steps, block
        else:
            each = [slice(step, step + 1) for step in range(steps.start, steps.stop)]
            for step in reversed(each) if self.backward else each:
                yield from self.both(step)

    def messages(self, n: int) -> Messages:
        """Return what the block number n left: as it is kept, or computed again."""
        return self.left[n] or self.take(self.starts[n], self.blocks[n], pieces.LEFT).left


def runs(
    operation: str,
    ctx: Context,
    chain: Chain,
    workspace: int,
    history: bool = False,
    backward: bool = False,
    arrays: int = 10,
) -> Iterator[Run]:
    """Yield a run over every piece of a chain, which has not begun.

    With `history` the messages of all steps are wanted after the last, and fit where it `keeps`.
    A block of steps takes so many `arrays` of their size.
    """
    if 0 in chain.batch:
        return
    backend = _dispatch.recursion(operation, ctx, chain, workspace) or ArrayRecursion
    # Groups of different lengths are put in order, which copies their matrices.
    holds = backend.holds_matrices or (chain.lengths is not None and chain.sizes[0] > 1)
    sizes = *chain.sizes, chain.num_steps, chain.num_states, chain.has_one_matrix, holds
    item = 8 if backend.most_rows else ctx.precision.itemsize
    groups, rows, count, keeps, workspace, at_once = pieces.cut(
        sizes, backend, item, workspace, history, arrays, 4 * ctx.block
    )
    how = backward, keeps, workspace, at_once, operation in _dispatch.PATHS
    for piece in pieces.pieces(ctx, chain, groups, rows):
        yield Run(piece, backend(piece, workspace), list(chunks(piece.num_steps, count)), *how)


def each(
    ctx: Context, found: Iterable[Run], work: Callable[..., Any], sums: Sums | None = None
) -> None:
    """Call ``work(run)``, or ``work(run, sums)``, for all runs; threads share them.

    What is summed over runs is added in their order, whatever threads there are.
    """
    found = iter(found)
    for run in found:
        some = [run]
        if run.at_once > 1 and (sums is None or sums.has_parts):
            some += islice(found, run.at_once - 1)
        if len(some) == 1:
            work(run) if sums is None else work(run, sums)
        elif sums is None:
            ctx.run_all(work, some)
        else:
            parts = [(run, sums.part()) for run in some]
            ctx.run_all(lambda part: work(*part), parts)
            for _, part in parts:
                sums.join(part)


def total_of(piece: Piece, last: Messages) -> Array:
    """Return the logs of the sums over all paths, [groups, rows], given the last states."""
    if last.totals is not None and "final" not in piece.views:
        return last.totals
    found = last_logs(piece, last)
    return add_scale(log_sum(piece.ctx.xp, found.values), found.shifts, found.powers)


def last_logs(piece: Piece, last: Messages) -> Messages:
    """Return the logs of the last states times the final weights."""
    values = piece.ctx.load(last.values, piece.ctx.widest)
    found = Messages(values, last.shifts, last.powers, last.in_logs).in_log_form(piece.ctx)
    if "final" not in piece.views:
        return found
    whole, rest = pieces.log_parts(piece.ctx, *piece.end(backward=True))
    shift = whole_maximum(piece.ctx.xp, found.values + whole)
    logs = (found.values + (whole - shift)) + rest
    return Messages(logs, found.shifts + shift[..., 0], found.powers, found.in_logs)


def log_sum(xp: Any, logs: Array) -> Array:
    """Return the logs of the sums of exponentials along the last axis."""
    top = xp.max(logs, axis=-1)
    shift = xp.where(xp.abs(top) < math.inf, top, 0.0)
    return shift + xp.log(xp.sum(xp.exp(logs - shift[..., None]), axis=-1))


def log_partition(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the logs of the sums over all paths, [*batch]."""
    out = ctx.empty(chain.batch, ctx.result_dtype)

    found = runs("log_partition", ctx, chain, workspace, arrays=3)
    each(ctx, found, lambda run: run.piece.write(out, total_of(run.piece, run.run())))
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

    def work(run: Run) -> None:
        for steps, block in run.steps(pieces.BOTH if backward else pieces.LEFT):
            found = block.arrived if backward else block.left
            if whole is not None:
                found.shifts = found.shifts + run.piece.read(ctx.xp.asarray(whole))
            put_steps(out, run.piece, steps, found.logs(ctx), -math.inf)

    each(ctx, runs(operation, ctx, chain, workspace, backward=backward), work)
    return out


def put_steps(out: Array, piece: Piece, steps: slice, values: Array, past_ends: float) -> None:
    """Write values [n, groups, rows, ...] of some steps into an array [*batch, T, ...]."""
    xp, real = piece.ctx.xp, piece.real(steps)
    if real is not None:
        real = xp.reshape(real, (*real.shape, *(1,) * (values.ndim - 3)))
        values = xp.where(real, values, past_ends)
    piece.write(out, xp.permute_dims(values, (1, 2, 0, *range(3, values.ndim))), (steps,))


def last_message(
    ctx: Context, chain: Chain, workspace: int, backward: bool = False
) -> tuple[Array, Array]:
    """Return the weights after the last step, or backward from the first step on.

    They are logs [*batch, K], near 0, and whole numbers [*batch] to add to them.
    """
    xp, dtype = ctx.xp, ctx.dtype(ctx.widest)
    logs, whole = ctx.empty((*chain.batch, chain.num_states), dtype), ctx.empty(chain.batch, dtype)

    def work(run: Run) -> None:
        last = run.run().in_log_form(ctx)
        values = ctx.load(last.values, ctx.widest) + (last.powers * LN2_LOW)[..., None]
        high = last.powers * LN2_HIGH
        nearest = xp.round(high)
        run.piece.write(logs, values + (high - nearest)[..., None])
        run.piece.write(whole, last.shifts + nearest)

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
        for block in run.blocks:
            for steps, found in run.both(block):
                put(run.piece, steps, found.left)

    def put(piece: Piece, steps: slice, left: Messages) -> None:
        # In the widest precision: `Messages.weights` may lose what is a normal number as a share.
        weights, tops = ctx.load(left.values, ctx.widest), 0.0
        if left.in_logs is not None:
            mask = xp.asarray(left.in_logs, device=ctx.device)[..., None]
            tops = xp.where(mask, whole_maximum(xp, weights), 0.0)
            weights = xp.where(mask, xp.exp(weights - tops), weights)
            tops = tops[..., 0]
        sums = ctx.row_sums(weights)
        near, powers = pieces.split(ctx, sums)
        parts = total, *_ = xp.log(near) + tops, left.shifts, left.powers + powers
        if not steps.start:
            # Nothing comes before the first step.
            for x in parts:
                x[0, ...] = 0.0
        shares = weights[1:, ...] / sums[1:, ..., None]
        shares = xp.where(xp.isinf(total)[1:, ..., None], 0.0, shares)
        put_steps(probabilities, piece, steps, shares, 0.0)
        # What is large cancels first.
        ratios = add_scale(*(x[1:, ...] - x[:-1, ...] for x in parts))
        # After -inf or +inf it is the same at all later steps.
        ratios = xp.where(xp.isfinite(total)[1:, ...], ratios, total[1:, ...])
        put_steps(normalizers, piece, steps, ratios, 0.0)

    each(ctx, runs("filtered", ctx, chain, workspace), work)
    return probabilities, normalizers
