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

Messages backward, which enter segments from their ends, are found in the same way. With what enters
it from both sides as its initial and final weights, each segment is a chain of its own, and its
posterior is that of the whole.

.. [1] G. Birkhoff, "Extensions of Jentzsch's theorem", Trans. Amer. Math. Soc. 85 (1957).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from arraylogchain._array.chains.accumulate import ChainSums
from arraylogchain._array.chains.messages import last_message
from arraylogchain._array.chains.states import log_sum
from arraylogchain._context import Array, Context
from arraylogchain._inputs.chain import Chain, GuessesFailedError
from arraylogchain.plan import count_segments, sizes_of

# How often results are the next guesses.
_TRIALS = 2


@dataclass(frozen=True, slots=True)
class Cut:
    """A chain whose time is cut into equal segments, after a front of what does not fill one.

    Attributes
    ----------
    front : Chain
        The first steps, at least one.
    between : Chain
        Two steps for each segment: the last one before it, and its first one, without potentials.
    within : Chain
        The segments, [*batch, segments].
    """

    front: Chain
    between: Chain
    within: Chain

    @property
    def chains(self) -> tuple[Chain, Chain, Chain]:
        return self.front, self.between, self.within

    def sums(self, sums: ChainSums) -> list[ChainSums]:
        """Return where the gradients of the chains go, views of those of the whole."""
        xp, within = sums.ctx.xp, self.within
        sizes = self.front.num_steps, within.batch[-1], within.num_steps
        found = [replace(sums, chain=chain) for chain in self.chains]
        if sums.potentials is not None:
            of_front, of_within = _cut_steps(xp, sums.potentials, sizes)
            for own, view in zip(found, (of_front, None, of_within), strict=True):
                own.potentials = view
        if sums.transitions is not None:
            for own, view in zip(found, _cut_matrices(xp, sums.transitions, sizes), strict=True):
                own.transitions = view
        found[1].initial = found[2].initial = None
        return found


def cut_in_segments(
    operation: str, ctx: Context, chain: Chain, workspace: int
) -> tuple[Array, Cut] | None:
    """Return the logs of the sums over all paths, and chains that have the posterior of the whole.

    None where segments of time do not pay, or guesses fail, or infinite weights or NaN turn up.
    What fails raises GuessesFailedError if compiled loops can take over.
    """
    segments = count_segments(operation, sizes_of(chain), workspace)
    found = None
    # Segments do not tell final weights from what is handed back to them.
    if segments > 1 and not (operation == "value_and_pullback" and chain.final is not None):
        found = _guessed(operation, ctx, chain, segments, workspace)
    if found is None and segments > 1 and chain.else_loops:
        raise GuessesFailedError
    return found


def _guessed(
    operation: str, ctx: Context, chain: Chain, segments: int, workspace: int
) -> tuple[Array, Cut] | None:
    """Return what `cut_in_segments` does, None where guesses fail."""
    xp, cut = ctx.xp, _cut(ctx, chain, segments)
    first, shift = last_message(ctx, cut.front, workspace)
    forward = _verified(ctx, cut, first, workspace, backward=False)
    if forward is None:
        return None
    end = _final_logs(ctx, chain)
    last = log_sum(ctx, forward.leaving[..., -1, :] + end)[..., 0]
    total = ctx.empty(chain.batch, ctx.result_dtype)
    total[...] = ctx.to_result(shift + forward.shift + (forward.factor + last))
    if operation == "log_partition":
        return total, cut
    backward = _verified(ctx, cut, end, workspace, backward=True)
    if backward is None:
        return None
    between = _with_ends(cut.between, _shifted(xp, first, forward.leaving), backward.leaving)
    after_front, _ = last_message(ctx, between, workspace, backward=True)
    return total, Cut(
        front=_with_ends(cut.front, final=after_front[..., 0, :]),
        between=between,
        within=_with_ends(cut.within, forward.entering, backward.entering),
    )


def _cut(ctx: Context, chain: Chain, segments: int) -> Cut:
    """Cut a chain of one length for all rows; what parts begin and end with is not given."""
    xp, count = ctx.xp, chain.num_steps
    length = (count - 1) // segments
    first = count - segments * length
    sizes = first, segments, length
    of_front, of_within = _cut_steps(xp, chain.potentials, sizes)
    head, entering, inner = _cut_matrices(xp, chain.transitions, sizes)
    nothing = xp.zeros((2, chain.num_states), dtype=of_front.dtype, device=ctx.device)
    plain = replace(chain, initial=None, final=None, batch=(*chain.batch, segments))
    return Cut(
        front=replace(chain, num_steps=first, potentials=of_front, transitions=head, final=None),
        between=replace(plain, num_steps=2, potentials=nothing, transitions=entering),
        within=replace(plain, num_steps=length, potentials=of_within, transitions=inner),
    )


def _cut_steps(xp: Any, x: Array, sizes: tuple[int, int, int]) -> tuple[Array, Array]:
    """Return views of the steps [..., T, K] of the front and of the segments."""
    first, segments, length = sizes
    shape = (*tuple(x.shape)[:-2], segments, length, int(x.shape[-1]))
    return x[..., :first, :], xp.reshape(x[..., first:, :], shape)


