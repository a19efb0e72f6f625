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

from arraylogchain._array.chains.exponentials import Exponentials, Factors
from arraylogchain._array.chains.matrices import Matrices, Matrix
from arraylogchain._array.chains.states import State, power_to, scale_by_powers
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
        Whether every entry has to be right, or only the sums over whole paths.
    keeps_products : bool
        Whether the product before potentials is wanted as well, in memory of its own.
    proves_products : bool
        Whether every entry of that has to be right.
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
    proves_products: bool = False
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
    store : array, optional
        See `Exponentials`.
    """

    def __init__(
        self, tile: Tile, precision: Precision, options: Options, store: Array | None = None
    ) -> None:
        self.tile, self.ctx, self.precision, self.options = tile, tile.ctx, precision, options
        self.exponentials = Exponentials(tile, precision, options.together, store)
        self.floor = _FLOOR[precision.name]
        self.ceiling = _CEILING[precision.name]
        if options.for_pairs:
            self.ceiling = min(self.ceiling, pair_ceiling(precision, tile.chain.num_states))
        self.matrices = Matrices(tile, precision, options.panel)
        self._rooms: list[Array] = []
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
        keeps = self.options.keeps_products
        out = self._room(before) if out is None else out
        if before is None:
            product, losses = self._start()
            moves = matrix = None
        else:
            matrix, moves = self.matrices.at(i), self.tile.moves(i)
            room = self._product_room(out) if keeps else out
            product, losses = self._multiplied(before, matrix, room)
            if moves is not None:
                self._hold(product, before, moves)
        unproved = None
        if keeps and self.options.proves_products and before is not None:
            unproved = self._proved(product, losses, i, moves, before, matrix, None, ignored)
        factors, at = self.exponentials.at(i)
        state = self._weighted(product, factors, at, losses, out)
        bad = self._proved(state, losses, i, moves, before, matrix, (factors, at), ignored)
        if unproved is None or bad is None:
            unproved = bad if unproved is None else unproved
        else:
            unproved = unproved | bad
        self._reset(state, product, unproved, ignored)
        return state, product, unproved

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

    def _room(self, before: State | None) -> Array:
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
        dtype = ctx.dtype(ctx.widest)
        zeros = xp.zeros((groups, rows, 1), dtype=dtype, device=ctx.device)
        losses = Losses(size * precision.tiny)
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
            state = State(values, zeros, zeros + shift, support, in_logs=False)
        else:
            support = start != 0
            x = ctx.load(start, precision)
            power = power_to(ctx, xp.max(x, axis=-1, keepdims=True), 0)
            values = scale_by_powers(ctx, x, power, precision)
            values = xp.where(values < 0, xp.full_like(values, math.nan), values)
            state = State(values, -ctx.load(power, ctx.widest), zeros, support, in_logs=False)
        if bool(xp.any((state.values < precision.tiny) & support)):
            losses.per_entry *= 2.0
        return state, losses

    def _multiplied(self, state: State, matrix: Matrix, out: Array) -> tuple[State, Losses]:
        ctx = self.ctx
        values = matrix.multiply(ctx.load(state.values, self.precision), out)
        exponent, offset = state.exponent, state.offset
        if matrix.power is not None:
            exponent = exponent - ctx.load(matrix.power, ctx.widest)
        if matrix.shift is not None:
            offset = offset + ctx.load(matrix.shift, ctx.widest)
        # Half and twice leave room for rounding.
        size = self.tile.chain.num_states
        low = 0.5 * size * state.low * matrix.least
        high = 2.0 * size * state.high * matrix.most
        largest = float(ctx.xp.max(state.values)) if matrix.lossy else 0.0
        losses = Losses(size * self.precision.tiny * (1.0 + largest))
        return State(values, exponent, offset, None, False, low, high), losses

    def _hold(self, state: State, before: State, moves: Array) -> None:
        """Undo a step, in place, for rows that do not take part in it."""
        xp = self.ctx.xp
        held = self.ctx.load(before.values, self.precision)
        state.values[...] = xp.where(moves, state.values, held)
        state.exponent = xp.where(moves, state.exponent, before.exponent)
        state.offset = xp.where(moves, state.offset, before.offset)
        state.low, state.high = min(state.low, before.low), max(state.high, before.high)

    def _weighted(
        self, product: State, factors: Factors, at: int, losses: Losses, out: Array
    ) -> State:
        """Return a product times one step's factors."""
        xp, ctx = self.ctx.xp, self.ctx
        if not factors.positive:
            top = xp.max(product.values, axis=-1, keepdims=True)
            losses.per_sum = top * self.precision.tiny
        losses.per_entry *= factors.largest
        ctx.apply(xp.multiply, product.values, factors.values[:, :, at, :], out=out)
        offset = product.offset
        if factors.offset is not None:
            offset = offset + factors.offset[:, :, at, :]
        return State(
            out,
            product.exponent,
            offset,
            product.support,
            in_logs=False,
            low=product.low * factors.least,
            high=product.high * factors.largest,
        )

    def _proved(
        self,
        state: State,
        losses: Losses,
        i: int,
        moves: Array | None,
        before: State | None,
        matrix: Matrix | None,
        weights: tuple[Factors, int] | None,
        ignored: Array | None,
    ) -> Array | None:
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
        state.support = self._support(state, moves, before, matrix, weights)
        bad = self._rescaled(state, losses, i)
        if bad is not None and ignored is not None:
            bad = bad & ~ignored
        return None if bad is None or not bool(xp.any(bad)) else bad

    def _support(
        self,
        state: State,
        moves: Array | None,
        before: State | None,
        matrix: Matrix | None,
        weights: tuple[Factors, int] | None,
    ) -> Array | None:
        """Return which weights of a state are not exactly zero; None for all."""
        xp, shape = self.ctx.xp, tuple(state.values.shape)
        support = state.support
        if before is not None and matrix is not None:
            support = matrix.reached(before.support)
            if moves is not None and not (support is None and before.support is None):
                every = xp.ones(shape, dtype=xp.bool, device=self.ctx.device)
                held = every if before.support is None else before.support
                support = xp.where(moves, every if support is None else support, held)
        if weights is not None and not weights[0].positive:
            finite = weights[0].given[:, :, weights[1], :] > -math.inf
            support = finite if support is None else support & finite
        return None if support is None else xp.broadcast_to(support, shape)

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
            lost = lost * self.matrices.at(i + 1).spread()
        total = xp.sum(values, axis=-1, keepdims=True)
        return lost <= (self.precision.eps / 4) * ctx.load(total, ctx.widest)
