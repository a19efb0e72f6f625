"""The formulations that are measured on CUDA, besides those in torch that the CPU has as well.

Those for CuPy ask their arrays for the functions: written once, they run on NumPy's, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from array_api_compat import array_namespace

import arraylogchain as alc
from arraylogchain._array.products.tiling import check_workspace
from arraylogchain._arrays import enter
from arraylogchain._cuda.products.log_product import multiply
from arraylogchain._fold import fold

# Terms in memory at a time where a formulation works in blocks: half a gigabyte in float32.
BLOCK = 1 << 27


# --- this library, in a way that nobody gets without asking ---------------------------------------


def over_tensor_cores(a: Any, b: Any) -> Any:
    """Take tensor cores, whatever was measured; fail on a device that has none."""
    context, given = enter({"a": a, "b": b})
    if context.kernels is None:  # the tests have no device
        return alc.logmatmulexp(a, b)
    layout, workspace = fold(a.shape, b.shape), check_workspace(None)
    out = multiply(context, layout, *given.values(), workspace, tensor_cores=True)
    return context.hand_back(out)


# --- CuPy -----------------------------------------------------------------------------------------


def matmul(a: Any, b: Any) -> Any:
    return a @ b


def three_products(a: Any, b: Any, g: Any) -> tuple[Any, Any, Any]:
    """The matrix products of a value and two gradients, and nothing else."""
    return a @ b, g @ b.swapaxes(-1, -2), a.swapaxes(-1, -2) @ g


def copy(moved: Any) -> Any:
    """Read and write as many bytes as a product with its operands and result."""
    return moved.copy()


def einsum(subscripts: str) -> Callable[[Any, Any], Any]:
    return lambda a, b: array_namespace(a).einsum(subscripts, a, b)


def exp_matmul_log(a: Any, b: Any) -> Any:
    """Subtract row and column maxima, exponentiate, multiply: fast, wrong on wide ranges."""
    xp = array_namespace(a)
    a_max = a.max(axis=-1, keepdims=True)
    b_max = b.max(axis=-2, keepdims=True)
    return xp.log(xp.exp(a - a_max) @ xp.exp(b - b_max)) + a_max + b_max


def logsumexp_in_blocks(a: Any, b: Any) -> Any:
    """Every entry with its own maximum, as much at a time as fits into a block."""
    xp = array_namespace(a)

    def reduce(terms: Any) -> Any:
        top = terms.max(axis=-2, keepdims=True)
        shift = xp.where(xp.isfinite(top), top, xp.zeros_like(top))
        terms -= shift
        xp.exp(terms, out=terms)
        return xp.log(terms.sum(axis=-2)) + shift[..., 0, :]

    return _in_blocks(a, b, reduce)


def maximum_in_blocks(a: Any, b: Any) -> Any:
    """Maxima and their places; the maxima are returned."""
    xp = array_namespace(a)

    def reduce(terms: Any) -> Any:
        best = terms.argmax(axis=-2)[..., None, :]
        return xp.take_along_axis(terms, best, axis=-2)[..., 0, :]

    return _in_blocks(a, b, reduce)


def _in_blocks(a: Any, b: Any, reduce: Callable[[Any], Any]) -> Any:
    shape = (*a.shape[:-1], b.shape[-1])
    a, b = a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:])
    out = array_namespace(a).empty((*a.shape[:2], b.shape[-1]), dtype=a.dtype)
    count, height, inner = a.shape
    for batch, rows in _blocks(count, height, inner, b.shape[-1]):
        out[batch, rows] = reduce(a[batch, rows, :, None] + b[batch, None, :, :])
    return out.reshape(shape)


def _blocks(batch: int, rows: int, inner: int, cols: int) -> Iterator[tuple[slice, slice]]:
    matrices = max(1, BLOCK // (rows * inner * cols))
    high = max(1, min(rows, BLOCK // (inner * cols)))
    for i in range(0, batch, matrices):
        for j in range(0, rows, high):
            yield slice(i, i + matrices), slice(j, j + high)


def bare_products(x: Any, bulk: Any, *_: Any) -> Any:
    """The matrix products of the forum's chain and nothing else, on a state that stays the same."""
    state = array_namespace(x).exp(x[:, 0, 0])
    for i in range(bulk.shape[-3]):
        out = state @ bulk[0, 0, i]
    return out


# --- torch, compiled ------------------------------------------------------------------------------


def torch_logsumexp(a: Any, b: Any) -> Any:
    """The definition; only a compiler keeps all its terms out of memory."""
    import torch

    return torch.logsumexp(a[..., :, :, None] + b[..., None, :, :], dim=-2)


def torch_maximum(a: Any, b: Any) -> Any:
    """The definition, without the places of the maxima."""
    return (a[..., :, :, None] + b[..., None, :, :]).amax(-2)


def compiled(function: Callable[..., Any], mode: str = "default") -> Callable[..., Any]:
    """Make a contestant of a function that torch compiles for the shapes at hand."""

    @cache
    def compile_it() -> Callable[..., Any]:
        import torch

        result: Callable[..., Any] = torch.compile(function, mode=mode, dynamic=False)
        return result

    def call(*given: Any) -> Any:
        if mode == "reduce-overhead":
            import torch

            # Graphs may overwrite the results of the last call from here on.
            torch.compiler.cudagraph_mark_step_begin()
        return compile_it()(*given)

    return call
