"""A chain cut into pieces that fit the workspace, and what recursions over them hand on.

Batch axes along which the matrices differ are *groups*; the other batch axes hold *rows*, which
share their group's matrices. A *piece* is some groups times some rows, over all steps, which are
taken block by block. A state is an array [groups, rows, K], and a step is one batched product with
matrices [groups, K, K]: nothing that is shared is copied.

*Lanes* are the rows or, where a piece has several groups, the groups. Those of different lengths
are sorted, the longest first: the lanes that have a step are the first so many.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from arraylogchain._core.axes import Box, Shape, boxes, lengths, within
from arraylogchain._core.context import Array, Context
from arraylogchain._inputs.chain import PARTS, Chain


@dataclass(slots=True, eq=False)  # frozen ones take three times as long to make
class Shard:
    """Some groups and rows of a chain; the arrays are views, of which blocks of steps are copied.

    Attributes
    ----------
    box : tuple of slice
        The piece's place among the arranged batch axes.
    shape : tuple of int
        Their lengths, those of groups first.
    num_steps : int
        Steps of the longest row.
    lengths : numpy.ndarray [groups, rows] or None
        Steps of each row, the longest first; None where all have `num_steps`.
    order, inverse : integer array or None
        Which lane each one is in the chain, and back; None where they are not sorted.
    """

    ctx: Context
    chain: Chain
    box: Box
    shape: Shape
    groups: int
    rows: int
    num_steps: int
    views: dict[str, Array]
    lengths: np.ndarray | None = None
    order: Array | None = None
    inverse: Array | None = None

    @property
    def axis(self) -> int:
        """The axis of lanes in a state."""
        return 0 if self.groups > 1 else 1

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.groups, self.rows, self.chain.num_states

    def num_active(self, time: int) -> int:
        """Return how many lanes have a step, by its number in time."""
        if self.lengths is None:
            return (self.groups, self.rows)[self.axis] if time < self.num_steps else 0
        return int(np.count_nonzero(self.lengths > time))

    def row_index(self, start: int | None, stop: int | None) -> tuple[Any, ...]:
        """Return the index of some lanes of an array [groups, rows, ...]."""
        return (slice(None),) * self.axis + (slice(start, stop), ...)

    def potentials(self, steps: slice) -> Array:
        """Return the potentials of some steps as given, [groups, rows, n, K].

        What lies past a row's length means nothing.
        """
        view = self.views["potentials"][..., steps, :]
        return self.expanded(view, (steps.stop - steps.start, self.chain.num_states))

    def matrices(self, steps: slice) -> Array:
        """Return matrices as given, [groups, n, K, K]: number t leads from step t to t + 1.

        They are [groups, 1, K, K] where one matrix stands for every step.
        """
        view, size = self.views["transitions"], self.chain.num_states
        if not self.chain.has_one_matrix:
            view = view[..., steps, :, :]
        xp, count = self.ctx.xp, int(view.shape[-3])
        x = xp.reshape(view, (self.groups, count, size, size)) if self.shape else view[None, ...]
        return x if self.order is None or self.axis else self.ctx.pick(x, self.order, 0)

    def boundary_weights(self, backward: bool) -> tuple[Array, bool]:
        """Return what a recursion starts with, [groups, rows, K], and whether it is in logs.

        As given: the initial weights, or backward the final ones. Logs of ones if there are none.
        """
        part, ctx, K = "final" if backward else "initial", self.ctx, self.chain.num_states
        if part in self.views:
            return self.expanded(self.views[part], (K,)), part in self.chain.logs
        dtype = ctx.dtype(ctx.precision)
        return ctx.xp.zeros(self.state_shape, dtype=dtype, device=ctx.device), True

    def expanded(self, x: Array, trailing: Shape) -> Array:
        """Return an array [*shape, *trailing] as [groups, rows, *trailing], in order of lanes."""
        xp = self.ctx.xp
        if not self.shape:
            return x[None, None, ...]
        if tuple(x.shape) != (*self.shape, *trailing):
            x = xp.broadcast_to(x, (*self.shape, *trailing))
        x = xp.reshape(x, (self.groups, self.rows, *trailing))
        return x if self.order is None else self.ctx.pick(x, self.order, self.axis)

    def valid_steps(self, steps: slice) -> Array | None:
        """Return which rows have which steps, bool [n, groups, rows]; None if all have all."""
        if self.lengths is None or steps.stop <= int(self.lengths.min()):
            return None
        is_valid = np.arange(steps.start, steps.stop)[:, None, None] < self.lengths
        return (
            is_valid if self.ctx.is_numpy else self.ctx.xp.asarray(is_valid, device=self.ctx.device)
        )

    def view(self, x: Array, place: tuple[Any, ...] = ()) -> Array:
        """Return the piece's part of an array [*batch, ...], at a place beyond these axes."""
        x = arrange(self.ctx.xp, self.chain, x, x.ndim - len(self.shape))
        return x[(*self.box, *place, ...)]

    def read(self, x: Array, place: tuple[Any, ...] = ()) -> Array:
        """Return such a part as [groups, rows, ...], in order of lanes."""
        x = self.view(x, place)
        return self.expanded(x, tuple(x.shape[len(self.shape) :]))

    def write(self, out: Array, values: Array, place: tuple[Any, ...] = ()) -> None:
        """Write values [groups, rows, ...], in order of lanes, to such a part."""
        xp, view = self.ctx.xp, self.view(out, place)
        if self.inverse is not None:
            values = xp.take(values, self.inverse, axis=self.axis)
        values = xp.reshape(values, view.shape) if self.shape else values[0, 0, ...]
        view[...] = self.ctx.cast(values, view.dtype)


