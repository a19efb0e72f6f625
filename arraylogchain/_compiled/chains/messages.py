"""The log of the sum over all paths, and messages."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from arraylogchain._compiled.chains.sweep import State, Sweep
from arraylogchain._compiled.loops.filtering import filter_steps
from arraylogchain._compiled.loops.steps import ROWS
from arraylogchain._context import Array, Context
from arraylogchain._inputs.chain import Chain


def log_partition(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the logs of the sums over all paths, [*batch]."""
    if chain.num_states == 0 or chain.num_rows == 0:
        return np.full(chain.batch, -math.inf, ctx.result_dtype)
    out = np.empty(chain.batch, ctx.result_dtype)
    sweep = Sweep(chain, workspace)
    flat = out.reshape(-1)

    def work(rows: range) -> None:
        totals = np.empty(len(rows))
        sweep.forward(rows, range(sweep.T), sweep.state(rows), totals=totals)
        flat[sweep.layout.positions(rows)] = totals

    sweep.share(work)
    return out


def forward_messages(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the logs of the sums over all paths up to each state, [*batch, T, K]."""
    return _messages(ctx, chain, workspace, backward=False)


def backward_messages(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the logs of the sums over all paths from each state on, [*batch, T, K]."""
    return _messages(ctx, chain, workspace, backward=True)


def _messages(ctx: Context, chain: Chain, workspace: int, backward: bool) -> Array:
    shape = (*chain.batch, chain.num_steps, chain.num_states)
    if chain.lengths is None:
        out: Any = np.empty(shape, ctx.result_dtype)
    else:
        out = np.full(shape, -math.inf, ctx.result_dtype)
    if out.size == 0:
        return out
    forms = (None, "transposed") if backward else ("weights", None)
    sweep = Sweep(chain, workspace, *forms)
    flat = out.reshape(-1, *shape[-2:])
    written = out.dtype == np.float64 and sweep.layout.in_order

    def run(rows: range, steps: range, state: State, messages: Any) -> None:
        if backward:
            sweep.backward(rows, steps, state, messages)
        else:
            sweep.forward(rows, steps, state, messages=messages)

    def work(rows: range) -> None:
        state = sweep.state(rows)
        if written:
            run(rows, range(sweep.T), state, (flat, rows.start, 0))
            return
        places = sweep.layout.positions(rows)
        blocks = list(sweep.blocks(rows, range(sweep.T), 8 * sweep.K))
        for block in reversed(blocks) if backward else blocks:
            buffer = np.full((len(rows), len(block), sweep.K), -math.inf)
            run(rows, block, state, (buffer, 0, block.start))
            flat[places, block.start : block.stop] = buffer

    sweep.share(work)
    return out


def filtered(ctx: Context, chain: Chain, workspace: int) -> tuple[Array, Array]:
    """Return state probabilities given the steps so far, and the logs of what normalises them."""
    shape = (*chain.batch, chain.num_steps)
    normalizers = np.zeros(shape, ctx.result_dtype)
    probabilities = np.zeros((*shape, chain.num_states), ctx.result_dtype)
    sweep = Sweep(chain, workspace)
    results = (
        probabilities.reshape(-1, *probabilities.shape[-2:]),
        normalizers.reshape(-1, sweep.T),
    )

    def work(rows: range) -> None:
        state, places = sweep.state(rows), sweep.layout.positions(rows)
        scratch = np.empty((ROWS, sweep.K))
        for block in sweep.blocks(rows, range(sweep.T), 8 * (sweep.K + 1)):
            shares, logs = (
                np.zeros((len(rows), len(block), sweep.K)),
                np.zeros((len(rows), len(block))),
            )
            span = (block.start, block.stop)
            filter_steps(*sweep.read(rows, block), *span, state, shares, logs, scratch)
            for out, found in zip(results, (shares, logs), strict=True):
                out[places, block.start : block.stop] = found

    sweep.share(work)
    return probabilities, normalizers
