"""Einsum by products of pairs, with its pullback.

Every operand and every result is used once. So a pullback is a chain of functions, each of which
takes the cotangent of a result and passes on those of what the result was made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import array_api_compat

from arraylogchain._arrays import dtype_name, promote
from arraylogchain._context import Array
from arraylogchain._einsum.equations import Contractions
from arraylogchain._fold import Shape

# Takes a cotangent and passes it on.
Pull = Callable[[Array], object]
# Returns a product of matrices and its pullback, None where nobody will call it.
Multiply = Callable[[Array, Array], tuple[Array, Any]]


def evaluate(
    xp: Any, plan: Contractions, operands: Sequence[Array], multiply: Multiply
) -> tuple[Array, Callable[[Array], tuple[Array, ...]]]:
    """Return an einsum, and its pullback to all operands."""
    dtypes = [x.dtype for x in operands]
    names = [dtype_name(dtype) for dtype in dtypes]
    halves = [name in ("float16", "bfloat16") for name in names]
    gradients: dict[int, Array] = {}

    def leaf(i: int) -> Pull:
        def keep(g: Array) -> None:
            gradients[i] = xp.astype(g, dtypes[i], copy=False)

        return keep

    left = []
    for i, x in enumerate(operands):
        if halves[i] and len(plan.steps) > 1:
            x = xp.astype(x, xp.float32)
        left.append(_reduced(xp, _Factor(x, plan.terms[i], leaf(i)), plan.reduced[i], plan.sizes))
    for step in plan.steps:
        if len(step.positions) == 1:
            (i,) = step.positions
            left[i] = _summed(xp, left[i], step.out, multiply)
        else:
            second, first = (left.pop(i) for i in reversed(step.positions))
            left.append(_contracted(xp, first, second, step.out, multiply))
            del first, second
    out = _moved(xp, left.pop(), plan.output)
    x, pull = out.x, out.pull
    if not plan.steps:
        x = x + 0  # and not a view of the operand

    def pullback(g: Array) -> tuple[Array, ...]:
        pull(xp.astype(g, xp.float32) if any(halves) and dtype_name(g.dtype) != "float64" else g)
        return tuple(gradients.pop(i) for i in range(len(dtypes)))

    return xp.astype(x, getattr(xp, promote(names)), copy=False), pullback


class _Factor(NamedTuple):
    """An operand or a result of a step, its indices, and where its cotangent goes."""

    x: Array
    term: str
    pull: Pull


def _moved(xp: Any, factor: _Factor, term: str, *shape: int) -> _Factor:
    """Return a factor with its axes in another order, then reshaped if a shape is given."""
    x, old, pull = factor
    order = tuple(map(old.index, term))
    back = tuple(map(term.index, old))
    x = xp.permute_dims(x, order)
    moved = x.shape

    def unmoved(g: Array) -> None:
        pull(xp.permute_dims(xp.reshape(g, moved), back))

    return _Factor(xp.reshape(x, shape) if shape else x, term, unmoved)


def _reduced(xp: Any, factor: _Factor, term: str, sizes: Mapping[str, int]) -> _Factor:
    """Return a factor without axes that broadcast, and with diagonals for repeated indices."""
    x, given, pull = factor
    shape = x.shape
    kept = [(c, n) for c, n in zip(given, shape, strict=True) if n == sizes[c]]
    if len(kept) < len(shape):
        x = xp.reshape(x, tuple(n for _, n in kept))
        given = "".join(c for c, _ in kept)
        factor = _Factor(x, given, lambda g: pull(xp.reshape(g, shape)))
    while len(factor.term) > len(term):
        factor = _diagonal(xp, factor)
    return factor


def _diagonal(xp: Any, factor: _Factor) -> _Factor:
    """Return a factor with one axis less of an index that it repeats."""
    x, term, pull = factor
    first = next(i for i, c in enumerate(term) if c in term[i + 1 :])
    second = term.index(term[first], first + 1)
    order = (*(i for i in range(len(term)) if i not in (first, second)), first, second)
    size = x.shape[first]
    back = tuple(map(order.index, range(len(order))))

    def undiagonal(g: Array) -> None:
        on = xp.eye(size, dtype=xp.bool, device=array_api_compat.device(g))
        g = g[..., None]
        pull(xp.permute_dims(xp.where(on, g, xp.zeros_like(g)), back))

    rest = "".join(term[i] for i in order[:-1])
    return _Factor(xp.linalg.diagonal(xp.permute_dims(x, order)), rest, undiagonal)


def _summed(xp: Any, factor: _Factor, out: str, multiply: Multiply) -> _Factor:
    """Return a factor without the indices that `out` lacks: a product with a vector of ones."""
    inner = "".join(c for c in factor.term if c not in out)
    lengths = dict(zip(factor.term, factor.x.shape, strict=True))
    count = math.prod([lengths[c] for c in inner])
    x, _, pull = _moved(xp, factor, out + inner, *(lengths[c] for c in out), count)
    ones = xp.zeros(count, dtype=x.dtype, device=array_api_compat.device(x))
    value, back = multiply(x, ones)
    return _Factor(value, out, lambda g: pull(back(g)[0]))


def _contracted(xp: Any, a: _Factor, b: _Factor, kept: str, multiply: Multiply) -> _Factor:
    """Return the product of two factors, summed over the indices that are not kept.

    Axes that only one of them has stay apart: the product folds them without copies.
    """
    lengths = dict(zip(a.term + b.term, (*a.x.shape, *b.x.shape), strict=True))
    batch = "".join(c for c in a.term if c in b.term and c in kept)
    inner = "".join(c for c in a.term if c in b.term and c not in kept)
    rows = "".join(c for c in a.term if c not in b.term)
    cols = "".join(c for c in b.term if c not in a.term)

    def sizes(term: str) -> Shape:
        return tuple([lengths[c] for c in term])

    if not inner:
        a = _moved(xp, a, batch + rows, *sizes(batch + rows), *(1,) * len(cols))
        b = _moved(xp, b, batch + cols, *sizes(batch), *(1,) * len(rows), *sizes(cols))
        return _added(xp, a, b, batch + rows + cols)
    count = math.prod(sizes(inner))
    height, width = math.prod(sizes(rows[-1:])), math.prod(sizes(cols[-1:]))
    lead_a = (*sizes(batch), *sizes(rows[:-1]), *(1,) * len(cols[:-1]))
    lead_b = (*sizes(batch), *(1,) * len(rows[:-1]), *sizes(cols[:-1]))
    x, _, pull_a = _moved(xp, a, batch + rows + inner, *lead_a, height, count)
    y, _, pull_b = _moved(xp, b, batch + cols[:-1] + inner + cols[-1:], *lead_b, count, width)
    value, back = multiply(x, y)
    term, shape = batch + rows[:-1] + cols[:-1] + rows[-1:] + cols[-1:], value.shape

    def pull(g: Array) -> None:
        of_a, of_b = back(xp.reshape(g, shape))
        pull_a(of_a)
        pull_b(of_b)

    return _Factor(xp.reshape(value, sizes(term)), term, pull)


def _added(xp: Any, a: _Factor, b: _Factor, term: str) -> _Factor:
    """Return the sum of two factors whose axes broadcast."""
    shapes = a.x.shape, b.x.shape
    pulls = a.pull, b.pull

    def pull(g: Array) -> None:
        for to, shape in zip(pulls, shapes, strict=True):
            axes = tuple(i for i, n in enumerate(shape) if n != g.shape[i])
            to(xp.sum(g, axis=axes, keepdims=True) if axes else g)

    return _Factor(a.x + b.x, term, pull)
