"""Sums of gradients and counts over shards, in the shapes of a chain's arrays."""

from __future__ import annotations

import math
from collections.abc import Iterable
from copy import copy
from typing import Any

from arraylogchain._backends.shards import Shard, arrange
from arraylogchain._chains.planning import MAX_PARALLEL
from arraylogchain._core.axes import Box, Shape, boxes, within
from arraylogchain._core.context import Array, Context, shape_of
from arraylogchain._inputs.chain import PARTS, Chain


class Accumulator:
    """Sums of marginals and counts, or of gradients with respect to a chain's arrays.

    Parameters
    ----------
    ctx : Context
    chain : Chain
    workspace : int
        Bytes for temporaries.
    requested : iterable of str
        Names of the arrays, of 'potentials', 'transitions', 'initial' and 'final'.
    as_counts : bool
        Whether these are marginals of each row and expected counts, which are derivatives with
        respect to logarithms; if not, gradients with respect to the caller's arrays.

    Attributes
    ----------
    by_logs : bool
        Whether sums over pairs include the weights of their transitions.
    arrays : dict of str to array
        The sums by name. All but potentials that are in `by_row` are scaled by 2**-bits, so that
        sums of the largest finite numbers do not overflow.
    by_row : set of str
        Names of the arrays whose elements get contributions of one row each.
    """

    def __init__(
        self,
        ctx: Context,
        chain: Chain,
        workspace: int,
        requested: Iterable[str],
        as_counts: bool = False,
    ) -> None:
        self.ctx, self.chain, self.workspace, self.as_counts = ctx, chain, workspace, as_counts
        self.bits = 0 if as_counts else (math.prod(chain.sizes) * chain.num_steps).bit_length()
        self.by_logs = as_counts or "transitions" in chain.logs
        # Arrays are allocated at their first use; those in `complete` hold results.
        self.arrays: dict[str, Array | None] = {}
        self.complete: set[str] = set()
        self._formats: dict[str, tuple[Shape, Any]] = {}
        self.by_row: set[str] = set()
        for name in requested:
            like = chain.parts[name]
            shape = tuple(like.shape)
            if name == "potentials" and as_counts:
                shape = (*chain.batch, *shape[-2:])
            if by_row := shape[: -len(PARTS[name].axes)] == chain.batch:
                self.by_row.add(name)
            if name == "potentials" and by_row:
                dtype = ctx.result_dtype if as_counts else like.dtype
            elif (by_row and shape[-3:-2] != (1,)) or 64 * math.prod(shape) > workspace:
                dtype = ctx.dtype(ctx.precision)
            else:
                dtype = ctx.dtype(ctx.widest)
            self.arrays[name], self._formats[name] = None, (shape, dtype)

    @property
    def has_separate_sums(self) -> bool:
        """Whether threads have sums of their own, as these take little of the workspace."""
        shared = [shape for name, (shape, _) in self._formats.items() if name not in self.by_row]
        num_bytes = sum(8 * math.prod(shape) for shape in shared)
        return bool(MAX_PARALLEL * num_bytes <= self.workspace // 4)

    def total(self, name: str) -> Array:
        """Return the array of a sum, allocated at its first use."""
        if self.arrays[name] is None:
            self.arrays[name] = self._zeros(*self._formats[name])
        return self.arrays[name]

    def written_once(self, name: str, shard: Shard, num_segments: int) -> Array | None:
        """Return the array that a backend may write a shard's part of the result to.

        None if several shards or segments contribute to an entry.
        """
        is_whole = (shard.groups, shard.rows) == self.chain.sizes
        if name == "transitions":
            one = self.chain.has_one_matrix
            is_sum = not is_whole or num_segments > 1 if one else shard.rows < self.chain.sizes[1]
        else:
            # Backends sum weights of all rows, but not along some axes only.
            is_one = name != "potentials" and math.prod(self._formats[name][0][:-1]) == 1
            is_sum = name not in self.by_row and not (is_whole and is_one)
        if is_sum:
            return None
        if self.arrays[name] is None:
            shape, dtype = self._formats[name]
            if name != "potentials":
                dtype = self.ctx.dtype(self.ctx.precision)
            # Entries beyond rows' lengths are not written.
            make = self.ctx.empty if self.chain.lengths is None else self._zeros
            self.arrays[name] = make(shape, dtype)
            self.complete.add(name)
        return self.arrays[name]

    def _zeros(self, shape: Shape, dtype: Any) -> Array:
        return self.ctx.xp.zeros(shape, dtype=dtype, device=self.ctx.device)

    def zeros_like(self) -> Accumulator:
        """Return zeros for the rows of one shard, to be added by `join`."""
        part = copy(self)
        part.arrays = {
            name: self.total(name) if name in self.by_row else self._zeros(*self._formats[name])
            for name in self.arrays
        }
        return part

    def join(self, part: Accumulator) -> None:
        """Add the sums of a part."""
        for name, total in part.arrays.items():
            if name not in self.by_row:
                total_sum = self.total(name)
                total_sum += total

    def add(
        self, name: str, shard: Shard, place: Box, values: Array, is_sorted: bool = True
    ) -> None:
        """Add values of a shard to an array, summed over the axes that it was broadcast along.

        Parameters
        ----------
        name : str
        shard : Shard
        place : tuple of slice
            Index of the axes beyond the batch axes.
        values : array [groups, rows, ...]
            Of transitions [groups, 1, ...].
        is_sorted : bool
            Whether rows are sorted by length, as in the shard, or in the chain's order.
        """
        xp, total = self.ctx.xp, self.total(name)
        if name == "potentials" and name in self.by_row:
            if not (self.as_counts or total.dtype == values.dtype):
                values = bounded(self.ctx, values, total.dtype)
            shard.write(total, values, place, is_sorted)
            return
        view = arrange(xp, self.chain, total, len(PARTS[name].axes))
        target = view[(*within(shard.box, view.shape), *place)]
        if is_sorted and shard.inverse is not None and int(values.shape[shard.axis]) > 1:
            values = xp.take(values, shard.inverse, axis=shard.axis)
        if not self.as_counts:
            values = bounded(self.ctx, values, total.dtype) * 0.5**self.bits
        shape = tuple(target.shape[: len(shard.shape)]) if name == "transitions" else shard.shape
        values = xp.reshape(values, (*shape, *values.shape[2:]))
        axes = tuple(i for i, n in enumerate(shape) if target.shape[i] == 1 < n)
        values = xp.sum(values, axis=axes, keepdims=True) if axes else values
        target += self.ctx.cast(values, target.dtype)

    def results(self) -> dict[str, Array]:
        """Return the sums by name, in the shapes and dtypes of the chain's arrays.

        Marginals and counts have the dtype of results.
        """
        ctx, gradients = self.ctx, {}
        for name in self.arrays:
            total = self.total(name)
            dtype = ctx.result_dtype if self.as_counts else self.chain.parts[name].dtype
            is_row = name == "potentials" and name in self.by_row
            scale = 1.0 if is_row or name in self.complete else 2.0**self.bits
            if (scale != 1.0 or total.dtype != dtype) and 0 not in total.shape:
                for box in boxes(shape_of(total), min(ctx.block, self.workspace // 64)):
                    total[box] = bounded(ctx, total[box] * scale, dtype)
            gradients[name] = total if total.dtype == dtype else ctx.cast(total, dtype)
        if self.chain.is_plain and "transitions" in gradients:
            gradients["transitions"] = gradients["transitions"][0, ...]
        return gradients


def bounded(ctx: Context, x: Array, dtype: Any) -> Array:
    """Return x clipped to the finite range of a dtype and of its own; NaN stays.

    This does not wait for a device.
    """
    xp = ctx.xp
    limit = min(float(xp.finfo(x.dtype).max), float(xp.finfo(dtype).max))
    if ctx.kernels is None and ctx.are_within(min(limit, 2.0**60), x):
        return x
    return xp.clip(x, -limit, limit)
