"""Where the gradients of a chain are added up: in the shapes of its arrays.

Contributions come tile by tile and step by step. Along axes that an array was broadcast along they
are summed, and nothing is expanded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from arraylogchain._array.chains.tiles import Tile, arrange
from arraylogchain._context import Array, Context, shape_of
from arraylogchain._fold import Box, within
from arraylogchain._inputs.chain import Chain

_TRAILING = {"potentials": 2, "transitions": 3, "initial": 1, "final": 1}


@dataclass(slots=True)
class ChainSums:
    """Gradients with respect to a chain's arrays, zeros at first; None for what is not wanted.

    Attributes
    ----------
    potentials : array [..., T, K] or None
    transitions : array [..., 1 or T - 1, K, K] or None
    initial, final : array [..., K] or None
    as_counts : bool
        Whether `transitions` collects expected counts: derivatives with respect to the logarithms.
    """

    ctx: Context
    chain: Chain
    potentials: Array | None = None
    transitions: Array | None = None
    initial: Array | None = None
    final: Array | None = None
    as_counts: bool = False
    _views: dict[str, Array] = field(init=False, default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return self.potentials is self.transitions is self.initial is self.final is None

    @property
    def by_logs(self) -> bool:
        """Whether sums over pairs are those of weights, not derivatives with respect to them."""
        return self.as_counts or self.chain.transitions_in_logs

    @property
    def has_own_places(self) -> bool:
        """Whether no two rows share a place in the potentials' gradient."""
        assert self.potentials is not None
        return bool(self.chain.num_rows == math.prod(self.potentials.shape[:-2]))

    def add_potentials(
        self, tile: Tile, time: int, values: Array, scale: Array | None = None
    ) -> None:
        """Add to the potentials' gradient of a step.

        With `scale` the values, which it multiplies, are the first of rows that share no place:
        those are written. The memory of `values` may be written over.
        """
        ctx, xp = self.ctx, self.ctx.xp
        view = self._view("potentials")
        target = view[(*within(tile.box, view.shape), time, slice(None))]
        is_first = scale is not None and self.has_own_places
        if is_first and tile.selected is None and target.dtype == values.dtype:
            shape = tuple(target.shape)
            scale = xp.reshape(scale, (*shape[:-1], 1))
            ctx.apply(xp.multiply, xp.reshape(values, shape), scale, out=target)
            return
        if scale is not None:
            ctx.apply(xp.multiply, values, scale, out=values)
        add_rows(tile, target, values, add=not is_first)

    def add_end(self, name: str, tile: Tile, values: Array) -> None:
        """Add to the gradient of 'initial' or 'final'."""
        view = self._view(name)
        add_rows(tile, view[(*within(tile.box, view.shape), slice(None))], values)

    def add_pairs(self, tile: Tile, number: int, place: Box, values: Array) -> None:
        """Add values [groups, ...] to the gradient of some rows and columns of a matrix."""
        view = self._view("transitions")
        target = view[(*within(tile.box, view.shape), number, *place)]
        values = narrowed(self.ctx, values, target.dtype)
        if tile.select_axis:
            xp = self.ctx.xp
            target += xp.astype(xp.reshape(values, target.shape), target.dtype, copy=False)
        else:
            tile.place(target, values[:, None, ...], add=True)

    def own_pairs(self, tile: Tile, number: int, place: Box, dtype: Any) -> Array | None:
        """Return a view [1, ...] of what nothing but a tile's step adds to; None if there is none.

        It is a part of the gradient of some rows and columns of a matrix.
        """
        whole = tile.state_shape[:2] == self.chain.sizes
        if not (whole and tile.groups == 1 and self.ctx.has_out) or self.chain.has_one_matrix:
            return None
        view = self._view("transitions")
        target = view[(*within(tile.box, view.shape), number, *place)]
        shape = (1, *tuple(target.shape)[-2:])
        return self.ctx.xp.reshape(target, shape) if target.dtype == dtype else None

    def _view(self, name: str) -> Array:
        """Return a view of a sum with its batch axes arranged as tiles have them."""
        if name not in self._views:
            x = getattr(self, name)
            self._views[name] = arrange(self.ctx.xp, self.chain, x, _TRAILING[name])
        return self._views[name]

    def results(self) -> dict[str, Array]:
        """Return the gradients by name, in the dtypes of the chain's arrays."""
        found = {}
        for name in _TRAILING:
            total = getattr(self, name)
            if total is not None:
                dtype = getattr(self.chain, name).dtype
                if name != "potentials" or total.dtype != dtype:
                    self._bound(total, dtype)
                found[name] = self.ctx.xp.astype(total, dtype, copy=False)
        return found

    def _bound(self, total: Array, dtype: Any) -> None:
        """Keep sums of what is as large as it can be no larger, in place."""
        ctx = self.ctx
        limit = largest_of(ctx.xp, dtype)

        def work(box: Box) -> None:
            top, low = ctx.extremes(total[box])
            if not -limit <= low <= top <= limit:
                total[box] = ctx.xp.clip(total[box], -limit, limit)

        if 0 not in total.shape:
            ctx.in_blocks(work, shape_of(total), ctx.block)


def zeros_for(ctx: Context, chain: Chain, name: str, workspace: int) -> Array:
    """Return zeros to add the gradient of one of a chain's arrays to, or memory to write it to.

    Wider than the computation where many steps are added up, if that is cheap; of the result's own
    dtype where nothing is.
    """
    like = getattr(chain, name)
    shape, dtype = tuple(like.shape), ctx.dtype(ctx.precision)
    if name == "transitions" and shape[-3] == 1 and 8 * math.prod(shape) <= workspace // 8:
        dtype = ctx.dtype(ctx.widest)
    elif name == "potentials" and shape[:-2] == chain.batch:
        dtype = like.dtype
    out = ctx.empty(shape, dtype)
    # What every row has its own place in is written, not added to.
    if name != "potentials" or shape[:-2] != chain.batch or chain.lengths is not None:
        out[...] = 0.0
    return out


def add_rows(tile: Tile, target: Array, values: Array, add: bool = True) -> None:
    """Add values [groups, rows, n] to a view of their tile, summed where it has length 1.

    Where nothing is summed, they are written if not `add`.
    """
    ctx, xp, shape = tile.ctx, tile.ctx.xp, (*tile.shape, int(target.shape[-1]))
    if tuple(target.shape) == shape:
        tile.place(target, narrowed(ctx, values, target.dtype), add)
        return
    every = values
    if tile.selected is not None:
        every = xp.zeros(shape, dtype=values.dtype, device=ctx.device)
        tile.place(every, values)
    every = xp.reshape(every, shape)
    broadcast = tuple(axis for axis, n in enumerate(target.shape) if n == 1 < shape[axis])
    values = narrowed(ctx, xp.sum(every, axis=broadcast, keepdims=True), target.dtype)
    target += xp.astype(values, target.dtype, copy=False)


def narrowed(ctx: Context, values: Array, dtype: Any) -> Array:
    """Return values that are finite in a dtype."""
    if values.dtype == dtype or dtype == ctx.xp.float64:
        return values
    return bounded(ctx.xp, values, dtype)


def bounded(xp: Any, x: Array, dtype: Any) -> Array:
    """Keep x finite in a dtype; NaN stays."""
    limit = largest_of(xp, dtype)
    return xp.clip(x, -limit, limit)


def largest_of(xp: Any, dtype: Any) -> float:
    """Return the largest number of a dtype."""
    return float(xp.finfo(dtype).max)
