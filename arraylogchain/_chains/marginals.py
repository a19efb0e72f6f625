"""State marginals, expected counts and gradients of log Z, from messages of both directions.

With alpha_t the forward messages, beta_t the backward messages, and beta_x_t = exp(x_t) beta_t,
each up to a factor,

    state marginals     alpha_t * beta_t / Z_t,    Z_t = sum_k alpha_t[k] beta_t[k]
    pair marginals      alpha_t[k] P_t[k, j] beta_x_{t+1}[j] / Z_t

as beta_t = P_t @ beta_x_{t+1}. Pair marginals without P_t are the gradient with respect to P_t,
finite at P_t = 0. Each step is normalized by its own sum, so that the rounding of T steps enters no
marginal. Sums over rows and steps are one matrix multiply for each matrix.

A segment is computed in linear space if its normalizers are well within the range of numbers: they
certify that underflow is negligible, in messages too. Other segments are computed in log space,
where pair marginals are a certified product. Segments are normalized in `segment_marginals`, whole
chains in `compiled.whole_marginals`, and kernels do it in `_cuda/marginals.cu`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from arraylogchain._backends.interface import Messages, SegmentMessages, WholeChains
from arraylogchain._chains.accumulate import Accumulator
from arraylogchain._chains.passes import Pass, log_sum, passes, run_passes
from arraylogchain._chains.segment_marginals import SegmentMarginals, ShardSums
from arraylogchain._core.context import Array, Context
from arraylogchain._core.scaled import exp_of_split, split_log, whole_maximum, whole_part
from arraylogchain._inputs.chain import Chain

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

    def work(forward_pass: Pass, partial_sums: Accumulator) -> None:
        result = _add_whole_chains(forward_pass, partial_sums, None)
        if result is not None and total is not None:
            forward_pass.shard.write(total, result.log_z)
        for one_pass in forward_pass.remaining:
            backward_pass_of(one_pass.run_and_store(), partial_sums, None).add()
            if total is not None:
                one_pass.shard.write(total, one_pass.log_z)

    all_passes = passes(operation, ctx, chain, workspace, needs_history=True)
    run_passes(all_passes, work, accumulator)
    gradients = accumulator.results()
    return total, gradients.get("potentials"), gradients.get("transitions")


def _add_whole_chains(
    forward_pass: Pass, sums: Accumulator, g: Array | None, stored: WholeChains | None = None
) -> WholeChains | None:
    """Add gradients that the backend computes in one call for whole chains; return its result.

    Return None, and add nothing, if it has no such call or declines many rows. The declined rows of
    a result add nothing: the passes that remain to be run add theirs. `g` [*batch] is the cotangent
    of log Z, None for ones; `stored` has forward messages of an earlier call, to be reused.
    """
    shard = forward_pass.shard
    g = None if g is None else shard.read(g)
    result = forward_pass.whole_chains("posterior", g, sums.arrays, sums.by_logs, stored)
    for name, gradient in result.gradients.items() if result else ():
        if name != "transitions" or shard.num_steps > 1:
            sums.add(name, shard, tuple(map(slice, gradient.shape[2:])), gradient)
    return result  # type: ignore[no-any-return]


def value_and_pullback(
    ctx: Context, chain: Chain, workspace: int, stores_all: bool
) -> tuple[Array, Pullback]:
    """Return log Z, [*batch], and its pullback.

    Parameters
    ----------
    ctx : Context
    chain : Chain
    workspace : int
        Bytes for temporaries.
    stores_all : bool
        Whether all messages are stored for the pullback even if they exceed the workspace; if not,
        messages that exceed it are recomputed from checkpoints.

    Returns
    -------
    value : array [*batch]
    pullback : callable
        Takes a cotangent [*batch] and the names of requested gradients, of 'potentials',
        'transitions', 'initial' and 'final'. Returns them by name, in the chain's shapes and
        dtypes. Threads may call it at the same time: it changes nothing.
    """
    out = ctx.empty(chain.batch, ctx.result_dtype)
    bytes_per_step = 8 * math.prod(chain.sizes) * (chain.num_states + 2)  # with both scales
    stores_all = stores_all or bytes_per_step * chain.num_steps <= workspace
    # The messages of all shards are stored at once, even if one shard alone would fit.
    all_passes = list(passes("value_and_pullback", ctx, chain, workspace, not stores_all))

    def run(forward_pass: Pass) -> None:
        forward_pass.store_messages = stores_all
        if stores_all:
            forward_pass.stored_chains = forward_pass.whole_chains("log_partition", True)
        if forward_pass.stored_chains is not None:
            forward_pass.shard.write(out, forward_pass.stored_chains.log_z)
        for one_pass in forward_pass.remaining:
            one_pass.run_and_store()
            one_pass.shard.write(out, one_pass.log_z)
            one_pass.backend = one_pass.with_new_backend().backend

    run_passes(all_passes, run)

    def pullback(cotangent: Array, requested: frozenset[str]) -> dict[str, Array]:
        accumulator = Accumulator(ctx, chain, workspace, requested)
        kept = (x for y in all_passes for x in (*y.stored, *y.checkpoints, y.carry) if x)
        ctx.record_stream(*(part for x in kept for part in (x.values, x.shifts, x.exponents)))

        def add(forward_pass: Pass, partial_sums: Accumulator) -> None:
            remaining: Iterable[Pass] = (forward_pass.with_new_backend(),)
            if forward_pass.stored_chains is not None:
                again = forward_pass.again()
                _add_whole_chains(again, partial_sums, cotangent, forward_pass.stored_chains)
                remaining = map(Pass.run_and_store, again.remaining)
            for one_pass in remaining:
                backward_pass_of(one_pass, partial_sums, cotangent).add()

        run_passes(all_passes, add, accumulator)
        return accumulator.results()

    return out, pullback


def backward_pass_of(forward_pass: Pass, accumulator: Accumulator, cotangent: Array | None) -> Any:
    """Return the backward pass after a forward pass: the backend's, if it has one of its own."""
    arguments = forward_pass, accumulator, cotangent
    return forward_pass.fused("backward_pass", *arguments) or BackwardPass(*arguments)


