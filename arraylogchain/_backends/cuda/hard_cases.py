"""A small hard case of each chain kernel, and its exact result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from arraylogchain._backends.cuda import matrices
from arraylogchain._backends.cuda.geometry import Geometry
from arraylogchain._backends.interface import Keep, Messages
from arraylogchain._backends.shards import Shard, shards
from arraylogchain._core.context import Array, Context
from arraylogchain._cuda.kernels import Kernel
from arraylogchain._cuda.self_check import error_limit, log_sum_exp, wide_entries
from arraylogchain._inputs.chain import Chain


def _chain(ctx: Context, states: int, rows: int, has_one: bool) -> tuple[Any, Any, Any]:
    """Return log potentials, log matrices, and a shard of two groups of rows of two lengths."""
    rng, steps, groups = np.random.default_rng(1), 5, 1 if has_one else 2
    x = wide_entries(ctx, rng, groups, rows, steps, states)
    logs = wide_entries(ctx, rng, groups, 1 if has_one else steps - 1, states, states)
    lengths = None if groups > 1 else np.where(np.arange(rows) < rows // 2, steps - 2, steps)
    names = "potentials", "transitions"
    arrays = [ctx.to_result(ctx.xp.asarray(z, device=ctx.device)) for z in (x, logs[:, None])]
    chain = Chain(
        batch=(groups, rows),
        parts=dict(zip(names, arrays, strict=True)),
        logs=names,
        lengths=None if lengths is None else lengths[None],
    )
    (shard,) = shards(ctx, chain, groups, rows)
    order = np.arange(rows) if lengths is None else np.argsort(-lengths, kind="stable")
    return x[:, order], np.broadcast_to(logs, (groups, steps - 1, states, states)), shard


def _steps(
    recursion_of: type[Any], ctx: Context, kernel: Kernel
) -> Iterator[tuple[Array, np.ndarray, float]]:
    """Take rows of two lengths, or two groups with matrices of each step, both ways."""
    *_, sums, in_warp, rows, on_chip = kernel.name.rstrip(">").replace(" ", "").split(",")
    geometry = Geometry(sums == "true", in_warp == "true", int(rows), on_chip == "true")
    states = 5 if geometry.in_warp else 37
    x, logs, shard = _chain(ctx, states, geometry.rows + 5, geometry.on_chip)
    every_step, recursion = slice(0, 5), recursion_of(shard, 1 << 24, geometry)
    reach = 5 * error_limit(ctx, states)
    lengths = np.full(x.shape[:2], 5) if shard.lengths is None else shard.lengths
    for backward in (False, True) if geometry.sums else (False,):
        exact = _walk(x, logs, lengths, backward, log_sum_exp if geometry.sums else np.max)
        if geometry.sums:
            block = recursion.advance(None, every_step, backward, Keep.UPDATED)
        else:
            block = recursion.max_product(None, every_step, Keep.UPDATED)
        updated = block.updated.logs(ctx)
        for t in range(5):
            real = np.argwhere(lengths > t)
            yield from ((updated[t, g, r], exact[t, g, r], reach) for g, r in real)


def _walk(
    x: np.ndarray, logs: np.ndarray, lengths: np.ndarray, backward: bool, join: Callable[..., Any]
) -> np.ndarray:
    """Return updated messages, [T, groups, rows, K], by sums over pairs of states."""
    x = np.moveaxis(x, 2, 0)
    updated, steps = x.copy(), len(x)
    for t in range(steps - 2, -1, -1) if backward else range(1, steps):
        if backward:
            moved = join(logs[:, None, t] + updated[t + 1][..., None, :], -1)
            updated[t] += np.where((t < lengths - 1)[..., None], moved, 0)
        else:
            updated[t] += join(logs[:, None, t - 1] + updated[t - 1][..., :, None], -2)
    return updated


def _trace(
    recursion_of: type[Any], ctx: Context, kernel: Kernel
) -> Iterator[tuple[Array, np.ndarray, float]]:
    """Trace best paths back through stored messages."""
    x, logs, shard = _chain(ctx, 37, 6, has_one=False)
    updated = np.ascontiguousarray(np.moveaxis(x, 2, 0))
    after = np.arange(12).reshape(2, 6)
    on_device = ctx.load(ctx.xp.asarray(updated, device=ctx.device), ctx.precision)
    recursion = recursion_of(shard, 1 << 24, Geometry(False, False, 1, False))
    stored = Messages(on_device, None, None, None)
    result = recursion.backtrace(stored, ctx.xp.asarray(after, device=ctx.device), slice(0, 5))

    def backtrace(state: np.ndarray) -> np.ndarray:
        exact = np.empty((5, 2, 6))
        exact[4] = state
        for t in range(3, -1, -1):
            to_state = np.stack([logs[g, t][:, state[g]].T for g in range(2)])
            exact[t] = state = np.argmax(updated[t] + to_state, -1)
        return exact

    yield result, backtrace(after), 0.0
    scale = ctx.xp.asarray(np.full((2, 6), 3.0), device=ctx.device)
    last = Messages(on_device[-1, ...], scale, scale, np.ones((2, 6), bool))
    forward_pass = SimpleNamespace(
        carry=last, segments=[slice(0, 5)], stored_messages=lambda _: stored
    )
    states, weights = (
        ctx.kernels.empty((2, 6, *x), y) for x, y in (((5,), "int64"), ((), "float64"))
    )
    recursion.backtrace_paths(forward_pass, states, weights)
    yield states, np.moveaxis(backtrace(np.argmax(updated[-1], -1)), 0, -1), 0.0
    yield weights, updated[-1].max(-1) + 3.0 + 3.0 * np.log(2.0), 4.0


def _preparation(
    recursion_of: type[Any], ctx: Context, kernel: Kernel
) -> Iterator[tuple[Array, np.ndarray, float]]:
    """Prepare matrices of two groups, plain and transposed, and undo their scales."""
    _, logs, shard = _chain(ctx, 37, 1, has_one=False)
    groups, count, size, _ = logs.shape
    for backward in (False, True):
        scales = ctx.kernels.empty((groups, count, 2), "float64")
        prepared = matrices.prepare(shard, slice(0, count), backward, scales, 0)
        values = np.asarray(prepared.values.tolist())
        factors, found_logs = values[: 2 * logs.size].reshape(2, *logs.shape)
        shifts = values[2 * logs.size :].reshape(groups, count, 1, size, 2)
        nats = np.asarray(scales.tolist())[..., 0][..., None, None] + shifts[..., 0]
        exact = logs.swapaxes(-1, -2) if backward else logs
        yield found_logs + nats, exact, 4.0
        yield factors, np.exp(exact - nats), 4.0


def _log_partition(
    recursion_of: type[Any], ctx: Context, kernel: Kernel
) -> Iterator[tuple[Array, np.ndarray, float]]:
    """Add up wide messages, whose scale is part of the result."""
    x, _, shard = _chain(ctx, 37, 6, has_one=False)
    values = ctx.load(ctx.xp.asarray(x[:, :, 0], device=ctx.device), ctx.precision)
    scale = ctx.xp.asarray(np.full(x.shape[:2], 3.0), device=ctx.device)
    message = Messages(values, scale, scale, np.ones(x.shape[:2], bool))
    backend = recursion_of(shard, 1 << 24, Geometry(True, False, 1, False))
    exact = log_sum_exp(x[:, :, 0], -1) + 3.0 + 3.0 * np.log(2.0)
    yield backend.final_log_partition(message), exact, 8.0


class _Sums:
    """The part of an accumulator that a backward pass needs, for one shard in one segment."""

    by_logs = True

    def __init__(self, shard: Shard) -> None:
        ctx, K = shard.ctx, shard.chain.num_states
        batch, count = shard.shape, int(shard.views["transitions"].shape[-3])
        shapes = {
            "potentials": (*batch, shard.num_steps, K),
            "transitions": (batch[0], 1, count, K, K),
            "initial": (*batch, K),
            "final": (*batch, K),
        }
        name = ctx.precision.name
        self.arrays = {x: ctx.kernels.empty(shape, name) for x, shape in shapes.items()}

    def written_once(self, name: str, shard: Shard, num_segments: int) -> Array:
        return self.arrays[name]


def _marginals(
    recursion_of: type[Any], ctx: Context, kernel: Kernel
) -> Iterator[tuple[Array, np.ndarray, float]]:
    """Compute marginals and expected counts of two groups, some of them from logs alone."""
    x, logs, shard = _chain(ctx, 5, 6, has_one=False)
    backend = recursion_of(shard, 1 << 24, Geometry(True, True, 1, False))
    steps, sums = slice(0, x.shape[2]), _Sums(shard)
    forward = backend.advance(None, steps, False, Keep.UPDATED)
    log_z = backend.final_log_partition(forward.carry)
    forward_pass = SimpleNamespace(
        shard=shard,
        segments=[steps],
        carry=forward.carry,
        log_z=log_z,
        stored_messages=lambda _: forward.updated,
    )
    backend.backward_pass(forward_pass, sums, None).add()
    lengths, reach = np.full(x.shape[:2], x.shape[2]), 8 * error_limit(ctx, 5)
    alpha, beta_x = (_walk(x, logs, lengths, b, log_sum_exp) for b in (False, True))
    steps_first = np.moveaxis(x, 2, 0)
    total = log_sum_exp(alpha[-1], -1)[..., None]
    posterior = np.exp(alpha + beta_x - steps_first - total)
    posterior[np.isneginf(steps_first)] = 0.0
    pairs = alpha[:-1, ..., None] + np.moveaxis(logs, 1, 0)[:, :, None] + beta_x[1:, ..., None, :]
    counts = np.exp(pairs - total[..., None]).sum(2)
    yield sums.arrays["potentials"], np.moveaxis(posterior, 0, 2), reach
    yield sums.arrays["transitions"], np.moveaxis(counts, 0, 1)[:, None], reach
    yield sums.arrays["initial"], posterior[0], reach
    yield sums.arrays["final"], posterior[-1], reach


def _filtered(
    recursion_of: type[Any], ctx: Context, kernel: Kernel
) -> Iterator[tuple[Array, np.ndarray, float]]:
    """Filter rows of two groups."""
    x, logs, shard = _chain(ctx, 5, 6, has_one=False)
    backend, steps = recursion_of(shard, 1 << 24, Geometry(True, True, 1, False)), slice(0, 5)
    shape = *shard.shape, steps.stop
    out, z = (ctx.kernels.empty((*shape, *y), ctx.result_name) for y in ((5,), ()))
    backend.filter_segment(None, steps, out, z)
    lengths, reach = np.full(x.shape[:2], steps.stop), 8 * error_limit(ctx, 5)
    alpha = np.moveaxis(_walk(x, logs, lengths, False, log_sum_exp), 0, 2)
    log_sums = log_sum_exp(alpha, -1)
    yield out, np.exp(alpha - log_sums[..., None]), reach
    yield z, np.diff(log_sums, prepend=0.0), reach


def _samples(
    recursion_of: type[Any], ctx: Context, kernel: Kernel
) -> Iterator[tuple[Array, np.ndarray, float]]:
    """Draw with numbers that choose one of the first states that have weight, or a later one."""
    x, logs, shard = _chain(ctx, 37, 6, has_one=False)
    updated, shape = np.moveaxis(x, 2, 0), (2, 6, 5, 2)
    on_device = ctx.load(ctx.xp.asarray(updated, device=ctx.device), ctx.precision)
    recursion = recursion_of(shard, 1 << 24, Geometry(False, False, 1, False))
    stored = Messages(on_device, None, None, None)
    forward_pass = SimpleNamespace(segments=[slice(0, 5)], stored_messages=lambda _: stored)
    # Not 0: whether a weight below normal numbers is one differs from device to device.
    numbers = np.broadcast_to([1e-9, 0.6], shape).copy()
    states = ctx.kernels.empty(shape, "int64")
    recursion.sample_paths(forward_pass, states, ctx.xp.asarray(numbers, device=ctx.device))
    exact = np.empty(shape)
    for g, r, last in np.ndindex(2, 6, 2):
        weights = updated[-1, g, r]
        for t in range(4, -1, -1):
            state_weights = np.exp((weights - weights.max()).astype(ctx.precision.name))
            below = np.cumsum(state_weights, dtype=float)
            j = exact[g, r, t, last] = np.argmax(below > numbers[g, r, t, last] * below[-1])
            weights = updated[t - 1, g, r] + logs[g, t - 1, :, int(j)] if t else weights
    yield states, exact, 0.0


def _entropies(
    recursion_of: type[Any], ctx: Context, kernel: Kernel
) -> Iterator[tuple[Array, np.ndarray, float]]:
    """Add the entropies of the steps of two groups of rows."""
    x, logs, shard = _chain(ctx, 5, 6, has_one=False)
    backend, steps = recursion_of(shard, 1 << 24, Geometry(True, True, 1, False)), slice(0, 5)
    forward = backend.advance(None, steps, False, Keep.UPDATED)
    forward_pass = SimpleNamespace(
        segments=[steps],
        carry=forward.carry,
        stored_messages=lambda _: forward.updated,
        checkpoints=[None],
    )
    lengths, moved = np.full(x.shape[:2], steps.stop), np.moveaxis(logs, 1, 0)[:, :, None]
    alpha, beta_x = (_walk(x, logs, lengths, b, log_sum_exp) for b in (False, True))

    def normalized(z: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
        """Return probabilities, and their logs or 0."""
        total = np.expand_dims(log_sum_exp(z, axis), axis)
        z = z - np.where(np.isfinite(total), total, 0)
        return np.exp(z), np.where(np.isneginf(z), 0, z)

    pairs, log_pairs = normalized(alpha[:-1, ..., None] + moved, -2)
    following = (
        alpha[1:] + beta_x[1:] - np.where(np.isneginf(alpha[1:]), 0, np.moveaxis(x, 2, 0)[1:])
    )
    state_weights, _ = normalized(following, -1)
    last, log_last = normalized(alpha[-1], -1)
    exact = -(last * log_last).sum(-1) - (state_weights * (pairs * log_pairs).sum(-2)).sum((0, -1))
    yield backend.entropies(forward_pass), exact, 8 * error_limit(ctx, 5)


CASES = {
    "entropies.cu": _entropies,
    "sample_paths.cu": _samples,
    "filtered.cu": _filtered,
    "chain_steps.cu": _steps,
    "chain_trace.cu": _trace,
    "prepare_matrices.cu": _preparation,
    "log_partition.cu": _log_partition,
    "marginals.cu": _marginals,
}
