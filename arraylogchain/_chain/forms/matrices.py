"""One step's matrices, multiplied with scaled states in blocks that hold all of their weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from arraylogchain._chain.forms.blocks import SMALLEST, Block, find_blocks
from arraylogchain._chain.forms.states import power_to, scale_by_powers
from arraylogchain._context import Array, Context, Precision, whole_maximum
from arraylogchain._fold import chunks

# Linear matrices are used as they are while their largest entry lies within these bounds.
LARGEST = 2.0**4
_LARGEST_AT_LEAST = 2.0**-10

# Products of fewer terms are not worth several calls, nor is the search if all are fewer than that;
# an exponential takes as long as so many terms.
FEWEST_TERMS = 1_000_000
TERMS_OF_SEARCH = 1 << 22
_TERMS_OF_EXP = 128


@dataclass(slots=True)
class Matrix:
    """Weights ``factor * 2**exponent * exp(offset)``, [groups, K, cols].

    Attributes
    ----------
    given : array
        The weights or their logarithms, as given.
    power, shift : array [groups, 1, 1] or None
        ``factor = given * 2**power``, or ``factor = exp(given - shift)``: whole numbers such that
        no factor is above LARGEST. None for zero.
    least, most : float
        Bounds on the factors.
    positive : bool
        Whether every factor is a normal number above zero.
    invalid : bool
        Whether a weight may be negative; NaN then takes its place.
    width : int
        Columns of a panel; copies of a matrix are made by panels.
    panels : list of Block
        Blocks of all rows.
    blocks : list of Block
        They hold all nonzero weights: panels, until others have been found.
    may_have_blocks : bool
        Whether to look for them, once products have taken enough `terms`.
    """

    ctx: Context
    given: Array
    in_logs: bool
    precision: Precision
    width: int
    power: Array | None = None
    shift: Array | None = None
    least: float = 0.0
    most: float = LARGEST
    positive: bool = True
    invalid: bool = False
    may_have_blocks: bool = False
    terms: int = 0
    panels: list[Block] = field(init=False)
    blocks: list[Block] = field(init=False)
    _lossy: bool | None = None

    def __post_init__(self) -> None:
        _, inner, cols = self.given.shape
        rows = slice(0, int(inner))
        self.panels = [(rows, j) for j in chunks(int(cols), self.width)]
        self.blocks = self.panels

    def multiply(self, values: Array, out: Array | None = None) -> Array:
        """Return values @ factor for values [groups, rows, K], in `out` if given."""
        xp, ctx = self.ctx.xp, self.ctx
        groups, rows, _ = values.shape
        cols = int(self.given.shape[-1])
        if out is None:
            out = ctx.empty((groups, rows, cols), ctx.dtype(self.precision))
        for k, j in self._blocks_for(values):
            ctx.apply(xp.matmul, values[:, :, k], self.factor(k, j), out=out[:, :, j])
        return out

    def multiply_transposed(self, values: Array, out: Array) -> Array:
        """Write values @ factor.T for values [groups, rows, cols] into `out`, and return it."""
        xp, ctx = self.ctx.xp, self.ctx
        done = 0  # of the product's entries, so many have been written
        for k, j in self._blocks_for(values):
            turned, part = xp.matrix_transpose(self.factor(k, j)), values[:, :, j]
            if k.start > done:
                out[:, :, done : k.start] = 0.0
                done = k.start
            known = min(done, k.stop)
            if k.start < known:
                target = out[:, :, k.start : known]
                product = xp.matmul(part, turned[:, :, : known - k.start])
                ctx.apply(xp.add, target, product, out=target)
            if known < k.stop:
                target = out[:, :, known : k.stop]
                ctx.apply(xp.matmul, part, turned[:, :, known - k.start :], out=target)
                done = k.stop
        return out

    def _blocks_for(self, values: Array) -> list[Block]:
        """Return the blocks for a product with values [groups, rows, K].

        They are looked for when this and earlier products have cost about as much as looking does.
        """
        # What is used as it was given needs no panels.
        is_given = not self.in_logs and self.power is None and not self.invalid
        if is_given and self.given.dtype == getattr(self.ctx.xp, self.precision.name):
            panels = [(self.panels[0][0], slice(0, int(self.given.shape[-1])))]
        else:
            panels = self.panels
        if not self.may_have_blocks and self.blocks is self.panels:
            return panels
        groups, rows, inner = values.shape
        # A factor that has to be computed costs as much as many products do.
        terms = int(groups) * int(inner) ** 2 * (int(rows) + _TERMS_OF_EXP * self.in_logs)
        if self.may_have_blocks:
            self.terms += terms
            if self.terms >= TERMS_OF_SEARCH:
                self.blocks = self._find_blocks() or self.blocks
                self.may_have_blocks = False
        if terms < FEWEST_TERMS or self.blocks is self.panels:
            return panels
        return self.blocks

    def _find_blocks(self) -> list[Block]:
        nothing = -math.inf if self.in_logs else 0.0
        return find_blocks(self.ctx.xp, self.given, nothing, self.width)

    def reached(self, alive: Array | None) -> Array | None:
        """Return which entries of a product are nonzero, given which of its row are; None: all."""
        xp, dtype = self.ctx.xp, self.ctx.xp.float32
        if self.positive:
            if alive is None:
                return None
            reached = xp.any(alive, axis=-1, keepdims=True)
            return xp.broadcast_to(reached, (*alive.shape[:-1], self.given.shape[-1]))
        parts = []
        for k, j in self.blocks:
            support = self._support(k, j)
            if alive is None:
                parts.append(xp.any(support, axis=-2, keepdims=True))
            else:
                hits = xp.matmul(xp.astype(alive[:, :, k], dtype), xp.astype(support, dtype))
                parts.append(hits > 0)
        return xp.concat(parts, axis=-1)

    @property
    def lossy(self) -> bool:
        """Whether the factor of a positive weight is below the smallest normal number."""
        if self._lossy is None:
            lost = (
                self._support(k, j) & (self.factor(k, j) < self.precision.tiny)
                for k, j in ([] if self.positive else self.blocks)
            )
            self._lossy = any(bool(self.ctx.xp.any(x)) for x in lost)
        return self._lossy

    def factor(self, k: slice, j: slice) -> Array:
        """Return the factors of some rows and columns, [groups, len(k), len(j)]."""
        xp = self.ctx.xp
        factor = self.ctx.load(self.given[:, k, j], self.precision)
        if self.in_logs:
            return xp.exp(factor - self.shift)
        if self.invalid:
            factor = xp.where(factor < 0, xp.full_like(factor, math.nan), factor)
        if self.power is not None:
            factor = scale_by_powers(self.ctx, factor, self.power, self.precision)
        return factor

    def _support(self, k: slice, j: slice) -> Array:
        given = self.given[:, k, j]
        return given > -math.inf if self.in_logs else given != 0


def prepare(
    ctx: Context, given: Array, in_logs: bool, precision: Precision, elements: int
) -> Matrix:
    """Make the matrices [groups, K, cols] of a step ready; panels hold at most `elements`."""
    xp = ctx.xp
    groups, inner, cols = given.shape
    width = max(1, min(int(cols), elements // (int(groups) * int(inner))))
    matrix = Matrix(ctx, given, in_logs, precision, width)
    low, high = float(xp.min(given)), float(xp.max(given))
    if in_logs:
        matrix.shift = whole_maximum(ctx, given, (-2, -1), precision)
        least = math.log(precision.tiny) + 2.0
        # Of several groups, each has its own shift, at most `high` + 1/2.
        matrix.positive = low - high >= least
        if matrix.positive:
            matrix.least = math.exp(low - high - 0.5)
    else:
        matrix.invalid = not low >= 0
        if not _LARGEST_AT_LEAST <= high <= LARGEST:
            top = ctx.load(xp.max(given, axis=(-2, -1), keepdims=True), precision)
            matrix.power = power_to(ctx, top, 0.0)
            matrix.positive = False
        else:
            matrix.positive = low >= precision.tiny
            matrix.least, matrix.most = low, high
    # Neither NaN nor a negative weight is there if the smallest is zero: no number compares less.
    nothing = -math.inf if in_logs else 0.0
    matrix.may_have_blocks = low == nothing and min(inner, cols) >= SMALLEST
    return matrix


def spread(ctx: Context, given: Array, in_logs: bool) -> Array:
    """Return how far the weights into one state can differ, [groups, 1, 1].

    The largest ratio P[k, j] / P[l, j] over all k, l, j. For any nonnegative weights w, the entries
    of P @ w then lie within this ratio of each other.
    """
    xp = ctx.xp
    top = ctx.load(xp.max(given, axis=-2, keepdims=True), ctx.widest)
    low = ctx.load(xp.min(given, axis=-2, keepdims=True), ctx.widest)
    nothing = top == (-math.inf if in_logs else 0.0)
    ratio = xp.exp(top - low) if in_logs else top / low
    # A column of zeros adds nothing to any entry.
    return xp.max(xp.where(nothing, xp.ones_like(ratio), ratio), axis=-1, keepdims=True)
