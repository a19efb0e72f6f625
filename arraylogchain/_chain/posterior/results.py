"""The way back through chains: values with their pullbacks, posterior weights.

A chain is computed tile by tile, whole or in segments of time; see `tile` for a tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from arraylogchain._chain import evaluate
from arraylogchain._chain.long.guesses import allowed_distance, compared
from arraylogchain._chain.long.segments import Cut, cut_time, cut_unverified
from arraylogchain._chain.pieces import RecursionPlan, plan_posterior
from arraylogchain._chain.posterior.sums import GradientSums, PosteriorSums, narrowed
from arraylogchain._chain.posterior.tile import TilePosterior
from arraylogchain._chain.steps import Chain
from arraylogchain._context import Array, Context
from arraylogchain.plan import Segments

Pullback = Callable[[Array, frozenset[str]], dict[str, Array]]
Sums = TypeVar("Sums", bound=PosteriorSums)


@dataclass(slots=True)
class Posterior:
    """A chain, or one in segments of time, as tiles whose forward passes are kept or not.

    Attributes
    ----------
    parts : list of Chain
        The chain itself; or what comes before its segments, and the segments as a batch.
    """

    ctx: Context
    chain: Chain
    cut: Cut | None
    parts: list[Chain]
    keep: bool
    workspace: int

    def tiles(self, part: Chain, store: Array | None = None) -> Iterator[TilePosterior]:
        """Run the forward passes of a part."""
        plan = self.plan(part)
        for box, steps in part.tiles(self.ctx, plan.groups, plan.rows):
            yield TilePosterior(steps, box, plan, store)

    def plan(self, part: Chain) -> RecursionPlan:
        workspace = self.workspace
        if len(self.parts) > 1:
            # There are far fewer steps before the segments than in them.
            before = workspace // 8
            workspace = before if part is self.parts[0] else workspace - before
        return plan_posterior(*part.sizes, part.size, part.count, workspace, self.keep)

    def add(
        self,
        part: Chain,
        tile: TilePosterior,
        cotangent: Array | None,
        sums: PosteriorSums,
        stored: Array | None = None,
    ) -> None:
        """Add the gradients of a tile for a cotangent [*batch], or ones."""
        xp, ctx = self.ctx.xp, self.ctx
        shape = (tile.tile.groups, tile.tile.rows, 1)
        if cotangent is None:
            g = xp.ones(shape, dtype=ctx.dtype(ctx.precision), device=ctx.device)
        else:
            if part is not self.chain and part is not self.parts[0]:
                cotangent = xp.broadcast_to(cotangent[..., None], part.batch)
            view = part.arrange(xp, cotangent, trailing=0)
            g = xp.reshape(view[(*tile.box, ...)], shape)
        tile.add_gradients(g, sums if part is self.chain else sums.of_part(part), stored)


def prepare(
    ctx: Context, chain: Chain, segments: Segments, workspace: int, keep: bool
) -> Posterior:
    """Make a chain ready for passes forward and back, in segments if there are several."""
    cut = cut_time(ctx, chain, segments, workspace, forward=True, backward=True)
    return _in_parts(ctx, chain, cut, workspace, keep)


def _in_parts(ctx: Context, chain: Chain, cut: Cut | None, workspace: int, keep: bool) -> Posterior:
    parts = [chain] if cut is None else list(cut.left(cut.entered()))
    return Posterior(ctx, chain, cut, parts, keep, workspace)


def log_partition(
    ctx: Context, chain: Chain, segments: Segments, workspace: int, keep: bool
) -> tuple[Array, Pullback]:
    """Return the logs of the sums over all paths, [*batch], and their pullback.

    Parameters
    ----------
    keep : bool
        Whether every state is kept for the pullback though that takes more than `workspace`, and
        not only one in about sqrt(count).

    Returns
    -------
    value : array [*batch]
    pullback : callable
        Takes a cotangent [*batch] and the names of wanted gradients, of 'potentials',
        'transitions' and 'start'. Returns them by name, in the chain's shapes and dtypes.
    """
    if chain.size == 0 or 0 in chain.batch:
        return _nothing(ctx, chain)
    states = math.prod(chain.batch) * chain.count * chain.size * ctx.precision.itemsize
    whole = prepare(ctx, chain, segments, workspace, keep or states <= workspace)
    store = _store(whole)
    tiles = [(part, tile) for part in whole.parts for tile in whole.tiles(part, store)]
    del store
    if whole.cut is not None:
        out = evaluate.total(ctx, chain, whole.cut, workspace)
    else:
        out = ctx.empty(chain.batch, ctx.result_dtype)
        view = chain.arrange(ctx.xp, out, trailing=0)
        for _, tile in tiles:
            tile.write_log_partition(view[(*tile.box, ...)])

    def pullback(cotangent: Array, wanted: frozenset[str]) -> dict[str, Array]:
        given, sums = arrays_of(chain), GradientSums(ctx, chain)
        # Taken before anything is written: what fails midway leaves nothing behind.
        stored = tiles[0][1].take_store() if "potentials" in wanted else None
        for name in wanted:
            if name == "potentials" and stored is not None:
                sums.potentials = ctx.xp.reshape(stored, tuple(given[name].shape))
            else:
                setattr(sums, name, _accumulator(ctx, chain, workspace, given[name], name))
        for part, tile in tiles:
            whole.add(part, tile, cotangent, sums, stored)
        return {
            name: ctx.xp.astype(
                narrowed(ctx, getattr(sums, name), given[name].dtype), given[name].dtype, copy=False
            )
            for name in wanted
        }

    return out, pullback


def _store(whole: Posterior) -> Array | None:
    """Return memory for the exponentials of all potentials, [groups, rows, count, K].

    Their gradient takes its place later, so they have to be potentials of the whole batch, in the
    precision of the computation, that are one tile of kept states.
    """
    ctx, chain, x = whole.ctx, whole.chain, whole.chain.potentials
    plan = whole.plan(whole.parts[0])
    axes = (*chain.group_axes, *chain.row_axes)
    if (
        x is None
        or whole.cut is not None
        or chain.lengths is not None
        or (plan.groups, plan.rows) != chain.sizes
        or plan.block < chain.count
        or tuple(x.shape[:-2]) != chain.batch
        or x.dtype != ctx.dtype(ctx.precision)
        or axes != tuple(range(len(chain.batch)))
    ):
        return None
    return ctx.empty((*chain.sizes, chain.count, chain.size), x.dtype)


def arrays_of(chain: Chain) -> dict[str, Array]:
    """Return the arrays of a chain by the names of their gradients."""
    return {
        "potentials": chain.potentials,
        "transitions": chain.transitions,
        "start": chain.start,
    }


def _nothing(ctx: Context, chain: Chain) -> tuple[Array, Pullback]:
    """Return the value and the pullback of chains without states, or of no chain."""
    xp = ctx.xp
    out = xp.full(chain.batch, -math.inf, dtype=ctx.result_dtype, device=ctx.device)

    def pullback(cotangent: Array, wanted: frozenset[str]) -> dict[str, Array]:
        return {name: xp.zeros_like(x) for name, x in arrays_of(chain).items() if name in wanted}

    return out, pullback


def _accumulator(ctx: Context, chain: Chain, workspace: int, like: Array, name: str) -> Array:
    """Return zeros to add gradients to, of the shape of `like`.

    Wider than the computation where many steps are added up, if that is cheap; of the result's own
    dtype where nothing is.
    """
    shape = tuple(like.shape)
    dtype = ctx.dtype(ctx.precision)
    if name == "transitions" and shape[-3] == 1:
        if 8 * math.prod(shape) <= workspace // 8:
            dtype = ctx.dtype(ctx.widest)
    elif name == "potentials" and shape[:-2] == chain.batch:
        dtype = like.dtype
    out = ctx.empty(shape, dtype)
    out[...] = 0.0
    return out


def marginals(ctx: Context, chain: Chain, segments: Segments, workspace: int) -> Array:
    """Return the posterior probabilities of all states at all steps, [*batch, count, K]."""
    shape = (*chain.batch, chain.count, chain.size)

    def empty() -> GradientSums:
        zeros = ctx.xp.zeros(shape, dtype=ctx.result_dtype, device=ctx.device)
        return GradientSums(ctx, chain, potentials=zeros)

    return posterior_sums(ctx, chain, segments, workspace, empty)[0].potentials


def expected_transitions(ctx: Context, chain: Chain, segments: Segments, workspace: int) -> Array:
    """Return expected counts in the shape of the transitions."""
    given = chain.transitions
    assert given is not None

    def empty() -> GradientSums:
        zeros = _accumulator(ctx, chain, workspace, given, "transitions")
        return GradientSums(ctx, chain, transitions=zeros, as_counts=True)

    sums, _ = posterior_sums(ctx, chain, segments, workspace, empty)
    return ctx.to_result(sums.transitions)


def posterior_sums(
    ctx: Context, chain: Chain, segments: Segments, workspace: int, empty: Callable[[], Sums]
) -> tuple[Sums, Array | None]:
    """Return sums over the posterior, for cotangents of one.

    Beside them, of chains cut in segments, logs of the last state [*batch, K], but for a factor.
    """
    if segments.guessed > 1:
        sums = empty()
        last = _add_and_verify(ctx, chain, segments, workspace, sums)
        if last is not None:
            return sums, last
        del sums
    sums = empty()
    whole = prepare(ctx, chain, segments, workspace, keep=False)
    for part in whole.parts:
        for tile in whole.tiles(part):
            whole.add(part, tile, None, sums)
            del tile  # before the states of the next one are kept
    return sums, None if whole.cut is None else whole.cut.last(ctx).values


def _add_and_verify(
    ctx: Context, chain: Chain, segments: Segments, workspace: int, sums: PosteriorSums
) -> Array | None:
    """Add the posterior given guessed messages; return logs of the last state if they prove right.

    These are [*batch, K], but for a factor; None if guesses fail.
    """
    cut = cut_unverified(ctx, chain, segments, workspace)
    assert cut.forward is not None
    assert cut.backward is not None
    whole = _in_parts(ctx, chain, cut, workspace, keep=False)
    front, within = whole.parts
    # What is not known yet is as it was guessed.
    last = ctx.xp.asarray(cut.forward[0][..., 1:, :], copy=True)
    entering = ctx.xp.asarray(cut.backward[0][..., :-1, :], copy=True)
    views = [within.arrange(ctx.xp, x, trailing=1) for x in (last, entering)]
    for tile in whole.tiles(within):
        to_last, to_entering = (view[(*tile.box, ...)] for view in views)
        # No segment begins where the last one ends.
        if not tile.write_last(to_last) or not _agree(
            ctx, cut, last[..., :-1, :], cut.forward[0][..., 1:-1, :]
        ):
            return None
        whole.add(within, tile, None, sums)
        tile.write_entering(to_entering)
        del tile, to_last, to_entering  # before the states of the next one are kept
    # Derivatives by a state are right where they are multiplied with the state, and what they lack
    # elsewhere has no weight: not even in the segment before, which ends with that very state.
    if not _agree(ctx, cut, entering, cut.backward[0][..., :-1, :]):
        return None
    for tile in whole.tiles(front):
        whole.add(front, tile, None, sums)
        del tile
    return last[..., -1, :]


def _agree(ctx: Context, cut: Cut, found: Array, guess: Array) -> bool:
    distance = compared(ctx, found, guess)[1]
    return bool(ctx.xp.all(distance <= allowed_distance(ctx, cut)))
