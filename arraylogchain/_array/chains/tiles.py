"""Tiles: rectangles of rows and steps of a chain, as sweeps over time read them.

A chain multiplies a row vector by one matrix after another,

    state[0] = initial * exp(x[0]),    state[i] = (state[i - 1] @ P[i - 1]) * exp(x[i]).

A *backward* tile is the same chain read from its other end: potentials and matrices in reverse
order, matrices transposed, and the final weights in the place of the initial ones. So one sweep
serves both directions.

Batch axes along which the matrices differ are *groups*; the other batch axes hold *rows*, which
share their group's matrices. A state is an array [groups, rows, K], and a step is one batched
product with matrices [groups, K, K]: nothing that is shared is copied.

Rows of different lengths are sorted, the longest first: the rows that have a step are the first so
many, and only these are read and computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import array_api_compat.numpy as host
import numpy as np

from arraylogchain._array.chains.states import part_of
from arraylogchain._context import Array, Context
from arraylogchain._fold import Box, Shape, boxes, lengths, within
from arraylogchain._inputs.chain import Chain


def arrange(xp: Any, chain: Chain, x: Array, trailing: int) -> Array:
    """View an array as [*group axes, *row axes, *trailing axes], with ones for missing axes."""
    own = tuple(x.shape)
    padded = (1,) * (len(chain.batch) + trailing - len(own)) + own
    order = (*chain.group_axes, *chain.row_axes, *range(len(chain.batch), len(padded)))
    return xp.permute_dims(xp.reshape(x, padded), order)


@dataclass(frozen=True, slots=True)
class Tile:
    """Some rows of a chain; the arrays are views, of which a few steps are copied at a time.

    Attributes
    ----------
    box : tuple of slice
        The tile's place among the arranged batch axes.
    shape : tuple of int
        Their lengths, those of groups first.
    groups, rows : int
        Of the tile before anything is selected.
    num_steps : int
        Steps of the longest row.
    selected : array [n] or None
        The rows or, where there are several groups, the groups that these are; None for all.
    lengths : numpy.ndarray [n] or None
        Numbers of steps, of what is selected, the largest first; None if all have `num_steps`.
    counts : dict
        How many of those have a step, by its number in time, as far as it was asked for.
    """

    ctx: Context
    chain: Chain
    box: Box
    shape: Shape
    groups: int
    rows: int
    num_steps: int
    potentials: Array
    transitions: Array | None
    initial: Array | None
    final: Array | None
    selected: Array | None = None
    lengths: np.ndarray | None = None
    backward: bool = False
    counts: dict[int, int] = field(default_factory=dict)

    @property
    def select_axis(self) -> int:
        """The axis of a state along which rows, or groups, can be selected."""
        return 0 if self.groups > 1 else 1

    @property
    def state_shape(self) -> tuple[int, int, int]:
        count = None if self.selected is None else int(self.selected.shape[0])
        groups = self.groups if count is None or self.select_axis else count
        rows = self.rows if count is None or not self.select_axis else count
        return groups, rows, self.chain.num_states

    def reversed(self) -> Tile:
        """Return the same rows, read from the last step to the first."""
        return replace(self, backward=not self.backward)

    def select(self, index: Array) -> Tile:
        """Return a tile of some of the rows or, where there are several groups, of some groups.

        Their numbers are in ascending order.
        """
        count = 0 if self.lengths is None else index.shape[0]
        some = [int(index[n]) for n in range(count)]
        return self._of(self.ctx.xp.take(self._numbers(), index), some)

    def part(self, lanes: slice) -> Tile:
        """Return a tile of a slice of the rows or, where there are several groups, of groups."""
        if not lanes.start and lanes.stop == self.state_shape[self.select_axis]:
            return self
        return self._of(self._numbers()[lanes], lanes)

    def _of(self, selected: Array, some: slice | list[int]) -> Tile:
        own = None if self.lengths is None else self.lengths[some]
        return replace(self, selected=selected, lengths=own, counts={})

    def _numbers(self) -> Array:
        """Return which rows, or groups, are selected."""
        if self.selected is not None:
            return self.selected
        count, ctx = self.state_shape[self.select_axis], self.ctx
        return ctx.xp.arange(count, dtype=ctx.index_dtype, device=ctx.device)

    def time(self, i: int) -> int:
        """Return the number of the chain's step that a sweep takes as number i."""
        return self.num_steps - 1 - i if self.backward else i

    def count(self, i: int) -> int:
        """Return how many of the rows, or groups, have step i of a sweep."""
        return self._longer_than(self.time(i))

    def count_moves(self, i: int) -> int:
        """Return how many have a transition that leads to step i of a sweep, from the one before.

        Of those that have step i, the others begin with it: backward, or at step 0.
        """
        if i == 0 or i == self.num_steps:
            return 0
        return self._longer_than(self.num_steps - i if self.backward else i)

    def ending(self, i: int) -> slice:
        """Return which rows, or groups, a sweep ends with step i for."""
        if self.backward and i < self.num_steps - 1:
            return slice(0, 0)
        return slice(self.count_moves(i + 1), self.count(i))

    def _longer_than(self, time: int) -> int:
        if self.lengths is None:
            return self.state_shape[self.select_axis]
        if time not in self.counts:
            self.counts[time] = int(np.count_nonzero(self.lengths > time))
        return self.counts[time]

    def matrix_number(self, i: int) -> int:
        """Return which matrix leads to step i of a sweep."""
        if self.chain.has_one_matrix:
            return 0
        return self.time(i) if self.backward else i - 1

    def matrix(self, i: int) -> Array:
        """Return the matrices that lead to step i of a sweep, as given, [groups, K, K].

        They are those of groups that have such a transition.
        """
        xp, size = self.ctx.xp, self.chain.num_states
        assert self.transitions is not None  # there are several steps
        matrix = self.transitions[..., self.matrix_number(i), :, :]
        matrix = xp.reshape(matrix, (self.groups, size, size))
        if not self.select_axis:
            matrix = self._selected(matrix)[: self.count_moves(i), ...]
        return xp.matrix_transpose(matrix) if self.backward else matrix

    def potentials_of(self, steps: slice) -> Array:
        """Return the potentials of some steps in time, [groups, rows, len(steps), K].

        They are those of rows, or groups, that have one of the steps, and 0 past the end of each.
        """
        count, first = steps.stop - steps.start, steps.start
        here = self.part(slice(self._longer_than(first)))
        x = here.expanded(
            self.potentials[..., first : first + count, :], (count, self.chain.num_states)
        )
        if here.lengths is not None:
            # What is selected is a copy.
            for t in range(count):
                ended = slice(self._longer_than(first + t), None)
                part_of(x, ended, self.select_axis)[:, :, t, :] = 0.0
        return x

    def start(self) -> Array | None:
        """Return what a sweep starts with, as given, [groups, rows, K]; None for ones."""
        start = self.final if self.backward else self.initial
        return None if start is None else self.expanded(start, (self.chain.num_states,))

    @property
    def start_in_logs(self) -> bool:
        return self.chain.final_in_logs if self.backward else self.chain.initial_in_logs

    def expanded(self, x: Array, trailing: Shape) -> Array:
        """Return an array [*shape, *trailing] as [groups, rows, *trailing], of what is selected."""
        xp = self.ctx.xp
        if tuple(x.shape) != (*self.shape, *trailing):
            x = xp.broadcast_to(x, (*self.shape, *trailing))
        return self._selected(xp.reshape(x, (self.groups, self.rows, *trailing)))

    def _selected(self, x: Array) -> Array:
        return x if self.selected is None else self.ctx.pick(x, self.selected, self.select_axis)

    def put_lanes(self, target: Array, index: Array, values: Array) -> None:
        """Write the values of some rows, or groups, into an array [groups, rows, ...] of all."""
        if self.select_axis:
            self.ctx.put(target, (0, index, ...), values[0, ...], add=False)
        else:
            self.ctx.put(target, (index, ...), values, add=False)

    def place(self, view: Array, values: Array, add: bool = False) -> None:
        """Write values [groups, rows, ...], or add them, where they belong in a view of the tile.

        Parameters
        ----------
        view : array [*shape, ...]
            Groups that are selected may have one row here.
        """
        ctx, xp, axes = self.ctx, self.ctx.xp, len(self.chain.group_axes)
        shape, trailing = tuple(view.shape), tuple(values.shape[2:])
        where: tuple[Any, ...] = ()
        split = self.shape[:axes] if self.select_axis == 0 else self.shape[axes:]
        if self.selected is not None and split:
            index, rest = [], self.selected
            for n in reversed(split):
                index.append(xp.remainder(rest, n))
                rest = xp.floor_divide(rest, n)
            n = int(self.selected.shape[0])
            batch = (n, *shape[axes : len(self.shape)]) if self.select_axis == 0 else (n,)
            where = (0,) * (axes * self.select_axis) + tuple(reversed(index))
            shape = (*batch, *trailing)
        values = xp.astype(xp.reshape(values, shape), view.dtype, copy=False)
        ctx.put(view, (*where, ...), values, add)


