"""What a backend leaves of a whole chain at the seam, in blocks of steps, beside the reference."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from arraylogchain._backends.interface import Backend, Keep, Messages, SegmentMessages
from arraylogchain._backends.shards import shards
from arraylogchain._core.context import Context
from arraylogchain._inputs.chain import make_chain
from tests import error_model
from tests.chain_checks import assert_as_good, exact_of, fill_in_garbage
from tests.chain_reference import Exact
from tests.error_model import assert_within
from tests.reference import logsumexp


def check_recursions(
    recursion: type[Backend],
    ctx: Context,
    x: Any,
    lengths: Any = None,
    garbage: float = np.nan,
    workspace: int | None = None,
    cuts: tuple[int, ...] = (),
    **weights: Any,
) -> list[SegmentMessages]:
    """Compare messages of both directions, log Z and the best path's steps; return the blocks.

    `cuts` are the steps that blocks begin with, beside the first.
    """
    arrays = {"log_potentials": x, **weights}
    arrays = {n: np.array(a, float) for n, a in arrays.items() if a is not None}
    if lengths is not None:
        fill_in_garbage(arrays, lengths, garbage)
    with np.errstate(all="ignore"):
        arrays = {n: a.astype(ctx.result_name) for n, a in arrays.items()}
    exact = exact_of({n: a.astype(float) for n, a in arrays.items()}, lengths)
    chain, blocks = make_chain(arrays, lengths), []
    every = np.arange(exact.rows).reshape(chain.batch)
    every = every.transpose(*chain.group_axes, *chain.row_axes)
    with ctx.computing():
        for shard in shards(ctx, chain, *chain.sizes) if exact.rows else ():
            rows = every[shard.box].reshape(-1)
            rows = rows if shard.order is None else rows[np.asarray(shard.order)]
            blocks += _check_shard(recursion(shard, workspace or 1 << 26), exact, rows, cuts)
    return blocks


def _check_shard(
    recursion: Backend, exact: Exact, rows: np.ndarray, cuts: tuple[int, ...]
) -> list[SegmentMessages]:
    """Compare what is left of one piece; `rows` are the reference's."""
    ctx, T = recursion.shard.ctx, recursion.shard.num_steps
    edges = (0, *(t for t in cuts if t < T), T)
    parts = [slice(*pair) for pair in itertools.pairwise(edges)]
    steps = np.arange(1, T + 1)[:, None, None]

    def check(result: np.ndarray, logs: Any, gaps: Any, steps: Any) -> None:
        bound = error_model.chain_bound(logs, gaps, steps, exact.K, ctx.precision.name)
        assert_within(result.astype(ctx.precision.name), logs, bound)

    found_blocks = []
    for backward in (False, True):
        blocks = _run(recursion, parts, backward)
        way = exact.backward if backward else exact.forward
        mask = exact.valid_steps[rows, :T].T[..., None]
        for name in ("predicted", "updated"):
            result = np.concatenate([_logs(ctx, block, name, backward) for block in blocks])
            logs = way.full + way.offset
            if name == "predicted":
                logs = way.bare + way.bare_offset
            gaps = way.bare_gaps if name == "predicted" else way.full_gaps
            logs, gaps = (np.swapaxes(z[rows, :T], 0, 1) for z in (logs, gaps))
            count = np.maximum(exact.lengths[rows][:, None] - steps + 1, 1) if backward else steps
            result = np.where(mask, result.reshape(logs.shape), 0)
            check(result, np.where(mask, logs, 0), np.where(mask, gaps, 0), count)
        if not backward:
            last = blocks[-1].carry.logs(ctx).reshape(len(rows), -1) + exact.ends["final"][rows]
            log_z, gap = exact.log_partition
            check(logsumexp(last, -1), log_z[rows], gap[rows], exact.lengths[rows])
        found_blocks += blocks
    _check_best(recursion, parts, exact, rows)
    return found_blocks


def _run(recursion: Backend, parts: list[slice], backward: bool) -> list[SegmentMessages]:
    state, result = None, []
    for part in parts[::-1] if backward else parts:
        block = recursion.advance(state, part, backward, Keep.ALL)
        state = block.carry
        result.append(block)
    return result[::-1] if backward else result


def _logs(ctx: Context, block: SegmentMessages, name: str, backward: bool) -> np.ndarray:
    messages: Messages = getattr(block, name)
    logs = messages.logs(ctx)
    if name == "updated":
        return logs[:-1] if backward else logs[1:]
    return logs


def _check_best(recursion: Backend, parts: list[slice], exact: Exact, rows: np.ndarray) -> None:
    """Compare the weight of the path that is found with the best one's."""
    z = exact.log_partition[0]
    if np.any(~np.isfinite(z) & (z != -math.inf) | exact.broken):
        return
    state, stored = None, []
    for part in parts:
        _, updated, state = recursion.best(state, part, Keep.UPDATED)
        stored.append(updated)
    end = state.values.reshape(len(rows), -1) + exact.ends["final"][rows]
    after = np.argmax(end, -1).reshape(recursion.shard.groups, -1)
    paths = []
    for part, updated in zip(parts[::-1], stored[::-1], strict=True):
        path = recursion.trace(updated, after, part)
        after = path[0]
        paths.append(path)
    result = np.concatenate(paths[::-1]).reshape(recursion.shard.num_steps, -1)
    states = exact.best[0].copy()
    states[rows, : len(result)] = result.T
    assert_as_good(
        exact, np.where(exact.valid_steps, states, 0), recursion.shard.ctx.precision.name
    )
