"""A small hard case of each chain kernel, and its exact result."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from arraylogchain._backends.cuda import matrices
from arraylogchain._backends.cuda.geometry import Geometry
from arraylogchain._backends.interface import Keep, Messages
from arraylogchain._backends.shards import shards
from arraylogchain._core.context import Array, Context
from arraylogchain._cuda.kernels import Kernel
from arraylogchain._cuda.self_check import Results, error_limit, log_sum_exp, wide_entries
from arraylogchain._inputs.chain import Chain

_STEPS = slice(0, 5)
_SCALE = 3.0 + 3.0 * np.log(2.0)  # of messages that no kernel has computed


class _Example:
    """A chain of two groups or, if its matrix is kept on chip, one of rows of two lengths.

    Attributes
    ----------
    x : numpy.ndarray [T, groups, rows, K]
        Log potentials, in the order of the shard.
    logs : numpy.ndarray [T - 1, groups, 1, K, K]
        Log matrices.
    lengths : numpy.ndarray [groups, rows]
    shard : Shard
    geometry : Geometry
    backend : CudaBackend
    reach : float
        The allowed error of messages, see `self_check`.
    """

    def __init__(self, backend_of: type[Any], ctx: Context, geometry: Geometry) -> None:
        rng, states = np.random.default_rng(1), 5 if geometry.in_warp else 37
        groups, count = (1, 1) if geometry.on_chip else (2, 4)
        rows = geometry.rows + 5
        x = wide_entries(ctx, rng, groups, rows, 5, states)
        logs = wide_entries(ctx, rng, groups, count, states, states)
        self.ctx, lengths = ctx, np.full((groups, rows), 5)
        if geometry.on_chip:
            lengths[:, : rows // 2] = 3
        names = "potentials", "transitions"
        arrays = (ctx.to_result(self.on_device(z)) for z in (x, logs[:, None]))
        chain = Chain(
            batch=(groups, rows),
            parts=dict(zip(names, arrays, strict=True)),
            logs=names,
            lengths=lengths if geometry.on_chip else None,
        )
        (self.shard,) = shards(ctx, chain, groups, rows)
        order = np.argsort(-lengths[0], kind="stable")
        self.x, self.lengths = np.moveaxis(x[:, order], 2, 0).copy(), lengths[:, order]
        logs = np.broadcast_to(logs, (groups, 4, states, states))
        self.logs = np.moveaxis(logs, 1, 0)[:, :, None]
        self.backend = backend_of(self.shard, 1 << 24, geometry)
        self.geometry, self.reach = geometry, 5 * error_limit(ctx, states)

    def on_device(self, x: np.ndarray) -> Array:
        return self.ctx.xp.asarray(x, device=self.ctx.device)

    def messages(self, backward: bool, join: Callable[..., Any] = log_sum_exp) -> np.ndarray:
        """Return exact updated messages [T, groups, rows, K], by sums over pairs of states."""
        updated = self.x.copy()
        for t in range(3, -1, -1) if backward else range(1, 5):
            if backward:
                moved = join(self.logs[t] + updated[t + 1][..., None, :], -1)
                updated[t] += np.where((t < self.lengths - 1)[..., None], moved, 0)
            else:
                updated[t] += join(self.logs[t - 1] + updated[t - 1][..., :, None], -2)
        return updated

    def stored(self, x: np.ndarray) -> Messages:
        """Return logs as if they were messages, with a scale."""
        values = self.ctx.load(self.on_device(x), self.ctx.precision)
        scale = self.on_device(np.full(x.shape[:-1], 3.0))
        return Messages(values, scale, scale, np.ones(self.lengths.shape, bool))

    def forward_pass(self, updated: Messages, carry: Messages) -> Any:
        """Return the attributes of a pass with these messages that the backend reads."""
        return SimpleNamespace(
            shard=self.shard,
            segments=[_STEPS],
            carry=carry,
            log_z=None,
            checkpoints=[None],
            stored_messages=lambda _: updated,
        )

    def pairs(self) -> Any:
        """Return exact pair marginals [T - 1, groups, rows, K, K]."""
        alpha, beta_x = self.messages(False), self.messages(True)
        total = log_sum_exp(alpha[-1], -1)[..., None, None]
        return np.exp(alpha[:-1, ..., None] + self.logs + beta_x[1:, ..., None, :] - total)

    def backtrace(self, choose: Callable[[np.ndarray, int], Any]) -> np.ndarray:
        """Return states [T, groups, rows, n] that `choose` takes, given log weights of a step."""
        states, weights = [], self.x[4][:, :, None]
        for t in range(4, -1, -1):
            states.append(choose(weights, t))
            into = [self.logs[t - 1, g, 0].T[states[-1][g]] for g in range(2)]
            weights = self.x[t - 1][:, :, None] + np.stack(into)
        return np.stack(states[::-1])


def _steps(example: _Example) -> Results:
    """Take rows of two lengths, or two groups with matrices of each step, both ways."""
    sums = example.geometry.sums
    for backward in (False, True) if sums else (False,):
        if sums:
            segment = example.backend.advance(None, _STEPS, backward, Keep.UPDATED)
        else:
            segment = example.backend.max_product(None, _STEPS, Keep.UPDATED)
        exact = example.messages(backward, log_sum_exp if sums else np.max)
        is_valid = np.arange(5)[:, None, None] < example.lengths
        updated = np.asarray(segment.updated.logs(example.ctx).tolist())
        yield updated[is_valid], exact[is_valid], example.reach


def _trace(example: _Example) -> Results:
    """Trace best paths back through stored messages."""
    after, x = np.arange(12).reshape(2, 6), example.x
    stored, last = example.stored(x), example.stored(x[4])
    states = example.backend.backtrace(stored, example.on_device(after), _STEPS)
    exact = example.backtrace(lambda logs, t: after[..., None] if t == 4 else np.argmax(logs, -1))
    yield states, exact[..., 0], 0.0
    paths, weights = (
        example.ctx.kernels.empty((2, 6, *x), y) for x, y in (((5,), "int64"), ((), "float64"))
    )
    example.backend.backtrace_paths(example.forward_pass(stored, last), paths, weights)
    exact = example.backtrace(lambda logs, _: np.argmax(logs, -1))
    yield paths, np.moveaxis(exact[..., 0], 0, -1), 0.0
    yield weights, x[4].max(-1) + _SCALE, 4.0


def _samples(example: _Example) -> Results:
    """Draw with numbers that choose one of the first states that have weight, or a later one."""
    # Not 0: whether a weight below normal numbers is one differs from device to device.
    numbers = np.array([1e-9, 0.6])
    states = example.ctx.kernels.empty((2, 6, 5, 2), "int64")
    uniforms = example.on_device(np.broadcast_to(numbers, states.shape).copy())
    messages = example.stored(example.x), example.stored(example.x[4])
    example.backend.sample_paths(example.forward_pass(*messages), states, uniforms)

    def draw(logs: np.ndarray, _: int) -> Any:
        relative = (logs - logs.max(-1, keepdims=True)).astype(example.ctx.precision.name)
        below = np.cumsum(np.exp(relative), -1, dtype=float)
        return np.argmax(below > numbers[:, None] * below[..., -1:], -1)

    yield states, np.moveaxis(example.backtrace(draw), 0, 2), 0.0


def _preparation(example: _Example) -> Results:
    """Prepare matrices of two groups, plain and transposed, and undo their scales."""
    plain = np.moveaxis(example.logs[:, :, 0], 0, 1)
    groups, count, size, _ = plain.shape
    for backward, exact in ((False, plain), (True, plain.swapaxes(-1, -2))):
        scales = example.ctx.kernels.empty((groups, count, 2), "float64")
        prepared = matrices.prepare(example.shard, slice(0, count), backward, scales, 0)
        values = np.asarray(prepared.values.tolist())
        factors, logs = values[: 2 * exact.size].reshape(2, *exact.shape)
        shifts = values[2 * exact.size :].reshape(groups, count, 1, size, 2)
        nats = np.asarray(scales.tolist())[..., 0][..., None, None] + shifts[..., 0]
        yield logs + nats, exact, 4.0
        yield factors, np.exp(exact - nats), 4.0


def _log_partition(example: _Example) -> Results:
    """Add up wide messages, whose scale is part of the result."""
    log_z = example.backend.final_log_partition(example.stored(example.x[0]))
    yield log_z, log_sum_exp(example.x[0], -1) + _SCALE, 8.0


def _marginals(example: _Example) -> Results:
    """Compute marginals and expected counts of two groups, some of them from logs alone."""
    pairs = example.pairs()
    exact = np.concatenate([pairs.sum(-1), pairs[-1:].sum(-2)])
    results = {
        "potentials": np.moveaxis(exact, 0, 2),
        "transitions": np.moveaxis(pairs.sum(2), 0, 1)[:, None],
        "initial": exact[0],
        "final": exact[-1],
    }
    ctx = example.ctx
    dtypes = dict.fromkeys(results, ctx.precision.name) | {"potentials": ctx.result_name}
    arrays = {x: ctx.kernels.empty(y.shape, dtypes[x]) for x, y in results.items()}
    sums = SimpleNamespace(arrays=arrays, by_logs=True, written_once=lambda name, *_: arrays[name])
    _, *messages = example.backend.advance(None, _STEPS, False, Keep.UPDATED)
    example.backend.backward_pass(example.forward_pass(*messages), sums, None).add()
    yield from ((arrays[name], x, example.reach) for name, x in results.items())


def _filtered(example: _Example) -> Results:
    """Filter rows of two groups."""
    alpha, ctx = np.moveaxis(example.messages(False), 0, 2), example.ctx
    log_sums = log_sum_exp(alpha, -1)
    results = np.exp(alpha - log_sums[..., None]), np.diff(log_sums, prepend=0.0)
    arrays = [ctx.kernels.empty(x.shape, ctx.result_name) for x in results]
    example.backend.filter_segment(None, _STEPS, *arrays)
    yield from ((*pair, example.reach) for pair in zip(arrays, results, strict=True))


def _entropies(example: _Example) -> Results:
    """Add the entropies of the steps of two groups of rows."""

    def terms(p: np.ndarray) -> Any:
        return -p * np.log(np.where(p > 0, p, 1.0))

    pairs = example.pairs()
    # The states of a step are counted by the pairs before and after it.
    exact = terms(pairs).sum((0, 3, 4)) - terms(pairs[1:].sum(-1)).sum((0, 3))
    _, *messages = example.backend.advance(None, _STEPS, False, Keep.UPDATED)
    yield example.backend.entropies(example.forward_pass(*messages)), exact, example.reach


# Each with whether the states of a row fit a warp.
CASES: dict[str, tuple[Callable[[_Example], Results], bool]] = {
    "entropies.cu": (_entropies, True),
    "sample_paths.cu": (_samples, False),
    "filtered.cu": (_filtered, True),
    "chain_steps.cu": (_steps, True),
    "chain_trace.cu": (_trace, False),
    "prepare_matrices.cu": (_preparation, False),
    "log_partition.cu": (_log_partition, False),
    "marginals.cu": (_marginals, True),
}


def results(backend_of: type[Any], ctx: Context, kernel: Kernel) -> Results:
    """Yield results of the hard case of a chain kernel, with exact ones."""
    case, in_warp = CASES[kernel.source]
    geometry = Geometry(True, in_warp, 1, False)
    if case is _steps:
        *_, sums, fits, rows, on_chip = kernel.name.rstrip(">").replace(" ", "").split(",")
        geometry = Geometry(sums == "true", fits == "true", int(rows), on_chip == "true")
    return case(_Example(backend_of, ctx, geometry))
