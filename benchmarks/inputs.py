"""Random inputs of the cases, as dictionaries of NumPy arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Inputs = dict[str, NDArray[Any]]
Shape = Sequence[int]


def normal_pair(
    rng: np.random.Generator, a: Shape, b: Shape, dtype: str = "float32", sd: float = 1.0
) -> Inputs:
    """Two operands with normal entries."""
    return {
        "a": (sd * rng.standard_normal(a)).astype(dtype),
        "b": (sd * rng.standard_normal(b)).astype(dtype),
    }


def drawn_pair(
    rng: np.random.Generator, a: Shape, b: Shape, dtype: str = "float32", sd: float = 1.0
) -> Inputs:
    """Two operands with normal entries, drawn in float32 unless in float64: large ones in less.

    Beside them ``moved``, half as large as both operands and their product together: a copy of it
    moves as many bytes as a product must.
    """
    if dtype == "bfloat16":
        import ml_dtypes  # noqa: F401  gives NumPy the name
    drawn = np.float64 if dtype == "float64" else np.float32
    pair = {}
    for name, shape in (("a", a), ("b", b)):
        x = rng.standard_normal(shape, dtype=drawn)
        x *= sd
        pair[name] = x.astype(dtype, copy=False)
    batch = np.broadcast_shapes(a[:-2], b[:-2])
    out = math.prod(batch) * a[-2] * b[-1]
    size = (math.prod(a) + math.prod(b) + out) // 2
    return {**pair, "moved": np.zeros(size, dtype=dtype)}


def pair_and_cotangent(
    rng: np.random.Generator, a: Shape, b: Shape, dtype: str = "float32", sd: float = 1.0
) -> Inputs:
    """Two operands, and g, a cotangent of their product, all with normal entries."""
    batch = np.broadcast_shapes(a[:-2], b[:-2])
    g = rng.standard_normal((*batch, a[-2], b[-1])).astype(dtype)
    return {**normal_pair(rng, a, b, dtype, sd), "g": g}


def pairs_and_cotangents(
    rng: np.random.Generator, a: Shape, b: Shape, dtype: str = "float32", sd: float = 1.0
) -> Inputs:
    """Many pairs of operands, and cotangents of their products, all with normal entries.

    Beside them ``moved``: a copy of it moves as many bytes as the products and their gradients
    must, which read operands twice and cotangents once.
    """
    given = pair_and_cotangent(rng, a, b, dtype, sd)
    size = (3 * (given["a"].size + given["b"].size) + 2 * given["g"].size) // 2
    return {**given, "moved": np.zeros(size, dtype=dtype)}


def pair_and_ones(
    rng: np.random.Generator, a: Shape, b: Shape, dtype: str = "float32", sd: float = 1.0
) -> Inputs:
    """Two matrices, and g, a cotangent of ones."""
    return {**normal_pair(rng, a, b, dtype, sd), "g": np.ones((a[-2], b[-1]), dtype=dtype)}


def banded_pair(rng: np.random.Generator, n: int, zeros: float) -> Inputs:
    """A dense left operand; on the right a band around the diagonal, -inf elsewhere.

    The `dense` matrix beside them is the right operand with nothing set to -inf.
    """
    inputs = normal_pair(rng, (n, n), (n, n))
    distance = np.abs(np.arange(n)[:, None] - np.arange(n))
    # A band of half-width w holds a share of 1 - (1 - w/n)^2 of the entries.
    half_width = n * (1 - np.sqrt(zeros))
    banded = np.where(distance < half_width, inputs["b"], np.float32(-np.inf))
    return {"a": inputs["a"], "b": banded, "dense": inputs["b"]}


def forum(rng: np.random.Generator, n: int, t: int, v: int, c: int) -> Inputs:
    """The forum's model: x, bulk and p0, from the distributions that the forum used."""
    return {
        "x": rng.standard_normal((n, t, v, c), dtype=np.float32) - np.float32(2),
        "bulk": rng.random((1, t, v - 1, c, c), dtype=np.float32),
        "p0": rng.random((1, t, c), dtype=np.float32),
    }


def forum_and_ones(rng: np.random.Generator, n: int, t: int, v: int, c: int) -> Inputs:
    """The forum's model, and g, a cotangent of ones."""
    return {**forum(rng, n, t, v, c), "g": np.ones((n, t), dtype=np.float32)}


def hidden_markov(
    rng: np.random.Generator,
    steps: int,
    states: int,
    batch: Shape = (),
    dtype: str = "float64",
    per_step: bool = False,
) -> Inputs:
    """Transition probabilities, one set for all steps or one for each, normal log potentials."""
    transitions = rng.random((steps - 1 if per_step else 1, states, states))
    initial = rng.random(states)
    return {
        "x": rng.standard_normal((*batch, steps, states)).astype(dtype),
        "P": (transitions / transitions.sum(axis=-1, keepdims=True)).astype(dtype),
        "p0": (initial / initial.sum()).astype(dtype),
    }


def left_to_right(rng: np.random.Generator, steps: int, states: int) -> Inputs:
    """A model whose states come one after the other, each for some steps or for none.

    The `dense` matrix beside it has no zeros.
    """
    inputs = hidden_markov(rng, steps, states)
    dense = inputs["P"]
    banded = np.triu(np.tril(dense, 2))
    initial = np.zeros(states)
    initial[0] = 1
    return {
        "x": inputs["x"],
        "P": banded / banded.sum(axis=-1, keepdims=True),
        "dense": dense,
        "p0": initial,
    }


def hidden_markov_and_ones(rng: np.random.Generator, **sizes: Any) -> Inputs:
    """The same as `hidden_markov`, and g, a cotangent of ones."""
    inputs = hidden_markov(rng, **sizes)
    return {**inputs, "g": np.ones(inputs["x"].shape[:-2], dtype=inputs["x"].dtype)}


def hidden_markov_and_seed(rng: np.random.Generator, **sizes: Any) -> Inputs:
    """The same as `hidden_markov`, and the seed of samples."""
    return {**hidden_markov(rng, **sizes), "seed": rng.integers(2**31, size=())}


def hidden_markov_and_lengths(rng: np.random.Generator, steps: int, **sizes: Any) -> Inputs:
    """The same as `hidden_markov`, and how many steps of each row are real: between one and all."""
    inputs = hidden_markov(rng, steps=steps, **sizes)
    return {**inputs, "lengths": rng.integers(1, steps + 1, size=sizes["batch"])}


def normal_arrays(rng: np.random.Generator, size: int) -> Inputs:
    """Two vectors of normal entries in float32, and room for another."""
    a, b = rng.standard_normal((2, size), dtype=np.float32)
    return {"a": a, "b": b, "out": np.zeros(size, dtype=np.float32)}


def normal_stack(rng: np.random.Generator, count: int, d: int, dtype: str = "float64") -> Inputs:
    """Square matrices with normal entries, to be multiplied in order."""
    return {"matrices": rng.standard_normal((count, d, d)).astype(dtype)}
