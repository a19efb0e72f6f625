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
from arraylogchain._array.chains.states import State, held, part_of, power_to, scale_by_powers
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
    every_entry : bool
        Whether every entry has to be right, those of products as well, or only the sums over whole
        paths.
    keeps_products : bool
        Whether the product before potentials is wanted as well, in memory of its own.
    proves_last : bool
        Whether every entry has to be right at the last step, though not before.
    for_pairs : bool
        Whether states of both directions are multiplied with each other; they stay in range then.
    together : int
        Steps whose potentials are exponentiated together.
    panel : int
        Elements of matrices that may be copied at a time.
    workspace : int
        Bytes for steps in logs.
    """

    every_entry: bool = True
    keeps_products: bool = False
    proves_last: bool = False
    for_pairs: bool = False
    together: int = 1
    panel: int = 1
    workspace: int = 0


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
        self.exponentials = Exponentials(tile, precision, options.together)
        self.floor = _FLOOR[precision.name]
        self.ceiling = _CEILING[precision.name]
        if options.for_pairs:
            self.ceiling = min(self.ceiling, pair_ceiling(precision, tile.chain.num_states))
        self.matrices = Matrices(tile, precision, options.panel)
        self._rooms: list[Array] = []
        dtype, shape = self.ctx.dtype(self.ctx.widest), (*tile.state_shape[:2], 1)
        self._zeros = self.ctx.xp.zeros(shape, dtype=dtype, device=self.ctx.device)
        self._product: Array | None = None

    def admit(self, state: State) -> State:
        """Return a state that another stepper did not prove, in this one's form."""
        return State(
            self.ctx.load(state.values, self.precision),
            state.exponent,
            state.offset,
            state.support,
            in_logs=False,
            low=state.low,
            high=state.high,
        )

    def advance(
        self, before: State | None, i: int, ignored: Array | None, out: Array | None
    ) -> tuple[State, State, Array | None]:
        """Take the step to state number i.

        Parameters
        ----------
        before : State or None
            None for the first step.
        i : int
        ignored : bool array [groups, rows, 1] or None
            Rows whose values mean nothing.
        out : array, optional
            Memory for the values.

        Returns
        -------
        state, product : State
            After the step, and before its potentials; the latter only if it is wanted.
        unproved : bool array [groups, rows, 1] or None
            Rows whose step is not proved; their values mean nothing.
        """
        tile, axis, keeps = self.tile, self.tile.select_axis, self.options.keeps_products
        out = self._room() if out is None else out
        if before is None:
            product, losses = self._start()
        else:
            product, losses = self._multiplied(before, i, self._product_room(out) if keeps else out)
        unproved = []
        now = product.part(slice(tile.count(i)), axis)
        if keeps and self.options.every_entry and before is not None:
            unproved.append(self._unproved(now, losses, i))
            product = held(self.ctx, now, product, axis, product.values)
        state = self._weighted(now, i, losses, out)
        unproved.append(self._unproved(state, losses, i))
        state = held(self.ctx, state, product, axis, out)
        bad = self._of_all([x for x in unproved if x is not None], ignored)
        self._reset(state, product, bad, ignored)
        return state, product, bad

    def _of_all(self, unproved: list[Array], ignored: Array | None) -> Array | None:
        """Return which of all rows are in one of some masks, which may be those of the first few.

        None if there is none.
        """
        if not unproved:
            return None
        xp, axis = self.ctx.xp, self.tile.select_axis
        bad = unproved[0] if len(unproved) == 1 else unproved[0] | unproved[1]
        rest = self.tile.state_shape[axis] - int(bad.shape[axis])
        if rest:
            others = xp.zeros_like(part_of(self._zeros, slice(rest), axis), dtype=xp.bool)
            bad = xp.concat([bad, others], axis=axis)
        bad = bad if ignored is None else bad & ~ignored
        return bad if bool(xp.any(bad)) else None

    def _reset(
        self, state: State, product: State, unproved: Array | None, ignored: Array | None
    ) -> None:
        """Set rows whose values mean nothing to ones, in place: what they meet stays finite."""
        rows = [x for x in (unproved, ignored) if x is not None]
        if not rows:
            return
        xp, which = self.ctx.xp, rows[0] if len(rows) == 1 else rows[0] | rows[1]
        for values in (state.values, product.values):
            values[...] = xp.where(which, xp.ones_like(values), values)

    def _room(self) -> Array:
        """Return memory for the values of a state that is not that of the one before."""
        if not self._rooms:
            shape, dtype = self.tile.state_shape, self.ctx.dtype(self.precision)
            self._rooms = [self.ctx.empty(shape, dtype) for _ in range(2)]
        self._rooms.reverse()
        return self._rooms[0]

    def _product_room(self, like: Array) -> Array:
        """Return memory for products, the same at each step: fresh memory costs time."""
        if self._product is None:
            self._product = self.ctx.empty(tuple(like.shape), like.dtype)
        return self._product

    def _start(self) -> tuple[State, Losses]:
        """Return the state before the first potentials."""
        xp, ctx, precision, start = self.ctx.xp, self.ctx, self.precision, self.tile.start()
        groups, rows, size = self.tile.state_shape
        zeros, losses = self._zeros, Losses(2.0 * size * precision.tiny)
        if start is None:
            shape = (groups, rows, size)
            ones = xp.ones(shape, dtype=ctx.dtype(precision), device=ctx.device)
            return State(ones, zeros, zeros, None, False, 1.0, 1.0), losses
        if self.tile.start_in_logs:
            support = start > -math.inf
            # A start in a wider format than the computation loses nothing to its magnitude.
            wide = ctx.load(start, ctx.widest)
            shift = whole_maximum(ctx, wide, -1, ctx.widest)
            values = xp.exp(ctx.load(wide - shift, precision))
            return State(values, zeros, zeros + shift, support, in_logs=False), losses
        support = start != 0
        x = ctx.load(start, precision)
        power = power_to(ctx, xp.max(x, axis=-1, keepdims=True), 0)
        values = scale_by_powers(ctx, x, power, precision)
        values = xp.where(values < 0, xp.full_like(values, math.nan), values)
        return State(values, -ctx.load(power, ctx.widest), zeros, support, in_logs=False), losses

    def _multiplied(self, before: State, i: int, room: Array) -> tuple[State, Losses]:
        """Return the states times the matrices, in `room`; rows that do not move are as before."""
        ctx, axis, lanes = self.ctx, self.tile.select_axis, slice(self.tile.count_moves(i))
        size, tiny = self.tile.chain.num_states, self.precision.tiny
        if not lanes.stop:
            room[...] = before.values
            return replace(before, values=room), Losses(2.0 * size * tiny)
        matrix, state = self.matrices.at(i), before.part(lanes, axis)
        values = matrix.multiply(state.values, part_of(room, lanes, axis))
        exponent, offset = state.exponent, state.offset
        if matrix.power is not None:
            exponent = exponent - ctx.load(matrix.power, ctx.widest)
        if matrix.shift is not None:
            offset = offset + ctx.load(matrix.shift, ctx.widest)
        support = matrix.reached(state.support)
        if support is not None:
            support = ctx.xp.broadcast_to(support, tuple(values.shape))
        # Half and twice leave room for rounding.
        low = 0.5 * size * state.low * matrix.least
        high = 2.0 * size * state.high * matrix.most
        largest = float(ctx.xp.max(state.values)) if matrix.lossy else 0.0
        product = State(values, exponent, offset, support, False, low, high)
        # Those that begin here lost no more than twice the least.
        return held(ctx, product, before, axis, room), Losses(size * tiny * (2.0 + largest))

    def _weighted(self, product: State, i: int, losses: Losses, out: Array) -> State:
        """Return the products of the first few rows times one step's factors, in `out`."""
        xp, ctx, axis = self.ctx.xp, self.ctx, self.tile.select_axis
        factors, at = self.exponentials.at(i)
        lanes, support, offset = slice(self.tile.count(i)), product.support, product.offset
        if not factors.positive:
            top = xp.max(product.values, axis=-1, keepdims=True)
            losses.per_sum = top * self.precision.tiny
            finite = part_of(factors.given, lanes, axis)[:, :, at, :] > -math.inf
            support = finite if support is None else support & finite
        losses.per_entry *= factors.largest
        out = part_of(out, lanes, axis)
        weights = part_of(factors.values, lanes, axis)[:, :, at, :]
        ctx.apply(xp.multiply, product.values, weights, out=out)
        if factors.offset is not None:
            offset = offset + part_of(factors.offset, lanes, axis)[:, :, at, :]
        low, high = product.low * factors.least, product.high * factors.largest
        return State(out, product.exponent, offset, support, False, low, high)

    def _unproved(self, state: State, losses: Losses, i: int) -> Array | None:
        """Rescale a state where it has to be, in place; return the rows that are not proved."""
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
        """Rescale the rows, in place, and return those that are not proved, if any."""
        xp, ctx, precision = self.ctx.xp, self.ctx, self.precision
        top = xp.max(state.values, axis=-1, keepdims=True)
        # Wide rows get all the range there is below the ceiling, others room on both sides.
        is_wide = not state.low >= losses.per_entry / precision.eps
        power = power_to(ctx, top, self.ceiling - _ROOM if is_wide else 0)
        values = scale_by_powers(ctx, state.values, power, precision)
        state.exponent = state.exponent - ctx.load(power, ctx.widest)
        scaled_low = state.low * 2.0 ** min(0.0, float(xp.min(power)))
        state.low, state.high = 0.0, math.inf
        state.values[...] = values
        if not is_wide and scaled_low >= precision.tiny and bool(xp.all(xp.isfinite(top))):
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
