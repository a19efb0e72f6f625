"""Where the gradients of a chain are added up: in the shapes of its arrays.

Contributions come tile by tile and step by step. Along axes that an array was broadcast along they
are summed, and nothing is expanded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from arraylogchain._array.chains.tiles import Tile, arrange
from arraylogchain._context import DOUBLE, SINGLE, Array, Context, Precision
from arraylogchain._fold import within
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

    @property
    def by_logs(self) -> bool:
        """Whether sums over pairs are those of weights, not derivatives with respect to them."""
        return self.as_counts or self.chain.transitions_in_logs

    def target_of_step(self, tile: Tile, time: int) -> Array | None:
        """Return where the potentials' gradient of a step goes, [*shape or 1, ..., K]."""
        if self.potentials is None:
            return None
        view = arrange(self.ctx.xp, self.chain, self.potentials, trailing=2)
        return view[(*within(tile.box, view.shape), time, slice(None))]

    def room_of_step(self, tile: Tile, time: int, like: Array) -> Array | None:
        """Return memory of the result that a step's gradients can be written to, if there is."""
        target = self.target_of_step(tile, time)
        if target is None or tile.selected is not None or tile.lengths is not None:
            return None
        shape = (*tile.shape, tile.chain.num_states)
        if tuple(target.shape) != shape or target.dtype != like.dtype:
            return None
        room = self.ctx.xp.reshape(target, tuple(like.shape))
        return room if self._shares_memory(room, target) else None

    def room_of_pairs(self, tile: Tile, number: int, j: slice, like: Array) -> Array | None:
        """Return memory of the result that is a matrix' gradient, if one product is all of it."""
        chain, x = self.chain, self.transitions
        is_all = tile.selected is None and tile.rows == chain.sizes[1] and tile.lengths is None
        if x is None or not is_all or chain.has_one_matrix or x.dtype != like.dtype:
            return None
        view = arrange(self.ctx.xp, chain, x, trailing=3)
        target = view[(*within(tile.box, view.shape), number, slice(None), j)]
        shape = (tile.groups, *tuple(target.shape)[-2:])
        room = self.ctx.xp.reshape(target, shape)
        return room if self._shares_memory(room, target) else None

    def _shares_memory(self, room: Array, target: Array) -> bool:
        """Tell whether axes could be merged without a copy; only for libraries that say so."""
        if hasattr(room, "data_ptr"):
            return bool(room.data_ptr() == target.data_ptr())
        if hasattr(room, "data") and hasattr(room.data, "ptr"):
            return bool(room.data.ptr == target.data.ptr)
        pointer = getattr(room, "__array_interface__", None)
        return pointer is not None and pointer["data"] == target.__array_interface__["data"]

    def add_potentials(self, tile: Tile, time: int, values: Array) -> None:
        target = self.target_of_step(tile, time)
        if target is not None:
            add_rows(tile, target, values)

    def add_end(self, name: str, tile: Tile, values: Array) -> None:
        """Add to the gradient of 'initial' or 'final'."""
        view = arrange(self.ctx.xp, self.chain, getattr(self, name), trailing=1)
        add_rows(tile, view[(*within(tile.box, view.shape), slice(None))], values)

    def add_pairs(self, tile: Tile, number: int, j: slice, values: Array) -> None:
        """Add [groups, K, len(j)] to the gradient of some columns of a matrix."""
        view = arrange(self.ctx.xp, self.chain, self.transitions, trailing=3)
        target = view[(*within(tile.box, view.shape), number, slice(None), j)]
        values = narrowed(self.ctx, values, target.dtype)
        if tile.select_axis:
            xp = self.ctx.xp
            target += xp.astype(xp.reshape(values, target.shape), target.dtype, copy=False)
        else:
            tile.place(target, values[:, None, ...], add=True)

    def results(self) -> dict[str, Array]:
        """Return the gradients by name, in the dtypes of the chain's arrays."""
        found = {}
        for name in _TRAILING:
            total, dtype = getattr(self, name), getattr(getattr(self.chain, name), "dtype", None)
            if total is not None:
                # Sums of what is as large as it can be are no larger.
                precision = SINGLE if total.dtype == self.ctx.xp.float32 else DOUBLE
                total = total if name == "potentials" else bounded(self.ctx.xp, total, precision)
                total = narrowed(self.ctx, total, dtype)
                found[name] = self.ctx.xp.astype(total, dtype, copy=False)
        return found


def zeros_for(ctx: Context, chain: Chain, name: str, workspace: int) -> Array:
    """Return zeros to add the gradient of one of a chain's arrays to.

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
    out[...] = 0.0
    return out


def add_rows(tile: Tile, target: Array, values: Array) -> None:
    """Add values [groups, rows, n] to a view of their tile, summed where it has length 1."""
    ctx, xp, shape = tile.ctx, tile.ctx.xp, (*tile.shape, int(target.shape[-1]))
    if tuple(target.shape) == shape:
        tile.place(target, narrowed(ctx, values, target.dtype), add=True)
        return
    values = xp.reshape(in_tile(tile, values), shape)
    broadcast = tuple(axis for axis, n in enumerate(target.shape) if n == 1 < shape[axis])
    values = narrowed(ctx, xp.sum(values, axis=broadcast, keepdims=True), target.dtype)
    target += xp.astype(values, target.dtype, copy=False)


def in_tile(tile: Tile, x: Array) -> Array:
    """Return x with its rows or groups where they belong in the whole tile, zeros elsewhere."""
    if tile.selected is None:
        return x
    ctx, xp, axis = tile.ctx, tile.ctx.xp, tile.select_axis
    count, own = (tile.rows if axis else tile.groups), int(tile.selected.shape[0])
    everyone = xp.arange(count, dtype=tile.selected.dtype, device=ctx.device)
    order = xp.argsort(tile.selected)
    ascending = xp.take(tile.selected, order)
    place = xp.clip(xp.searchsorted(ascending, everyone), 0, own - 1)
    found = xp.take(ascending, place) == everyone
    place = xp.where(found, xp.take(order, place), xp.full_like(place, own))
    shape = tuple(1 if a == axis else int(n) for a, n in enumerate(x.shape))
    nothing = xp.zeros(shape, dtype=x.dtype, device=ctx.device)
    return xp.take(xp.concat([x, nothing], axis=axis), place, axis=axis)


def narrowed(ctx: Context, values: Array, dtype: Any) -> Array:
    """Return values that are finite in a dtype."""
    if values.dtype == dtype or dtype != ctx.xp.float32:
        return values
    return bounded(ctx.xp, values, SINGLE)


def bounded(xp: Any, x: Array, precision: Precision) -> Array:
    """Keep x finite in a precision; NaN stays."""
    limit = (2.0 - precision.eps) * 2.0**precision.top
    return xp.clip(x, -limit, limit)
