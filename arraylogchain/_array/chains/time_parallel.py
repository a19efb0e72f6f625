"""Long chains with time cut into segments, which are computed side by side from verified guesses.

Most chains forget: after some steps, what state they began with shows no more. So the message that
enters a segment is nearly known, but for a factor, from the last steps of the segment before alone,
whatever those began with. From these guesses all segments are computed side by side, and where they
end, the guesses are verified. Guess and result have to agree, but for a factor, to

    d(u, v) = max_k log(u_k / v_k) - min_k log(u_k / v_k) <= length / 4 eps,

with zeros in the same places; logs may differ by their own rounding besides. No product with
nonnegative matrices makes this distance grow [1]_, so that by induction the true messages, which
the first segment is begun with, are no further from the results than eps / 4 for each step: less
than steps round. The factors between guesses and results are the scale that is carried from segment
to segment.

.. [1] G. Birkhoff, "Extensions of Jentzsch's theorem", Trans. Amer. Math. Soc. 85 (1957).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from arraylogchain._array.chains.messages import last_message
from arraylogchain._array.chains.states import log_sum
from arraylogchain._context import Array, Context
from arraylogchain._inputs.chain import Chain

# How often results are the next guesses.
_TRIALS = 2


@dataclass(frozen=True, slots=True)
class Cut:
    """A chain whose time is cut into equal segments, after a front of what does not fill one.

    Attributes
    ----------
    front : Chain
        The first steps, at least one.
    within : Chain
        The segments, [*batch, segments]; what they begin and end with is not given.
    between : Chain
        Two steps for each segment: the last one before it, and its first one, without potentials.
    """

    front: Chain
    within: Chain
    between: Chain


def _cut(ctx: Context, chain: Chain, segments: int) -> Cut:
    """Cut a chain of one length for all rows."""
    xp, count = ctx.xp, chain.num_steps
    length = (count - 1) // segments
    first = count - segments * length
    x, matrices = chain.potentials, chain.transitions
    assert matrices is not None  # there are several steps
    steps = tuple(int(n) for n in x.shape[:-2])
    own = xp.reshape(x[..., first:, :], (*steps, segments, length, chain.num_states))
    if chain.has_one_matrix:
        head = matrices
        inner = entering = matrices[..., None, :, :, :]
    else:
        head = matrices[..., : max(first - 1, 1), :, :]
        shape = (*matrices.shape[:-3], segments, length, *matrices.shape[-2:])
        every = xp.reshape(matrices[..., first - 1 :, :, :], shape)
        entering, inner = every[..., :1, :, :], every[..., 1:, :, :]
    batch = (*chain.batch, segments)
    nothing = xp.zeros((2, chain.num_states), dtype=x.dtype, device=ctx.device)
    plain = replace(chain, initial=None, final=None, batch=batch)
    return Cut(
        front=replace(
            chain, num_steps=first, potentials=x[..., :first, :], transitions=head, final=None
        ),
        within=replace(plain, num_steps=length, potentials=own, transitions=inner),
        between=replace(plain, num_steps=2, potentials=nothing, transitions=entering),
    )


def _begun(chain: Chain, initial: Array) -> Chain:
    return replace(chain, initial=initial, initial_in_logs=True)


def log_partition(ctx: Context, chain: Chain, segments: int, workspace: int) -> Array | None:
    """Return the logs of the sums over all paths, [*batch].

    None if the guesses fail, or if infinite weights or NaN turn up.
    """
    xp, cut = ctx.xp, _cut(ctx, chain, segments)
    first, first_whole = last_message(ctx, cut.front, workspace)
    half = _last_steps(cut.within, math.ceil(cut.within.num_steps / 2))
    guess = last_message(ctx, half, workspace)[0]
    for _ in range(_TRIALS):
        before = xp.concat([first[..., None, :], guess[..., :-1, :]], axis=-2)
        entering, shift = last_message(ctx, _begun(cut.between, before), workspace)
        logs, whole = last_message(ctx, _begun(cut.within, entering), workspace)
        if not bool(xp.all(logs < math.inf)):
            return None
        factors, distance = _compared(ctx, logs, guess)
        # No segment begins where the last one ends.
        if bool(xp.all(distance[..., :-1] <= cut.within.num_steps / 4 * ctx.precision.eps)):
            integers = first_whole + xp.sum(whole, axis=-1) + xp.sum(shift, axis=-1)
            rest = xp.sum(factors[..., :-1], axis=-1) + log_sum(ctx, logs[..., -1, :])[..., 0]
            out = ctx.empty(chain.batch, ctx.result_dtype)
            out[...] = ctx.to_result(xp.asarray(integers + rest))
            return out
        guess = logs
    return None


def _last_steps(chain: Chain, count: int) -> Chain:
    first = chain.num_steps - count
    matrices = chain.transitions
    assert matrices is not None
    if not chain.has_one_matrix:
        matrices = matrices[..., first:, :, :]
    x = chain.potentials[..., first:, :]
    return replace(chain, num_steps=count, potentials=x, transitions=matrices)


def _compared(ctx: Context, logs: Array, guess: Array) -> tuple[Array, Array]:
    """Return the logs of the factors between guesses and results, and their distances.

    Both are [*batch, segments]; distances are infinite where they have other zeros, NaN or +inf.
    What the logs themselves are rounded by, far below the largest, is no difference.
    """
    xp, inf = ctx.xp, math.inf
    difference, dead = logs - guess, xp.maximum(logs, guess) == -inf
    rounding = ctx.widest.eps * xp.maximum(xp.abs(logs), xp.abs(guess))
    high = xp.max(xp.where(dead, xp.full_like(logs, -inf), difference - rounding), axis=-1)
    low = xp.min(xp.where(dead, xp.full_like(logs, inf), difference + rounding), axis=-1)
    no_path = xp.all(dead, axis=-1)
    high, low = (xp.where(no_path, xp.zeros_like(x), x) for x in (high, low))
    distance = high - low
    return (high + low) / 2, xp.where(xp.isnan(distance), xp.full_like(distance, inf), distance)
