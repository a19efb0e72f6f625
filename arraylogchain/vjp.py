"""The functions of `arraylogchain` as pairs of a value and its pullback.

A pullback takes a cotangent, the gradient of some number with respect to the value, and returns the
gradients of that number with respect to the inputs, as `jax.vjp` does. It refers to the inputs
themselves, not to copies, and stores the arrays that the documentation of its function names. It
changes none of them, and may be called repeatedly. The inputs must not be changed in place before
its last call; the value may be.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from array_api_compat import array_namespace

from arraylogchain import _chains as chains
from arraylogchain._core.axes import Shape, fold
from arraylogchain._core.context import Array, Context, shape_of
from arraylogchain._inputs.arrays import dtype_name, prepare_inputs, raise_if_differentiated
from arraylogchain._inputs.chain import PARTS, Chain, check_states
from arraylogchain._inputs.options import check_workers, check_workspace
from arraylogchain._inputs.tensors import dynamo_disabled
from arraylogchain._products import certified, in_memory, linear, maxplus
from arraylogchain._products.chainexp import chain_and_pullback, multiplier
from arraylogchain._products.contraction import contractions, evaluate
from arraylogchain._products.gradients import logmatmulexp_gradients
from arraylogchain._products.operand import PullbackInputs
from arraylogchain._results import ChainGradients, MaxPlusProduct, check_cotangent, check_requested
from arraylogchain.chain import LogChain, check_array

__all__ = [
    "ChainGradients",
    "log_partition",
    "log_probability",
    "logchainexp",
    "logeinsumexp",
    "logmatmulexp",
    "matmul",
    "maxplus_matmul",
]

PairPullback = Callable[[Array], tuple[Array, Array]]
# A value, or a tuple of it and indices, and a function of its cotangent that returns gradients.
Computed = tuple[Any, Callable[..., Iterable[Array]]]


def matmul(
    a: Array, b: Array, /, *, workspace: int | None = None, workers: int | None = None
) -> tuple[Array, PairPullback]:
    """Return `arraylogchain.matmul` and its pullback.

    Broadcast axes are expanded neither in the value nor in the gradients.

    Parameters
    ----------
    a : array [..., M, K] or [K]
        float16, bfloat16, float32 or float64; half precisions are computed in float32.
    b : array [..., K, N] or [K]
        Of the same library and device. Batch axes broadcast.
    workspace : int, optional
        Bytes that temporaries may take beyond inputs, output and gradients, in each of the value
        and a call of the pullback. Default: 64 MiB, on CUDA devices 256 MiB.
    workers : int, optional
        Largest number of threads, BLAS's own not included. Default: as many as the process may
        use; see `LogChain`.

    Returns
    -------
    value : array [..., M, N]
    pullback : callable
        Takes a cotangent of the value's shape, library and device; returns the gradients of `a`
        and `b`, of their shapes and dtypes.

    Raises
    ------
    TypeError
        If an operand is not an array of real floating-point numbers, or their libraries differ.
    ValueError
        If shapes or devices do not fit, or the workspace or the number of workers is too small.
    NotImplementedError
        If tensors require grad.

    Examples
    --------
    >>> import numpy as np
    >>> value, pullback = matmul(np.ones((1000, 8, 1, 64)), np.ones((8, 64, 32)))
    >>> da, db = pullback(np.ones_like(value))
    >>> da.shape, db.shape
    ((1000, 8, 1, 64), (8, 64, 32))
    """
    budget = check_workspace(workspace, a, b)

    def compute(ctx: Context, a: Array, b: Array) -> Computed:
        layout = fold(shape_of(a), shape_of(b))
        result = linear.matmul(ctx, layout, a, b, budget)
        return result, lambda g: linear.matmul_gradients(ctx, layout, a, b, g, budget)

    return _with_pullback("matmul", {"a": a, "b": b}, workers, compute)


def logmatmulexp(
    a: Array, b: Array, /, *, workspace: int | None = None, workers: int | None = None
) -> tuple[Array, PairPullback]:
    """Return `arraylogchain.logmatmulexp` and its pullback.

    Parameters
    ----------
    a : array [..., M, K] or [K]
        Logarithms; -inf is an exact zero. float16, bfloat16, float32 or float64; half precisions
        are computed in float32.
    b : array [..., K, N] or [K]
        Of the same library and device. Batch axes broadcast and are never expanded.
    workspace : int, optional
        Bytes that temporaries may take beyond inputs, output and gradients, in each of the value
        and a call of the pullback. Default: 64 MiB, on CUDA devices 256 MiB. Gradients in half
        precision are accumulated in float32 first, which is not counted.
    workers : int, optional
        Largest number of threads, BLAS's own not included. Default: as many as the process may
        use; see `LogChain`.

    Returns
    -------
    value : array [..., M, N]
    pullback : callable
        Takes a cotangent of the value's shape, library and device; returns the gradients of `a`
        and `b`, of their shapes and dtypes.

    Raises
    ------
    TypeError
        If an operand is not an array of real floating-point numbers, or their libraries differ.
    ValueError
        If shapes or devices do not fit, or the workspace or the number of workers is too small.
    NotImplementedError
        If tensors require grad.

    Notes
    -----
    The pullback stores a copy of the value. The gradients are sums of the cotangent times the
    softmax weights ``exp(a_ik + b_kj - value_ij)``. They are exactly 0 for operands that are -inf,
    and through entries that are infinite. An entry that is NaN makes the gradients of its row of
    `a` and its column of `b` NaN.

    Examples
    --------
    >>> import numpy as np
    >>> a, b = np.array([[0.0, -800.0]]), np.array([[-800.0], [0.0]])
    >>> value, pullback = logmatmulexp(a, b)
    >>> pullback(np.ones_like(value))  # both terms are as large, though exp(-800) is 0 in float64
    (array([[0.5, 0.5]]), array([[0.5],
           [0.5]]))
    """
    budget = check_workspace(workspace, a, b)

    def compute(ctx: Context, a: Array, b: Array) -> Computed:
        layout = fold(shape_of(a), shape_of(b))
        product = certified.logmatmulexp(ctx, layout, a, b, budget)

        def pull(g: Array) -> Sequence[Array]:
            ctx.record_stream(product)
            return logmatmulexp_gradients(ctx, layout, PullbackInputs(a, b, product, g), budget)

        # A copy, as the caller may change it.
        return ctx.xp.asarray(product, copy=True), pull

    return _with_pullback("logmatmulexp", {"a": a, "b": b}, workers, compute)


def maxplus_matmul(
    a: Array, b: Array, /, *, workspace: int | None = None, workers: int | None = None
) -> tuple[MaxPlusProduct, PairPullback]:
    """Return `arraylogchain.maxplus_matmul` and its pullback.

    Parameters
    ----------
    a : array [..., M, K] or [K]
        float16, bfloat16, float32 or float64; half precisions are computed in float32.
    b : array [..., K, N] or [K]
        Of the same library and device. Batch axes broadcast and are never expanded.
    workspace : int, optional
        Bytes that temporaries may take beyond inputs, output and gradients, in each of the value
        and a call of the pullback. Default: 64 MiB, on CUDA devices 256 MiB. Gradients in half
        precision are accumulated in float32 first, which is not counted.
    workers : int, optional
        Largest number of threads, BLAS's own not included. Default: as many as the process may
        use; see `LogChain`.

    Returns
    -------
    value : MaxPlusProduct
        Values and indices.
    pullback : callable
        Takes a cotangent of the values, of their shape, library and device; returns the gradients
        of `a` and `b`, of their shapes and dtypes. The cotangent of an entry goes to the term at
        the reported index, unless the entry is infinite or NaN. The indices are copied.

    Raises
    ------
    TypeError
        If an operand is not an array of real floating-point numbers, or their libraries differ.
    ValueError
        If shapes or devices do not fit, or the workspace or the number of workers is too small.
    NotImplementedError
        If tensors require grad.

    Examples
    --------
    >>> import numpy as np
    >>> product, pullback = maxplus_matmul(np.array([[0.0, 3.0]]), np.array([[5.0], [1.0]]))
    >>> pullback(np.ones_like(product.values))
    (array([[1., 0.]]), array([[1.],
           [0.]]))
    """
    budget = check_workspace(workspace, a, b)

    def compute(ctx: Context, a: Array, b: Array) -> Computed:
        layout = fold(shape_of(a), shape_of(b))
        values, indices = maxplus.maxplus_matmul(ctx, layout, a, b, budget)
        terms = maxplus.finite_terms(ctx, values, indices, budget)

        def pull(g: Array) -> Sequence[Array]:
            ctx.record_stream(terms)
            return maxplus.maxplus_gradients(ctx, layout, (a, b), terms, g, budget)

        return (values, indices), pull

    value, pullback = _with_pullback("maxplus_matmul", {"a": a, "b": b}, workers, compute)
    return MaxPlusProduct(*value), pullback


def logchainexp(
    matrices: Array | Sequence[Array],
    /,
    *,
    workspace: int | None = None,
    workers: int | None = None,
) -> tuple[Array, Callable[[Array], tuple[Any]]]:
    """Return `arraylogchain.logchainexp` and its pullback.

    The matrices of an array are multiplied in pairs of neighbors, then these products, and so on.
    The pullback stores all intermediate products, about as much as the matrices themselves.

    Parameters
    ----------
    matrices : array [..., n, K, K] or sequence of arrays [..., K_i, K_{i+1}]
        Logarithms; -inf is an exact zero. The arrays of a sequence may be rectangular, and their
        batch axes broadcast; they are multiplied in the order that costs least.
    workspace : int, optional
        Bytes that temporaries of a product may take. Default: 64 MiB, on CUDA devices 256 MiB.
        Intermediate products, and the gradients with respect to them, are not counted.
    workers : int, optional
        Largest number of threads, BLAS's own not included. Default: as many as the process may
        use; see `LogChain`.

    Returns
    -------
    value : array [..., K_1, K_{n+1}]
    pullback : callable
        Takes a cotangent of the value's shape, library and device; returns a tuple of one: the
        gradient of an array, or a list of the gradients of a sequence.

    Raises
    ------
    TypeError
        If an operand is not an array of real floating-point numbers, or their libraries differ.
    ValueError
        If shapes or devices do not fit, a sequence is empty, or the workspace or the number of
        workers is too small.
    NotImplementedError
        If tensors require grad.

    Examples
    --------
    >>> import numpy as np
    >>> value, pullback = logchainexp(np.zeros((3, 2, 2)))
    >>> (gradient,) = pullback(np.ones_like(value))
    >>> gradient[1]  # a fourth of the paths of each of the four entries
    array([[1., 1.],
           [1., 1.]])
    """
    arguments = in_memory.named(matrices)
    budget = check_workspace(workspace, *arguments.values())
    is_stack = "matrices" in arguments

    def compute(ctx: Context, *factors: Array) -> Computed:
        in_memory.check_shapes(arguments)
        return chain_and_pullback(ctx, list(factors), is_stack, budget)

    value, pullback = _with_pullback("logchainexp", arguments, workers, compute)
    return value, pullback if is_stack else lambda cotangent: (list(pullback(cotangent)),)


def logeinsumexp(
    equation: str,
    *operands: Array,
    optimize: Any = "auto",
    workspace: int | None = None,
    workers: int | None = None,
) -> tuple[Array, Callable[[Array], tuple[Array, ...]]]:
    """Return `arraylogchain.logeinsumexp` and its pullback.

    The pullback stores all intermediate results, and a copy of the value.

    Parameters
    ----------
    equation : str
        As `numpy.einsum` takes it.
    *operands : array
        Logarithms, of one library and device; -inf is an exact zero.
    optimize : str, bool, sequence of tuples of int, or optimizer
        The order of contraction, as `opt_einsum.contract_path` takes it.
    workspace : int, optional
        Bytes that temporaries of each product may take, in each of the value and a call of the
        pullback. Default: 64 MiB, on CUDA devices 256 MiB.
    workers : int, optional
        Largest number of threads, BLAS's own not included. Default: as many as the process may
        use; see `LogChain`.

    Returns
    -------
    value : array
    pullback : callable
        Takes a cotangent of the value's shape, library and device; returns a tuple of the gradients
        of the operands, of their shapes and dtypes.

    Raises
    ------
    TypeError
        If an operand is not an array of real floating-point numbers, or their libraries differ.
    ValueError
        If the equation, shapes or devices do not fit, or the workspace or the number of workers is
        too small.
    NotImplementedError
        If tensors require grad.
    ImportError
        If opt_einsum is not installed (extra ``einsum``).

    Examples
    --------
    >>> import numpy as np
    >>> value, pullback = logeinsumexp("i,i->", np.zeros(2), np.log([0.25, 0.75]))
    >>> tuple(g.tolist() for g in pullback(1.0))
    ([0.25, 0.75], [0.25, 0.75])
    """
    budget = check_workspace(workspace, *operands)
    plan = contractions(equation, operands, optimize)

    def compute(ctx: Context, *ready: Array) -> Computed:
        out, pull = evaluate(ctx.xp, plan, list(ready), multiplier(ctx, budget, True))
        is_infinite = ctx.xp.isinf(out)

        def pull_finite(g: Array) -> Sequence[Array]:
            ctx.record_stream(is_infinite)
            return pull(ctx.xp.where(is_infinite, ctx.xp.zeros_like(g), g))

        # A copy, as the caller may change it.
        return ctx.xp.asarray(out, copy=True), pull_finite

    arguments = {f"operands[{i}]": x for i, x in enumerate(operands)}
    return _with_pullback("logeinsumexp", arguments, workers, compute)


@dynamo_disabled
def _with_pullback(
    name: str, arguments: Mapping[str, Array], workers: int | None, compute: Callable[..., Computed]
) -> tuple[Any, Callable[[Array], tuple[Any, ...]]]:
    """Return the value that `compute` returns for the operands, and its pullback."""
    workers = check_workers(workers)
    raise_if_differentiated(arguments, f"vjp.{name}", f"arraylogchain.{name}")
    ctx, ready = prepare_inputs(arguments)
    # Views keep their shapes if the caller changes the shape of an array in place.
    operands = [x[...] for x in ready.values()]
    return _in_context(ctx, workers, operands, lambda: compute(ctx, *operands))


def _in_context(
    ctx: Context, workers: int | None, inputs: Iterable[Array], compute: Callable[[], Computed]
) -> tuple[Any, Callable[..., tuple[Any, ...]]]:
    """Return the value that `compute` returns, and its pullback, in the caller's library."""
    with ctx.computing(workers):
        result, pull = compute()
        value, prototype = ctx.to_caller(result), ctx.to_caller(ctx.empty((1,), ctx.result_dtype))
    shape = shape_of(result[0] if isinstance(result, tuple) else result)

    @dynamo_disabled
    def pullback(cotangent: Array, *options: Any) -> tuple[Any, ...]:
        g = _prepare_cotangent(ctx, prototype, shape, cotangent, inputs)
        with ctx.computing(workers):
            return ctx.to_caller(tuple(pull(g, *options)))  # type: ignore[no-any-return]

    return value, pullback


