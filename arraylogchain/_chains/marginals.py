"""The posterior over paths: what the messages of both directions tell together, block by block.

With a_t what left step t forward, b_t what arrived there backward and d_t what left it backward,
each but for a factor of its own, the posterior is

    of states              a_t * b_t / Z_t,    Z_t = sum(a_t * b_t)
    of pairs of states     a_t[k] P_t[k, j] d_{t+1}[j] / Z_t,    as b_t = P_t @ d_{t+1}

and that of pairs without P_t is the derivative with respect to it, finite at P = 0. Every step is
normalised by its own sum, so that no rounding of T steps enters a share. Sums over rows and steps
are one matrix multiply for each matrix.

A block of steps is taken in linear weights, as long as its sums stay well within the range of
numbers: that proves them, for what has underflowed in logs that became weights is nothing beside
these sums, either. Other blocks are taken in logs, whose pairs are a certified product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from arraylogchain._backends.interface import Messages, SegmentMessages
from arraylogchain._chains.accumulate import Accumulator, bounded
from arraylogchain._chains.passes import Pass, last_logs, log_sum, passes, run_passes
from arraylogchain._chains.segment_marginals import SegmentMarginals
from arraylogchain._core.axes import chunks
from arraylogchain._core.context import Array, Context
from arraylogchain._core.precision import DOUBLE, SINGLE
from arraylogchain._core.scaled import exp_of_split, split_log, whole_maximum, whole_part
from arraylogchain._inputs.chain import Chain

# The sums of a_t * b_t and the sizes of cotangents in linear blocks. Weights are at most 2**400
# (2**10 in float32): so what underflows in a sum is less than eps of it, and no sum of pairs over
# rows and steps is too large.
_NORMALIZERS = {"float32": (2.0**-55, 2.0**80), "float64": (2.0**-116, 2.0**900)}
_COTANGENTS = {"float32": (2.0**-20, 2.0**20), "float64": (2.0**-64, 2.0**64)}

Pullback = Callable[[Array, frozenset[str]], dict[str, Array]]


def marginals(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the posterior probabilities of all states at all steps, [*batch, T, K]."""
    return _posterior(ctx, chain, workspace, "marginals", "potentials")[1]


def expected_transitions(ctx: Context, chain: Chain, workspace: int) -> Array | None:
    """Return expected counts in the shape of the transitions."""
    return _posterior(ctx, chain, workspace, "expected_transitions", "transitions")[2]


def posterior(ctx: Context, chain: Chain, workspace: int) -> tuple[Array, Array, Array | None]:
    """Return log Z [*batch], marginals [*batch, T, K], and expected counts or None."""
    names = "potentials", "transitions"
    return _posterior(ctx, chain, workspace, "posterior", *names)  # type: ignore[no-any-return]


def _posterior(ctx: Context, chain: Chain, workspace: int, operation: str, *names: str) -> Any:
    requested = filter(chain.parts.__contains__, names)
    accumulator = Accumulator(ctx, chain, workspace, requested, as_counts=True)
    total = ctx.empty(chain.batch, ctx.result_dtype) if operation == "posterior" else None

    def work(run: Pass, partial_sums: Accumulator) -> None:
        backward_pass = BackwardPass(run.run_and_store(), partial_sums, None)
        if total is not None:
            run.shard.write(total, backward_pass.log_z)
        backward_pass.add()
        run.updated.clear()  # the next piece takes the same memory

    run_passes(ctx, passes(operation, ctx, chain, workspace, history=True), work, accumulator)
    gradients = accumulator.results()
    return total, gradients.get("potentials"), gradients.get("transitions")


