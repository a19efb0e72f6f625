"""The posterior over paths: a sweep forward, one backward, and what their states tell together.

With a_t the state after step t of the forward sweep, b_t what the backward sweep has before the
potentials of step t, and d_t after them, each but for a factor of each row, the posterior is

    of states              a_t * b_t / Z_t,  Z_t = sum(a_t * b_t)
    of pairs of states     a_t[k] P_t[k, j] d_{t+1}[j] / Z_t,  as b_t = P_t @ d_{t+1}

and that of pairs without P_t is the derivative with respect to it, finite at P = 0. Every step is
normalised by its own sum, so that no scale has to be carried along.

*Proof.* What the sweeps proved of a_t, d_{t+1} and d_t is right to rounding, or too little to show
in Z_t; d_t's own proof covers what underflows in b_t, of which it is made. New is what underflows
in products of a_t and b_t, tiny each, or where b_t is so small that products with it lose digits:
less than ``2 K tiny (1 + max(a_t))`` of Z_t. Where that may be more than eps of it, because the
states that weigh most in one direction weigh next to nothing in the other, the step is taken in
float64, and rows for which that does not do from logarithms, as rows in log form are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from arraylogchain import _dispatch
from arraylogchain._array.chains.accumulate import ChainSums, bounded, zeros_for
from arraylogchain._array.chains.logs import LogMatrix, joint_logs
from arraylogchain._array.chains.matrices import Matrix
from arraylogchain._array.chains.messages import last_message, place_message
from arraylogchain._array.chains.scaled import Options, pair_ceiling
from arraylogchain._array.chains.states import State, add_scale, log_sum, part_of, scale_by_powers
from arraylogchain._array.chains.sweep import History, Step, Sweep, histories
from arraylogchain._array.chains.tiles import Tile, arrange
from arraylogchain._array.chains.time_parallel import Segments, shifted, with_ends
from arraylogchain._array.chains.values import log_partition, log_totals
from arraylogchain._context import DOUBLE, SINGLE, Array, Context, Precision
from arraylogchain._inputs.chain import Chain, GuessesFailedError

# Bits of room for sums over rows.
_SPARE = 20

# The forward sweep's step, the backward sweep's, and the one that it took before.
_Steps = tuple[Step, Step, Step | None]
Pullback = Callable[[Array, frozenset[str]], dict[str, Array]]


def marginals(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the posterior probabilities of all states at all steps, [*batch, T, K]."""
    return _posterior("marginals", ctx, chain, workspace)[1]


