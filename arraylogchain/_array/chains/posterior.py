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
less than ``2 K tiny (1 + max(a_t))`` of Z_t. Rows where that may be more than eps of it,
because the states that weigh most in one direction weigh next to nothing in the other, are taken
from logarithms, as rows are whose states are in log form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from arraylogchain._array.chains.accumulate import ChainSums, bounded, zeros_for
from arraylogchain._array.chains.exponentials import Factors
from arraylogchain._array.chains.logs import in_widest, log_product
from arraylogchain._array.chains.matrices import Matrix, prepare
from arraylogchain._array.chains.plans import Pieces, cut_chain
from arraylogchain._array.chains.scaled import Options, ScaledStepper, pair_ceiling
from arraylogchain._array.chains.states import State, add_scale, log_sum, scale_by_powers
from arraylogchain._array.chains.sweep import History, Part, Sweep, logs_of_all, proving_levels
from arraylogchain._array.chains.tiles import Tile, arrange, tiles
from arraylogchain._array.chains.values import log_total, write_totals
from arraylogchain._context import Array, Context
from arraylogchain._fold import chunks
from arraylogchain._inputs.chain import Chain

# Bits of room for sums over rows.
_SPARE = 20
# Sums that are so many eps from one need no division.
_NEAR = 16

Pullback = Callable[[Array, frozenset[str]], dict[str, Array]]


