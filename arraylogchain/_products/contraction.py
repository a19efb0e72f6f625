"""Contraction of an einsum in pairs, in opt_einsum's order, and its pullback.

Every operand and every intermediate result is used once. A pullback is therefore a composition of
functions, each mapping the cotangent of a result to the gradients of the operands it depends on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import array_api_compat
import numpy as np

from arraylogchain._core.context import Array
from arraylogchain._core.scaled import whole_part
from arraylogchain._inputs.arrays import are_readable, dtype_name, native_context, promote
from arraylogchain._inputs.tensors import detached
from arraylogchain._products.chainexp import scale_of_sums, sums_overflow

# Returns a product of matrices and its pullback, or None for a pullback that is not called.
Multiply = Callable[[Array, Array], tuple[Array, Any]]


class _Factor(NamedTuple):
    """An operand or product, its indices, and its pullback to gradients by operand number."""

    x: Array
    term: str
    pull: Callable[[Array], dict[int, Array]]


def contractions(equation: Any, operands: Sequence[Array], optimize: Any) -> Any:
    """Return the contractions that opt_einsum plans for an equation and shapes of operands.

    Raises
    ------
    TypeError
        If the equation is not a string.
    ImportError
        Without opt_einsum.
    ValueError
        If equation, shapes and optimizer do not fit.
    """
    if not isinstance(equation, str):
        raise TypeError(f"equation must be a string such as 'ij->i', got {type(equation).__name__}")
    try:
        import opt_einsum
    except ImportError:
        raise ImportError(
            "logeinsumexp and maxplus_einsum need opt_einsum; "
            "pip install 'arraylogchain[einsum]' installs it"
        ) from None
    shapes = [tuple(np.shape(x)) for x in operands]
    for i, shape in enumerate(shapes):
        if math.isnan(sum(shape)):
            raise ValueError(
                f"operands[{i}] has chunks of unknown sizes; compute_chunk_sizes() finds them out"
            )
    try:
        if isinstance(optimize, str):  # opt_einsum checks it only for three or more operands
            opt_einsum.paths.get_path_fn(optimize)
        _, plan = opt_einsum.contract_path(equation, *shapes, shapes=True, optimize=optimize)
        for term, shape in zip(plan.input_subscripts.split(","), shapes, strict=True):
            if len(set(zip(term, shape, strict=True))) > len(set(term)):
                raise ValueError(f"{term!r} repeats an index for axes of different lengths")
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"equation {equation!r} cannot be contracted for operands of shapes {shapes} and "
            f"optimize={optimize!r}: {error}"
        ) from error
    return plan


def evaluate(
    xp: Any, plan: Any, operands: Sequence[Array], multiply: Multiply
) -> tuple[Array, Callable[[Array], tuple[Array, ...]]]:
    """Return an einsum, and its pullback to all operands."""
    terms, dtypes = plan.input_subscripts.split(","), [x.dtype for x in operands]
    result = promote(map(dtype_name, dtypes))
    wide = getattr(xp, promote([result, "float32"]))
    operands, offset = _in_range(xp, [xp.astype(x, wide, copy=False) for x in operands])
    factors = [_operand(xp, i, operands[i], term, plan.size_dict) for i, term in enumerate(terms)]
    # The factors that remain after a path are contracted together.
    for group in (*plan.path, None):
        positions = range(len(factors)) if group is None else group
        popped = [factors.pop(i) for i in sorted(positions, reverse=True)]
        kept_axes = set(plan.output_subscript).union(*(factor.term for factor in factors))
        product = popped.pop()
        while popped:
            other_terms = kept_axes.union(*(factor.term for factor in popped[:-1]))
            product = _product(xp, product, popped.pop(), other_terms, multiply)
        factors.append(_summed(xp, product, kept_axes, multiply))
    out, pull = _grouped(xp, factors.pop(), *plan.output_subscript)
    out = out + 0 if len(operands) == 1 else out  # a copy: results are not views of operands
    dtype = out.dtype

    def pullback(g: Array) -> tuple[Array, ...]:
        gradients = pull(xp.astype(g, dtype, copy=False))
        return tuple(xp.astype(gradients[i], x, copy=False) for i, x in enumerate(dtypes))

    if offset is not None:
        scale = scale_of_sums(len(operands))
        out = (xp.astype(out, offset.dtype, copy=False) * scale + offset) / scale
    return xp.astype(out, getattr(xp, result), copy=False), pullback


def _in_range(xp: Any, operands: list[Array]) -> tuple[list[Array], Array | None]:
    """Return operands whose partial sums do not overflow, and the scaled sum of their shifts.

    If partial sums may overflow, or values cannot be read, each operand is shifted by its largest
    finite entry in whole nats, whose sums are exact. If values can be read, it is also converted to
    the widest precision.
    """
    if len(operands) <= 2:  # no intermediate results
        return operands, None
    x, is_read = operands[0], are_readable(*operands)
    ctx = native_context(xp, array_api_compat.device(x), dtype_name(x.dtype))
    if is_read and not sums_overflow(xp, operands, len(operands), ctx.precision):
        return operands, None
    widest = ctx.dtype(ctx.widest)
    if is_read:
        operands = [xp.astype(x, widest, copy=False) for x in operands]
    shifts = [_shift(xp, detached(x)) for x in operands]
    scale = scale_of_sums(len(operands))
    offset = sum(xp.astype(xp.reshape(shift, ()), widest) * scale for shift in shifts)
    return [x - shift for x, shift in zip(operands, shifts, strict=True)], offset


def _shift(xp: Any, x: Array) -> Array:
    """Return the largest finite entry in whole nats, with axes of length 1; 0 if there is none.

    If the difference from the smallest entry overflows, it is the midpoint of both.
    """
    axes, is_finite = tuple(range(x.ndim)), xp.isfinite(x)
    if 0 in x.shape:
        return xp.sum(x, axis=axes, keepdims=True)
    highest = xp.max(xp.where(is_finite, x, -math.inf), axis=axes, keepdims=True)
    lowest = xp.min(xp.where(is_finite, x, math.inf), axis=axes, keepdims=True)
    middle = highest / 2 + lowest / 2
    return whole_part(xp, xp.where(xp.isfinite(lowest - highest), highest, middle))


def _operand(xp: Any, i: int, x: Array, term: str, sizes: dict[str, int]) -> _Factor:
    """Return the diagonal of an operand's repeated indices, without axes that broadcast."""
    factor = _Factor(x, term, lambda g: {i: g})
    while len(set(factor.term)) < len(factor.term):
        factor = _diagonal(xp, factor)
    x, term, pull = factor
    shape = x.shape
    kept_axes = [axis for axis, c in enumerate(term) if shape[axis] == sizes.get(c, shape[axis])]
    x = xp.reshape(x, tuple(shape[axis] for axis in kept_axes))
    term = "".join(term[axis] for axis in kept_axes)
    return _Factor(x, term, lambda g: pull(xp.reshape(g, shape)))


