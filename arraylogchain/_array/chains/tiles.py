"""Tiles: rectangles of rows and steps of a chain, as sweeps over time read them.

A chain multiplies a row vector by one matrix after another,

    state[0] = initial * exp(x[0]),    state[i] = (state[i - 1] @ P[i - 1]) * exp(x[i]).

A *backward* tile is the same chain read from its other end: potentials and matrices in reverse
order, matrices transposed, and the final weights in the place of the initial ones. So one sweep
serves both directions.

Batch axes along which the matrices differ are *groups*; the other batch axes hold *rows*, which
share their group's matrices. A state is an array [groups, rows, K], and a step is one batched
product with matrices [groups, K, K]: nothing that is shared is copied.

Rows of different lengths are sorted into buckets of similar lengths, each a tile of its own. Within
a tile a mask tells which rows take part in a step; the others keep their state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import array_api_compat.numpy as host
import numpy as np

from arraylogchain._context import Array, Context
from arraylogchain._fold import Box, Shape, boxes, chunks, lengths, within
from arraylogchain._inputs.chain import Chain

# Rows of different lengths are cut into at most so many buckets, each of at least so many entries
# of a state: more buckets save steps, and fewer make better use of each operation.
_MOST_BUCKETS = 8
_BUCKET_ENTRIES = 1 << 13


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
    lengths : array [groups, rows, 1] or None
        Numbers of steps, of what is selected; None if all have `num_steps`.
    shortest : int
        The smallest of them.
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
    lengths: Array | None = None
    shortest: int = 0
    backward: bool = False

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
        """Return a tile of some of the rows or, where there are several groups, of some groups."""
        own = self.lengths
        if own is not None:
            own = self.ctx.xp.take(own, index, axis=self.select_axis)
        if self.selected is not None:
            index = self.ctx.xp.take(self.selected, index)
        return replace(self, selected=index, lengths=own)

    def time(self, i: int) -> int:
        """Return the number of the chain's step that a sweep takes as number i."""
        return self.num_steps - 1 - i if self.backward else i

    def has_step(self, i: int) -> Array | None:
        """Tell which rows have step i of a sweep, [groups, rows, 1]; None for all."""
        return self._longer_than(self.time(i))

    def moves(self, i: int) -> Array | None:
        """Tell which rows have a transition that leads to step i of a sweep; None for all.

        The others have ended or, backward, have not begun.
        """
        return self._longer_than(self.num_steps - i if self.backward else i)

    def _longer_than(self, time: int) -> Array | None:
        return None if self.lengths is None or time < self.shortest else self.lengths > time

    @property
    def masks_matrices(self) -> bool:
        """Whether some matrices are past the ends of all rows that they belong to."""
        return self.lengths is not None and not self.select_axis

    def matrix_number(self, i: int) -> int:
        """Return which matrix leads to step i of a sweep."""
        if self.chain.has_one_matrix:
            return 0
        return self.time(i) if self.backward else i - 1

    def matrix(self, i: int) -> Array:
        """Return the matrices that lead to step i of a sweep, as given, [groups, K, K]."""
        xp, size = self.ctx.xp, self.chain.num_states
        assert self.transitions is not None  # there are several steps
        matrix = self.transitions[..., self.matrix_number(i), :, :]
        matrix = xp.reshape(matrix, (self.groups, size, size))
        if not self.select_axis:
            matrix = self._selected(matrix)
            moves = self.moves(i)
            if self.masks_matrices and moves is not None:
                # Matrices past the end of all rows of a group are not to be read.
                matrix = xp.where(xp.any(moves, axis=1)[..., None], matrix, xp.ones_like(matrix))
        return xp.matrix_transpose(matrix) if self.backward else matrix

    def potentials_of(self, steps: slice) -> Array:
        """Return the potentials of some steps of a sweep, [groups, rows, len(steps), K]."""
        xp, count = self.ctx.xp, steps.stop - steps.start
        first = self.num_steps - steps.stop if self.backward else steps.start
        x = self.expanded(
            self.potentials[..., first : first + count, :], (count, self.chain.num_states)
        )
        if self.lengths is not None and first + count > self.shortest:
            times = xp.arange(
                first, first + count, dtype=self.lengths.dtype, device=self.ctx.device
            )
            real = self.lengths[..., None] > times[:, None]
            # Past the end states are not weighted: exp(0) is 1.
            x = xp.where(real, x, xp.zeros_like(x))
        return xp.flip(x, axis=-2) if self.backward else x

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
    ends = None if chain.lengths is None else arrange(host, chain, chain.lengths, 0)
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
                yield from _buckets(tile, own.reshape(tile.groups, tile.rows))


def _buckets(tile: Tile, own: np.ndarray) -> Iterator[Tile]:
    """Cut a tile into rows, or groups, of similar lengths."""
    axis, entries = tile.select_axis, math.prod(tile.state_shape)
    longest = own.max(axis=1 - axis)
    order = np.argsort(-longest, kind="stable")
    number = min(_MOST_BUCKETS, entries // _BUCKET_ENTRIES, len(order))
    if longest.min() == longest.max():
        number = 1
    for some in chunks(len(order), -(-len(order) // max(1, number))):
        index = order[some]
        ends = np.take(own, index, axis=axis)
        count = int(ends.max())
        part = replace(tile, num_steps=count)
        if len(index) < len(order):
            part = replace(part, selected=tile.ctx.integers(index))
        else:
            ends = own
        if int(ends.min()) < count:
            masked = tile.ctx.integers(np.ascontiguousarray(ends)[..., None])
            part = replace(part, lengths=masked, shortest=int(ends.min()))
        yield part
