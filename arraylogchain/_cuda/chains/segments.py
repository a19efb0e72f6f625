"""Long chains on a CUDA device: segments of time, whose products are computed side by side.

The product of a segment's matrices is what its recursion makes of the rows of the first of them, as
initial weights. The products are the matrices of a chain of few steps. All their entries are right,
however wide their range, so that nothing has to be verified, and no call waits.
"""

from __future__ import annotations

import math
from dataclasses import replace

from arraylogchain._array.chains.states import add_scale
from arraylogchain._context import Array, Context
from arraylogchain._cuda.chains import geometry
from arraylogchain._cuda.chains.recursion import ChainRun, Sweep
from arraylogchain._cuda.device import Device
from arraylogchain._cuda.launch import are_packable, ceil_div
from arraylogchain._inputs.chain import Chain

# Bytes for an entry of a product: states, logs, and what these are made of.
_ENTRY_BYTES = 64
# What is launched besides the steps: an estimate.
_LAUNCHES = 20


def count_and_seconds(device: Device, chain: Chain, item: int, workspace: int) -> tuple[int, float]:
    """Return how many segments pay, 1 for none, and what a step then takes, roughly."""
    (groups, rows), size, num_steps = chain.sizes, chain.num_states, chain.num_steps
    limits = device.multiprocessors, device.shared_memory
    whole = geometry.kernel_seconds(size, groups, rows, item, *limits)
    room = workspace // 4 // (_ENTRY_BYTES * chain.num_rows * size**2)
    count = min(math.isqrt(num_steps), room)
    if (
        count < 2
        or chain.lengths is not None
        or size >= geometry.SLICED_FROM
        or not are_packable((*chain.batch, count, size))
    ):
        return 1, whole
    many = (1, count) if chain.has_one_matrix else (count, 1)
    sizes = groups * many[0], rows * size * many[1]
    each = geometry.kernel_seconds(size, *sizes, item, *limits)
    joined = geometry.kernel_seconds(size, chain.num_rows, 1, 8, *limits)
    seconds = ceil_div(num_steps, count) * each + count * joined + _LAUNCHES * geometry.LAUNCH
    return (count, seconds / num_steps) if seconds < num_steps * whole else (1, whole)


def log_partition(ctx: Context, chain: Chain, count: int, workspace: int) -> Array:
    """Return the logs of the sums over all paths, [*batch]; the chain's arrays have one dtype."""
    xp, device, size = ctx.xp, ctx.kernels, chain.num_states
    front, within = _cut(ctx, chain, count)
    (begin, nats), (products, own) = (_last(ctx, part, workspace // 2) for part in (front, within))
    # What is large is a whole number, and may cancel: it is added up apart.
    shift = xp.max(own, axis=-2, keepdims=True)
    nats = nats[..., 0] + xp.sum(shift[..., 0, 0], axis=-1)
    wide = ctx.dtype(ctx.widest)
    joined = replace(
        chain,
        num_steps=count + 1,
        potentials=xp.zeros((count + 1, size), dtype=wide, device=ctx.device),
        transitions=products + (own - shift),
        initial=begin,
        final=None if chain.final is None else xp.astype(chain.final, wide),
        transitions_in_logs=True,
        initial_in_logs=True,
    )
    total = ChainRun(device, joined, workspace // 2).log_partition()
    total[...] += nats
    return ctx.to_result(_settled(ctx, chain, total, workspace // 2))


def _settled(ctx: Context, chain: Chain, total: Array, workspace: int) -> Array:
    """Return totals, those that are NaN or +inf from a recursion over all steps.

    0 times +inf is NaN, but states that are 0 in the chain may not be so in products, or the other
    way round. The host does not know whether there is one: if not, rows end after a step.
    """
    xp = ctx.xp
    is_open = xp.isnan(total) | (total == math.inf)
    run = ChainRun(ctx.kernels, chain, workspace)
    numbers = xp.arange(chain.num_rows, dtype=xp.int64, device=ctx.device)
    steps = xp.where(xp.any(is_open), chain.num_steps, xp.ones_like(numbers))
    run.lengths = xp.stack([steps, numbers])
    return xp.where(is_open, xp.astype(run.log_partition(), total.dtype), total)


def _cut(ctx: Context, chain: Chain, count: int) -> tuple[Chain, Chain]:
    """Return a front, one step at least, and segments [*batch, segments, K] of equal lengths."""
    xp, x, matrices, size = ctx.xp, chain.potentials, chain.transitions, chain.num_states
    assert matrices is not None
    length = (chain.num_steps - 1) // count
    first = chain.num_steps - count * length
    own = xp.reshape(x[..., first:, :], (*tuple(x.shape)[:-2], count, 1, length, size))
    if chain.has_one_matrix:
        head, into, inner = matrices, matrices, matrices[..., None, None, :, :, :]
    else:
        shape = (*tuple(matrices.shape)[:-3], count, length, size, size)
        every = xp.reshape(matrices[..., first - 1 :, :, :], shape)
        head, into = matrices[..., : max(first - 1, 1), :, :], every[..., 0, :, :]
        inner = every[..., None, 1:, :, :]
    front = replace(
        chain, num_steps=first, potentials=x[..., :first, :], transitions=head, final=None
    )
    within = replace(
        front,
        batch=(*chain.batch, count, size),
        num_steps=length,
        potentials=own,
        transitions=inner,
        initial=into,
        initial_in_logs=chain.transitions_in_logs,
    )
    return front, within


def _last(ctx: Context, chain: Chain, workspace: int) -> tuple[Array, Array]:
    """Return the logs of the weights after the last step, [*batch, K], and numbers to add to them.

    Both are float64; the latter, [*batch, 1], are whole.
    """
    run = ChainRun(ctx.kernels, chain, workspace)
    last = run.advance(0, chain.num_steps, Sweep(with_end=True), None, workspace)
    assert last is not None
    m, e = (ctx.load(last.states[0, :, i, :], ctx.widest) for i in (0, 1))
    bits, nats, rest = (last.scales[0, :, i : i + 1] for i in range(3))
    # What is large in either is a whole number of nats, and moved exactly.
    whole = ctx.xp.round(bits * math.log(2))
    logs = add_scale(ctx.xp.log(m), e + bits, rest - whole)
    return run.of_batch(logs), run.of_batch(nats + whole)
