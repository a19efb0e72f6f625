"""Cases and contestants, and the registry of contestants and references.

An operation is a name, such as ``"marginals"``. Its contestants and its reference are registered
under that name. A contestant is a function whose parameters are named like the inputs that it
takes; it takes part in a case if it takes all inputs of the case. A first parameter ``xp`` is the
array library: NumPy, or CuPy on a CUDA device.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Inputs = dict[str, Any]
OURS = "arraylogchain"
BOTH = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to compute an operation."""

    label: str
    call: Callable[..., Any]
    library: str = "arrays"  # whose arrays it takes: arrays, numpy, torch or jax
    requires: tuple[str, ...] = ()  # modules besides the required ones
    devices: tuple[str, ...] = BOTH
    is_ours: bool = False
    is_yardstick: bool = False  # computes less, to compare the time with
    state: str = "warm"  # or "cold", or "new process"
    accepts: Callable[[Inputs], bool] = lambda inputs: True

    def takes(self, inputs: Inputs) -> bool:
        """Return whether it takes part in a case with such inputs."""
        return set(inputs) <= set(_parameters(self.call)) and self.accepts(inputs)

    def bind(self, xp: Any, put: Callable[[str, Any], Any], inputs: Inputs) -> tuple[Any, ...]:
        """Return its arguments, brought to its library."""
        names = _parameters(self.call)
        arguments = [put(self.library, inputs[name]) for name in names if name in inputs]
        return (xp, *arguments) if names[0] == "xp" else tuple(arguments)

    def missing(self) -> str | None:
        """Say which module it lacks; None if it can run."""
        name = next((n for n in self.requires if importlib.util.find_spec(n) is None), None)
        return None if name is None else f"{name} is not installed"


@dataclass(frozen=True, slots=True)
class Case:
    """One problem of an operation."""

    name: str
    title: str
    operation: str
    make: Callable[..., Inputs]
    sizes: Mapping[str, Any]
    group: str
    not_run: Mapping[str, str] = field(default_factory=dict)  # label and reason
    devices: tuple[str, ...] = ("cpu",)

    def contestants(self, device: str) -> list[Contestant]:
        """Return who takes part on a device, this library first."""
        inputs = self.inputs(quick=True)
        everyone = (c for c in CONTESTANTS[self.operation] if device in c.devices)
        return sorted((c for c in everyone if c.takes(inputs)), key=lambda c: not c.is_ours)

    def inputs(self, *, quick: bool) -> Inputs:
        """Return the same random inputs each time."""
        import numpy as np

        sizes = reduced(dict(self.sizes)) if quick else self.sizes
        return self.make(np.random.default_rng(0), **sizes)


def reduced(sizes: Any) -> Any:
    """Return small sizes for a test run: integers above 8 are reduced.

    Examples
    --------
    >>> reduced({"a": (1024, 64), "dtype": "float32", "sd": 20.0, "steps": 100_000})
    {'a': (32, 8), 'dtype': 'float32', 'sd': 20.0, 'steps': 64}
    """
    if isinstance(sizes, dict):
        return {name: reduced(each) for name, each in sizes.items()}
    if isinstance(sizes, tuple):
        return tuple(map(reduced, sizes))
    is_small = not isinstance(sizes, int) or sizes <= 8
    return sizes if is_small else min(64, max(8, sizes // 32))


# Takes a result; returns its error, and the share of its entries that are wrong.
Check = Callable[[Any], tuple[float | None, float]]
CONTESTANTS: dict[str, list[Contestant]] = defaultdict(list)
REFERENCES: dict[str, Callable[[Inputs], Check]] = {}


def contestant(operation: str, label: str, **options: Any) -> Callable[..., Any]:
    """Register a function as a contestant."""

    def register(call: Callable[..., Any]) -> Callable[..., Any]:
        CONTESTANTS[operation].append(Contestant(label, call, **options))
        return call

    return register


def reference(*operations: str) -> Callable[..., Any]:
    """Register the reference of operations."""

    def register(function: Callable[[Inputs], Check]) -> Callable[[Inputs], Check]:
        REFERENCES.update(dict.fromkeys(operations, function))
        return function

    return register


def with_parameters(*names: str) -> Callable[..., Any]:
    """Name the parameters of a function that takes any."""

    def mark(call: Callable[..., Any]) -> Callable[..., Any]:
        call.parameters = names  # type: ignore[attr-defined]
        return call

    return mark


def _parameters(call: Callable[..., Any]) -> tuple[str, ...]:
    return getattr(call, "parameters", None) or tuple(inspect.signature(call).parameters)
