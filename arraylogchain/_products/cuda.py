"""Products by kernels: the log-sum-exp matmul and its pullback, and the max-plus matmul."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from arraylogchain._core.axes import Fold, chunks
from arraylogchain._core.context import Array, Context, shape_of
from arraylogchain._cuda.kernels import (
    MAX_GRID,
    Kernel,
    Struct,
    contiguous,
    kernel_named,
    threshold,
)
from arraylogchain._cuda.self_check import is_usable
from arraylogchain._products.operand import PullbackInputs

# tile.cuh: rows and columns of a block's tile, and its threads.
TILE, THREADS = 64, 256
_OPERAND = Struct((np.int64, "data batch_stride line_stride term_stride"))
_ENTRIES = Struct(
    (np.int64, "out g remainders has_uncertified has_nan"), (np.int32, "adds propagates_nan")
)
# Struct Side after its two operands.
_SIDE = Struct((np.int64, "maxima products gradient line_stride term_stride"))
_SIZES = Struct((np.int32, "rows columns terms"))
# prepare_factors.cuh: contiguous lines of a block.
_LINES = 8
# Multiply-adds from which on separate exponentials, and cuBLAS, are faster than one kernel that
# computes exponentials in every tile.
_BLAS_FROM = 2**28


def logmatmulexp(ctx: Context, layout: Fold, a: Array, b: Array, budget: int) -> Array | None:
    """Return log(exp(a) @ exp(b)), or None where array operations are to compute it."""
    batch, rows, columns, terms = layout.sizes
    if _are_supported(ctx, layout, budget) and _is_usable(ctx, "prepare_factors"):
        size, is_converted = ctx.precision.itemsize, ctx.result_name != ctx.precision.name
        maxima = batch * (rows + columns) * size
        held = maxima + batch * (rows + columns) * terms * size * (1 + layout.copies)
        held += batch * rows * columns * size * is_converted
        is_large = batch * rows * columns * terms >= _BLAS_FROM and min(rows, columns) >= TILE
        if is_large and held <= budget and _is_usable(ctx, "log_epilogue"):
            return by_blas(ctx, layout, a, b)
        if maxima <= budget // 2 and _is_usable(ctx, "logmatmulexp"):
            return by_tiles(ctx, layout, a, b)
    return None


def maxplus_matmul(
    ctx: Context, layout: Fold, a: Array, b: Array, budget: int
) -> tuple[Array, Array] | None:
    """Return the largest a[i, k] + b[k, j], and the first k that has it; or None, likewise."""
    if _are_supported(ctx, layout, budget) and _is_usable(ctx, "maxplus_matmul"):
        return maxplus(ctx, layout, a, b)
    return None


def by_tiles(ctx: Context, layout: Fold, a: Array, b: Array) -> Array:
    """Return log(exp(a) @ exp(b)) by a kernel that computes exponentials in every tile."""
    operands = _OperandPair(ctx, layout, a, b)
    maxima, _ = operands.prepare(has_factors=False)
    out = operands.empty(ctx.result_name)
    arguments = (*operands.packed, *maxima, out, operands.sizes, operands.threshold)
    operands.launch("logmatmulexp", operands.tiles, arguments)
    return operands.restored(out)


def by_blas(ctx: Context, layout: Fold, a: Array, b: Array) -> Array:
    """Return log(exp(a) @ exp(b)) by cuBLAS and a kernel that takes the logarithms.

    The kernel also recomputes the entries whose sums are not certified.
    """
    operands = _OperandPair(ctx, layout, a, b)
    maxima, factors = operands.prepare(has_factors=True)
    sums = ctx.kernels.multiply(*factors)
    # Logarithms overwrite the sums if the result has the same dtype.
    is_same = ctx.result_name == ctx.precision.name
    out = sums if is_same else operands.empty(ctx.result_name)
    arguments = (*operands.packed, *maxima, out, operands.sizes, operands.threshold, sums)
    operands.launch("log_epilogue", operands.tiles, arguments)
    return operands.restored(out)


def gradients(
    ctx: Context,
    layout: Fold,
    arrays: PullbackInputs,
    budget: int,
    requested: tuple[bool, bool],
    propagates_nan: Array | bool,
) -> tuple[Array | None, Array | None] | None:
    """Return the gradients of sum(g * out) with respect to a and b.

    None where array operations are to compute them. `propagates_nan` may be a flag on the device.
    """
    batch, rows, columns, terms = layout.sizes
    names = "prepare_factors", "gradient_weights", "finish_gradients"
    if not _are_supported(ctx, layout, budget) or not all(_is_usable(ctx, x) for x in names):
        return None
    # Factors, maxima, weights, remainders and flags; copies; gradients that are converted.
    is_converted = ctx.result_name != ctx.precision.name
    held = batch * (rows + columns) * terms * (is_converted + layout.copies)
    held += batch * (columns * (terms + 1) + 2 * rows * columns * layout.copies)
    row, item = batch * (2 * columns + terms + 1), ctx.precision.itemsize
    room = budget // item - held - batch * rows * columns // TILE**2
    panel = room // row
    if panel < rows:  # each panel's gradients are added to those of the panels before it
        panel = (room - batch * columns * terms) // (row + batch * terms)
    if panel < min(rows, TILE):
        return None
    return _Gradients(ctx, layout, arrays, requested, propagates_nan).compute(panel)


def maxplus(ctx: Context, layout: Fold, a: Array, b: Array) -> tuple[Array, Array]:
    """Return the max-plus product by one kernel."""
    operands = _OperandPair(ctx, layout, a, b)
    values, indices = operands.empty(ctx.result_name), operands.empty("int64")
    operands.launch(
        "maxplus_matmul", operands.tiles, (*operands.packed, values, indices, operands.sizes)
    )
    return operands.restored(values), operands.restored(indices)


def kernel_of(name: str, ctx: Context) -> Kernel:
    """Return a kernel of products for the dtype of the result."""
    return kernel_named(name, ctx.result_name)


def _is_usable(ctx: Context, name: str) -> bool:
    return is_usable(ctx, kernel_of(name, ctx))


def _are_supported(ctx: Context, layout: Fold, budget: int) -> bool:
    """Return whether kernels can compute a product: it is not empty, and 32 bits count its sizes.

    Where axes cannot be merged in place, a copy of each operand has to fit the budget too.
    """
    batch, rows, columns, terms = layout.sizes
    if 0 in layout.sizes or max(rows, columns, terms) > 2**31 - 2 * TILE:
        return False
    copied = batch * (rows + columns) * terms * ctx.precision.itemsize if layout.copies else 0
    return copied <= budget // 2 and _tiles(layout.sizes) <= MAX_GRID


def _tiles(sizes: tuple[int, int, int, int]) -> int:
    batch, rows, columns, _ = sizes
    return batch * -(-rows // TILE) * -(-columns // TILE)


class _OperandPair:
    """Both operands as [batch, rows, terms] and [batch, terms, columns]: views where strides allow.

    An axis that only one operand has becomes rows or columns, so nothing is expanded. `panel`
    selects some rows.
    """

    def __init__(
        self, ctx: Context, layout: Fold, a: Array, b: Array, panel: slice = slice(None)
    ) -> None:
        self.ctx, self.layout = ctx, layout
        batch, _, columns, terms = layout.sizes
        self.a, self.b = self.view(a, 0)[:, panel, :], self.view(b, 1)
        self.shape = batch, int(self.a.shape[1]), columns, terms
        self.tiles = _tiles(self.shape)
        self.sizes = _SIZES.pack(*self.shape[1:])
        self.threshold = threshold(ctx.precision, terms)
        self.packed = self.operand(self.a, 1), self.operand(self.b, 2)

    def view(self, x: Array, side: int) -> Array:
        """Return a, b or the product (side 0, 1, 2) in the dtype of the result, with three axes."""
        batch, rows, columns, terms = self.layout.sizes
        shape = ((batch, rows, terms), (batch, terms, columns), (batch, rows, columns))[side]
        xp = self.ctx.xp
        return xp.reshape(self.layout.view(xp, self.ctx.to_result(x), side), shape)

    def operand(self, x: Array, line: int) -> bytes:
        """Return struct Operand, with lines along an axis. The caller holds the array."""
        device = self.ctx.kernels
        steps = device.strides(x)
        return _OPERAND.pack(device.pointer(x), steps[0], steps[line], steps[3 - line])

    def prepare(
        self, has_factors: bool, is_finite_only: bool = False
    ) -> tuple[list[Array], list[Array]]:
        """Return maxima of rows and columns and, if asked for, both factors, in one launch."""
        ctx, device, (batch, rows, columns, terms) = self.ctx, self.ctx.kernels, self.shape
        maxima, factors, views, blocks = [], [], [], []
        for side, (x, lines) in enumerate(((self.a, rows), (self.b, columns))):
            is_contiguous = device.strides(x)[2 - side] == 1
            maxima.append(device.empty((batch, lines), ctx.result_name))
            shape = (batch, lines, terms) if is_contiguous else (batch, terms, lines)
            factor: Any = device.empty(shape, ctx.precision.name) if has_factors else None
            factors.append(factor)
            if has_factors:
                views.append(factor.mT if is_contiguous == side else factor)
            blocks.append(-(-batch * lines // (_LINES if is_contiguous else 32)))
        counts = np.int64(batch), np.int64(blocks[0]), np.int32(is_finite_only)
        arguments = (*self.packed, *maxima, *factors, self.sizes, *counts)
        self.launch("prepare_factors", sum(blocks), arguments)
        return maxima, views

    def empty(self, dtype: str) -> Array:
        return self.ctx.kernels.empty(self.shape[:3], dtype)

    def launch(self, name: str, grid: int, arguments: tuple[Any, ...]) -> None:
        self.ctx.kernels.run(kernel_of(name, self.ctx), grid, THREADS, arguments)

    def restored(self, out: Array) -> Array:
        """Return the product in its own shape: a view."""
        xp, layout = self.ctx.xp, self.layout
        return xp.reshape(layout.restored(xp, out, 2), layout.out_shape)


class _Gradients(NamedTuple):
    """The pullback of a log product: six launches, and nothing waits for the device."""

    ctx: Context
    layout: Fold
    arrays: PullbackInputs
    requested: tuple[bool, bool]
    propagates_nan: Array | bool

    def compute(self, panel: int) -> tuple[Array | None, Array | None]:
        """Return both gradients, computed for some rows at a time."""
        ctx, (a, b, _, _) = self.ctx, self.arrays
        batch, rows, _, terms = self.layout.sizes
        panels = list(chunks(rows, panel))
        sums: list[Array] = [None, None]
        if len(panels) > 1:
            sums[0] = ctx.kernels.empty((batch, rows, terms), ctx.precision.name)
        for part in panels:
            left, sums[1] = self._add(part, sums[1])
            if sums[0] is None:
                sums[0] = left
            elif left is not None:
                sums[0][:, part, :] = left

        def result(side: int, like: Array) -> Array:
            x = self.layout.restored(ctx.xp, sums[side], side)
            return ctx.cast(ctx.xp.reshape(x, shape_of(like)), like.dtype)

        left, right = (result(n, (a, b)[n]) if self.requested[n] else None for n in (0, 1))
        return left, right

    def _add(self, part: slice, total: Array | None) -> tuple[Array | None, Array | None]:
        """Return a's gradient of some rows, and b's with that of other rows, `total`."""
        ctx, device, (a, b, out, g) = self.ctx, self.ctx.kernels, self.arrays
        operands = _OperandPair(ctx, self.layout, a, b, part)
        (batch, rows, columns, terms), tiles = operands.shape, operands.tiles
        out, g = (contiguous(ctx, operands.view(x, 2)[:, part, :]) for x in (out, g))
        maxima, factors = operands.prepare(has_factors=True, is_finite_only=True)
        left, right = factors
        weights = device.multiply(left, right)
        remainders = operands.empty(ctx.precision.name)
        flags = device.empty((tiles,), "uint8")
        arrays = out, g, weights, remainders, flags
        arguments = (*operands.packed, *arrays, operands.sizes, operands.threshold)
        operands.launch("gradient_weights", tiles, arguments)
        products = [
            device.multiply(weights, right.mT) if self.requested[0] else None,
            device.multiply(left.mT, weights) if self.requested[1] else None,
        ]
        gradients = [products[0], products[1] if total is None else total]

        def pointer(x: Array) -> int:
            return device.pointer(x) if hasattr(x, "shape") else 0

        tables = map(pointer, (out, g, remainders, flags, self.propagates_nan))
        entries = _ENTRIES.pack(*tables, total is not None, self.propagates_nan is not False)
        sides = []
        for side, strides in enumerate(((terms, 1), (1, columns))):
            pair = operands.packed[side] + operands.operand(factors[side], side + 1)
            tables = map(pointer, (maxima[side], products[side], gradients[side]))
            sides.append(pair + _SIDE.pack(*tables, *strides))
        across = -(-terms // 32)
        blocks = [
            batch * across * -(-lines // 32) * is_requested
            for lines, is_requested in zip((rows, columns), self.requested, strict=True)
        ]
        structs = (*sides, entries, operands.sizes, np.int64(blocks[0]))
        operands.launch("finish_gradients", sum(blocks), structs)
        return gradients[0], gradients[1]