@dynamo_disabled
def log_partition(chain: LogChain, /) -> tuple[Array, Callable[..., ChainGradients]]:
    """Return `LogChain.log_partition` and its pullback.

    Parameters
    ----------
    chain : LogChain
        Its messages are stored for the pullback, O(T * K) for each row. If they exceed a
        `workspace` that the chain was given, the messages of about sqrt(T) steps are stored, and
        the others recomputed; of more steps where the matrices of sqrt(T) steps do not fit it.

    Returns
    -------
    value : array [...]
    pullback : callable
        Takes a cotangent of the value's shape, library and device, and optionally ``wanted``, the
        names of the fields to compute. Returns `ChainGradients` of the shapes and dtypes of the
        chain's arrays, summed over broadcast axes.

    Raises
    ------
    TypeError
        If `chain` is not a `LogChain`.
    NotImplementedError
        If its tensors require grad. The pullback raises it if the cotangent requires grad, and
        ValueError if `wanted` has names that are not fields.

    Notes
    -----
    With respect to log potentials the gradients are posterior probabilities, with respect to log
    transitions expected counts. With respect to linear transitions they are
    ``alpha * (emission * beta) / Z``, which is finite where a transition is 0. Through a row whose
    value is infinite they are 0. Derivatives with respect to zeros of linear weights that no path
    could use can be beyond the range of the dtype: they are then finite, but undefined in size and
    sign.

    Examples
    --------
    >>> import numpy as np
    >>> from arraylogchain import LogChain
    >>> x = np.log([[0.5, 0.5], [0.9, 0.3]])
    >>> value, pullback = log_partition(LogChain(x, transitions=np.ones((1, 2, 2))))
    >>> gradients = pullback(1.0)
    >>> gradients.log_potentials.round(6).tolist()
    [[0.5, 0.5], [0.75, 0.25]]
    >>> gradients.transitions.round(6).tolist()
    [[[0.375, 0.125], [0.375, 0.125]]]
    """
    check_chain(chain)
    if lazy := chain._lazy():
        return lazy.value_and_pullback(chain)  # type: ignore[no-any-return]
    return _chain_with_pullback("log_partition", chain, chains.marginals.value_and_pullback)


