"""Sums of gradients and counts over shards, in the shapes of a chain's arrays."""

from __future__ import annotations

import math
from collections.abc import Iterable
from copy import copy
from typing import Any

from arraylogchain._backends.shards import Shard, arrange
from arraylogchain._chains.planning import MAX_PARALLEL
from arraylogchain._core.axes import Box, boxes, within
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
        respect to logarithms; if not, gradients with respect to the arrays as given.

    Attributes
    ----------
    by_logs : bool
        Whether sums over pairs include the weights of their transitions.
    arrays : dict of str to array
        The sums by name. All but potentials that are in `by_row` are scaled by 2**-bits, so that
        sums of the largest finite numbers do not overflow.
    by_row : set of str
        Names of the arrays to each element of which only one row contributes.
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
        self.arrays: dict[str, Array] = {}
        self.by_row: set[str] = set()
        for name in requested:
            like, dtype = chain.parts[name], ctx.dtype(ctx.widest)
            shape = tuple(like.shape)
            if name == "potentials" and as_counts:
                shape = (*chain.batch, *shape[-2:])
            if by_row := shape[: -len(PARTS[name].axes)] == chain.batch:
                self.by_row.add(name)
            if name == "potentials" and by_row:
                dtype = ctx.result_dtype if as_counts else like.dtype
            elif (by_row and shape[-3:-2] != (1,)) or 64 * math.prod(shape) > workspace:
                dtype = ctx.dtype(ctx.precision)
            self.arrays[name] = ctx.xp.zeros(shape, dtype=dtype, device=ctx.device)

    @property
    def has_separate_sums(self) -> bool:
        """Whether threads have sums of their own, as these take little of the workspace."""
        shared = [x for name, x in self.arrays.items() if name not in self.by_row]
        return bool(
            MAX_PARALLEL * sum(8 * math.prod(x.shape) for x in shared) <= self.workspace // 4
        )

    def zeros_like(self) -> Accumulator:
        """Return zeros for the rows of one shard, to be added by `join`."""
        part, xp = copy(self), self.ctx.xp
        part.arrays = {
            name: total if name in self.by_row else xp.zeros_like(total)
            for name, total in self.arrays.items()
        }
        return part

    def join(self, part: Accumulator) -> None:
        """Add the sums of a part."""
        for name, total in part.arrays.items():
            if total is not self.arrays[name]:
                self.arrays[name] += total

    def add(self, name: str, shard: Shard, place: Box, values: Array) -> None:
        """Add values of a shard to an array, summed over the axes that it was broadcast along.

        Parameters
        ----------
        name : str
        shard : Shard
        place : tuple of slice
            Index of the axes beyond the batch axes.
        values : array [groups, rows, ...]
            Of transitions [groups, 1, ...].
        """
        xp, total = self.ctx.xp, self.arrays[name]
        if name == "potentials" and name in self.by_row:
            if not (self.as_counts or total.dtype == values.dtype):
                values = bounded(self.ctx, values, total.dtype)
            shard.write(total, values, place)
            return
        view = arrange(xp, self.chain, total, len(PARTS[name].axes))
        target = view[(*within(shard.box, view.shape), *place)]
        if shard.inverse is not None and int(values.shape[shard.axis]) > 1:
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
        for name, total in self.arrays.items():
            dtype = ctx.result_dtype if self.as_counts else self.chain.parts[name].dtype
            scale = 1.0 if name == "potentials" and name in self.by_row else 2.0**self.bits
            if (scale != 1.0 or total.dtype != dtype) and 0 not in total.shape:
                for box in boxes(shape_of(total), min(ctx.block, self.workspace // 64)):
                    total[box] = bounded(ctx, total[box] * scale, dtype)
            gradients[name] = ctx.cast(total, dtype)
        if self.chain.is_plain and "transitions" in gradients:
            gradients["transitions"] = gradients["transitions"][0, ...]
        return gradients


def bounded(ctx: Context, x: Array, dtype: Any) -> Array:
    """Return x clipped to the finite range of a dtype and of its own; NaN stays."""
    xp = ctx.xp
    limit = min(float(xp.finfo(x.dtype).max), float(xp.finfo(dtype).max))
    return x if ctx.are_within(min(limit, 2.0**60), x) else xp.clip(x, -limit, limit)
