"""Lists of arrays, one for each step or between two steps, as `pad_states` takes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from arraylogchain._arrays import dtype_name, promote
from arraylogchain._context import Array, shape_of
from arraylogchain._fold import Shape
from arraylogchain._inputs.arguments import ENDS, FINAL, TRANSITIONS, no_transitions

# By the argument's name; initial and final weights are a single part.
Parts = Mapping[str, Sequence[Array]]


def name_of(argument: str, i: int) -> str:
    return argument if argument in ENDS else f"{argument}[{i}]"


def check_parts(given: Mapping[str, Any]) -> Parts:
    """Return the arguments as lists; raise unless each has the right number of parts."""
    parts = {name: [x] if name in ENDS else _as_list(name, x) for name, x in given.items()}
    num_steps = len(parts["log_potentials"])
    if num_steps == 0:
        raise ValueError("log_potentials is empty; it must have an array [..., K_i] for each step")
    own = parts.keys() & set(TRANSITIONS)
    if num_steps > 1 and not own:
        raise no_transitions(f"a list of {num_steps - 1} arrays [..., K_i, K_{{i+1}}]", num_steps)
    for name in own:
        if len(parts[name]) != num_steps - 1:
            raise ValueError(
                f"{name} has length {len(parts[name])}; with {num_steps} arrays of log_potentials "
                f"it must have length {num_steps - 1}, one array between each two steps"
            )
    return parts


def _as_list(name: str, x: Any) -> list[Array]:
    if isinstance(x, (list, tuple)):
        return list(x)
    shape = "[..., K_i], one for each step"
    if name in TRANSITIONS:
        shape = "[..., K_i, K_{i+1}], one between each two steps"
    raise TypeError(f"{name} is of type {type(x).__name__}; it must be a list of arrays {shape}")


def pad(xp: Any, parts: Parts) -> tuple[Array | None, ...]:
    """Return the fields of `PaddedStates`, of arrays whose library and dtypes have been checked."""
    sizes = _check_shapes(parts)
    like = parts["log_potentials"][0]
    core = (max(sizes),)
    transitions = initial = final = None
    for name, xs in parts.items():
        fill = -math.inf if name.startswith("log_") else 0.0
        if name in TRANSITIONS:
            transitions = _stack(xp, xs, core * 2, fill, like)
        elif name in FINAL:
            final = _stack(xp, xs, core, fill, like)[..., 0, :]
        elif name in ENDS:
            initial = _stack(xp, xs, core, fill, like)[..., 0, :]
    states = xp.arange(max(sizes), device=like.device)
    mask = states < xp.asarray(sizes, dtype=states.dtype, device=like.device)[:, None]
    potentials = _stack(xp, parts["log_potentials"], core, -math.inf, like)
    return potentials, transitions, initial, final, mask


def _check_shapes(parts: Parts) -> list[int]:
    """Return the number of states of each step; raise where shapes do not fit."""
    sizes = []
    for i, x in enumerate(parts["log_potentials"]):
        shape = shape_of(x)
        if not shape:
            raise ValueError(f"log_potentials[{i}] has shape {shape}; it must be [..., K_{i}]")
        sizes.append(shape[-1])
    batch: Shape = ()
    for name, xs in parts.items():
        for i, x in enumerate(xs):
            steps = (i, i + 1) if name in TRANSITIONS else (i,)
            steps = (len(sizes) - 1,) if name in FINAL else steps
            batch = _check_shape(name_of(name, i), shape_of(x), steps, sizes, batch)
    return sizes


def _check_shape(
    name: str, shape: Shape, steps: tuple[int, ...], sizes: Sequence[int], batch: Shape
) -> Shape:
    """Check a part between some steps; return its batch axes broadcast with those before it."""
    core = tuple(sizes[i] for i in steps)
    split = len(shape) - len(core)
    if split < 0 or shape[split:] != core:
        expected = ", ".join(map(str, core))
        others = " and ".join(f"log_potentials[{i}] of {sizes[i]} states" for i in steps)
        raise ValueError(f"{name} has shape {shape}; with {others} it must be [..., {expected}]")
    try:
        return np.broadcast_shapes(batch, shape[:split])
    except ValueError:
        raise ValueError(
            f"{name} has shape {shape}; its batch axes {shape[:split]} do not broadcast with "
            f"{batch}, those of the arrays before it"
        ) from None


def _stack(xp: Any, xs: Sequence[Array], core: Shape, fill: float, like: Array) -> Array:
    """Return arrays with their last axes filled up to the sizes of `core`, put side by side."""
    if not xs:
        return xp.zeros((0, *core), dtype=like.dtype, device=like.device)
    dtype = getattr(xp, promote(dtype_name(x.dtype) for x in xs))
    batch = np.broadcast_shapes(*(shape_of(x)[: x.ndim - len(core)] for x in xs))
    filled = (_fill_up(xp, xp.astype(x, dtype, copy=False), core, fill) for x in xs)
    return xp.stack([xp.broadcast_to(x, (*batch, *core)) for x in filled], axis=-1 - len(core))


def _fill_up(xp: Any, x: Array, core: Shape, fill: float) -> Array:
    for axis, size in zip(range(-len(core), 0), core, strict=True):
        shape = list(shape_of(x))
        shape[axis] = size - shape[axis]
        if shape[axis]:
            more = xp.full(tuple(shape), fill, dtype=x.dtype, device=x.device)
            x = xp.concat([x, more], axis=axis)
    return x
