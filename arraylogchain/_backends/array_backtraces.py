"""Backtraces in array operations: of best paths, of the n best, and of samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from arraylogchain._backends.interface import Messages, Suffixes
from arraylogchain._backends.shards import Shard
from arraylogchain._core import scaled
from arraylogchain._core.axes import chunks
from arraylogchain._core.context import Array
from arraylogchain._core.scaled import whole_maximum

# Of a suffix with a state before it: weights, losses, links, and what sorting takes.
_BYTES_PER_EXTENSION = 128

# Index along the first axes of messages.
RowIndex = tuple[Any, ...]


class ArrayBacktraces:
    """The backtraces of `ArrayBackend`.

    Attributes
    ----------
    shard : Shard
    ctx : Context
    has_logs : bool
        Whether matrices are given as logarithms.
    workspace : int
    """

    def __init__(self, shard: Shard, workspace: int) -> None:
        self.shard, self.ctx, self.workspace = shard, shard.ctx, workspace
        self.has_logs = "transitions" in shard.chain.logs

    def backtrace(self, updated: Messages, after: Array, steps: slice) -> Array:
        """Return the states of best paths, integers [n, groups, rows]."""
        xp, after = self.ctx.xp, after[..., None]
        return self._back(updated.values, after, steps, lambda x, at: xp.argmax(x, axis=-1))[..., 0]

    def backtrace_suffixes(
        self, updated: Messages, after: Suffixes, steps: slice
    ) -> tuple[Array, Suffixes]:
        """Extend the best suffixes to the start of a segment; see `interface.Backend`."""
        ctx, xp, shard, (states, losses) = self.ctx, self.ctx.xp, self.shard, after
        K, links = shard.chain.num_states, []
        own = K * ctx.arange(states.shape[-1])
        for i in reversed(range(steps.stop - steps.start)):
            link, num_active = own + states, shard.num_active(steps.start + i + 1)
            if num_active:
                active = shard.row_index(None, num_active)
                message = ctx.load(updated.values[(i, *active)], ctx.widest)
                suffixes = Suffixes(states[active], losses[active])
                losses = xp.asarray(losses, copy=True)
                losses[active], link[active] = self._extended(suffixes, message, steps.start + i)
                states = link % K
            links.append(link)
        return xp.stack(links[::-1]), Suffixes(states, losses)

    def _extended(self, suffixes: Suffixes, message: Array, time: int) -> tuple[Array, Array]:
        """Return losses and links of the best suffixes that begin at a step, of active rows."""
        ctx, xp, (states, losses) = self.ctx, self.ctx.xp, suffixes
        (groups, rows, num_paths), K = states.shape, int(message.shape[-1])
        best, links = losses[..., :0], states[..., :0]
        size = max(1, self.workspace // (_BYTES_PER_EXTENSION * groups * rows * K))
        for part in chunks(num_paths, size):
            logs = message[:, :, None, :] + self._log_weights_into(time, states[..., part])
            extended = losses[..., part, None] + below_largest(xp, logs)
            best = xp.concat([best, xp.reshape(extended, (groups, rows, -1))], axis=-1)
            numbers = ctx.arange(K * part.start, K * part.stop)
            numbers = xp.broadcast_to(numbers, (groups, rows, numbers.shape[0]))
            best, at = smallest(xp, best, num_paths)
            links = xp.take_along_axis(xp.concat([links, numbers], axis=-1), at, axis=-1)
        return best, links

    def follow(self, links: Array, numbers: Array) -> tuple[Array, Array]:
        """Return the states of paths, and numbers for later; see `interface.Backend`."""
        xp, K, states = self.ctx.xp, self.shard.chain.num_states, []
        for i in range(links.shape[0]):
            link = xp.take_along_axis(links[i, ...], numbers, axis=-1)
            states.append(link % K)
            numbers = link // K
        return xp.stack(states), numbers

    def sampling_backtrace(
        self, updated: Messages, after: Array, steps: slice, uniforms: Array
    ) -> Array:
        """Return states of samples, integers [n, groups, rows, samples]."""
        ctx, xp = self.ctx, self.ctx.xp
        logs = updated.to_log_space(ctx).values

        def pick(x: Array, at: RowIndex) -> Array:
            below = xp.cumulative_sum(relative(xp, x), axis=-1)
            return draw_states(xp, below, ctx.load(uniforms[at], ctx.widest))

        return self._back(logs, after, steps, pick)

    def _back(
        self, updated: Array, after: Array, steps: slice, pick: Callable[[Array, RowIndex], Array]
    ) -> Array:
        """Return states [n, groups, rows, paths], each chosen by `pick(logs, index)`.

        `logs` [..., K] are the logarithms of weights of the states before, and `index` is their
        step and active rows.
        """
        ctx, xp, shard, reversed_states = self.ctx, self.ctx.xp, self.shard, []
        for i in reversed(range(steps.stop - steps.start)):
            num_active = shard.num_active(steps.start + i + 1)
            if num_active:
                active = shard.row_index(None, num_active)
                at, states = (i, *active), after[active]
                logs = ctx.load(updated[at], ctx.widest)[:, :, None, :]
                after = xp.asarray(after, copy=True)
                after[active] = pick(logs + self._log_weights_into(steps.start + i, states), at)
            reversed_states.append(after)
        return xp.stack(reversed_states[::-1])

    def _log_weights_into(self, time: int, states: Array) -> Array:
        """Return log weights [..., K] into states [groups, rows, paths] of the next step.

        Only their differences mean anything.
        """
        ctx, xp, matrix = self.ctx, self.ctx.xp, self.input_matrix(time)
        group, before = map(ctx.arange, (states.shape[0], matrix.shape[1]))
        x = matrix[group[:, None, None, None], before, states[..., None]]
        x = ctx.load(x, ctx.widest)
        return x - whole_maximum(xp, x) if self.has_logs else xp.log(x)

    def input_matrix(self, time: int) -> Array:
        """Return the matrices from a step to the next, [groups, K, K], as weights or logs."""
        return self.shard.matrices(slice(time, time + 1))[:, 0, :, :]


def relative(xp: Any, logs: Array) -> Array:
    """Return exponentials relative to the largest of the last axis."""
    top = xp.max(logs, axis=-1, keepdims=True)
    return xp.exp(logs - scaled.finite_or_zero(xp, top))


def below_largest(xp: Any, logs: Array) -> Array:
    """Return distances of logs below the largest of the last axis; inf where they are -inf."""
    top = xp.max(logs, axis=-1, keepdims=True)
    return xp.where(logs > -math.inf, xp.where(logs == top, 0.0, top - logs), math.inf)


def smallest(xp: Any, x: Array, count: int) -> tuple[Array, Array]:
    """Return the smallest entries along the last axis in their order, and where they are.

    Of equal ones the first are taken.
    """
    count = min(count, int(x.shape[-1]))
    at = xp.sort(xp.argsort(x, axis=-1, stable=True)[..., :count], axis=-1)
    return xp.take_along_axis(x, at, axis=-1), at


def draw_states(xp: Any, below: Array, uniforms: Array) -> Array:
    """Return an index drawn along the last axis, given cumulative sums of weights along it."""
    total = below[..., -1:]
    level = uniforms[..., None] * total
    # The first state whose sum exceeds the level has a positive weight. If the level is rounded up
    # to the total, that is the last state with a positive weight.
    return xp.argmax(xp.astype((below > level) | (below == total), xp.uint8), axis=-1)