def value_and_pullback(
    ctx: Context, chain: Chain, workspace: int, keep: bool
) -> tuple[Array, Pullback]:
    """Return the logs of the sums over all paths, [*batch], and their pullback.

    Parameters
    ----------
    keep : bool
        Whether every message is kept for the pullback though that takes more than `workspace`, and
        not only those between blocks of steps.

    Returns
    -------
    value : array [*batch]
    pullback : callable
        Takes a cotangent [*batch] and the names of wanted gradients, of 'potentials',
        'transitions', 'initial' and 'final'. Returns them by name, in the chain's shapes and
        dtypes. Any number of threads may call it at once: it changes nothing.
    """
    out = ctx.empty(chain.batch, ctx.result_dtype)
    bytes_per_step = 8 * math.prod(chain.sizes) * (chain.num_states + 2)  # with both scales
    keep = keep or bytes_per_step * chain.num_steps <= workspace
    # All are kept at once: that what one leaves would fit beside it does not count.
    every = passes("value_and_pullback", ctx, chain, workspace, history=not keep)
    all_passes = [replace(run, store_messages=keep) for run in every]

    def fresh(run: Pass) -> Pass:
        # What backends prepare is for one call, and one piece at a time.
        return replace(run, backend=type(run.backend)(run.shard, run.workspace))

    def work(run: Pass) -> None:
        run.run_and_store()
        run.shard.write(out, run.log_z)
        run.backend = fresh(run).backend

    run_passes(ctx, all_passes, work)

    def pullback(cotangent: Array, requested: frozenset[str]) -> dict[str, Array]:
        accumulator = Accumulator(ctx, chain, workspace, requested)
        run_passes(
            ctx,
            all_passes,
            lambda run, partial_sums: BackwardPass(fresh(run), partial_sums, cotangent).add(),
            accumulator,
        )
        return accumulator.results()

    return out, pullback


