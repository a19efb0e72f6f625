"""Steps of a recursion on scaled states, each of which proves itself.

Let u be a row of the state before a step, P its matrix and E = exp(potentials - shift) its factors.
What underflow may cost entry j of the new state v = (u @ P) * E, before E is multiplied:

    products u_k P_kj below tiny           at most tiny each, K tiny in all
    factors P_kj below tiny, if lossy      at most tiny max(u) each, K tiny max(u) in all
    a factor E_j below tiny                at most tiny (u @ P)_j; it is set to zero

*Every entry right.* An entry ``v_j >= K tiny (1 + max(u) if lossy) max(E) / eps`` lost less than
one eps. One below that threshold is right only if it is exactly zero, which the support of P tells.

*Every path sum right.* A sum over paths is v @ beta, with nonnegative weights beta = P' @ w of the
states to come, and if P' has no zero, entries of beta lie within the ratio `Matrix.spread` of each
other. What the row lost, at most `loss` in each entry, then changes the sum by at most
K loss spread / sum(v) of itself. That is below eps / 4 for nearly all rows, however far apart their
entries, and so rows with entries below the threshold are proved just as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from arraylogchain._array.chains.exponentials import Exponentials
from arraylogchain._array.chains.matrices import Matrices
from arraylogchain._array.chains.plans import Pieces
from arraylogchain._array.chains.states import State, added, part_of, power_to, scale_by_powers
from arraylogchain._array.chains.tiles import Tile
from arraylogchain._context import Array, Precision, whole_maximum

# No row's largest entry is left above 2**ceiling: up to the largest number there is room for what
# a step can multiply it by, 2**13 entries, a matrix of LARGEST and exp(_NARROW).
_CEILING = {"float32": 80, "float64": 710}
# Rescaled rows have room for a few steps before they meet the ceiling.
_ROOM = 16
# Rows are rescaled before their smallest entry falls below this, if that helps.
_FLOOR = {"float32": 2.0**-60, "float64": 2.0**-700}


@dataclass(frozen=True, slots=True)
class Options:
    """What steps have to prove, and what they may take.

    Attributes
    ----------
    pieces : Pieces
    every_entry : bool
        Whether every entry has to be right, or only the sums over whole paths.
    keeps_products : bool
        Whether the product before potentials is wanted as well, in memory of its own.
    every_product : bool
        Whether every entry of products has to be right as well; they may be rescaled.
    proves_last : bool
        Whether every entry has to be right at the last step, though not before.
    for_pairs : bool
        Whether states of both directions are multiplied with each other; they stay in range then.
    widens : bool
        Whether there is memory for states in float64.
    """

    pieces: Pieces
    every_entry: bool = True
    keeps_products: bool = False
    every_product: bool = False
    proves_last: bool = False
    for_pairs: bool = False
    widens: bool = True


def pair_ceiling(precision: Precision, size: int) -> int:
    """Return the power of two below which sums of products of two states are in range."""
    return int(precision.top - 6 - math.log2(max(2, size))) // 2


@dataclass(slots=True)
class Losses:
    """What underflow can have cost an entry in one step; see the module's text."""

    per_entry: float
    per_sum: Array | None = None  # tiny * max(u @ P), [groups, rows, 1]


