"""log Z, and forward, backward and filtered messages."""

from __future__ import annotations

import math

from arraylogchain._backends.interface import Keep, Messages
from arraylogchain._backends.shards import Shard
from arraylogchain._chains.passes import Pass, passes, run_passes, write_steps
from arraylogchain._core import scaled
from arraylogchain._core.context import Array, Context
from arraylogchain._core.scaled import LN2_HIGH, LN2_LOW, add_scale, whole_maximum
from arraylogchain._inputs.chain import Chain


def log_partition(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return log Z, [*batch]."""
    out = ctx.empty(chain.batch, ctx.result_dtype)

    def work(forward_pass: Pass) -> None:
        if (result := forward_pass.whole_chains("log_partition", False)) is not None:
            forward_pass.shard.write(out, result.log_z)
        for one_pass in forward_pass.remaining:
            one_pass.final_carry()
            one_pass.shard.write(out, one_pass.log_partition())

    run_passes(passes("log_partition", ctx, chain, workspace, num_arrays=3), work)
    return out


def forward_messages(ctx: Context, chain: Chain, workspace: int, offset: Array = None) -> Array:
    """Return the forward messages in log space, [*batch, T, K].

    `offset` [*batch], in whole nats, is added before they are rounded.
    """
    return _messages("forward_messages", ctx, chain, workspace, offset, backward=False)


def backward_messages(ctx: Context, chain: Chain, workspace: int, offset: Array = None) -> Array:
    """Return the backward messages in log space, [*batch, T, K].

    `offset` [*batch], in whole nats, is added before they are rounded.
    """
    return _messages("backward_messages", ctx, chain, workspace, offset, backward=True)


def _messages(
    operation: str, ctx: Context, chain: Chain, workspace: int, offset: Array, backward: bool
) -> Array:
    out = ctx.empty((*chain.batch, chain.num_steps, chain.num_states), ctx.result_dtype)
    if chain.lengths is not None:
        out[...] = -math.inf

    def work(one_pass: Pass) -> None:
        for steps, segment in one_pass.run(Keep.ALL if backward else Keep.UPDATED):
            messages = segment.predicted if backward else segment.updated
            if offset is not None:
                messages.shifts = messages.shifts + one_pass.shard.read(ctx.xp.asarray(offset))
            write_steps(out, one_pass.shard, steps, messages.logs(ctx), -math.inf)

    run_passes(passes(operation, ctx, chain, workspace, backward=backward), work)
    return out


def last_message(
    ctx: Context, chain: Chain, workspace: int, backward: bool = False
) -> tuple[Array, Array]:
    """Return the last forward message, or the first backward one.

    It consists of logs [*batch, K] near 0 and whole nats [*batch] to add to them.
    """
    xp, dtype = ctx.xp, ctx.dtype(ctx.widest)
    logs, shifts = ctx.empty((*chain.batch, chain.num_states), dtype), ctx.empty(chain.batch, dtype)

    def work(one_pass: Pass) -> None:
        last = one_pass.final_carry().to_log_space(ctx)
        values = ctx.load(last.values, ctx.widest) + (last.exponents * LN2_LOW)[..., None]
        high = last.exponents * LN2_HIGH
        nearest = xp.round(high)
        one_pass.shard.write(logs, values + (high - nearest)[..., None])
        one_pass.shard.write(shifts, last.shifts + nearest)

    run_passes(passes("last_message", ctx, chain, workspace, backward=backward), work)
    return logs, shifts


def filtered(ctx: Context, chain: Chain, workspace: int) -> tuple[Array, Array]:
    """Return state probabilities given the steps so far, and their log normalizers.

    Returns
    -------
    probabilities : array [*batch, T, K]
    log_normalizers : array [*batch, T]
    """
    xp, shape = ctx.xp, (*chain.batch, chain.num_steps)
    probabilities = ctx.empty((*shape, chain.num_states), ctx.result_dtype)
    normalizers = ctx.empty(shape, ctx.result_dtype)
    if chain.lengths is not None:
        probabilities[...], normalizers[...] = 0.0, 0.0

    def work(forward_pass: Pass) -> None:
        for segment in forward_pass.segments:
            arguments = forward_pass.carry, segment, probabilities, normalizers
            carry = forward_pass.fused("filter_segment", *arguments)
            if carry is not None:
                forward_pass.carry = carry
                continue
            for steps, messages in forward_pass.relative_messages(segment):
                put(forward_pass.shard, steps, messages.updated)

    def put(shard: Shard, steps: slice, updated: Messages) -> None:
        # In the widest precision: `Messages.weights` may flush entries that are normal as shares.
        weights, maxima = ctx.load(updated.values, ctx.widest), 0.0
        if updated.is_log is not None:
            mask = xp.asarray(updated.is_log, device=ctx.device)[..., None]
            maxima = xp.where(mask, whole_maximum(xp, weights), 0.0)
            weights = xp.where(mask, xp.exp(weights - maxima), weights)
            maxima = maxima[..., 0]
        sums = ctx.row_sums(weights)
        mantissas, exponents = scaled.split(ctx, sums)
        total = xp.log(mantissas) + maxima
        parts = total, updated.shifts, updated.exponents + exponents
        if not steps.start:
            # The message before the first step is 1.
            for x in parts:
                x[0, ...] = 0.0
        marginals = weights[1:, ...] / sums[1:, ..., None]
        marginals = xp.where(xp.isinf(total)[1:, ..., None], 0.0, marginals)
        write_steps(probabilities, shard, steps, marginals, 0.0)
        # Large terms cancel first.
        ratios = add_scale(*(x[1:, ...] - x[:-1, ...] for x in parts))
        # After -inf or +inf the sums stay infinite.
        ratios = xp.where(xp.isfinite(total)[1:, ...], ratios, total[1:, ...])
        write_steps(normalizers, shard, steps, ratios, 0.0)

    run_passes(passes("filtered", ctx, chain, workspace), work)
    return probabilities, normalizers
