"""Checks of what a chain is given: which arguments go together, and their shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from arraylogchain._context import Array
from arraylogchain._fold import Shape, check_batches

TRANSITIONS = ("transitions", "log_transitions")
INITIAL = ("initial", "log_initial")


def check_only_one(given: Mapping[str, Any], names: tuple[str, str]) -> None:
    name, other = names
    if name in given and other in given:
        raise ValueError(f"{name} and {other} are both given; give one of them")


def are_sequences(given: Mapping[str, Any]) -> bool:
    """Tell whether a chain is given as sequences of arrays; raise if only a part of it is."""
    per_step = [name for name in ("log_potentials", *TRANSITIONS) if name in given]
    kinds = {name: isinstance(given[name], (list, tuple)) for name in per_step}
    if all(kinds.values()) or not any(kinds.values()):
        return kinds["log_potentials"]
    what = " and ".join(f"{name} is of type {type(given[name]).__name__}" for name in per_step)
    raise TypeError(
        f"{what}; either both must be arrays, or both sequences of arrays: log_potentials one "
        "array [..., K_i] for each step, and transitions one [..., K_i, K_{i+1}] between each two; "
        "np.asarray(...) makes an array of nested lists"
    )


def check_shapes(shapes: Mapping[str, Shape]) -> Shape:
    """Check the shapes of a chain's arrays by name; return the broadcast batch axes."""
    potentials = shapes["log_potentials"]
    if len(potentials) < 2 or potentials[-2] == 0:
        raise ValueError(
            f"log_potentials has shape {potentials}; it must be [..., T, K] with at least one step"
        )
    count, size = potentials[-2:]
    batches = {"log_potentials": potentials[:-2]}
    for name in TRANSITIONS:
        if name in shapes:
            shape = shapes[name]
            if len(shape) < 3 or shape[-2:] != (size, size) or shape[-3] not in (count - 1, 1):
                raise ValueError(
                    f"{name} has shape {shape}; with log_potentials of shape {potentials} it must "
                    f"be [..., {count - 1}, {size}, {size}], or [..., 1, {size}, {size}] for one "
                    "matrix at every step"
                )
            batches[name] = shape[:-3]
    if count > 1 and len(batches) == 1:
        raise _no_transitions(
            f"[..., {count - 1}, {size}, {size}] or [..., 1, {size}, {size}]", count
        )
    for name in INITIAL:
        if name in shapes:
            shape = shapes[name]
            if not shape or shape[-1] != size:
                raise ValueError(
                    f"{name} has shape {shape}; with log_potentials of shape {potentials} it must "
                    f"be [..., {size}]"
                )
            batches[name] = shape[:-1]
    return check_batches(batches, shapes)


def _no_transitions(shape: str, count: int) -> ValueError:
    return ValueError(
        f"transitions or log_transitions must be given for a chain of {count} steps: {shape}"
    )


def check_counts(given: Mapping[str, Sequence[Array] | Array]) -> None:
    """Check how many arrays the sequences of a chain have."""
    count = len(given["log_potentials"])
    if count == 0:
        raise ValueError(
            "log_potentials is an empty sequence; it must have an array for each step, and at "
            "least one step"
        )
    found = {name: len(given[name]) for name in TRANSITIONS if name in given}
    if count > 1 and not found:
        raise _no_transitions(f"a sequence of {count - 1} arrays [..., K_i, K_{{i+1}}]", count)
    for name, number in found.items():
        if number != count - 1:
            raise ValueError(
                f"{name} is a sequence of length {number}; with {count} arrays of log_potentials "
                f"it must have length {count - 1}, one array between each two steps"
            )


def check_sequence_shapes(shapes: Mapping[str, Shape], count: int) -> None:
    """Check the shapes of the arrays of a chain's sequences, such as "transitions[3]"."""
    sizes = []
    for i in range(count):
        name = f"log_potentials[{i}]"
        shape = shapes[name]
        if not shape:
            raise ValueError(f"{name} has shape {shape}; it must be [..., K_{i}]")
        sizes.append(shape[-1])
    batch: Shape = ()
    for name, shape in shapes.items():
        own, _, place = name.rstrip("]").partition("[")
        own_sizes: Shape
        if own == "log_potentials":
            own_sizes = (sizes[int(place)],)
        elif own in TRANSITIONS:
            own_sizes = (sizes[int(place)], sizes[int(place) + 1])
        else:
            own_sizes = (sizes[0],)
        batch = _check_sizes(name, shape, own_sizes, sizes, batch)


def _check_sizes(name: str, shape: Shape, own: Shape, sizes: list[int], batch: Shape) -> Shape:
    """Check one array's last axes; return its batch axes broadcast with those before it."""
    before = len(shape) - len(own)
    if before < 0 or shape[before:] != own:
        expected = ", ".join(map(str, own))
        place = 0 if len(own) == 1 else int(name.partition("[")[2].rstrip("]"))
        steps = " and ".join(
            f"log_potentials[{place + i}] of {n} states" for i, n in enumerate(own)
        )
        raise ValueError(f"{name} has shape {shape}; with {steps} it must be [..., {expected}]")
    try:
        return np.broadcast_shapes(batch, shape[:before])
    except ValueError:
        raise ValueError(
            f"{name} has shape {shape}; its batch axes {shape[:before]} do not broadcast with "
            f"{batch}, those of the arrays before it"
        ) from None
