"""Derivatives of the products, from arrays that `enter` has made ready.

Everything is summed over broadcast axes by the fold: with operands [*batch, *rows, K] and
[*batch, K, *cols], the gradient of the first sums over columns and that of the second over rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from arraylogchain._array.products.linear import Axes, contract
from arraylogchain._array.products.posterior import Moments, Operand, operand
from arraylogchain._array.products.sums import Sums
from arraylogchain._array.products.tile_posterior import Tile
from arraylogchain._array.products.tiling import Tiling, tile_product
from arraylogchain._context import Array, Context, shape_of
from arraylogchain._fold import Box, Fold, Shape, boxes, fold, lengths

# Rows and columns of a tile where they fit: what is added up over tiles is written once per tile.
_SIDE = 1024

Pair = tuple[Array | None, Array | None]


def matmul_gradients(
    ctx: Context,
    a: Array,
    b: Array,
    g: Array,
    budget: int,
    wanted: tuple[bool, bool] = (True, True),
) -> Pair:
    """Return the gradients of sum(g * (a @ b)), each of its operand's shape and dtype."""
    xp = ctx.xp
    layout = fold(shape_of(a), shape_of(b))
    batch, rows, cols, inner = layout.batch, layout.rows, layout.cols, (layout.sizes[3],)
    g_view = layout.view_out(xp, xp.reshape(g, layout.full_shape))
    nb, nr, nc = len(batch), len(rows), len(cols)
    grad_a = grad_b = None
    if wanted[0]:
        grad_a = ctx.empty(layout.a_shape, a.dtype)
        b_view = layout.view_b(xp, b)
        turned = xp.permute_dims(b_view, (*range(nb), *range(nb + 1, nb + 1 + nc), nb))
        axes = Axes(batch, rows, cols, inner)
        contract(ctx, g_view, turned, layout.view_a(xp, grad_a), axes, budget)
        grad_a = xp.reshape(grad_a, shape_of(a))
    if wanted[1]:
        grad_b = ctx.empty(layout.b_shape, b.dtype)
        a_view = layout.view_a(xp, a)
        turned = xp.permute_dims(a_view, (*range(nb), nb + nr, *range(nb, nb + nr)))
        axes = Axes(batch, inner, rows, cols)
        contract(ctx, turned, g_view, layout.view_b(xp, grad_b), axes, budget)
        grad_b = xp.reshape(grad_b, shape_of(b))
    return grad_a, grad_b


def logmatmulexp_gradients(
    ctx: Context,
    a: Array,
    b: Array,
    out: Array,
    g: Array,
    budget: int,
    wanted: tuple[bool, bool] = (True, True),
    spoils: bool = True,
) -> Pair:
    """Return the gradients of sum(g * logmatmulexp(a, b)), each of its operand's shape and dtype.

    They are added up in the precision of the computation: for half precisions in arrays of their
    own. A NaN in an operand shows in them; with `spoils` False it has no gradient instead, as +inf.
    """
    layout = fold(shape_of(a), shape_of(b))
    if ctx.takes_kernels(layout):
        return _by_kernels(ctx, layout, a, b, out, g, budget, wanted, spoils)
    walk = _Walk(ctx, a, b, out, budget, copies=2, spoils=spoils)
    totals = walk.totals(wanted)
    g = walk.of_product(g)
    for tile, at in walk.tiles():
        tile.push(walk.read(g, at, "out"), None, walk.sums(totals, at))
    return walk.finish(totals)


def _by_kernels(
    ctx: Context,
    layout: Fold,
    a: Array,
    b: Array,
    out: Array,
    g: Array,
    budget: int,
    wanted: tuple[bool, bool],
    spoils: bool,
) -> Pair:
    """Return the same by CUDA kernels, whose arrays are of one dtype."""
    from arraylogchain._cuda.products.gradients import logmatmulexp_gradients

    left, right, out, g = (ctx.to_result(x) for x in (a, b, out, g))
    found = logmatmulexp_gradients(
        ctx.kernels, layout, left, right, out, g, ctx.result_name, budget, wanted, spoils
    )
    of_a, of_b = (
        None if x is None else ctx.xp.astype(x, like.dtype, copy=False)
        for x, like in zip(found, (a, b), strict=True)
    )
    return of_a, of_b


