"""Paths of largest weight, samples of paths, and weights of given paths."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from arraylogchain._compiled.chains.posterior import Posterior
from arraylogchain._compiled.chains.sources import frozen
from arraylogchain._compiled.chains.sweep import Sweep
from arraylogchain._compiled.loops.compiling import Floats, Integers
from arraylogchain._compiled.loops.paths import (
    best_weights,
    draw_back,
    trace_back,
    weights_of_paths,
)
from arraylogchain._context import Array, Context
from arraylogchain._inputs.chain import Chain

# What weighing a step of a path costs, as `Sweep.step_work` counts it.
_PATH_WORK = 16


def viterbi(ctx: Context, chain: Chain, workspace: int) -> tuple[Array, Array]:
    """Return a path of largest weight, [*batch, T], and the log of its weight, [*batch].

    Of several the one with the smallest last state, and so on back to the first state. Past a
    chain's end states are -1. All states are 0 where no path has a positive weight.
    """
    out = np.zeros((*chain.batch, chain.num_steps), np.int64)
    _mark_past(chain, out)
    log_weights = np.empty(chain.batch, ctx.result_dtype)
    sweep = Sweep(chain, workspace, "logs")
    flat, flat_weights, step_bytes = out.reshape(-1, sweep.T), log_weights.reshape(-1), 8 * sweep.K

    def work(rows: range) -> None:
        length = sweep.window(rows, step_bytes)
        kept = np.empty((len(rows), length, sweep.K))

        def keep(window: range, states: Floats) -> None:
            for steps in sweep.blocks(rows, window):
                best_weights(sweep.read(rows, steps), states, kept, window.start)

        weights, found = np.empty((len(rows), 6)), np.empty(len(rows))
        for window in sweep.windows(length, np.empty((len(rows), sweep.K + 1)), keep):
            for steps in reversed(sweep.blocks(rows, window)):
                block = sweep.read(rows, steps, backward=True)
                trace_back(block, kept, window.start, weights, flat, found)
        flat_weights[sweep.layout.positions(rows)] = found

    sweep.share(work, min(sweep.T * step_bytes, sweep.budget))
    return out, log_weights


def best_message(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the logs of the largest weights after the last step, [*batch, K], but for a shift."""
    sweep = Sweep(chain, workspace, "logs")
    out = np.empty((*chain.batch, sweep.K))
    flat, step_bytes = out.reshape(-1, sweep.K), 8 * sweep.K

    def work(rows: range) -> None:
        states = np.empty((len(rows), sweep.K + 1))
        for steps in sweep.blocks(rows, range(sweep.T), step_bytes):
            kept = np.empty((len(rows), len(steps), sweep.K))
            best_weights(sweep.read(rows, steps), states, kept, steps.start)
        flat[sweep.layout.positions(rows)] = states[:, :-1]

    sweep.share(work)
    return out


def _mark_past(chain: Chain, out: Integers) -> None:
    """Make states [..., *batch, T] past the ends of chains -1."""
    if chain.lengths is not None:
        np.copyto(out, -1, where=np.arange(chain.num_steps) >= chain.lengths[..., None])


def sample(ctx: Context, chain: Chain, workspace: int, out: Integers, uniforms: Floats) -> None:
    """Draw paths from their posterior distribution into out [num_samples, *batch, T].

    Parameters
    ----------
    ctx : Context
    chain : Chain
    workspace : int
    out : array of int64, contiguous
        0 where no path has a positive weight, -1 past a chain's end.
    uniforms : array
        Numbers of [0, 1), the one for each state in its place: the same memory as `out`. At a row's
        last step, -1 - k stands for state k.
    """
    whole = Posterior(chain, workspace)
    sweep = whole.sweep
    flat = out.reshape(len(out), -1, chain.num_steps)

    def work(rows: range) -> None:
        totals, windows = whole.forward(rows)
        for window, history in windows:
            for steps in reversed(sweep.blocks(rows, window)):
                block = sweep.read(rows, steps, backward=True)
                draw_back(block, history, totals, flat)

    sweep.share(work, whole.row_bytes)
    _mark_past(chain, out)


def log_weight(ctx: Context, chain: Chain, workspace: int, states: Array) -> Array:
    """Return the log weights of paths.

    Parameters
    ----------
    ctx : Context
    chain : Chain
    workspace : int
    states : integer array [..., T]
        Leading axes broadcast against the batch. What lies past a chain's end is ignored.

    Returns
    -------
    array [...]
        Leading axes are those of states and of the batch, broadcast.
    """
    batch = np.broadcast_shapes(states.shape[:-1], chain.batch)
    out = np.empty(batch, ctx.result_dtype)
    sweep = Sweep(replace(chain, batch=batch), workspace, "given")
    sweep.step_work = _PATH_WORK
    layout, flat = sweep.layout, out.reshape(-1)
    states = np.broadcast_to(states, (*batch, sweep.T))

    def work(rows: range) -> None:
        weights, found = np.empty((len(rows), 5)), np.empty(len(rows))
        for steps in sweep.blocks(rows, range(sweep.T), 16):
            begin = max(steps.start - 1, 0)
            paths = states[..., begin : steps.stop][layout.index(batch, rows)]
            paths = np.ascontiguousarray(paths, np.int64).reshape(-1, steps.stop - begin)
            weights_of_paths(sweep.read(rows, steps), frozen(paths), begin, weights, found)
        flat[layout.positions(rows)] = found

    sweep.share(work, 48)
    return out