def tiles(ctx: Context, chain: Chain, groups: int, rows: int) -> Iterator[Tile]:
    """Cut a chain into tiles of at most so many groups and rows, and of rows of similar lengths."""
    xp = ctx.xp
    trailing = {"potentials": 2, "transitions": 3, "initial": 1, "final": 1}
    views = {
        name: None if (x := getattr(chain, name)) is None else arrange(xp, chain, x, n)
        for name, n in trailing.items()
    }
    ends = None
    if chain.lengths is not None:
        ends = arrange(host, chain, chain.lengths, 0)
        # Rows are sorted within their group.
        groups = groups if chain.sizes[1] == 1 else 1
    for of_groups in boxes(tuple(chain.batch[axis] for axis in chain.group_axes), groups):
        for of_rows in boxes(tuple(chain.batch[axis] for axis in chain.row_axes), rows):
            box = (*of_groups, *of_rows)
            parts: dict[str, Any] = {
                name: None if view is None else view[(*within(box, view.shape), ...)]
                for name, view in views.items()
            }
            tile = Tile(
                ctx=ctx,
                chain=chain,
                box=box,
                shape=lengths(box),
                groups=math.prod(lengths(of_groups)),
                rows=math.prod(lengths(of_rows)),
                num_steps=chain.num_steps,
                **parts,
            )
            if ends is None:
                yield tile
            else:
                own = np.broadcast_to(ends[within(box, ends.shape)], tile.shape)
                yield _sorted(tile, own.reshape(-1))


def _sorted(tile: Tile, own: np.ndarray) -> Tile:
    """Return a tile whose rows, or groups, are sorted by their lengths, the longest first."""
    order = np.argsort(-own, kind="stable")
    ends = own[order]
    tile = replace(tile, num_steps=int(ends[0]))
    if ends[0] == ends[-1]:
        return tile
    return replace(tile, selected=tile.ctx.integers(order), lengths=ends, counts={})
