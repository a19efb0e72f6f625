"""Best paths, and exact samples: forward with messages, and back along them.

Which state a path came from is not kept: it is found again on the way back, for the one state in
question. The last state of a sample is drawn from the forward weights of the last step; given a
state j that follows, the one before it is k with a probability in proportion to
``exp(alpha[k]) * P[k, j]``, whatever comes later.
"""

from __future__ import annotations

import math

import numpy as np

from arraylogchain._array.chains.messages import Run, each, last_logs, put_steps, runs
from arraylogchain._array.chains.pieces import Piece
from arraylogchain._array.chains.recursion import draw_states, relative
from arraylogchain._context import Array, Context, add_scale
from arraylogchain._fold import chunks
from arraylogchain._inputs import Chain


def viterbi(ctx: Context, chain: Chain, workspace: int) -> tuple[Array, Array]:
    """Return a path of largest weight, [*batch, T], and the log of its weight, [*batch].

    Past a row's length states are -1. All states are 0 where no path has a positive weight.
    """
    xp = ctx.xp
    states = ctx.empty((*chain.batch, chain.num_steps), ctx.index_dtype)
    states[...] = -1
    weights = ctx.empty(chain.batch, ctx.result_dtype)

    def work(run: Run) -> None:
        last = last_logs(run.piece, run.keep().last)
        after, most = xp.argmax(last.values, axis=-1), xp.max(last.values, axis=-1)
        run.piece.write(weights, add_scale(most, last.shifts, last.powers))
        alive = most != -math.inf  # NaN is not -inf
        for n in reversed(range(len(run.blocks))):
            found = run.backend.trace(run.messages(n), after, run.blocks[n])
            after = found[0, ...]
            put_steps(states, run.piece, run.blocks[n], xp.where(alive, found, 0), -1)
        run.left.clear()  # the next piece takes the same memory

    each(ctx, runs("viterbi", ctx, chain, workspace, history=True), work)
    return states, weights


def best_message(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the logs of the largest weights after the last step, [*batch, K], but for a shift."""
    out = ctx.empty((*chain.batch, chain.num_states), ctx.dtype(ctx.precision))

    found = runs("best_message", ctx, chain, workspace)
    each(ctx, found, lambda run: run.piece.write(out, run.run().values))
    return out


def sample(ctx: Context, chain: Chain, workspace: int, out: Array, uniforms: Array) -> None:
    """Write paths into `out`, [num_samples, *batch, T]; 0 where there is none, -1 past the end.

    `uniforms` are numbers in [0, 1) of the same shape, which may share the memory of `out`: those
    of steps are read before their states are written. At a row's last step, -1 - k stands for
    state k.
    """
    xp, order = ctx.xp, (*range(1, out.ndim), 0)
    paths, numbers = (xp.permute_dims(x, order) for x in (out, uniforms))

    def work(run: Run) -> None:
        piece = run.keep().piece
        groups, rows, size = piece.state_shape
        # The last states times the final weights, but for a scale, added up.
        ends = ctx.load(run.last.values, ctx.widest)
        if "final" in piece.views or run.last.in_logs is not None:
            ends = relative(xp, last_logs(piece, run.last).values)
        ends = xp.cumulative_sum(ends, axis=-1)
        has_none = ends[..., -1:] == 0
        longest = max(steps.stop - steps.start for steps in run.blocks)
        of_sample = 8 * groups * rows * max(6 * size, 4 * longest)
        some = list(chunks(int(out.shape[0]), max(1, run.workspace // of_sample)))
        after = [_last_states(piece, ends, numbers, samples) for samples in some]
        for n in reversed(range(len(run.blocks))):
            steps, left = run.blocks[n], run.messages(n)
            for m, samples in enumerate(some):
                u = xp.permute_dims(piece.read(numbers, (steps, samples)), (2, 0, 1, 3))
                found = run.backend.draw(left, after[m], steps, u)
                after[m] = found[0, ...]
                found = xp.where(has_none, 0, found)
                put_steps(paths[..., samples], piece, steps, found, -1)
        piece.view(paths, (slice(piece.num_steps, None),))[...] = -1
        run.left.clear()

    each(ctx, runs("sample", ctx, chain, workspace // 2, history=True), work)


def _last_states(piece: Piece, ends: Array, numbers: Array, samples: slice) -> Array:
    """Return the last states of samples, [groups, rows, samples], drawn by sums [groups, rows, K].

    `numbers` are those of all steps, [*batch, T, samples].
    """
    ctx, xp = piece.ctx, piece.ctx.xp
    u = piece.read(numbers, (piece.num_steps - 1, samples))
    if piece.lengths is not None:
        for length in np.unique(piece.lengths):
            is_last = xp.asarray(piece.lengths == length, device=ctx.device)
            u = xp.where(is_last[..., None], piece.read(numbers, (int(length) - 1, samples)), u)
    states = draw_states(xp, ends[:, :, None, :], ctx.load(u, ctx.widest))
    return xp.where(u < 0, xp.astype(-1 - u, states.dtype), states)
