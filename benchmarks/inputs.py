"""Random inputs of the cases, as dictionaries of NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.registry import Inputs

Shape = Sequence[int]


def normal_pair(
    rng: np.random.Generator, a: Shape, b: Shape, dtype: str = "float32", sd: float = 1.0
) -> Inputs:
    """Two operands with normal entries."""
    if dtype == "bfloat16":
        import ml_dtypes  # noqa: F401  gives NumPy the name
    drawn = np.float64 if dtype == "float64" else np.float32
    return {
        name: (drawn(sd) * rng.standard_normal(shape, dtype=drawn)).astype(dtype, copy=False)
        for name, shape in (("a", a), ("b", b))
    }


def pair_and_cotangent(
    rng: np.random.Generator, a: Shape, b: Shape, dtype: str = "float32", sd: float = 1.0
) -> Inputs:
    """Two operands, and a normal cotangent g of their product."""
    batch = np.broadcast_shapes(a[:-2], b[:-2])
    g = rng.standard_normal((*batch, a[-2], b[-1])).astype(dtype)
    return {**normal_pair(rng, a, b, dtype, sd), "g": g}


def with_subscripts(rng: np.random.Generator, subscripts: str, **sizes: Any) -> Inputs:
    """Two operands, and the same product as einsum writes it."""
    return {**normal_pair(rng, **sizes), "subscripts": subscripts}


def with_subscripts_and_cotangent(
    rng: np.random.Generator, subscripts: str, **sizes: Any
) -> Inputs:
    return {**pair_and_cotangent(rng, **sizes), "subscripts": subscripts}


def banded_pair(rng: np.random.Generator, n: int, zeros: float) -> Inputs:
    """A dense left operand; on the right a band around the diagonal, -inf elsewhere."""
    inputs = normal_pair(rng, (n, n), (n, n))
    distance = np.abs(np.arange(n)[:, None] - np.arange(n))
    # A band of half-width w holds a share of 1 - (1 - w/n)^2 of the entries.
    inside = distance < n * (1 - np.sqrt(zeros))
    return {"a": inputs["a"], "b": np.where(inside, inputs["b"], np.float32(-np.inf))}


def normal_operands(rng: np.random.Generator, equation: str, size: int, batch: Shape) -> Inputs:
    """Square matrices for each operand of an equation."""
    count = equation.count(",") + 1
    shape = (*batch, size, size)
    operands = tuple(rng.standard_normal(shape, dtype=np.float32) for _ in range(count))
    return {"equation": equation, "operands": operands}


def normal_stack(rng: np.random.Generator, count: int, d: int) -> Inputs:
    """Square matrices with normal entries, to be multiplied in order."""
    return {"matrices": rng.standard_normal((count, d, d))}


def forum(rng: np.random.Generator, n: int, t: int, v: int, c: int, **more: Any) -> Inputs:
    """The forum's model: x, bulk and p0, from the distributions that the forum used."""
    inputs: Inputs = {
        "x": rng.standard_normal((n, t, v, c), dtype=np.float32) - np.float32(2),
        "bulk": rng.random((1, t, v - 1, c, c), dtype=np.float32),
        "p0": rng.random((1, t, c), dtype=np.float32),
    }
    return inputs | more


def forum_and_ones(rng: np.random.Generator, n: int, t: int, **sizes: int) -> Inputs:
    """The forum's model, and g, a cotangent of ones."""
    return {**forum(rng, n, t, **sizes), "g": np.ones((n, t), dtype=np.float32)}


def hidden_markov(
    rng: np.random.Generator,
    steps: int,
    states: int,
    batch: Shape = (),
    dtype: str = "float64",
    per_step: bool = False,
    beside: str = "",
) -> Inputs:
    """Transition probabilities, one matrix for all steps or one for each; normal log potentials.

    Beside them, where it is asked for: ``g``, a cotangent of ones, the ``seed`` of samples, or
    ``lengths`` between one and all steps.
    """
    transitions = rng.random((*[steps - 1] * per_step, states, states))
    initial = rng.random(states)
    inputs: Inputs = {
        "x": rng.standard_normal((*batch, steps, states)).astype(dtype),
        "P": (transitions / transitions.sum(axis=-1, keepdims=True)).astype(dtype),
        "p0": (initial / initial.sum()).astype(dtype),
    }
    more = {
        "g": lambda: np.ones(batch, dtype=dtype),
        "seed": lambda: int(rng.integers(2**31)),
        "lengths": lambda: rng.integers(1, steps + 1, size=batch),
    }
    return {**inputs, beside: more[beside]()} if beside else inputs


def left_to_right(rng: np.random.Generator, steps: int, states: int) -> Inputs:
    """A model whose states come one after the other, each for some steps or for none."""
    inputs = hidden_markov(rng, steps, states)
    banded = np.triu(np.tril(inputs["P"], 2))
    initial = np.zeros(states)
    initial[0] = 1
    return {
        "x": inputs["x"],
        "P": banded / banded.sum(axis=-1, keepdims=True),
        "p0": initial,
    }


def tagger(rng: np.random.Generator, n: int, steps: int, tags: int, *, gold: bool = True) -> Inputs:
    """A linear-chain CRF: log weights of everything, and the tags to be learnt."""
    inputs: Inputs = {
        "emissions": rng.standard_normal((n, steps, tags), dtype=np.float32),
        "log_P": rng.uniform(-0.1, 0.1, (tags, tags)).astype(np.float32),
        "start": rng.uniform(-0.1, 0.1, tags).astype(np.float32),
        "end": rng.uniform(-0.1, 0.1, tags).astype(np.float32),
    }
    return {**inputs, "tags": rng.integers(tags, size=(n, steps))} if gold else inputs