def expected_transitions(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return expected counts in the shape of the transitions."""
    return _posterior("expected_transitions", ctx, chain, workspace)[2]


def posterior(ctx: Context, chain: Chain, workspace: int) -> tuple[Array, Array, Array | None]:
    """Return log Z [*batch], marginals [*batch, T, K], and expected counts or None."""
    return _posterior("posterior", ctx, chain, workspace)


def _posterior(
    operation: str, ctx: Context, chain: Chain, workspace: int
) -> tuple[Array, Array | None, Array | None]:
    """Return log Z, and what an operation is to return of marginals and expected counts."""
    sums = ChainSums(ctx, chain, as_counts=True)
    if operation != "expected_transitions":
        shape = (*chain.batch, chain.num_steps, chain.num_states)
        sums.potentials = ctx.empty(shape, ctx.result_dtype)
        if chain.lengths is not None:
            sums.potentials[...] = 0.0
    if operation != "marginals" and chain.transitions is not None:
        sums.transitions = zeros_for(ctx, chain, "transitions", workspace)
    if chain.segments > 1:
        total = _add_in_segments(ctx, chain, workspace, sums)
    else:
        total = ctx.empty(chain.batch, ctx.result_dtype)
        for of_tile in _of_tiles(ctx, chain, workspace, total):
            of_tile.add(None, sums)
            del of_tile
    counts = None if sums.transitions is None else ctx.to_result(sums.transitions)
    return total, sums.potentials, counts


def _of_tiles(
    ctx: Context,
    chain: Chain,
    workspace: int,
    total: Array | None,
    keep: bool = False,
) -> Iterator[TilePosterior]:
    """Yield the posteriors of the tiles of a chain, and write log Z if it is wanted.

    Where they do not fit the workspace together, they are let go one by one.
    """
    view = None if total is None else arrange(ctx.xp, chain, total, trailing=0)
    every = chain.final is not None
    found = histories(ctx, chain, workspace, keep, every_entry=every, for_pairs=True)
    for tile, history in found:
        of_tile = TilePosterior(tile, history)
        del history
        if view is not None:
            tile.place(view[(*tile.box, ...)][..., None], of_tile.total)
        yield of_tile
        del of_tile


def _add_in_segments(
    ctx: Context, chain: Chain, workspace: int, sums: ChainSums, g: Array | None = None
) -> Array:
    """Add the gradients, for a cotangent or ones, segments of time side by side; return log Z."""
    xp, cut = ctx.xp, Segments(ctx, chain, workspace)
    guesses = cut.guess(backward=False), cut.guess(backward=True)
    (initial, shift), (final, _) = cut.enter(guesses[0]), cut.enter(guesses[1], backward=True)
    # What segments hand on; what is not known yet is as it was guessed.
    forward, backward = (xp.asarray(guess, copy=True) for guess in guesses)
    whole, unused = (xp.zeros_like(guess[..., :1]) for guess in guesses)
    of_front, of_between, of_within = cut.sums(sums)
    # The rest is for the messages between segments.
    workspace = workspace // 4 * 3
    g_within = None if g is None else xp.broadcast_to(g[..., None], cut.within.batch)
    within = with_ends(cut.within, initial, final)
    for of_tile in _of_tiles(ctx, within, workspace, None):
        tile = of_tile.tile
        place_message(tile, of_tile.history.last, forward, whole)
        factors = cut.factors(forward, guesses[0])
        if factors is None:
            raise GuessesFailedError
        last = of_tile.add(g_within, of_within)
        place_message(tile.reversed(), last, backward, unused)
        del of_tile
    if factors is None or cut.factors(backward, guesses[1], backward=True) is None:
        raise GuessesFailedError
    between = with_ends(cut.between, shifted(xp, cut.first, forward), backward)
    after_front, _ = last_message(ctx, between, workspace, backward=True)
    front = with_ends(cut.front, final=after_front[..., 0, :])
    for part, own, of_part in ((between, of_between, g_within), (front, of_front, g)):
        for of_tile in () if own.is_empty else _of_tiles(ctx, part, workspace, None):
            of_tile.add(of_part, own)
            del of_tile
    return cut.total(forward, whole[..., 0] + shift, factors)


def value_and_pullback(
    ctx: Context, chain: Chain, workspace: int, keep: bool
) -> tuple[Array, Pullback]:
    """Return the logs of the sums over all paths, [*batch], and their pullback.

    Parameters
    ----------
    keep : bool
        Whether every state is kept for the pullback though that takes more than `workspace`, and
        not only one in about sqrt(T).

    Returns
    -------
    value : array [*batch]
    pullback : callable
        Takes a cotangent [*batch] and the names of wanted gradients, of 'potentials',
        'transitions', 'initial' and 'final'. Returns them by name, in the chain's shapes and
        dtypes.
    """
    if chain.segments > 1:
        return _in_segments(ctx, chain, workspace, keep)
    states = chain.num_rows * chain.num_steps * chain.num_states * ctx.precision.itemsize
    out = ctx.empty(chain.batch, ctx.result_dtype)
    kept = list(_of_tiles(ctx, chain, workspace, out, keep or states <= workspace))

    def pullback(cotangent: Array, wanted: frozenset[str]) -> dict[str, Array]:
        sums = _zeros(ctx, chain, workspace, wanted)
        for posterior in kept:
            posterior.add(cotangent, sums)
        return sums.results()

    return out, pullback


def _in_segments(ctx: Context, chain: Chain, workspace: int, keep: bool) -> tuple[Array, Pullback]:
    """Return the value and the pullback of a chain in segments of time; nothing is kept."""
    if chain.final is not None:
        # Segments do not tell final weights from what is handed back to them.
        raise GuessesFailedError

    def pullback(cotangent: Array, wanted: frozenset[str]) -> dict[str, Array]:
        sums = _zeros(ctx, chain, workspace, wanted)
        with suppress(GuessesFailedError):
            _add_in_segments(ctx, chain, workspace, sums, cotangent)
            return sums.results()
        del sums
        _, whole = value_and_pullback(ctx, replace(chain, segments=1), workspace, keep)
        return whole(cotangent, wanted)

    return log_partition(ctx, chain, workspace), pullback


def _zeros(ctx: Context, chain: Chain, workspace: int, wanted: frozenset[str]) -> ChainSums:
    """Return zeros to add the wanted gradients to."""
    return ChainSums(
        ctx, chain, **{name: zeros_for(ctx, chain, name, workspace) for name in wanted}
    )


class TilePosterior:
    """The sweep forward over a tile, kept for the sweeps backward."""

    def __init__(self, tile: Tile, history: History) -> None:
        self.tile, self.ctx, self.history = tile, tile.ctx, history
        self.pieces = history.sweep.options.pieces
        self.total = log_totals(tile, history.last)
        # Memory for one step's products, by precision.
        self._rooms: dict[str, Array] = {}
        self._sizes = 0.0, 0.0  # the least and the largest of cotangents that are not zero

    def add(self, cotangent: Array | None, sums: ChainSums) -> State:
        """Add the gradients for a cotangent [*batch] of log Z, or of ones.

        Returns the last state of the sweep backward.
        """
        proof = {"every_entry": False, "proves_last": self.tile.chain.initial is not None}
        options = Options(self.pieces, for_pairs=True, **proof)
        sweep, own = Sweep(self.tile.reversed(), options), self.ctx.precision
        weigher = _dispatch.for_passes("PosteriorWeigher", self.ctx, own)(self.tile, sums, own)
        g, ahead = self._cotangent(cotangent), None
        xp, sizes = self.ctx.xp, self.ctx.xp.abs(g)
        nonzero = xp.where(sizes == 0, xp.full_like(sizes, math.inf), sizes)
        self._sizes = float(xp.min(nonzero)), float(xp.max(sizes))
        if sums.final is not None:
            self._add_end("final", self.tile.reversed(), self.history.last, g, sums)
        for time, forward in self.history.back():
            steps = forward, sweep.advance(), ahead
            of_step = part_of(g, slice(self.tile.count(time)), self.tile.select_axis)
            weights, slow = self._weigh_at_once(time, steps, of_step, weigher), None
            if weights is None:
                weights, slow = self._weigh(time, steps, of_step, sums)
            if sums.transitions is not None and ahead is not None:
                matrix = sweep.scaled.matrices.at(self.tile.num_steps - 1 - time)
                self._add_pairs(time + 1, weights, ahead, matrix, sums)
            if slow is not None:
                self._add_in_logs(time, steps, slow, of_step, sums)
            ahead = steps[1]
        last = sweep.last()
        if sums.initial is not None:
            self._add_end("initial", self.tile, last, g, sums)
        return last

    def _cotangent(self, cotangent: Array | None) -> Array:
        """Return the cotangents [groups, rows, 1], 0 for sums that are infinite, NaN for NaN."""
        tile, ctx, xp, total = self.tile, self.ctx, self.ctx.xp, self.total
        if cotangent is None:
            g = xp.ones_like(total, dtype=ctx.dtype(ctx.precision))
        else:
            view = arrange(xp, tile.chain, cotangent, trailing=0)[(*tile.box, ...)]
            g = ctx.load(tile.expanded(view[..., None], (1,)), ctx.precision)
        g = xp.where(xp.isinf(total), xp.zeros_like(g), g)
        return xp.where(xp.isnan(total), xp.full_like(g, math.nan), g)

    def _limits(self, precision: Precision) -> tuple[float, float]:
        """Return what sums of a_t b_t, over 1 + max(a_t), and max(a_t) g, over sums, have to keep.

        The former proves them; by the latter what is multiplied for pairs stays in range, whatever
        the weight of its edge.
        """
        size = self.tile.chain.num_states
        most = 2.0 ** (precision.top - pair_ceiling(precision, size) - _SPARE)
        return 2.0 * size * precision.tiny / precision.eps, most

    def _bounds(self, largest: float, precision: Precision) -> tuple[float, float]:
        """Return what proves the sums of all rows, given the largest entry of their states."""
        (lost, most), (least, size) = self._limits(precision), self._sizes
        return max(lost * (1.0 + largest), largest * size / most), least / precision.tiny

    def _weigh_at_once(self, time: int, steps: _Steps, g: Array, weigher: Any) -> Array | None:
        """Add what a step contributes to the potentials' gradient if bounds prove all rows.

        Returns a_t g / Z_t, or None where they do not, and nothing is added.
        """
        (forward, backward, _), precision = steps, self.ctx.precision
        for step in (forward, backward):
            if step.precision is not precision or step.gone is not None:
                return None
        bounds = self._bounds(forward.state.high, precision)
        a, b = forward.state.values, backward.product.values
        axis = self.tile.select_axis
        out = part_of(self._room(precision), slice(int(g.shape[axis])), axis)
        return out if weigher.weigh(time, a, b, g, bounds, out) else None

    def _weigh(
        self, time: int, steps: _Steps, g: Array, sums: ChainSums
    ) -> tuple[Array, Array | None]:
        """Do the same row by row, in float64 where the states' own precision does not do.

        Returns a_t g / Z_t, and which rows, or groups, are not proved and have nothing added.
        """
        ctx, xp, axis = self.ctx, self.ctx.xp, self.tile.select_axis
        forward, backward, _ = steps
        own = max(forward.precision, backward.precision, key=lambda each: each.top)
        for precision in (own,) if own is ctx.widest else (own, ctx.widest):
            a, b = (ctx.load(x.values, precision) for x in (forward.state, backward.product))
            total = xp.vecdot(a, b)[..., None]
            slow = self._unproved(steps, precision, total, a, g)
            if slow is None:
                break
        is_zero = g == 0 if slow is None else slow | (g == 0)
        # Rows that contribute nothing have finite states, but their sum may be zero.
        scale = xp.where(is_zero, xp.zeros_like(g), g / total)
        here = slice(int(g.shape[axis]))
        out = part_of(self._room(precision), here, axis)
        if sums.potentials is not None:
            ctx.apply(xp.multiply, a, b, out=out)
            sums.add_potentials(self.tile.part(here), time, out, scale)
        ctx.apply(xp.multiply, a, scale, out=out)
        return out, None if slow is None else xp.nonzero(xp.any(slow, axis=1 - axis)[..., 0])[0]

    def _room(self, precision: Precision) -> Array:
        """Return memory for the products of a step, the same at each: fresh memory costs time."""
        if precision.name not in self._rooms:
            dtype = self.ctx.dtype(precision)
            self._rooms[precision.name] = self.ctx.empty(self.tile.state_shape, dtype)
        return self._rooms[precision.name]

    def _unproved(
        self, steps: _Steps, precision: Precision, total: Array, a: Array, g: Array
    ) -> Array | None:
        """Return which rows, of those that contribute, are not proved by their scaled states."""
        xp, axis = self.ctx.xp, self.tile.select_axis
        size, largest = xp.abs(g), xp.max(a, axis=-1, keepdims=True)
        lost, most = self._limits(precision)
        proved = (total >= lost * (1.0 + largest)) & (largest * size <= most * total)
        proved = proved & (size >= precision.tiny * total)
        for step in steps[:2]:
            if step.gone is not None:
                proved = proved & ~part_of(step.gone, slice(int(g.shape[axis])), axis)
        slow = ~proved & (g != 0)
        if axis == 0:
            slow = xp.broadcast_to(xp.any(slow, axis=1, keepdims=True), tuple(slow.shape))
        return slow if bool(xp.any(slow)) else None

    def _add_pairs(
        self, i: int, weights: Array, ahead: Step, matrix: Matrix, sums: ChainSums
    ) -> None:
        """Add the weights of pairs of states, or the derivatives with respect to weights.

        The `weights` are those of states at step i - 1; `matrix` is that of the backward sweep,
        which leads from step i to the one before.
        """
        ctx, xp, axis = self.ctx, self.ctx.xp, self.tile.select_axis
        moved = slice(self.tile.count_moves(i))
        precision = DOUBLE if weights.dtype == xp.float64 else SINGLE
        d = ctx.load(ahead.state.values, precision)
        left = xp.matrix_transpose(part_of(weights, moved, axis))
        tile = self.tile.part(moved)
        groups, size, _ = left.shape
        number, is_plain = tile.matrix_number(i), not sums.by_logs and matrix.power is None
        for k in self.pieces.columns(groups, size):
            own = sums.own_pairs(tile, number, (k, slice(size)), d.dtype) if is_plain else None
            if own is not None:
                ctx.apply(xp.matmul, left[:, k, :], d, out=own)
                continue
            pairs = xp.matmul(left[:, k, :], d)
            if sums.by_logs:
                product = pairs * xp.matrix_transpose(matrix.factor(k))
                # Where nothing passes, weights may be infinite.
                is_finite = matrix.most < math.inf
                pairs = product if is_finite else xp.where(pairs == 0, pairs, product)
            elif matrix.power is not None:
                power = ctx.load(matrix.power, precision)
                pairs = bounded(xp, scale_by_powers(ctx, pairs, power, precision), pairs.dtype)
            sums.add_pairs(tile, number, (k, slice(size)), pairs)

    def _add_in_logs(
        self, time: int, steps: _Steps, index: Array, g: Array, sums: ChainSums
    ) -> None:
        """Add what some rows, or groups, contribute at a step, from the logs of their states."""
        ctx, xp, axis = self.ctx, self.ctx.xp, self.tile.select_axis
        (forward, backward, ahead), tile = steps, self.tile.select(index)
        a = forward.in_log_form(self.tile).select(ctx, index, axis)
        b = backward.in_log_form(self.tile, products=True).select(ctx, index, axis)
        total, g = _possible(ctx, a.values + b.values, xp.take(g, index, axis=axis))
        if sums.potentials is not None:
            posterior = xp.exp(a.values + b.values - total) * g
            posterior = xp.where(g == 0, xp.zeros_like(posterior), posterior)
            sums.add_potentials(tile, time, posterior)
        moved = slice(0 if ahead is None else tile.count_moves(time + 1))
        if sums.transitions is None or ahead is None or not moved.stop:
            return
        d = ahead.in_log_form(self.tile).select(ctx, index[moved], axis)
        a, b = (state.part(moved, axis) for state in (a, b))
        total, g = (part_of(x, moved, axis) for x in (total, g))
        tile = tile.part(moved)
        matrix = LogMatrix(ctx, tile.matrix(time + 1), tile.chain.transitions_in_logs)
        # In the scale of b, which is P @ d. Integers cancel first, those of P as well.
        exponent, offset = d.exponent - b.exponent, d.offset - b.offset
        if sums.by_logs:
            exponent, offset = exponent - matrix.power, offset + matrix.shift
        scale = add_scale(-total, exponent, offset) + xp.log(xp.abs(g))
        # Sums over rows do not overflow if each of them has its share of what is left.
        share = 0.5 ** math.ceil(math.log2(a.values.shape[1]))
        weights = matrix if sums.by_logs else None
        for r, j, joint in joint_logs(ctx, a.values + scale, weights, self.pieces):
            pairs = _finite_exp(ctx, joint + d.values[:, r, None, j])
            pairs = xp.where(g[:, r, :, None] == 0, xp.zeros_like(pairs), pairs)
            pairs = xp.sum(pairs * (share * xp.sign(g[:, r, :, None])), axis=1) / share
            number, columns = tile.matrix_number(time + 1), (slice(matrix.given.shape[-2]), j)
            sums.add_pairs(tile, number, columns, bounded(xp, pairs, pairs.dtype))

    def _add_end(self, name: str, tile: Tile, last: State, g: Array, sums: ChainSums) -> None:
        """Add derivatives with respect to what a sweep over the tile starts with.

        `last` is the state of the sweep that comes from the other end.
        """
        ctx, xp, start, d = self.ctx, self.ctx.xp, tile.start(), last.values
        assert start is not None
        if not (tile.start_in_logs or last.in_logs) and start.dtype == d.dtype:
            # Proved from bounds, as a step is.
            total = xp.vecdot(start, d)[..., None]
            least, most = self._bounds(last.high, DOUBLE if d.dtype == xp.float64 else SINGLE)
            if float(xp.min(total)) >= least and float(xp.max(total)) <= most:
                sums.add_end(name, tile, d * (g / total))
                return
        d, start = last.in_log_form(ctx).values, ctx.load(start, ctx.widest)
        logs = start if tile.start_in_logs else xp.log(start)
        top = xp.max(logs, axis=-1, keepdims=True)
        top = xp.where(xp.isfinite(top), top, xp.zeros_like(top))
        total, g = _possible(ctx, logs - top + d, g)
        weights = _finite_exp(ctx, d - total - top + (logs if tile.start_in_logs else 0.0))
        weights = xp.where(g == 0, xp.zeros_like(weights), weights * g)
        sums.add_end(name, tile, bounded(xp, weights, weights.dtype))


def _possible(ctx: Context, logs: Array, g: Array) -> tuple[Array, Array]:
    """Return the logs of sums along the last axis, and cotangents; both 0 where there is no sum."""
    xp, total, g = ctx.xp, log_sum(ctx, logs), ctx.load(g, ctx.widest)
    nothing = (total == -math.inf) | (g == 0)
    return xp.where(nothing, xp.zeros_like(total), total), xp.where(nothing, xp.zeros_like(g), g)


def _finite_exp(ctx: Context, logs: Array) -> Array:
    """Return exponentials, the largest number where they would exceed it."""
    limit = math.log(2.0) * (ctx.widest.top + 1) - ctx.widest.eps * 1024
    return ctx.xp.exp(ctx.xp.clip(logs, max=limit))
