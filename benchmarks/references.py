"""What values are compared with: NumPy's long double, at entries drawn at random.

Long double has 64 bits of mantissa and a range of 1e±4932 on x86; where it is only float64, the
errors of float64 contestants mean little, and the report says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.inputs import Inputs

_SAMPLES = 2000
_ROWS = 8

Wide = NDArray[np.longdouble]


class AnyReference(Protocol):
    """What the result of a contestant is compared with."""

    def compare(self, value: Any, /) -> tuple[float | None, float]:
        """Return the error, None if there is none to speak of, and the share that is wrong."""
        ...


@dataclass(frozen=True, slots=True)
class Reference:
    """Exact values of some entries of a result."""

    index: Any
    exact: Wide
    is_gradient: bool = False

    def compare(self, value: NDArray[Any]) -> tuple[float, float]:
        """Return the largest error, and the share of entries that are no number.

        The error of a value is relative beyond 1; that of a gradient is relative to the largest
        entry of the exact gradient. The share counts what is infinite or NaN and should be finite,
        and the reverse.
        """
        # What is on a device picks entries itself, and brings no others to the host.
        held = value if hasattr(value, "library") else np.asarray(value)
        found = np.asarray(held[self.index])
        found = found.astype(np.result_type(found.dtype, self.exact.dtype))
        same = (found == self.exact) | (np.isnan(found) & np.isnan(self.exact))
        both = np.isfinite(found) & np.isfinite(self.exact)
        distance = np.abs(found[both] - self.exact[both])
        size = np.abs(self.exact[both])
        unit = (size.max(initial=0) or 1) if self.is_gradient else np.maximum(1, size)
        return float((distance / unit).max(initial=0)), float(np.mean(~(same | both)))


@dataclass(frozen=True, slots=True)
class SeveralReferences:
    """Exact values of some entries of a value and of its gradients."""

    parts: tuple[Reference, ...]

    def compare(self, values: tuple[NDArray[Any], ...]) -> tuple[float, float]:
        """Return the largest error and the largest share of all parts."""
        found = [part.compare(value) for part, value in zip(self.parts, values, strict=True)]
        return max(error for error, _ in found), max(wrong for _, wrong in found)


def log_product(inputs: Inputs) -> Reference:
    index, terms = _sample(inputs["a"], inputs["b"])
    return Reference(index, _logsumexp(terms[0] + terms[1]))


def maxplus_product(inputs: Inputs) -> Reference:
    index, terms = _sample(inputs["a"], inputs["b"])
    # As the contestants add: in the precision of the operands.
    sums = terms[0].astype(inputs["a"].dtype) + terms[1].astype(inputs["b"].dtype)
    return Reference(index, sums.max(axis=-1).astype(np.longdouble))


def product(inputs: Inputs) -> Reference:
    index, terms = _sample(inputs["a"], inputs["b"])
    return Reference(index, (terms[0] * terms[1]).sum(axis=-1))


def elementwise(function: Callable[..., Wide], *names: str) -> Callable[[Inputs], Reference]:
    """Return the reference of a pass over arrays, at entries drawn at random."""

    def reference(inputs: Inputs) -> Reference:
        drawn = np.random.default_rng(0).integers(inputs[names[0]].size, size=_SAMPLES)
        given = (inputs[name].reshape(-1)[drawn].astype(np.longdouble) for name in names)
        index = np.unravel_index(drawn, inputs[names[0]].shape)
        return Reference(index, function(*given))

    return reference


def chain(inputs: Inputs) -> Reference:
    """Log Z of the first rows, by a scaled vector recursion."""
    x, transitions, initial = inputs["x"], inputs["P"], inputs["p0"]
    index = () if x.ndim == 2 else np.s_[:_ROWS]
    return Reference(index, _recursion(x[index], transitions, initial))


def forum(inputs: Inputs) -> Reference:
    """Log Z of the first rows of a problem with one set of parameters, t = 1."""
    index = np.s_[:_ROWS, 0]
    exact = _recursion(inputs["x"][index], inputs["bulk"][0, 0], inputs["p0"][0, 0])
    return Reference(index, exact)


def matrix_chain(inputs: Inputs) -> Reference:
    """Rows of the product of all matrices, each carried through as a vector."""
    matrices = inputs["matrices"]
    index = np.s_[:_ROWS]
    top = matrices.max(axis=(-1, -2)).astype(np.longdouble)
    state = np.eye(matrices.shape[-1], dtype=np.longdouble)[index]
    log_scale = np.zeros((len(state), 1), dtype=np.longdouble)
    for matrix, shift in zip(matrices, top, strict=True):
        state = state @ np.exp(matrix - shift)
        total = state.sum(axis=-1, keepdims=True)
        state /= total
        log_scale += np.log(total) + shift
    return Reference(index, np.log(state) + log_scale)


def _recursion(x: NDArray[Any], transitions: NDArray[Any], initial: NDArray[Any]) -> Wide:
    x = x.astype(np.longdouble)
    transitions = transitions.astype(np.longdouble)
    top = x.max(axis=-1, keepdims=True)
    weights = np.exp(x - top)
    state = initial.astype(np.longdouble) * weights[..., 0, :]
    log_scale = top.sum(axis=(-1, -2))
    for i in range(1, x.shape[-2]):
        total = state.sum(axis=-1, keepdims=True)
        log_scale = log_scale + np.log(total[..., 0])
        state = (state / total) @ transitions[min(i, len(transitions)) - 1] * weights[..., i, :]
    result: Wide = np.log(state.sum(axis=-1)) + log_scale
    return result


def _sample(a: NDArray[Any], b: NDArray[Any]) -> tuple[tuple[Any, ...], tuple[Wide, Wide]]:
    """Draw entries of a product; return their index and the rows and columns that make them."""
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    shape = (*batch, a.shape[-2], b.shape[-1])
    drawn = np.random.default_rng(0).integers(np.prod(shape), size=_SAMPLES)
    index = np.unravel_index(drawn, shape)
    *which, row, col = index
    a_all = np.broadcast_to(a, (*batch, *a.shape[-2:]))
    b_all = np.swapaxes(np.broadcast_to(b, (*batch, *b.shape[-2:])), -1, -2)
    rows, cols = a_all[(*which, row)], b_all[(*which, col)]
    return index, (rows.astype(np.longdouble), cols.astype(np.longdouble))


def _logsumexp(terms: Wide) -> Wide:
    top = terms.max(axis=-1)
    shift = np.where(np.isfinite(top), top, 0)
    result: Wide = np.log(np.exp(terms - shift[..., None]).sum(axis=-1)) + shift
    return result
