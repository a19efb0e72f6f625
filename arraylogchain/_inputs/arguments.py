"""Checks of what a chain is given: which arguments go together, and their shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from arraylogchain._arrays import is_traced
from arraylogchain._fold import Shape, check_batches

TRANSITIONS = ("transitions", "log_transitions")
INITIAL = ("initial", "log_initial")
FINAL = ("final", "log_final")
ENDS = (*INITIAL, *FINAL)
OPTIONS = (*TRANSITIONS, *ENDS, "lengths", "workspace", "workers")


def check_call(others: tuple[Any, ...], names: Iterable[str]) -> None:
    """Raise where `LogChain` gets more than log potentials by position, or unknown names."""
    if others:
        raise TypeError(
            "LogChain takes only log_potentials by position; name the others, such as transitions="
        )
    for name in names:
        if name not in OPTIONS:
            raise TypeError(f"LogChain has no argument {name}; it has {', '.join(OPTIONS)}")


def check_given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are given; raise where one is given both ways."""
    for name, other in (TRANSITIONS, INITIAL, FINAL):
        if options[name] is not None and options[other] is not None:
            raise ValueError(f"{name} and {other} are both given; give one of them")
    return {name: x for name, x in options.items() if x is not None}


def one_of(given: Mapping[str, Any], names: tuple[str, str]) -> Any:
    """Return what was given as weights or as their logarithms, or None."""
    return given.get(names[0], given.get(names[1]))


def refuse_lists(given: Mapping[str, Any]) -> None:
    for name, x in given.items():
        if isinstance(x, (list, tuple)):
            raise TypeError(
                f"{name} is a {type(x).__name__}, and LogChain takes arrays: np.asarray makes one "
                "of nested lists; sequences of different lengths are padded to [n, T, K], with "
                "lengths= their numbers of steps; pad_states pads steps of different numbers of "
                "states"
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
    for name, shape in shapes.items():
        if name in TRANSITIONS:
            is_one = len(shape) == 2
            if shape[-2:] != (K, K) or not (is_one or shape[-3:-2] in ((T - 1,), (1,))):
                raise ValueError(
                    f"{name} has shape {shape}; with log_potentials of shape {potentials} it must "
                    f"be [..., {T - 1}, {K}, {K}], or [{K}, {K}] or [..., 1, {K}, {K}] for one "
                    "matrix at every step"
                )
            batches[name] = shape[:-3]
        elif name in ENDS:
            if not shape or shape[-1] != K:
                raise ValueError(
                    f"{name} has shape {shape}; with log_potentials of shape {potentials} it must "
                    f"be [..., {K}]"
                )
            batches[name] = shape[:-1]
    if T > 1 and not shapes.keys() & set(TRANSITIONS):
        raise no_transitions(f"[{K}, {K}], [..., 1, {K}, {K}] or [..., {T - 1}, {K}, {K}]", T)
    return check_batches(batches, shapes)


_checked_before = lru_cache(maxsize=256)(_checked)


def no_transitions(expected: str, num_steps: int) -> ValueError:
    return ValueError(
        f"transitions or log_transitions must be given for a chain of {num_steps} steps: {expected}"
    )