class ScaledStepper:
    """Advances the scaled states of a tile in float32 or float64.

    Parameters
    ----------
    tile : Tile
    precision : Precision
    options : Options
    """

    def __init__(self, tile: Tile, precision: Precision, options: Options) -> None:
        self.tile, self.ctx, self.precision, self.options = tile, tile.ctx, precision, options
        self.exponentials = Exponentials(tile, precision, options.pieces.together)
        self.floor = _FLOOR[precision.name]
        self.ceiling = _CEILING[precision.name]
        if options.for_pairs:
            self.ceiling = min(self.ceiling, pair_ceiling(precision, tile.chain.num_states))
        self.matrices = Matrices(tile, precision, options.pieces.panel)
        # Memory of states, in turns, and of products: fresh memory costs time.
        self._rooms: list[Array] = []
        self._products: list[Array] = []

    def advance(
        self, before: State | None, i: int, ignored: Array | None, room: Array | None
    ) -> tuple[State, State, Array | None]:
        """Take the step to state number i.

        Parameters
        ----------
        before : State or None
            In any precision; None for the first step.
        i : int
        ignored : bool array [groups, rows, 1] or None
            Rows whose values mean nothing, and need no proof.
        room : array or None
            Where the values of the state go, if that is of the right precision.

        Returns
        -------
        state, product : State
            After the step, and before its potentials; the latter only if it is wanted.
        unproved : bool array [groups, rows, 1] or None
            Rows whose step is not proved; their values mean nothing.
        """
        keeps, lanes, unproved = self.options.keeps_products, slice(self.tile.count(i)), []
        out = self._room(self._rooms, 2, room)
        of_product = self._room(self._products, 1) if keeps else out
        if before is None:
            product, losses = self._start(of_product)
        else:
            product, losses = self._multiplied(before, i, of_product)
        if self.options.every_product:
            unproved.append(self._unproved(product, lanes, losses, i))
        state = self._weighted(product, i, losses, out)
        unproved.append(self._unproved(state, lanes, losses, i))
        bad = self._of_all([x for x in unproved if x is not None], ignored)
        rows = [x for x in (bad, ignored) if x is not None]
        if rows:
            # What the values of these rows meet stays finite.
            which = rows[0] if len(rows) == 1 else rows[0] | rows[1]
            for values in (state.values, product.values):
                values[...] = self.ctx.xp.where(which, self.ctx.xp.ones_like(values), values)
        return state, product, bad

    def _of_all(self, unproved: list[Array], ignored: Array | None) -> Array | None:
        """Return which of all rows are in one of some masks, which may be those of the first few.

        None if there is none.
        """
        if not unproved:
            return None
        xp, axis, shape = self.ctx.xp, self.tile.select_axis, (*self.tile.state_shape[:2], 1)
        bad = xp.zeros(shape, dtype=xp.bool, device=self.ctx.device)
        for own in unproved:
            part_of(bad, slice(int(own.shape[axis])), axis)[...] |= own
        bad = bad if ignored is None else bad & ~ignored
        return bad if bool(xp.any(bad)) else None

    def _room(self, rooms: list[Array], count: int, given: Array | None = None) -> Array:
        """Return memory for values: what is given, or one of `count` rooms that take turns."""
        dtype = self.ctx.dtype(self.precision)
        if given is not None and given.dtype == dtype:
            return given
        if given is not None or len(rooms) < count:
            room = self.ctx.empty(self.tile.state_shape, dtype)
        else:
            room = rooms.pop(0)
        if given is None:
            rooms.append(room)
        return room

    def _start(self, room: Array) -> tuple[State, Losses]:
        """Return the state before the first potentials, its values in `room`."""
        xp, ctx, precision, start = self.ctx.xp, self.ctx, self.precision, self.tile.start()
        groups, rows, size = self.tile.state_shape
        zeros = xp.zeros((groups, rows, 1), dtype=ctx.dtype(ctx.widest), device=ctx.device)
        state, losses = State(room, zeros, zeros, None, False), Losses(2.0 * size * precision.tiny)
        if start is None:
            room[...] = state.low = state.high = 1.0
            return state, losses
        if self.tile.start_in_logs:
            support = start > -math.inf
            # A start in a wider format than the computation loses nothing to its magnitude.
            wide = ctx.load(start, ctx.widest)
            shift = whole_maximum(ctx, wide, -1, ctx.widest)
            room[...] = xp.exp(ctx.load(wide - shift, precision))
            state.offset = zeros + shift
        else:
            support, x = start != 0, ctx.load(start, precision)
            power = power_to(ctx, xp.max(x, axis=-1, keepdims=True), 0)
            values = scale_by_powers(ctx, x, power, precision)
            room[...] = xp.where(values < 0, xp.full_like(values, math.nan), values)
            state.exponent = -ctx.load(power, ctx.widest)
        state.support = None if bool(xp.all(support)) else support
        return state, losses

    def _multiplied(self, before: State, i: int, room: Array) -> tuple[State, Losses]:
        """Return the states times the matrices, in `room`; rows that do not move are as before."""
        ctx, axis, lanes = self.ctx, self.tile.select_axis, slice(self.tile.count_moves(i))
        size, tiny, state = self.tile.chain.num_states, self.precision.tiny, replace(before)
        state.values = self._others(before.values, lanes, room)
        if not lanes.stop:
            return state, Losses(2.0 * size * tiny)
        matrix = self.matrices.at(i)
        values = ctx.load(part_of(before.values, lanes, axis), self.precision)
        matrix.multiply(values, part_of(room, lanes, axis))
        if matrix.power is not None:
            power = -ctx.load(matrix.power, ctx.widest)
            state.exponent = added(ctx, before.exponent, power, lanes, axis)
        if matrix.shift is not None:
            shift = ctx.load(matrix.shift, ctx.widest)
            state.offset = added(ctx, before.offset, shift, lanes, axis)
        support = before.support
        reached = matrix.reached(None if support is None else part_of(support, lanes, axis))
        if reached is not None:
            state.support = self._support(before)
            part_of(state.support, lanes, axis)[...] = reached
        # Half and twice leave room for rounding.
        low, high = 0.5 * size * before.low * matrix.least, 2.0 * size * before.high * matrix.most
        self._bound(state, low, high, lanes)
        largest = float(ctx.xp.max(values)) if matrix.lossy else 0.0
        # Those that begin here lost no more than twice the least.
        return state, Losses(size * tiny * (2.0 + largest))

    def _others(self, values: Array, lanes: slice, room: Array) -> Array:
        """Return `room`, with the values of all but the first few rows in it."""
        axis = self.tile.select_axis
        if room is not values and lanes.stop < values.shape[axis]:
            rest = slice(lanes.stop, None)
            part_of(room, rest, axis)[...] = self.ctx.load(
                part_of(values, rest, axis), self.precision
            )
        return room

    def _support(self, state: State) -> Array:
        """Return a copy of which weights are nonzero."""
        xp = self.ctx.xp
        if state.support is None:
            return xp.ones_like(state.values, dtype=xp.bool)
        return xp.asarray(state.support, copy=True)

    def _weighted(self, product: State, i: int, losses: Losses, out: Array) -> State:
        """Return the products of the first few rows times one step's factors, in `out`."""
        xp, ctx, axis = self.ctx.xp, self.ctx, self.tile.select_axis
        factors, at = self.exponentials.at(i)
        lanes, state = slice(self.tile.count(i)), replace(product)
        values = part_of(product.values, lanes, axis)
        state.values = self._others(product.values, lanes, out)
        if not factors.positive:
            losses.per_sum = xp.max(values, axis=-1, keepdims=True) * self.precision.tiny
            state.support = self._support(product)
            finite = part_of(factors.given, lanes, axis)[:, :, at, :] > -math.inf
            part_of(state.support, lanes, axis)[...] &= finite
        losses.per_entry *= factors.largest
        weights = part_of(factors.values, lanes, axis)[:, :, at, :]
        ctx.apply(xp.multiply, values, weights, out=part_of(out, lanes, axis))
        if factors.offset is not None:
            offset = part_of(factors.offset, lanes, axis)[:, :, at, :]
            state.offset = added(ctx, product.offset, offset, lanes, axis)
        low, high = product.low * factors.least, product.high * factors.largest
        self._bound(state, low, high, lanes)
        return state

    def _bound(self, state: State, low: float, high: float, lanes: slice) -> bool:
        """Set the bounds of a state whose first few rows have these; tell if that is all rows."""
        is_all = bool(lanes.stop == self.tile.state_shape[self.tile.select_axis])
        state.low = low if is_all else min(low, state.low)
        state.high = high if is_all else max(high, state.high)
        return is_all

    def _unproved(self, state: State, lanes: slice, losses: Losses, i: int) -> Array | None:
        """Rescale rows of a state where they have to be; return those that are not proved."""
        xp, axis = self.ctx.xp, self.tile.select_axis
        threshold = max(self.floor, losses.per_entry / self.precision.eps)
        limit, low, high = 2.0**self.ceiling, state.low, state.high
        if not (low >= threshold and high <= limit):
            # Bounds from before often suffice; else the state is looked at.
            values = part_of(state.values, lanes, axis)
            low, high = float(xp.min(values)), float(xp.max(values))
        if low >= threshold and high <= limit:
            if self._bound(state, low, high, lanes):
                state.support = None
            return None
        return self._rescaled(state, low, lanes, losses, i)

    def _rescaled(
        self, state: State, low: float, lanes: slice, losses: Losses, i: int
    ) -> Array | None:
        """Rescale rows, the least entry of which is given; return those that are not proved."""
        xp, ctx, precision, axis = self.ctx.xp, self.ctx, self.precision, self.tile.select_axis
        values = part_of(state.values, lanes, axis)
        support = None if state.support is None else part_of(state.support, lanes, axis)
        top = xp.max(values, axis=-1, keepdims=True)
        # Wide rows get all the range there is below the ceiling, others room on both sides.
        is_wide = not low >= losses.per_entry / precision.eps
        power = power_to(ctx, top, self.ceiling - _ROOM if is_wide else 0)
        values[...] = scale_by_powers(ctx, values, power, precision)
        negative = -ctx.load(power, ctx.widest)
        state.exponent = added(ctx, state.exponent, negative, lanes, axis)
        state.low, state.high = 0.0, math.inf
        low *= 2.0 ** min(0.0, float(xp.min(power)))
        if not is_wide and low >= precision.tiny and bool(xp.all(xp.isfinite(top))):
            state.support = None if lanes.stop == state.values.shape[axis] else state.support
            return None
        # The losses are scaled along; scaling down can lose another tiny.
        per_entry = xp.full_like(top, losses.per_entry)
        loss = per_entry if losses.per_sum is None else per_entry + losses.per_sum
        loss = scale_by_powers(ctx, loss, power, precision) + precision.tiny
        threshold = scale_by_powers(ctx, per_entry / precision.eps, power, precision)
        short = ~(values >= xp.maximum(threshold, xp.full_like(threshold, precision.tiny)))
        if support is not None:
            if bool(xp.all(state.support)):
                state.support = None
            else:
                short = short & support
        bad = xp.any(short, axis=-1, keepdims=True)
        is_last = i == self.tile.num_steps - 1
        every = self.options.every_entry or (self.options.proves_last and is_last)
        if not every and bool(xp.any(bad)):
            bad = bad & ~self._path_sums_are_right(values, loss, i)
        return bad | ~xp.isfinite(top)

    def _path_sums_are_right(self, values: Array, loss: Array, i: int) -> Array:
        """Tell which rows lost too little, over all their entries, to show in a path sum."""
        xp, ctx = self.ctx.xp, self.ctx
        lost = ctx.load(loss, ctx.widest) * self.tile.chain.num_states
        if i + 1 < self.tile.num_steps:
            spread = self.matrices.at(i + 1).spread()
            # Of groups, the first may have another step.
            lost[: int(spread.shape[0]), ...] *= spread
        total = xp.sum(values, axis=-1, keepdims=True)
        return lost <= (self.precision.eps / 4) * ctx.load(total, ctx.widest)
