"""Chains whose steps have different numbers of states, given as sequences of arrays.

They are computed as chains of the largest number of states. States that a step does not have get
a log potential of -inf, and transitions from and to them are zero, so that no path uses them. Only
this module knows of them: it pads what comes in, and cuts back what comes out.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from arraylogchain._arrays import (
    check_dtypes,
    check_same,
    detached,
    dtype_name,
    enter,
    is_differentiated,
    promote,
)
from arraylogchain._inputs.arguments import (
    INITIAL,
    TRANSITIONS,
    check_counts,
    check_sequence_shapes,
)
from arraylogchain._context import Array, Context, shape_of
from arraylogchain._fold import Shape


@dataclass(frozen=True, slots=True)
class Sequences:
    """What a chain was given as sequences: the shapes and dtypes of the arrays.

    Attributes
    ----------
    shapes : dict of str to list of tuple of int
        By the argument's name; one for initial weights, which are a single array.
    dtypes : dict of str to list of str
    """

    shapes: Mapping[str, list[Shape]]
    dtypes: Mapping[str, list[str]]

    @property
    def sizes(self) -> list[int]:
        """Numbers of states of the steps, K_0 ... K_{T-1}."""
        return [shape[-1] for shape in self.shapes["log_potentials"]]

    def cut_states(self, x: Array) -> list[Array]:
        """Return the parts [..., K_i] of an array [..., T, K]."""
        return [x[..., i, :n] for i, n in enumerate(self.sizes)]

    def within(self, states: Array) -> Array:
        """Return paths whose states are all among those that their steps have.

        They are, but where weights are NaN, so that no path is better than another.
        """
        return _namespace(states).minimum(states, _last(states, self.sizes))

    def cut_transitions(self, x: Array) -> list[Array]:
        """Return the parts [..., K_i, K_{i+1}] of an array in the shape of the transitions."""
        (name,) = set(TRANSITIONS) & set(self.shapes)
        return self.cut_like(name, x)

    def cut_like(self, name: str, x: Array) -> list[Array]:
        """Return sums by the arrays of an argument, of those by its padded form."""
        core = 2 if name in TRANSITIONS else 1
        parts = []
        for i, shape in enumerate(self.shapes[name]):
            own = tuple(slice(n) for n in shape[len(shape) - core :])
            at = () if name in INITIAL else (i,)
            parts.append(_summed_to(x[(..., *at, *own)], shape))
        return parts

    def hand_back_gradient(self, ctx: Context, name: str, x: Array) -> Array | list[Array]:
        """Return the gradient of an argument, in the shapes and dtypes of what was given."""
        parts = hand_back(ctx, self.cut_like(name, x))
        parts = [_cast(x, dtype) for x, dtype in zip(parts, self.dtypes[name], strict=True)]
        return parts[0] if name in INITIAL else parts


def _summed_to(x: Array, shape: Shape) -> Array:
    """Return the sum of x over what an array of this shape is broadcast along."""
    if shape_of(x) == shape:
        return x
    added = x.ndim - len(shape)
    axes = [i for i in range(x.ndim) if i < added or shape[i - added] != x.shape[i]]
    xp = _namespace(x)
    return xp.reshape(xp.sum(x, axis=tuple(axes), keepdims=True), shape)


def pad(given: Mapping[str, Any]) -> tuple[dict[str, Array], Sequences]:
    """Return the arguments of a chain given as sequences as those of one given as arrays.

    Parameters
    ----------
    given : mapping
        The arguments by name: sequences, but for the initial weights.

    Returns
    -------
    padded : dict of str to array
        In the caller's library, and for tensors that take part in autograd a part of it, too.
    sequences : Sequences
        How to cut results back.
    """
    check_counts(given)
    # Initial weights are one array, whatever the others are.
    parts = {name: (x,) if name in INITIAL else x for name, x in given.items()}
    names = {
        name: [name] if name in INITIAL else [f"{name}[{i}]" for i in range(len(xs))]
        for name, xs in parts.items()
    }
    flat = {n: x for name in parts for n, x in zip(names[name], parts[name], strict=True)}
    if is_differentiated(*flat.values()):
        _check_tensors(flat)
        return _pad(parts, names, flat, None)
    ctx, ready = enter({n: detached(x) for n, x in flat.items()})
    with ctx.computing():
        return _pad(parts, names, ready, ctx.hand_back)


def _pad(
    parts: Mapping[str, Any],
    names: Mapping[str, list[str]],
    ready: Mapping[str, Array],
    hand_back: Callable[[Array], Array] | None,
) -> tuple[dict[str, Array], Sequences]:
    """Return the same from arrays by their names; without `hand_back`, autograd follows it."""
    shapes = {n: shape_of(x) for n, x in ready.items()}
    check_sequence_shapes(shapes, len(parts["log_potentials"]))
    sequences = Sequences(
        {name: [shapes[n] for n in names[name]] for name in parts},
        {name: [dtype_name(ready[n].dtype) for n in names[name]] for name in parts},
    )
    size = max(sequences.sizes)
    padded = {}
    for name in parts:
        xs = [ready[n] for n in names[name]]
        x = _padded(name, xs, size, ready["log_potentials[0]"], hand_back is None)
        if hand_back is not None and name in INITIAL and x is xs[0]:
            # Like the others it is read now, and not later.
            x = _namespace(x).asarray(x, copy=True)
        padded[name] = x if hand_back is None else hand_back(x)
    return padded, sequences


def _check_tensors(given: Mapping[str, Any]) -> None:
    """Check what `enter` does, for tensors whose values may not be readable."""
    if not all(hasattr(x, "requires_grad") for x in given.values()):
        enter({name: detached(x) for name, x in given.items()})
    xp = _namespace(next(iter(given.values())))
    check_dtypes({name: dtype_name(x.dtype) for name, x in given.items()}, xp)
    check_same("device", {name: x.device for name, x in given.items()})


def _padded(name: str, xs: list[Array], size: int, like: Array, functional: bool) -> Array:
    """Return one argument as an array: its parts padded to `size` states and put side by side.

    Autograd and transforms follow it if it is `functional`; else it is faster, and takes no more
    memory than the result.
    """
    xp = _namespace(like)
    fill = -math.inf if name.startswith("log_") else 0.0
    if name in INITIAL:
        return _grown(xp, xs[0], (size,), fill)
    own = (size, size) if name in TRANSITIONS else (size,)
    dtype = promote(dtype_name(x.dtype) for x in xs or [like])
    xs = [_cast(x, dtype) for x in xs]
    batch = np.broadcast_shapes(*(shape_of(x)[: x.ndim - len(own)] for x in xs))
    if functional and xs:
        grown = (xp.broadcast_to(_grown(xp, x, own, fill), (*batch, *own)) for x in xs)
        return xp.stack(list(grown), axis=-1 - len(own))
    shape = (*batch, len(xs), *own)
    out = xp.full(shape, fill, dtype=getattr(xp, dtype), device=like.device)
    for i, x in enumerate(xs):
        out[(..., i, *(slice(n) for n in shape_of(x)[x.ndim - len(own) :]))] = x
    return out


def _grown(xp: Any, x: Array, sizes: Shape, fill: float) -> Array:
    """Return x with its last axes filled up to some sizes."""
    for axis, n in zip(range(-len(sizes), 0), sizes, strict=True):
        shape = list(shape_of(x))
        shape[axis] = n - shape[axis]
        if shape[axis]:
            more = xp.full(tuple(shape), fill, dtype=x.dtype, device=x.device)
            x = xp.concat([x, more], axis=axis)
    return x


def _namespace(x: Array) -> Any:
    """Return an array's namespace; torch's compiler cannot look for it."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        from array_api_compat import torch as namespace

        return namespace
    return array_namespace(x)


