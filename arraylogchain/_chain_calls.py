"""Operations on chains, each by the implementation that the plan picks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from arraylogchain._chain import evaluate, on_device, solve, steps
from arraylogchain._context import Array, Context
from arraylogchain._inputs.chain import Chain
from arraylogchain.plan import plan_chain

# Takes a cotangent [*batch] and which of 'potentials', 'transitions' and 'initial' are wanted;
# returns their gradients by name, in the shapes and dtypes of the chain's arrays.
Pullback = Callable[[Array, frozenset[str]], dict[str, Array]]


def value_and_pullback(
    ctx: Context, chain: Chain, workspace: int, keep: bool
) -> tuple[Array, Pullback]:
    """Return the logs of the sums over all paths, [*batch], and their pullback.

    With `keep`, every state is kept for the pullback though that takes more than `workspace`, and
    not only one in about sqrt(T). Callers are within `Context.computing`.
    """
    value, pullback = _by_former_implementation("value_and_pullback", ctx, chain, workspace, keep)
    return value, pullback


def compute(operation: str, ctx: Context, chain: Chain, workspace: int) -> Array:
    """Return 'log_partition', 'forward_messages', ...: an operation that gives one array."""
    return _by_former_implementation(operation, ctx, chain, workspace)


def _by_former_implementation(
    operation: str, ctx: Context, chain: Chain, workspace: int, keep: bool = True
) -> Any:
    """Call `_chain`. TO BE DELETED: `_dispatch.implementation` finds what replaces it."""
    old = steps.Chain(
        batch=chain.batch,
        count=chain.num_steps,
        size=chain.num_states,
        transitions=chain.transitions,
        potentials=chain.potentials,
        start=chain.initial,
        transitions_in_logs=chain.transitions_in_logs,
        start_in_logs=chain.initial_in_logs,
        lengths=chain.lengths,
    )
    arrays = (chain.transitions, chain.potentials, chain.initial)
    plan = plan_chain(
        batch=chain.batch,
        count=chain.num_steps,
        size=chain.num_states,
        sizes=chain.sizes,
        one_matrix=chain.has_one_matrix,
        lengths=chain.lengths,
        read=sum(math.prod(x.shape) for x in arrays if x is not None),
        dtype=ctx.result_name,
        workspace=workspace,
        has_kernel=on_device.has_kernel(ctx, old),
    )
    if operation != "value_and_pullback":
        layout: dict[str, Any] = {}
        if operation != "log_partition":
            layout = {"trailing": (chain.num_steps, chain.num_states), "past_end": -math.inf}
        if chain.num_states == 0 or 0 in chain.batch:
            return solve.without_states(ctx, old, -math.inf, **layout)
        by_kernel = getattr(on_device, operation)
        function = getattr(evaluate, operation)
        return solve.solve(ctx, old, plan, function, by_kernel=by_kernel, **layout)
    value, raw = solve.log_partition_and_pullback(ctx, old, plan, keep)

    def pullback(cotangent: Array, wanted: frozenset[str]) -> dict[str, Array]:
        found = raw(cotangent, frozenset("start" if x == "initial" else x for x in wanted))
        return {"initial" if name == "start" else name: x for name, x in found.items()}

    return value, pullback
