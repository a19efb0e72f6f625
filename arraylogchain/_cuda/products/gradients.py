"""Gradients of log products on CUDA devices.

They are sums over its posterior, as in `_product.posterior`: posterior_weights.cu divides the
cotangents by the product's sums, and posterior_sums.cu multiplies the quotients with the factors of
either operand. What the first cannot prove it leaves open; that is added up last, by
exact_posterior.cu and exact_posterior_sums.cu. For small products small_gradients.cu does it all.
"""

from __future__ import annotations

import numpy as np

from arraylogchain._cuda.device import Device
from arraylogchain._cuda.dtypes import compute_type, itemsize
from arraylogchain._cuda.elementwise import rounded
from arraylogchain._cuda.products import small
from arraylogchain._cuda.products.operands import (
    Array,
    Operand,
    Product,
    operand_a,
    operand_b,
    product,
    strided_product_view,
)
from arraylogchain._cuda.products.panels import Panels, Prepared, pitch_of
from arraylogchain._cuda.products.posterior import (
    TILES,
    Weights,
    run_exact,
    run_exact_sums,
    run_sums,
    run_weights,
)
from arraylogchain._cuda.products.tiles import choose_tile
from arraylogchain._fold import Fold


def logmatmulexp_gradients(
    device: Device,
    layout: Fold,
    a: Array,
    b: Array,
    out: Array,
    g: Array,
    result_dtype: str,
    workspace: int,
    wanted: tuple[bool, bool] = (True, True),
    spoils: bool = True,
) -> tuple[Array | None, Array | None]:
    """Return the gradients of sum(g * logmatmulexp(a, b)), each of its operand's shape and dtype.

    Parameters
    ----------
    device : Device
    layout : Fold
        Of the operands' shapes; none of its sizes is 0.
    a, b : array
    out, g : array
        The product, and the cotangents, of its shape. All arrays are of dtype `result_dtype`, with
        any strides.
    result_dtype : str
        One of `C_TYPES`. Where products are not small, gradients of half precisions are summed in
        arrays of float32.
    workspace : int
        Bytes that temporaries may take beside those.
    wanted : tuple of bool
        Which gradients to compute.
    spoils : bool
        Whether a NaN in an operand shows in the gradients; else it has none, as +inf.
    """
    whole = product(device, layout, a, b, out, result_dtype)
    whole.view[...] = strided_product_view(device, layout, out, a, b)
    h_view = strided_product_view(device, layout, g, a, b)
    is_small = small.is_small(whole)
    dtype = result_dtype if is_small else compute_type(result_dtype)
    found = [
        device.empty(tuple(x.shape), dtype) if want else None
        for x, want in zip((a, b), wanted, strict=True)
    ]
    of_a, of_b = (
        None if x is None else make(device, layout, x)
        for x, make in zip(found, (operand_a, operand_b), strict=True)
    )
    if is_small:
        small.run_gradients(device, whole, g, h_view, (of_a, of_b), spoils)
        return found[0], found[1]
    _run_tiled(device, whole, g, h_view, (of_a, of_b), workspace, spoils)
    return rounded(device, found[0], result_dtype), rounded(device, found[1], result_dtype)


def _run_tiled(
    device: Device,
    whole: Product,
    g: Array,
    h_view: np.ndarray,
    targets: tuple[Operand | None, Operand | None],
    workspace: int,
    spoils: bool,
) -> None:
    dtype = compute_type(whole.dtype)
    panels = Panels(whole, workspace, 3 * itemsize(dtype))
    prepared = Prepared(device, whole, panels, keeps_sums=False)
    tile = choose_tile(device, TILES[dtype], dtype, panels.batches, panels.rows, panels.columns)
    entries = panels.batches * panels.rows * pitch_of(panels.columns)
    work = Weights(
        weights=device.empty((entries,), dtype),
        open=device.empty((entries,), dtype),
        tops=device.empty((entries,), dtype),
        flags=device.empty((panels.batches * panels.tiles(tile.rows, tile.columns),), "uint8"),
        tile=tile,
    )
    chunks = list(panels.chunks())
    for panel in panels:
        prepared.start(panel)
        for first, terms in chunks:
            prepared.factors(panel, first, terms)
            run_weights(device, whole, prepared, panel, (first, terms), work, g, h_view, spoils)
        run_exact(device, whole, prepared, panel, work)
        for first, terms in chunks:
            if len(chunks) > 1:
                prepared.factors(panel, first, terms)
            for target, of_left in zip(targets, (True, False), strict=True):
                if target is not None:
                    run_sums(device, prepared, panel, (first, terms), work, target, of_left)
        for target, of_left in zip(targets, (True, False), strict=True):
            if target is not None:
                run_exact_sums(device, whole, prepared, panel, work, target, of_left)
