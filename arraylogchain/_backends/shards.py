"""Shards: parts of a batch that fit the workspace.

Batch axes along which the matrices differ are *groups*; the other batch axes hold *rows*, which
share the matrices of their group. A shard has some groups and rows, and all steps. A message is an
array [groups, rows, K], and a step is one batched product with matrices [groups, K, K]: nothing
that is shared is copied.

Rows (or groups, if a shard has several) are sorted by decreasing length; at step t the first
`num_active(t)` of them are active.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from arraylogchain._core.axes import Box, Shape, boxes, chunks, lengths, within
from arraylogchain._core.context import Array, Context
from arraylogchain._inputs.chain import PARTS, Chain


@dataclass(slots=True, eq=False)  # frozen ones take three times as long to make
class Shard:
    """Some groups and rows of a chain, as views of its arrays.

    Attributes
    ----------
    ctx : Context
    chain : Chain
    box : tuple of slice
        Index of the shard along the chain's arranged batch axes.
    shape : tuple of int
        Lengths along these axes, groups first.
    groups, rows : int
        Numbers of groups, and of rows in each.
    num_steps : int
        Steps of the longest row.
    views : dict of str to array
        Parts of the chain's arrays, with arranged batch axes.
    lengths : numpy.ndarray [groups, rows] or None
        Steps of each row, the longest first; None where all have `num_steps`.
    order, inverse : integer array or None
        Permutation that sorts the rows (or groups) by length, and its inverse; None if they are not
        sorted.
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
        """Axis of a message [groups, rows, K] that is sorted by length."""
        return 0 if self.groups > 1 else 1

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.groups, self.rows, self.chain.num_states

    def num_active(self, time: int) -> int:
        """Return the number of rows (or groups) that are active at a step."""
        if self.lengths is None:
            return (self.groups, self.rows)[self.axis] if time < self.num_steps else 0
        return int(np.count_nonzero(self.lengths > time))

    def part(self, box: Box) -> Shard:
        """Return the part in a box along the batch axes, in the chain's order; sort its rows."""
        chain, inner, shape = self.chain, len(self.chain.group_axes), lengths(box)
        views = {name: x[(*within(box, x.shape), ...)] for name, x in self.views.items()}
        pairs = zip(self.box, box, strict=True)
        box = tuple(slice(x.start + y.start, x.start + y.stop) for x, y in pairs)
        sizes = math.prod(shape[:inner]), math.prod(shape[inner:])
        shard = Shard(self.ctx, chain, box, shape, *sizes, chain.num_steps, views)
        if chain.lengths is not None:
            row_lengths = arrange(np, chain, chain.lengths, 0)
            row_lengths = row_lengths[within(box, row_lengths.shape)]
            shard._sort_by_length(np.broadcast_to(row_lengths, shape))
        return shard

    def single_rows(self, mask: np.ndarray) -> Iterator[Shard]:
        """Yield a shard for each row that a mask [groups, rows], sorted by length, selects."""
        for at in np.argwhere(mask):
            if self.order is not None:
                at[self.axis] = int(self.order[at[self.axis]])
            index = np.unravel_index(at[0] * self.rows + at[1], self.shape)
            yield self.part(tuple(slice(int(i), int(i) + 1) for i in index))

    def _sort_by_length(self, row_lengths: np.ndarray) -> None:
        """Sort rows, or groups, by decreasing length, given lengths [*shape]."""
        flat = row_lengths.reshape(-1)
        order = np.argsort(-flat, kind="stable")
        self.num_steps = int(flat[order[0]])
        if self.num_steps > flat[order[-1]]:
            self.lengths = flat[order].reshape(self.groups, self.rows)
            self.order, self.inverse = map(self.ctx.integers, (order, np.argsort(order)))

    def row_index(self, start: int | None, stop: int | None) -> tuple[Any, ...]:
        """Return the index of a range of rows (or groups) of an array [groups, rows, ...]."""
        return (slice(None),) * self.axis + (slice(start, stop), ...)

    def potentials(self, steps: slice) -> Array:
        """Return the potentials of a slice of steps, [groups, rows, n, K], sorted by length.

        They keep the dtype of the input. Values beyond a row's length are undefined.
        """
        view = self.views["potentials"][..., steps, :]
        return self.expanded(view, (steps.stop - steps.start, self.chain.num_states))

    def matrices(self, steps: slice) -> Array:
        """Return the matrices from each step t to t + 1, [groups, n, K, K].

        They are [groups, 1, K, K] if one matrix stands for every step, and weights or logs, as the
        input is, in its dtype.
        """
        view, size = self.views["transitions"], self.chain.num_states
        if not self.chain.has_one_matrix:
            view = view[..., steps, :, :]
        xp, count = self.ctx.xp, int(view.shape[-3])
        x = xp.reshape(view, (self.groups, count, size, size)) if self.shape else view[None, ...]
        return x if self.order is None or self.axis else self.ctx.pick(x, self.order, 0)

    def matrix_panels(
        self, first: int, count: int, size: int
    ) -> Iterator[tuple[slice, slice, Array]]:
        """Yield the matrices of `count` transitions from step `first` on, in panels of columns.

        A panel has at most `size` entries, and at least one column. One matrix for every step makes
        panels of all transitions.

        Yields
        ------
        transitions, columns : slice
            Transitions are counted from the first.
        matrices : array
            In the dtype of the input: [groups, K, columns] of one matrix for every step, else
            [groups * n, K, columns].
        """
        K, xp = self.chain.num_states, self.ctx.xp
        at_a_time = count if self.chain.has_one_matrix else size // (self.groups * K**2)
        for transitions in chunks(count, max(1, at_a_time)):
            x = self.matrices(slice(first + transitions.start, first + transitions.stop))
            x = xp.reshape(x, (-1, K, K))
            for columns in chunks(K, max(1, size // (int(x.shape[0]) * K))):
                yield transitions, columns, x[..., columns]

    def by_matrix(self, x: Array) -> Array:
        """Return messages [n, groups, rows, K] as [matrices, rows that share one, K].

        That is [groups, n * rows, K] for one matrix for every step, else [groups * n, rows, K].
        """
        xp, (count, groups, rows, K) = self.ctx.xp, x.shape
        shape = (groups, -1) if self.chain.has_one_matrix else (groups * count, rows)
        x = xp.permute_dims(x, (1, 0, 2, 3)) if groups > 1 else x
        return xp.reshape(x, (*shape, K))

    def boundary_weights(self, backward: bool) -> tuple[Array, bool]:
        """Return initial (backward: final) weights [groups, rows, K], and whether they are logs.

        They keep the dtype of the input; if there is none, they are zeros in log space.
        """
        part, ctx, K = "final" if backward else "initial", self.ctx, self.chain.num_states
        if part in self.views:
            return self.expanded(self.views[part], (K,)), part in self.chain.logs
        dtype = ctx.dtype(ctx.precision)
        return ctx.xp.zeros(self.state_shape, dtype=dtype, device=ctx.device), True

    def expanded(self, x: Array, trailing: Shape) -> Array:
        """Return an array [*shape, *trailing] as [groups, rows, *trailing], sorted by length."""
        x = self.unsorted(x, trailing)
        return x if self.order is None else self.ctx.pick(x, self.order, self.axis)

    def unsorted(self, x: Array, trailing: Shape) -> Array:
        """Return an array [*shape, ...] as [groups, rows, *trailing], in the chain's order."""
        xp = self.ctx.xp
        if not self.shape:
            return x[None, None, ...]
        if tuple(x.shape) != (*self.shape, *trailing):
            x = xp.broadcast_to(x, (*self.shape, *trailing))
        return xp.reshape(x, (self.groups, self.rows, *trailing))

    def valid_steps(self, steps: slice) -> Array | None:
        """Return a mask [n, groups, rows] of steps within rows' lengths; None if all are."""
        if self.lengths is None or steps.stop <= int(self.lengths.min()):
            return None
        is_valid = np.arange(steps.start, steps.stop)[:, None, None] < self.lengths
        return self.ctx.xp.asarray(is_valid, device=self.ctx.device)

    def view(self, x: Array, place: tuple[Any, ...] = ()) -> Array:
        """Return the shard's part of an array [*batch, ...]; `place` indexes the other axes."""
        x = arrange(self.ctx.xp, self.chain, x, x.ndim - len(self.shape))
        return x[(*self.box, *place, ...)]

    def read(self, x: Array, place: tuple[Any, ...] = ()) -> Array:
        """Return the shard's part of an array as [groups, rows, ...], sorted by length."""
        x = self.view(x, place)
        return self.expanded(x, tuple(x.shape[len(self.shape) :]))

    def write(
        self, out: Array, values: Array, place: tuple[Any, ...] = (), is_sorted: bool = True
    ) -> None:
        """Write values [groups, rows, ...] to the shard's part of an array.

        Their rows are sorted by length or, if not `is_sorted`, in the chain's order.
        """
        xp, view = self.ctx.xp, self.view(out, place)
        if is_sorted and self.inverse is not None:
            values = xp.take(values, self.inverse, axis=self.axis)
        values = xp.reshape(values, view.shape) if self.shape else values[0, 0, ...]
        # Other libraries than these do not convert values that are assigned.
        view[...] = values if self.ctx.has_out else self.ctx.cast(values, view.dtype)


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
    """Yield the shards of a chain, with at most `groups` groups and `rows` rows each."""
    views, shape, inner = chain.parts, chain.arranged, len(chain.group_axes)
    if chain.batch:
        views = {n: arrange(ctx.xp, chain, x, len(PARTS[n].axes)) for n, x in views.items()}
    box = tuple(map(slice, (0,) * len(shape), shape))
    full_shard = Shard(ctx, chain, box, shape, *chain.sizes, chain.num_steps, views)
    if chain.lengths is None and groups >= chain.sizes[0] and rows >= chain.sizes[1]:
        yield full_shard
        return
    if chain.lengths is not None and chain.sizes[1] > 1:
        # Only one axis can be sorted by length: rows within a group, or groups of one row.
        groups = 1
    for group_box in boxes(shape[:inner], groups):
        for row_box in boxes(shape[inner:], rows):
            yield full_shard.part((*group_box, *row_box))
