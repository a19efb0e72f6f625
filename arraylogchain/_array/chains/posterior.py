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
from arraylogchain._array.chains.logs import in_widest, log_product
from arraylogchain._array.chains.matrices import Matrices, Matrix
from arraylogchain._array.chains.plans import Pieces, cut_chain
from arraylogchain._array.chains.scaled import Options, pair_ceiling
from arraylogchain._array.chains.states import State, add_scale, log_sum, part_of, scale_by_powers
from arraylogchain._array.chains.sweep import History, Part, Sweep, logs_of_all, proving_levels
from arraylogchain._array.chains.tiles import Tile, arrange, tiles
from arraylogchain._array.chains.time_parallel import Cut, cut_in_segments
from arraylogchain._array.chains.values import log_totals
from arraylogchain._context import Array, Context
from arraylogchain._fold import chunks
from arraylogchain._inputs.chain import Chain

# Bits of room for sums over rows.
_SPARE = 20

Pullback = Callable[[Array, frozenset[str]], dict[str, Array]]


def marginals(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return the posterior probabilities of all states at all steps, [*batch, T, K]."""
    out = ctx.empty((*chain.batch, chain.num_steps, chain.num_states), ctx.result_dtype)
    if chain.lengths is not None:
        out[...] = 0.0
    sums = ChainSums(ctx, chain, potentials=out)
    found = cut_in_segments("marginals", ctx, chain, workspace)
    _add_all(ctx, chain if found is None else found[1], workspace, sums)
    return out


def expected_transitions(ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return expected counts in the shape of the transitions."""
    zeros = zeros_for(ctx, chain, "transitions", workspace)
    sums = ChainSums(ctx, chain, transitions=zeros, as_counts=True)
    found = cut_in_segments("expected_transitions", ctx, chain, workspace)
    _add_all(ctx, chain if found is None else found[1], workspace, sums)
    return ctx.to_result(sums.transitions)


def posterior(ctx: Context, chain: Chain, workspace: int) -> tuple[Array, Array, Array | None]:
    """Return log Z [*batch], marginals [*batch, T, K], and expected counts or None."""
    out = ctx.empty((*chain.batch, chain.num_steps, chain.num_states), ctx.result_dtype)
    if chain.lengths is not None:
        out[...] = 0.0
    sums = ChainSums(ctx, chain, potentials=out, as_counts=True)
    if chain.transitions is not None:
        sums.transitions = zeros_for(ctx, chain, "transitions", workspace)
    found = cut_in_segments("posterior", ctx, chain, workspace)
    totals = ctx.empty(chain.batch, ctx.result_dtype) if found is None else found[0]
    if found is None:
        _add_all(ctx, chain, workspace, sums, totals=totals)
    else:
        _add_all(ctx, found[1], workspace, sums)
    counts = sums.transitions
    return totals, out, None if counts is None else ctx.to_result(counts)


def _add_all(
    ctx: Context,
    chain: Chain | Cut,
    workspace: int,
    sums: ChainSums,
    g: Array | None = None,
    totals: Array | None = None,
) -> None:
    """Add the gradients for a cotangent [*batch] of log Z, or of ones; write log Z if wanted."""
    if isinstance(chain, Cut):
        for part, own in zip(chain.chains, chain.sums(sums), strict=True):
            of_part = g
            if g is not None and len(part.batch) > g.ndim:
                of_part = ctx.xp.broadcast_to(g[..., None], part.batch)
            # The rest is for the messages between segments.
            _add_all(ctx, part, workspace // 4 * 3, own, of_part)
        return
    if sums.is_empty:
        return
    pieces = cut_chain(chain, workspace, history=True)
    view = None if totals is None else arrange(ctx.xp, chain, totals, trailing=0)
    for tile in tiles(ctx, chain, pieces.groups, pieces.rows):
        of_tile = TilePosterior(tile, pieces, workspace)
        if view is not None:
            tile.place(view[(*tile.box, ...)][..., None], of_tile.total)
        of_tile.add(g, sums)
        del of_tile  # before the states of the next one are kept


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
    kept: list[TilePosterior] = []
    found = cut_in_segments("value_and_pullback", ctx, chain, workspace)
    if found is not None:
        out, cut = found
    else:
        states = chain.num_rows * chain.num_steps * chain.num_states * ctx.precision.itemsize
        keep = keep or states <= workspace
        pieces, cut = cut_chain(chain, workspace, history=True, keep=keep), None
        out = ctx.empty(chain.batch, ctx.result_dtype)
        view = arrange(ctx.xp, chain, out, trailing=0)
        for tile in tiles(ctx, chain, pieces.groups, pieces.rows):
            kept.append(TilePosterior(tile, pieces, workspace))
            tile.place(view[(*tile.box, ...)][..., None], kept[-1].total)

    def pullback(cotangent: Array, wanted: frozenset[str]) -> dict[str, Array]:
        sums = ChainSums(ctx, chain)
        for name in wanted:
            setattr(sums, name, zeros_for(ctx, chain, name, workspace))
        if cut is not None:
            _add_all(ctx, cut, workspace, sums, cotangent)
        for posterior in kept:
            posterior.add(cotangent, sums)
        return sums.results()

    return out, pullback


@dataclass(slots=True)
class _Step:
    """One step of the backward pass: the states of both directions, by parts.

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
    """

    def __init__(self, tile: Tile, pieces: Pieces, workspace: int) -> None:
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
        self.matrices = Matrices(tile, tile.ctx.precision, pieces.panel)
        # Memory for one step's products, the same at each: fresh memory costs time.
        self._room = tile.ctx.empty(tile.state_shape, tile.ctx.dtype(tile.ctx.precision))
        self.history = History(Sweep(tile, proving_levels(tile.ctx, self.options)), pieces.block)
        self.total = log_totals(tile, self.history.last)

    def add(self, cotangent: Array | None, sums: ChainSums) -> None:
        """Add the gradients for a cotangent [*batch] of log Z, or of ones."""
        backward = replace(
            self.options,
            keeps_products=True,
            every_entry=False,
            proves_last=self.tile.chain.initial is not None,
        )
        sweep = Sweep(self.tile.reversed(), proving_levels(self.ctx, backward))
        g = self._cotangent(cotangent)
        if sums.final is not None:
            self._add_end("final", self.tile.reversed(), self.history.last, g, sums)
        ahead: list[Part] | None = None
        for time, forward in self.history.back():
            now = sweep.advance()
            self._add_step(_Step(time, forward, now, ahead), g, sums)
            ahead = [replace(part, stepper=None) for part in now]
        assert ahead is not None
        if sums.initial is not None:
            self._add_end("initial", self.tile, ahead, g, sums)

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

    def _add_step(self, step: _Step, g: Array, sums: ChainSums) -> None:
        ctx, xp, axis = self.ctx, self.ctx.xp, self.tile.select_axis
        here = slice(self.tile.count(step.time))
        a, b = step.forward[0].state, step.backward[0].product
        assert a is not None
        assert b is not None
        a, b, g = a.part(here, axis), b.part(here, axis), part_of(g, here, axis)
        out = part_of(self._room, here, axis)
        if sums.potentials is None:
            total = xp.vecdot(a.values, b.values)[..., None]
        else:
            ctx.apply(xp.multiply, a.values, b.values, out=out)
            total = xp.sum(out, axis=-1, keepdims=True)
        slow = self._unproved(step, total, a, g)
        # Rows that contribute nothing have finite states, but their sum may be zero.
        scale = xp.where(slow | (g == 0), xp.zeros_like(g), g / total)
        if sums.potentials is not None:
            ctx.apply(xp.multiply, out, scale, out=out)
            sums.add_potentials(self.tile.part(here), step.time, out, add=False)
        if sums.transitions is not None and step.ahead is not None:
            self._add_pairs(step, scale, sums)
        if bool(xp.any(slow)):
            (index,) = xp.nonzero(xp.any(slow, axis=1 - axis)[..., 0])
            self._add_in_logs(step, index, g, sums)

    def _unproved(self, step: _Step, total: Array, a: State, g: Array) -> Array:
        """Tell which rows, of those that contribute, are not proved by their scaled states."""
        xp, precision, size = self.ctx.xp, self.ctx.precision, self.tile.chain.num_states
        lost = 2.0 * size * precision.tiny / precision.eps
        # What is multiplied for pairs stays in range, whatever the weight of its edge.
        limit = 2.0 ** (precision.top - self.ceiling - _SPARE)
        size_of_g, axis = xp.abs(g), self.tile.select_axis

        def are_proved(largest: Array | float) -> Array:
            return (total >= lost * (1.0 + largest)) & (largest * size_of_g <= limit * total)

        proved = are_proved(a.high)
        if not bool(xp.all(proved)):
            proved = are_proved(xp.max(a.values, axis=-1, keepdims=True))
        proved = proved & (size_of_g >= precision.tiny * total)
        for part in (step.forward[0], step.backward[0]):
            if part.gone is not None:
                proved = proved & ~part_of(part.gone, slice(int(g.shape[axis])), axis)
        slow = ~proved & (g != 0)
        if axis == 0:
            slow = xp.broadcast_to(xp.any(slow, axis=1, keepdims=True), tuple(slow.shape))
        return slow

    def _add_pairs(self, step: _Step, scale: Array, sums: ChainSums) -> None:
        """Add the weights of pairs of states, or the derivatives with respect to weights."""
        ctx, xp, axis = self.ctx, self.ctx.xp, self.tile.select_axis
        moved = slice(self.tile.count_moves(step.time + 1))
        assert step.ahead is not None
        a, d = step.forward[0].state, step.ahead[0].state
        assert a is not None
        assert d is not None
        left = part_of(self._room, moved, axis)
        a_values, d_values = (part_of(state.values, moved, axis) for state in (a, d))
        ctx.apply(xp.multiply, a_values, part_of(scale, moved, axis), out=left)
        left = xp.matrix_transpose(left)
        tile, matrix = self.tile.part(moved), self.matrices.at(step.time + 1)
        for j in self._columns(int(left.shape[0])):
            pairs = xp.matmul(left, d_values[:, :, j])
            if sums.by_logs:
                # Where nothing passes, weights may be infinite.
                pairs = xp.where(pairs == 0, pairs, pairs * matrix.factor(j))
            elif matrix.power is not None:
                pairs = bounded(xp, pairs, matrix.precision)
                pairs = scale_by_powers(ctx, pairs, matrix.power, matrix.precision)
            sums.add_pairs(tile, tile.matrix_number(step.time + 1), j, pairs)

    def _columns(self, groups: int) -> Iterator[slice]:
        """Yield the columns of pairs of states that are in memory at a time."""
        size = self.tile.chain.num_states
        return chunks(size, max(1, self.options.panel // (groups * size)))

    def _add_in_logs(self, step: _Step, index: Array, g: Array, sums: ChainSums) -> None:
        """Add what some rows, or groups, contribute at a step, from the logs of their states."""
        ctx, xp, axis = self.ctx, self.ctx.xp, self.tile.select_axis
        tile = self.tile.select(index)
        g = ctx.load(xp.take(g, index, axis=axis), ctx.widest)
        a = logs_of_all(self.tile, step.forward).select(ctx, index, axis)
        b = logs_of_all(self.tile, step.backward, products=True).select(ctx, index, axis)
        total = log_sum(ctx, a.values + b.values)
        nothing = (total == -math.inf) | (g == 0)
        total = xp.where(nothing, xp.zeros_like(total), total)
        g = xp.where(nothing, xp.zeros_like(g), g)
        if sums.potentials is not None:
            posterior = xp.exp(a.values + b.values - total) * g
            posterior = xp.where(nothing, xp.zeros_like(posterior), posterior)
            sums.add_potentials(tile, step.time, posterior)
        moved = slice(0 if step.ahead is None else tile.count_moves(step.time + 1))
        if sums.transitions is None or step.ahead is None or not moved.stop:
            return
        d = logs_of_all(self.tile, step.ahead).select(ctx, index, axis)
        a, b, d = (state.part(moved, axis) for state in (a, b, d))
        total, g = (part_of(x, moved, axis) for x in (total, g))
        in_logs, tile = tile.chain.transitions_in_logs, tile.part(moved)
        matrix = Matrix(ctx, tile.matrix(step.time + 1), in_logs, ctx.widest, [])
        # In the scale of b, which is P @ d. Integers cancel first, those of P's logs as well.
        offset = d.offset - b.offset + matrix.logs(slice(0, 1), ctx.widest)[1]
        scale = add_scale(-total, d.exponent - b.exponent, offset)
        number = tile.matrix_number(step.time + 1)
        self._add_pairs_in_logs(tile, matrix, number, a.values + scale, d.values, g, sums)

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
