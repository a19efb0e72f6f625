"""The one place that picks: operation -> implementation by backend.

An implementation is a folder: ``_array`` runs everywhere and defines what is right, ``_compiled``
has loops for the CPU, ``_cuda`` kernels. What a folder implements of products is imported from its
``products``, of chains from its ``chains``, and what these do between matrix multiplies from its
``passes``; an operation has the same name and signature in all of them. A new backend is a folder,
and its name in this table.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

from arraylogchain import _compiled
from arraylogchain._context import SINGLE, Array, Context, Precision
from arraylogchain._fold import Fold
from arraylogchain._inputs.chain import Chain, GuessesFailedError
from arraylogchain.plan import KINDS, Choice, choose, sizes_of

# Whether compiled loops may be selected; tests of the array implementation switch them off.
COMPILED: bool = True

PRODUCTS = {
    "matmul": ("array",),
    "matmul_gradients": ("array",),
    "logmatmulexp": ("array", "cuda", "cuda.tensor_cores"),
    "logmatmulexp_gradients": ("array", "cuda"),
    "logmatmulexp_tangent": ("array",),
    "logmatmulexp_second": ("array",),
    "maxplus_matmul": ("array", "cuda"),
    "maxplus_gradients": ("array", "cuda"),
    "maxplus_tangent": ("array",),
    "logsumexp_where": ("array", "compiled"),
}
CHAINS = {
    "log_partition": ("array", "compiled", "cuda"),
    "value_and_pullback": ("array", "compiled", "cuda"),
    "forward_messages": ("array", "compiled", "cuda"),
    "backward_messages": ("array", "compiled", "cuda"),
    "marginals": ("array", "compiled", "cuda"),
    "expected_transitions": ("array", "compiled", "cuda"),
    "posterior": ("array", "compiled", "cuda"),
    "filtered": ("array", "compiled", "cuda"),
    "entropy": ("array", "compiled", "cuda"),
    "viterbi": ("array", "compiled", "cuda"),
    "sample": ("array", "compiled", "cuda"),
    "log_weight": ("array", "compiled", "cuda"),
}
# What chains that go through matrix multiplies do between these.
PASSES = {"Weigher": ("array", "compiled"), "PosteriorWeigher": ("array", "compiled")}
# Of chains that are computed in pieces: what one piece hands on to the next.
LAST = {"last_message": ("array", "compiled"), "best_message": ("array", "compiled")}


# The backend that takes a plan's route.
ROUTES = {"vector": "array", "segments": "array", "compiled": "compiled", "kernel": "cuda"}


@cache
def implementation(operation: str, backend: str) -> Callable[..., Any]:
    """Return the function for an operation on a backend; imported when first asked for."""
    area = "products" if operation in PRODUCTS else "chains"
    area = "passes" if operation in PASSES else area
    module = importlib.import_module(f"arraylogchain._{backend}.{area}")
    return getattr(module, operation)  # type: ignore[no-any-return]


def for_chain(operation: str, ctx: Context, chain: Chain, workspace: int) -> Callable[..., Any]:
    """Return the function that computes an operation on a chain."""
    found = choice(operation, ctx, chain, workspace, measures=True)
    if found.route == "kernel":
        return partial(_by_kernels, operation, "cuda")
    if found.route == "segments":
        return partial(_in_segments, operation, found.segments)
    return implementation(operation, ROUTES[found.route])


def choice(
    operation: str, ctx: Context, chain: Chain, workspace: int, *, measures: bool = False
) -> Choice:
    """Return the route for an operation; with `measures`, a device may time those that it has."""
    found, on_device = backends(operation, ctx, chain), None
    # Kernels of the others compete with nothing: arrays have no matrix multiply for those.
    if "cuda" in found and operation in KINDS:
        from arraylogchain._cuda import tuning

        on_device = tuning.chain_step(operation, ctx, chain, workspace, measures=measures)
    return choose(operation, sizes_of(chain), found, workspace, on_device)


def _in_segments(operation: str, segments: int, ctx: Context, chain: Chain, *args: Any) -> Any:
    """Return what array operations compute in segments of time or, where guesses fail, without."""
    with suppress(GuessesFailedError):
        return implementation(operation, "array")(ctx, replace(chain, segments=segments), *args)
    # The error, and all memory that it holds on to, is gone.
    *_, backend = backends(operation, ctx, chain)
    if backend == "cuda":
        return _by_kernels(operation, backend, ctx, chain, *args)
    return implementation(operation, backend)(ctx, chain, *args)


def backends(operation: str, ctx: Context, chain: Chain) -> tuple[str, ...]:
    """Return which implementations of an operation can be had for a chain."""
    table = CHAINS.get(operation) or LAST[operation]
    if ctx.kernels is not None and "cuda" in table:
        has_kernels = implementation("has_kernels", "cuda")(operation, ctx, chain)
        has_kernels = has_kernels and not _have_failed(operation, ctx)
        return ("array", "cuda") if has_kernels else ("array",)
    has_loops = "compiled" in table and _has_loops(ctx)
    return ("array", "compiled") if has_loops else ("array",)


def _has_loops(ctx: Context) -> bool:
    """Tell whether compiled loops can compute with these arrays."""
    return ctx.is_numpy and COMPILED and _compiled.why_not() is None


def product(operation: str, ctx: Context, layout: Fold, *args: Any, **options: Any) -> Any:
    """Compute an operation on a product of two operands, which `layout` is the fold of."""
    has_kernels = ctx.kernels is not None and "cuda" in PRODUCTS[operation]
    if not (has_kernels and _kernels_take(layout)) or _have_failed(operation, ctx):
        return implementation(operation, "array")(ctx, layout, *args, **options)
    backend = "cuda"
    if operation == "logmatmulexp":
        from arraylogchain._cuda import tuning

        backend = tuning.product_backend(ctx, layout, *args)
    return _by_kernels(operation, backend, ctx, layout, *args, **options)


def _have_failed(operation: str, ctx: Context) -> bool:
    """Tell whether kernels were found to be wrong on this device."""
    from arraylogchain._cuda import self_check

    return self_check.has_failed(ctx.kernels, operation)


def _by_kernels(operation: str, backend: str, ctx: Context, *args: Any, **options: Any) -> Any:
    """Return what kernels compute; if they prove to be wrong, what array operations do."""
    from arraylogchain._cuda import first_use, self_check, tape

    first_use.load_for(ctx, operation, backend, *args, **options)
    function = implementation(operation, backend)
    if operation in PRODUCTS:
        found = tape.call(function, ctx, *args, **options)
    else:
        found = function(ctx, *args, **options)
    if self_check.is_trusted(ctx, operation, backend):
        return found
    return implementation(operation, "array")(ctx, *args, **options)


def for_passes(operation: str, ctx: Context, precision: Precision) -> Callable[..., Any]:
    """Return what does one of `PASSES` on states in a precision; loops are for float32."""
    has_loops = precision is SINGLE and _has_loops(ctx)
    return implementation(operation, "compiled" if has_loops else "array")


def logsumexp_where(ctx: Context, *args: Any) -> Array:
    """Compute chosen entries of a log product one by one: in a compiled loop if there is one."""
    backend = "compiled" if _has_loops(ctx) else "array"
    return implementation("logsumexp_where", backend)(ctx, *args)


def _kernels_take(layout: Fold) -> bool:
    """Tell whether kernels compute a product: one that has entries, and few enough axes."""
    from arraylogchain._cuda.launch import are_packable

    return 0 not in layout.sizes and all(
        map(are_packable, (layout.batch, layout.rows, layout.cols))
    )