def _diagonal(xp: Any, factor: _Factor) -> _Factor:
    """Return the diagonal of the first two axes that have the same index, which comes last."""
    x, term, pull = factor
    second = next(axis for axis, c in enumerate(term) if c in term[:axis])
    first = term.index(term[second])

    def pull_diagonal(g: Array) -> dict[int, Array]:
        *lead, n = g.shape
        matrix = xp.zeros((*lead, n * n), dtype=g.dtype, device=array_api_compat.device(g))
        matrix[..., :: n + 1] = g
        return pull(xp.moveaxis(xp.reshape(matrix, (*lead, n, n)), (-2, -1), (first, second)))

    x = xp.linalg.diagonal(xp.moveaxis(x, (first, second), (-2, -1)))
    term = term[:first] + term[first + 1 : second] + term[second + 1 :] + term[first]
    return _Factor(x, term, pull_diagonal)


def _grouped(
    xp: Any, factor: _Factor, *groups: str
) -> tuple[Array, Callable[[Array], dict[int, Array]]]:
    """Return an array with one axis for each group of indices, and its pullback."""
    x, old, pull = factor
    new = "".join(groups)
    x = xp.permute_dims(x, tuple(map(old.index, new)))
    shape, sizes = x.shape, dict(zip(new, x.shape, strict=True))

    def ungrouped(g: Array) -> dict[int, Array]:
        return pull(xp.permute_dims(xp.reshape(g, shape), tuple(map(new.index, old))))

    return xp.reshape(x, tuple(math.prod(map(sizes.__getitem__, c)) for c in groups)), ungrouped


def _summed(xp: Any, factor: _Factor, kept_axes: Collection[str], multiply: Multiply) -> _Factor:
    """Return a factor that is summed over the indices that are not kept."""
    x, term, _ = factor
    inner = {c: n for c, n in zip(term, x.shape, strict=True) if c not in kept_axes}
    if not inner:
        return factor
    one = xp.zeros((), dtype=x.dtype, device=array_api_compat.device(x))
    ones = xp.broadcast_to(one, tuple(inner.values()))
    return _product(xp, factor, _Factor(ones, "".join(inner), lambda g: {}), kept_axes, multiply)


def _product(
    xp: Any, a: _Factor, b: _Factor, kept_axes: Collection[str], multiply: Multiply
) -> _Factor:
    """Return the product of two factors, summed over the indices that are not kept.

    Axes that only one of them has are not merged: the product folds them without copies.
    """
    a = _summed(xp, a, {*kept_axes, *b.term}, multiply)
    b = _summed(xp, b, {*kept_axes, *a.term}, multiply)
    sizes = dict(zip(a.term + b.term, (*a.x.shape, *b.x.shape), strict=True))
    batch = [c for c in a.term if c in b.term and c in kept_axes]
    inner = "".join(c for c in a.term if c in b.term and c not in kept_axes)
    *rows, row = "", *(c for c in a.term if c not in b.term)
    *cols, col = "", *(c for c in b.term if c not in a.term)
    zeros = [""] * len(rows), [""] * len(cols)
    x, pull_a = _grouped(xp, a, *batch, *rows, *zeros[1], row, inner)
    y, pull_b = _grouped(xp, b, *batch, *zeros[0], *cols, inner, col)
    value, back = multiply(x, y) if inner else _added(xp, x, y)
    term, shape = "".join((*batch, *rows, *cols, row, col)), value.shape

    def pull(g: Array) -> dict[int, Array]:
        gradient_a, gradient_b = back(xp.reshape(g, shape))
        return pull_a(gradient_a) | pull_b(gradient_b)

    return _Factor(xp.reshape(value, tuple(map(sizes.__getitem__, term))), term, pull)


def _added(xp: Any, *terms: Array) -> tuple[Array, Any]:
    """Return the sum of arrays that broadcast, and its pullback."""
    shapes = [x.shape for x in terms]

    def back(g: Array) -> list[Array]:
        summed = [tuple(i for i, n in enumerate(s) if n != g.shape[i]) for s in shapes]
        return [xp.sum(g, axis=axes, keepdims=True) if axes else g + 0 for axes in summed]

    return sum(terms[1:], start=terms[0]), back
