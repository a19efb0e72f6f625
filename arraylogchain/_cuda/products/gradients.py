"""Gradients of log products on CUDA devices.

They are sums over its posterior, as in `_array.products`: posterior_weights.cu divides the
cotangents by the product's sums, and posterior_sums.cu multiplies the quotients with the factors of
either operand. What the first cannot prove it leaves open; that is added up last, by
exact_posterior.cu and exact_posterior_sums.cu. For small products small_gradients.cu does it all.
"""

from __future__ import annotations

from arraylogchain._context import Array
from arraylogchain._cuda.device import Device
from arraylogchain._cuda.dtypes import compute_type
from arraylogchain._cuda.elementwise import rounded
from arraylogchain._cuda.products import small
from arraylogchain._cuda.products.operands import (
    make_product,
    operand_a,
    operand_b,
    strided_product_view,
)
from arraylogchain._cuda.products.posterior import TiledPosterior
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
    product = make_product(device, layout, a, b, out, result_dtype)
    product.view[...] = strided_product_view(device, layout, out, a, b)
    g_view = strided_product_view(device, layout, g, a, b)
    is_small = small.is_small(product)
    dtype = result_dtype if is_small else compute_type(result_dtype)
    of_a, of_b = (
        device.empty(tuple(x.shape), dtype) if want else None
        for x, want in zip((a, b), wanted, strict=True)
    )
    targets = (
        None if of_a is None else operand_a(device, layout, of_a),
        None if of_b is None else operand_b(device, layout, of_b),
    )
    if is_small:
        small.run_gradients(device, product, g, g_view, targets, spoils)
        return of_a, of_b
    TiledPosterior(device, product, g, g_view, workspace, spoils).run(targets)
    return rounded(device, of_a, result_dtype), rounded(device, of_b, result_dtype)