def marginals(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the posterior probabilities of all states at all steps, [*batch, T, K]."""
    out = ctx.empty((*chain.batch, chain.num_steps, chain.num_states), ctx.result_dtype)
    pieces = cut_chain(chain, workspace, history=True)
    store = _store(ctx, chain, pieces, out)
    if store is None:
        out[...] = 0.0
    _add_all(ctx, chain, workspace, pieces, ChainSums(ctx, chain, potentials=out), store)
    return out


def expected_transitions(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return expected counts in the shape of the transitions."""
    zeros = zeros_for(ctx, chain, "transitions", workspace)
    sums = ChainSums(ctx, chain, transitions=zeros, as_counts=True)
    _add_all(ctx, chain, workspace, cut_chain(chain, workspace, history=True), sums)
    return ctx.to_result(sums.transitions)


def posterior(ctx: Context, chain: Chain, workspace: int) -> tuple[Array, Array, Array | None]:
    """Return log Z [*batch], marginals [*batch, T, K], and expected counts or None."""
    totals = ctx.empty(chain.batch, ctx.result_dtype)
    out = ctx.empty((*chain.batch, chain.num_steps, chain.num_states), ctx.result_dtype)
    pieces = cut_chain(chain, workspace, history=True)
    store = _store(ctx, chain, pieces, out)
    if store is None:
        out[...] = 0.0
    sums = ChainSums(ctx, chain, potentials=out, as_counts=True)
    if chain.transitions is not None:
        sums.transitions = zeros_for(ctx, chain, "transitions", workspace)
    _add_all(ctx, chain, workspace, pieces, sums, store, totals)
    counts = sums.transitions
    return totals, out, None if counts is None else ctx.to_result(counts)


def _add_all(
    ctx: Context,
    chain: Chain,
    workspace: int,
    pieces: Pieces,
    sums: ChainSums,
    store: Array | None = None,
    totals: Array | None = None,
) -> None:
    """Add the posterior of all rows to sums, and write log Z to `totals` if they are given."""
    view = None if totals is None else arrange(ctx.xp, chain, totals, trailing=0)
    for tile in tiles(ctx, chain, pieces.groups, pieces.rows):
        own = TilePosterior(tile, pieces, workspace, store)
        if view is not None:
            write_totals(tile, own.history.last, view[(*tile.box, ...)])
        own.add(None, sums, own.take_factors())
        del own  # before the states of the next one are kept


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
    xp = ctx.xp
    states = chain.num_rows * chain.num_steps * chain.num_states * ctx.precision.itemsize
    keep = keep or states <= workspace
    pieces = cut_chain(chain, workspace, history=True, keep=keep)
    store = _store(ctx, chain, pieces) if keep else None
    out = ctx.empty(chain.batch, ctx.result_dtype)
    view = arrange(xp, chain, out, trailing=0)
    kept = []
    for tile in tiles(ctx, chain, pieces.groups, pieces.rows):
        kept.append(TilePosterior(tile, pieces, workspace, store))
        write_totals(tile, kept[-1].history.last, view[(*tile.box, ...)])
    del store

    def pullback(cotangent: Array, wanted: frozenset[str]) -> dict[str, Array]:
        sums = ChainSums(ctx, chain)
        # Taken before anything is written: what fails midway leaves nothing behind.
        factors = kept[0].take_factors() if "potentials" in wanted and kept else None
        for name in wanted:
            if name == "potentials" and factors is not None:
                sums.potentials = xp.reshape(factors.values, tuple(chain.potentials.shape))
            else:
                setattr(sums, name, zeros_for(ctx, chain, name, workspace))
        for posterior in kept:
            posterior.add(cotangent, sums, factors)
        return sums.results()

    return out, pullback


def _store(ctx: Context, chain: Chain, pieces: Pieces, out: Array | None = None) -> Array | None:
    """Return memory for the exponentials of all potentials, [groups, rows, T, K], that of `out`.

    Their gradient takes its place later, so they have to be potentials of the whole batch, in the
    precision of the computation, and of a single tile whose states are all kept: where states are
    computed again, so are exponentials, and they would write over gradients.
    """
    x, axes = chain.potentials, (*chain.group_axes, *chain.row_axes)
    dtype = ctx.dtype(ctx.precision)
    is_whole = (pieces.groups, pieces.rows) == chain.sizes and chain.lengths is None
    is_whole = is_whole and pieces.block >= chain.num_steps
    fits = tuple(x.shape[:-2]) == chain.batch and x.dtype == dtype == ctx.result_dtype
    if not (ctx.has_out and is_whole and fits and axes == tuple(range(len(chain.batch)))):
        return None
    shape = (*chain.sizes, chain.num_steps, chain.num_states)
    return ctx.empty(shape, dtype) if out is None else ctx.xp.reshape(out, shape)


@dataclass(slots=True)
class _Step:
    """One step of the way back: the states of both directions, by parts.

    `ahead` holds those of the next step, after its potentials; None at the last one.
    """

    time: int
    forward: list[Part]
    backward: list[Part]
    ahead: list[Part] | None


class TilePosterior:
    """The sweep forward over a tile, kept for the sweeps backward.

    Parameters
    ----------
    tile : Tile
    pieces : Pieces
    workspace : int
    store : array, optional
        Where the exponentials of the potentials are kept.
    """

    def __init__(
        self, tile: Tile, pieces: Pieces, workspace: int, store: Array | None = None
    ) -> None:
        self.tile, self.ctx = tile, tile.ctx
        self.wide, self.workspace = in_widest(tile.ctx), workspace // 4
        self.ceiling = pair_ceiling(tile.ctx.precision, tile.chain.num_states)
        self.options = Options(
            every_entry=tile.chain.final is not None,
            for_pairs=True,
            together=pieces.together,
            panel=pieces.panel,
            workspace=workspace // 4,
        )
        self._of_step: tuple[Matrix, int] | None = None
        self._products: Array | None = None
        self._least, self._most = 0.0, math.inf  # bounds on the sizes of cotangents
        self._are_ones = False
        sweep = Sweep(tile, proving_levels(tile.ctx, self.options, store))
        self.history = History(sweep, pieces.block)
        stepper = sweep.parts[0].stepper
        assert isinstance(stepper, ScaledStepper)
        self._factors = stepper.exponentials.all_factors()
        last = self.history.last
        state = last[0].state if len(last) == 1 else logs_of_all(tile, last)
        assert state is not None
        self._total = log_total(tile, state)

    def take_factors(self) -> Factors | None:
        """Hand over the kept exponentials, which from then on are computed again."""
        factors, self._factors = self._factors, None
        return factors

    def add(self, cotangent: Array | None, sums: ChainSums, factors: Factors | None = None) -> None:
        """Add the gradients for a cotangent [*batch] of log Z, or of ones.

        `factors` may lie in the memory of ``sums.potentials``: the exponentials of each step are
        read before gradients take their place.
        """
        tile, xp = self.tile, self.ctx.xp
        backward = replace(
            self.options,
            keeps_products=True,
            every_entry=False,
            proves_last=tile.chain.initial is not None,
        )
        sweep = Sweep(tile.reversed(), proving_levels(self.ctx, backward))
        if factors is not None:
            stepper = sweep.parts[0].stepper
            assert isinstance(stepper, ScaledStepper)
            stepper.exponentials.known = factors
        g = self._cotangent(cotangent)
        sizes = xp.abs(g)
        self._least, self._most = float(xp.min(sizes)), float(xp.max(sizes))
        self._are_ones = bool(xp.all(g == 1))
        if sums.final is not None:
            self._add_end("final", tile.reversed(), self.history.last, g, sums)
        ahead: list[Part] | None = None
        for time, forward in self.history.back():
            now = sweep.advance()
            self._add_step(_Step(time, forward, now, ahead), g, sums)
            ahead = [replace(part, stepper=None) for part in now]
        assert ahead is not None
        if sums.initial is not None:
            self._add_end("initial", tile, ahead, g, sums)

    def _cotangent(self, cotangent: Array | None) -> Array:
        """Return the cotangents [groups, rows, 1], 0 for sums that are infinite, NaN for NaN."""
        tile, ctx, xp, total = self.tile, self.ctx, self.ctx.xp, self._total
        if cotangent is None:
            g = xp.ones_like(total, dtype=ctx.dtype(ctx.precision))
        else:
            view = arrange(xp, tile.chain, cotangent, trailing=0)[(*tile.box, ...)]
            g = ctx.load(tile.expanded(view[..., None], (1,)), ctx.precision)
        g = xp.where(xp.isinf(total), xp.zeros_like(g), g)
        return xp.where(xp.isnan(total), xp.full_like(g, math.nan), g)

    def _add_step(self, step: _Step, g: Array, sums: ChainSums) -> None:
        ctx, xp, tile = self.ctx, self.ctx.xp, self.tile
        a, b = step.forward[0].state, step.backward[0].product
        assert a is not None
        assert b is not None
        room = sums.room_of_step(tile, step.time, a.values)
        out = self._room(a.values) if room is None else room
        if sums.potentials is None:
            total = xp.vecdot(a.values, b.values)[..., None]
        else:
            ctx.apply(xp.multiply, a.values, b.values, out=out)
            total = xp.sum(out, axis=-1, keepdims=True)
        real = tile.has_step(step.time)
        g = g if real is None else xp.where(real, g, xp.zeros_like(g))
        slow = self._unproved(step, total, a, g)
        scale = self._scale(step, total, g, slow)
        if sums.potentials is not None:
            if scale is not None:
                ctx.apply(xp.multiply, out, scale, out=out)
            if room is None:
                sums.add_potentials(tile, step.time, out)
        if sums.transitions is not None and step.ahead is not None:
            self._add_pairs(step, scale, sums)
        if slow is not None and bool(xp.any(slow)):
            lanes = xp.any(slow, axis=1 - tile.select_axis)[..., 0]
            self._add_in_logs(step, xp.nonzero(lanes)[0], g, sums)

    def _scale(self, step: _Step, total: Array, g: Array, slow: Array | None) -> Array | None:
        """Return what makes weights of a * b, [groups, rows, 1]; None for ones.

        Where it is none of these, the state of the sweep backward is divided by the sum: until a
        state is rescaled, the sums of the steps before are one then, but for rounding.
        """
        xp, ctx = self.ctx.xp, self.ctx
        if slow is not None:
            # Rows that contribute nothing have finite states, but their sum may be zero.
            nothing = (g == 0) | slow
            zero, one = xp.zeros_like(g), xp.ones_like(g)
            return xp.where(nothing, zero, g / xp.where(nothing, one, total))
        if self._are_ones and self.tile.lengths is None:
            if float(xp.max(xp.abs(total - 1.0))) <= _NEAR * ctx.precision.eps:
                return None
            state = step.backward[0].state
            assert state is not None
            ctx.apply(xp.multiply, state.values, 1.0 / total, out=state.values)
            state.low, state.high = 0.0, math.inf
        return g / total

    def _room(self, like: Array) -> Array:
        """Return memory for one step's products, the same at each: fresh memory costs time."""
        if self._products is None:
            self._products = self.ctx.empty(tuple(like.shape), like.dtype)
        return self._products

    def _unproved(self, step: _Step, total: Array, a: State, g: Array) -> Array | None:
        """Tell which rows are not proved by their scaled states; None if all of them are."""
        xp, precision, size = self.ctx.xp, self.ctx.precision, self.tile.chain.num_states
        lost = 2.0 * size * precision.tiny / precision.eps
        # What is multiplied for pairs stays in range, whatever the weight of its edge.
        limit = 2.0 ** (precision.top - self.ceiling - _SPARE)
        gone = [p.gone for p in (step.forward[0], step.backward[0]) if p.gone is not None]
        low, high = float(xp.min(total)), float(xp.max(total))
        in_range = self._least >= precision.tiny * high and a.high * self._most <= limit * low
        if not gone and in_range and low >= lost * (1.0 + a.high):
            return None
        largest, size_of_g = xp.max(a.values, axis=-1, keepdims=True), xp.abs(g)
        proved = (total >= lost * (1.0 + largest)) & (largest * size_of_g <= limit * total)
        proved = proved & (size_of_g >= precision.tiny * total)
        for rows in gone:
            proved = proved & ~rows
        slow = ~proved & (g != 0)
        if self.tile.select_axis == 0:
            slow = xp.broadcast_to(xp.any(slow, axis=1, keepdims=True), tuple(slow.shape))
        return slow

    def _add_pairs(self, step: _Step, scale: Array | None, sums: ChainSums) -> None:
        """Add the weights of pairs of states, or the derivatives with respect to weights."""
        ctx, xp, tile = self.ctx, self.ctx.xp, self.tile
        assert step.ahead is not None
        a, d = step.forward[0].state, step.ahead[0].state
        assert a is not None
        assert d is not None
        moves = tile.moves(step.time + 1)
        if moves is not None and scale is not None:
            scale = xp.where(moves, scale, xp.zeros_like(scale))
        matrix, number = self._matrix(step.time + 1)
        left = a.values
        if scale is not None:
            left = self._room(a.values)
            ctx.apply(xp.multiply, a.values, scale, out=left)
        left = xp.matrix_transpose(left)
        for j in self._columns(int(left.shape[0])):
            is_plain = matrix.power is None and matrix.most < math.inf
            room = sums.room_of_pairs(tile, number, j, left) if is_plain else None
            if room is not None:
                ctx.apply(xp.matmul, left, d.values[:, :, j], out=room)
                if sums.by_logs:
                    ctx.apply(xp.multiply, room, matrix.factor(j), out=room)
                continue
            part = xp.matmul(left, d.values[:, :, j])
            if sums.by_logs:
                # Where nothing passes, weights may be infinite.
                part = xp.where(part == 0, part, part * matrix.factor(j))
            elif matrix.power is not None:
                part = bounded(xp, part, matrix.precision)
                part = scale_by_powers(ctx, part, matrix.power, matrix.precision)
            sums.add_pairs(tile, number, j, part)

    def _columns(self, groups: int) -> Iterator[slice]:
        """Yield the columns of pairs of states that are in memory at a time."""
        size = self.tile.chain.num_states
        return chunks(size, max(1, self.options.panel // (groups * size)))

    def _matrix(self, i: int) -> tuple[Matrix, int]:
        """Return the matrices that lead to a step, and their number."""
        tile, number = self.tile, self.tile.matrix_number(i)
        if self._of_step is None or self._of_step[1] != number or tile.masks_matrices:
            in_logs, precision = tile.chain.transitions_in_logs, self.ctx.precision
            given = tile.matrix(i)
            matrix = prepare(self.ctx, given, in_logs, precision, self.options.panel)
            self._of_step = matrix, number
        return self._of_step

    def _add_in_logs(self, step: _Step, index: Array, g: Array, sums: ChainSums) -> None:
        """Add what some rows, or groups, contribute at a step, from the logs of their states."""
        ctx, xp, axis = self.ctx, self.ctx.xp, self.tile.select_axis
        tile = self.tile.select(index)
        g = ctx.load(xp.take(g, index, axis=axis), ctx.widest)
        a = logs_of_all(self.tile, step.forward).select(ctx, index, axis)
        b = logs_of_all(self.tile, step.backward, products=True).select(ctx, index, axis)
        total = log_sum(ctx, a.values + b.values)
        real = tile.has_step(step.time)
        nothing = (total == -math.inf) | (g == 0)
        total = xp.where(nothing, xp.zeros_like(total), total)
        weights = xp.where(nothing, xp.zeros_like(g), g)
        own = weights if real is None else xp.where(real, weights, xp.zeros_like(weights))
        posterior = xp.exp(a.values + b.values - total) * own
        posterior = xp.where(own == 0, xp.zeros_like(posterior), posterior)
        if sums.potentials is not None:
            sums.add_potentials(tile, step.time, posterior)
        moves = tile.moves(step.time + 1) if step.ahead is not None else None
        if moves is not None:
            weights = xp.where(moves, weights, xp.zeros_like(weights))
        if sums.transitions is None or step.ahead is None:
            return
        d = logs_of_all(self.tile, step.ahead).select(ctx, index, axis)
        in_logs = tile.chain.transitions_in_logs
        matrix = Matrix(ctx, tile.matrix(step.time + 1), in_logs, ctx.widest, [])
        # In the scale of b, which is P @ d. Integers cancel first, those of P's logs as well.
        offset = d.offset - b.offset + matrix.logs(slice(0, 1), ctx.widest)[1]
        scale = add_scale(-total, d.exponent - b.exponent, offset)
        number = tile.matrix_number(step.time + 1)
        self._add_pairs_in_logs(tile, matrix, number, a.values + scale, d.values, weights, sums)

    def _add_pairs_in_logs(
        self,
        tile: Tile,
        matrix: Matrix,
        number: int,
        before: Array,
        ahead: Array,
        g: Array,
        sums: ChainSums,
    ) -> None:
        """Add sums over rows of g exp(before_k + ahead_j), with or without the matrix's weights."""
        ctx, xp, wide = self.ctx, self.ctx.xp, self.wide
        groups = int(matrix.given.shape[0])
        limit = math.log(2.0) * (ctx.widest.top + 1) - ctx.widest.eps * 1024
        for sign in (1.0, -1.0):
            chosen = sign * g > 0
            # A NaN is neither; it goes with the positive ones.
            chosen = chosen | xp.isnan(g) if sign > 0 else chosen
            if not bool(xp.any(chosen)):
                continue
            logs = before + xp.log(xp.where(chosen, sign * g, xp.ones_like(g)))
            logs = xp.where(chosen, logs, xp.full_like(logs, -math.inf))
            left = xp.matrix_transpose(logs)
            for j in self._columns(groups):
                pairs = log_product(wide, left, ahead[:, :, j], self.workspace)
                if sums.by_logs:
                    edges, _ = matrix.logs(j, ctx.widest)
                    pairs = pairs + edges
                pairs = sign * xp.exp(xp.clip(pairs, max=limit))
                sums.add_pairs(tile, number, j, pairs)

    def _add_end(self, name: str, tile: Tile, found: list[Part], g: Array, sums: ChainSums) -> None:
        """Add derivatives with respect to what a sweep over the tile starts with.

        `found` is the last state of the sweep that comes from the other end.
        """
        ctx, xp = self.ctx, self.ctx.xp
        d = logs_of_all(tile.reversed(), found).values
        start = tile.start()
        assert start is not None
        logs, shift = _logs_of(ctx, start, tile.start_in_logs)
        total = log_sum(ctx, logs + d)
        nothing = (total == -math.inf) | (g == 0)
        relative = d - xp.where(nothing, xp.zeros_like(total), total)
        limit = math.log(2.0) * (ctx.widest.top + 1) - ctx.widest.eps * 1024
        if tile.start_in_logs:
            weights = xp.exp(relative + logs)
        else:
            weights = xp.exp(xp.clip(relative - shift, max=limit))
        weights = xp.where(nothing, xp.zeros_like(weights), weights * ctx.load(g, ctx.widest))
        sums.add_end(name, tile, bounded(xp, weights, ctx.widest))


def _logs_of(ctx: Context, x: Array, in_logs: bool) -> tuple[Array, Array]:
    """Return logs of weights [groups, rows, K] less a number of each row, and that number."""
    xp = ctx.xp
    x = ctx.load(x, ctx.widest)
    logs = x if in_logs else xp.log(x)
    top = xp.max(logs, axis=-1, keepdims=True)
    top = xp.where(xp.isfinite(top), top, xp.zeros_like(top))
    return logs - top, top