@dynamo_disabled
def log_probability(
    chain: LogChain, states: Array, /
) -> tuple[Array, Callable[..., ChainGradients]]:
    """Return `LogChain.log_probability` and its pullback.

    Parameters
    ----------
    chain : LogChain
        In memory.
    states : array [..., T] of integers
        A copy is stored, and the value; the pullback computes messages again.

    Returns
    -------
    value : array [...]
    pullback : callable
        As that of `log_partition`.

    Raises
    ------
    TypeError
        If `chain` is not a `LogChain`, or the states are not integers.
    ValueError
        If shapes do not fit, or a state is not among 0 ... K - 1.
    NotImplementedError
        If its arrays are Dask's, or tensors that require grad; see also `log_partition`.

    Notes
    -----
    With respect to log potentials and log transitions the gradients are the counts of the path
    minus posterior probabilities and expected counts. Entries of the path itself are sums of the
    probabilities of all others, so that nothing cancels. For a linear weight of the path they are
    divided by that weight, and count as 0 if below the smallest number of the dtype. Through a path
    whose value is infinite, gradients are 0.

    Examples
    --------
    >>> import numpy as np
    >>> from arraylogchain import LogChain
    >>> x = np.array([[0.0, -50.0], [0.0, 0.0]])
    >>> chain = LogChain(x, transitions=np.ones((1, 2, 2)))
    >>> value, pullback = log_probability(chain, np.array([0, 1]))
    >>> pullback(1.0).log_potentials[0]  # 1 minus a marginal near 1 would be 0
    array([ 1.92874985e-22, -1.92874985e-22])
    """
    check_chain(chain)
    check_array(states)
    if chain._lazy():
        raise NotImplementedError("chain must be in memory for log_probability, got Dask arrays")

    def compute(ctx: Context, validated: Chain, workspace: int, _: bool) -> Any:
        checked = check_states(ctx, states, validated, workspace)
        function = chains.log_probability.value_and_pullback
        return function(ctx, validated, workspace, checked)

    return _chain_with_pullback("log_probability", chain, compute)


