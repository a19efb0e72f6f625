"""Compare the messages and best paths of a backend, segment by segment, with the reference."""

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
    backend: type[Backend],
    ctx: Context,
    x: Any,
    lengths: Any = None,
    garbage: float = np.nan,
    workspace: int | None = None,
    cuts: tuple[int, ...] = (),
    **weights: Any,
) -> list[SegmentMessages]:
    """Compare messages of both directions, log Z and the best path; return the segments.

    `cuts` are the first steps of all segments but the first one.
    """
    arrays = {"log_potentials": x, **weights}
    arrays = {n: np.array(a, float) for n, a in arrays.items() if a is not None}
    if lengths is not None:
        fill_in_garbage(arrays, lengths, garbage)
    with np.errstate(all="ignore"):
        arrays = {n: a.astype(ctx.result_name) for n, a in arrays.items()}
    exact = exact_of({n: a.astype(float) for n, a in arrays.items()}, lengths)
    chain, segments = make_chain(arrays, lengths), []
    row_numbers = np.arange(exact.rows).reshape(chain.batch)
    row_numbers = row_numbers.transpose(*chain.group_axes, *chain.row_axes)
    with ctx.computing():
        for shard in shards(ctx, chain, *chain.sizes) if exact.rows else ():
            rows = row_numbers[shard.box].reshape(-1)
            rows = rows if shard.order is None else rows[np.asarray(shard.order)]
            segments += ShardCheck(backend(shard, workspace or 1 << 26), exact, rows, cuts).run()
    return segments


class ShardCheck:
    """The recursions of one shard, whose rows have the numbers `rows` in the reference."""

    def __init__(
        self, backend: Backend, exact: Exact, rows: np.ndarray, cuts: tuple[int, ...]
    ) -> None:
        self.backend, self.exact, self.rows = backend, exact, rows
        self.shard, self.ctx = backend.shard, backend.shard.ctx
        self.T = self.shard.num_steps
        edges = (0, *(t for t in cuts if t < self.T), self.T)
        self.steps = [slice(*pair) for pair in itertools.pairwise(edges)]

    def run(self) -> list[SegmentMessages]:
        forward, backward = self.advance(backward=False), self.advance(backward=True)
        self.check_messages(forward, "forward")
        self.check_log_partition(forward[-1])
        self.check_messages(backward, "backward")
        self.check_best_path()
        return forward + backward

    def advance(self, *, backward: bool) -> list[SegmentMessages]:
        """Return the messages of all segments, in order of time."""
        carry, segments = None, []
        for steps in self.steps[::-1] if backward else self.steps:
            segment = self.backend.advance(carry, steps, backward, Keep.ALL)
            carry = segment.carry
            segments.append(segment)
        return segments[::-1] if backward else segments

    def label(self, operation: str) -> str:
        backend = type(self.backend).__name__
        return error_model.label(operation, backend, self.ctx.precision.name)

    def assert_logs(
        self, operation: str, result: np.ndarray, exact: Any, gaps: Any, steps: Any
    ) -> None:
        dtype = self.ctx.precision.name
        bound = error_model.chain_bound(exact, gaps, steps, self.exact.K, dtype)
        assert_within(result.astype(dtype), exact, bound, self.label(operation))

    def check_messages(self, segments: list[SegmentMessages], direction: str) -> None:
        is_backward, rows = direction == "backward", self.rows
        exact = self.exact.backward if is_backward else self.exact.forward
        is_valid = self.exact.valid_steps[rows, : self.T].T[..., None]
        steps = np.arange(1, self.T + 1)[:, None, None]
        if is_backward:
            steps = np.maximum(self.exact.lengths[rows][:, None] - steps + 1, 1)
        for name, logs, gaps in (
            ("predicted", exact.bare + exact.bare_offset, exact.bare_gaps),
            ("updated", exact.full + exact.offset, exact.full_gaps),
        ):
            result = [_logs(self.ctx, segment, name, is_backward) for segment in segments]
            logs, gaps = (np.swapaxes(x[rows, : self.T], 0, 1) for x in (logs, gaps))
            result = np.concatenate(result).reshape(logs.shape)
            arrays = (np.where(is_valid, x, 0) for x in (result, logs, gaps))
            self.assert_logs(f"{name} {direction} messages", *arrays, steps)

    def check_log_partition(self, segment: SegmentMessages) -> None:
        rows, (log_z, gap) = self.rows, self.exact.log_partition
        alpha = segment.carry.logs(self.ctx).reshape(len(rows), -1)
        result = logsumexp(alpha + self.exact.boundaries["final"][rows], -1)
        self.assert_logs("log Z", result, log_z[rows], gap[rows], self.exact.lengths[rows])

    def check_best_path(self) -> None:
        """Compare the weight of the path by `max_product` and `backtrace` with the largest one."""
        rows, exact, z = self.rows, self.exact, self.exact.log_partition[0]
        if np.any(~np.isfinite(z) & (z != -math.inf) | exact.broken):
            return
        carry, stored = None, []
        for steps in self.steps:
            _, updated, carry = self.backend.max_product(carry, steps, Keep.UPDATED)
            stored.append(updated)
        weights = carry.values.reshape(len(rows), -1) + exact.boundaries["final"][rows]
        after = np.argmax(weights, -1).reshape(self.shard.groups, -1)
        paths = []
        for steps, updated in zip(self.steps[::-1], stored[::-1], strict=True):
            path = self.backend.backtrace(updated, after, steps)
            after = path[0]
            paths.append(path)
        path = np.concatenate(paths[::-1]).reshape(self.T, -1)
        states = exact.best[0].copy()
        states[rows, : self.T] = path.T
        states = np.where(exact.valid_steps, states, 0)
        assert_as_good(exact, states, self.ctx.precision.name, self.label("best path"))


def _logs(ctx: Context, segment: SegmentMessages, name: str, is_backward: bool) -> np.ndarray:
    """Return the logs of the predicted or updated messages of a segment's own steps."""
    messages: Messages = getattr(segment, name)
    logs = messages.logs(ctx)
    if name == "updated":
        return logs[:-1] if is_backward else logs[1:]
    return logs