def arrange(xp: Any, chain: Chain, x: Array, trailing: int) -> Array:
    """View an array as [*group axes, *row axes, *trailing axes], with ones for missing axes."""
    if not chain.batch:
        return x
    shape, groups = tuple(x.shape), chain.group_axes
    if missing := len(chain.batch) + trailing - len(shape):
        x = xp.reshape(x, (1,) * missing + shape)
    if groups == tuple(range(len(groups))):
        return x
    return xp.permute_dims(x, (*groups, *chain.row_axes, *range(len(chain.batch), x.ndim)))


def shards(ctx: Context, chain: Chain, groups: int, rows: int) -> Iterator[Shard]:
    """Cut a chain into pieces of at most so many groups and rows."""
    views = chain.parts
    if chain.batch:
        views = {n: arrange(ctx.xp, chain, x, len(PARTS[n].axes)) for n, x in views.items()}
    if chain.lengths is None and groups >= chain.sizes[0] and rows >= chain.sizes[1]:
        box = (slice(None),) * len(chain.batch)
        yield Shard(ctx, chain, box, chain.arranged, *chain.sizes, chain.num_steps, views)
        return
    all_lengths = None
    if chain.lengths is not None:
        all_lengths = arrange(np, chain, chain.lengths, 0)
        # Rows are sorted within their group.
        groups = groups if chain.sizes[1] == 1 else 1
    inner = len(chain.group_axes)
    for group_box in boxes(chain.arranged[:inner], groups):
        for row_box in boxes(chain.arranged[inner:], rows):
            box = (*group_box, *row_box)
            parts = {name: x[(*within(box, x.shape), ...)] for name, x in views.items()}
            sizes = math.prod(lengths(group_box)), math.prod(lengths(row_box))
            row_lengths, order, inverse, count = None, None, None, chain.num_steps
            if all_lengths is not None:
                row_lengths = np.broadcast_to(
                    all_lengths[within(box, all_lengths.shape)], lengths(box)
                ).reshape(sizes)
                sorted_lengths = row_lengths.reshape(-1)
                first = np.argsort(-sorted_lengths, kind="stable")
                count = int(sorted_lengths[first[0]])
                if count == sorted_lengths[first[-1]]:
                    row_lengths = None
                else:
                    row_lengths = sorted_lengths[first].reshape(sizes)
                    order, inverse = ctx.integers(first), ctx.integers(np.argsort(first))
            yield Shard(
                ctx, chain, box, lengths(box), *sizes, count, parts, row_lengths, order, inverse
            )
