"""What is said of how a method of `LogChain` computes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from arraylogchain._fold import Shape
from arraylogchain._text import amount


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
        'arrays': one step after another, all rows at once, in array operations. 'loops': loops
        over each row, compiled for the CPU. 'kernels': one step after another, on chip, by CUDA
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
        return (
            f"chain       {rows} rows, {self.steps} steps, {self.states} states, {self.dtype}\n"
            f"route       {self.route}: {self.reason}\n"
            f"workspace   at most {amount(self.workspace)} beside inputs and results"
        )