def check_chain(chain: Any) -> None:
    if not isinstance(chain, LogChain):
        raise TypeError(f"chain must be a LogChain, got {type(chain).__name__}")


def _chain_with_pullback(
    name: str, chain: LogChain, compute: Callable[..., Any]
) -> tuple[Array, Callable[..., ChainGradients]]:
    """Return the value that `compute` returns for a chain, and its pullback."""
    raise_if_differentiated(chain._arguments.arrays, f"vjp.{name}", f"the chain's {name}()")
    ctx, validated = chain._arguments.prepare()
    # Views keep their shapes if the caller changes the shape of an array in place.
    views = replace(validated, parts={part: x[...] for part, x in validated.parts.items()})
    names = dict(zip(ChainGradients._fields, PARTS, strict=True))

    def in_order() -> Computed:
        result, pull = compute(ctx, views, chain._workspace, chain._keeps_messages)
        return result, lambda g, requested: map(pull(g, requested).get, PARTS)

    value, pull = _in_context(ctx, chain._workers, views.parts.values(), in_order)

    @dynamo_disabled
    def pullback(
        cotangent: Array, wanted: Collection[str] = ChainGradients._fields
    ) -> ChainGradients:
        check_requested(wanted)
        requested = views.parts.keys() & {names[field] for field in wanted}
        return ChainGradients(*pull(cotangent, frozenset(requested)))

    return value, pullback


def _prepare_cotangent(
    ctx: Context, prototype: Array, shape: Shape, cotangent: Array, inputs: Iterable[Array]
) -> Array:
    """Return a cotangent in the library that computes; raise if it does not fit the value."""
    raise_if_differentiated(
        {"cotangent": cotangent}, "a pullback", "the function on tensors that require grad"
    )
    if isinstance(cotangent, (int, float)):
        g = ctx.xp.asarray(cotangent, dtype=ctx.dtype(ctx.widest), device=ctx.device)
    else:
        if dtype_name(getattr(cotangent, "dtype", None)) == "bfloat16":
            # NumPy, which may compute for the cotangent's library, has no bfloat16.
            xp = array_namespace(cotangent)
            cotangent = xp.astype(cotangent, xp.float32)
        _, arguments = prepare_inputs({"value": prototype, "cotangent": cotangent})
        # Without the inputs, `prepare_inputs` may choose another library than `ctx.xp`.
        g = ctx.xp.asarray(arguments["cotangent"], device=ctx.device)
    ctx.record_stream(g, *inputs)
    check_cotangent(g, shape)
    return g
