"""Products by kernels: the log-sum-exp matmul, and the max-plus one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from arraylogchain._core.axes import Fold, fold
from arraylogchain._core.context import Array, Context
from arraylogchain._cuda.kernels import (
    C_TYPES,
    MAX_GRID,
    Kernel,
    Launch,
    contiguous,
    pack,
    struct,
    threshold,
)
from arraylogchain._cuda.self_check import error_limit, is_usable, log_sum_exp, wide_entries

# tile.cuh: rows and columns of a block's tile, and its threads.
TILE, THREADS = 64, 256
OPERAND = struct((np.int64, "data batch_stride line_stride term_stride"))
SIZES = struct((np.int32, "rows columns terms"))
# Multiply-adds from which on exponentials of their own, and cuBLAS, are faster than one kernel that
# computes exponentials in every tile.
_BLAS_FROM = 2**28


def logmatmulexp(ctx: Context, layout: Fold, a: Array, b: Array, budget: int) -> Array | None:
    """Return log(exp(a) @ exp(b)), or None where array operations are to compute it."""
    batch, rows, columns, terms = layout.sizes
    if _are_supported(ctx, layout, budget):
        size = ctx.precision.itemsize
        factors = batch * (rows * terms + terms * columns + rows * columns) * size
        is_large = batch * rows * columns * terms >= _BLAS_FROM and min(rows, columns) >= TILE
        if is_large and factors <= budget // 2 and _is_usable(ctx, "settle"):
            return by_blas(ctx, layout, a, b)
        maxima = batch * (rows + columns) * size
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
    """Return log(exp(a) @ exp(b)) by one kernel."""
    operands = _Operands(ctx, layout, a, b)
    out = operands.empty(ctx.result_name)
    line = threshold(ctx.precision, layout.sizes[3])
    arguments = (*operands.packed, *operands.maxima(), out, operands.sizes, line)
    operands.launch("logmatmulexp", operands.tiles, arguments)
    return operands.restored(out)


def by_blas(ctx: Context, layout: Fold, a: Array, b: Array) -> Array:
    """Return the same: factors and sums by array operations, their logarithms by a kernel."""
    operands, xp = _Operands(ctx, layout, a, b), ctx.xp
    r, c = operands.maxima()
    factors = []
    for x, top in ((operands.a, r[:, :, None]), (operands.b, c[:, None, :])):
        top = ctx.load(xp.where(xp.isfinite(top), top, xp.zeros_like(top)), ctx.precision)
        factor = ctx.load(x, ctx.precision) - top
        ctx.apply(xp.exp, factor, out=factor)
        factors.append(factor)
    sums = contiguous(ctx, ctx.multiply(*factors))
    del factors, factor
    # Where nothing is converted, logarithms take the places of their sums.
    is_same = ctx.result_name == ctx.precision.name
    out = sums if is_same else operands.empty(ctx.result_name)
    entries = int(np.prod(layout.sizes[:3]))
    line = threshold(ctx.precision, layout.sizes[3])
    arguments = (*operands.packed, r, c, out, operands.sizes, line, sums, np.int64(entries))
    operands.launch("settle", -(-entries // THREADS), arguments)
    return operands.restored(out)


def maxplus(ctx: Context, layout: Fold, a: Array, b: Array) -> tuple[Array, Array]:
    """Return the max-plus product by one kernel."""
    operands = _Operands(ctx, layout, a, b)
    values, indices = operands.empty(ctx.result_name), operands.empty("int64")
    operands.launch(
        "maxplus_matmul", operands.tiles, (*operands.packed, values, indices, operands.sizes)
    )
    return operands.restored(values), operands.restored(indices)


def kernel_of(name: str, ctx: Context) -> Kernel:
    return Kernel(f"{name}.cu", f"{name}<{C_TYPES[ctx.result_name]}>")


def _is_usable(ctx: Context, name: str) -> bool:
    return is_usable(ctx, kernel_of(name, ctx), hard_case)


def _are_supported(ctx: Context, layout: Fold, budget: int) -> bool:
    """Tell whether kernels compute a product: one of entries, whose sizes they can count.

    Where axes cannot be merged in place, a copy of each operand has to fit.
    """
    batch, rows, columns, terms = layout.sizes
    if 0 in layout.sizes or max(rows, columns, terms) > 2**31 - 2 * TILE:
        return False
    copied = batch * (rows + columns) * terms * ctx.precision.itemsize if layout.copies else 0
    return copied <= budget // 2 and _tiles(layout) <= MAX_GRID


def _tiles(layout: Fold) -> int:
    batch, rows, columns, _ = layout.sizes
    return batch * -(-rows // TILE) * -(-columns // TILE)


class _Operands:
    """Both operands as [batch, rows, terms] and [batch, terms, columns]: views where strides allow.

    An axis that only one operand has becomes rows or columns, so nothing is expanded.
    """

    def __init__(self, ctx: Context, layout: Fold, a: Array, b: Array) -> None:
        self.ctx, self.layout = ctx, layout
        batch, rows, columns, terms = layout.sizes
        xp, self.tiles = ctx.xp, _tiles(layout)
        self.a = xp.reshape(layout.view(xp, ctx.to_result(a), 0), (batch, rows, terms))
        self.b = xp.reshape(layout.view(xp, ctx.to_result(b), 1), (batch, terms, columns))
        self.sizes = pack(SIZES, rows=rows, columns=columns, terms=terms)
        self.packed = (self._pack(self.a, 1, 2), self._pack(self.b, 2, 1))

    def _pack(self, x: Array, lines: int, terms: int) -> np.ndarray:
        """Return struct Operand. The array is held by self."""
        device = self.ctx.kernels
        steps = device.strides(x)
        return pack(
            OPERAND,
            data=device.pointer(x),
            batch_stride=steps[0],
            line_stride=steps[lines],
            term_stride=steps[terms],
        )

    def maxima(self) -> tuple[Array, Array]:
        """Return the largest of each row of a, [batch, rows], and of each column of b."""
        xp = self.ctx.xp
        r, c = (xp.max(x, axis=axis) for x, axis in ((self.a, 2), (self.b, 1)))
        return contiguous(self.ctx, r), contiguous(self.ctx, c)

    def empty(self, dtype: str) -> Array:
        batch, rows, columns, _ = self.layout.sizes
        return self.ctx.kernels.empty((batch, rows, columns), dtype)

    def launch(self, name: str, grid: int, arguments: tuple[Any, ...]) -> None:
        kernel = kernel_of(name, self.ctx)
        self.ctx.kernels.run(Launch(kernel, grid, THREADS, arguments))

    def restored(self, out: Array) -> Array:
        """Return entries [batch, rows, columns] with their axes where they belong: a view."""
        xp, layout = self.ctx.xp, self.layout
        return xp.reshape(layout.restored(xp, out, 2), layout.out_shape)


def hard_case(ctx: Context, kernel: Kernel) -> Iterator[tuple[Array, np.ndarray, float]]:
    """Multiply two tiles by two, whose edges stand out; maxima do not meet."""
    rng = np.random.default_rng(0)
    a, b = wide_entries(ctx, rng, 70, 37), wide_entries(ctx, rng, 66, 37).T
    updated, right = (ctx.to_result(ctx.xp.asarray(x, device=ctx.device)) for x in (a, b))
    terms, layout = a[:, :, None] + b, fold(a.shape, b.shape)
    if kernel.name.startswith("maxplus"):
        values, indices = maxplus(ctx, layout, updated, right)
        yield values, terms.max(1), 0.0
        yield indices, terms.argmax(1), 0.0
    else:
        compute = by_blas if kernel.name.startswith("settle") else by_tiles
        yield compute(ctx, layout, updated, right), log_sum_exp(terms, 1), error_limit(ctx, 37)
