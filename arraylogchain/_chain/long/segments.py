"""Long chains with time cut into segments, which are computed side by side.

What enters and what leaves every segment comes first: its messages. With these, all segments
together are one batch of short chains. They are guessed and verified, see `guesses`; chains that do
not forget where they began take the products of all segments, one row for each state that a segment
can start from, which are then chained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from arraylogchain._chain.forms.states import State
from arraylogchain._chain.long.guesses import guessed_messages, unverified_messages
from arraylogchain._chain.long.products import Products, messages_of, multiplied
from arraylogchain._chain.steps import Chain
from arraylogchain._chain.whole import split_last_message
from arraylogchain._context import Array, Context
from arraylogchain.plan import Segments

# Logs [*batch, segments + 1, K] at the end of the front and of each segment, and whole numbers
# [*batch, segments + 1] to be added to them.
Messages = tuple[Array, Array]

# Segments that are worth another guess.
_FEWEST = 16


@dataclass(frozen=True, slots=True)
class Cut:
    """A chain whose time is cut into equal segments, after a front of what does not fill one.

    A segment begins with a product. Without segments of their own, shared matrices have an axis of
    length 1.

    Attributes
    ----------
    front : Chain
    segments, length : int
    matrices : array [..., segments or 1, length or 1, K, K]
    potentials : array [..., segments, length, K] or None
    start : array [*batch, K]
        Logs of the weights after the front, but for `start_offset`.
    start_offset : array [*batch]
        Whole numbers.
    products : Products or None
    forward, backward : Messages or None
        What enters the segments, and what follows them, as far as it was asked for.
    """

    front: Chain
    segments: int
    length: int
    matrices: Array
    potentials: Array | None
    start: Array
    start_offset: Array
    products: Products | None = None
    forward: Messages | None = None
    backward: Messages | None = None

    def within(self) -> Chain:
        """Return the segments as chains [*batch, segments]; their starts are yet to be given.

        The first state has no potentials: it is the last one of the segment before.
        """
        return Chain(
            batch=(*self.front.batch, self.segments),
            count=self.length + 1,
            size=self.front.size,
            transitions=self.matrices,
            potentials=self.potentials,
            start=None,
            transitions_in_logs=self.front.transitions_in_logs,
            start_in_logs=True,
            lead=1,
        )

    def entered(self) -> Chain:
        """Return the segments as chains that begin with the state before them."""
        assert self.forward is not None
        logs, whole = self.forward
        return replace(self.within(), start=logs[..., :-1, :], start_offset=whole[..., :-1])

    def left(self, segments: Chain) -> tuple[Chain, Chain]:
        """Return the front and the segments with the weights of what follows them."""
        assert self.backward is not None
        logs, whole = self.backward
        front = replace(self.front, end=logs[..., 0, :], end_offset=whole[..., 0])
        return front, replace(segments, end=logs[..., 1:, :], end_offset=whole[..., 1:])

    def last(self, ctx: Context) -> State:
        """Return the last state of all, [*batch, K]."""
        assert self.forward is not None
        logs, whole = self.forward
        offset = whole[..., -1:]
        return State(logs[..., -1, :], ctx.xp.zeros_like(offset), offset, None, in_logs=True)


def cut_time(
    ctx: Context,
    chain: Chain,
    segments: Segments,
    workspace: int,
    *,
    forward: bool = False,
    backward: bool = False,
) -> Cut | None:
    """Cut a chain, and find the messages at the segments' ends.

    None if the plan has no segments, or if +inf or NaN turn up: which sums they reach depends on
    the states before.

    Parameters
    ----------
    forward, backward : bool
        Which messages are wanted; if none are, the products are.
    """
    guessed = segments.guessed if forward or backward else 1
    while guessed > 1:
        found = _guessed(
            ctx, _cut(ctx, chain, guessed, workspace // 2), workspace, forward, backward
        )
        if isinstance(found, Cut):
            return found
        if math.isnan(found):
            return None
        # Once more with longer segments, if enough of them are left.
        longer = 0 if found == math.inf else (chain.count - 1) // math.ceil(found)
        guessed = longer if _FEWEST <= longer <= guessed // 2 else 1
    if segments.multiplied == 1:
        return None
    cut = _cut(ctx, chain, segments.multiplied, workspace // 2)
    products = multiplied(ctx, cut, workspace // 2)
    if products is None:
        return None

    def messages(backward: bool) -> Messages:
        return messages_of(ctx, cut, products, workspace // 2, backward)

    return replace(
        cut,
        products=products,
        forward=messages(backward=False) if forward else None,
        backward=messages(backward=True) if backward else None,
    )


def cut_unverified(ctx: Context, chain: Chain, segments: Segments, workspace: int) -> Cut:
    """Cut a chain, with guesses for the messages at the segments' ends, each but for a factor."""
    cut = _cut(ctx, chain, segments.guessed, workspace // 2)
    forward, backward = (
        unverified_messages(ctx, cut, workspace // 2, backward) for backward in (False, True)
    )
    return replace(cut, forward=forward, backward=backward)


def _guessed(ctx: Context, cut: Cut, workspace: int, forward: bool, backward: bool) -> Cut | float:
    """Return a cut with guessed messages, or what `guessed_messages` does where they fail."""
    for wanted, name in ((forward, "forward"), (backward, "backward")):
        if wanted:
            found = guessed_messages(ctx, cut, workspace // 2, name == "backward")
            if isinstance(found, float):
                return found
            cut = replace(cut, **{name: found})  # type: ignore[arg-type]
    return cut


def _cut(ctx: Context, chain: Chain, segments: int, workspace: int) -> Cut:
    length = (chain.count - 1) // segments
    ahead = chain.count - 1 - segments * length
    potentials = chain.potentials
    if potentials is not None:
        potentials = in_segments(ctx, potentials[..., ahead + 1 :, :], segments, length, 1)
    assert chain.transitions is not None  # there are several products
    front = chain.head(ahead + 1)
    start, start_offset = split_last_message(ctx, front, workspace)
    matrices = matrices_in_segments(ctx, chain.transitions, segments, length)
    return Cut(front, segments, length, matrices, potentials, start, start_offset)


def in_segments(ctx: Context, x: Array, segments: int, length: int, trailing: int) -> Array:
    """Cut time: [..., segments * length, *trailing] to [..., segments, length, *trailing]."""
    own = tuple(x.shape)
    axis = len(own) - trailing - 1
    return ctx.xp.reshape(x, (*own[:axis], segments, length, *own[axis + 1 :]))


def matrices_in_segments(ctx: Context, x: Array, segments: int, length: int) -> Array:
    """Return matrices [..., steps or 1, K, K] as [..., segments or 1, length or 1, K, K]."""
    if int(x.shape[-3]) == 1:
        return x[..., None, :, :, :]
    return in_segments(ctx, x[..., -segments * length :, :, :], segments, length, 2)
