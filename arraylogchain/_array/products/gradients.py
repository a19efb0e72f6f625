"""Derivatives of the log product: sums over posterior weights, tile by tile.

Everything is summed over broadcast axes by the fold: with operands [*batch, *rows, K] and
[*batch, K, *cols], the gradient of the first sums over columns and that of the second over rows.
"""

from __future__ import annotations

from collections.abc import Iterator

from arraylogchain._array.products.posterior import Moments, Sums, posterior_operand
from arraylogchain._array.products.tile_posterior import PosteriorTile
from arraylogchain._array.products.tiled import Place, panels
from arraylogchain._array.products.tiling import Tiling, elementwise_block, tile_product
from arraylogchain._context import Array, Context, shape_of
from arraylogchain._fold import Fold

# Rows and columns of a tile where they fit: what is added up over tiles is written once per tile.
_SIDE = 1024

Pair = tuple[Array | None, Array | None]


def logmatmulexp_gradients(
    ctx: Context,
    layout: Fold,
    a: Array,
    b: Array,
    out: Array,
    g: Array,
    budget: int,
    wanted: tuple[bool, bool] = (True, True),
    propagates_nan: bool = True,
) -> Pair:
    """Return the gradients of sum(g * logmatmulexp(a, b)), each of its operand's shape and dtype.

    They are added up in the precision of the computation: for half precisions in arrays of their
    own. A NaN in an operand shows in them; with `propagates_nan` False it has no gradient instead,
    as +inf.
    """
    walk = _Walk(ctx, layout, a, b, out, budget, copies=2)
    totals = walk.totals(wanted)
    g = walk.of_product(g)
    for tile, at in walk.tiles(propagates_nan):
        tile.accumulate(at.read(ctx.xp, g, "out"), None, walk.sums(totals, at))
    return walk.finish(totals)


def logmatmulexp_tangent(
    ctx: Context,
    layout: Fold,
    a: Array,
    b: Array,
    out: Array,
    da: Array | None,
    db: Array | None,
    budget: int,
) -> Array:
    """Return q_ij = sum_k p_ikj (da_ik + db_kj), the change of `out` with those of a and b."""
    xp = ctx.xp
    walk = _Walk(ctx, layout, a, b, out, budget, copies=3)
    result = xp.zeros(layout.full_shape, dtype=out.dtype, device=ctx.device)
    view = layout.view_out(xp, result)
    u = None if da is None else layout.view_a(xp, da)
    v = None if db is None else layout.view_b(xp, db)
    for tile, at in walk.tiles():
        of_u = None if u is None else at.read(xp, u, "a")
        of_v = None if v is None else at.read(xp, v, "b")
        at.write(ctx, view, tile.terms(of_u, of_v))
    return xp.reshape(result, layout.out_shape)


def logmatmulexp_second(
    ctx: Context,
    layout: Fold,
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
    walk = _Walk(ctx, layout, a, b, out, budget, copies=5)
    totals = walk.totals((True, True))
    result = xp.zeros(layout.full_shape, dtype=g.dtype, device=ctx.device)
    view = layout.view_out(xp, result)
    g = walk.of_product(g)
    zero = xp.zeros((1,) * len(layout.a_shape), dtype=ctx.dtype(ctx.precision), device=ctx.device)
    u = xp.broadcast_to(zero, layout.a_shape) if u is None else u
    v = xp.broadcast_to(zero, layout.b_shape) if v is None else v
    u, v = layout.view_a(xp, u), layout.view_b(xp, v)
    for tile, at in walk.tiles():
        of_u, of_v = at.read(xp, u, "a"), at.read(xp, v, "b")
        q = tile.terms(of_u, of_v)
        at.write(ctx, view, q)
        # Where the product is not finite, nothing is summed; a NaN is seen to by itself.
        q = xp.where(xp.isfinite(tile.out), q, xp.zeros_like(q))
        tile.accumulate(at.read(xp, g, "out"), Moments(of_u, of_v, q), walk.sums(totals, at))
    grad_a, grad_b = walk.finish(totals)
    return grad_a, grad_b, xp.reshape(result, layout.out_shape)


class _Walk:
    """The tiles of a folded log product, and arrays that hold sums over them."""

    def __init__(
        self, ctx: Context, layout: Fold, a: Array, b: Array, out: Array, budget: int, copies: int
    ) -> None:
        xp = ctx.xp
        self.ctx, self.layout, self.a, self.b, self.budget = ctx, layout, a, b, budget
        self.a_view, self.b_view = layout.view_a(xp, a), layout.view_b(xp, b)
        self.out_view = self.of_product(out)
        item = ctx.precision.itemsize
        self.block, reserved = elementwise_block(ctx, budget)
        # Factors and products of their size; quotients, sums, masks, and copies of entries.
        room = budget - budget // 4 - reserved
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

    def tiles(self, propagates_nan: bool = True) -> Iterator[tuple[PosteriorTile, Place]]:
        """Yield tiles, those of a panel of columns together."""
        if 0 in self.layout.sizes:
            return
        ctx, xp, precision = self.ctx, self.ctx.xp, self.ctx.precision
        for places in panels(self.layout, self.tiling):
            panel = None
            for at in places:
                if panel is None:
                    panel = posterior_operand(ctx, at.read(xp, self.b_view, "b"), -2, precision)
                yield (
                    PosteriorTile(
                        ctx,
                        posterior_operand(ctx, at.read(xp, self.a_view, "a"), -1, precision),
                        panel,
                        at.read(xp, self.out_view, "out"),
                        self.tiling.inner,
                        self.block,
                        self.budget,
                        propagates_nan,
                    ),
                    at,
                )

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

    def sums(self, totals: dict[bool, tuple[Array, Array]], at: Place) -> list[Sums]:
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
