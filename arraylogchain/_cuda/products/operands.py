"""Arrays as the product kernels see them: strides, sorted by what a fold makes of their axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from arraylogchain._context import Array, Context
from arraylogchain._cuda.device import Device
from arraylogchain._cuda.dtypes import C_TYPES
from arraylogchain._cuda.launch import AXES, Launch, pack, pack_axes, struct
from arraylogchain._fold import Fold, Shape

# Up to this many rows a product counts as thin.
THIN = 32

# The structs of view.cuh and panel.cuh.
VIEW = struct((AXES, "batch lines"), (np.int64, "step count"), (np.int32, "terms_adjoin"))
PART = struct((np.int64, "first_batch batches first_line lines pitch blocks"))
PRODUCT_VIEW = struct((AXES, "batch rows columns"))
PANEL = struct((np.int64, "first_batch first_row first_column"), (np.int32, "batches rows columns"))


@dataclass(frozen=True, slots=True)
class Operand:
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

    ctx: Context
    left: Operand
    right: Operand
    out: Array
    view: np.ndarray
    batches: int
    terms: int

    @property
    def c_type(self) -> str:
        """The dtype of operands and result in CUDA."""
        return C_TYPES[self.ctx.result_name]

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
    def sides(self) -> tuple[Operand, Operand]:
        return self.left, self.right

    @property
    def operands(self) -> tuple[Any, ...]:
        """Both operands as kernels take them."""
        return *self.left.arguments, *self.right.arguments

    def launch(
        self, kernel: str, blocks: int, threads: int, *arguments: Any, shared_memory: int = 0
    ) -> None:
        """Launch a kernel of the file that has its name; see `Launch`."""
        source = f"products/{kernel.partition('<')[0]}.cu"
        self.ctx.kernels.run(Launch(source, kernel, blocks, threads, arguments, shared_memory))

    def transposed_if_thin(self) -> Product:
        """Return this product, or that of the transposed operands if its rows are few then."""
        if self.right.lines > THIN or self.right.lines >= self.left.lines:
            return self
        view = self.view.copy()
        view["rows"], view["columns"] = self.view["columns"], self.view["rows"]
        return replace(self, left=self.right, right=self.left, view=view)


def make_product(ctx: Context, layout: Fold, a: Array, b: Array, out: Array) -> Product:
    """Return the product of two arrays, written into, or found in, one of layout.out_shape."""
    left, right = operands(ctx.kernels, layout, a, b)
    view = product_view(ctx.kernels, layout, out)
    return Product(ctx, left, right, out, view, layout.sizes[0], layout.sizes[3])


def operands(device: Device, layout: Fold, a: Array, b: Array) -> tuple[Operand, Operand]:
    """Return both operands: lines are rows of the left one and columns of the right one."""
    of_a, of_b = _strides(device, a, layout.a_shape), _strides(device, b, layout.b_shape)
    rows, columns = (*layout.row_axes, -2), (*layout.col_axes, -1)
    return (
        _operand(a, layout, of_a, layout.rows, rows, of_a[-1]),
        _operand(b, layout, of_b, layout.cols, columns, of_b[-2]),
    )


def product_view(device: Device, layout: Fold, x: Array) -> np.ndarray:
    """Return where the entries of an array of the product's shape lie."""
    steps = _strides(device, x, layout.full_shape)
    return pack(
        PRODUCT_VIEW,
        batch=_packed(layout.batch, steps, layout.batch_axes),
        rows=_packed(layout.rows, steps, (*layout.row_axes, -2)),
        columns=_packed(layout.cols, steps, (*layout.col_axes, -1)),
    )


def _strides(device: Device, x: Array, shape: Shape) -> list[int]:
    """Return strides along the axes of `shape`, which x has but for some of length 1."""
    pairs = zip(device.strides(x), x.shape, strict=True)
    steps = iter([step for step, extent in pairs if extent != 1])
    return [0 if extent == 1 else next(steps) for extent in shape]


def _operand(
    x: Array, layout: Fold, steps: Sequence[int], lines: Shape, line_axes: Shape, step: int
) -> Operand:
    packed = _packed(lines, steps, line_axes)
    inner = int(packed["count"]) - 1
    # Neighbours in memory are read by neighbouring threads.
    terms_adjoin = layout.sizes[3] > 1 and (
        inner < 0 or abs(step) < abs(int(packed["stride"][0, inner]))
    )
    batch, count = _packed(layout.batch, steps, layout.batch_axes), math.prod(lines)
    view = pack(VIEW, batch=batch, lines=packed, step=step, count=count, terms_adjoin=terms_adjoin)
    return Operand(x, view, count)


def _packed(extents: Shape, steps: Sequence[int], axes: Shape) -> np.ndarray:
    return pack_axes(extents, [steps[axis] for axis in axes])
