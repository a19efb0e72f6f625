"""The one place that picks: operation -> implementation by backend.

An implementation is a folder: ``_array`` runs everywhere and defines what is right, ``_compiled``
has loops for the CPU, ``_cuda`` kernels. What a folder implements of products is imported from its
``products``, of chains from its ``chains``; an operation has the same name and signature in all of
them. A new backend is a folder, and its name in this table.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import array_api_compat.numpy as numpy_namespace

from arraylogchain._context import Context
from arraylogchain._inputs.chain import Chain
from arraylogchain.plan import choose, sizes_of

# Whether compiled loops may be picked; tests of the array implementation switch them off.
COMPILED: bool = True

PRODUCTS = {
    "matmul": ("array",),
    "matmul_gradients": ("array",),
    "logmatmulexp": ("array", "cuda"),
    "logmatmulexp_gradients": ("array", "cuda"),
    "maxplus_matmul": ("array", "cuda"),
    "maxplus_gradients": ("array", "cuda"),
}
CHAINS = {
    "log_partition": ("array", "compiled", "cuda"),
    "value_and_pullback": ("array", "compiled", "cuda"),
    "forward_messages": ("array", "compiled", "cuda"),
    "backward_messages": ("array", "compiled", "cuda"),
    "marginals": ("array", "compiled", "cuda"),
    "expected_transitions": ("array", "compiled", "cuda"),
    "entropy": ("array", "compiled"),
    "viterbi": ("array", "compiled"),
    "sample": ("array", "compiled"),
    "log_weight": ("array", "compiled"),
}


# The backend that takes a plan's route.
ROUTES = {"vector": "array", "segments": "array", "compiled": "compiled", "kernel": "cuda"}


@cache
def implementation(operation: str, backend: str) -> Callable[..., Any]:
    """Return the function that computes an operation on a backend, imported when it is wanted."""
    area = "products" if operation in PRODUCTS else "chains"
    module = importlib.import_module(f"arraylogchain._{backend}.{area}")
    return getattr(module, operation)  # type: ignore[no-any-return]


def for_chain(operation: str, ctx: Context, chain: Chain, workspace: int) -> Callable[..., Any]:
    """Return the function that computes an operation on a chain."""
    route = choose(operation, sizes_of(chain), backends(operation, ctx, chain), workspace).route
    return implementation(operation, ROUTES[route])


def backends(operation: str, ctx: Context, chain: Chain) -> tuple[str, ...]:
    """Return which implementations of an operation can be had for a chain."""
    table = CHAINS[operation]
    if ctx.kernels is not None and "cuda" in table:
        return (
            ("array", "cuda") if implementation("has_kernels", "cuda")(ctx, chain) else ("array",)
        )
    if ctx.xp is numpy_namespace and COMPILED and "compiled" in table and compiled_reason() is None:
        return ("array", "compiled")
    return ("array",)


@cache
def compiled_reason() -> str | None:
    """Return why there are no compiled loops, in one line; None if there are."""
    from arraylogchain import _compiled

    return _compiled.why_not()
