"""The log of the sum over all paths, and messages."""

from __future__ import annotations

import math

import numpy as np

from arraylogchain._compiled.chains.sweep import NO_MESSAGES, Sweep
from arraylogchain._compiled.loops import recursion
from arraylogchain._compiled.loops.compiling import Floats
from arraylogchain._compiled.loops.filtering import filter_steps
from arraylogchain._compiled.loops.steps import HIGH, LOW, POWER, SCALE, WIDE
from arraylogchain._context import Array, Context
from arraylogchain._inputs.chain import Chain


def log_partition(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the logs of the sums over all paths, [*batch]."""
    out = np.empty(chain.batch, ctx.result_dtype)
    sweep = Sweep(chain, workspace, in_packs=True)
    flat = out.reshape(-1)

    def work(rows: range) -> None:
        flat[sweep.layout.positions(rows)] = sweep.log_totals(rows)

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
    out = np.empty(shape, ctx.result_dtype)
    sweep = Sweep(chain, workspace, *((None, "transposed") if backward else ("weights", None)))
    flat = out.reshape(-1, *shape[-2:])

    def work(rows: range) -> None:
        states, places = sweep.state(rows), sweep.layout.positions(rows)
        blocks = sweep.blocks(rows, range(sweep.T), 8 * sweep.K)
        for steps in reversed(blocks) if backward else blocks:
            found = np.full((len(rows), len(steps), sweep.K), -math.inf)
            if backward:
                block = sweep.read(rows, steps, backward=True)
                recursion.backward(block, states, (found, steps.start))
            else:
                sweep.forward(rows, steps, states, messages=(found, steps.start))
            flat[places, steps.start : steps.stop] = found

    sweep.share(work)
    return out


def last_message(
    ctx: Context, chain: Chain, workspace: int, backward: bool = False
) -> tuple[Array, Array]:
    """Return the weights after the last step, or backward from the first step on.

    They are logs [*batch, K], the largest of them near 0, and numbers [*batch] to add to them.
    """
    sweep = Sweep(chain, workspace, *((None, "transposed") if backward else ("weights", None)))
    logs, shift = np.empty((*chain.batch, sweep.K)), np.empty(chain.batch)
    results = logs.reshape(-1, sweep.K), shift.reshape(-1)

    def work(rows: range) -> None:
        states, places = sweep.state(rows), sweep.layout.positions(rows)
        if backward:
            for steps in reversed(sweep.blocks(rows, range(sweep.T))):
                block = sweep.read(rows, steps, backward=True)
                recursion.backward(block, states, NO_MESSAGES)
        else:
            sweep.forward(rows, range(sweep.T), states)
        for out, values in zip(results, _logs_of(states), strict=True):
            out[places] = values

    sweep.share(work)
    if backward:
        logs += chain.potentials[..., 0, :]
        top = np.max(logs, axis=-1)
        top = np.where(np.isfinite(top), top, 0.0)
        logs -= top[..., None]
        shift += top
    return logs, shift


def _logs_of(states: Floats) -> tuple[Floats, Floats]:
    """Return the logs of the weights of states, relative to the largest one, and of that."""
    m, e, scale = np.split(states, [states.shape[1] // 2 - 2, states.shape[1] - SCALE], axis=1)
    fractions, exponents = np.frexp(m)
    exponents = exponents + np.where(scale[:, WIDE, None] != 0, e, 0.0)
    top = np.max(exponents, axis=1, where=m > 0, initial=-math.inf)
    top = np.where(top > -math.inf, top, 0.0)
    with np.errstate(divide="ignore"):
        logs = np.log(fractions) + math.log(2) * (exponents - top[:, None])
    return logs, math.log(2) * (scale[:, POWER] + top) + (scale[:, HIGH] + scale[:, LOW])


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
        states, places = sweep.state(rows), sweep.layout.positions(rows)
        for steps in sweep.blocks(rows, range(sweep.T), 8 * (sweep.K + 1)):
            found = np.zeros((len(rows), len(steps), sweep.K)), np.zeros((len(rows), len(steps)))
            filter_steps(sweep.read(rows, steps), states, *found)
            for out, values in zip(results, found, strict=True):
                out[places, steps.start : steps.stop] = values

    sweep.share(work)
    return probabilities, normalizers
