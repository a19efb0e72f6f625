"""Matrix products: public functions that validate their arguments and choose an implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from arraylogchain._core.context import Array
from arraylogchain._core.threads import using
from arraylogchain._inputs.arrays import is_lazy
from arraylogchain._inputs.options import check_workers, check_workspace
from arraylogchain._inputs.tensors import is_differentiated
from arraylogchain._products import certified, linear, maxplus
from arraylogchain._products.in_memory import check_shapes, compute, compute_chain, named
from arraylogchain._results import MaxPlusProduct
from arraylogchain._torch.compiling import as_operator

__all__ = ["MaxPlusProduct", "logchainexp", "logmatmulexp", "matmul", "maxplus_matmul"]


@as_operator
def matmul(
    a: Array, b: Array, /, *, workspace: int | None = None, workers: int | None = None
) -> Array:
    """Multiply matrices without expanding a broadcast axis.

    As ``a @ b``, but a batch axis that only one operand has is folded into its rows or columns
    instead of being copied along the other operand, in the forward computation and in gradients.

    Parameters
    ----------
    a : array [..., M, K] or [K]
        float16, bfloat16, float32 or float64; half precisions are computed in float32.
    b : array [..., K, N] or [K]
        Of the same library and device. Batch axes broadcast.
    workspace : int, optional
        Bytes that temporaries may take beyond inputs and output. Default: 64 MiB, on CUDA devices
        256 MiB.
    workers : int, optional
        Largest number of threads, BLAS's own not included. Default: as many as the process may
        use; see `LogChain`.

    Returns
    -------
    array [..., M, N]
        Axes that a 1-D operand lacks are left out, as `numpy.matmul` does.

    Raises
    ------
    TypeError
        If an operand is not an array of real floating-point numbers, or their libraries differ.
    ValueError
        If shapes or devices do not fit, or the workspace or the number of workers is too small.

    Examples
    --------
    One weight matrix for each of 8 heads, shared by 1000 rows:

    >>> import numpy as np
    >>> x, weights = np.ones((1000, 8, 1, 64)), np.ones((8, 64, 32))
    >>> matmul(x, weights).shape
    (1000, 8, 1, 32)
    """
    return _multiply(linear.matmul, a, b, workspace, workers)


@as_operator
def logmatmulexp(
    a: Array, b: Array, /, *, workspace: int | None = None, workers: int | None = None
) -> Array:
    """Return the matrix product in log space, ``log(exp(a) @ exp(b))``, exact on any range.

    Equal to ``scipy.special.logsumexp(a[..., :, :, None] + b[..., None, :, :], axis=-2)``, the
    infinities and NaN included, without that array, at nearly the speed of ``a @ b``.

    Parameters
    ----------
    a : array [..., M, K] or [K]
        Logarithms; -inf is an exact zero. float16, bfloat16, float32 or float64; half precisions
        are computed in float32.
    b : array [..., K, N] or [K]
        Of the same library and device. Batch axes broadcast and are never expanded.
    workspace : int, optional
        Bytes that temporaries may take beyond inputs and output. Default: 64 MiB, on CUDA devices
        256 MiB.
    workers : int, optional
        Largest number of threads, BLAS's own not included. Default: as many as the process may
        use; see `LogChain`.

    Returns
    -------
    array [..., M, N]
        Within ``eps * (2 * abs(exact) + G + c)`` of the exact result: c grows no faster than K
        (typically as its root), and G, the distance between the sum of the two operands' maxima
        and the result, is below 72 in float32 and 673 in float64.

    Raises
    ------
    TypeError
        If an operand is not an array of real floating-point numbers, or their libraries differ.
    ValueError
        If shapes or devices do not fit, or the workspace or the number of workers is too small.

    Notes
    -----
    One matrix multiply of ``exp(a - shift)`` and ``exp(b - shift)`` certifies most entries: a sum
    of at least ``5 * K * tiny / eps`` has lost less than one eps to underflow. The other entries,
    where the operands' maxima do not meet, are recomputed, in float64 or with their own maximum.

    Examples
    --------
    >>> import numpy as np
    >>> a = np.array([[0.0, -800.0]])
    >>> logmatmulexp(a, np.array([[-800.0], [0.0]]))  # exp(-800) is 0 in float64
    array([[-799.30685282]])
    """
    return _multiply(certified.logmatmulexp, a, b, workspace, workers)


@as_operator
def maxplus_matmul(
    a: Array, b: Array, /, *, workspace: int | None = None, workers: int | None = None
) -> MaxPlusProduct:
    """Return the matrix product of the max-plus algebra, ``max_k a[i, k] + b[k, j]``.

    Parameters
    ----------
    a : array [..., M, K] or [K]
        float16, bfloat16, float32 or float64; half precisions are computed in float32.
    b : array [..., K, N] or [K]
        Of the same library and device. Batch axes broadcast and are never expanded.
    workspace : int, optional
        Bytes that temporaries may take beyond inputs and output. Default: 64 MiB, on CUDA devices
        256 MiB.
    workers : int, optional
        Largest number of threads, BLAS's own not included. Default: as many as the process may
        use; see `LogChain`.

    Returns
    -------
    values : array [..., M, N]
        The maxima; -inf if K is 0. NaN where a term is NaN.
    indices : int64 array [..., M, N]
        The k of each maximum, the smallest on ties; the first NaN where there is one; -1 if K is 0.

    Raises
    ------
    TypeError
        If an operand is not an array of real floating-point numbers, or their libraries differ.
    ValueError
        If shapes or devices do not fit, or the workspace or the number of workers is too small.

    Examples
    --------
    >>> import numpy as np
    >>> values, indices = maxplus_matmul(np.array([[0.0, 3.0]]), np.array([[5.0], [1.0]]))
    >>> values, indices
    (array([[5.]]), array([[0]]))
    """
    return MaxPlusProduct(*_multiply(maxplus.maxplus_matmul, a, b, workspace, workers))


@as_operator
def logchainexp(
    matrices: Array | Sequence[Array],
    /,
    *,
    workspace: int | None = None,
    workers: int | None = None,
) -> Array:
    """Return the product of many matrices in log space, ``log(exp(M_1) @ ... @ exp(M_n))``.

    Parameters
    ----------
    matrices : array [..., n, K, K] or sequence of arrays [..., K_i, K_{i+1}]
        Logarithms; -inf is an exact zero. The arrays of a sequence may be rectangular, and their
        batch axes broadcast; they are multiplied in the order that costs least.
    workspace : int, optional
        Bytes that temporaries may take beyond inputs and output. Default: 64 MiB, on CUDA devices
        256 MiB. For a sequence of rectangular matrices, neither copies of them nor intermediate
        products are counted.
    workers : int, optional
        Largest number of threads, BLAS's own not included. Default: as many as the process may
        use; see `LogChain`.

    Returns
    -------
    array [..., K_1, K_{n+1}]
        The log of the identity (0 on the diagonal, -inf elsewhere) for an array of no matrices.

    Raises
    ------
    TypeError
        If an operand is not an array of real floating-point numbers, or their libraries differ.
    ValueError
        If shapes or devices do not fit, a sequence is empty, or the workspace or the number of
        workers is too small.

    Notes
    -----
    A sum of entries that is beyond the range of the dtype is infinite; partial sums may exceed the
    range, as in `logeinsumexp`.

    Examples
    --------
    >>> import numpy as np
    >>> product = logchainexp(np.zeros((5, 2, 2)))  # 2**4 paths from each state to each
    >>> round(float(np.exp(product[0, 0])), 6)
    16.0
    """
    arguments = named(matrices)
    budget = check_workspace(workspace, *arguments.values())
    if not is_lazy(*arguments.values()):  # their chunks may be of unknown sizes
        check_shapes(arguments)
    with using(check_workers(workers)):
        if specialized := specialized_functions(*arguments.values()):
            return specialized.logchainexp(arguments, budget)
        return compute_chain(arguments, budget)


def _multiply(
    function: Callable[..., Any], a: Array, b: Array, workspace: int | None, workers: int | None
) -> Any:
    """Return the result of a function of `_products`, or of the variant that has its name."""
    budget = check_workspace(workspace, a, b)
    with using(check_workers(workers)):
        if specialized := specialized_functions(a, b):
            return getattr(specialized, function.__name__)(a, b, budget)
        return compute(function, a, b, budget)


def specialized_functions(*arrays: Array) -> ModuleType | None:
    """Return the module of functions for Dask arrays, or for tensors in autograd, or None."""
    if is_lazy(*arrays):
        from arraylogchain._dask import products as lazy

        return lazy
    if is_differentiated(*arrays):
        from arraylogchain._torch import products as differentiable

        return differentiable
    return None
