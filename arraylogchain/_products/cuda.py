"""Products by kernels: the log-sum-exp matmul and its pullback, and the max-plus matmul."""

from __future__ import annotations

from typing import Any

import numpy as np

from arraylogchain._core.axes import Fold, chunks
from arraylogchain._core.context import Array, Context, shape_of
from arraylogchain._cuda.kernels import MAX_GRID, Struct, contiguous, kernel_named, threshold
from arraylogchain._cuda.self_check import is_usable
from arraylogchain._products.operand import PullbackInputs

# tile.cuh: rows and columns of a block's tile, and its threads.
TILE, THREADS = 64, 256
_OPERAND = Struct((np.int64, "data batch_stride line_stride term_stride"))
_ENTRIES = Struct(
    (np.int64, "out g remainders has_uncertified has_nan"), (np.int32, "propagates_nan")
)
# Struct Side after its two operands.
_SIDE = Struct((np.int64, "maxima gradient line_stride term_stride"))
_SIZES = Struct((np.int32, "rows columns terms"))
# prepare_factors.cuh: contiguous lines of a block.
_LINES = 8
# Multiply-adds from which on separate exponentials, and cuBLAS, are faster than one kernel that
# computes exponentials in every tile.
_BLAS_FROM = 2**28


def logmatmulexp(ctx: Context, layout: Fold, a: Array, b: Array, budget: int) -> Array | None:
    """Return log(exp(a) @ exp(b)), or None where array operations are to compute it."""
    batch, rows, columns, terms = layout.sizes
    if _are_supported(ctx, layout, budget) and _are_usable(ctx, "prepare_factors"):
        size, is_converted = ctx.precision.itemsize, ctx.result_name != ctx.precision.name
        maxima = batch * (rows + columns) * size
        held = maxima + batch * (rows + columns) * terms * size * (1 + layout.copies)
        held += batch * rows * columns * size * is_converted
        is_large = batch * rows * columns * terms >= _BLAS_FROM and min(rows, columns) >= TILE
        if is_large and held <= budget and _are_usable(ctx, "log_epilogue"):
            return log_product(ctx, layout, a, b, by_blas=True)
        if maxima <= budget // 2 and _are_usable(ctx, "logmatmulexp"):
            return log_product(ctx, layout, a, b, by_blas=False)
    return None


def maxplus_matmul(
    ctx: Context, layout: Fold, a: Array, b: Array, budget: int
) -> tuple[Array, Array] | None:
    """Return the largest a[i, k] + b[k, j], and the first k that has it; or None, likewise."""
    if not _are_supported(ctx, layout, budget) or not _are_usable(ctx, "maxplus_matmul"):
        return None
    operands = _OperandPair(ctx, layout, a, b)
    values, indices = operands.empty(ctx.result_name), operands.empty("int64")
    arguments = (*operands.packed, values, indices, operands.sizes)
    operands.launch("maxplus_matmul", operands.tiles, arguments)
    return operands.restored(values), operands.restored(indices)