def _cut_matrices(xp: Any, x: Array, sizes: tuple[int, int, int]) -> tuple[Array, Array, Array]:
    """Return views of the matrices of the front, of those into segments and of those within."""
    first, segments, length = sizes
    if int(x.shape[-3]) == 1:
        return x, x[..., None, :, :, :], x[..., None, :, :, :]
    shape = (*tuple(x.shape)[:-3], segments, length, *tuple(x.shape)[-2:])
    every = xp.reshape(x[..., first - 1 :, :, :], shape)
    # There is one even where the front, of one step, reads none.
    return x[..., : max(first - 1, 1), :, :], every[..., :1, :, :], every[..., 1:, :, :]


def _final_logs(ctx: Context, chain: Chain) -> Array:
    """Return the logs of the final weights, [*batch, K]."""
    shape = (*chain.batch, chain.num_states)
    if chain.final is None:
        return ctx.xp.zeros(shape, dtype=ctx.dtype(ctx.widest), device=ctx.device)
    final = ctx.load(chain.final, ctx.widest)
    return ctx.xp.broadcast_to(final if chain.final_in_logs else ctx.xp.log(final), shape)


def _with_ends(chain: Chain, initial: Array | None = None, final: Array | None = None) -> Chain:
    """Return a chain with initial and final weights, in logs, in the place of its own if given."""
    if initial is not None:
        chain = replace(chain, initial=initial, initial_in_logs=True)
    return chain if final is None else replace(chain, final=final, final_in_logs=True)


class Messages(NamedTuple):
    """Verified messages of one direction, as logs [*batch, segments, K].

    `leaving` has them after each segment, in that direction; `shift` and `factor` [*batch] add up
    to the logs of what those have left out, but for the last segment's own factor.
    """

    entering: Array
    leaving: Array
    shift: Array
    factor: Array


def _verified(
    ctx: Context, cut: Cut, outer: Array, workspace: int, backward: bool
) -> Messages | None:
    """Return the messages of all segments, given the one from before the first in a direction.

    Backward that is what enters the last segment, forward what leaves the front.
    """
    xp, within = ctx.xp, cut.within
    # Segments that others follow.
    some = slice(1, None) if backward else slice(None, -1)
    guess, _ = last_message(ctx, _half(within, backward), workspace, backward)
    for _ in range(_TRIALS):
        before = guess if backward else _shifted(xp, outer, guess)
        links = _with_ends(cut.between, **{"final" if backward else "initial": before})
        entering, shift = last_message(ctx, links, workspace, backward)
        if backward:
            entering = xp.concat([entering[..., 1:, :], outer[..., None, :]], axis=-2)
        given = _with_ends(within, **{"final" if backward else "initial": entering})
        logs, whole = last_message(ctx, given, workspace, backward)
        if not bool(xp.all(logs < math.inf)):
            return None
        factors, distance = compared(xp, logs[..., some, :], guess[..., some, :], ctx.widest.eps)
        if bool(xp.all(distance <= within.num_steps / 4 * ctx.precision.eps)):
            shift = xp.sum(whole, axis=-1) + xp.sum(shift, axis=-1)
            return Messages(entering, logs, shift, xp.sum(factors, axis=-1))
        guess = logs
    return None


def _shifted(xp: Any, first: Array, messages: Array) -> Array:
    """Return messages [*batch, segments, K], each in the next one's place, after a first one."""
    return xp.concat([first[..., None, :], messages[..., :-1, :]], axis=-2)


def _half(chain: Chain, backward: bool) -> Chain:
    """Return the steps of the half of each segment that a direction ends with."""
    count = math.ceil(chain.num_steps / 2)
    steps = slice(count) if backward else slice(chain.num_steps - count, None)
    x, matrices = chain.potentials[..., steps, :], chain.transitions
    assert matrices is not None
    if not chain.has_one_matrix:
        steps = slice(count - 1) if backward else steps
        matrices = matrices[..., steps, :, :]
    return replace(chain, num_steps=count, potentials=x, transitions=matrices)


def compared(xp: Any, logs: Array, guess: Array, eps: float) -> tuple[Array, Array]:
    """Return the logs of the factors between messages [..., K] and guesses, and their distances.

    Distances are infinite where they have other zeros, NaN or +inf. What the logs themselves are
    rounded by, `eps` of them, is no difference: it counts far below the largest.
    """
    inf = math.inf
    difference, dead = logs - guess, xp.maximum(logs, guess) == -inf
    rounding = eps * xp.maximum(xp.abs(logs), xp.abs(guess))
    high = xp.max(xp.where(dead, xp.full_like(logs, -inf), difference - rounding), axis=-1)
    low = xp.min(xp.where(dead, xp.full_like(logs, inf), difference + rounding), axis=-1)
    no_path = xp.all(dead, axis=-1)
    high, low = (xp.where(no_path, xp.zeros_like(x), x) for x in (high, low))
    distance = high - low
    return (high + low) / 2, xp.where(xp.isnan(distance), xp.full_like(distance, inf), distance)
