"""A small hard case of each chain kernel, and its exact result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from arraylogchain._backends.cuda.geometry import Geometry
from arraylogchain._backends.interface import Keep, Messages
from arraylogchain._backends.shards import shards
from arraylogchain._core.context import Array, Context
from arraylogchain._cuda.kernels import Kernel
from arraylogchain._cuda.self_check import error_limit, log_sum_exp, wide_entries
from arraylogchain._inputs.chain import Chain


def _chain(ctx: Context, states: int, rows: int, has_one: bool) -> tuple[Any, Any, Any]:
    """Return potentials and matrices, in logs, and a piece of two groups of rows of two lengths."""
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
    whole, recursion = slice(0, 5), recursion_of(shard, 1 << 24, geometry)
    reach = 5 * error_limit(ctx, states)
    lengths = np.full(x.shape[:2], 5) if shard.lengths is None else shard.lengths
    for backward in (False, True) if geometry.sums else (False,):
        exact = _walk(x, logs, lengths, backward, log_sum_exp if geometry.sums else np.max)
        if geometry.sums:
            block = recursion.advance(None, whole, backward, Keep.UPDATED)
        else:
            block = recursion.best(None, whole, Keep.UPDATED)
        updated = block.updated.logs(ctx)
        for t in range(5):
            real = np.argwhere(lengths > t)
            yield from ((updated[t, g, r], exact[t, g, r], reach) for g, r in real)


def _walk(
    x: np.ndarray, logs: np.ndarray, lengths: np.ndarray, backward: bool, join: Callable[..., Any]
) -> np.ndarray:
    """Return what leaves each step, [T, groups, rows, K], by sums over pairs of states."""
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
    """Go back through what the recursion would keep."""
    x, logs, shard = _chain(ctx, 37, 6, has_one=False)
    updated = np.moveaxis(x, 2, 0)
    after = np.arange(12).reshape(2, 6)
    on_device = ctx.load(ctx.xp.asarray(updated, device=ctx.device), ctx.precision)
    recursion = recursion_of(shard, 1 << 24, Geometry(False, False, 1, False))
    stored = Messages(on_device, None, None, None)
    result = recursion.trace(stored, ctx.xp.asarray(after, device=ctx.device), slice(0, 5))
    exact = np.empty((5, 2, 6))
    exact[4] = state = after
    for t in range(3, -1, -1):
        to_state = np.stack([logs[g, t][:, state[g]].T for g in range(2)])
        exact[t] = state = np.argmax(updated[t] + to_state, -1)
    yield result, exact, 0.0


def hard_case(
    recursion_of: type[Any], ctx: Context, kernel: Kernel
) -> Iterator[tuple[Array, np.ndarray, float]]:
    """Yield what a recursion makes of the hard case of a kernel, beside exact results."""
    is_trace = kernel.name.startswith("chain_trace")
    return (_trace if is_trace else _steps)(recursion_of, ctx, kernel)