def log_product(ctx: Context, layout: Fold, a: Array, b: Array, by_blas: bool) -> Array:
    """Return log(exp(a) @ exp(b)) by a kernel that computes exponentials in every tile.

    Or by cuBLAS, and a kernel that takes the logarithms of its sums. Both kernels recompute the
    entries whose sums are not certified.
    """
    operands = _OperandPair(ctx, layout, a, b)
    maxima, factors = operands.prepare(has_factors=by_blas)
    sums = ctx.kernels.multiply(*factors) if by_blas else None
    # Logarithms overwrite the sums if the result has the same dtype.
    is_same = by_blas and ctx.result_name == ctx.precision.name
    out = sums if is_same else operands.empty(ctx.result_name)
    arguments = (*operands.packed, *maxima, out, operands.sizes, operands.threshold)
    if by_blas:
        operands.launch("log_epilogue", operands.tiles, (*arguments, sums))
    else:
        operands.launch("logmatmulexp", operands.tiles, arguments)
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
    if not _are_supported(ctx, layout, budget) or not _are_usable(ctx, *names):
        return None
    # Factors, maxima, weights, remainders and flags; copies; gradients that are converted.
    is_converted = ctx.result_name != ctx.precision.name
    held = batch * (rows + columns) * terms * (is_converted + layout.copies)
    held += batch * (columns * (terms + 1) + 2 * rows * columns * layout.copies)
    row, item = batch * (2 * columns + terms + 1), ctx.precision.itemsize
    free = budget // item - held - batch * rows * columns // TILE**2
    panel = free // row
    if panel < rows:  # gradients of b are summed over panels
        panel = (free - batch * columns * terms) // (row + batch * terms)
    if panel < min(rows, TILE):
        return None
    a, b, out, g = arrays
    a_sums, b_sums = None, None
    if panel < rows and requested[0]:
        a_sums = ctx.kernels.empty((batch, rows, terms), ctx.precision.name)
    for part in chunks(rows, panel):
        operands = _OperandPair(ctx, layout, a, b, part)
        product = [contiguous(ctx, operands.view(x, 2)[:, part, :]) for x in (out, g)]
        left, right = _gradients_of_rows(operands, product, requested, propagates_nan)
        if a_sums is not None:
            a_sums[:, part, :] = left
        if b_sums is not None:
            right += b_sums
        b_sums = right

    def result(sums: Array, like: Array, side: int) -> Array | None:
        if sums is None:
            return None
        x = ctx.xp.reshape(layout.restored(ctx.xp, sums, side), shape_of(like))
        return ctx.cast(x, like.dtype)

    return result(left if a_sums is None else a_sums, a, 0), result(b_sums, b, 1)


def _are_usable(ctx: Context, *names: str) -> bool:
    return all(is_usable(ctx, kernel_named(name, ctx.result_name)) for name in names)


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
        self.ctx.kernels.run(kernel_named(name, self.ctx.result_name), grid, THREADS, arguments)

    def restored(self, out: Array) -> Array:
        """Return the product in its own shape: a view."""
        xp, layout = self.ctx.xp, self.layout
        return xp.reshape(layout.restored(xp, out, 2), layout.out_shape)


def _gradients_of_rows(
    operands: _OperandPair,
    product: list[Array],
    requested: tuple[bool, bool],
    propagates_nan: Array | bool,
) -> list[Array]:
    """Return the requested gradients from some rows of the product and its cotangent.

    These are six launches, and nothing waits for the device.
    """
    device, precision = operands.ctx.kernels, operands.ctx.precision.name
    (batch, rows, columns, terms), tiles = operands.shape, operands.tiles
    maxima, (left, right) = operands.prepare(has_factors=True, is_finite_only=True)
    weights = device.multiply(left, right)
    remainders, flags = operands.empty(precision), device.empty((tiles,), "uint8")
    arrays = *product, weights, remainders, flags
    arguments = (*operands.packed, *arrays, operands.sizes, operands.threshold)
    operands.launch("gradient_weights", tiles, arguments)
    # The kernel multiplies them by factors, in place.
    products = [
        device.multiply(weights, right.mT) if requested[0] else None,
        device.multiply(left.mT, weights) if requested[1] else None,
    ]
    pointers = [device.pointer(x) for x in (*product, remainders, flags)]
    is_array = not isinstance(propagates_nan, bool)
    pointers.append(device.pointer(propagates_nan) if is_array else 0)
    entries = _ENTRIES.pack(*pointers, propagates_nan is not False)
    sides, blocks = [], []
    for side, (factor, lines, strides) in enumerate(
        ((left, rows, (terms, 1)), (right, columns, (1, columns)))
    ):
        pointers = [device.pointer(x) for x in (maxima[side], products[side])]
        operand = operands.packed[side] + operands.operand(factor, side + 1)
        sides.append(operand + _SIDE.pack(*pointers, *strides))
        blocks.append(batch * -(-terms // 32) * -(-lines // 32) * requested[side])
    structs = (*sides, entries, operands.sizes, np.int64(blocks[0]))
    operands.launch("finish_gradients", sum(blocks), structs)
    return products