class BackwardPass:
    """The backward pass over a shard; accumulates marginals, counts or gradients.

    Parameters
    ----------
    forward_pass : Pass
        Has run; messages, or checkpoints, are stored.
    accumulator : Accumulator
    cotangent : array [*batch] or None
        Of log Z; None for ones.
    """

    def __init__(
        self, forward_pass: Pass, accumulator: Accumulator, cotangent: Array | None
    ) -> None:
        self.forward_pass, self.shard = forward_pass, forward_pass.shard
        self.ctx, self.accumulator = self.shard.ctx, accumulator
        self.sums = ShardSums(forward_pass, accumulator, cotangent)
        self.precision = self.sums.precision

    def add(self) -> None:
        """Run through all steps, and add gradients, or marginals and counts."""
        requested = self.accumulator.arrays
        first: Any = self.run() if set(requested) != {"final"} else None
        for name, message in (("initial", first), ("final", self.forward_pass.carry)):
            if name in requested:
                weights, is_log = self.shard.boundary_weights(backward=name == "final")
                gradient, _ = self.boundary_gradients(message, weights, is_log)
                self.accumulator.add(name, self.shard, (slice(None),), gradient)

    def run(self) -> Any:
        """Run backward through all steps; return the updated message of the first one."""
        forward = self.forward_pass
        backward = Pass(forward.shard, forward.backend, forward.segments, backward=True)
        for n in reversed(range(len(forward.segments))):
            segment, messages = forward.segments[n], forward.stored_messages(n)
            for steps, back in backward.relative_messages(segment):
                part = slice(steps.start - segment.start, steps.stop - segment.start)
                self._add_segment(steps, messages.steps(part), back)
        return backward.carry

    def _add_segment(self, steps: slice, forward: Messages, back: SegmentMessages) -> None:
        """Add the marginals of a segment; its temporaries are freed before the next one."""
        segment = SegmentMarginals(self.sums, steps, forward, back.predicted, back.updated)
        self.add_marginals(steps, segment.marginals(), forward)

    def boundary_gradients(
        self, message: Messages, weights: Array, is_log: bool
    ) -> tuple[Array, Array]:
        """Return gradients with respect to initial or final weights, and to their logarithms.

        Both are gradients with respect to logarithms if the weights are (`is_log`).
        """
        ctx, xp, g = self.ctx, self.ctx.xp, self.sums.cotangents
        if not is_log and message.is_log is None:
            terms = ctx.load(weights, self.precision) * message.values
            factors = self.sums.factors(ctx.row_sums(terms))
            if factors is not None:
                return message.values * factors[..., None], terms * factors[..., None]
        values = ctx.load(message.to_log_space(ctx).values, ctx.widest)
        high, remainder = split_log(ctx, weights, is_log)
        shift = whole_maximum(xp, values + high)
        joint = (values + (high - shift)) + remainder
        total, g = log_sum(xp, joint)[..., None], g[..., None]
        is_zero = (total == -math.inf) | (g == 0)
        by_logs = xp.where(is_zero, 0.0, xp.exp(joint - total) * g)
        if is_log:
            return by_logs, by_logs
        del joint, high, remainder  # frees memory before the next temporaries
        # Each factor may be out of range where their product is not.
        value_shift, log_g = whole_part(xp, values), split_log(ctx, xp.abs(g), False)
        high = (value_shift - shift) + log_g[0]
        gradient = exp_of_split(ctx, high, (values - value_shift) - total + log_g[1])
        return xp.where(is_zero, 0.0, gradient * xp.sign(g)), by_logs

    def add_marginals(self, steps: slice, marginals: Array, forward: Messages) -> None:
        """Add state marginals times cotangents, [n, groups, rows, K]."""
        if "potentials" in self.accumulator.arrays:
            values = self.ctx.xp.permute_dims(marginals, (1, 2, 0, 3))
            self.accumulator.add("potentials", self.shard, (steps, slice(None)), values)
