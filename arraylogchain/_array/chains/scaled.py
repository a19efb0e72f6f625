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
from dataclasses import dataclass

from arraylogchain import _dispatch
from arraylogchain._array.chains.matrices import Matrices
from arraylogchain._array.chains.plans import Pieces
from arraylogchain._array.chains.states import State, joined, part_of, power_to, scale_by_powers
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
        weigher = _dispatch.for_passes("Weigher", self.ctx, precision)
        self.weigher = weigher(tile, precision, options.pieces.together)
        self.floor = _FLOOR[precision.name]
        self.ceiling = _CEILING[precision.name]
        if options.for_pairs:
            self.ceiling = min(self.ceiling, pair_ceiling(precision, tile.chain.num_states))
        self.matrices = Matrices(tile, precision, options.pieces.panel)
        # Memory of products, and of states in turns: fresh memory costs time.
        self._products = self.ctx.empty(tile.state_shape, self.ctx.dtype(precision))
        self._rooms: list[Array] = []

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
            After the step, and before its potentials.
        unproved : bool array [groups, rows, 1] or None
            Rows whose step is not proved; their values mean nothing.
        """
        tile, axis, unproved = self.tile, self.tile.select_axis, []
        lanes = slice(tile.count(i))
        out = part_of(self._room(room), lanes, axis)
        product, losses = self._multiplied(before, i, part_of(self._products, lanes, axis))
        if self.options.every_product:
            unproved.append(self._unproved(product, losses, i))
        state = self._weighted(product, i, losses, out)
        unproved.append(self._unproved(state, losses, i))
        bad = None
        ignored = None if ignored is None else part_of(ignored, lanes, axis)
        for own in unproved:
            if own is not None:
                bad = own if bad is None else bad | own
        if bad is not None:
            bad = bad if ignored is None else bad & ~ignored
            bad = bad if bool(self.ctx.xp.any(bad)) else None
        rows = [x for x in (bad, ignored) if x is not None]
        if rows:
            # What the values of these rows meet stays finite.
            which = rows[0] if len(rows) == 1 else rows[0] | rows[1]
            for values in (state.values, product.values):
                values[...] = self.ctx.xp.where(which, self.ctx.xp.ones_like(values), values)
        return state, product, bad

    def _room(self, given: Array | None) -> Array:
        """Return memory for states: what is given, or one of two rooms that take turns."""
        dtype = self._products.dtype
        if given is not None and given.dtype == dtype:
            return given
        if given is not None or len(self._rooms) < 2:
            room = self.ctx.empty(self.tile.state_shape, dtype)
        else:
            room = self._rooms.pop(0)
        if given is None:
            self._rooms.append(room)
        return room

    def _start(self, room: Array, lanes: slice) -> State:
        """Return the state of some rows before their first potentials, its values in `room`."""
        xp, ctx, precision, start = self.ctx.xp, self.ctx, self.precision, self.tile.start()
        shape = (*room.shape[:2], 1)
        zeros = xp.zeros(shape, dtype=ctx.dtype(ctx.widest), device=ctx.device)
        state = State(room, zeros, zeros, None, False)
        if start is None:
            room[...] = state.low = state.high = 1.0
            return state
        start = part_of(start, lanes, self.tile.select_axis)
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
        return state

    def _multiplied(self, before: State | None, i: int, room: Array) -> tuple[State, Losses]:
        """Return the states times the matrices in `room`, and those of rows that begin."""
        ctx, axis, count = self.ctx, self.tile.select_axis, self.tile.count_moves(i)
        size, tiny = self.tile.chain.num_states, self.precision.tiny
        begin, losses = slice(count, self.tile.count(i)), Losses(2.0 * size * tiny)
        if before is None or not count:
            return self._start(room, begin), losses
        before, matrix = before.part(slice(count), axis), self.matrices.at(i)
        values = ctx.load(before.values, self.precision)
        support = matrix.reached(before.support)
        if support is not None:
            support = ctx.xp.broadcast_to(support, tuple(values.shape))
        # Half and twice leave room for rounding.
        state = State(
            matrix.multiply(values, part_of(room, slice(count), axis)),
            before.exponent,
            before.offset,
            support,
            in_logs=False,
            low=0.5 * size * before.low * matrix.least,
            high=2.0 * size * before.high * matrix.most,
        )
        if matrix.power is not None:
            state.exponent = state.exponent - ctx.load(matrix.power, ctx.widest)
        if matrix.shift is not None:
            state.offset = state.offset + ctx.load(matrix.shift, ctx.widest)
        if matrix.lossy:
            # Those that begin here lost no more than twice the least.
            losses.per_entry += size * tiny * float(ctx.xp.max(values))
        if begin.start < begin.stop:
            start = self._start(part_of(room, begin, axis), begin)
            state = joined(ctx, [state, start], axis, room)
        return state, losses

    def _weighted(self, product: State, i: int, losses: Losses, out: Array) -> State:
        """Return products times one step's factors, in `out`."""
        state: State
        state, largest, has_zeros = self.weigher.weigh(product, self.tile.time(i), out)
        losses.per_entry *= largest
        if has_zeros:
            top = self.ctx.xp.max(product.values, axis=-1, keepdims=True)
            losses.per_sum = top * self.precision.tiny
        return state

    def _unproved(self, state: State, losses: Losses, i: int) -> Array | None:
        """Rescale rows of a state where they have to be; return those that are not proved."""
        xp = self.ctx.xp
        threshold = max(self.floor, losses.per_entry / self.precision.eps)
        limit = 2.0**self.ceiling
        if not (state.low >= threshold and state.high <= limit):
            # Bounds from before often suffice; else the state is looked at.
            state.low, state.high = float(xp.min(state.values)), float(xp.max(state.values))
        if state.low >= threshold and state.high <= limit:
            state.support = None
            return None
        return self._rescaled(state, losses, i)

    def _rescaled(self, state: State, losses: Losses, i: int) -> Array | None:
        """Rescale rows of a state that has been looked at; return those that are not proved."""
        xp, ctx, precision, values = self.ctx.xp, self.ctx, self.precision, state.values
        top = xp.max(values, axis=-1, keepdims=True)
        # Wide rows get all the range there is below the ceiling, others room on both sides.
        is_wide = not state.low >= losses.per_entry / precision.eps
        target = self.ceiling - _ROOM if is_wide else 0
        power = power_to(ctx, top, target)
        values[...] = scale_by_powers(ctx, values, power, precision)
        state.exponent = state.exponent - ctx.load(power, ctx.widest)
        low = state.low * 2.0 ** min(0.0, float(xp.min(power)))
        # Rows with an infinite entry or NaN are not proved, and their values mean nothing.
        state.low, state.high = 0.0, 2.0 ** (target + 2)
        if not is_wide and low >= precision.tiny and bool(xp.all(xp.isfinite(top))):
            state.support = None
            return None
        # The losses are scaled along; scaling down can lose another tiny.
        per_entry = xp.full_like(top, losses.per_entry)
        loss = per_entry if losses.per_sum is None else per_entry + losses.per_sum
        loss = scale_by_powers(ctx, loss, power, precision) + precision.tiny
        threshold = scale_by_powers(ctx, per_entry / precision.eps, power, precision)
        short = ~(values >= xp.maximum(threshold, xp.full_like(threshold, precision.tiny)))
        if state.support is not None:
            if bool(xp.all(state.support)):
                state.support = None
            else:
                short = short & state.support
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
