"""What values and gradients together are compared with.

Products of matrices: long double, at entries of the value drawn at random, and the first rows of
the left and columns of the right gradient. Chains: a scaled forward-backward recursion, in float64
where the contestants compute in float32, else in long double. Broadcast products: float64, all
entries of the gradients; the contestants compute in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import references
from benchmarks.inputs import Inputs
from benchmarks.references import Reference, SeveralReferences

_ROWS = 4

Floats = NDArray[Any]


def log_product(inputs: Inputs) -> SeveralReferences:
    da, db = _first_gradients(*(inputs[name] for name in ("a", "b", "g")))
    return SeveralReferences(
        (
            references.log_product(inputs),
            Reference(np.s_[:_ROWS], da, is_gradient=True),
            Reference(np.s_[:, :_ROWS], db, is_gradient=True),
        )
    )


def log_products(inputs: Inputs) -> SeveralReferences:
    """Values of a batch of products; gradients of the last one."""
    da, db = _first_gradients(*(inputs[name][-1] for name in ("a", "b", "g")))
    return SeveralReferences(
        (
            references.log_product(inputs),
            Reference(np.s_[-1, :_ROWS], da, is_gradient=True),
            Reference(np.s_[-1, :, :_ROWS], db, is_gradient=True),
        )
    )


def _first_gradients(*given: Floats) -> tuple[Floats, Floats]:
    """Return the first rows of the left gradient, and the first columns of the right one."""
    a, b, g = (x.astype(np.longdouble) for x in given)
    return _gradient_rows(a, b, g), _gradient_rows(b.T, a.T, g.T).T


def _gradient_rows(a: Floats, b: Floats, g: Floats) -> Floats:
    """Return the first rows of the left gradient: the shares of its terms times the cotangent."""
    rows = []
    for a_row, g_row in zip(a[:_ROWS], g[:_ROWS], strict=True):
        terms = a_row[:, None] + b
        shares = np.exp(terms - terms.max(axis=0))
        rows.append((shares / shares.sum(axis=0)) @ g_row)
    return np.stack(rows)


def product(subscripts: str) -> Callable[[Inputs], SeveralReferences]:
    """Return the reference of a product with broadcast weights, which einsum writes as given."""
    operands, out = subscripts.split("->")
    left, right = operands.split(",")

    def reference(inputs: Inputs) -> SeveralReferences:
        a, b, g = (inputs[name].astype(np.float64) for name in ("a", "b", "g"))
        da = _einsum(f"{out},{right}->{left}", g, b)
        # A letter that neither operand has belongs to an axis of length 1.
        known = "".join(letter for letter in right if letter in left + out)
        db = _einsum(f"{left},{out}->{known}", a, g).reshape(b.shape)
        return SeveralReferences(
            (
                references.product(inputs),
                Reference((), da, is_gradient=True),
                Reference((), db, is_gradient=True),
            )
        )

    return reference


def _einsum(subscripts: str, *operands: Floats) -> Floats:
    return np.einsum(subscripts, *operands, optimize=True)


def forum(inputs: Inputs) -> SeveralReferences:
    """All of a problem with one set of parameters, t = 1, and a cotangent of ones."""
    x, bulk, p0 = (inputs[name].astype(np.float64) for name in ("x", "bulk", "p0"))
    value, *found = forward_backward(x[:, 0], bulk[0, 0], p0[0, 0])
    gradients = (Reference(np.s_[:, 0], found[0], is_gradient=True),)
    gradients += tuple(Reference((0, 0), part, is_gradient=True) for part in found[1:])
    return SeveralReferences((Reference(np.s_[:, 0], value), *gradients))


def chain(inputs: Inputs) -> SeveralReferences:
    """All of log Z and its gradients, with a cotangent of ones."""
    wide = np.float64 if inputs["x"].dtype == np.float32 else np.longdouble
    x, transitions, initial = (inputs[name].astype(wide) for name in ("x", "P", "p0"))
    rows = x.reshape(-1, *x.shape[-2:])
    value, dx, *others = forward_backward(rows, transitions, initial)
    gradients = (dx.reshape(x.shape), *others)
    parts = (Reference((), part, is_gradient=True) for part in gradients)
    return SeveralReferences((Reference((), value.reshape(x.shape[:-2])), *parts))


def marginals(inputs: Inputs) -> Reference:
    x, transitions, initial = (inputs[name].astype(np.longdouble) for name in ("x", "P", "p0"))
    _, posterior, *_ = forward_backward(x[None], transitions, initial)
    return Reference((), posterior[0], is_gradient=True)


def forward_backward(
    x: Floats, transitions: Floats, initial: Floats
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return log Z and the gradients of its sum, in the precision given.

    Parameters
    ----------
    x : array [n, T, K]
        Log potentials.
    transitions : array [T - 1, K, K] or [1, K, K]
        One matrix for each step, or one for all.
    initial : array [K]

    Returns
    -------
    log_z : array [n]
    dx, dtransitions, dinitial : array
        Of the shapes of `x`, `transitions` and `initial`.
    """
    steps = x.shape[1]
    top = x.max(axis=-1, keepdims=True)
    weights = np.exp(x - top)
    which = np.minimum(np.arange(steps - 1), len(transitions) - 1)
    alpha = np.empty_like(x)
    log_z = top.sum(axis=(1, 2))
    state = initial * weights[:, 0]
    for i in range(steps):
        if i > 0:
            state = (alpha[:, i - 1] @ transitions[which[i - 1]]) * weights[:, i]
        total = state.sum(axis=-1, keepdims=True)
        alpha[:, i] = state / total
        log_z += np.log(total[:, 0])
    dx = np.empty_like(x)
    dtransitions = np.zeros_like(transitions)
    beta = np.ones_like(x[:, 0])
    for i in reversed(range(steps)):
        joint = alpha[:, i] * beta
        dx[:, i] = joint / joint.sum(axis=-1, keepdims=True)
        message = weights[:, i] * beta
        if i > 0:
            beta = message @ transitions[which[i - 1]].T
            # Of all paths: what alpha and the message from behind make of Z, in the same scale.
            total = (alpha[:, i - 1] * beta).sum(axis=-1, keepdims=True)
            dtransitions[which[i - 1]] += alpha[:, i - 1].T @ (message / total)
            beta /= beta.sum(axis=-1, keepdims=True)
    dinitial = (message / (message @ initial)[:, None]).sum(axis=0)
    return log_z, dx, dtransitions, dinitial
