"""Named tuples that public functions return, `Plan`, and checks of cotangents."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from arraylogchain._core.axes import Shape
from arraylogchain._core.context import Array, shape_of
from arraylogchain._core.text import amount


@dataclass(frozen=True, slots=True)
class Plan:
    """Route that a method of `LogChain` takes, and the bound on its memory.

    Attributes
    ----------
    operation : str
        The name of the method.
    batch : tuple of int
    steps, states : int
        T and K.
    dtype : str
    route : str
        'arrays': one step after another, all rows at once, in array operations. 'loops': loops
        over each row, compiled for the CPU. 'kernels': one step after another, on chip, by CUDA
        kernels.
    reason : str
        The reason for that route.
    workspace : int
        Bytes that bound the temporaries.
    """

    operation: str
    batch: Shape
    steps: int
    states: int
    dtype: str
    route: str
    reason: str
    workspace: int

    def __str__(self) -> str:
        sizes = {"row": math.prod(self.batch), "step": self.steps, "state": self.states}
        counts = ", ".join(f"{n} {name}{'s' * (n != 1)}" for name, n in sizes.items())
        return (
            f"chain       {counts}, {self.dtype}\n"
            f"route       {self.route}: {self.reason}\n"
            f"workspace   at most {amount(self.workspace)} beside inputs and results"
        )


class ChainPosterior(NamedTuple):
    """log Z, marginals and expected counts (None without transitions); see `LogChain.posterior`."""

    log_partition: Array
    marginals: Array
    expected_transitions: Array | None


class FilteredChain(NamedTuple):
    """State probabilities given the steps so far, and their log normalizers."""

    probabilities: Array
    log_normalizers: Array


class ChainPath(NamedTuple):
    """States of paths, and their log weights."""

    states: Array
    log_weight: Array


class MaxPlusProduct(NamedTuple):
    """Values and indices of a max-plus product; see `maxplus_matmul`."""

    values: Array
    indices: Array


class ChainGradients(NamedTuple):
    """Gradients with respect to the arrays of a chain; None if not given or not requested.

    `transitions` belongs to transitions or log_transitions, whichever the chain was given, and
    likewise `initial` and `final`.
    """

    log_potentials: Array | None
    transitions: Array | None
    initial: Array | None
    final: Array | None = None


def check_requested(requested: Collection[str]) -> None:
    """Raise ValueError if a pullback is asked for gradients that do not exist."""
    fields = ", ".join(ChainGradients._fields)
    listed = isinstance(requested, Collection) and not isinstance(requested, str)
    if not (listed and all(name in ChainGradients._fields for name in requested)):
        raise ValueError(f"wanted must be a collection of names among {fields}, got {requested!r}")


def check_cotangent(g: Array, shape: tuple[int, ...]) -> None:
    """Raise ValueError if a cotangent does not have the shape of the value."""
    if shape_of(g) != shape:
        raise ValueError(f"cotangent must have the value's shape, {shape}, got shape {shape_of(g)}")
