"""Products of arrays in memory, outside of autograd, and checks that all products share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from arraylogchain._core.axes import check_batches, fold
from arraylogchain._core.context import Array, shape_of
from arraylogchain._inputs.arrays import prepare_inputs
from arraylogchain._products.chainexp import multiply_sequence, multiply_stack


def compute(operation: Callable[..., Any], a: Array, b: Array, budget: int) -> Any:
    """Return the result of an operation on two operands in memory, outside of autograd."""
    ctx, ready = prepare_inputs({"a": a, "b": b})
    a, b = ready["a"], ready["b"]
    with ctx.computing():
        return ctx.to_caller(operation(ctx, fold(shape_of(a), shape_of(b)), a, b, budget))


def named(matrices: Array | Sequence[Array]) -> Mapping[str, Array]:
    """Return a stack under the name ``"matrices"``, or a sequence under ``"matrices[0]"``, ..."""
    if not isinstance(matrices, (list, tuple)):
        return {"matrices": matrices}
    if not matrices:
        raise ValueError("matrices is an empty sequence; the product of none has no shape")
    return {f"matrices[{i}]": x for i, x in enumerate(matrices)}


def check_shapes(matrices: Mapping[str, Array]) -> None:
    """Raise ValueError if the shapes of matrices, as `named` returns them, do not fit."""
    if not all(hasattr(x, "shape") for x in matrices.values()):
        return  # `prepare_inputs` raises
    shapes = {name: shape_of(x) for name, x in matrices.items()}
    if "matrices" in shapes:
        shape = shapes["matrices"]
        if len(shape) < 3 or shape[-1] != shape[-2]:
            raise ValueError(
                f"matrices must be [..., n, K, K], or a sequence of arrays, got shape {shape}"
            )
        return
    for name, shape in shapes.items():
        if len(shape) < 2:
            raise ValueError(f"{name} must have at least two axes, got shape {shape}")
    for (_, before), (name, shape) in itertools.pairwise(shapes.items()):
        if before[-1] != shape[-2]:
            raise ValueError(
                f"{name} has shape {shape}, {shape[-2]} rows, and does not fit the matrix before "
                f"it, of shape {before}, {before[-1]} columns"
            )
    check_batches({name: shape[:-2] for name, shape in shapes.items()}, shapes)


def compute_chain(arguments: Mapping[str, Array], budget: int) -> Array:
    """Return the product in log space of matrices by name, see `named`, outside of autograd."""
    ctx, ready = prepare_inputs(arguments)
    with ctx.computing():
        if "matrices" in ready:
            return ctx.to_caller(multiply_stack(ctx, ready["matrices"], budget))
        return ctx.to_caller(multiply_sequence(ctx, list(ready.values()), budget))
