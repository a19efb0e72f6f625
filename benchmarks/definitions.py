"""What a case is: a maker of inputs with its sizes, contestants, and a reference.

A contestant is a function, the inputs that it takes, and how they are brought to it. The first
contestant of a case is this library. A yardstick does not solve the case: its time is there to
compare with, such as that of the bare matrix multiply that cannot be undercut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks import contestants as run
from benchmarks import dynamax_contestants as dynamax
from benchmarks.inputs import Inputs
from benchmarks.references import AnyReference

Sizes = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to compute a case."""

    label: str
    call: Callable[..., Any]
    takes: tuple[str, ...]
    convert: Callable[[Any], Any] = lambda x: x  # not timed
    requires: tuple[str, ...] = ()  # modules besides the required ones
    is_yardstick: bool = False  # computes something else, to compare the time with
    is_ours: bool = False  # this library in another way than the first contestant
    threads: int | None = None  # instead of as many as there are
    temporaries: Callable[..., int] | None = None  # for an allocator that cannot be traced

    @property
    def library(self) -> str:
        """The array library that it computes with."""
        return next((name for name in ("torch", "cupy") if name in self.requires), "numpy")

    def arguments(self, inputs: Inputs) -> tuple[Any, ...]:
        return tuple(self.convert(inputs[name]) for name in self.takes)

    def run(self, inputs: Inputs) -> Any:
        return self.call(*self.arguments(inputs))


@dataclass(frozen=True, slots=True)
class Case:
    """One problem, and who solves it."""

    name: str
    title: str
    make: Callable[..., Inputs]
    sizes: Sizes
    quick_sizes: Sizes  # to show that everything runs
    contestants: tuple[Contestant, ...]
    reference: Callable[[Inputs], AnyReference]
    not_run: Mapping[str, str] = field(default_factory=dict)  # label and reason
    has_gradients: bool = False
    has_paths: bool = False  # of what is inferred about paths: their own table in README
    has_capacity: bool = False  # how large it may be, instead of how long it takes


OURS = "arraylogchain"
IN_TORCH = f"{OURS}, torch"
PLAIN = "exp, matmul, log in NumPy"
NUMPY_LSE = "logsumexp in NumPy, blocks"
SCIPY_LSE = "logsumexp of scipy, blocks"
SEMIRING = "torch-semiring-einsum"
FORUM = "forum's code in torch"

# --- options of contestants that need more than the required modules ------------------------------

TORCH: dict[str, Any] = {"convert": run.to_torch, "requires": ("torch",)}
WITH_SEMIRING = TORCH | {"requires": ("torch", "torch_semiring_einsum")}
HMMLEARN: dict[str, Any] = {"requires": ("hmmlearn",), "convert": run.to_float64}


def in_dynamax(call: dynamax.Dynamax, takes: tuple[str, ...]) -> Contestant:
    return Contestant(
        "dynamax, compiled",
        call,
        takes,
        convert=dynamax.to_jax,
        requires=("dynamax", "jax"),
        temporaries=call.temporaries,
    )


def in_one_thread(call: Callable[..., Any], takes: tuple[str, ...]) -> Contestant:
    """Return this library with one thread, to compare its time with."""
    return Contestant(
        f"{OURS}, one thread",
        call,
        takes,
        requires=("threadpoolctl",),
        is_yardstick=True,
        threads=1,
    )
