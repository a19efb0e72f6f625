"""Chains by CUDA kernels, from `steps.Chain`, as long as there is that one."""

from __future__ import annotations

from typing import Any

from arraylogchain._chain.posterior.results import Pullback
from arraylogchain._chain.steps import Chain
from arraylogchain._context import Array, Context
from arraylogchain._dispatch import implementation
from arraylogchain._inputs import chain as inputs


def has_kernel(ctx: Context, chain: Chain) -> bool:
    return ctx.kernels is not None and bool(_forward("has_kernels", ctx, chain))


def log_partition(ctx: Context, chain: Chain, workspace: int) -> Array:
    return _forward("log_partition", ctx, chain, workspace)


def forward_messages(ctx: Context, chain: Chain, workspace: int) -> Array:
    return _forward("forward_messages", ctx, chain, workspace)


def backward_messages(ctx: Context, chain: Chain, workspace: int) -> Array:
    return _forward("backward_messages", ctx, chain, workspace)


def marginals(ctx: Context, chain: Chain, workspace: int) -> Array:
    return _forward("marginals", ctx, chain, workspace)


def expected_transitions(ctx: Context, chain: Chain, workspace: int) -> Array:
    return _forward("expected_transitions", ctx, chain, workspace)


def log_partition_and_pullback(
    ctx: Context, chain: Chain, workspace: int, keep: bool
) -> tuple[Array, Pullback]:
    value, back = _forward("value_and_pullback", ctx, chain, workspace, keep)

    def pullback(cotangent: Array, wanted: frozenset[str]) -> dict[str, Array]:
        found = back(cotangent, {"initial" if name == "start" else name for name in wanted})
        return {"start" if name == "initial" else name: x for name, x in found.items()}

    return value, pullback


def _forward(operation: str, ctx: Context, chain: Chain, *more: Any) -> Any:
    given = inputs.Chain(
        batch=chain.batch,
        num_steps=chain.count,
        num_states=chain.size,
        potentials=chain.potentials,
        transitions=chain.transitions,
        initial=chain.start,
        transitions_in_logs=chain.transitions_in_logs,
        initial_in_logs=chain.start_in_logs,
        lengths=chain.lengths,
    )
    return implementation(operation, "cuda")(ctx, given, *more)