def logmatmulexp_tangent(
    ctx: Context, a: Array, b: Array, out: Array, da: Array | None, db: Array | None, budget: int
) -> Array:
    """Return q_ij = sum_k p_ikj (da_ik + db_kj), the change of `out` with those of a and b."""
    xp = ctx.xp
    walk = _Walk(ctx, a, b, out, budget, copies=3)
    layout = walk.layout
    result = xp.zeros(layout.full_shape, dtype=out.dtype, device=ctx.device)
    view = layout.view_out(xp, result)
    u = None if da is None else layout.view_a(xp, da)
    v = None if db is None else layout.view_b(xp, db)
    for tile, at in walk.tiles():
        of_u = None if u is None else walk.read(u, at, "a")
        of_v = None if v is None else walk.read(v, at, "b")
        at.write(ctx, view, tile.terms(of_u, of_v))
    return xp.reshape(result, layout.out_shape)


def logmatmulexp_second(
    ctx: Context,
    a: Array,
    b: Array,
    out: Array,
    g: Array,
    u: Array | None,
    v: Array | None,
    budget: int,
) -> tuple[Array, Array, Array]:
    """Return the gradients of `logmatmulexp_gradients` itself.

    With (da, db) the gradients of sum(g * out), these are the gradients of sum(u * da) +
    sum(v * db) with respect to a, b and g; u or v may be None, for zeros. With q the tangent of u
    and v, the first two are the sums of ``g_ij p_ikj (u_ik + v_kj - q_ij)``, and the last is q.
    """
    xp = ctx.xp
    walk = _Walk(ctx, a, b, out, budget, copies=5)
    layout = walk.layout
    totals = walk.totals((True, True))
    result = xp.zeros(layout.full_shape, dtype=g.dtype, device=ctx.device)
    view = layout.view_out(xp, result)
    g = walk.of_product(g)
    zero = xp.zeros((1,) * len(layout.a_shape), dtype=ctx.dtype(ctx.precision), device=ctx.device)
    u = xp.broadcast_to(zero, layout.a_shape) if u is None else u
    v = xp.broadcast_to(zero, layout.b_shape) if v is None else v
    u, v = layout.view_a(xp, u), layout.view_b(xp, v)
    for tile, at in walk.tiles():
        of_u, of_v = walk.read(u, at, "a"), walk.read(v, at, "b")
        q = tile.terms(of_u, of_v)
        at.write(ctx, view, q)
        # Where the product is not finite, nothing is summed; a NaN is seen to by itself.
        q = xp.where(xp.isfinite(tile.out), q, xp.zeros_like(q))
        tile.push(walk.read(g, at, "out"), Moments(of_u, of_v, q), walk.sums(totals, at))
    grad_a, grad_b = walk.finish(totals)
    return grad_a, grad_b, xp.reshape(result, layout.out_shape)


class _Place:
    """Where a tile lies: its box along the axes of each group, and along the groups as one."""

    def __init__(self, groups: tuple[Box, Box, Box], flat: tuple[slice, slice, slice]) -> None:
        self.groups, self.flat = groups, flat

    def write(self, ctx: Context, view: Array, x: Array) -> None:
        """Put x [batch, rows, cols] into a view [*batch, *rows, *cols]."""
        of_batch, of_rows, of_cols = self.groups
        target = view[(*of_batch, *of_rows, *of_cols)]
        x = ctx.xp.reshape(x, target.shape)
        target[...] = x if x.dtype == target.dtype else ctx.xp.astype(x, target.dtype)


