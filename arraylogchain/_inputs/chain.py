"""A chain as implementations see it: checked arrays, and how they are to be read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from arraylogchain._arrays import detached, enter
from arraylogchain._context import Array, Context, shape_of
from arraylogchain._fold import Shape
from arraylogchain._inputs.arguments import FINAL, INITIAL, TRANSITIONS, check_shapes, one_of
from arraylogchain._inputs.lengths import check_lengths

# The arrays of a chain, in the order in which gradients come.
PARTS = ("potentials", "transitions", "initial", "final")


class GuessesFailedError(Exception):
    """Segments of a chain's time cannot be computed side by side."""


@dataclass(slots=True, eq=False)  # frozen ones take three times as long to make
class Chain:
    """Arrays of whole chains, checked, with batch axes as given; None stands for all ones.

    Attributes
    ----------
    batch : tuple of int
        The batch axes of the arrays, broadcast together.
    num_steps, num_states : int
        T and K.
    potentials : array [..., T, K]
        Logarithms.
    transitions : array [..., 1 or T - 1, K, K] or None
        None only if there is one step.
    initial, final : array [..., K] or None
    transitions_in_logs, initial_in_logs, final_in_logs : bool
        Whether those arrays hold logarithms.
    lengths : numpy.ndarray [...] or None
        How many steps of each row are real, T at most; what lies past them is never read.
    segments : int
        How many segments of time are computed side by side; array operations raise
        GuessesFailedError where that cannot be done.
    """

    batch: Shape
    num_steps: int
    num_states: int
    potentials: Array
    transitions: Array | None = None
    initial: Array | None = None
    final: Array | None = None
    transitions_in_logs: bool = False
    initial_in_logs: bool = False
    final_in_logs: bool = False
    lengths: np.ndarray | None = None
    segments: int = 1

    @property
    def has_one_matrix(self) -> bool:
        """Whether one matrix stands for every step."""
        return self.transitions is not None and int(self.transitions.shape[-3]) == 1

    @property
    def num_rows(self) -> int:
        return math.prod(self.batch)

    @property
    def group_axes(self) -> Shape:
        """Batch axes along which the transition matrices differ."""
        if self.transitions is None:
            return ()
        own = self.transitions.shape[:-3]
        skipped = len(self.batch) - len(own)
        return tuple(skipped + axis for axis, n in enumerate(own) if n > 1)

    @property
    def row_axes(self) -> Shape:
        """The other batch axes: rows along them share the matrices of their group."""
        groups = self.group_axes
        return tuple(axis for axis in range(len(self.batch)) if axis not in groups)

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of groups and of rows in each."""
        own = () if self.transitions is None else self.transitions.shape[:-3]
        groups = math.prod(n for n in own if n > 1)
        return groups, math.prod(self.batch) // groups


def enter_chain(arrays: Mapping[str, Array], lengths: Any) -> tuple[Context, Chain]:
    """Return the context and the chain of `LogChain`'s arguments by name; not part of autograd."""
    ctx, given = enter({name: detached(x) for name, x in arrays.items()})
    return ctx, make_chain(given, lengths)


def make_chain(given: Mapping[str, Array], lengths: Any) -> Chain:
    """Return the chain of arrays by the names of `LogChain`'s arguments."""
    shapes = {name: shape_of(x) for name, x in given.items()}
    batch, (num_steps, num_states) = check_shapes(shapes), shapes["log_potentials"][-2:]
    transitions = one_of(given, TRANSITIONS)
    if transitions is not None and len(transitions.shape) == 2:
        transitions = transitions[None, ...]
    return Chain(
        batch=batch,
        num_steps=num_steps,
        num_states=num_states,
        potentials=given["log_potentials"],
        transitions=transitions,
        initial=one_of(given, INITIAL),
        final=one_of(given, FINAL),
        transitions_in_logs="log_transitions" in given,
        initial_in_logs="log_initial" in given,
        final_in_logs="log_final" in given,
        lengths=None if lengths is None else check_lengths(lengths, batch, num_steps),
    )
