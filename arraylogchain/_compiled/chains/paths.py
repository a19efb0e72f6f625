"""Paths of largest weight, samples of paths, and weights of given paths."""

from __future__ import annotations

import math

import numpy as np

from arraylogchain._compiled.chains.posterior import Posterior
from arraylogchain._compiled.chains.sources import frozen
from arraylogchain._compiled.chains.sweep import TILES, Sweep
from arraylogchain._compiled.loops.compiling import Floats, Integers
from arraylogchain._compiled.loops.paths import (
    best_weights,
    draw_back,
    trace_back,
    weights_of_paths,
)
from arraylogchain._context import Array, Context
from arraylogchain._inputs.chain import Chain

# Paths of a row that are weighed together, and what one takes: weights, the result, indices.
_PATHS, _PATH_BYTES = 4096, 64


def viterbi(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return a path of largest weight, [*batch, T].

    Of several the one with the smallest last state, and so on back to the first state. Past a
    chain's end states are -1. All states are 0 where no path has a positive weight.
    """
    shape = (*chain.batch, chain.num_steps)
    out = np.zeros(shape, np.int64)
    if chain.lengths is not None:
        np.copyto(out, -1, where=np.arange(shape[-1]) >= chain.lengths[..., None])
    if chain.num_states == 0 or out.size == 0:
        return out
    sweep = Sweep(chain, workspace, "logs")
    flat = out.reshape(-1, shape[-1])
    row_bytes = min(sweep.T * 8 * sweep.K, sweep.budget)
    sweep.share(lambda rows: _BestPaths(sweep, rows).write(flat), row_bytes)
    return out


class _BestPaths:
    """The best paths of a tile. The states of a window of steps are kept, and those before each."""

    def __init__(self, sweep: Sweep, rows: range) -> None:
        self.sweep, self.rows = sweep, rows
        self.best = np.empty((len(rows), sweep.K))
        self.special = np.zeros(len(rows), np.int64)

    def write(self, out: Integers) -> None:
        sweep, rows = self.sweep, self.rows
        windows = sweep.windows(rows, 8 * sweep.K)
        starts: list[tuple[Floats, Integers]] = []
        kept = np.empty((len(rows), len(windows[0]), sweep.K))
        for window in windows:
            starts.append((self.best.copy(), self.special.copy()))
            self._keep(window, kept)
        possible = np.zeros(len(rows), np.int64)
        for window, (best, special) in zip(reversed(windows), reversed(starts), strict=True):
            if window is not windows[-1]:
                self.best, self.special = best, special
                self._keep(window, kept)
            # The way back from a window's last step needs the matrix behind it.
            for block in reversed(list(sweep.blocks(rows, window))):
                after = range(block.start + 1, block.stop + 1)
                place, _, matrices, ends = sweep.read(rows, after, with_potentials=False)
                trace_back(
                    place,
                    matrices,
                    ends,
                    block.start,
                    block.stop,
                    kept,
                    window.start,
                    possible,
                    out,
                )

    def _keep(self, window: range, kept: Floats) -> None:
        for block in self.sweep.blocks(self.rows, window):
            place, potentials, matrices, ends = self.sweep.read(self.rows, block)
            best_weights(
                place,
                potentials,
                matrices,
                ends,
                block.start,
                block.stop,
                self.best,
                self.special,
                kept,
                window.start,
            )


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
        Numbers of [0, 1), the one for each state in its place: the same memory as `out`.
    """
    if chain.num_states == 0:
        out[...] = 0
    elif out.size > 0:
        _sample(chain, workspace, out)
    if chain.lengths is not None:
        past = np.arange(chain.num_steps) >= chain.lengths[..., None]
        for each in out:
            np.copyto(each, -1, where=past)


def _sample(chain: Chain, workspace: int, out: Integers) -> None:
    whole = Posterior(chain, workspace, backward=None)
    sweep = whole.sweep
    flat = out.reshape(len(out), -1, chain.num_steps)

    def work(rows: range) -> None:
        forward = whole.forward(rows)
        for window, history in whole.windows(forward):
            for block in reversed(list(sweep.blocks(rows, window))):
                after = range(block.start + 1, block.stop + 1)
                place, _, matrices, ends = sweep.read(rows, after, with_potentials=False)
                draw_back(
                    place,
                    matrices,
                    ends,
                    block.start,
                    block.stop,
                    history.arrays,
                    forward.totals,
                    flat,
                )

    sweep.share(work, whole.row_bytes)


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
    shape = np.broadcast_shapes(states.shape[:-1], chain.batch)
    out = np.full(shape, -math.inf, ctx.result_dtype)
    if chain.num_states == 0 or out.size == 0:
        return out
    _Paths(Sweep(chain, workspace, "given"), states, out).write()
    return out


class _Paths:
    """Paths as [*axes of the batch, *other axes], to be weighed."""

    def __init__(self, sweep: Sweep, states: Array, out: Array) -> None:
        self.sweep = sweep
        skipped = out.ndim - len(sweep.chain.batch)
        batch = (*(1,) * skipped, *sweep.chain.batch)
        axes = sorted(range(out.ndim), key=lambda axis: batch[axis] != out.shape[axis])
        own = sum(n == m for n, m in zip(batch, out.shape, strict=True))
        self.states = np.broadcast_to(states, (*out.shape, sweep.T)).transpose(*axes, out.ndim)
        self.out = out.transpose(axes)
        self.batch, self.others = self.out.shape[:own], self.out.shape[own:]
        self.count = math.prod(self.others)
        self.together = min(self.count, _PATHS, max(1, sweep.budget // TILES // _PATH_BYTES))

    def write(self) -> None:
        self.sweep.share(self._write_tile, self.together * _PATH_BYTES)

    def _write_tile(self, rows: range) -> None:
        places = self.sweep.layout.positions(rows)
        if isinstance(places, slice):
            places = np.arange(places.start, places.stop)
        of_rows = np.unravel_index(places[:, None], self.batch) if self.batch else ()
        for start in range(0, self.count, self.together):
            others = np.arange(start, min(start + self.together, self.count))
            of_others = np.unravel_index(others[None], self.others) if self.others else ()
            self._weigh(rows, (*of_rows, *of_others), len(others))

    def _weigh(self, rows: range, index: tuple[Integers, ...], count: int) -> None:
        sweep, chain = self.sweep, self.sweep.chain
        weights, found = np.empty((len(rows), count, 5)), np.empty((len(rows), count))
        for block in sweep.blocks(rows, range(sweep.T), 24 * count):
            begin = max(block.start - 1, 0)
            states = self.states[..., begin : block.stop][index].astype(np.int64, copy=False)
            states = frozen(np.ascontiguousarray(states).reshape(len(rows), count, -1))
            place, potentials, matrices, ends = sweep.read(rows, block)
            weights_of_paths(
                place,
                potentials,
                matrices,
                chain.transitions_in_logs,
                ends,
                block.start,
                block.stop,
                states,
                begin,
                weights,
                found,
            )
        if index:
            self.out[index] = found
        else:
            self.out[...] = found[0, 0]
