"""Where rows of a batch are found in arrays whose batch axes broadcast against it."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from arraylogchain._compiled.loops.compiling import Integers
from arraylogchain._compiled.loops.recursion import (
    BATCH,
    COTANGENT,
    FINAL,
    INITIAL,
    LENGTHS,
    MATRICES,
    NUM_MAPS,
    POTENTIALS,
    TO_FINAL,
    TO_INITIAL,
    TO_POTENTIALS,
    TO_TRANSITIONS,
)
from arraylogchain._fold import Shape
from arraylogchain._inputs.chain import Chain


class Layout:
    """The rows of a batch in the order in which they are computed: those of a group together.

    Attributes
    ----------
    dims : integer array [d]
        Axes of the batch, those along which matrices differ first.
    maps : integer array [NUM_MAPS, d + 1]
        See `recursion.place`.
    num_rows, rows_per_group : int
    in_order : bool
        Whether that is the order of the batch.
    """

    def __init__(self, batch: Shape, own: tuple[Shape, ...]) -> None:
        potentials, transitions, initial, final, lengths = own
        skipped = len(batch) - len(transitions)
        groups = [skipped + axis for axis, n in enumerate(transitions) if n > 1]
        self.axes = (*groups, *(axis for axis in range(len(batch)) if axis not in groups))
        self.batch = batch
        self.num_rows = math.prod(batch)
        self.rows_per_group = math.prod(batch[axis] for axis in self.axes[len(groups) :])
        self.in_order = self.axes == tuple(range(len(batch)))
        self.dims: Integers = np.array([batch[axis] for axis in self.axes], np.int64)
        self.maps: Integers = np.zeros((NUM_MAPS, len(batch) + 1), np.int64)
        for kinds, shape in (
            ((POTENTIALS, TO_POTENTIALS), potentials),
            ((MATRICES, TO_TRANSITIONS), transitions),
            ((INITIAL, TO_INITIAL), initial),
            ((FINAL, TO_FINAL), final),
            ((LENGTHS,), lengths),
            ((BATCH, COTANGENT), batch),
        ):
            for kind in kinds:
                self.maps[kind, :-1] = self.steps(shape)

    def steps(self, own: Shape) -> list[int]:
        """Return how far the batch's axes step in the rows of an array with these batch axes."""
        found, step = {}, 1
        for axis in range(1, len(own) + 1):
            found[len(self.batch) - axis] = step if own[-axis] > 1 else 0
            step *= own[-axis]
        return [found.get(axis, 0) for axis in self.axes]

    def local(self, first: int) -> list[int]:
        """Return the map to arrays that begin with row `first`, and have the rows in this order."""
        steps = [math.prod(self.dims[axis + 1 :].tolist()) for axis in range(len(self.dims))]
        return [*steps, -first]

    def positions(self, rows: range) -> slice | Integers:
        """Return where rows are in a flattened batch."""
        if self.in_order:
            return slice(rows.start, rows.stop)
        return np.ravel_multi_index(self.index(self.batch, rows), self.batch)

    def index(self, own: Shape, rows: range) -> tuple[Integers, ...]:
        """Return the index of some rows in an array with these batch axes."""
        if not self.axes:
            return ()
        at = np.unravel_index(np.arange(rows.start, rows.stop), tuple(self.dims.tolist()))
        along = dict(zip(self.axes, at, strict=True))
        skipped = len(self.batch) - len(own)
        return tuple(
            along[skipped + axis] if n > 1 else np.zeros(len(rows), np.int64)
            for axis, n in enumerate(own)
        )


@lru_cache(maxsize=64)
def _layout(batch: Shape, own: tuple[Shape, ...]) -> Layout:
    return Layout(batch, own)


def layout_of(chain: Chain) -> Layout:
    own = (
        chain.potentials.shape[:-2],
        () if chain.transitions is None else chain.transitions.shape[:-3],
        () if chain.initial is None else chain.initial.shape[:-1],
        () if chain.final is None else chain.final.shape[:-1],
        () if chain.lengths is None else chain.lengths.shape,
    )
    return _layout(chain.batch, own)
