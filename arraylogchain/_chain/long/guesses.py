"""Messages at the ends of a long chain's segments, guessed and verified.

Most chains forget: after some steps, what state they began with shows no more. So the message that
enters a segment is nearly known, but for a factor, from the last steps of the segment before alone,
whatever those began with. From these guesses all segments are computed side by side, and where they
end, the guesses are verified. How much better results are than guesses tells how long segments have
to be if they are too short. Guess and result have to agree, but for a factor, to

    d(u, v) = max_k log(u_k / v_k) - min_k log(u_k / v_k) <= length / 4 eps,

with zeros in the same places; logs may differ by their own rounding besides. No product with
nonnegative matrices makes this distance grow [1]_, so that by induction the true messages, which
the first segment is begun with, are no further from the results than eps / 4 for each step: less
than steps round. The factors between guesses and results are the scale that is carried from segment
to segment.

Posterior weights do not know that scale, so passes that compute them may take guesses before they
are verified: their own results at the segments' ends verify them. Backward, these are derivatives
by the state that a segment begins with. They are proved right as far as they matter beside that
state, and so does the guess for them in the segment before: it ends with that state.

.. [1] G. Birkhoff, "Extensions of Jentzsch's theorem", Trans. Amer. Math. Soc. 85 (1957).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from arraylogchain._chain.steps import Chain
from arraylogchain._chain.whole import split_last_message
from arraylogchain._context import Array, Context

if TYPE_CHECKING:
    from arraylogchain._chain.long.segments import Cut, Messages

# The share of a segment that guesses are made with, and how often results are the next guesses.
_SHARE = 0.5
_TRIALS = 2


def guessed_messages(ctx: Context, cut: Cut, workspace: int, backward: bool) -> Messages | float:
    """Guess the messages at the ends of the front and of each segment.

    Returns
    -------
    Messages or float
        If the guesses fail, after how many steps the chain has forgotten, about: infinity for
        never, NaN where +inf or NaN turn up.
    """
    xp = ctx.xp
    chain, (first, first_whole) = cut.within(), _outermost(ctx, cut, backward)
    guess = _guess(ctx, chain, workspace, backward)
    distances = []
    for _ in range(_TRIALS):
        begun = _begun(ctx, chain, first, first_whole, guess, backward)
        logs, whole = split_last_message(ctx, begun, workspace, backward)
        factors, distance = compared(ctx, logs, guess)
        # No segment begins where the last one ends.
        distance = distance[..., 1:] if backward else distance[..., :-1]
        distances.append(float(xp.max(distance)))
        if not bool(xp.all(logs < math.inf)):
            return math.nan
        if distances[-1] <= allowed_distance(ctx, cut):
            return _scaled(ctx, (first, first_whole), (logs, whole), factors, backward)
        guess = logs
    return _steps_to_forget(distances, cut.length, allowed_distance(ctx, cut))


def unverified_messages(ctx: Context, cut: Cut, workspace: int, backward: bool) -> Messages:
    """Guess the messages at the ends of the front and of each segment, each but for a factor."""
    xp = ctx.xp
    first, first_whole = _outermost(ctx, cut, backward)
    guess = _guess(ctx, cut.within(), workspace, backward)
    pair = [guess, first[..., None, :]] if backward else [first[..., None, :], guess]
    nothing = xp.zeros_like(guess[..., 0])
    whole = [nothing, first_whole[..., None]] if backward else [first_whole[..., None], nothing]
    return xp.concat(pair, axis=-2), xp.concat(whole, axis=-1)


def allowed_distance(ctx: Context, cut: Cut) -> float:
    """Return how far, in Birkhoff's distance, a guess may be from what a segment ends with."""
    return cut.length / 4 * ctx.precision.eps


def _outermost(ctx: Context, cut: Cut, backward: bool) -> tuple[Array, Array]:
    """Return the message before the first segment, or after the last one."""
    if not backward:
        return cut.start, cut.start_offset
    # Nothing follows the last segment, so all its states go on with a weight of one.
    return ctx.xp.zeros_like(cut.start), ctx.xp.zeros_like(cut.start_offset)


def _guess(ctx: Context, chain: Chain, workspace: int, backward: bool) -> Array:
    """Return logs [*batch, segments, K] of what each segment ends with, from its nearest steps."""
    return split_last_message(ctx, _nearest(chain, backward), workspace, backward)[0]


def _steps_to_forget(distances: list[float], length: int, allowed: float) -> float:
    """Return after how many steps a distance is below what is allowed, if it falls as it did."""
    first, second = distances[0], distances[-1]
    if not math.isfinite(first) or not 0 < second < 0.9 * first:
        return math.inf
    return length + length * math.log(first / allowed) / math.log(first / second)


def _nearest(chain: Chain, backward: bool) -> Chain:
    """Return the last steps of segments, or the first ones, where backward steps end."""
    count = math.ceil(_SHARE * (chain.count - 1))
    return chain.head(count + 1) if backward else chain.tail(chain.count - 1 - count)


def _begun(
    ctx: Context, chain: Chain, first: Array, first_whole: Array, guess: Array, backward: bool
) -> Chain:
    """Return the segments, each begun with the guess [*batch, segments, K] of the one before."""
    xp, nothing = ctx.xp, ctx.xp.zeros_like(guess[..., 1:, 0])
    first, first_whole = first[..., None, :], first_whole[..., None]
    if backward:
        logs = xp.concat([guess[..., 1:, :], first], axis=-2)
        return replace(chain, end=logs, end_offset=xp.concat([nothing, first_whole], axis=-1))
    logs = xp.concat([first, guess[..., :-1, :]], axis=-2)
    return replace(chain, start=logs, start_offset=xp.concat([first_whole, nothing], axis=-1))


def compared(ctx: Context, logs: Array, guess: Array) -> tuple[Array, Array]:
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


def _scaled(
    ctx: Context, first: Messages, ends: Messages, factors: Array, backward: bool
) -> Messages:
    """Return the messages before and after all segments, in the scale of the first one."""
    xp, (logs, whole) = ctx.xp, ends
    if backward:
        logs, whole, factors = (
            xp.flip(x, axis=axis) for x, axis in ((logs, -2), (whole, -1), (factors, -1))
        )
    # Each segment has the factors of those before it; the first had the true message.
    carried = xp.cumulative_sum(factors[..., :-1], axis=-1, include_initial=True)
    steady = xp.round(carried)
    logs = xp.concat([first[0][..., None, :], logs + (carried - steady)[..., None]], axis=-2)
    whole = xp.concat([first[1][..., None], xp.cumulative_sum(whole, axis=-1) + steady], axis=-1)
    return (xp.flip(logs, axis=-2), xp.flip(whole, axis=-1)) if backward else (logs, whole)
