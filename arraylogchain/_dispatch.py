"""The one place that picks among backends, and imports those that are not always there.

Array operations run everywhere and define what is right. Compiled loops compute with NumPy arrays,
kernels on CUDA devices; both are imported when they are first picked. What is picked is returned;
None stands for array operations, which the caller has.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from arraylogchain import _compiled
from arraylogchain._context import Context
from arraylogchain._inputs import Chain
from arraylogchain.plan import Choice, choose

# Whether compiled loops may be selected; tests of the array implementation switch them off.
COMPILED: bool = True


def choice(operation: str, ctx: Context, chain: Chain, workspace: int) -> Choice:
    """Return the route for an operation on a chain."""
    others = "kernels" if ctx.kernels is not None else "loops" if has_loops(ctx) else ""
    return choose(operation, chain, others, workspace)


def recursion(operation: str, ctx: Context, chain: Chain, workspace: int) -> Any:
    """Return the recursion that an operation on a chain takes: a `pieces.Backend`, or None."""
    route = choice(operation, ctx, chain, workspace).route
    if route == "loops":
        from arraylogchain._compiled.backend import Loops

        return Loops
    if route == "kernels":
        from arraylogchain._cuda.chains import KernelRecursion

        return KernelRecursion
    return None


def kernels(ctx: Context) -> ModuleType | None:
    """Return the products by kernels, where these run."""
    if ctx.kernels is None:
        return None
    from arraylogchain._cuda import products

    return products


def has_loops(ctx: Context) -> bool:
    """Tell whether compiled loops can compute with these arrays."""
    return ctx.is_numpy and COMPILED and _compiled.why_not() is None