class BackwardPass:
    """What a run forward over a piece, whose messages are kept, adds to sums.

    Parameters
    ----------
    cotangent : array [*batch] or None
        Of log Z; None for ones.
    """

    def __init__(self, run: Pass, accumulator: Accumulator, cotangent: Array | None) -> None:
        self.forward_pass, self.shard, self.sums = run, run.shard, accumulator
        self.panel = run.workspace // (8 * 10)  # entries: matrices, their parts, logs and products
        self.ctx = ctx = run.shard.ctx
        self.precision = DOUBLE if run.last.values.dtype == ctx.xp.float64 else SINGLE
        self.log_z = self.unscaled_log_z = run.log_z
        if not ctx.are_within(2.0**60, self.log_z):
            # What is infinite by its scale alone has shares all the same.
            self.unscaled_log_z = log_sum(ctx.xp, last_logs(run.shard, run.last).values)
        # Cotangents [groups, rows], which of them are 0, and the sizes of the others.
        self.g, self.zero_cotangent = ctx.xp.ones_like(self.log_z), None
        self.min_cotangent = self.max_cotangent = 1.0
        if cotangent is not None or self.unscaled_log_z is not self.log_z:
            self._set_cotangents(cotangent)

    def _set_cotangents(self, cotangent: Array | None) -> None:
        """Take cotangents, except of rows without a path, or with an infinite one."""
        xp, g = self.ctx.xp, self.g
        if cotangent is not None:
            g = self.ctx.load(self.shard.read(cotangent), self.ctx.widest)
            g = bounded(self.ctx, g, self.ctx.dtype(self.precision))
        g = xp.where(xp.isinf(self.unscaled_log_z), 0.0, g + 0.0 * self.unscaled_log_z)  # NaN stays
        self.g, size = g, xp.abs(g)
        self.min_cotangent, self.max_cotangent = float(xp.min(size)), float(xp.max(size))
        if not self.min_cotangent > 0:
            self.zero_cotangent = (size == 0)[None, ...]
            self.min_cotangent = float(xp.min(xp.where(size > 0, size, 1.0)))

    def add(self) -> None:
        """Add gradients, or marginals and counts, going backward through the steps."""
        run, requested = self.forward_pass, self.sums.arrays
        last: Any = self.run_backward() if set(requested) != {"final"} else None
        for name, state in (("initial", last), ("final", run.last)):
            if name in requested:
                self._add_weights(
                    name, state, *self.shard.boundary_weights(backward=name == "final")
                )

    def run_backward(self) -> Any:
        """Go backward through all steps; return what left the first one."""
        run = self.forward_pass
        back = Pass(run.shard, run.backend, run.blocks, backward=True)
        for n in reversed(range(len(run.blocks))):
            block, forward = run.blocks[n], run.messages(n)
            for steps, segment in back.segments(block):
                steps_in_segment = slice(steps.start - block.start, steps.stop - block.start)
                segment_messages = forward if steps == block else forward.steps(steps_in_segment)
                self._add_block(steps, segment_messages, segment)
        return back.last

    def _add_block(self, steps: slice, forward: Messages, back: SegmentMessages) -> None:
        """Add what a block of steps contributes, of which nothing is held when the next comes."""
        block = SegmentMarginals(self, steps, forward, back.predicted, back.updated)
        marginals = block.in_linear_space()
        self.add_marginals(steps, block.in_log_space() if marginals is None else marginals, forward)

    def _add_weights(self, name: str, state: Messages, weights: Array, is_log: bool) -> None:
        """Add shares of states times weights, or what is left of them without the weights."""
        ctx, xp, place = self.ctx, self.ctx.xp, (slice(None),)
        if not is_log and state.is_log is None:
            terms = ctx.load(weights, self.precision) * state.values
            f = self.factors(ctx.row_sums(terms))
            if f is not None:
                self.sums.add(name, self.shard, place, state.values * f[..., None])
                return
        values = ctx.load(state.to_log_space(ctx).values, ctx.widest)
        high, remainder = split_log(ctx, weights, is_log)
        shift = whole_maximum(xp, values + high)
        joint = (values + (high - shift)) + remainder
        total, g = log_sum(xp, joint)[..., None], self.g[..., None]
        is_zero = (total == -math.inf) | (g == 0)
        if is_log:
            result = xp.exp(joint - total) * g
        else:
            del joint, high, remainder  # memory, beside all messages
            # Both may be out of range where their product is not.
            value_shift, parts = whole_part(xp, values), split_log(ctx, xp.abs(g), False)
            result = exp_of_split(
                ctx, (value_shift - shift) + parts[0], (values - value_shift) - total + parts[1]
            )
            result = result * xp.sign(g)
        self.sums.add(name, self.shard, place, xp.where(is_zero, 0.0, result))

    def factors(self, normalizers: Array) -> Array | None:
        """Return cotangents over sums of linear weights; None where these do not prove them."""
        lowest, highest = _COTANGENTS[self.precision.name]
        fit = self.min_cotangent >= lowest and self.max_cotangent <= highest
        if not (fit and self.ctx.are_between(normalizers, *_NORMALIZERS[self.precision.name])):
            return None
        return self.ctx.load(self.g, self.precision) / normalizers

    def add_marginals(self, steps: slice, marginals: Array, forward: Messages) -> None:
        """Add shares of states times cotangents, [n, groups, rows, K]."""
        if "potentials" in self.sums.arrays:
            values = self.ctx.xp.permute_dims(marginals, (1, 2, 0, 3))
            self.sums.add("potentials", self.shard, (steps, slice(None)), values)

    def panels(self, first: int, count: int) -> Iterator[tuple[slice, slice, Array]]:
        """Yield slices of transitions and of columns, and matrices that are in memory together.

        Transitions are `count` from step `first` on, from which slices count. One matrix for every
        step is [groups, K, columns], and the slice is all of them; else they are [groups * n, K,
        columns] of a slice of n.
        """
        shard, size, xp = self.shard, self.shard.chain.num_states, self.ctx.xp
        held = count if shard.chain.has_one_matrix else self.panel // (shard.groups * size**2)
        for transitions in chunks(count, max(1, held)):
            x = shard.matrices(slice(first + transitions.start, first + transitions.stop))
            x = xp.reshape(x, (-1, size, size))
            for j in chunks(size, max(1, self.panel // (int(x.shape[0]) * size))):
                yield transitions, j, x[..., j]

    def by_matrix(self, x: Array) -> Array:
        """Return [n, groups, rows, K] as [groups, n * rows, K], or as [groups * n, rows, K]."""
        xp, (count, groups, rows, size) = self.ctx.xp, x.shape
        shape = (groups, -1) if self.shard.chain.has_one_matrix else (groups * count, rows)
        x = xp.permute_dims(x, (1, 0, 2, 3)) if groups > 1 else x
        return xp.reshape(x, (*shape, size))