class _Walk:
    """The tiles of a folded log product, and arrays that hold sums over them."""

    def __init__(
        self,
        ctx: Context,
        a: Array,
        b: Array,
        out: Array,
        budget: int,
        copies: int,
        spoils: bool = True,
    ) -> None:
        xp = ctx.xp
        self.ctx, self.a, self.b, self.budget, self.spoils = ctx, a, b, budget, spoils
        self.layout = layout = fold(shape_of(a), shape_of(b))
        self.a_view, self.b_view = layout.view_a(xp, a), layout.view_b(xp, b)
        self.out_view = self.of_product(out)
        item = ctx.precision.itemsize
        self.block = max(1, min(ctx.block, budget // (32 * item)))
        # Factors and products of their size; quotients, sums, masks, and copies of entries.
        room = budget - budget // 4 - 4 * item * self.block
        entry = (copies + 2 * layout.copies) * item + 2
        self.tiling = Tiling(1, 1, 1, 1)
        if 0 not in layout.sizes:
            held = item * layout.copies * (1 if copies == 2 else 2)
            # Of the products of the factors' size, gradients hold one at a time.
            factor = item * (2 if copies == 2 else 1 + copies)
            self.tiling = tile_product(
                layout.sizes, room, factor, entry, side=_SIDE, copied_bytes=held
            )

    def of_product(self, x: Array) -> Array:
        """Return an array of the product's shape as [*batch, *rows, *cols]."""
        xp = self.ctx.xp
        return self.layout.view_out(xp, xp.reshape(x, self.layout.full_shape))

    def tiles(self) -> Iterator[tuple[Tile, _Place]]:
        """Yield tiles, those of a panel of columns together."""
        if 0 in self.layout.sizes:
            return
        ctx, layout, tiling = self.ctx, self.layout, self.tiling
        for of_batch, batch in _numbered(layout.batch, tiling.batch):
            for of_cols, cols in _numbered(layout.cols, tiling.cols):
                panel: Operand | None = None
                for of_rows, rows in _numbered(layout.rows, tiling.rows):
                    at = _Place((of_batch, of_rows, of_cols), (batch, rows, cols))
                    if panel is None:
                        panel = operand(ctx, self.read(self.b_view, at, "b"), -2, ctx.precision)
                    a = operand(ctx, self.read(self.a_view, at, "a"), -1, ctx.precision)
                    out = self.read(self.out_view, at, "out")
                    chunk, budget = tiling.inner, self.budget
                    yield Tile(ctx, a, panel, out, chunk, self.block, budget, self.spoils), at

    def read(self, view: Array, at: _Place, kind: str) -> Array:
        """Return a tile of an array, as [batch, m, n]."""
        of_batch, of_rows, of_cols = at.groups
        inner: Box = (slice(0, self.layout.sizes[3]),)
        first, second = {
            "a": (of_rows, inner),
            "b": (inner, of_cols),
            "out": (of_rows, of_cols),
        }[kind]
        shape = tuple(math.prod(lengths(group)) for group in (of_batch, first, second))
        return self.ctx.xp.reshape(view[(*of_batch, *first, *second)], shape)

    def totals(self, wanted: tuple[bool, bool]) -> dict[bool, tuple[Array, Array]]:
        """Return arrays for gradients, in the shapes of the result and of tiles, by operand."""
        return {
            of_a: self._total(of_a) for of_a, yes in zip((True, False), wanted, strict=True) if yes
        }

    def _total(self, of_a: bool) -> tuple[Array, Array]:
        xp, ctx, layout = self.ctx.xp, self.ctx, self.layout
        batch, rows, cols, inner = layout.sizes
        shape = (batch, rows, inner) if of_a else (batch, inner, cols)
        padded = layout.a_shape if of_a else layout.b_shape
        dtype = ctx.dtype(ctx.precision)
        zeros = xp.zeros(shape if layout.copies else padded, dtype=dtype, device=ctx.device)
        if not layout.copies:
            view = layout.view_a(xp, zeros) if of_a else layout.view_b(xp, zeros)
            return zeros, xp.reshape(view, shape)
        # Axes that do not merge in the shape of the result: its elements are kept as tiles have
        # them, and the result is a view of that.
        nd = len(padded)
        others = layout.col_axes if of_a else layout.row_axes
        own = (*layout.row_axes, nd - 2, nd - 1) if of_a else (nd - 2, *layout.col_axes, nd - 1)
        order = (*others, *layout.batch_axes, *own)
        whole = xp.reshape(zeros, tuple(padded[axis] for axis in order))
        return xp.permute_dims(whole, tuple(order.index(axis) for axis in range(nd))), zeros

    def sums(self, totals: dict[bool, tuple[Array, Array]], at: _Place) -> list[Sums]:
        """Return where a tile's sums go."""
        batch, rows, cols = at.flat
        found = []
        for of_a, (_, flat) in totals.items():
            part = flat[batch, rows, :] if of_a else flat[batch, :, cols]
            fresh = (cols if of_a else rows).start == 0
            found.append(Sums(self.ctx, part, of_a, fresh))
        return found

    def finish(self, totals: dict[bool, tuple[Array, Array]]) -> Pair:
        """Return the gradients, None for those that are not wanted."""
        xp = self.ctx.xp
        results: list[Array | None] = []
        for of_a, x in ((True, self.a), (False, self.b)):
            if of_a not in totals:
                results.append(None)
                continue
            total = xp.reshape(totals[of_a][0], shape_of(x))
            results.append(total if total.dtype == x.dtype else xp.astype(total, x.dtype))
        return results[0], results[1]


def _numbered(shape: Shape, limit: int) -> Iterator[tuple[Box, slice]]:
    """Yield boxes of a group of axes, and the same entries along the group as one axis."""
    start = 0
    for box in boxes(shape, limit):
        stop = start + math.prod(lengths(box))
        yield box, slice(start, stop)
        start = stop
