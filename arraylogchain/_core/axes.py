"""Layouts of products with broadcast batch axes, and partitions of index spaces into boxes.

A product of `a` [..., M, K] and `b` [..., K, N] treats its batch axes in three ways. An axis that
only `a` has is *folded into the rows* of `a`, one that only `b` has into the columns of `b`. One
that both have is a true batch axis. Then no operand is broadcast against the other, nothing is
expanded, and the product is one batched matrix multiply.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

Array = Any
Box = tuple[slice, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fold:
    """Arrangement of the axes of two operands for one batched product.

    The operands are viewed as `a` [*batch, *rows, K] and `b` [*batch, K, *cols], their product as
    [*batch, *rows, *cols]; each of the three may be several axes.
    """

    batch: Shape
    rows: Shape
    cols: Shape
    inner: Shape
    sizes: tuple[int, int, int, int]  # batch entries, rows, columns, contracted terms
    copies: bool  # whether merging axes may copy a tile
    out_shape: Shape
    # Of a, b and the product:
    shapes: tuple[Shape, Shape, Shape]  # padded with ones to the same number of axes, at least two
    orders: tuple[Shape, Shape, Shape]  # axes in the order of a view, dropped ones first
    dropped: tuple[int, int, int]  # numbers of axes, of length one, that views drop

    @property
    def is_identity(self) -> bool:
        """Whether the axes of the product are in the order of the result."""
        return not any(self.dropped)

    def view(self, xp: Any, x: Array, side: int) -> Array:
        """Return a view of a, b or the product (side 0, 1, 2) with its own axes only."""
        if x.shape != self.shapes[side]:
            x = xp.reshape(x, self.shapes[side])
        if self.is_identity:
            return x
        return xp.permute_dims(x, self.orders[side])[(0,) * self.dropped[side] + (...,)]

    def restored(self, xp: Any, x: Array, side: int) -> Array:
        """Return the inverse of `view`: an array in the shape of a, b or the product."""
        shape, order = self.shapes[side], self.orders[side]
        x = xp.reshape(x, tuple(shape[axis] for axis in order))
        return xp.permute_dims(x, tuple(order.index(axis) for axis in range(len(order))))


@lru_cache(maxsize=256)
def fold(a_shape: Shape, b_shape: Shape) -> Fold:
    """Return the arrangement of the axes of a product; raise ValueError if shapes do not fit."""
    arguments = {"a": a_shape, "b": b_shape}
    for name, shape in arguments.items():
        if not shape:
            raise ValueError(f"{name} is 0-dimensional; it must have at least one axis")
    a = (1, *a_shape) if len(a_shape) == 1 else a_shape
    b = (*b_shape, 1) if len(b_shape) == 1 else b_shape
    if a[-1] != b[-2]:
        raise ValueError(
            f"a of shape {a_shape} and b of shape {b_shape} do not fit: the last axis of a "
            f"({a[-1]}) must be as long as {'the axis' if len(b_shape) == 1 else 'axis -2'} "
            f"of b ({b[-2]})"
        )
    nd = max(len(a), len(b))
    a, b = ((1,) * (nd - len(x)) + x for x in (a, b))
    pairs = list(zip(a[:-2], b[:-2], strict=True))
    batch_shape = check_batches({"a": a[:-2], "b": b[:-2]}, arguments)
    batch_axes = tuple(axis for axis, (m, n) in enumerate(pairs) if m == n)
    row_axes = tuple(axis for axis, (m, n) in enumerate(pairs) if n == 1 != m)
    col_axes = tuple(axis for axis, (m, n) in enumerate(pairs) if m == 1 != n)
    a_axes, b_axes = (*row_axes, nd - 2), (*col_axes, nd - 1)
    batch, rows = (tuple(a[axis] for axis in axes) for axes in (batch_axes, a_axes))
    cols = tuple(b[axis] for axis in b_axes)
    return Fold(
        batch=batch,
        rows=rows,
        cols=cols,
        inner=(a[-1],),
        sizes=(math.prod(batch), math.prod(rows), math.prod(cols), a[-1]),
        copies=any(sum(n > 1 for n in group) > 1 for group in (batch, rows, cols)),
        out_shape=batch_shape + a[-2:-1] * (len(a_shape) > 1) + b[-1:] * (len(b_shape) > 1),
        shapes=(a, b, (*batch_shape, a[-2], b[-1])),
        orders=(
            (*col_axes, *batch_axes, *a_axes, nd - 1),
            (*row_axes, *batch_axes, nd - 2, *b_axes),
            (*batch_axes, *a_axes, *b_axes),
        ),
        dropped=(len(col_axes), len(row_axes), 0),
    )


def check_batches(batches: Mapping[str, Shape], shapes: Mapping[str, Shape]) -> Shape:
    """Return the broadcast batch axes of several arrays; raise ValueError if they do not fit."""
    try:
        return np.broadcast_shapes(*batches.values())
    except ValueError:
        arguments = ", ".join(f"{name} has shape {shapes[name]}" for name in batches)
        raise ValueError(f"batch axes do not broadcast: {arguments}") from None


def boxes(shape: Shape, limit: int) -> Iterator[Box]:
    """Yield boxes of at most `limit` points that partition an index space.

    Trailing axes are whole if they fit.

    Parameters
    ----------
    shape : tuple of int
        Lengths of the axes.
    limit : int
        Points in a box, at least 1.

    Yields
    ------
    tuple of slice
        One per axis; the boxes are disjoint and cover the space in order.

    Examples
    --------
    >>> [[(s.start, s.stop) for s in box] for box in boxes((3, 4), 8)]
    [[(0, 1), (0, 4)], [(1, 3), (0, 4)]]
    """
    num_split = len(shape)  # axes from here on are whole
    points = 1
    while num_split and points * shape[num_split - 1] <= limit:
        num_split -= 1
        points *= shape[num_split]
    trailing = tuple(slice(0, n) for n in shape[num_split:])
    if not num_split:
        yield trailing
        return
    cut = shape[num_split - 1]
    parts = -(-cut // max(1, limit // points))
    for lead in itertools.product(*(range(n) for n in shape[: num_split - 1])):
        leading = tuple(slice(i, i + 1) for i in lead)
        for i in range(parts):
            start, stop = cut * i // parts, cut * (i + 1) // parts
            yield (*leading, slice(start, stop), *trailing)


def chunks(length: int, size: int) -> Iterator[slice]:
    """Yield slices of at most `size` that partition an axis."""
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def lengths(box: Box) -> Shape:
    """Return the lengths of the sides of a box."""
    return tuple(s.stop - s.start for s in box)


def within(box: Box, shape: Shape) -> Box:
    """Return the part of a box in an array that is broadcast along axes of length 1."""
    return tuple(s if n > 1 else slice(0, 1) for s, n in zip(box, shape, strict=False))
