"""The inputs of a recursion over time, arranged for batched matrix products.

A chain multiplies a row vector by one matrix after another,

    state[0] = start * exp(x[0]),    state[i] = (state[i - 1] @ P[i - 1]) * exp(x[i]).

*Backward* it starts at the other end, and weighs before it multiplies,

    state[0] = 1,    state[i] = (state[i - 1] * exp(x[-i])) @ P[-i].T,

which sums over all paths from each state on, the potential of its own step left out.

Batch axes along which the matrices P differ are *groups*; the other batch axes hold *rows*, which
share their group's matrices. A state is an array [groups, rows, K], and a step is one batched
product with matrices [groups, K, K]: nothing that is shared is copied.

Chains that end after different numbers of steps are sorted, the longest first, so that those that
go on are the first of them at every step. A state that has reached its chain's end stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import array_api_compat.numpy as host
import numpy as np

from arraylogchain._arrays import on_host
from arraylogchain._context import Array, Context
from arraylogchain._fold import Box, Shape, boxes, lengths, within

# Axes of a chain's arrays that are not batch axes.
_TRAILING = {
    "transitions": 3,
    "potentials": 2,
    "start": 1,
    "start_offset": 0,
    "end": 1,
    "end_offset": 0,
}


@dataclass(frozen=True, slots=True)
class Chain:
    """Arrays of whole chains, checked, with batch axes as given; None stands for all ones.

    Attributes
    ----------
    batch : tuple of int
        The batch axes of the arrays, broadcast together.
    count : int
        Number of states, one more than of products.
    size : int
        Number of entries of a state, K.
    transitions : array [..., 1 or count - 1, K, K] or None
        None only if there is one state.
    potentials : array [..., count, K] or None
        Logarithms.
    start : array [..., K] or None
    transitions_in_logs, start_in_logs : bool
        Whether those arrays hold logarithms.
    start_offset : array [...] or None
        Whole numbers to be added to the logarithms of all weights.
    lead : int
        Number of first states, 0 or 1, that have no potentials; `potentials` leaves them out.
    end : array [..., K] or None
        Logarithms of the weights of what follows the last state: where steps that run backward
        start. They have no part in forward steps.
    end_offset : array [...] or None
        Whole numbers to be added to them.
    lengths : numpy.ndarray [...] or None
        How many states of each chain there are, `count` at most; what lies past them is not read.
    """

    batch: Shape
    count: int
    size: int
    transitions: Array | None
    potentials: Array | None
    start: Array | None
    transitions_in_logs: bool
    start_in_logs: bool
    start_offset: Array | None = None
    lead: int = 0
    end: Array | None = None
    end_offset: Array | None = None
    lengths: np.ndarray | None = None

    @property
    def group_axes(self) -> Shape:
        """Batch axes along which the matrices differ."""
        if self.transitions is None:
            return ()
        own = self.transitions.shape[:-3]
        skipped = len(self.batch) - len(own)
        return tuple(skipped + axis for axis, n in enumerate(own) if n > 1)

    @property
    def row_axes(self) -> Shape:
        return tuple(axis for axis in range(len(self.batch)) if axis not in self.group_axes)

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of groups and of rows in each."""
        groups = math.prod(self.batch[axis] for axis in self.group_axes)
        return groups, math.prod(self.batch) // max(groups, 1)

    def arrange(self, xp: object, x: Array, trailing: int) -> Array:
        """View an array as [*group axes, *row axes, *trailing axes], with ones for missing axes."""
        own = tuple(x.shape)
        padded = (1,) * (len(self.batch) + trailing - len(own)) + own
        order = (*self.group_axes, *self.row_axes)
        order = (*order, *range(len(self.batch), len(padded)))
        return xp.permute_dims(xp.reshape(x, padded), order)  # type: ignore[attr-defined]

    def part(self, box: Box) -> Chain:
        """Return the chains of a box of the batch, with as many batch axes."""

        def cut(x: Any, trailing: int) -> Any:
            if x is None:
                return None
            own = x.ndim - trailing
            return x[(*within(box[len(box) - own :], tuple(x.shape)), ...)]

        return replace(
            self,
            batch=lengths(box),
            lengths=cut(self.lengths, 0),
            **{name: cut(getattr(self, name), n) for name, n in _TRAILING.items()},
        )

    def head(self, count: int) -> Chain:
        """Return the chain of the first states."""
        matrices, potentials, lengths = self.transitions, self.potentials, self.lengths
        return replace(
            self,
            count=count,
            transitions=None if matrices is None else first_matrices(matrices, count),
            potentials=None if potentials is None else potentials[..., : count - self.lead, :],
            lengths=_clipped(lengths, count),
        )

    def tail(
        self, first: int, start: Array | None = None, start_offset: Array | None = None
    ) -> Chain:
        """Return the chain from state number `first` on, given the logs of that one, or ones.

        That first state has no potentials: they are part of it.
        """
        matrices, potentials, lengths = self.transitions, self.potentials, self.lengths
        assert matrices is not None  # there are several states
        count = self.count - first
        return replace(
            self,
            count=count,
            transitions=matrices if int(matrices.shape[-3]) == 1 else matrices[..., first:, :, :],
            potentials=None if potentials is None else potentials[..., first + 1 - self.lead :, :],
            start=start,
            start_in_logs=True,
            start_offset=start_offset,
            lead=1,
            lengths=None if lengths is None else _clipped(lengths - first, count),
        )

    def tiles(self, ctx: Context, groups: int, rows: int) -> Iterator[tuple[Box, Steps]]:
        """Yield parts of the batch, as boxes of its arranged axes, with their steps."""
        xp = ctx.xp
        views = {
            name: None if (x := getattr(self, name)) is None else self.arrange(xp, x, trailing)
            for name, trailing in _TRAILING.items()
        }
        for of_groups in boxes(tuple(self.batch[axis] for axis in self.group_axes), groups):
            for of_rows in boxes(tuple(self.batch[axis] for axis in self.row_axes), rows):
                box = (*of_groups, *of_rows)
                parts: dict[str, Any] = {
                    name: None if view is None else view[(*within(box, view.shape), ...)]
                    for name, view in views.items()
                }
                steps = Steps(
                    ctx=ctx,
                    chain=self,
                    shape=lengths(box),
                    groups=math.prod(lengths(of_groups)),
                    rows=math.prod(lengths(of_rows)),
                    count=self.count,
                    **parts,
                )
                yield box, steps if self.lengths is None else steps.longest_first(box)


