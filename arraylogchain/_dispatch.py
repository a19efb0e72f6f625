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


@cache
def implementation(operation: str, backend: str) -> Callable[..., Any]:
    """Return the function that computes an operation on a backend; imported when first asked for."""
    area = "products" if operation in PRODUCTS else "chains"
    module = importlib.import_module(f"arraylogchain._{backend}.{area}")
    return getattr(module, operation)  # type: ignore[no-any-return]