def hand_back(ctx: Context, parts: list[Array]) -> list[Array]:
    """Return parts of a result as arrays of their own."""
    return [ctx.hand_back(ctx.xp.asarray(x, copy=True)) for x in parts]


def _cast(x: Array, dtype: str) -> Array:
    """Return x in another dtype; only arrays of mixed dtypes, promoted to one, need that."""
    if dtype_name(x.dtype) == dtype:
        return x
    xp = _namespace(x)
    return xp.astype(x, getattr(xp, dtype))


def check_own(states: Array, sizes: list[int]) -> None:
    """Raise unless each state [..., T] is one that its step has; past ends of rows it is 0."""
    xp = _namespace(states)
    wrong = states > _last(states, sizes)
    if not bool(xp.any(wrong)):
        return
    i = next(i for i in range(len(sizes)) if bool(xp.any(wrong[..., i])))
    raise ValueError(
        f"states has {int(xp.max(states[..., i]))} at step {i}, whose {sizes[i]} states are "
        f"0 to {sizes[i] - 1}"
    )


def _last(states: Array, sizes: list[int]) -> Array:
    """Return the last state of each step; 0 for steps that have none, as paths do."""
    last = [max(n - 1, 0) for n in sizes]
    return _namespace(states).asarray(last, dtype=states.dtype, device=states.device)