def of_units(some: slice, axis: int) -> tuple[Any, ...]:
    """Return the index of some rows (axis 1) or groups (axis 0)."""
    return (*(slice(None),) * axis, some, ...)


def first_of(n: int, axis: int) -> tuple[Any, ...]:
    """Return the index of the first n of rows (axis 1) or groups (axis 0)."""
    return of_units(slice(0, n), axis)


def _ends(lengths: np.ndarray, axis: int) -> np.ndarray:
    """Return the `Steps.ends` of lengths [groups, rows], sorted along an axis."""
    longest, shortest = lengths.max(axis=1 - axis), lengths.min(axis=1 - axis)
    return np.stack([longest, np.minimum.accumulate(shortest)], axis=-1)


def _clipped(lengths: np.ndarray | None, count: int) -> np.ndarray | None:
    """Return the lengths of chains that are cut to `count` states; None if all have as many."""
    if lengths is None or np.all(lengths >= count):
        return None
    return lengths.clip(1, count)


def first_matrices(x: Array, count: int) -> Array:
    """Return the matrices of a chain's first `count` states, of [..., steps or 1, K, K]."""
    # One is kept though there may be no product: batch axes are told from it.
    return x if int(x.shape[-3]) <= 1 else x[..., : max(count - 1, 1), :, :]


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of one tile of chains; the arrays are views, copied a few steps at a time.

    Attributes
    ----------
    shape : tuple of int
        The batch axes of the tile, those of groups first.
    groups, rows : int
        Of the tile.
    count : int
        Number of states of the longest chain.
    picked : array [n] or None
        Those of the tile's rows or, where there are several groups, groups that these are the
        steps of.
    lengths : array [groups, rows, 1] or None
        Numbers of states, of what is picked; None if all have `count`.
    ends : numpy.ndarray [n, 2] or None
        For each row or group that is picked, those with the longest chains first: the largest of
        its lengths, and the smallest of those up to it.
    """

    ctx: Context
    chain: Chain
    shape: Shape
    groups: int
    rows: int
    count: int
    transitions: Array
    potentials: Array | None
    start: Array | None
    start_offset: Array | None
    end: Array | None
    end_offset: Array | None
    picked: Array | None = None
    lengths: Array | None = None
    ends: np.ndarray | None = None
    backward: bool = False

    @property
    def select_axis(self) -> int:
        """The axis of a state along which parts of a tile can go ways of their own."""
        return 0 if self.groups > 1 else 1

    @property
    def groups_picked(self) -> int:
        if self.picked is None or self.select_axis:
            return self.groups
        return int(self.picked.shape[0])

    @property
    def rows_picked(self) -> int:
        if self.picked is None or not self.select_axis:
            return self.rows
        return int(self.picked.shape[0])

    def pick(self, units: Array) -> Steps:
        """Return the steps of some rows or, where there are several groups, of some groups.

        With chains of different lengths, their order has to stay as it is.
        """
        lengths, ends, axis = self.lengths, self.ends, self.select_axis
        if ends is not None:
            lengths = self.ctx.xp.take(lengths, units, axis=axis)
            ends = _ends(on_host("lengths", lengths)[..., 0], axis)
        if self.picked is not None:
            units = self.ctx.xp.take(self.picked, units)
        return replace(self, picked=units, lengths=lengths, ends=ends)

    def first(self, n: int) -> Steps:
        """Return the steps of the first n rows or, where there are several groups, groups."""
        if self.ends is None or n == len(self.ends):
            return self
        assert self.picked is not None
        assert self.lengths is not None
        return replace(
            self,
            picked=self.picked[:n],
            lengths=self.lengths[first_of(n, self.select_axis)],
            ends=self.ends[:n],
        )

    @property
    def shortest(self) -> int:
        """The smallest number of states of a chain."""
        return self.count if self.ends is None else int(self.ends[-1, 1])

    @property
    def units(self) -> int:
        """How many rows or, where there are several groups, groups these are the steps of."""
        return self.rows_picked if self.select_axis else self.groups_picked

    def units_at(self, time: int) -> int:
        """Return how many rows, or groups, have a state of that number: the first ones."""
        if self.ends is None:
            return self.units
        return len(self.ends) - int(np.searchsorted(self.ends[::-1, 0], time, side="right"))

    def units_advancing(self, i: int) -> int:
        """Return how many rows, or groups, take part in making state number i: the first ones."""
        return self.units if i == 0 else self.units_at(self.count - i if self.backward else i)

    def longest_first(self, box: Box) -> Steps:
        """Return these steps, of a box of the batch, sorted by the lengths of rows or groups."""
        chain, axis = self.chain, self.select_axis
        assert chain.lengths is not None
        arranged = chain.arrange(host, chain.lengths, trailing=0)
        own = arranged[within(box, arranged.shape)]
        own = np.broadcast_to(own, self.shape).reshape(self.groups, self.rows)
        units = np.argsort(-own.max(axis=1 - axis), kind="stable")
        own = np.take(own, units, axis=axis)
        steps = replace(self, count=int(own.max()), picked=self.ctx.integers(units))
        if int(own.min()) == steps.count:
            return steps
        return replace(
            steps,
            lengths=self.ctx.integers(own[..., None]),
            ends=_ends(own, axis),
        )

    def real(self, time: int) -> Array | None:
        """Tell which chains have a state of that number, [groups, rows, 1]; None for all."""
        return None if self.lengths is None or time < self.shortest else self.lengths > time

    def advancing(self, i: int) -> Array | None:
        """Tell which states number i come from those before, [groups, rows, 1]; None for all.

        The others have reached their chain's end or, backward, have not left it.
        """
        return None if i == 0 else self.real(self.count - i if self.backward else i)

    def is_one_matrix(self) -> bool:
        return int(self.transitions.shape[-3]) == 1

    def matrix(self, i: int) -> Array:
        """Return the matrix of product i, as given, [groups, K, K]; backward, it is transposed."""
        xp, size, last = self.ctx.xp, self.chain.size, self.count - 2
        at = 0 if self.is_one_matrix() else last - i if self.backward else i
        matrix = xp.reshape(self.transitions[..., at, :, :], (self.groups, size, size))
        if self.backward:
            matrix = xp.matrix_transpose(matrix)
        if not self.select_axis:
            matrix = self._picked(matrix)
            real = self.real(at + 1)
            if real is not None:
                # Matrices of groups that have ended are not to be read.
                matrix = xp.where(xp.any(real, axis=1)[..., None], matrix, xp.ones_like(matrix))
        return matrix

    @property
    def first_weighed(self) -> int:
        """The first state that is weighed with potentials."""
        return 1 if self.backward else self.chain.lead

    @property
    def start_in_logs(self) -> bool:
        return self.backward or self.chain.start_in_logs

    def potentials_of(self, steps: slice) -> Array | None:
        """Return what states number `steps` are weighed with, [groups, rows, len(steps), K].

        As given, x[steps]; backward it is x[-steps], because weights go ahead of products.
        """
        if self.potentials is None:
            return None
        xp, lead, length = self.ctx.xp, self.chain.lead, steps.stop - steps.start
        stop = self.count - steps.start + 1 if self.backward else steps.stop
        x = self.potentials[..., stop - length - lead : stop - lead, :]
        x = self.expanded(x, (length, self.chain.size))
        if self.lengths is not None and self.real(stop - 1) is not None:
            dtype = self.lengths.dtype
            times = xp.arange(stop - length, stop, dtype=dtype, device=self.ctx.device)
            # Past the end states are not weighed: exp(0) is 1.
            real = self.lengths[..., None] > times[:, None]
            x = xp.where(real, x, xp.zeros_like(x))
        return xp.flip(x, axis=-2) if self.backward else x

    def start_of(self) -> Array | None:
        """Return the start, as given, [groups, rows, K]; None for ones."""
        start = self.end if self.backward else self.start
        return None if start is None else self.expanded(start, (self.chain.size,))

    def offset_of(self) -> Array:
        """Return the offset that states begin with, [groups, rows, 1], in the widest precision."""
        ctx, offset = self.ctx, self.end_offset if self.backward else self.start_offset
        if offset is None:
            shape = (self.groups_picked, self.rows_picked, 1)
            return ctx.xp.zeros(shape, dtype=ctx.dtype(ctx.widest), device=ctx.device)
        return self.expanded(offset[..., None], (1,))

    def place(self, view: Array, values: Array, add: bool = False) -> None:
        """Write values [groups, rows, ...], or add them, where they belong in a view of the tile.

        Parameters
        ----------
        view : array [*shape, ...]
            Groups that are picked may have one row here.
        """
        ctx, xp, axes = self.ctx, self.ctx.xp, len(self.chain.group_axes)
        shape, trailing = tuple(view.shape), tuple(values.shape[2:])
        where: tuple[Any, ...] = ()
        split = self.shape[:axes] if self.select_axis == 0 else self.shape[axes:]
        if self.picked is not None and split:
            index, rest = [], self.picked
            for n in reversed(split):
                index.append(xp.remainder(rest, n))
                rest = xp.floor_divide(rest, n)
            n = int(self.picked.shape[0])
            batch = (n, *shape[axes : len(self.shape)]) if self.select_axis == 0 else (n,)
            where = (0,) * (axes * self.select_axis) + tuple(reversed(index))
            shape = (*batch, *trailing)
        values = xp.astype(xp.reshape(values, shape), view.dtype, copy=False)
        ctx.put(view, (*where, ...), values, add)

    def expanded(self, x: Array, trailing: Shape) -> Array:
        """Return an array [*shape, *trailing] as [groups, rows, *trailing], of what is picked."""
        xp = self.ctx.xp
        if tuple(x.shape) != (*self.shape, *trailing):
            x = xp.broadcast_to(x, (*self.shape, *trailing))
        return self._picked(xp.reshape(x, (self.groups, self.rows, *trailing)))

    def _picked(self, x: Array) -> Array:
        if self.picked is None:
            return x
        return self.ctx.pick(x, self.picked, self.select_axis)
