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

Messages backward, which enter segments from their ends, are guessed in the same way. With what
enters it from both sides as its initial and final weights, each segment is a chain of its own, and
its posterior is that of the whole: the sweeps that compute it verify the guesses as well.

.. [1] G. Birkhoff, "Extensions of Jentzsch's theorem", Trans. Amer. Math. Soc. 85 (1957).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from arraylogchain._array.chains.accumulate import ChainSums
from arraylogchain._array.chains.messages import last_message
from arraylogchain._array.chains.states import log_sum
from arraylogchain._context import Array, Context
from arraylogchain._inputs.chain import Chain, GuessesFailedError

# Steps that guesses are made with, and how often results are the next guesses.
_GUESS_STEPS = 32
_TRIALS = 2


class Segments:
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

    def __init__(self, ctx: Context, chain: Chain, workspace: int) -> None:
        self.ctx, self.chain, self.workspace = ctx, chain, workspace
        xp, count, segments = ctx.xp, chain.num_steps, chain.segments
        length = (count - 1) // segments
        self.sizes = count - segments * length, segments, length
        of_front, of_within = _cut_steps(xp, chain.potentials, self.sizes)
        head, entering, inner = _cut_matrices(xp, chain.transitions, self.sizes)
        nothing = xp.zeros((2, chain.num_states), dtype=of_front.dtype, device=ctx.device)
        plain = replace(chain, initial=None, final=None, batch=(*chain.batch, segments), segments=1)
        self.front = replace(
            chain,
            num_steps=self.sizes[0],
            potentials=of_front,
            transitions=head,
            final=None,
            segments=1,
        )
        self.between = replace(plain, num_steps=2, potentials=nothing, transitions=entering)
        self.within = replace(plain, num_steps=length, potentials=of_within, transitions=inner)
        # What enters the first segment, and what the last one, backward.
        self.first, self.shift = last_message(ctx, self.front, workspace)
        self.end = _final_logs(ctx, chain)

    def log_partition(self) -> Array:
        """Return the logs of the sums over all paths, [*batch]."""
        guess = self.guess(backward=False)
        for _ in range(_TRIALS):
            entering, shift = self.enter(guess)
            given = with_ends(self.within, initial=entering)
            logs, whole = last_message(self.ctx, given, self.workspace)
            factors = self.factors(logs, guess)
            if factors is not None:
                return self.total(logs, whole + shift, factors)
            guess = logs
        raise GuessesFailedError

    def guess(self, backward: bool) -> Array:
        """Guess what each segment hands on in a direction, logs [*batch, segments, K]."""
        chain, count = self.within, min(_GUESS_STEPS, self.within.num_steps)
        steps = slice(count) if backward else slice(chain.num_steps - count, None)
        x, matrices = chain.potentials[..., steps, :], chain.transitions
        assert matrices is not None
        if not chain.has_one_matrix:
            steps = slice(count - 1) if backward else steps
            matrices = matrices[..., steps, :, :]
        nearest = replace(chain, num_steps=count, potentials=x, transitions=matrices)
        return last_message(self.ctx, nearest, self.workspace, backward)[0]

    def enter(self, guess: Array, backward: bool = False) -> tuple[Array, Array]:
        """Return what enters each segment in a direction, and numbers to add, given guesses."""
        xp, before = self.ctx.xp, guess if backward else shifted(self.ctx.xp, self.first, guess)
        links = with_ends(self.between, **{"final" if backward else "initial": before})
        entering, shift = last_message(self.ctx, links, self.workspace, backward)
        if backward:
            entering = xp.concat([entering[..., 1:, :], self.end[..., None, :]], axis=-2)
        return entering, shift

    def factors(self, logs: Array, guess: Array, backward: bool = False) -> Array | None:
        """Return the logs of the factors between what segments hand on and guesses.

        None where a guess does not hold, or infinite weights or NaN turn up.
        """
        xp = self.ctx.xp
        # Segments that others follow.
        some = slice(1, None) if backward else slice(None, -1)
        factors, distance = compared(
            xp, logs[..., some, :], guess[..., some, :], self.ctx.widest.eps
        )
        holds = xp.all(distance <= self.within.num_steps / 4 * self.ctx.precision.eps)
        return factors if bool(holds & xp.all(logs < math.inf)) else None

    def total(self, logs: Array, whole: Array, factors: Array) -> Array:
        """Return the logs of the sums over all paths, given what segments hand on."""
        last = log_sum(self.ctx, logs[..., -1, :] + self.end)[..., 0]
        xp, total = self.ctx.xp, self.ctx.empty(self.chain.batch, self.ctx.result_dtype)
        shift = self.shift + xp.sum(whole, axis=-1)
        total[...] = self.ctx.to_result(shift + (xp.sum(factors, axis=-1) + last))
        return total

    def sums(self, sums: ChainSums) -> list[ChainSums]:
        """Return where the gradients of the three chains go, views of those of the whole."""
        xp, chains = sums.ctx.xp, (self.front, self.between, self.within)
        found = [replace(sums, chain=chain) for chain in chains]
        if sums.potentials is not None:
            of_front, of_within = _cut_steps(xp, sums.potentials, self.sizes)
            for own, view in zip(found, (of_front, None, of_within), strict=True):
                own.potentials = view
        if sums.transitions is not None:
            views = _cut_matrices(xp, sums.transitions, self.sizes)
            for own, view in zip(found, views, strict=True):
                own.transitions = view
        found[1].initial = found[2].initial = None
        return found


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


def with_ends(chain: Chain, initial: Array | None = None, final: Array | None = None) -> Chain:
    """Return a chain with initial and final weights, in logs, in the place of its own if given."""
    if initial is not None:
        chain = replace(chain, initial=initial, initial_in_logs=True)
    return chain if final is None else replace(chain, final=final, final_in_logs=True)


def shifted(xp: Any, first: Array, messages: Array) -> Array:
    """Return messages [*batch, segments, K], each in the next one's place, after a first one."""
    return xp.concat([first[..., None, :], messages[..., :-1, :]], axis=-2)


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
