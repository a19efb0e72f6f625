"""Checks of what a chain is given: which arguments go together, and their shapes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from arraylogchain._arrays import is_traced
from arraylogchain._fold import Shape, check_batches

TRANSITIONS = ("transitions", "log_transitions")
INITIAL = ("initial", "log_initial")


def check_only_one(given: Mapping[str, Any], names: tuple[str, str]) -> None:
    name, other = names
    if name in given and other in given:
        raise ValueError(f"{name} and {other} are both given; give one of them")


def refuse_lists(given: Mapping[str, Any]) -> None:
    for name, x in given.items():
        if isinstance(x, (list, tuple)):
            raise TypeError(
                f"{name} is a {type(x).__name__}, and LogChain takes arrays; pad_states makes them "
                "of lists of arrays, for steps of different numbers of states, and np.asarray of "
                "nested lists"
            )


def check_shapes(shapes: Mapping[str, Shape]) -> Shape:
    """Check the shapes of a chain's arrays by name; return the broadcast batch axes."""
    # torch's compiler looks through a cache, and warns of it.
    check = _checked if is_traced() else _checked_before
    return check(tuple(shapes.items()))


def _checked(given: tuple[tuple[str, Shape], ...]) -> Shape:
    shapes = dict(given)
    potentials = shapes["log_potentials"]
    if len(potentials) < 2 or potentials[-2] == 0:
        raise ValueError(
            f"log_potentials has shape {potentials}; it must be [..., T, K] with at least one step"
        )
    T, K = potentials[-2:]
    batches = {"log_potentials": potentials[:-2]}
    for name in TRANSITIONS:
        if name in shapes:
            shape = shapes[name]
            if len(shape) < 3 or shape[-2:] != (K, K) or shape[-3] not in (T - 1, 1):
                raise ValueError(
                    f"{name} has shape {shape}; with log_potentials of shape {potentials} it must "
                    f"be [..., {T - 1}, {K}, {K}], or [..., 1, {K}, {K}] for one "
                    "matrix at every step"
                )
            batches[name] = shape[:-3]
    if T > 1 and len(batches) == 1:
        raise no_transitions(f"[..., {T - 1}, {K}, {K}] or [..., 1, {K}, {K}]", T)
    for name in INITIAL:
        if name in shapes:
            shape = shapes[name]
            if not shape or shape[-1] != K:
                raise ValueError(
                    f"{name} has shape {shape}; with log_potentials of shape {potentials} it must "
                    f"be [..., {K}]"
                )
            batches[name] = shape[:-1]
    return check_batches(batches, shapes)


_checked_before = lru_cache(maxsize=256)(_checked)


def no_transitions(expected: str, num_steps: int) -> ValueError:
    return ValueError(
        f"transitions or log_transitions must be given for a chain of {num_steps} steps: {expected}"
    )
