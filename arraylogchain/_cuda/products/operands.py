"""Arrays as the product kernels see them: strides, sorted by what a fold makes of their axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from arraylogchain._context import Array
from arraylogchain._cuda.device import Device
from arraylogchain._cuda.launch import AXES, pack, pack_axes, struct
from arraylogchain._fold import Fold, Shape

# Up to this many rows a product counts as thin.
THIN = 32

# The structs of view.cuh and panel.cuh.
VIEW = struct((AXES, "batch lines"), (np.int64, "step count"), (np.int32, "terms_adjoin"))
PART = struct((np.int64, "first_batch batches first_line lines pitch blocks"))
PRODUCT_VIEW = struct((AXES, "batch rows columns"))
PANEL = struct((np.int64, "first_batch first_row first_column"), (np.int32, "batches rows columns"))


@dataclass(frozen=True, slots=True)
class StridedOperand:
    """One side of a product: an array, and where its lines and terms lie."""

    array: Array
    view: np.ndarray
    lines: int

    @property
    def arguments(self) -> tuple[Array, np.ndarray]:
        """The operand as kernels take it."""
        return self.array, self.view

    @property
    def terms_adjoin(self) -> bool:
        return bool(self.view["terms_adjoin"])


@dataclass(frozen=True, slots=True)
class Product:
    """A product's operands, and where its entries go."""

    left: StridedOperand
    right: StridedOperand
    out: Array
    view: np.ndarray
    dtype: str
    batches: int
    terms: int

    @property
    def adjoin(self) -> bool:
        """Whether four neighbouring columns, from a multiple of 4 on, are neighbours in memory."""
        columns = self.view["columns"]
        inner = int(columns["count"]) - 1
        if inner < 0 or columns["stride"][0, inner] != 1 or columns["extent"][inner] % 4:
            return False
        strides = [self.view[group]["stride"][0] for group in ("batch", "rows")]
        strides.append(columns["stride"][0, :inner])
        return not any(np.any(s % 4) for s in strides)

    @property
    def sides(self) -> tuple[StridedOperand, StridedOperand]:
        return self.left, self.right

    @property
    def operands(self) -> tuple[Any, ...]:
        """Both operands as kernels take them."""
        return *self.left.arguments, *self.right.arguments

    def transposed_if_thin(self) -> Product:
        """Return this product, or that of the transposed operands if its rows are few then."""
        if self.right.lines > THIN or self.right.lines >= self.left.lines:
            return self
        view = self.view.copy()
        view["rows"], view["columns"] = self.view["columns"], self.view["rows"]
        return replace(self, left=self.right, right=self.left, view=view)


def make_product(
    device: Device, layout: Fold, a: Array, b: Array, out: Array, dtype: str
) -> Product:
    """Return the product of two arrays, to be written into an array of layout.out_shape."""
    batches, _, _, terms = layout.sizes
    left, right = operand_a(device, layout, a), operand_b(device, layout, b)
    return Product(left, right, out, product_view(layout), dtype, batches, terms)


def operand_a(device: Device, layout: Fold, a: Array) -> StridedOperand:
    """Return the left operand: its lines are rows."""
    steps = _strides(device, layout, a, terms=-1)
    return _operand(a, layout, steps, layout.rows, (*layout.row_axes, -2), steps[-1])


def operand_b(device: Device, layout: Fold, b: Array) -> StridedOperand:
    """Return the right operand: its lines are columns."""
    steps = _strides(device, layout, b, terms=-2)
    return _operand(b, layout, steps, layout.cols, (*layout.col_axes, -1), steps[-2])


def product_view(layout: Fold, steps: Sequence[int] | None = None) -> np.ndarray:
    """Return where the entries of an array of the product's shape lie.

    Parameters
    ----------
    layout : Fold
    steps : sequence of int, optional
        The array's strides along layout.full_shape; those of a contiguous array without.
    """
    steps = _contiguous(layout.full_shape) if steps is None else steps
    return pack(
        PRODUCT_VIEW,
        batch=_packed(layout.batch, steps, layout.batch_axes),
        rows=_packed(layout.rows, steps, (*layout.row_axes, -2)),
        columns=_packed(layout.cols, steps, (*layout.col_axes, -1)),
    )


def strided_product_view(device: Device, layout: Fold, x: Array, a: Array, b: Array) -> np.ndarray:
    """Return where the entries of x, of the shape of the product of a and b, lie."""
    steps = list(device.strides(x))
    if len(device.strides(b)) == 1:
        steps.append(0)
    if len(device.strides(a)) == 1:
        steps.insert(len(steps) - 1, 0)
    return product_view(layout, steps)


def _strides(device: Device, layout: Fold, x: Array, terms: int) -> tuple[int, ...]:
    """Return the strides of an operand along the axes of layout.a_shape, or of b_shape."""
    steps = device.strides(x)
    if len(steps) == 1:
        steps = (0, *steps) if terms == -1 else (*steps, 0)
    return (0,) * (len(layout.a_shape) - len(steps)) + steps


def _operand(
    x: Array, layout: Fold, steps: Sequence[int], lines: Shape, line_axes: Shape, step: int
) -> StridedOperand:
    packed = _packed(lines, steps, line_axes)
    inner = int(packed["count"]) - 1
    # Neighbours in memory are read by neighbouring threads.
    terms_adjoin = layout.sizes[3] > 1 and (
        inner < 0 or abs(step) < abs(int(packed["stride"][0, inner]))
    )
    batch, count = _packed(layout.batch, steps, layout.batch_axes), math.prod(lines)
    view = pack(VIEW, batch=batch, lines=packed, step=step, count=count, terms_adjoin=terms_adjoin)
    return StridedOperand(x, view, count)


def _packed(extents: Shape, steps: Sequence[int], axes: Shape) -> np.ndarray:
    return pack_axes(extents, [steps[axis] for axis in axes])


def _contiguous(shape: Shape) -> list[int]:
    return [math.prod(max(n, 1) for n in shape[axis + 1 :]) for axis in range(len(shape))]
