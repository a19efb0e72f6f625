"""The route that an operation on a chain takes, from shapes alone, and what it says of itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from arraylogchain._fold import Shape
from arraylogchain._inputs import Chain
from arraylogchain._text import amount

# Rows that share matrices, times K * K, from which on a matrix multiply over all of them is taken
# to be faster than loops over each: 64 rows of 64 states, or 8 of 181.
MANY = 1 << 18
# What has no matrix multiply in it.
PATHS = frozenset({"viterbi", "best_message", "log_weight"})
# States up to which a kernel has a thread for each.
KERNEL_STATES = 1024


class Choice(NamedTuple):
    """A route, and why it is taken."""

    route: str
    reason: str


def choose(operation: str, chain: Chain, others: str, workspace: int) -> Choice:
    """Choose the route for an operation.

    Parameters
    ----------
    others : str
        What there is beside array operations for these arrays: "loops", "kernels" or "".
    """
    size, (_, rows) = chain.num_states, chain.sizes
    if others == "kernels":
        if size <= KERNEL_STATES:
            return Choice("kernels", "the arrays are on a CUDA device")
        return Choice("arrays", f"kernels take up to {KERNEL_STATES} states")
    if not others:
        return Choice("arrays", "there are no compiled loops or kernels for these arrays")
    # Copies of a matrix: as given, converted, transposed, its logarithms.
    if 64 * size * size > workspace:
        return Choice("arrays", "what loops hold of a matrix would not fit the workspace")
    if operation in PATHS:
        return Choice("loops", "there is no matrix multiply in it")
    if rows * size * size >= MANY:
        return Choice("arrays", "matrix multiplies pay for many states and rows")
    return Choice("loops", "few states or few rows")


@dataclass(frozen=True, slots=True)
class Plan:
    """How a method of `LogChain` computes, and what bounds its memory.

    Attributes
    ----------
    operation : str
        The name of the method.
    batch : tuple of int
    steps, states : int
        T and K.
    dtype : str
    route : str
        'arrays': one state after another, all rows at once, in array operations. 'loops': loops
        over each row, compiled for the CPU. 'kernels': one state after another, on chip, by CUDA
        kernels.
    reason : str
        Why that route.
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
        rows = math.prod(self.batch)
        lines = [
            ("chain", f"{rows} rows, {self.steps} steps, {self.states} states, {self.dtype}"),
            ("route", f"{self.route}: {self.reason}"),
            ("workspace", f"at most {amount(self.workspace)} beside inputs and results"),
        ]
        return "\n".join(f"{name:<12}{text}" for name, text in lines)


def plan_chain(operation: str, chain: Chain, dtype: str, choice: Choice, workspace: int) -> Plan:
    """Return the plan for an operation on a chain, of whose arrays only shapes are read."""
    sizes = chain.batch, chain.num_steps, chain.num_states
    return Plan(operation, *sizes, dtype, choice.route, choice.reason, workspace)
