"""The max-plus product of one tile of rows with one panel of columns."""

from __future__ import annotations

from arraylogchain._array.products.exact import maximum
from arraylogchain._array.products.tiling import tile_product
from arraylogchain._context import Array, Context
from arraylogchain._fold import blocks, chunks


class MaxPlusKernel:
    """max_k a[i, k] + b[k, j] and its k, for tiles a [batch, rows, K], b [batch, K, cols]."""

    def __init__(
        self, ctx: Context, sizes: tuple[int, int, int, int], workspace: int, copies: bool
    ) -> None:
        self.ctx = ctx
        item = ctx.precision.itemsize
        # Values and indices of a tile, those of a further chunk, and a mask.
        self.tiling = tile_product(
            sizes, workspace // 2, item, 2 * (item + 8) + 1, copied_bytes=item * copies
        )
        self.dtypes = [ctx.dtype(ctx.precision), ctx.index_dtype]
        # A block holds sums, and gathered operands.
        self.block = max(1, min(2 * ctx.block, workspace // (12 * item)))

    def panel(self, b: Array) -> Array:
        return b

    def __call__(self, a: Array, panel: Array, values: Array, indices: Array) -> None:
        ctx, xp = self.ctx, self.ctx.xp
        shape = tuple(values.shape)
        inner = int(a.shape[-1])
        chunk = min(inner, self.tiling.inner, self.block)
        for k in chunks(inner, chunk):
            # With the terms last, maxima over them are fastest.
            transposed = ctx.transposed(panel[:, k, :], ctx.precision)
            for box in blocks(shape, max(1, self.block // chunk)):
                batch, rows, cols = box
                of_a = ctx.load(a[batch, rows, k], ctx.precision)
                terms = of_a[:, :, None, :] + transposed[batch, cols, :][:, None, :, :]
                top, where = maximum(ctx, terms)
                if k.start:
                    where = where + k.start
                    # A NaN stays; on ties the earlier index does.
                    keep = xp.isnan(values[box]) | (values[box] >= top)
                    top = xp.where(keep, values[box], top)
                    where = xp.where(keep, indices[box], where)
                values[box], indices[box] = top, where
