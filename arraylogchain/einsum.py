"""Einsum of logarithms: any equation, any number of operands, contracted in pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from arraylogchain import products
from arraylogchain._core.context import Array
from arraylogchain._core.threads import using
from arraylogchain._inputs.arrays import prepare_inputs
from arraylogchain._inputs.options import check_workers, check_workspace
from arraylogchain._products.contraction import contractions, evaluate
from arraylogchain._torch.compiling import as_operator

__all__ = ["logeinsumexp", "maxplus_einsum"]


@as_operator
def logeinsumexp(
    equation: str,
    *operands: Array,
    optimize: Any = "auto",
    workspace: int | None = None,
    workers: int | None = None,
) -> Array:
    """Return an einsum in log space, ``log(einsum(equation, exp(a), ...))``, exact on any range.

    Parameters
    ----------
    equation : str
        As `numpy.einsum` and `opt_einsum.contract` take it: with or without ``->``, with ellipses
        and repeated indices. Axes of length 1 broadcast, and are never expanded.
    *operands : array
        Logarithms, of one library and device; -inf is an exact zero. float16, bfloat16, float32 or
        float64; half precisions are computed in float32.
    optimize : str, bool, sequence of tuples of int, or optimizer
        The order of contraction, as `opt_einsum.contract_path` takes it, which also prints it.
    workspace : int, optional
        Bytes that temporaries of each product may take. Default: 64 MiB, on CUDA devices 256 MiB.
        Not counted: intermediate results, and copies of operands whose dtype is not that of the
        computation, or whose summed axes are several and not adjacent in memory.
    workers : int, optional
        Largest number of threads, BLAS's own not included. Default: as many as the process may
        use; see `LogChain`.

    Returns
    -------
    array
        With the axes of the equation's output. Each contraction is as accurate as `logmatmulexp`.

    Raises
    ------
    TypeError
        If an operand is not an array of real floating-point numbers, or their libraries differ.
    ValueError
        If the equation, the order, shapes or devices do not fit, or the workspace or the number of
        workers is too small.
    ImportError
        If opt_einsum is not installed (extra ``einsum``).

    Notes
    -----
    Repeated indices of an operand become a diagonal, and indices that no other operand has and the
    output lacks are summed. Then operands are contracted in pairs, each by `logmatmulexp`, or
    added where no index is summed. Results are differentiable by torch; for other arrays, use
    `arraylogchain.vjp.logeinsumexp`. Gradients through infinite entries are 0.

    A sum of entries that is beyond the range of the dtype is infinite; partial sums may exceed the
    range. Where they could, the largest entry of each of three or more operands is subtracted
    first, in whole nats, and float32 is computed in float64 unless on a device, under Dask or a
    transform. In other cases, and in float64, partial sums that lie farther below the sum of these
    entries than the largest number are lost; if finite entries of an operand differ by more than
    that number, sums may be infinite too.

    Examples
    --------
    >>> import numpy as np
    >>> a, b = np.log([[0.5, 0.5]]), np.log([[0.2, 0.8], [0.4, 0.6]])
    >>> np.exp(logeinsumexp("ij,jk->ik", a, b)).round(6)
    array([[0.3, 0.7]])
    >>> round(float(np.exp(logeinsumexp("ij,jk->", a, b))), 6)
    1.0
    """
    return _einsum(products.logmatmulexp, equation, operands, optimize, workspace, workers)


@as_operator
def maxplus_einsum(
    equation: str,
    *operands: Array,
    optimize: Any = "auto",
    workspace: int | None = None,
    workers: int | None = None,
) -> Array:
    """Return an einsum of the max-plus algebra: the largest term, not the log of the sum.

    Parameters
    ----------
    equation : str
        As `logeinsumexp` takes it.
    *operands : array
        Of one library and device.
    optimize : str, bool, sequence of tuples of int, or optimizer
        As `logeinsumexp` takes it.
    workspace, workers : int, optional
        As `logeinsumexp` takes them.

    Returns
    -------
    array
        The largest sums of entries; -inf where there is none, NaN where a term is NaN.

    Raises
    ------
    TypeError, ValueError, ImportError
        As `logeinsumexp`.

    Examples
    --------
    >>> import numpy as np
    >>> maxplus_einsum("ij,j->i", np.array([[0.0, 3.0], [2.0, 1.0]]), np.array([5.0, 1.0]))
    array([5., 7.])
    """

    def multiply(a: Array, b: Array, *, workspace: int | None) -> Array:
        return products.maxplus_matmul(a, b, workspace=workspace).values

    return _einsum(multiply, equation, operands, optimize, workspace, workers)


def _einsum(
    multiply: Callable[..., Array],
    equation: str,
    operands: Sequence[Array],
    optimize: Any,
    workspace: int | None,
    workers: int | None,
) -> Array:
    check_workspace(workspace)
    with using(check_workers(workers)):
        plan = contractions(equation, operands, optimize)
        arguments = {f"operands[{i}]": x for i, x in enumerate(operands)}

        def product(a: Array, b: Array) -> tuple[Array, None]:
            return multiply(a, b, workspace=workspace), None

        if specialized := products.specialized_functions(*operands):
            return specialized.einsum(arguments, plan, product)
        ctx, ready = prepare_inputs(arguments)
        with ctx.computing():
            out, _ = evaluate(ctx.xp, plan, list(ready.values()), product)
            return ctx.to_caller(ctx.xp.asarray(out))
