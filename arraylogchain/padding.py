"""Chains whose steps have different numbers of states, padded to the largest of these numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from arraylogchain._arrays import (
    check_dtypes,
    check_same,
    detached,
    dtype_name,
    enter,
    is_differentiated,
)
from arraylogchain._context import Array
from arraylogchain._inputs.arguments import check_given
from arraylogchain._inputs.parts import check_parts, name_of, pad

__all__ = ["PaddedStates", "pad_states"]


class PaddedStates(NamedTuple):
    """Arrays for `LogChain`, and which of their states exist.

    `transitions` holds what was given as transitions or log_transitions, and likewise `initial` and
    `final`; None stands for what was not given.
    """

    log_potentials: Array
    transitions: Array | None
    initial: Array | None
    final: Array | None
    mask: Array


def pad_states(
    log_potentials: Sequence[Array],
    *,
    transitions: Sequence[Array] | None = None,
    log_transitions: Sequence[Array] | None = None,
    initial: Array | None = None,
    log_initial: Array | None = None,
    final: Array | None = None,
    log_final: Array | None = None,
) -> PaddedStates:
    """Pad steps of different numbers of states to arrays that `LogChain` takes.

    Every step gets max(K_i) states. Those that it did not have are impossible: their log potential
    is -inf, and the weights of transitions from and to them are 0.

    Parameters
    ----------
    log_potentials : list or tuple of T arrays [..., K_i]
        Logarithms of the weights of the K_i states of step i.
    transitions : list or tuple of T - 1 arrays [..., K_i, K_{i+1}], optional
        Nonnegative weights of going [from, to].
    log_transitions : list or tuple of T - 1 arrays, optional
        Their logarithms instead.
    initial : array [..., K_0], optional
        Nonnegative weights of the first state.
    log_initial : array [..., K_0], optional
        Their logarithms instead.
    final : array [..., K_{T-1}], optional
        Nonnegative weights of the last state.
    log_final : array [..., K_{T-1}], optional
        Their logarithms instead.

    Returns
    -------
    log_potentials : array [..., T, max(K_i)]
    transitions : array [..., T - 1, max(K_i), max(K_i)] or None
        Logarithms if `log_transitions` were given.
    initial : array [..., max(K_i)] or None
        Logarithms if `log_initial` was given.
    final : array [..., max(K_i)] or None
        Logarithms if `log_final` was given.
    mask : array [T, max(K_i)] of bool
        True for states that exist.

    Raises
    ------
    TypeError
        If potentials or transitions are not lists or tuples of arrays of real floating-point
        numbers, or if libraries differ.
    ValueError
        If shapes, numbers of arrays or devices do not fit, if transitions (or
        initial or final weights) are given both ways, or if transitions are missing though T > 1.

    Notes
    -----
    Everything is copied. The arrays of one list are broadcast to the batch axes that any of them
    has, and promoted to one dtype. Gradients of tensors flow through the padding. Forward
    messages of states that do not exist are -inf, their marginals, counts and gradients 0, and no
    path uses them; but infinite or NaN weights beside them can make NaN of that.

    Examples
    --------
    >>> import numpy as np
    >>> from arraylogchain import LogChain
    >>> padded = pad_states([np.zeros(2), np.zeros(3)], transitions=[np.ones((2, 3))])
    >>> padded.mask.tolist()
    [[True, True, False], [True, True, True]]
    >>> chain = LogChain(padded.log_potentials, transitions=padded.transitions)
    >>> round(float(np.exp(chain.log_partition())), 6)  # 2 * 3 paths of weight 1
    6.0
    """
    options = {
        "log_potentials": log_potentials,
        "transitions": transitions,
        "log_transitions": log_transitions,
        "initial": initial,
        "log_initial": log_initial,
        "final": final,
        "log_final": log_final,
    }
    parts = check_parts(check_given(options))
    named = {name_of(name, i): x for name, xs in parts.items() for i, x in enumerate(xs)}
    if is_differentiated(*named.values()):
        return PaddedStates(*pad(_check_tensors(named), parts))
    ctx, ready = enter({name: detached(x) for name, x in named.items()})
    entered = {name: [ready[name_of(name, i)] for i in range(len(parts[name]))] for name in parts}
    with ctx.computing():
        return PaddedStates(*ctx.handed_back(pad(ctx.xp, entered)))


def _check_tensors(named: Mapping[str, Any]) -> Any:
    """Check what `enter` does, for tensors whose values may not be readable."""
    from array_api_compat import torch as xp

    from arraylogchain._torch.functions import check_tensors

    check_tensors(**named)
    check_dtypes({name: dtype_name(x.dtype) for name, x in named.items()}, xp)
    check_same("device", {name: x.device for name, x in named.items()})
    return xp
